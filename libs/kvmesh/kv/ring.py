"""Doorbell and step ring: how an engine tells its sidecar, without a system call, which pages may leave.

Before a step the engine publishes a `StepRecord`; after each layer it rings the `Doorbell`. The sidecar serves layer l
of a record once the doorbell has reached `first_value + l`. Both live in shared memory, one writer each.

Atomicity: a store through `memoryview.cast("Q")` is a memcpy of 8 aligned bytes, which CPython's C compiler turns into
one 8-byte store on x86-64 and AArch64; no reader sees half of a counter. Order: x86-64 keeps stores (and loads) in
program order; elsewhere `_fence` puts a lock's release and acquire between payload and cursor (see there).
"""

from __future__ import annotations

import platform
import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvmesh.errors import DataLoss, InvalidArgument

CACHE_LINE = 64
DOORBELL_BYTES = CACHE_LINE
RING_HEADER_BYTES = 2 * CACHE_LINE
MAX_LAYERS = 1 << 16

_MASK32 = (1 << 32) - 1
_MASK64 = (1 << 64) - 1
_HEAD = 0  # word index: written by the producer alone
_TAIL = CACHE_LINE // 8  # word index: written by the consumer alone, on its own cache line
_DATA = RING_HEADER_BYTES // 8
_RECORD_WORDS = 3  # (entries, start cursor), first value, layers
_ENTRY_WORDS = 2  # transfer id, (first page, pages)

_TOTAL_STORE_ORDER = platform.machine().lower() in ("x86_64", "amd64", "i686")
_fence_lock = threading.Lock()
_fence_lock.acquire()


def _fence() -> None:
    """Orders everything before against everything after, as other processes see it.

    A no-op on x86-64. On AArch64 a store-release followed by a load-acquire is ordered against both sides; a lock of
    our own, held for good, gives that pair. (Reasoned, not measured: no ARM machine has run this.)
    """
    if not _TOTAL_STORE_ORDER:  # pragma: no cover
        _fence_lock.release()
        _fence_lock.acquire()


def _words(buffer: Any, what: str, minimum: int) -> memoryview:
    """The buffer as native u64 words; refuses what is too small, read-only in part, or not aligned to 8 bytes."""
    view = memoryview(buffer).cast("B")
    if view.nbytes < minimum:
        raise InvalidArgument(f"{what} needs {minimum} bytes, the buffer has {view.nbytes}")
    view = view[: view.nbytes // 8 * 8]
    if np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0] % 8:
        raise InvalidArgument(f"{what} needs a buffer aligned to 8 bytes")
    return view.cast("Q")


