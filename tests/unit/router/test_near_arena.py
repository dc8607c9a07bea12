"""The arena: rows by partition, the index of a large one, and the process that trains it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvmesh.errors import DataLoss, FailedPrecondition, InvalidArgument, Unavailable
from services.router.near import builder, cells
from services.router.near.arena import Arena
from services.router.near.builder import BuilderProcess, CellsMaker, parse, train
from services.router.near.building import IndexBuilding
from services.router.near.cells import Built, Cells
from services.router.near.gpu import MAX_DEAD, GpuFlat, GpuMaker
from services.router.near.search import Rows, Scores, Vector

DIM = 32
LIMIT_S = 60.0


def units(count: int, seed: int = 0, dim: int = DIM) -> Vector:
    drawn = np.random.default_rng(seed).normal(size=(count, dim)).astype(np.float32)
    return np.asarray(drawn / np.linalg.norm(drawn, axis=1, keepdims=True), dtype=np.float32)


def near(vectors: Vector, cosine: float, seed: int = 1) -> Vector:
    """Vectors at this cosine to the given ones."""
    noise = units(len(vectors), seed, vectors.shape[1])
    noise -= (noise * vectors).sum(axis=1, keepdims=True) * vectors
    noise /= np.linalg.norm(noise, axis=1, keepdims=True)
    return np.asarray(cosine * vectors + np.sqrt(1 - cosine**2) * noise, dtype=np.float32)


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(DIM, 4000, big_rows=200)
    yield made
    made.close()


def build(arena: Arena, name: bytes) -> None:
    """As a build does, but here: a child's work is `train`."""
    rows, generations = arena.snapshot(name)
    built = train(arena.base, rows) if arena.maker.name == "cpu" else arena.maker.build(arena, rows)
    assert arena.install(name, rows, generations, built)


def test_search_equals_numpy_and_never_leaves_the_partition(arena: Arena) -> None:
    vectors = units(300)
    rows = [arena.add(b"pqr"[i % 3 : i % 3 + 1], v) for i, v in enumerate(vectors)]
    for query in units(20, seed=5):
        for at, name in enumerate((b"p", b"q", b"r")):
            own = vectors[at::3] @ query
            best = np.argsort(-own)[:8]
            scores, found = arena.search(name, query, 8)
            np.testing.assert_allclose(scores, own[best], atol=1e-5)
            assert found.tolist() == [rows[at + 3 * i] for i in best]
    assert len(arena.search(b"none", vectors[0], 8)[0]) == 0
    assert len(arena.search(b"p", vectors[0], 1000)[0]) == 100, "no more than there are"


@pytest.mark.parametrize(
    "vector",
    [
        np.zeros(DIM, dtype=np.float32),
        np.full(DIM, np.nan, dtype=np.float32),
        np.full(DIM, np.inf, dtype=np.float32),
        np.ones(DIM, dtype=np.float32),
        units(1)[0][:-1],
        units(1),
        units(1, dim=2 * DIM)[0],
    ],
)
def test_what_is_no_unit_vector_is_refused_and_the_partition_stays(arena: Arena, vector: Vector) -> None:
    good = units(3)
    rows = [arena.add(b"p", each) for each in good]
    with pytest.raises(InvalidArgument, match="a vector of"):
        arena.add(b"p", vector)
    with pytest.raises(InvalidArgument, match="a vector of"):
        arena.search(b"p", vector, 8)
    arena.check_integrity()
    assert arena.search(b"p", good[1], 1)[1].tolist() == [rows[1]]


def test_rows_are_used_again_and_bounded() -> None:
    arena = Arena(DIM, 4)
    vectors = units(5)
    rows = [arena.add(b"p", each) for each in vectors[:4]]
    with pytest.raises(IndexError):
        arena.add(b"q", vectors[4])
    arena.check_integrity()
    assert arena.partitions == 1
    arena.remove(rows[2])
    assert arena.add(b"q", vectors[4]) == rows[2]
    assert rows[2] not in arena.search(b"p", vectors[2], 8)[1]
    arena.close()


# --- the index of a large partition -------------------------------------------------------------------------------


