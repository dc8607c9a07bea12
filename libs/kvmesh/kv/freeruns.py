"""Free pages as maximal ascending runs, so that an allocation is contiguous wherever it can be."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable


class FreeRuns:
    """Runs [start, start + length) of free pages, coalesced with their neighbours.

    Taking is best fit: the smallest run that holds the whole need; where none does, the largest runs first, so that
    the need is met by as few runs as possible. Taking and giving a run cost a bisection plus one memmove.
    """

    def __init__(self, num_pages: int) -> None:
        self._length: dict[int, int] = {}
        self._start_of_end: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []
        self.count = 0
        if num_pages:
            self._add(0, num_pages)

    def take(self, need: int, after: int | None = None) -> list[int]:
        """`need` pages, ascending; need <= count is the caller's duty.

        after: the last page its owner already has. If the run that follows it is long enough, it is continued.
        """
        if after is not None and self._length.get(after + 1, 0) >= need:
            return list(self._cut(after + 1, need))
        pages: list[int] = []
        pieces = 0
        while need:
            at = bisect_left(self._by_size, (need, -1))
            length, start = self._by_size[min(at, len(self._by_size) - 1)]
            part = min(length, need)
            pages += self._cut(start, part)
            need -= part
            pieces += 1
        if pieces > 1:
            pages.sort()
        return pages

    def give(self, pages: Iterable[int]) -> None:
        """Put back pages that are not free now, in any order."""
        start = end = -1
        for page in sorted(pages):
            if page == end:
                end += 1
                continue
            if end > start:
                self._join(start, end)
            start, end = page, page + 1
        if end > start:
            self._join(start, end)

    def runs(self) -> list[tuple[int, int]]:
        """(start, length) of every run, ascending."""
        return sorted(self._length.items())

    def _join(self, start: int, end: int) -> None:
        before = self._start_of_end.get(start)
        if before is not None:
            self._remove(before)
            start = before
        after = self._length.get(end)
        if after is not None:
            self._remove(end)
            end += after
        self._add(start, end - start)

    def _cut(self, start: int, part: int) -> range:
        length = self._length[start]
        self._remove(start)
        if length > part:
            self._add(start + part, length - part)
        return range(start, start + part)

    def _add(self, start: int, length: int) -> None:
        self._length[start] = length
        self._start_of_end[start + length] = start
        insort(self._by_size, (length, start))
        self.count += length

    def _remove(self, start: int) -> None:
        length = self._length.pop(start)
        del self._start_of_end[start + length]
        del self._by_size[bisect_left(self._by_size, (length, start))]
        self.count -= length
