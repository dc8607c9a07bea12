"""Which prefill worker can send to which decode worker, and the pairs that are named for a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvmesh.proto.v1 import engine_pb2, router_pb2
from services.router.fleet import Family
from services.router.placement.score import Weights

_DECODES = (engine_pb2.WORKER_ROLE_DECODE, engine_pb2.WORKER_ROLE_UNIFIED)
_PREFILLS = (engine_pb2.WORKER_ROLE_PREFILL, engine_pb2.WORKER_ROLE_UNIFIED)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker as it was rated: `load` in tokens (reported + credit), `matched` prompt tokens it holds. `target` is how
    a decode worker is told of it."""

    info: engine_pb2.WorkerInfo
    load: float = 0.0
    matched: int = 0
    score: float = 0.0
    target: engine_pb2.PrefillTarget = field(default_factory=engine_pb2.PrefillTarget, compare=False)

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
        return router_pb2.Pair(decode=self.decode.info, prefill=[candidate.target for candidate in self.prefill])


class KvKind(NamedTuple):
    """What decides whether KV travels between two workers: equal kinds are judged once. Transports empty: not told."""

    family: Family
    kv: bytes
    layout: bytes
    page_size: int
    speculation: str
    transports: frozenset[str]

    @classmethod
    def of(cls, info: engine_pb2.WorkerInfo) -> KvKind:
        """The kind of a worker's KV."""
        return cls(
            Family.of(info),
            info.kv_fingerprint,
            info.layout_fingerprint,
            info.page_size,
            info.speculation,
            frozenset(info.transports),
        )

    def mismatch(self, target: KvKind) -> str:
        """Why KV of this kind cannot be written into `target`'s pages, be it token by token; "" where it can."""
        if self.family != target.family:
            return "another model, revision or tokenizer"
        if self.kv and target.kv:
            if self.kv != target.kv:
                return "KV of another layout"
        elif self.page_size != target.page_size or self.layout != target.layout:
            return "KV of another layout"
        if self.speculation != target.speculation:
            return "another method of speculation"
        if self.transports and target.transports and not self.transports & target.transports:
            return "no transport in common"
        return ""


def decodes(info: engine_pb2.WorkerInfo) -> bool:
    """True when the worker generates."""
    return info.role in _DECODES


def can_prefill(info: engine_pb2.WorkerInfo) -> bool:
    """True when the worker computes prompts for others at all."""
    return info.role in _PREFILLS and bool(info.kvtransfer_address)


def can_receive(info: engine_pb2.WorkerInfo) -> bool:
    """True when others may prefill for the worker; role unified does so for itself, never remotely."""
    return info.role == engine_pb2.WORKER_ROLE_DECODE and bool(info.kvtransfer_address)


def can_send(source: engine_pb2.WorkerInfo, target: engine_pb2.WorkerInfo) -> bool:
    """True when `source` can prefill for the decode worker `target`."""
    return (
        can_prefill(source)
        and can_receive(target)
        and source.worker_id != target.worker_id
        and not KvKind.of(source).mismatch(KvKind.of(target))
    )


def work(pair: RankedPair, prompt_tokens: int, weights: Weights) -> dict[str, float]:
    """What a placement makes its workers do, in tokens of load (see `Weights`)."""
    answer = weights.recent_prompt * prompt_tokens + weights.recent_each
    if not pair.prefill:
        return {pair.decode.worker_id: answer + prompt_tokens - pair.decode.matched}
    best = pair.prefill[0]
    return {pair.decode.worker_id: answer, best.worker_id: prompt_tokens - best.matched}


def charges(pair: RankedPair, prompt_tokens: int, *, queued: float = 1.0, inflight: float = 1.0) -> dict[str, int]:
    """Credit of a placement: worker id → tokens of load that its next report will show, at most the prompt's.

    queued, inflight: weights of a token to be computed and of one held in KV (see `score.Weights`).
    """

    def missing(candidate: Candidate) -> float:
        return queued * (prompt_tokens - candidate.matched)

    held = inflight * prompt_tokens
    taken = {pair.decode.worker_id: held if pair.prefill else held + missing(pair.decode)}
    if pair.prefill:
        taken[pair.prefill[0].worker_id] = missing(pair.prefill[0])
    return {worker_id: max(1, min(prompt_tokens, round(tokens))) for worker_id, tokens in taken.items()}
