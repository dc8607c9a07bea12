"""Breakers: a worker that fails what it is given gets nothing for a while, then one request to prove itself.

closed → open after `failures` failures within `window_s` that are at least half of what ended there → after a backoff
half-open, one probe at a time → closed by a success, open again, for longer, by a failure. Only ends that accuse the
worker count: a client's own errors, refusals for overload and cancellations are neutral.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import grpc

Clock = Callable[[], float]

ACCUSING = frozenset(
    code.value[0]
    for code in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.DATA_LOSS,
        grpc.StatusCode.UNKNOWN,
    )
)

MAX_KEPT = 8192
MAX_ENDS = 64
MAX_BACKOFF_S = 30.0


class State(StrEnum):
    """As it is told to watchers."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerRules:
    """When breakers open and how long they stay so. probe_s: a probe of which nothing is heard is given up. forget_s:
    so long after its backoff a breaker that saw no failure is closed."""

    failures: int = 5
    window_s: float = 10.0
    backoff_s: float = 1.0
    max_backoff_s: float = MAX_BACKOFF_S
    probe_s: float = 30.0
    forget_s: float = 300.0


@dataclass(slots=True)
class _Breaker:
    incarnation: int
    ends: deque[tuple[float, bool]] = field(default_factory=lambda: deque(maxlen=MAX_ENDS))
    # None while closed.
    open_until: float | None = None
    backoff_s: float = 0.0
    probe_at: float | None = None
    probe_id: str = ""


class Breakers:
    """One breaker a worker; a new incarnation begins anew. `on_change(worker_id)` follows what watchers may see.

    Not thread-safe: it lives on the event loop.
    """

    def __init__(
        self,
        rules: BreakerRules | None = None,
        clock: Clock = time.monotonic,
        on_change: Callable[[str], None] | None = None,
    ) -> None:
        self._rules = rules or BreakerRules()
        self._clock = clock
        self._on_change = on_change or (lambda worker_id: None)
        self._breakers: OrderedDict[str, _Breaker] = OrderedDict()
        self._not_closed: set[str] = set()

    @property
    def all_closed(self) -> bool:
        """True when no breaker needs a look."""
        return not self._not_closed

    def state(self, worker_id: str, incarnation: int) -> State:
        """The state now; half-open begins by itself when the backoff is over."""
        breaker = self._get(worker_id, incarnation)
        if breaker is None or breaker.open_until is None:
            return State.CLOSED
        return State.OPEN if self._clock() < breaker.open_until else State.HALF_OPEN

    def allows(self, worker_id: str, incarnation: int) -> bool:
        """Whether a request may be placed: closed, or half-open with no probe under way."""
        state = self.state(worker_id, incarnation)
        if state is not State.HALF_OPEN:
            return state is State.CLOSED
        probe_at = self._breakers[worker_id].probe_at
        return probe_at is None or self._clock() - probe_at >= self._rules.probe_s

    def chosen(self, worker_id: str, incarnation: int, request_id: str = "") -> None:
        """A request was placed: with a breaker that is not closed it is a probe."""
        breaker = self._get(worker_id, incarnation)
        if breaker is not None and breaker.open_until is not None:
            breaker.probe_at, breaker.probe_id = self._clock(), request_id

    def ended(self, request_id: str) -> None:
        """A request is over, and what it says of workers has been told: a probe that said nothing (cancelled, refused
        for overload, served by another) makes way for the next."""
        for worker_id in self._not_closed:
            breaker = self._breakers[worker_id]
            if breaker.probe_at is not None and breaker.probe_id == request_id:
                breaker.probe_at = None

    def failed(self, worker_id: str, incarnation: int, code: int) -> None:
        """A request ended on the worker with this google.rpc.Code."""
        if code not in ACCUSING or not worker_id:
            return
        breaker, now = self._open(worker_id, incarnation), self._clock()
        if breaker is None:
            return
        if breaker.open_until is not None:
            if breaker.probe_at is not None and now >= breaker.open_until:
                self._trip(worker_id, breaker, min(2 * breaker.backoff_s, self._rules.max_backoff_s))
            # One placed in spite of the breaker, where nothing else was left, must not pass for the probe to come.
            breaker.probe_at = None
            return
        breaker.ends.append((now, False))
        while breaker.ends[0][0] <= now - self._rules.window_s:
            breaker.ends.popleft()
        failures = sum(not ok for _, ok in breaker.ends)
        if failures >= self._rules.failures and 2 * failures >= len(breaker.ends):
            self._trip(worker_id, breaker, self._rules.backoff_s)

    def succeeded(self, worker_id: str, incarnation: int) -> None:
        """A request ended well on the worker. Closes a breaker that had let a probe through."""
        breaker = self._get(worker_id, incarnation)
        if breaker is None:
            return
        if breaker.open_until is None:
            breaker.ends.append((self._clock(), True))
        elif breaker.probe_at is not None:
            self._close(worker_id)

    def expire(self) -> None:
        """Close what has been open or half-open for long without a failure: workers that left, or were not chosen."""
        oldest = self._clock() - self._rules.forget_s
        for worker_id in list(self._not_closed):
            until = self._breakers[worker_id].open_until
            if until is not None and until < oldest:
                self._close(worker_id)

    def _close(self, worker_id: str) -> None:
        del self._breakers[worker_id]
        self._not_closed.discard(worker_id)
        self._on_change(worker_id)

    def _trip(self, worker_id: str, breaker: _Breaker, backoff_s: float) -> None:
        breaker.open_until, breaker.backoff_s = self._clock() + backoff_s, backoff_s
        breaker.probe_at = None
        breaker.ends.clear()
        self._not_closed.add(worker_id)
        self._on_change(worker_id)

    def _get(self, worker_id: str, incarnation: int) -> _Breaker | None:
        breaker = self._breakers.get(worker_id)
        return breaker if breaker is not None and breaker.incarnation == incarnation else None

    def _open(self, worker_id: str, incarnation: int) -> _Breaker | None:
        """The breaker of this incarnation, a new one where there is none."""
        breaker = self._get(worker_id, incarnation)
        if breaker is None:
            self._not_closed.discard(worker_id)
            breaker = self._breakers[worker_id] = _Breaker(incarnation)
        self._breakers.move_to_end(worker_id)
        while len(self._breakers) > MAX_KEPT:
            self._not_closed.discard(self._breakers.popitem(last=False)[0])
        return breaker
