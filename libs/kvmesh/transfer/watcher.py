"""Reads the engine's step ring and doorbell, and knows how long the mover may sleep between two looks.

No busy waiting: idle, the mover sleeps on the ring's eventfd. While a step runs the doorbell is polled with sleeps of a
fraction of the time that a layer takes, as seen so far; a step that hangs is polled ever more rarely.
"""

from __future__ import annotations

import contextlib
import os
import time

from kvmesh.errors import DataLoss
from kvmesh.kv.region import Region
from kvmesh.kv.ring import Doorbell, StepRing
from kvmesh.transfer.sends import SendTable

MIN_SLEEP_S = 50e-6
MAX_SLEEP_S = 1e-3
# After this long without a ring a step is not about to ring either: an eighth of its age is soon enough.
STALE_STEP_S = 0.02
MAX_STALE_SLEEP_S = 0.01
IDLE_S = 1.0
# Pages are awaited and the engine is known to signal the eventfd: this is only the net below it.
NOTIFIED_S = 0.05
# Pages are awaited from an engine that has never signalled.
UNNOTIFIED_S = 0.002
_LAYERS_PER_SLEEP = 4


class RingWatcher:
    """One engine's ring, doorbell and eventfd. Lives on the mover's thread; `close` lets go of the memory.

    eventfd: a non-blocking descriptor that the engine writes to after each publish (and may write to at each layer).
    """

    def __init__(self, ring: Region, doorbell: Region, eventfd: int) -> None:
        self._ring = StepRing(ring.buf)
        self._doorbell = Doorbell(doorbell.buf)
        self.eventfd = eventfd
        self._notified = False
        self._value = self._doorbell.value
        self._changed = time.monotonic()
        self._layer_s = MAX_SLEEP_S

    def notified(self) -> None:
        """The eventfd is readable: take its count."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.eventfd)
            self._notified = True

    def feed(self, table: SendTable) -> bool:
        """Hand new records and the doorbell's value to the table; True where something was posted.

        Raises DataLoss for a ring that cannot be understood any more.
        """
        # The doorbell is read first: a record that is published before the read value was rung is in the ring then.
        while (record := self._ring.consume()) is not None:
            table.record(record)
        value = self._doorbell.value
        if value < self._value:
            raise DataLoss(f"the doorbell went back from {self._value} to {value}")
        if value != self._value:
            now = time.monotonic()
            layer_s = (now - self._changed) / (value - self._value)
            # Long gaps are pauses between steps, not layers.
            if layer_s < STALE_STEP_S:
                self._layer_s += (layer_s - self._layer_s) / 4
            self._value = value
            self._changed = now
        return table.advance(value)

    def sleep_s(self, table: SendTable) -> tuple[float, bool]:
        """(seconds until the next look, True where a signal will not come and the look itself must not be missed)."""
        if table.awaiting_doorbell is not None:
            age = time.monotonic() - self._changed
            if age > STALE_STEP_S:
                return min(age / 8, MAX_STALE_SLEEP_S), True
            return min(max(self._layer_s / _LAYERS_PER_SLEEP, MIN_SLEEP_S), MAX_SLEEP_S), True
        if table.awaiting_pages:
            return (NOTIFIED_S if self._notified else UNNOTIFIED_S), False
        return IDLE_S, False

    def close(self) -> None:
        """Let go of the shared memory."""
        self._ring.close()
        self._doorbell.close()
        os.close(self.eventfd)
