"""Steps from the leader to its ranks through shared memory: a ring of fixed slots, written by the leader alone.

The wake-up is a SLOT frame on each rank's socket, which also orders steps with everything else that is said there: the
slot is written before the frame is sent and read after it came. A step that is larger than a slot goes as a frame.

Layout, u64 words of the host: one cache line a rank with the number of the last slot that it has copied; then the
slots: number, bytes, padding to a cache line, body. Numbers begin at 1 and go up by 1; slot i is at i % SLOTS.
"""

from __future__ import annotations

from kvmesh.errors import DataLoss, InvalidArgument
from kvmesh.kv.region import Region
from kvmesh.kv.ring import _fence

# One step runs and one is queued behind it: a rank is never further behind than that.
SLOTS = 4
SLOT_BYTES = 1 << 20
_LINE = 64
_WORDS = _LINE // 8


def bytes_for(size: int) -> int:
    """Bytes of the region for a group of `size` ranks. Memory is only taken where a step was written."""
    return _LINE * size + SLOTS * (_LINE + SLOT_BYTES)


class StepSlots:
    """The leader's side (`put`), or one rank's (`take`). The region stays the caller's."""

    def __init__(self, region: Region, size: int) -> None:
        if region.nbytes != bytes_for(size):
            raise InvalidArgument(f"slots of {size} ranks take {bytes_for(size)} bytes, the region has {region.nbytes}")
        self._bytes = region.buf
        self._words = self._bytes.cast("Q")
        self._size = size
        self._put = 0

    def _at(self, number: int) -> int:
        return _LINE * self._size + number % SLOTS * (_LINE + SLOT_BYTES)

    def put(self, body: bytes) -> int | None:
        """Write a step; its number. None where a rank has not yet copied what lies in that slot: nothing is written.

        Raises InvalidArgument for more than SLOT_BYTES.
        """
        if len(body) > SLOT_BYTES:
            raise InvalidArgument(f"a step of {len(body)} bytes does not fit a slot")
        number = self._put + 1
        if any(self._words[rank * _WORDS] + SLOTS < number for rank in range(1, self._size)):
            return None
        at = self._at(number)
        self._words[at // 8] = number
        self._words[at // 8 + 1] = len(body)
        self._bytes[at + _LINE : at + _LINE + len(body)] = body
        self._put = number
        return number

    def take(self, rank: int, number: int) -> bytes:
        """A copy of the step with that number, and the slot is free for this rank. Raises DataLoss."""
        at = self._at(number)
        found, nbytes = self._words[at // 8], self._words[at // 8 + 1]
        if found != number or number < 1 or nbytes > SLOT_BYTES:
            raise DataLoss(f"slot {number} holds number {found} of {nbytes} bytes")
        body = bytes(self._bytes[at + _LINE : at + _LINE + nbytes])
        # Behind the copy, as the leader sees it: it writes over the slot once it sees this.
        _fence()
        self._words[rank * _WORDS] = number
        return body

    def close(self) -> None:
        """Let go of the region's memory. Idempotent."""
        self._words.release()
        self._bytes.release()
