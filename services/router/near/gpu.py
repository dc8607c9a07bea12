"""The index of a large partition on a GPU: all its rows there, compared one by one, exactly.

No training: a build is one upload, apart from the thread that searches. Rows that leave become tombstones, which a
search asks for in addition and then leaves out; rows that come wait at the side, on the CPU, and go up in batches. Too
many tombstones wear the index. Needs faiss-gpu (the extra `gpu`), which is imported here alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvmesh.errors import FailedPrecondition, Unavailable
from services.router.near.search import Places, Rows, Scores, Vector, knn

if TYPE_CHECKING:
    from services.router.near.arena import Arena

UPLOADED_AT_ONCE = 8192
SIDE_LIMIT = 256
MAX_K = 2048
"""FAISS on a GPU gives no more results of one query."""

MAX_DEAD = 1024
TEMPORARY_BYTES = 64 << 20


class GpuMaker:
    """Makes `GpuFlat`."""

    name = "gpu"

    def __init__(self, module: Any = None) -> None:
        """module: faiss, imported when it is not given. Raises FailedPrecondition when it has no GPU part or no GPU."""
        self._faiss = module or importlib.import_module("faiss")
        if not hasattr(self._faiss, "StandardGpuResources") or self._faiss.get_num_gpus() < 1:
            raise FailedPrecondition("FAISS has no GPU here: install faiss-gpu, or keep to the CPU")
        self._cancelled = False

    def build(self, arena: Arena, rows: Rows) -> Any:
        """See `Maker.build`: a FAISS index with the rows in their order. Raises Unavailable when the GPU refuses."""
        try:
            # Of its own, since this thread and the one that searches would share it.
            resources = self._faiss.StandardGpuResources()
            resources.setTempMemory(TEMPORARY_BYTES)
            index = self._faiss.GpuIndexFlatIP(resources, arena.dim)
            for start in range(0, len(rows), UPLOADED_AT_ONCE):
                if self._cancelled:
                    raise Unavailable("the index is not wanted any more")
                index.add(arena.base[rows[start : start + UPLOADED_AT_ONCE]])
        except RuntimeError as exc:
            raise Unavailable(f"the GPU takes no index: {exc}") from exc
        return index

    def make(self, base: Vector, places: Places, built: Any, rows: Rows, same: npt.NDArray[np.bool_]) -> GpuFlat:
        """See `Maker.make`."""
        return GpuFlat(base, built, rows, same)

    def cancel(self) -> None:
        """See `Maker.cancel`."""
        self._cancelled = True


class GpuFlat:
    """Rows in a flat index on a GPU; place i there holds row `_rows[i]`, -1 for a tombstone."""

    def __init__(self, base: Vector, index: Any, rows: Rows, same: npt.NDArray[np.bool_]) -> None:
        self._base = base
        self._index = index
        self._rows: Rows = np.where(same, rows, -1)
        self._places = {row: place for place, row in enumerate(self._rows.tolist()) if row >= 0}
        self._side: list[int] = []

    @property
    def _dead(self) -> int:
        return len(self._rows) - len(self._places)

    @property
    def worn(self) -> bool:
        """See `LargeIndex.worn`."""
        return self._dead >= MAX_DEAD

    def add(self, row: int) -> None:
        """See `LargeIndex.add`."""
        self._side.append(row)
        if len(self._side) >= SIDE_LIMIT:
            moved = np.asarray(self._side, dtype=np.int64)
            self._index.add(self._base[moved])
            self._places.update(zip(self._side, range(len(self._rows), len(self._rows) + len(moved)), strict=True))
            self._rows = np.concatenate([self._rows, moved])
            self._side = []

    def remove(self, row: int) -> None:
        """See `LargeIndex.remove`."""
        place = self._places.pop(row, None)
        if place is None:
            self._side.remove(row)
        else:
            self._rows[place] = -1

    def search(self, query: Vector, k: int) -> tuple[Scores, Rows]:
        """See `LargeIndex.search`: exact while k and the tombstones are no more than MAX_K."""
        wanted = min(MAX_K, k + self._dead, len(self._rows))
        scores, rows = knn(self._base, np.asarray(self._side, dtype=np.int64), query, k)
        if wanted:
            found, places = self._index.search(query[None, :], wanted)
            alive = self._rows[places[0]]
            scores = np.concatenate([scores, found[0][alive >= 0]])
            rows = np.concatenate([rows, alive[alive >= 0]])
        best = np.argsort(-scores, kind="stable")[:k]
        return scores[best], rows[best]

    def all_rows(self) -> list[int]:
        """See `LargeIndex.all_rows`."""
        return [*self._places, *self._side]

    def check_integrity(self) -> None:
        """See `LargeIndex.check_integrity`."""
        assert self._index.ntotal == len(self._rows)
        assert all(self._rows[place] == row for row, place in self._places.items())
        assert int((self._rows >= 0).sum()) == len(self._places)
        assert self._places.keys().isdisjoint(self._side)
