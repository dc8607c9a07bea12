"""How fast a queue moves: cost per second that was released, from which the wait of a newcomer is estimated."""

from __future__ import annotations

import math

# Releases of this long ago count a third.
TAU_S = 10.0
# What nobody has waited in for this long is measured anew: the fleet may be another.
FORGET_S = 60.0
# Fewer releases, or less time, say nothing.
LEAST_RELEASES = 4
LEAST_S = 1.0


class Pace:
    """The rate of one queue. Only time in which somebody waits counts: an empty queue releases nothing, however fast
    the workers are. `now` is seconds of one clock throughout."""

    def __init__(self) -> None:
        self._cost = 0.0
        self._busy_s = 0.0
        self._releases = 0
        self._since: float | None = None
        self._ended = -math.inf

    def begin(self, now: float) -> None:
        """Somebody waits from now on. Idempotent."""
        if self._since is not None:
            return
        if now - self._ended > FORGET_S:
            self._cost = self._busy_s = 0.0
            self._releases = 0
        self._since = now

    def end(self, now: float) -> None:
        """Nobody waits any more."""
        self._move(now)
        self._since, self._ended = None, now

    def released(self, cost: int, now: float) -> None:
        """`cost` has left the queue for a worker; a negative one has come back."""
        self._move(now)
        self._cost = max(0.0, self._cost + cost)
        self._releases += 1 if cost > 0 else -1

    def wait_s(self, cost: float, now: float) -> float | None:
        """Seconds until `cost` has been released; None when too little was seen to tell."""
        if cost <= 0:
            return 0.0
        self._move(now)
        if self._since is None or self._releases < LEAST_RELEASES or self._busy_s < LEAST_S:
            return None
        return cost * self._busy_s / self._cost if self._cost > 0 else math.inf

    def _move(self, now: float) -> None:
        if self._since is None:
            return
        decay = math.exp(-max(0.0, now - self._since) / TAU_S)
        self._cost *= decay
        self._busy_s = self._busy_s * decay + TAU_S * (1.0 - decay)
        self._since = max(now, self._since)
