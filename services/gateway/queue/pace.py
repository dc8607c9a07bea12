"""How fast a queue moves: cost per second that was released, from which the wait of a newcomer is estimated."""

from __future__ import annotations

import math

# Releases of this long ago count a third: of late, and where too few came of late to tell (answers of minutes come in
# bursts, and between two of them the queue only seems to stand still).
TAUS_S = (10.0, 120.0)
ENOUGH = 8.0
# What nobody has waited in for this long is measured anew: the fleet may be another.
FORGET_S = 60.0
# Fewer releases, or less time, say nothing.
LEAST_RELEASES = 4
LEAST_S = 1.0


class _Mean:
    """Cost and number of releases, and seconds in which somebody waited, each with the same decay."""

    def __init__(self, tau_s: float) -> None:
        self.tau_s = tau_s
        self.cost = self.busy_s = self.releases = 0.0

    def move(self, seconds: float) -> None:
        decay = math.exp(-seconds / self.tau_s)
        self.cost *= decay
        self.releases *= decay
        self.busy_s = self.busy_s * decay + self.tau_s * (1.0 - decay)


class Pace:
    """The rate of one queue. Only time in which somebody waits counts: an empty queue releases nothing, however fast
    the workers are. `now` is seconds of one clock throughout."""

    def __init__(self) -> None:
        self._forget()
        self._since: float | None = None
        self._ended = -math.inf

    def begin(self, now: float) -> None:
        """Somebody waits from now on. Idempotent."""
        if self._since is not None:
            return
        if now - self._ended > FORGET_S:
            self._forget()
        self._since = now

    def end(self, now: float) -> None:
        """Nobody waits any more."""
        self._move(now)
        self._since, self._ended = None, now

    def released(self, cost: int, now: float) -> None:
        """`cost` has left the queue for a worker; a negative one has come back."""
        self._move(now)
        one = 1 if cost > 0 else -1
        self._releases += one
        for mean in self._means:
            mean.cost = max(0.0, mean.cost + cost)
            mean.releases = max(0.0, mean.releases + one)

    def wait_s(self, cost: float, now: float) -> float | None:
        """Seconds until `cost` has been released; None when too little was seen to tell."""
        if cost <= 0:
            return 0.0
        self._move(now)
        if self._since is None or self._releases < LEAST_RELEASES or self._means[-1].busy_s < LEAST_S:
            return None
        mean = next((mean for mean in self._means if mean.releases >= ENOUGH), self._means[-1])
        return cost * mean.busy_s / mean.cost if mean.cost > 0 else math.inf

    def _move(self, now: float) -> None:
        if self._since is None:
            return
        for mean in self._means:
            mean.move(max(0.0, now - self._since))
        self._since = max(now, self._since)

    def _forget(self) -> None:
        self._means = [_Mean(tau_s) for tau_s in TAUS_S]
        self._releases = 0
