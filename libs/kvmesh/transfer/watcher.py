"""Reads the engine's step ring and doorbell, and knows how long the mover may sleep between two looks.

Idle, the mover sleeps on the ring's eventfd. While a step runs, the watcher sleeps until just before the next ring is
due, by the time that layers have taken so far. Around that time it looks closely, as `Patience` says: spinning, then
yielding the core between looks, then every MIN_SLEEP_S; a layer that is late is looked for ever more rarely, and never
by spinning. So what is burnt is bounded for each layer, and nothing where no step runs. An engine that also signals the
eventfd at each layer needs none of this.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

from kvmesh.errors import DataLoss
from kvmesh.kv.region import Region
from kvmesh.kv.ring import Doorbell, StepRing
from kvmesh.transfer.native.moves import Bells, Look
from kvmesh.transfer.poller import Poller
from kvmesh.transfer.sends import SendTable

MIN_SLEEP_S = 50e-6
MAX_SLEEP_S = 0.01
# What a layer is taken to need before any has been seen, and at most.
FIRST_LAYER_S = 200e-6
MAX_LAYER_S = 0.05
# The part of a layer's expected time that is slept through at once.
SURE = 0.75
# A layer that is later than this many times its expected time is late, and looked for at this part of its lateness.
LATE = 2.0
LATE_PART = 1 / 16
IDLE_S = 1.0
# Pages are awaited and the engine is known to signal the eventfd: this is only the net below it.
NOTIFIED_S = 0.05
# Pages are awaited from an engine that has never signalled.
UNNOTIFIED_S = 0.002


# From so many cores on, one of them is worth less than a layer's delay.
SPIN_CORES = 8


class Patience(NamedTuple):
    """What one close look at the doorbell may burn: seconds without a pause, then seconds of yielding."""

    spin_s: float
    yield_s: float

    @classmethod
    def named(cls, name: str) -> Patience:
        """`spin`, `yield`, `sleep`, or `auto`: by the cores that this process may use."""
        if name == "auto":
            name = "spin" if len(os.sched_getaffinity(0)) >= SPIN_CORES else "sleep"
        return {"spin": cls(200e-6, 300e-6), "yield": cls(0.0, 200e-6), "sleep": cls(0.0, 0.0)}[name]


class RingWatcher:
    """One engine's ring, doorbells and eventfd. Lives on the mover's thread; `close` lets go of the memory.

    doorbells: the leader's, and those of ranks that ring their own: a layer is done at the least of them.
    eventfd: a non-blocking descriptor that the engine writes to after each publish (and may write to at each layer).
    """

    def __init__(
        self, ring: Region, doorbells: Region | Sequence[Region], eventfd: int, patience: Patience | None = None
    ) -> None:
        rung = [doorbells] if isinstance(doorbells, Region) else doorbells
        self._doorbells: list[Doorbell] = []
        try:
            for doorbell in rung:
                self._doorbells.append(Doorbell(doorbell.buf))
            self._ring = StepRing(ring.buf)
        except BaseException:
            for bell in self._doorbells:
                bell.close()
            raise
        self._bells = Bells([doorbell.address for doorbell in self._doorbells])
        self._patience = patience or Patience.named("auto")
        self.eventfd = eventfd
        self._notified = False
        self._value = self._rung()
        self._changed = time.monotonic()
        self._waiting = False
        self._layer_s = FIRST_LAYER_S

    def notified(self) -> None:
        """The eventfd is readable: take its count."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.eventfd)
            self._notified = True

    def feed(self, table: SendTable) -> bool:
        """Hand new records and the doorbell's value to the table; True where something was posted.

        Raises DataLoss for a ring that cannot be understood any more.
        """
        # A record published after this loop may have layers rung already: it is found at the next look, none is lost.
        while (record := self._ring.consume()) is not None:
            table.record(record)
        value = self._rung()
        if value < self._value:
            raise DataLoss(f"the doorbell went back from {self._value} to {value}")
        if value != self._value:
            now = time.monotonic()
            layer_s = (now - self._changed) / (value - self._value)
            # Only within a step: the gap before its first layer is no layer's time.
            if self._waiting and layer_s < MAX_LAYER_S:
                self._layer_s += (layer_s - self._layer_s) / 4
            self._value = value
            self._changed = now
        posted = table.advance(value)
        waiting = table.awaiting_doorbell is not None
        if waiting and not self._waiting:
            self._changed = time.monotonic()
        self._waiting = waiting
        return posted

    def _rung(self) -> int:
        return min(doorbell.value for doorbell in self._doorbells)

    def wait(self, table: SendTable, poller: Poller, at_most_s: float) -> list[int]:
        """Sleep until the next look: descriptors with events, [] when it is time to look (or the ring has come)."""
        due = table.awaiting_doorbell
        age = time.monotonic() - self._changed
        if due is None or age >= LATE * self._layer_s or not self._bells.watchable:
            return poller.wait(min(at_most_s, self.sleep_s(table)))
        quiet = max(0.0, SURE * self._layer_s - age)
        look = Look(quiet, *self._patience, MIN_SLEEP_S, min(at_most_s, LATE * self._layer_s - age))
        return poller.watch(self._bells, due, look)

    def sleep_s(self, table: SendTable) -> float:
        """Seconds until the next look, where no eventfd asks for one before."""
        if table.awaiting_doorbell is not None:
            age = time.monotonic() - self._changed
            if age < SURE * self._layer_s:
                wait = SURE * self._layer_s - age
            elif age < LATE * self._layer_s:
                wait = MIN_SLEEP_S
            else:
                wait = age * LATE_PART
            return min(max(wait, MIN_SLEEP_S), MAX_SLEEP_S)
        if table.awaiting_pages:
            return NOTIFIED_S if self._notified else UNNOTIFIED_S
        return IDLE_S

    def close(self) -> None:
        """Let go of the shared memory."""
        self._ring.close()
        for doorbell in self._doorbells:
            doorbell.close()
        os.close(self.eventfd)
