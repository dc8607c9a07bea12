"""The semantic cache's memory: entries with their vectors, bounded in number, bytes and age.

Pure and synchronous: one thread owns an instance.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.router.near.arena import BIG_ROWS, Arena
from services.router.near.entries import Entry, Kept, Shares
from services.router.near.search import Maker

Clock = Callable[[], float]

ENTRY_OVERHEAD_BYTES = 1024


class Near(NamedTuple):
    """An entry that came near: its cosine with the question asked, seconds since it was stored."""

    score: float
    age_s: float
    kept: Kept

    @property
    def entry(self) -> Entry:
        """The entry."""
        return self.kept.entry


class NearIndex:
    """Cosine search over unit vectors within hard partitions."""

    def __init__(
        self,
        dim: int,
        *,
        max_entries: int,
        max_bytes: int,
        ttl_s: float,
        fetchable: bool = False,
        clock: Clock = time.monotonic,
        maker: Maker | None = None,
        big_rows: int = BIG_ROWS,
    ) -> None:
        """fetchable: answers can be had again from elsewhere, so under pressure they leave before entries do."""
        self.arena = Arena(dim, max_entries, maker=maker, big_rows=big_rows)
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._fetchable = fetchable
        self._clock = clock
        self.shares = Shares(max_entries, max_bytes)
        self._kept: dict[int, Kept] = {}
        self._names: dict[tuple[bytes, str, bytes], int] = {}
        self._ids: dict[bytes, int] = {}
        self._answers: OrderedDict[int, Kept] = OrderedDict()
        self._ends: list[tuple[float, int, int]] = []
        self._added = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def held_bytes(self) -> int:
        """What all entries count for."""
        return self.shares.bytes

    @property
    def partitions(self) -> int:
        """Partitions that hold an entry."""
        return self.arena.partitions

    def search(
        self,
        partition: bytes,
        vector: npt.NDArray[np.generic],
        floor: float,
        k: int = 8,
        max_age_s: float | None = None,
    ) -> list[Near]:
        """At most `k` entries of the partition with cosine ≥ `floor`, best first. Raises InvalidArgument."""
        self.expire()
        now = self._clock()
        near: list[Near] = []
        # Those that are too old for this request must not crowd out the others.
        scores, rows = self.arena.search(partition, vector, k if max_age_s is None else 8 * k)
        for score, row in zip(scores.tolist(), rows.tolist(), strict=True):
            if score < floor or len(near) == k:
                break
            kept = self._kept[row]
            age = max(0.0, now - kept.since)
            if max_age_s is None or age <= max_age_s:
                near.append(Near(min(1.0, score), age, kept))
        return near

    def touch(self, kept: Kept) -> None:
        """The entry was of use: it leaves later."""
        if self._kept.get(kept.row) is kept:
            self.shares.touch(kept)
            if kept.row in self._answers:
                self._answers.move_to_end(kept.row)

    def find(self, entry_id: bytes) -> Kept | None:
        """The entry of an id."""
        row = self._ids.get(entry_id)
        return None if row is None else self._kept[row]

    def add(
        self,
        partition: bytes,
        vector: npt.NDArray[np.generic],
        entry: Entry,
        *,
        age_s: float = 0.0,
        left_s: float | None = None,
    ) -> bool:
        """Remember an entry; one of the same question or id is replaced. False when it alone exceeds the bound.

        age_s: seconds since it was stored. left_s: seconds it still lives, never more than the index's own limit.
        Raises InvalidArgument for a vector that is none; then nothing has changed.
        """
        size = ENTRY_OVERHEAD_BYTES + 4 * self.arena.dim + len(entry.text.encode()) + len(entry.prompt)
        size += len(entry.answer or b"")
        if size > self._max_bytes:
            return False
        lives = self._ttl_s - age_s if left_s is None else min(left_s, self._ttl_s - age_s)
        if lives <= 0:
            return False
        name = (partition, entry.text, entry.prompt)
        doomed = {self._names.get(name), self._ids.get(entry.entry_id) if entry.entry_id else None}
        self.arena.check(vector)
        for old in doomed - {None}:
            self._drop(self._kept[old])  # type: ignore[index]
        self._make_room(size)
        row = self.arena.add(partition, vector)
        now = self._clock()
        self._added += 1
        kept = Kept(row, self._added, partition, entry, now - age_s, now + lives, size)
        self._kept[row] = kept
        self._names[name] = row
        if entry.entry_id:
            self._ids[entry.entry_id] = row
        if entry.answer is not None:
            self._answers[row] = kept
        self.shares.add(kept)
        heapq.heappush(self._ends, (kept.expires, kept.number, row))
        if len(self._ends) > 2 * len(self._kept) + 64:
            self._ends = [(each.expires, each.number, each.row) for each in self._kept.values()]
            heapq.heapify(self._ends)
        return True

    def purge(self, what: str, value: str) -> int:
        """Forget entries by `id`, `tenant`, `model` or `family` (hex); returns how many."""
        if what == "tenant":
            own = self.shares.of(value)
            for kept in own:
                self._drop(kept)
            return len(own)
        if what == "id":
            found = self.find(bytes.fromhex(value))
            if found is not None:
                self._drop(found)
            return int(found is not None)
        return self._drop_where(lambda kept: getattr(kept.entry, what) == value)

    def age_of(self, left_s: float) -> float:
        """Age of an entry that still lives `left_s` seconds, if it was to live as long as those here."""
        return max(0.0, self._ttl_s - left_s)

    def mark(self) -> int:
        """A point in time for `sweep`."""
        return self._added

    def sweep(self, mark: int, keep: set[bytes]) -> int:
        """Forget entries with an id that is not among `keep`, of those added up to a mark; returns how many."""
        return self._drop_where(
            lambda kept: kept.number <= mark and bool(kept.entry.entry_id) and kept.entry.entry_id not in keep
        )

    def drop_before(self, epoch: int) -> int:
        """Forget entries of earlier epochs, those of none aside; returns how many."""
        return self._drop_where(lambda kept: 0 < kept.entry.epoch < epoch)

    def _drop_where(self, doomed: Callable[[Kept], bool]) -> int:
        found = [kept for kept in self._kept.values() if doomed(kept)]
        for kept in found:
            self._drop(kept)
        return len(found)

    def clear(self) -> None:
        """Forget everything."""
        self._drop_where(lambda _: True)

    def expire(self) -> int:
        """Forget what is too old; returns how many. Cost is logarithmic for each."""
        now, count = self._clock(), 0
        while self._ends and self._ends[0][0] <= now:
            _, number, row = heapq.heappop(self._ends)
            kept = self._kept.get(row)
            if kept is not None and kept.number == number:
                self._drop(kept)
                count += 1
        return count

    def _make_room(self, size: int) -> None:
        if self._fetchable:
            while self._answers and self.shares.bytes + size > self._max_bytes:
                self._forget_answer(next(iter(self._answers.values())))
        while len(self._kept) >= self._max_entries or self.shares.bytes + size > self._max_bytes:
            self._drop(self.shares.victim())

    def _forget_answer(self, kept: Kept) -> None:
        lighter = replace(kept.entry, answer=None)
        self.shares.resize(kept, kept.size - len(kept.entry.answer or b""))
        kept.entry = lighter
        del self._answers[kept.row]

    def _drop(self, kept: Kept) -> None:
        entry = kept.entry
        del self._kept[kept.row]
        del self._names[(kept.partition, entry.text, entry.prompt)]
        self._ids.pop(entry.entry_id, None)
        self._answers.pop(kept.row, None)
        self.shares.remove(kept)
        self.arena.remove(kept.row)

    def close(self) -> None:
        """Give the memory back."""
        self.clear()
        self.arena.close()

    def check_integrity(self) -> None:
        """Raise AssertionError unless arena, entries and sums agree."""
        self.arena.check_integrity()
        self.shares.check_integrity()
        assert len(self.arena) == len(self._kept) == len(self.shares) == len(self._names)
        assert set(self._answers) == {row for row, kept in self._kept.items() if kept.entry.answer is not None}
        for row, kept in self._kept.items():
            assert kept.row == row
            assert self._names[(kept.partition, kept.entry.text, kept.entry.prompt)] == row
            assert not kept.entry.entry_id or self._ids[kept.entry.entry_id] == row
        assert set(self._ids.values()) <= set(self._kept)
        assert {row for _, _, row in self._ends} >= set(self._kept)
        assert self.held_bytes <= self._max_bytes
        assert len(self._kept) <= self._max_entries
