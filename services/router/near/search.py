"""Brute-force search over rows of a matrix, and what an index of a large partition must be able to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import faiss
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from services.router.near.arena import Arena

Vector = npt.NDArray[np.float32]
Scores = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]
Places = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]


def knn(base: Vector, rows: Rows, query: Vector, k: int) -> tuple[Scores, Rows]:
    """Inner products of a query with some rows of a matrix: (k' scores, k' rows), best first, k' = min(k, len(rows)).

    base: (n, dim) float32, C order. rows: (m,) int64, distinct, below n, C order. query: (dim,) float32.
    The rows are read where they lie: gathering them first costs 2.6 times as much (4,096 rows of 384).
    """
    k = min(k, len(rows))
    scores, found = np.empty(k, dtype=np.float32), np.empty(k, dtype=np.int64)
    if k == 0:
        return scores, found
    at = faiss.swig_ptr
    n, dim = base.shape
    # Not in FAISS's type stubs.
    by_idx: Any = vars(faiss)["knn_inner_products_by_idx"]
    by_idx(at(query), at(base), at(rows), dim, 1, n, len(rows), k, at(scores), at(found))
    return scores, found


class LargeIndex(Protocol):
    """The index of one large partition. One thread owns it; rows are those of its arena."""

    @property
    def worn(self) -> bool:
        """True once it should be made anew."""

    def add(self, row: int) -> None:
        """Take a row in; its vector is in the arena."""

    def remove(self, row: int) -> None:
        """Take a row out."""

    def search(self, query: Vector, k: int) -> tuple[Scores, Rows]:
        """As `knn` over the rows that are in, exactly or nearly."""

    def all_rows(self) -> list[int]:
        """Every row that is in, in no order."""

    def check_integrity(self) -> None:
        """Raise AssertionError unless the parts agree."""


class Maker(Protocol):
    """How indices of large partitions are made: the long part apart from the thread that searches."""

    name: str

    def build(self, arena: Arena, rows: Rows) -> Any:
        """What `make` needs, from rows that may change meanwhile. Blocks. Raises KvmeshError, OSError, MemoryError."""

    def make(self, base: Vector, places: Places, built: Any, rows: Rows, same: npt.NDArray[np.bool_]) -> LargeIndex:
        """The index, of those of the rows that are still the `same`."""

    def cancel(self) -> None:
        """End a `build` in progress, and let none begin. From any thread."""
