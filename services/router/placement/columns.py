"""What changes about workers many times a second, as plain numbers: one row a worker (its slot), one array a quantity.

A decision reads these arrays and no protobuf message.
"""

from __future__ import annotations

import heapq

import numpy as np

_ZEROED = ("queued", "inflight", "sequences", "free_pages", "credit", "recent", "events_at", "synced", "reported")


class Columns:
    """Numbers by slot. Slots of workers that left are used again, the lowest first.

    queued, inflight: tokens, as last reported. sequences: running, waiting and transferring. free_pages counts while
    `reported` is true. credit, recent: tokens placed by this router (see `credit` and `score`). events_at: time of the
    last KV events; synced: those that came are whole.
    """

    def __init__(self, capacity: int = 64) -> None:
        self.queued = np.zeros(capacity)
        self.inflight = np.zeros(capacity)
        self.sequences = np.zeros(capacity)
        self.free_pages = np.zeros(capacity)
        self.credit = np.zeros(capacity)
        self.recent = np.zeros(capacity)
        self.events_at = np.zeros(capacity)
        self.synced = np.zeros(capacity, np.bool_)
        self.reported = np.zeros(capacity, np.bool_)
        self._free = list(range(capacity))

    @property
    def capacity(self) -> int:
        """Slots are below this."""
        return len(self.queued)

    def take(self) -> int:
        """A slot, all zero."""
        if not self._free:
            old = self.capacity
            for name in _ZEROED:
                array = getattr(self, name)
                setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
            self._free = list(range(old, self.capacity))
        slot = heapq.heappop(self._free)
        self.clear(slot)
        return slot

    def clear(self, slot: int) -> None:
        """Another process has the slot."""
        for name in _ZEROED:
            getattr(self, name)[slot] = 0

    def give_back(self, slot: int) -> None:
        """The worker left."""
        self.clear(slot)
        heapq.heappush(self._free, slot)