class Doorbell:
    """One monotonic 64-bit counter at the start of cache line `index` of a shared buffer.

    One process rings, any process reads. Fresh memory (zero) is a doorbell that never rang.
    """

    def __init__(self, buffer: Any, index: int = 0) -> None:
        if index < 0:
            raise InvalidArgument(f"doorbell index must not be negative, got {index}")
        self._view = _words(buffer, "doorbell", (index + 1) * DOORBELL_BYTES)
        self._cell = self._view[index * DOORBELL_BYTES // 8 : index * DOORBELL_BYTES // 8 + 1]

    @property
    def address(self) -> int:
        """Where the counter is mapped, for native code that looks at it. Valid until `close`."""
        return int(np.frombuffer(self._cell, dtype=np.uint64).__array_interface__["data"][0])

    @property
    def value(self) -> int:
        """How often it has rung. What the ringer wrote before that ring is visible after this read."""
        value: int = self._cell[0]
        _fence()
        return value

    def ring(self) -> int:
        """Count one more layer; returns the new value. Everything stored before is visible to who sees it."""
        _fence()
        value: int = (self._cell[0] + 1) & _MASK64
        self._cell[0] = value
        return value

    def close(self) -> None:
        """Let go of the buffer (idempotent); the counter may not be used afterwards."""
        self._cell.release()
        self._view.release()


class StepEntry(NamedTuple):
    """Pages of one transfer that this step fills: positions [first_page, first_page + num_pages) of ITS page list."""

    transfer_id: int
    first_page: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One engine step. Layer l of the step (0-based) is done when the doorbell's value is >= first_value + l."""

    first_value: int
    num_layers: int
    entries: tuple[StepEntry, ...]


class StepRing:
    """A bounded ring of step records with a single producer and a single consumer, in a shared buffer.

    Zeroed memory is an empty ring; both sides construct it over the same bytes. Cursors count u64 words and only grow.
    The payload is stored before the head moves and copied out before the tail moves. A record that wraps is two copies.
    """

    def __init__(self, buffer: Any) -> None:
        self._words = _words(buffer, "step ring", RING_HEADER_BYTES + 8 * (_RECORD_WORDS + _ENTRY_WORDS))
        self._data = self._words[_DATA:]
        self._capacity = len(self._data)
        self._next_value = 0
        self._broken: str | None = None

    @property
    def max_entries(self) -> int:
        """Entries of the largest record that fits an empty ring."""
        return (self._capacity - _RECORD_WORDS) // _ENTRY_WORDS

    @staticmethod
    def bytes_for(records: int, entries: int) -> int:
        """Size of a buffer that holds `records` records of `entries` entries each."""
        return RING_HEADER_BYTES + 8 * records * (_RECORD_WORDS + _ENTRY_WORDS * entries)

    def publish(self, record: StepRecord) -> bool:
        """Producer: append, or return False when there is no room now (nothing is written).

        Raises InvalidArgument for a record that can never fit or whose fields are out of range, DataLoss where the
        consumer's cursor makes no sense.
        """
        _check_fields(record.first_value, record.num_layers, record.entries)
        size = _RECORD_WORDS + _ENTRY_WORDS * len(record.entries)
        if size > self._capacity:
            raise InvalidArgument(f"step record of {len(record.entries)} entries, the ring holds {self.max_entries}")
        head, tail = self._cursors()
        if size > self._capacity - (head - tail):
            return False
        words = array("Q", [(head & _MASK32) << 32 | len(record.entries), record.first_value, record.num_layers])
        for transfer_id, first_page, num_pages in record.entries:
            words.append(transfer_id)
            words.append(num_pages << 32 | first_page)
        self._store(head, words)
        _fence()
        self._words[_HEAD] = head + size
        return True

    def consume(self) -> StepRecord | None:
        """Consumer: the oldest record, or None when the ring is empty.

        Raises DataLoss for a record that cannot be true (sizes are checked before anything is read by them). The ring
        then stays broken: its producer can no longer be understood and every later call raises the same.
        """
        if self._broken is not None:
            raise DataLoss(self._broken)
        head, tail = self._cursors()
        if head == tail:
            return None
        _fence()
        available = head - tail
        if available < _RECORD_WORDS:
            raise self._refuse(f"{available} words are no record")
        start, first_value, num_layers = self._load(tail, _RECORD_WORDS)
        count = start & _MASK32
        if start >> 32 != tail & _MASK32:
            raise self._refuse("a record starts where none was published")
        size = _RECORD_WORDS + _ENTRY_WORDS * count
        if size > available:
            raise self._refuse(f"a record of {count} entries is longer than what was published")
        raw = self._load(tail + _RECORD_WORDS, size - _RECORD_WORDS)
        entries = tuple(
            StepEntry(raw[i], raw[i + 1] & _MASK32, raw[i + 1] >> 32) for i in range(0, len(raw), _ENTRY_WORDS)
        )
        try:
            _check_fields(first_value, num_layers, entries)
        except InvalidArgument as error:
            raise self._refuse(error.message) from None
        if first_value < self._next_value:
            raise self._refuse(f"doorbell value {first_value} goes back, expected at least {self._next_value}")
        self._next_value = first_value + num_layers
        _fence()
        self._words[_TAIL] = tail + size
        return StepRecord(first_value, num_layers, entries)

    def close(self) -> None:
        """Let go of the buffer (idempotent)."""
        self._data.release()
        self._words.release()

    def _cursors(self) -> tuple[int, int]:
        head: int = self._words[_HEAD]
        tail: int = self._words[_TAIL]
        if not 0 <= head - tail <= self._capacity:
            raise self._refuse(f"cursors {head} and {tail} do not fit a ring of {self._capacity} words")
        return head, tail

    def _refuse(self, why: str) -> DataLoss:
        self._broken = f"step ring is corrupt: {why}"
        return DataLoss(self._broken)

    def _store(self, cursor: int, words: array[int]) -> None:
        at = cursor % self._capacity
        fits = min(len(words), self._capacity - at)
        source = memoryview(words)
        self._data[at : at + fits] = source[:fits]
        if fits < len(words):
            self._data[: len(words) - fits] = source[fits:]

    def _load(self, cursor: int, count: int) -> list[int]:
        at = cursor % self._capacity
        fits = min(count, self._capacity - at)
        return [*self._data[at : at + fits].tolist(), *self._data[: count - fits].tolist()]


def _check_fields(first_value: int, num_layers: int, entries: Sequence[StepEntry]) -> None:
    if not 0 <= first_value <= _MASK64 - MAX_LAYERS:
        raise InvalidArgument(f"step record: first_value {first_value} is not a doorbell value")
    if not 1 <= num_layers <= MAX_LAYERS:
        raise InvalidArgument(f"step record: num_layers must be in 1..{MAX_LAYERS}, got {num_layers}")
    for transfer_id, first_page, num_pages in entries:
        if not 0 <= transfer_id <= _MASK64:
            raise InvalidArgument(f"step record: transfer id {transfer_id} is not a u64")
        if first_page < 0 or num_pages < 1 or first_page + num_pages > _MASK32:
            raise InvalidArgument(f"step record: pages [{first_page}, +{num_pages}) are not a range")
