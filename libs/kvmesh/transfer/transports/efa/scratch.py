"""A few registered bytes per link end: where receives point, where words come from, and where they go to."""

from __future__ import annotations

import mmap

import numpy as np

from kvmesh.transfer.transports.verbs.device import Memory, RdmaDevice

WORD_BYTES = 8
_BYTES = 64


class Scratch:
    """Receives name `sink`; a destination's words are 8 bytes of `source`, written to a writer's `target`. Nobody reads
    them: what counts is the immediate. Raises Unavailable where it cannot be registered."""

    def __init__(self, device: RdmaDevice) -> None:
        self._device = device
        self._map = mmap.mmap(-1, _BYTES)
        address = int(np.frombuffer(self._map, dtype=np.uint8).__array_interface__["data"][0])
        self._closed = False
        try:
            self._memory = device.register(address, _BYTES)
        except BaseException:
            self._map.close()
            raise
        self.lkey = self._memory.lkey
        self.sink = address
        self.source = address + WORD_BYTES
        self.target = Memory(address + 2 * WORD_BYTES, WORD_BYTES, self._memory.lkey, self._memory.rkey)

    def close(self) -> None:
        """After the queue pair. Idempotent."""
        if not self._closed:
            self._device.release(self._memory)
            self._closed = True
            self._map.close()
