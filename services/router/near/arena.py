"""All vectors of one embedder in one matrix, and which rows belong to which partition.

The matrix is reserved whole, for as many rows as the cache may hold, in anonymous shared memory: the system commits its
pages as rows come into use, so that growth copies nothing and a row never moves. The process that builds an index
maps the same memory (`fileno`) and reads the rows there.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmesh.errors import InvalidArgument
from services.router.near.builder import CellsMaker
from services.router.near.search import LargeIndex, Maker, Rows, Scores, Vector, knn

BIG_ROWS = 4096
"""A partition of so many rows gets an index of its own."""

NORM_TOLERANCE = 1e-2


def check_vector(vector: npt.NDArray[np.generic], dim: int) -> Vector:
    """The vector as float32 (dim,). Raises InvalidArgument for one of another dimension, not finite or not a unit."""
    if vector.shape != (dim,):
        raise InvalidArgument(f"a vector of shape {vector.shape} where ({dim},) is wanted")
    checked = np.ascontiguousarray(vector, dtype=np.float32)
    norm = float(np.sqrt(np.dot(checked, checked)))
    # The comparison is false for NaN.
    if not abs(norm - 1.0) <= NORM_TOLERANCE:
        raise InvalidArgument(f"a vector of length {norm} where 1 is wanted")
    return checked


class Growing:
    """Distinct row numbers in an array that grows by doubling; order means nothing."""

    __slots__ = ("_at", "_rows", "size")

    def __init__(self, at: npt.NDArray[np.int32]) -> None:
        """at: for each row of the arena its place here; shared by arrays that have no row in common."""
        self._rows: Rows = np.empty(4, dtype=np.int64)
        self._at = at
        self.size = 0

    @property
    def rows(self) -> Rows:
        """(size,) int64, a view that holds until the next change."""
        return self._rows[: self.size]

    def append(self, row: int) -> None:
        """Take a row in."""
        if self.size == len(self._rows):
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)])
        self._rows[self.size] = row
        self._at[row] = self.size
        self.size += 1

    def remove(self, row: int) -> None:
        """Take a row out; the last one takes its place."""
        self.size -= 1
        last = self._rows[self.size]
        self._rows[self._at[row]] = last
        self._at[last] = self._at[row]


class Partition:
    """The rows of one partition, and its index when it is large."""

    __slots__ = ("large", "name", "rows")

    def __init__(self, name: bytes, rows: Growing) -> None:
        self.name = name
        self.rows = rows
        self.large: LargeIndex | None = None


class Arena:
    """Unit vectors by partition; no search sees a row of another partition. One thread owns an instance."""

    def __init__(self, dim: int, max_rows: int, *, maker: Maker | None = None, big_rows: int = BIG_ROWS) -> None:
        """Raises OSError or ValueError when so much address space cannot be had."""
        self.dim = dim
        self.max_rows = max_rows
        self.big_rows = big_rows
        self.maker: Maker = maker or CellsMaker()
        self._file = os.memfd_create("kvmesh-arena", os.MFD_CLOEXEC)
        os.ftruncate(self._file, max_rows * dim * 4)
        self._map = mmap.mmap(self._file, max_rows * dim * 4)
        self.base: Vector = np.frombuffer(self._map, dtype=np.float32).reshape(max_rows, dim)
        self._at = np.zeros(max_rows, dtype=np.int32)
        self._places = (np.zeros(max_rows, dtype=np.int32), np.zeros(max_rows, dtype=np.int32))
        self._generation = np.zeros(max_rows, dtype=np.uint32)
        self._owner: list[Partition | None] = []
        self._free: list[int] = []
        self._partitions: dict[bytes, Partition] = {}
        self._watched: set[bytes] = set()
        self.indexed = 0
        """Partitions that are searched through an index of their own."""

    def __len__(self) -> int:
        return len(self._owner) - len(self._free)

    @property
    def partitions(self) -> int:
        """Partitions that hold a row."""
        return len(self._partitions)

    def size(self, name: bytes) -> int:
        """Rows of a partition."""
        partition = self._partitions.get(name)
        return partition.rows.size if partition is not None else 0

    def fileno(self) -> int:
        """Descriptor of the matrix: row r lies at byte r * dim * 4."""
        return self._file

    def check(self, vector: npt.NDArray[np.generic]) -> None:
        """Raise InvalidArgument for a vector that `add` and `search` would refuse."""
        check_vector(vector, self.dim)

    def add(self, name: bytes, vector: npt.NDArray[np.generic]) -> int:
        """The row that now holds the vector. Raises InvalidArgument (nothing has changed), IndexError when full."""
        checked = check_vector(vector, self.dim)
        if self._free:
            row = self._free.pop()
        elif len(self._owner) < self.max_rows:
            row = len(self._owner)
            self._owner.append(None)
        else:
            raise IndexError("the arena is full")
        self.base[row] = checked
        partition = self._partitions.get(name)
        if partition is None:
            partition = self._partitions[name] = Partition(name, Growing(self._at))
        partition.rows.append(row)
        self._owner[row] = partition
        if partition.large is not None:
            partition.large.add(row)
        if self._wants(partition):
            self._watched.add(name)
        return row

    def remove(self, row: int) -> None:
        """Forget a row; its number is used again."""
        partition = self._owner[row]
        assert partition is not None, "removed twice"
        partition.rows.remove(row)
        if partition.large is not None:
            partition.large.remove(row)
            if partition.rows.size < self.big_rows // 2:
                partition.large = None
                self.indexed -= 1
        if partition.rows.size == 0:
            del self._partitions[partition.name]
        self._owner[row] = None
        self._generation[row] += 1
        self._free.append(row)

    def search(self, name: bytes, vector: npt.NDArray[np.generic], k: int) -> tuple[Scores, Rows]:
        """Cosines and rows of at most `k` rows of the partition, best first. Raises InvalidArgument."""
        checked = check_vector(vector, self.dim)
        partition = self._partitions.get(name)
        if partition is None:
            return np.empty(0, dtype=np.float32), np.empty(0, dtype=np.int64)
        if partition.large is not None:
            return partition.large.search(checked, k)
        return knn(self.base, partition.rows.rows, checked, k)

    # --- indices of large partitions --------------------------------------------------------------------------------

    def wanting(self) -> bytes | None:
        """A partition that is large and has no index, or a worn one."""
        for name in list(self._watched):
            partition = self._partitions.get(name)
            if partition is not None and self._wants(partition):
                return name
            self._watched.discard(name)
        return None

    def _wants(self, partition: Partition) -> bool:
        return partition.rows.size >= self.big_rows and (partition.large is None or partition.large.worn)

    def snapshot(self, name: bytes) -> tuple[Rows, npt.NDArray[np.uint32]]:
        """Rows of a partition and their generations, for a build."""
        partition = self._partitions.get(name)
        rows = partition.rows.rows.copy() if partition is not None else np.empty(0, dtype=np.int64)
        return rows, self._generation[rows]

    def install(self, name: bytes, rows: Rows, generations: npt.NDArray[np.uint32], built: Any) -> bool:
        """Search the partition through the index that the maker built from a snapshot; False when it is not large now.

        Rows that left since are left out, rows that came since are searched beside the index.
        """
        partition = self._partitions.get(name)
        if partition is None or partition.rows.size < self.big_rows // 2:
            return False
        same = np.asarray([self._owner[row] is partition for row in rows.tolist()], dtype=bool)
        same &= self._generation[rows] == generations
        self.indexed += partition.large is None
        partition.large = self.maker.make(self.base, self._places, built, rows, same)
        for row in np.setdiff1d(partition.rows.rows, rows[same]).tolist():
            partition.large.add(row)
        return True

    def close(self) -> None:
        """Give the matrix back."""
        self._partitions.clear()
        del self.base
        os.close(self._file)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every row is free or in exactly the partition that it says."""
        seen: set[int] = set(self._free)
        assert len(seen) == len(self._free)
        for name, partition in self._partitions.items():
            assert partition.name == name
            rows = partition.rows.rows.tolist()
            assert rows, "an empty partition is gone"
            for place, row in enumerate(rows):
                assert row not in seen
                seen.add(row)
                assert self._owner[row] is partition
                assert self._at[row] == place
            if partition.large is not None:
                assert sorted(partition.large.all_rows()) == sorted(rows)
                partition.large.check_integrity()
        assert seen == set(range(len(self._owner)))
        assert self.indexed == sum(partition.large is not None for partition in self._partitions.values())
