"""Training of a large partition's index, in a process of its own: minutes of work would stop every search.

The child maps the arena's memory, reads the rows that it is told on its standard input, and writes centroids and the
cell of each row to its standard output; all of it is plain numbers of known length. A row that changes meanwhile costs
nothing: the parent leaves out rows whose generation is another by then.

    python -m services.router.near.builder DESCRIPTOR
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import subprocess
import sys
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import numpy.typing as npt

from kvmesh.errors import DataLoss, DeadlineExceeded, Unavailable
from services.router.near.cells import Built, Cells
from services.router.near.search import Places, Rows, Vector

if TYPE_CHECKING:
    from services.router.near.arena import Arena

_ASK = struct.Struct("<8sIIQ")
_REPLY = struct.Struct("<8sIIQ")
MAGIC = b"kvcells1"
MAX_CELLS = 1 << 16
MAX_ROWS = 1 << 31
ROUNDS = 6
SAMPLED_PER_CELL = 24
ASSIGNED_AT_ONCE = 8192
TIMEOUT_S = 600.0
NICENESS = 10


def cells_for(rows: int) -> int:
    """How many cells suit so many rows: 1,264 for 10^5, about as many as rows are then looked through."""
    return min(MAX_CELLS, max(1, int(4 * rows**0.5)))


def train(base: Vector, rows: Rows, *, seed: int = 1) -> Built:
    """Spherical k-means over a sample of the rows, then the nearest centroid of each. Deterministic."""
    import faiss

    count = min(cells_for(len(rows)), len(rows))
    dim = base.shape[1]
    sample = rows
    if len(rows) > count * SAMPLED_PER_CELL:
        sample = np.sort(np.random.default_rng(seed).choice(rows, count * SAMPLED_PER_CELL, replace=False))
    clustering = faiss.Clustering(dim, count)
    clustering.niter, clustering.seed, clustering.spherical = ROUNDS, seed, True
    clustering.min_points_per_centroid, clustering.max_points_per_centroid = 1, SAMPLED_PER_CELL + 1
    clustering.train(np.ascontiguousarray(base[sample]), faiss.IndexFlatIP(dim))
    centroids = faiss.vector_to_array(clustering.centroids).reshape(count, dim).astype(np.float32)
    cells = np.empty(len(rows), dtype=np.int32)
    for start in range(0, len(rows), ASSIGNED_AT_ONCE):
        part = rows[start : start + ASSIGNED_AT_ONCE]
        _, nearest = faiss.knn(np.ascontiguousarray(base[part]), centroids, 1, metric=faiss.METRIC_INNER_PRODUCT)
        cells[start : start + len(part)] = nearest[:, 0]
    return Built(centroids, cells)


def parse(reply: bytes, *, dim: int, rows: int) -> Built:
    """What the child wrote. Raises DataLoss for anything but a whole and plausible index of so many rows."""
    if len(reply) < _REPLY.size:
        raise DataLoss("the index builder wrote too little")
    magic, got_dim, count, got_rows = _REPLY.unpack_from(reply)
    if (magic, got_dim, got_rows) != (MAGIC, dim, rows) or not 0 < count <= MAX_CELLS:
        raise DataLoss("the index builder wrote another index than was asked for")
    if len(reply) != _REPLY.size + count * dim * 4 + rows * 4:
        raise DataLoss("the index builder wrote another length than it said")
    centroids = np.frombuffer(reply, dtype="<f4", count=count * dim, offset=_REPLY.size).reshape(count, dim)
    cells = np.frombuffer(reply, dtype="<i4", offset=_REPLY.size + count * dim * 4)
    if not np.isfinite(centroids).all() or (rows and not 0 <= cells.min() <= cells.max() < count):
        raise DataLoss("the index builder wrote numbers that are no index")
    return Built(centroids.astype(np.float32), cells.astype(np.int32))


class BuilderProcess:
    """One child for one index. `run` blocks; `kill` may come from another thread."""

    def __init__(self, command: list[str] | None = None) -> None:
        self._command = command or [sys.executable, "-m", "services.router.near.builder"]
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False

    @property
    def pid(self) -> int | None:
        """Process id of the child while there is one."""
        return self._process.pid if self._process is not None else None

    def run(self, arena: int, dim: int, max_rows: int, rows: Rows, *, timeout_s: float = TIMEOUT_S) -> Built:
        """The index of some rows of the arena behind a descriptor.

        Raises Unavailable (the child died or could not be started), DeadlineExceeded, DataLoss (see `parse`).
        """
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        ask = _ASK.pack(MAGIC, dim, max_rows, len(rows)) + rows.astype("<i8").tobytes()
        try:
            process = subprocess.Popen(
                [*self._command, str(arena)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(arena,),
                env=environment,
            )
        except OSError as exc:
            raise Unavailable(f"the index builder does not start: {exc}") from exc
        self._process = process
        try:
            if self._killed:
                raise Unavailable("the index is not wanted any more")
            reply, _ = process.communicate(ask, timeout=timeout_s)
        except subprocess.TimeoutExpired as exc:
            raise DeadlineExceeded(f"the index was not built within {timeout_s:.0f} s") from exc
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    # What it still holds for a dead child cannot be flushed.
                    with contextlib.suppress(OSError):
                        pipe.close()
        if process.returncode != 0:
            raise Unavailable(f"the index builder ended with status {process.returncode}")
        return parse(reply, dim=dim, rows=len(rows))

    def kill(self) -> None:
        """End the child, now or as soon as it starts."""
        self._killed = True
        if self._process is not None:
            self._process.kill()


class CellsMaker:
    """Makes `Cells`, each trained by a child of its own."""

    name = "cpu"

    def __init__(self, command: list[str] | None = None) -> None:
        self._command = command
        self._cancelled = False
        self.child: BuilderProcess | None = None
        """The last one."""

    def build(self, arena: Arena, rows: Rows) -> Built:
        """See `Maker.build`."""
        child = self.child = BuilderProcess(self._command)
        if self._cancelled:
            child.kill()
        return child.run(arena.fileno(), arena.dim, arena.max_rows, rows)

    def make(self, base: Vector, places: Places, built: Built, rows: Rows, same: npt.NDArray[np.bool_]) -> Cells:
        """See `Maker.make`."""
        return Cells(base, places, built, rows[same], built.cells[same])

    def cancel(self) -> None:
        """See `Maker.cancel`."""
        self._cancelled = True
        if self.child is not None:
            self.child.kill()


def main(descriptor: int, source: BinaryIO, sink: BinaryIO) -> None:
    """The child: see the head of this file."""
    os.nice(NICENESS)
    magic, dim, max_rows, count = _ASK.unpack(source.read(_ASK.size))
    if magic != MAGIC or not 0 < count <= max_rows <= MAX_ROWS:
        raise DataLoss("not a request for an index")
    body = source.read(count * 8)
    rows = np.frombuffer(body, dtype="<i8")
    if len(rows) != count or not 0 <= rows.min() <= rows.max() < max_rows:
        raise DataLoss("rows that the arena does not have")
    memory = mmap.mmap(descriptor, max_rows * dim * 4, prot=mmap.PROT_READ)
    base = np.frombuffer(memory, dtype=np.float32).reshape(max_rows, dim)
    built = train(base, rows.astype(np.int64))
    sink.write(_REPLY.pack(MAGIC, dim, len(built.centroids), count))
    sink.write(built.centroids.astype("<f4").tobytes() + built.cells.astype("<i4").tobytes())
    sink.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.stdin.buffer, sys.stdout.buffer)
