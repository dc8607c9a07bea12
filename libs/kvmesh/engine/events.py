"""What goes into the engine core and what comes out: requests, events, load. Data only.

Events of one key come in this order: Admitted?, (PromptScored | Tokens | PrefillComputed)*, then exactly one Ended.
A REMOTE request that was preempted may be Admitted again (`resumed_token_ids` is then set).
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvmesh.engine.runner import SamplingParams, TokenLogprobs
from kvmesh.errors import KvmeshError
from kvmesh.grammar.match import Match


class RequestKey(NamedTuple):
    """Names one placement of a request on this engine."""

    request_id: str
    attempt: int = 0


class Mode(enum.Enum):
    """Where a request's prompt is computed and what is done with it here."""

    LOCAL = "local"  # prefill and decode here
    REMOTE = "remote"  # decode here; KV of the prompt but its last token comes from elsewhere
    PREFILL_ONLY = "prefill_only"  # compute KV and keep the pages until they are sent


class FinishReason(enum.Enum):
    """Why a choice ended."""

    STOP = "stop"  # end-of-sequence or a stop token
    LENGTH = "length"  # max_tokens or the context


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request for the core.

    token_ids: prompt, and for a healed request the output so far: token_ids[prompt_len:] is replayed as output (only
    with n = 1, and without scoring the prompt again). PREFILL_ONLY: the prompt WITHOUT its last token; `sampling` and
    `n` are ignored.
    n: choices run; they are numbered first_choice, first_choice + 1, … (the number enters the noise).
    sampling.max_tokens counts healed tokens and is clipped to the context.
    seed_bytes: root of the prefix-cache hash chain (`kvmesh.kv.hashing.request_seed`).
    priority: higher first. arrival, ttft_deadline, total_deadline: on the core's monotonic clock (time.monotonic).
    ttft_deadline holds until the first token (PREFILL_ONLY: until the prompt is computed), total_deadline until Ended.
    local_remainder: REMOTE only: when at most so many prompt tokens are not in the prefix cache, the core computes them
    here without asking (Admitted.awaiting is then False).
    grammar: what the output must match, with the healed output taken already; each choice goes on from a copy.
    """

    key: RequestKey
    token_ids: list[int]
    prompt_len: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    mode: Mode = Mode.LOCAL
    seed_bytes: bytes = b""
    priority: int = 0
    arrival: float = field(default_factory=time.monotonic)
    want_cumulative_logprob: bool = False
    ttft_deadline: float | None = None
    total_deadline: float | None = None
    first_choice: int = 0
    local_remainder: int = 0
    grammar: Match | None = None


@dataclass(slots=True)
class Admitted:
    """Pages are allocated; position p of the sequence lives in pages[p // page_size].

    cached_tokens: whole blocks found in the prefix cache, first_block of them: pages[:first_block] hold KV already.
    num_tokens: tokens the sequence has now (REMOTE: KV of num_tokens - 1 of them is wanted from elsewhere, that is
    pages[first_block : ceil((num_tokens - 1) / page_size)]; PREFILL_ONLY: KV of all num_tokens is computed here).
    awaiting: the core does nothing more until the service says how to go on (REMOTE: expose … kv_ready, or
    prefill_here; PREFILL_ONLY: start_prefill). False: it goes on by itself (LOCAL, or nothing worth fetching).
    A PREFILL_ONLY key that was admitted MUST get `release(key)` once, whatever happens: its pages stay held until then,
    even after Ended, because the sidecar may still read them.
    resumed_token_ids: set on a second admission after preemption: all tokens, output so far included.
    """

    key: RequestKey
    pages: tuple[int, ...]
    cached_tokens: int
    first_block: int
    num_tokens: int
    awaiting: bool
    resumed_token_ids: tuple[int, ...] | None = None


@dataclass(slots=True)
class Tokens:
    """New output tokens of one choice.

    first_position: output index of token_ids[0] in this choice, healed tokens counted. token_ids may be empty when only
    the end is told (a healed request that was already complete). logprobs: empty, or one per token if asked for.
    stop_token_id: the stop or end token, where one ended the choice; it is the last of token_ids, no part of the text.
    cumulative_logprob: with finish_reason, if asked for: sum over the tokens sampled here.
    """

    key: RequestKey
    choice: int
    first_position: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    cumulative_logprob: float | None = None


@dataclass(slots=True)
class PromptScored:
    """Log-probabilities of prompt tokens 1 … prompt_len - 1, once, before the first Tokens."""

    key: RequestKey
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(slots=True)
class PrefillComputed:
    """PREFILL_ONLY: every token's KV is in the pages. chunks: steps it took (0 when all was cached)."""

    key: RequestKey
    chunks: int
    compute_ms: float


@dataclass(frozen=True, slots=True)
class Usage:
    """Totals of a request on this engine. completion_tokens: over its choices, healed tokens not counted."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    preemptions: int
    ttft_ms: float | None = None


@dataclass(slots=True)
class Ended:
    """The one terminal event of a key: error None is success. PREFILL_ONLY succeeds when it is released computed."""

    key: RequestKey
    usage: Usage
    error: KvmeshError | None = None


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """What the engine carries right now; fields as in kvmesh.v1.WorkerLoad.

    running: choices in the batch. waiting: requests accepted and not admitted, and preempted choices. transferring:
    requests whose pages are allocated and wait for the service (REMOTE not ready, PREFILL_ONLY not started or held).
    queued_tokens: tokens still to be computed for prompts, waiting and running. inflight_tokens: tokens held in KV by
    running sequences. free_pages includes what the prefix cache would give up. free_slots: choices that could still
    enter the batch. stalled: work to do and no progress for a while.
    """

    free_pages: int
    total_pages: int
    running: int
    waiting: int
    transferring: int
    queued_tokens: int
    inflight_tokens: int
    step: int
    stalled: bool = False
    accepting: bool = True
    free_slots: int = 0

    def with_now(self, pending: int, stalled: bool, accepting: bool) -> LoadSnapshot:
        """The same with `pending` more waiting requests and what is known only at this moment."""
        if not pending and stalled == self.stalled and accepting == self.accepting:
            return self
        return replace(self, waiting=self.waiting + pending, stalled=stalled, accepting=accepting)


@dataclass(slots=True)
class StepDone:
    """Last event of a batch of events: the load after it. Also sent when load changed without a step."""

    load: LoadSnapshot


CoreEvent = Admitted | Tokens | PromptScored | PrefillComputed | Ended | StepDone


@dataclass(slots=True)
class Counters:
    """Totals since start, written by the core thread alone; reading them from another thread is fine."""

    steps: int = 0
    step_seconds: float = 0.0
    schedule_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    requests_ok: int = 0
    requests_failed: int = 0
    step_errors: int = 0
    ring_records: int = 0
    ring_full: int = 0
    stalls: int = 0
