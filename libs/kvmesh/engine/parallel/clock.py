"""A limit on how long a step may take, for steps that nobody waits for on the host while they run."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable


class StepClock:
    """Calls `late(seconds)` once, from its own thread, when a step was begun so long ago and has not ended.

    Steps end in the order in which they began. `begin` and `end` are cheap and for one thread.
    """

    def __init__(self, timeout_s: float, late: Callable[[float], None]) -> None:
        self._timeout_s, self._late = timeout_s, late
        # Each with its own limit.
        self._running: deque[tuple[float, float]] = deque()
        self._closed = threading.Event()
        # Late by a fraction of the limit, so that a step costs no wake-up.
        self._look_s = min(1.0, timeout_s / 4)
        self._thread = threading.Thread(target=self._watch, name="step-clock", daemon=True)
        self._thread.start()

    def begin(self, timeout_s: float | None = None) -> None:
        """A step (or what else may hang) begins now."""
        limit = self._timeout_s if timeout_s is None else timeout_s
        self._running.append((time.monotonic() + limit, limit))

    def end(self) -> None:
        """The oldest has ended."""
        self._running.popleft()

    def close(self) -> None:
        """No more calls. Idempotent."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(self._look_s):
            try:
                deadline, limit = self._running[0]
            except IndexError:
                continue
            if time.monotonic() > deadline:
                self._late(limit)
                return
