"""What a flight is made of, apart from what it does: roles, members, times."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from opentelemetry.trace import INVALID_SPAN, Span, SpanContext, get_current_span, set_span_in_context

from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.proto.v1 import router_pb2
from kvmesh.telemetry import metrics, names, tracing
from services.gateway.flights.log import FlightLog, Reader

Produce = Callable[[FlightLog, router_pb2.Flight | None], Awaitable[pb.Finished]]
"""Runs a generation into a log, from where the log ends, to its end. The flight is what it leads, for its report; None
when it leads none. Raises KvmeshError; cancelling it frees the worker."""


MAX_EARLY = 16
"""Followers that are known before the leader's request."""


class Role(Enum):
    """See `flight`."""

    LEAD = "lead"
    FOLLOW = "follow"
    ALONE = "alone"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Pace:
    """Times of flights, in seconds."""

    renew_s: float = 1.0
    """Between signs of life, of leader and followers."""
    publish_s: float = 0.05
    """Least time between two batches of frames."""
    give_up_s: float = 3.0
    """Silence of Redis after which a follower goes on by itself."""
    silence_s: float = 5.0
    """The same for a leader that lives and writes nothing for one that follows; longer than a lease."""
    linger_s: float = 3.5
    """How long an ended flight is kept for those who were told of it before its end: longer than a lease."""


@dataclass(eq=False, slots=True)
class Member:
    """One request that reads the flight here, in `span`. `produce` is how it would run the generation by itself."""

    produce: Produce
    reader: Reader
    span: Span = field(default_factory=get_current_span)


class Kin:
    """Links from the request whose generation runs here to those that follow it."""

    def __init__(self) -> None:
        self._span: Span = INVALID_SPAN
        self._early: list[SpanContext | str] = []

    def leads(self, span: Span) -> None:
        """It is this one's now."""
        self._span = span
        for other in self._early:
            if other != span.get_span_context():
                tracing.link(span, other, "follower")
        self._early.clear()

    def followed_by(self, other: SpanContext | str) -> None:
        """A span, here or elsewhere, by its context or `traceparent`."""
        if self._span is not INVALID_SPAN:
            tracing.link(self._span, other, "follower")
        elif len(self._early) < MAX_EARLY:
            self._early.append(other)


def joining(members: Sequence[Member]) -> str:
    """`traceparent` of the first request of those that follow together."""
    return tracing.traceparent(set_span_in_context(members[0].span)) if members else ""


def count(role: str) -> None:
    """One more flight in which this gateway did this."""
    metrics.counter(names.GATEWAY_FLIGHTS).labels(role).inc()
