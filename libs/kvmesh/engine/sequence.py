"""A request and its choices as the scheduler sees them: state, tokens, block table. No policy here."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from kvmesh.engine.events import EngineRequest, Mode, RequestKey, Usage
from kvmesh.engine.runner import Int32Array, SampleInput, SamplingParams, TokenLogprobs
from kvmesh.errors import Internal

_NONE: Final[frozenset[int]] = frozenset()


class SeqState(enum.Enum):
    """Every state a sequence can be in; tests abort in each of them."""

    WAITING = "waiting"  # in the queue, holds nothing
    PREEMPTED = "preempted"  # in the queue again, to be recomputed
    FORKING = "forking"  # a further choice whose prompt the first one computes
    AWAITING_KV = "awaiting_kv"  # REMOTE: pages allocated, nobody writes them
    EXPOSED = "exposed"  # REMOTE: a descriptor with its pages is out
    DRAINING = "draining"  # REMOTE: that descriptor is being taken back
    AWAITING_START = "awaiting_start"  # PREFILL_ONLY: pages allocated, no transfer yet
    PREFILL = "prefill"  # in the batch, prompt (or what was preempted) not whole
    DECODE = "decode"  # in the batch, a token a step
    HELD = "held"  # PREFILL_ONLY: computed, pages may still be read by the sidecar
    ENDED_DRAINING = "ended_draining"  # told as ended; a peer may still write its pages
    ENDED_HELD = "ended_held"  # told as ended; the sidecar may still read its pages
    ENDED = "ended"  # holds nothing


_S = SeqState
TRANSITIONS: Final[Mapping[SeqState, frozenset[SeqState]]] = {
    _S.WAITING: frozenset({_S.AWAITING_KV, _S.AWAITING_START, _S.PREFILL, _S.ENDED}),
    _S.PREEMPTED: frozenset({_S.AWAITING_KV, _S.PREFILL, _S.ENDED}),
    _S.FORKING: frozenset({_S.DECODE, _S.ENDED}),
    _S.AWAITING_KV: frozenset({_S.EXPOSED, _S.PREFILL, _S.ENDED}),
    _S.EXPOSED: frozenset({_S.PREFILL, _S.DRAINING, _S.AWAITING_KV, _S.ENDED_DRAINING}),
    _S.DRAINING: frozenset({_S.AWAITING_KV, _S.PREEMPTED, _S.ENDED_DRAINING}),
    _S.AWAITING_START: frozenset({_S.PREFILL, _S.HELD, _S.ENDED_HELD, _S.ENDED}),
    _S.PREFILL: frozenset({_S.DECODE, _S.PREEMPTED, _S.HELD, _S.ENDED_HELD, _S.ENDED}),
    _S.DECODE: frozenset({_S.PREEMPTED, _S.ENDED}),
    _S.HELD: frozenset({_S.ENDED_HELD, _S.ENDED}),
    _S.ENDED_DRAINING: frozenset({_S.ENDED}),
    _S.ENDED_HELD: frozenset({_S.ENDED}),
    _S.ENDED: frozenset(),
}
# Tuples: `in` compares identities, where a set would call Enum's slow hash.
QUEUED: Final = (_S.WAITING, _S.PREEMPTED)
IN_BATCH: Final = (_S.DECODE, _S.PREFILL)
OVER: Final = (_S.ENDED, _S.ENDED_DRAINING, _S.ENDED_HELD)
# Its pages are out of the core's hands until the service says so.
WITH_SERVICE: Final = (_S.AWAITING_KV, _S.EXPOSED, _S.DRAINING, _S.AWAITING_START, _S.HELD)

Rank = tuple[int, float, int]


class Planned(NamedTuple):
    """One slice of the step being run: `samplers` are the choices that get a token from it."""

    choice: Choice
    num_tokens: int
    samplers: Sequence[Choice]


class Stamp(NamedTuple):
    """How page pool and prefix cache stand."""

    available: int
    free: int
    stored_blocks: int
    admissions: int


class Request:
    """What the choices of one submitted request share."""

    __slots__ = (
        "admitted_at", "banned", "cached_tokens", "chunks", "compute_s", "ended", "first_token_at", "forked",
        "limit_len", "live_generations", "options", "preemptions", "prefill_done_at", "prompt", "sampling", "scores",
        "scoring", "seqs", "stops", "submitted_at", "tail_len",
    )  # fmt: skip

    def __init__(
        self, options: EngineRequest, first_seq_id: int, limit_len: int, eos: frozenset[int], now: float
    ) -> None:
        """limit_len: tokens (prompt and output) at which a choice ends with `length`."""
        sampling = options.sampling
        self.options = options
        self.sampling: SamplingParams = sampling
        if options.want_cumulative_logprob and not sampling.want_logprobs:
            self.sampling = dataclasses.replace(sampling, want_logprobs=True)
        self.stops = sampling.stop_token_ids | (_NONE if sampling.ignore_eos else eos)
        self.banned = self.stops if sampling.min_tokens else _NONE
        self.limit_len = limit_len
        self.prompt: list[int] = options.token_ids[: options.prompt_len]
        self.tail_len = len(options.token_ids) - options.prompt_len
        choices = 1 if options.mode is Mode.PREFILL_ONLY else options.n
        self.seqs = [
            Choice(self, first_seq_id + index, options.first_choice + index, options.token_ids[options.prompt_len :])
            for index in range(choices)
        ]
        for fork in self.seqs[1:]:
            fork.state = SeqState.FORKING
        self.forked = choices == 1
        # A healed request has had its prompt scored: that came before its first token.
        self.scoring = sampling.prompt_logprobs is not None and options.mode is Mode.LOCAL and not self.tail_len
        self.scores: list[TokenLogprobs] = []
        self.ended = False
        # Generations of its root's pages that are not settled; with PREFILL_ONLY the transfer id.
        self.live_generations: set[int] = set()
        self.cached_tokens = 0
        self.preemptions = 0
        self.chunks = 0
        self.compute_s = 0.0
        self.submitted_at = now
        self.admitted_at: float | None = None
        self.prefill_done_at: float | None = None
        self.first_token_at: float | None = None

    @property
    def key(self) -> RequestKey:
        return self.options.key

    @property
    def root(self) -> Choice:
        """The choice that computes the prompt for all."""
        return self.seqs[0]

    @property
    def waits_for_first_token(self) -> bool:
        """Whether the limit on time to first token still applies."""
        if self.options.mode is Mode.PREFILL_ONLY:
            return self.prefill_done_at is None
        return self.first_token_at is None

    @property
    def first_token_in_flight(self) -> bool:
        """Whether a step in flight computes what that limit is about."""
        root = self.root
        return root.pending > 0 or (root.ahead > 0 and root.computed + root.ahead == root.total_len)

    def usage(self, now: float) -> Usage:
        admitted = self.admitted_at if self.admitted_at is not None else now
        prefilled = self.prefill_done_at if self.prefill_done_at is not None else now
        first = self.first_token_at
        return Usage(
            prompt_tokens=len(self.prompt),
            completion_tokens=sum(len(seq.output) - self.tail_len for seq in self.seqs),
            cached_tokens=self.cached_tokens,
            queue_ms=1e3 * max(0.0, admitted - self.submitted_at),
            prefill_ms=1e3 * max(0.0, prefilled - admitted),
            decode_ms=1e3 * max(0.0, now - prefilled),
            preemptions=self.preemptions,
            ttft_ms=None if first is None else 1e3 * (first - self.submitted_at),
        )


class Choice:
    """One choice: the unit of scheduling, and what a runner calls a sequence.

    Its block table only grows while it is admitted (a slice handed to the runner stays true); preemption or the end
    empties it.
    """

    __slots__ = (
        "_room",
        "ahead",
        "choice",
        "computed",
        "cumulative",
        "first_block",
        "generation",
        "local_only",
        "match",
        "muted",
        "num_pages",
        "output",
        "pages",
        "pending",
        "rank",
        "refusal",
        "request",
        "reserved",
        "row",
        "sent",
        "seq_id",
        "state",
        "table",
        "tokens",
        "transfer_base",
        "transfer_id",
    )  # fmt: skip

    def __init__(self, request: Request, seq_id: int, choice: int, tail: Sequence[int]) -> None:
        options = request.options
        self.request = request
        self.seq_id = seq_id
        self.choice = choice
        self.rank: Rank = (-options.priority, options.arrival, seq_id)
        self.state = SeqState.WAITING
        self.output: list[int] = list(tail)
        # Where the output stands in its grammar: with every token of `output` taken.
        self.match = options.grammar.copy() if options.grammar is not None else None
        # Tokens whose KV is in the pages, as far as collected steps say.
        self.computed = 0
        # Of steps launched and not collected: tokens they compute, and tokens they sample for it.
        self.ahead = 0
        self.pending = 0
        self.cumulative = 0.0
        self.pages: list[int] = []
        # The block table, a view of as much of `_room` as is filled.
        self.table: Int32Array = np.empty(0, np.int32)
        self._room = self.table
        self.num_pages = 0
        # Pages a FORKING choice has taken for what it will not share.
        self.reserved: list[int] = []
        # Filled while tokens are to be prefilled: everything known at (re)admission.
        self.tokens: Int32Array = np.empty(0, np.int32)
        # A choice aborted while it computes the prompt for others.
        self.muted = False
        # Its KV is not asked for elsewhere (again).
        self.local_only = False
        self.generation: int | None = None
        self.first_block = 0
        self.transfer_id = 0
        self.transfer_base = 0
        # Pages that were missing when it was last refused, and how things stood then.
        self.refusal: tuple[int, Stamp] | None = None
        self.row = Planned(self, 1, (self,))
        # Blocks already recorded (or cached) for the transfer.
        self.sent = 0

    def __repr__(self) -> str:
        return f"<{self.request.key.request_id}/{self.choice} {self.state.value} {self.computed}/{self.total_len}>"

    @property
    def total_len(self) -> int:
        """Tokens known: prompt and output."""
        return len(self.request.prompt) + len(self.output)

    @property
    def capacity(self) -> int:
        """Pages its block table has room for."""
        return self._room.size

    @property
    def live(self) -> bool:
        return self.state not in OVER

    def move(self, to: SeqState) -> None:
        if to not in TRANSITIONS[self.state]:
            raise Internal(f"sequence {self!r} cannot become {to.value}")
        self.state = to

    def all_tokens(self) -> Int32Array:
        return np.array(self.request.prompt + self.output, np.int32)

    def computed_tokens(self) -> list[int]:
        """The tokens whose KV is in the pages."""
        return (self.request.prompt + self.output)[: self.computed]

    def set_pages(self, pages: Sequence[int], capacity: int) -> None:
        """Start a block table with room for `capacity` pages."""
        self.pages = list(pages)
        self.num_pages = len(pages)
        self._room = np.empty(max(capacity, len(pages)), np.int32)
        self._room[: len(pages)] = pages
        self.table = self._room[: len(pages)]

    def grow(self, pages: Sequence[int]) -> None:
        self._room[self.num_pages : self.num_pages + len(pages)] = pages
        self.pages += pages
        self.num_pages += len(pages)
        self.table = self._room[: self.num_pages]

    def drop_pages(self) -> None:
        self.pages = []
        self.reserved = []
        self.num_pages = 0
        self._room = self.table = np.empty(0, np.int32)
        self.tokens = np.empty(0, np.int32)
        self.computed = 0
        self.sent = 0

    def sample_input(self) -> SampleInput:
        request, output = self.request, self.output
        prompt, sampling, pending = request.prompt, request.sampling, self.pending
        made = len(output) + pending
        banned = request.banned if made < sampling.min_tokens else _NONE
        return SampleInput(sampling, self.choice, len(prompt) + made, prompt, output, banned, pending > 0, self.match)