def test_a_large_partition_asks_for_an_index_and_finds_the_same(arena: Arena) -> None:
    vectors = units(1000)
    for i, vector in enumerate(vectors):
        arena.add(b"p", vector)
        assert (arena.wanting() is None) == (i < 199)
    arena.add(b"small", vectors[0])
    build(arena, b"p")
    assert (arena.wanting(), arena.indexed) == (None, 1)
    arena.check_integrity()
    for i, query in enumerate(near(vectors, 0.92)):
        scores, rows = arena.search(b"p", query, 1)
        assert rows[0] == i
        assert scores[0] == pytest.approx(0.92, abs=1e-3)


def test_a_part_of_the_cells_is_enough_for_what_is_near(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "LEAST_ROWS", 300)
    vectors = units(3000)
    for vector in vectors:
        arena.add(b"p", vector)
    build(arena, b"p")
    partition = arena._partitions[b"p"]
    assert isinstance(partition.large, Cells)
    queries = near(vectors, 0.9)
    assert max(len(partition.large.candidates(query)) for query in queries) < 1500
    found = sum(arena.search(b"p", query, 1)[1][0] == i for i, query in enumerate(queries))
    assert found >= 0.99 * len(queries)


def test_rows_come_and_go_beside_an_index(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two cells probed a row is found by its own vector only where it lies in the right one."""
    monkeypatch.setattr(cells, "LEAST_ROWS", 1)
    monkeypatch.setattr(cells, "LEAST_PROBED", 2)
    vectors, later = units(600), units(500, seed=9)
    rows = [arena.add(b"p", vector) for vector in vectors]
    snapshot = arena.snapshot(b"p")
    built = train(arena.base, snapshot[0])
    # While it is trained, rows leave, and their numbers go to others, in this partition and in another.
    for row in rows[:60]:
        arena.remove(row)
    foreign = [arena.add(b"q", vector) for vector in later[:30]]
    during = [arena.add(b"p", vector) for vector in later[30:200]]
    assert set(foreign + during) >= set(rows[:60])
    assert arena.install(b"p", *snapshot, built)
    arena.check_integrity()
    after = [arena.add(b"p", vector) for vector in later[200:]]
    for row in rows[60:120]:
        arena.remove(row)
    arena.check_integrity()
    for vector, row in zip(later[30:], during + after, strict=True):
        assert arena.search(b"p", vector, 1)[1][0] == row
    found = {row for vector in np.concatenate([vectors, later]) for row in arena.search(b"p", vector, 8)[1].tolist()}
    assert found.isdisjoint(foreign)
    assert found <= set(during + after + rows[120:])


def test_an_index_is_renewed_when_worn_and_dropped_when_small(arena: Arena) -> None:
    vectors = units(900)
    rows = [arena.add(b"p", vector) for vector in vectors[:300]]
    build(arena, b"p")
    for vector in vectors[300:599]:
        rows.append(arena.add(b"p", vector))
    assert arena.wanting() is None
    rows.append(arena.add(b"p", vectors[599]))
    assert arena.wanting() == b"p"
    build(arena, b"p")
    assert arena.wanting() is None
    for row in rows[99:]:
        arena.remove(row)
    arena.check_integrity()
    assert arena.indexed == 0
    assert arena.search(b"p", vectors[5], 1)[1][0] == rows[5]
    snapshot = arena.snapshot(b"p")
    assert not arena.install(b"p", *snapshot, train(arena.base, snapshot[0])), "too small by now"


def test_equal_rows_do_not_hide_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything in one cell, as in a cache of one question in many wordings."""
    monkeypatch.setattr(cells, "LEAST_ROWS", 20)
    arena = Arena(DIM, 1000, big_rows=100)
    same = near(np.repeat(units(1), 400, axis=0), 0.999)
    rows = [arena.add(b"p", vector) for vector in same]
    build(arena, b"p")
    assert sum(arena.search(b"p", vector, 1)[1][0] == row for vector, row in zip(same, rows, strict=True)) >= 396
    arena.close()


# --- the process that trains --------------------------------------------------------------------------------------


def filled(command: list[str] | None = None) -> Arena:
    arena = Arena(DIM, 1000, big_rows=100, maker=CellsMaker(command))
    for vector in units(500):
        arena.add(b"p", vector)
    return arena


def test_a_child_builds_what_this_process_would() -> None:
    arena = filled()
    rows, _ = arena.snapshot(b"p")
    built = BuilderProcess().run(arena.fileno(), DIM, arena.max_rows, rows, timeout_s=LIMIT_S)
    here = train(arena.base, rows)
    np.testing.assert_allclose(built.centroids, here.centroids, atol=1e-5)
    assert (built.cells == here.cells).mean() > 0.99
    arena.close()


class Posted:
    """Calls posted by another thread, run by this one."""

    def __init__(self) -> None:
        self._came = threading.Condition()
        self._calls: list[object] = []

    def __call__(self, call: object) -> None:
        with self._came:
            self._calls.append(call)
            self._came.notify()

    def run_one(self) -> None:
        with self._came:
            assert self._came.wait_for(lambda: self._calls, LIMIT_S)
            call = self._calls.pop(0)
        call()  # type: ignore[operator]


HANGS = [sys.executable, "-c", "import time; time.sleep(600)"]
LIES = [sys.executable, "-c", "import sys; sys.stdin.buffer.read(); sys.stdout.write('x' * 1000)"]


def test_searches_go_on_while_the_child_dies() -> None:
    arena = filled(HANGS)
    posted = Posted()
    building = IndexBuilding(posted)
    building.poll(arena)
    assert building.running
    assert isinstance(arena.maker, CellsMaker)
    while arena.maker.child is None or arena.maker.child.pid is None:
        os.sched_yield()
    child = arena.maker.child
    building.poll(arena)
    assert arena.maker.child is child, "one at a time"
    assert child.pid is not None
    os.kill(child.pid, 9)
    posted.run_one()
    assert (building.running, building.failed, building.built) == (False, 1, 0)
    assert arena.search(b"p", units(500)[7], 1)[0][0] > 0.999
    building.poll(arena)
    assert not building.running, "not again at once"
    arena.close()


def test_a_child_that_lies_is_not_believed() -> None:
    arena = filled(LIES)
    posted = Posted()
    building = IndexBuilding(posted)
    building.poll(arena)
    posted.run_one()
    assert (building.failed, arena.indexed) == (1, 0)
    arena.maker = CellsMaker()
    building = IndexBuilding(posted)
    building.poll(arena)
    posted.run_one()
    assert (building.failed, building.built, arena.indexed) == (0, 1, 1)
    arena.check_integrity()
    arena.close()


def test_a_child_that_is_not_wanted_any_more_ends() -> None:
    arena = filled(HANGS)
    posted = Posted()
    building = IndexBuilding(posted)
    building.poll(arena)
    building.close()
    posted.run_one()
    assert building.failed == 0
    building.poll(arena)
    assert not building.running
    with pytest.raises(Unavailable, match="does not start"):
        BuilderProcess(["/nonexistent/python"]).run(arena.fileno(), DIM, arena.max_rows, arena.snapshot(b"p")[0])
    arena.close()


def reply(stray: int = 0, spoil: bool = False, **says: object) -> bytes:
    """A child's reply with 4 cells for 10 rows; `says` changes its head alone."""
    centroids = units(4)
    nearest = np.arange(10, dtype=np.int32) % 4
    nearest[3] = stray
    if spoil:
        centroids[1, 2] = np.nan
    head = {"magic": builder.MAGIC, "dim": DIM, "count": 4, "rows": 10} | says
    return builder._REPLY.pack(*head.values()) + centroids.tobytes() + nearest.tobytes()


def test_only_a_whole_index_of_the_rows_asked_for_is_taken() -> None:
    built = parse(reply(), dim=DIM, rows=10)
    assert (built.centroids.shape, built.cells.shape) == ((4, DIM), (10,))
    bad = [
        b"",
        reply()[:20],
        reply()[:-1],
        reply() + b"x",
        reply(magic=b"kvcells0"),
        reply(dim=DIM + 1),
        reply(count=1 << 30),
        reply(count=0),
        reply(rows=9),
        reply(spoil=True),
        reply(stray=4),
        reply(stray=-1),
    ]
    for each in bad:
        with pytest.raises(DataLoss):
            parse(each, dim=DIM, rows=10)


def test_cells_of_nothing_hold_what_is_added() -> None:
    base = units(50)
    places = (np.zeros(50, dtype=np.int32), np.zeros(50, dtype=np.int32))
    none = np.empty(0, dtype=np.int64)
    made = Cells(base, places, Built(units(3, seed=2), np.empty(0, dtype=np.int32)), none, np.empty(0, dtype=np.int32))
    for row in range(50):
        made.add(row)
    made.settle(1000)
    made.check_integrity()
    assert sorted(made.all_rows()) == list(range(50))
    assert set(made.candidates(base[0]).tolist()) == set(range(50)), "fewer cells than are probed"


# --- FAISS on a GPU -------------------------------------------------------------------------------------------------


class FakeGpu:
    """What `gpu` asks of faiss-gpu, in numpy."""

    def __init__(self, gpus: int = 1, memory: int = 1 << 30) -> None:
        self.gpus = gpus
        self.memory = memory

    def get_num_gpus(self) -> int:
        return self.gpus

    class StandardGpuResources:
        def setTempMemory(self, size: int) -> None:
            assert size > 0

    def GpuIndexFlatIP(self, resources: object, dim: int) -> FakeIndex:
        return FakeIndex(dim, self.memory)


class FakeIndex:
    def __init__(self, dim: int, memory: int) -> None:
        self._vectors = np.empty((0, dim), dtype=np.float32)
        self._memory = memory

    @property
    def ntotal(self) -> int:
        return len(self._vectors)

    def add(self, vectors: Vector) -> None:
        assert vectors.dtype == np.float32
        assert vectors.flags.c_contiguous
        if self._vectors.nbytes + vectors.nbytes > self._memory:
            raise RuntimeError("out of memory")
        self._vectors = np.concatenate([self._vectors, vectors])

    def search(self, queries: Vector, k: int) -> tuple[Scores, Rows]:
        assert 0 < k <= 2048
        scores = queries @ self._vectors.T
        order = np.argsort(-scores, axis=1)[:, :k]
        return np.take_along_axis(scores, order, axis=1), order


def test_on_a_gpu_rows_come_and_go_and_every_search_is_exact() -> None:
    arena = Arena(DIM, 4000, big_rows=200, maker=GpuMaker(FakeGpu()))
    rng = np.random.default_rng(3)
    vectors = units(2600)
    alive = {arena.add(b"p", vector): i for i, vector in enumerate(vectors[:600])}
    snapshot = arena.snapshot(b"p")
    built = arena.maker.build(arena, snapshot[0])
    for row in list(alive)[:50]:
        arena.remove(row)
        del alive[row]
    for i in range(600, 700):
        alive[arena.add(b"p", vectors[i])] = i
    assert arena.install(b"p", *snapshot, built)
    for i in range(700, 2600):
        alive[arena.add(b"p", vectors[i])] = i
        doomed = list(alive)[int(rng.integers(len(alive)))]
        arena.remove(doomed)
        del alive[doomed]
        if i % 50 == 0:
            arena.check_integrity()
            query = units(1, seed=i)[0]
            expected = sorted((float(vectors[at] @ query) for at in alive.values()), reverse=True)[:8]
            scores, rows = arena.search(b"p", query, 8)
            np.testing.assert_allclose(scores, expected, atol=1e-5)
            assert set(rows.tolist()) <= set(alive)
        name = arena.wanting()
        if name is not None:
            build(arena, name)
    large = arena._partitions[b"p"].large
    assert isinstance(large, GpuFlat)
    assert large._dead < MAX_DEAD
    arena.close()


def test_a_gpu_that_has_no_room_or_is_not_there() -> None:
    arena = Arena(DIM, 1000, big_rows=100, maker=GpuMaker(FakeGpu(memory=1000)))
    for vector in units(200):
        arena.add(b"p", vector)
    posted = Posted()
    building = IndexBuilding(posted)
    building.poll(arena)
    posted.run_one()
    assert (building.failed, arena.indexed) == (1, 0)
    assert arena.search(b"p", units(200)[3], 1)[0][0] > 0.999
    arena.close()
    with pytest.raises(FailedPrecondition, match="no GPU"):
        GpuMaker(FakeGpu(gpus=0))
    with pytest.raises(FailedPrecondition, match="no GPU"):
        GpuMaker()
