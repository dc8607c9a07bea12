"""The mailbox: where the bytes of a run are written by the write-with-immediate that closes it.

A ring per queue pair with one entry of 8 bytes per receive; run k writes entry k modulo the ring's length. An entry is
read, and emptied, before its receive is posted again, so it is never written before it was read.
The writer keeps a mailbox of the same shape, from which the entries are sent.
"""

from __future__ import annotations

import mmap

import numpy as np

from kvmesh.errors import DataLoss, InvalidArgument

ENTRY_BYTES = 8
# More than any run; what is larger was not written by a sound peer.
MAX_RUN_BYTES = 1 << 40


class Mailbox:
    """Memory of `rings` rings of `entries` entries, and 8 bytes more that receives may name (nothing is put there).

    The memory lives until `close`; whoever has registered it deregisters first.
    """

    def __init__(self, rings: int, entries: int) -> None:
        if rings < 1 or entries < 1:
            raise InvalidArgument(f"a mailbox of {rings} rings of {entries} entries")
        self.rings = rings
        self.entries = entries
        self.nbytes = (rings * entries + 1) * ENTRY_BYTES
        self._map = mmap.mmap(-1, self.nbytes)
        self._words = np.frombuffer(self._map, dtype="<u8")
        self.address = int(self._words.__array_interface__["data"][0])

    @property
    def sink(self) -> int:
        """Address of the 8 bytes that are no entry."""
        return self.address + self.rings * self.entries * ENTRY_BYTES

    def ring_address(self, ring: int) -> int:
        """Where a ring begins."""
        return self.address + ring * self.entries * ENTRY_BYTES

    def entry_address(self, ring: int, run: int) -> int:
        """Where run number `run` of a queue pair is written."""
        return self.address + (ring * self.entries + run % self.entries) * ENTRY_BYTES

    def put(self, ring: int, run: int, nbytes: int) -> int:
        """Writer: fill a run's entry; returns its address."""
        at = ring * self.entries + run % self.entries
        self._words[at] = nbytes
        return self.address + at * ENTRY_BYTES

    def take(self, ring: int, run: int) -> int:
        """Destination: the bytes of a run, once. Raises DataLoss where nothing sound was written."""
        at = ring * self.entries + run % self.entries
        value = int(self._words[at])
        self._words[at] = 0
        if not 1 <= value <= MAX_RUN_BYTES:
            raise DataLoss(f"run {run} of queue pair {ring} says {value} bytes")
        return value

    def close(self) -> None:
        """Unmap. Idempotent."""
        if not self._map.closed:
            self._words = np.zeros(0, dtype="<u8")
            self._map.close()
