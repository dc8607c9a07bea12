"""The index of one large partition: its rows by the nearest of some centroids (an inverted file).

Only the rows of the cells next to the query are compared, where they lie in the arena: the index holds no copy of a
vector, takes rows in and out one by one, and is exact about who is in it, so that no row that left must be filtered
out of a result. Training is the costly part and happens in another process (`builder`), again when the index is worn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import faiss
import numpy as np
import numpy.typing as npt

from services.router.near.search import Places, Rows, Scores, Vector, knn

LEAST_PROBED = 12
LEAST_ROWS = 1500
"""Of the nearest cells so many are looked through that they hold about so many rows, by the mean."""

SIDE_LIMIT = 128
SETTLED_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Built:
    """What training gives. centroids: (n, dim) float32. cells: (m,) int32, the nearest centroid of each row."""

    centroids: Vector
    cells: npt.NDArray[np.int32]


class Cells:
    """Rows by cell; those not yet assigned are in a last cell at the side, which every search looks through."""

    def __init__(
        self,
        base: Vector,
        places: Places,
        built: Built,
        rows: Rows,
        cells: npt.NDArray[np.int32],
    ) -> None:
        """base: the arena. places: for each row of the arena its cell and its place in that cell."""
        self._base = base
        self._cell, self._at = places
        self._centroids = built.centroids
        self._trained = max(1, len(built.cells))
        self._changes = 0
        self._size = len(rows)
        count = len(self._centroids)
        order = np.argsort(cells, kind="stable")
        bounds = np.searchsorted(cells[order], np.arange(count + 1))
        self._rows: list[Rows] = [rows[order[bounds[i] : bounds[i + 1]]] for i in range(count)]
        self._rows.append(np.empty(SIDE_LIMIT, dtype=np.int64))
        self._sizes = [*np.diff(bounds).tolist(), 0]
        self._side = count
        self._cell[rows] = cells
        self._at[rows[order]] = np.arange(len(rows)) - bounds[cells[order]]

    @property
    def worn(self) -> bool:
        """True once so many rows came and went that the centroids should be learned again."""
        return self._changes >= self._trained

    def search(self, query: Vector, k: int) -> tuple[Scores, Rows]:
        """See `LargeIndex.search`."""
        return knn(self._base, self.candidates(query), query, k)

    def candidates(self, query: Vector) -> Rows:
        """(m,) int64: rows worth comparing with the query (dim,)."""
        mean = max(1, self._size) / self._side
        probed = min(self._side, max(LEAST_PROBED, math.ceil(LEAST_ROWS / mean)))
        _, cells = faiss.knn(query[None, :], self._centroids, probed, metric=faiss.METRIC_INNER_PRODUCT)
        near = [self._rows[cell][: self._sizes[cell]] for cell in (*cells[0].tolist(), self._side)]
        return np.concatenate(near)

    def add(self, row: int) -> None:
        """Take a row in, at the side; a few of those who wait there move to their cells."""
        self._changes += 1
        self._size += 1
        self._put(row, self._side)
        if self._sizes[self._side] >= SIDE_LIMIT:
            self.settle(SETTLED_AT_ONCE)

    def settle(self, count: int) -> None:
        """Move up to `count` rows from the side to their cells."""
        size = self._sizes[self._side]
        moved = self._rows[self._side][max(0, size - count) : size].copy()
        if not len(moved):
            return
        _, cells = faiss.knn(self._base[moved], self._centroids, 1, metric=faiss.METRIC_INNER_PRODUCT)
        for row, cell in zip(moved.tolist(), cells[:, 0].tolist(), strict=True):
            self._take(row)
            self._put(row, cell)

    def remove(self, row: int) -> None:
        """Take a row out; the last of its cell takes its place."""
        self._changes += 1
        self._size -= 1
        self._take(row)

    def _take(self, row: int) -> None:
        cell = int(self._cell[row])
        rows, size = self._rows[cell], self._sizes[cell] - 1
        last = rows[size]
        rows[self._at[row]] = last
        self._at[last] = self._at[row]
        self._sizes[cell] = size

    def _put(self, row: int, cell: int) -> None:
        rows, size = self._rows[cell], self._sizes[cell]
        if size == len(rows):
            rows = self._rows[cell] = np.concatenate([rows, np.empty(max(4, size), dtype=np.int64)])
        rows[size] = row
        self._sizes[cell] = size + 1
        self._cell[row] = cell
        self._at[row] = size

    def all_rows(self) -> list[int]:
        """Every row, in no order."""
        return [row for rows, size in zip(self._rows, self._sizes, strict=True) for row in rows[:size].tolist()]

    def check_integrity(self) -> None:
        """Raise AssertionError unless every row lies where it is said to."""
        assert self._size == sum(self._sizes)
        for cell, (rows, size) in enumerate(zip(self._rows, self._sizes, strict=True)):
            assert (self._cell[rows[:size]] == cell).all()
            assert (self._at[rows[:size]] == np.arange(size)).all()
