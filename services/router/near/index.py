"""The vector index of the semantic cache: one FAISS index a partition, so that no search ever sees a foreign entry.

Entries are bounded in number, bytes and age; the least recently used leave first. Pure and synchronous: one thread
owns an instance.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import faiss
import numpy as np

from services.router.near.embedder import Vector

Clock = Callable[[], float]

ENTRY_OVERHEAD_BYTES = 512
# Removing from a flat index moves what lies behind, so room is made for several entries at once.
EVICTED_AT_ONCE = 0.01


@dataclass(frozen=True, slots=True)
class Entry:
    """A remembered answer: `text` is the question's last user text, `prompt` the digest of its rendered tokens."""

    text: str
    prompt: bytes
    answer: bytes


@dataclass(slots=True)
class _Kept:
    partition: bytes
    entry: Entry
    expires: float
    size: int


class NearIndex:
    """Cosine search over unit vectors within hard partitions."""

    def __init__(
        self, dim: int, *, max_entries: int, max_bytes: int, ttl_s: float, clock: Clock = time.monotonic
    ) -> None:
        self._dim = dim
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._partitions: dict[bytes, faiss.IndexIDMap] = {}
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._ids: dict[tuple[bytes, str, bytes], int] = {}
        self._next_id = 0
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def partitions(self) -> int:
        """Partitions that hold an entry."""
        return len(self._partitions)

    def search(self, partition: bytes, vector: Vector, tau: float, k: int = 8) -> Iterator[tuple[float, int, Entry]]:
        """(cosine, id, entry) of at most `k` entries of the partition with cosine ≥ `tau`, best first."""
        index = self._partitions.get(partition)
        if index is None:
            return
        scores, ids = index.search(vector.reshape(1, self._dim), min(k, index.ntotal))
        now = self._clock()
        for score, entry_id in zip(scores[0].tolist(), ids[0].tolist(), strict=True):
            if entry_id < 0 or score < tau:
                return
            kept = self._kept[entry_id]
            if kept.expires > now:
                yield min(1.0, score), entry_id, kept.entry

    def touch(self, entry_id: int) -> None:
        """The entry was of use: it leaves later."""
        if entry_id in self._kept:
            self._kept.move_to_end(entry_id)

    def add(self, partition: bytes, vector: Vector, entry: Entry) -> bool:
        """Remember an entry; one of the same question is replaced. False when it alone exceeds the bound."""
        size = ENTRY_OVERHEAD_BYTES + 4 * self._dim + len(entry.text.encode()) + len(entry.prompt) + len(entry.answer)
        if size > self._max_bytes:
            return False
        name = (partition, entry.text, entry.prompt)
        if name in self._ids:
            self._drop([self._ids[name]])
        self._make_room(size)
        index = self._partitions.get(partition)
        if index is None:
            index = self._partitions[partition] = faiss.IndexIDMap(faiss.IndexFlatIP(self._dim))
        entry_id = self._next_id
        self._next_id += 1
        index.add_with_ids(vector.reshape(1, self._dim), np.asarray([entry_id], dtype=np.int64))
        self._kept[entry_id] = _Kept(partition, entry, self._clock() + self._ttl_s, size)
        self._ids[name] = entry_id
        self.bytes += size
        return True

    def expire(self) -> int:
        """Forget what is too old; returns how many. Cost is linear in the entries."""
        now = self._clock()
        old = [entry_id for entry_id, kept in self._kept.items() if kept.expires <= now]
        self._drop(old)
        return len(old)

    def _make_room(self, size: int) -> None:
        if len(self._kept) < self._max_entries and self.bytes + size <= self._max_bytes:
            return
        entries = min(self._max_entries - 1, int(self._max_entries * (1 - EVICTED_AT_ONCE)))
        limit = min(self._max_bytes - size, int(self._max_bytes * (1 - EVICTED_AT_ONCE)))
        count, total, victims = len(self._kept), self.bytes, []
        for entry_id, kept in self._kept.items():
            if count <= entries and total <= limit:
                break
            victims.append(entry_id)
            count, total = count - 1, total - kept.size
        self._drop(victims)

    def _drop(self, entry_ids: list[int]) -> None:
        doomed: dict[bytes, list[int]] = {}
        for entry_id in entry_ids:
            kept = self._kept.pop(entry_id)
            del self._ids[(kept.partition, kept.entry.text, kept.entry.prompt)]
            self.bytes -= kept.size
            doomed.setdefault(kept.partition, []).append(entry_id)
        for partition, ids in doomed.items():
            index = self._partitions[partition]
            index.remove_ids(faiss.IDSelectorBatch(np.asarray(ids, dtype=np.int64)))
            if index.ntotal == 0:
                del self._partitions[partition]

    def check_integrity(self) -> None:
        """Raise AssertionError unless index, entries and sums agree."""
        held = {
            int(entry_id): partition
            for partition, index in self._partitions.items()
            for entry_id in faiss.vector_to_array(index.id_map)
        }
        assert held == {entry_id: kept.partition for entry_id, kept in self._kept.items()}
        assert sorted(self._ids.values()) == sorted(self._kept)
        assert self.bytes == sum(kept.size for kept in self._kept.values())
        assert self.bytes <= self._max_bytes
        assert len(self._kept) <= self._max_entries
