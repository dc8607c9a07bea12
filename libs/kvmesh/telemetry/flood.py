"""A line that repeats too often is not written each time: a lost worker may be news to a thousand streams at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from kvmesh.telemetry import metrics, names

ACCESS = "kvmesh.access"
RATES: Mapping[str, tuple[float, float]] = {ACCESS: (200.0, 100.0)}
"""Logger → lines at once, lines a second; each place in the code by itself."""
RATE = (50.0, 5.0)


class _Place:
    __slots__ = ("at", "left", "suppressed")

    def __init__(self, left: float, at: float) -> None:
        self.left, self.at, self.suppressed = left, at, 0


class FloodGate(logging.Filter):
    """Bounds what each place in the code writes at `info` and above. The line that is written after some that were not
    tells how many (`suppressed`). `debug` is for somebody who wants all of it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._places: dict[tuple[str, int], _Place] = {}
        self._counter = metrics.counter(names.LOGS_SUPPRESSED)

    def filter(self, record: logging.LogRecord) -> bool:
        """See logging.Filter."""
        if record.levelno < logging.INFO:
            return True
        most, rate = RATES.get(record.name, RATE)
        now, key = self._clock(), (record.name, record.lineno)
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = _Place(most, now)
        place.left = min(most, place.left + (now - place.at) * rate)
        place.at = now
        if place.left < 1.0:
            place.suppressed += 1
            self._counter.inc()
            return False
        place.left -= 1.0
        if place.suppressed:
            record.suppressed = place.suppressed
            place.suppressed = 0
        return True
