"""What became of a request before it runs: a decision, and an attempt that a worker has accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from opentelemetry.trace import INVALID_SPAN_CONTEXT, SpanContext

from kvmesh.errors import Unavailable
from kvmesh.proto.v1 import engine_pb2, router_pb2
from services.gateway.demux import Key
from services.gateway.inbox import Inbox
from services.gateway.job import Share
from services.gateway.link import WorkerLink


class NoWorker(Unavailable):
    """Nobody can serve it now; that may change with the next worker that comes."""


@dataclass(slots=True)
class Placed:
    """An accepted attempt. `spoke`: it has given tokens. `span`: of its submission."""

    link: WorkerLink
    key: Key
    inbox: Inbox
    model: str
    revision: str
    cached_tokens: int
    share: Share
    spoke: bool = False
    span: SpanContext = INVALID_SPAN_CONTEXT


@dataclass(slots=True)
class Candidate:
    """A worker to submit to, with its prefill workers, best first."""

    link: WorkerLink
    prefill: Sequence[engine_pb2.PrefillTarget] = ()


@dataclass(slots=True)
class Decision:
    """A cached answer, a flight to follow, or candidates in order; with these maybe a flight to lead.

    `cache`: what the cache did, as in RouteResponse. `shadow_id`: of a semantic answer that is to be checked.
    `heeds`: the candidates are our own choice, and a worker whose breaker has opened since is left out.
    """

    model: str
    revision: str = ""
    answer: router_pb2.CachedAnswer | None = None
    follow: router_pb2.Flight | None = None
    lead: router_pb2.Flight | None = None
    candidates: list[Candidate] = field(default_factory=list)
    cache: str = "bypass"
    shadow_id: str = ""
    heeds: bool = False
