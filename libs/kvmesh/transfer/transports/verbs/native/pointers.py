"""The C objects behind pyverbs' Python ones, which it does not tell.

A pyverbs object holds the pointer among its first fields. Each word of it is tried, read through the kernel, which
refuses what is not mapped instead of ending the process; it is believed only where what it points to says what is known
of it by other ways: a queue the descriptor of its channel, a queue pair its number and queue. Otherwise there is None,
and Python does the work.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable

# Of an object, in bytes; pyverbs' have their pointer at 40.
_SPAN = 512
_lock = threading.Lock()


class _Reader:
    """This process' memory."""

    def __init__(self) -> None:
        self._fd = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)

    def words(self, address: int, count: int) -> list[int]:
        """64-bit words. Raises OSError for what is not mapped."""
        if not 4096 <= address < 1 << 47 or address % 8:
            raise OSError("no address")
        raw = os.pread(self._fd, 8 * count, address)
        if len(raw) != 8 * count:
            raise OSError("not mapped")
        return list(struct.unpack(f"<{count}Q", raw))

    def u32(self, address: int) -> int:
        """A 32-bit word."""
        word = self.words(address & ~7, 1)[0]
        return word >> 32 if address & 4 else word & 0xFFFF_FFFF

    def close(self) -> None:
        """Let go."""
        os.close(self._fd)


def find_queue(at: int, channel_fd: int) -> int | None:
    """The ibv_cq of the CQ object at that address whose completion channel has this descriptor."""

    def fits(reader: _Reader, queue: int) -> bool:
        context, channel = reader.words(queue, 2)
        return reader.words(channel, 1)[0] == context and reader.u32(channel + 8) == channel_fd

    return _find(at, fits)


def find_pair(at: int, queue: int, number: int) -> int | None:
    """The ibv_qp_ex of the QPEx object: sends and receives by this ibv_cq, and has this number. Only where ibv_qp and
    ibv_qp_ex are at one address, which the object must say twice."""

    def fits(reader: _Reader, pair: int) -> bool:
        words = reader.words(pair, 7)
        same = words[3] == words[4] == queue and words[6] >> 32 == number and words[0] == reader.words(queue, 1)[0]
        start, complete = reader.words(pair + 320, 2)
        return same and bool(start) and bool(complete)

    return _find(at, fits, times=2)


def find_handle(at: int, pair: int) -> int | None:
    """The ibv_ah of the AH object: of the protection domain of this ibv_qp."""

    def fits(reader: _Reader, handle: int) -> bool:
        context, _, domain = reader.words(pair, 3)
        return reader.words(handle, 2) == [context, domain]

    return _find(at, fits)


def _find(at: int, fits: Callable[[_Reader, int], bool], times: int = 1) -> int | None:
    with _lock:
        try:
            reader = _Reader()
        except OSError:
            return None
        try:
            # The end of an object may be the end of what is mapped.
            fields: list[int] = []
            for offset in range(16, _SPAN, 8):
                try:
                    fields += reader.words(at + offset, 1)
                except OSError:
                    break
            for value in dict.fromkeys(fields):
                try:
                    if fits(reader, value) and fields.count(value) >= times:
                        return value
                except OSError:
                    continue
            return None
        finally:
            reader.close()
