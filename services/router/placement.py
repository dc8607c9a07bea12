"""Placement: from a picture of the fleet to ranked pairs of workers. Pure; nothing here waits or remembers.

A candidate's score is `matched / prompt − β · relative load`. Relative load is its own tokens over (the mean of the
candidates + the prompt): one hot worker raises the mean and so makes the others look closer together, never farther
apart, and on an idle fleet a few tokens of load do not outweigh a held prefix. Everything named for one request
belongs to one family (model, revision, tokenizer), so that any alternate can take over.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvmesh.errors import FailedPrecondition, NotFound, Unavailable
from kvmesh.proto.v1 import engine_pb2, router_pb2
from services.router.fleet import Family, Worker

BETA = 1.0
"""Weight of relative load against the share of the prompt that a worker already holds."""

_DECODES = (engine_pb2.WORKER_ROLE_DECODE, engine_pb2.WORKER_ROLE_UNIFIED)
_PREFILLS = (engine_pb2.WORKER_ROLE_PREFILL, engine_pb2.WORKER_ROLE_UNIFIED)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker as placement sees it: `load` in tokens (reported + credit), `matched` prompt tokens it holds."""

    info: engine_pb2.WorkerInfo
    load: int
    sequences: int = 0
    matched: int = 0

    @property
    def worker_id(self) -> str:
        return self.info.worker_id

    @property
    def family(self) -> Family:
        return Family.of(self.info)


@dataclass(frozen=True, slots=True)
class RankedPair:
    """A decode worker and its prefill workers, best first; none: the decode worker prefills."""

    decode: Candidate
    prefill: tuple[Candidate, ...]

    def to_proto(self) -> router_pb2.Pair:
        targets = [
            engine_pb2.PrefillTarget(worker_id=c.worker_id, address=c.info.address, incarnation=c.info.incarnation)
            for c in self.prefill
        ]
        return router_pb2.Pair(decode=self.decode.info, prefill=targets)


def candidate(worker: Worker, credit: int = 0, matched: int = 0) -> Candidate:
    """The candidate for an attached worker; one that has not reported yet counts its credit alone."""
    load = worker.load
    tokens = load.queued_tokens + load.inflight_tokens + credit
    return Candidate(worker.info, tokens, load.running + load.waiting + load.transferring, matched)


def resolve_model(name: str, aliases: Mapping[str, str], families: Iterable[Family], serving: Iterable[Family]) -> str:
    """The model that a name stands for.

    A name that a worker bears is that model, whatever the aliases say. An alias with target "" means the model that
    most of the `serving` (one entry a decoding worker) serve, then the first by name. Raises NotFound.
    """
    known = {family.model for family in families}
    if name in known:
        return name
    if name in aliases:
        target = aliases[name]
        if target:
            if target not in known:
                raise NotFound(f"no worker serves model {target!r}, which {name!r} stands for")
            return target
        counts = Counter(family.model for family in serving)
        if counts:
            return min(counts, key=lambda model: (-counts[model], model))
        if known:
            return min(known)
    raise NotFound(f"no worker serves model {name!r}")


def rank(
    candidates: Sequence[Candidate], prompt_tokens: int, rng: random.Random, *, beta: float = BETA
) -> list[Candidate]:
    """Best first by score, then fewer sequences, then at random."""
    if not candidates:
        return []
    prompt = max(1, prompt_tokens)
    scale = prompt + sum(c.load for c in candidates) / len(candidates)

    def key(c: Candidate) -> tuple[float, int, float]:
        return (beta * c.load / scale - min(c.matched, prompt) / prompt, c.sequences, rng.random())

    return sorted(candidates, key=key)


def place(
    candidates: Sequence[Candidate],
    *,
    model: str,
    prompt_tokens: int,
    alternates: int,
    rng: random.Random,
    exclude: Collection[str] = (),
    unified_only: bool = False,
    beta: float = BETA,
) -> list[RankedPair]:
    """The best pair and up to `alternates` further ones, for a model's serving candidates.

    Raises Unavailable when no decode worker is left, FailedPrecondition when only role unified would do and none
    serves the model.
    """
    usable = [c for c in candidates if c.info.model == model and c.worker_id not in exclude]
    decoders = [c for c in usable if c.info.role in _DECODES]
    if not decoders:
        raise Unavailable(f"no worker serves model {model!r} now")
    if unified_only:
        decoders = [c for c in decoders if c.info.role == engine_pb2.WORKER_ROLE_UNIFIED]
        if not decoders:
            raise FailedPrecondition(f"prompt_logprobs needs a worker of role unified; none serves model {model!r}")
    # A shorter context than the prompt's cannot serve it; where none is long enough, the worker says so itself.
    decoders = [c for c in decoders if not 0 < c.info.max_model_len <= prompt_tokens] or decoders
    ranked = rank(decoders, prompt_tokens, rng, beta=beta)
    family = ranked[0].family
    ranked = [c for c in ranked if c.family == family][: alternates + 1]
    prefillers = rank([c for c in usable if can_prefill(c)], prompt_tokens, rng, beta=beta)
    return [RankedPair(c, _senders(prefillers, c)[: alternates + 1]) for c in ranked]


def _senders(prefillers: Sequence[Candidate], target: Candidate) -> tuple[Candidate, ...]:
    """Those that can send to it; pages of another size, which are slow, only after all others."""
    senders = [p for p in prefillers if can_send(p.info, target.info)]
    return tuple(sorted(senders, key=lambda p: p.info.page_size != target.info.page_size))


def can_prefill(c: Candidate) -> bool:
    """True when the candidate computes prompts for others at all."""
    return c.info.role in _PREFILLS and bool(c.info.kvtransfer_address)


def can_send(source: engine_pb2.WorkerInfo, target: engine_pb2.WorkerInfo) -> bool:
    """True when KV of `source` fits the decode worker `target`; role unified prefills for itself, never remotely."""
    return (
        target.role == engine_pb2.WORKER_ROLE_DECODE
        and source.worker_id != target.worker_id
        and bool(target.kvtransfer_address)
        and Family.of(source) == Family.of(target)
        and same_kv(source, target)
    )


def same_kv(source: engine_pb2.WorkerInfo, target: engine_pb2.WorkerInfo) -> bool:
    """True when KV of one can be written into the other's pages, be it token by token."""
    if source.kv_fingerprint and target.kv_fingerprint:
        return source.kv_fingerprint == target.kv_fingerprint
    return source.page_size == target.page_size and source.layout_fingerprint == target.layout_fingerprint


def charges(pair: RankedPair, prompt_tokens: int) -> dict[str, int]:
    """Credit of a placement: worker id → tokens that its next report will show."""
    cost = max(1, prompt_tokens)
    taken = {pair.decode.worker_id: cost}
    if pair.prefill:
        best = pair.prefill[0]
        taken[best.worker_id] = max(1, cost - best.matched)
    return taken
