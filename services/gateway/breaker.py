"""A gateway's own breaker of one worker, for requests that no router places: routers have theirs, which know more.

closed → open after FAILURES failures among the last ENDS that say anything → after a backoff half-open, one probe at a
time → closed by a success, open again, for longer, by a failure. A probe that ends without saying anything (its client
left, the worker was full) makes way for the next, and so does one that gives tokens: a long stream is no reason to
leave a worker out until it has ended.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from enum import StrEnum

from kvmesh.errors import KvmeshError
from kvmesh.rpc.status import row

FAILURES = 3
ENDS = 10
BACKOFF_S = (1.0, 30.0)

Attempt = tuple[str, int]
"""(request id, attempt)."""


def accuses(error: KvmeshError) -> bool:
    """True when an error speaks against the worker that it came from. What a client did wrong, that it left, and that
    the worker was full do not."""
    return row(error).http >= 500


class State(StrEnum):
    """See the module's text."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Of one incarnation of a worker."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, rng: random.Random | None = None) -> None:
        self._clock = clock
        self._rng = rng or random.Random()
        self._ends: deque[bool] = deque(maxlen=ENDS)
        self._backoff_s = BACKOFF_S[0]
        self._until: float | None = None
        self._probe: Attempt | None = None

    @property
    def state(self) -> State:
        """The state now; half-open begins by itself."""
        if self._until is None:
            return State.CLOSED
        return State.OPEN if self._clock() < self._until else State.HALF_OPEN

    @property
    def allows(self) -> bool:
        """Whether a request may be placed there."""
        state = self.state
        return state is State.CLOSED or (state is State.HALF_OPEN and self._probe is None)

    def begun(self, attempt: Attempt) -> None:
        """An attempt is being submitted: a probe, where one is due."""
        if self.state is State.HALF_OPEN and self._probe is None:
            self._probe = attempt

    def left(self, attempt: Attempt) -> None:
        """An attempt is over, however it ended. Idempotent."""
        if self._probe == attempt:
            self._probe = None

    def succeeded(self) -> None:
        """The worker ended an attempt well."""
        self._ends.append(True)
        if self._until is not None and self.state is State.HALF_OPEN:
            self._until = None
            self._backoff_s = BACKOFF_S[0]
            self._ends.clear()

    def failed(self, error: KvmeshError) -> None:
        """The worker failed an attempt; what does not accuse it is not counted."""
        if not accuses(error):
            return
        self._ends.append(False)
        state = self.state
        if state is State.OPEN or (state is State.CLOSED and self._ends.count(False) < FAILURES):
            return
        self._until = self._clock() + self._backoff_s * self._rng.uniform(0.8, 1.2)
        self._backoff_s = min(self._backoff_s * 2, BACKOFF_S[1])
        self._probe = None
