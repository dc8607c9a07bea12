"""The index of entries: bounds, age, who leaves, purges; and a machine that compares it with a plain dict."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvmesh.errors import InvalidArgument
from router_helpers import FakeClock
from services.router.near.builder import train
from services.router.near.entries import Entry
from services.router.near.index import NearIndex
from services.router.near.search import Vector

SOAK = bool(os.environ.get("KVMESH_SOAK"))


def unit(*values: float) -> Vector:
    vector = np.zeros(4, dtype=np.float32)
    vector[: len(values)] = values
    return (vector / np.linalg.norm(vector)).astype(np.float32)


def index(**options: object) -> NearIndex:
    values = {"max_entries": 100, "max_bytes": 1 << 20, "ttl_s": 60.0} | options
    return NearIndex(4, **values)  # type: ignore[arg-type]


def texts(near: NearIndex, partition: bytes, vector: Vector, tau: float = 0.9, **options: float) -> list[str]:
    return [found.entry.text for found in near.search(partition, vector, tau, **options)]  # type: ignore[arg-type]


def test_search_is_by_cosine_within_a_partition() -> None:
    near = index()
    near.add(b"p", unit(1), Entry("exact", b"", b""))
    near.add(b"p", unit(1, 0.2), Entry("close", b"", b""))
    near.add(b"p", unit(0, 1), Entry("far", b"", b""))
    near.add(b"q", unit(1), Entry("foreign", b"", b""))
    assert texts(near, b"p", unit(1)) == ["exact", "close"]
    assert texts(near, b"p", unit(1), tau=0.999) == ["exact"]
    assert texts(near, b"p", unit(1), k=1) == ["exact"]
    assert texts(near, b"none", unit(1), tau=-1.0) == []


def test_entries_grow_old_and_are_replaced() -> None:
    clock = FakeClock()
    near = index(clock=clock)
    near.add(b"p", unit(1), Entry("a", b"", b"old"))
    clock.advance(30.0)
    near.add(b"p", unit(1), Entry("a", b"", b"new"))
    assert len(near) == 1
    assert [(found.entry.answer, found.age_s) for found in near.search(b"p", unit(1), 0.9)] == [(b"new", 0.0)]
    clock.advance(59.0)
    found = near.search(b"p", unit(1), 0.9)[0]
    near.touch(found.kept)
    assert found.age_s == 59.0
    clock.advance(1.0)
    assert texts(near, b"p", unit(1)) == [], "use does not prolong a life"
    assert (len(near), near.partitions, near.held_bytes) == (0, 0, 0)


def test_entries_from_elsewhere_keep_their_age() -> None:
    clock = FakeClock()
    near = index(clock=clock)
    assert near.add(b"p", unit(1), Entry("a", b"", None), age_s=50.0, left_s=10.0)
    assert near.add(b"p", unit(1), Entry("b", b"", None), left_s=1e9), "never longer than here"
    assert not near.add(b"p", unit(1), Entry("c", b"", None), left_s=-1.0)
    assert {found.entry.text: found.age_s for found in near.search(b"p", unit(1), 0.9)} == {"a": 50.0, "b": 0.0}
    clock.advance(10.0)
    assert texts(near, b"p", unit(1)) == ["b"]
    clock.advance(50.0)
    assert texts(near, b"p", unit(1)) == []


def test_old_ones_do_not_crowd_out_those_that_are_young_enough() -> None:
    clock = FakeClock()
    near = index(clock=clock)
    for i in range(12):
        near.add(b"p", unit(1), Entry(f"old {i}", b"", b""))
    clock.advance(30.0)
    near.add(b"p", unit(1, 0.1), Entry("young", b"", b""))
    assert "young" not in texts(near, b"p", unit(1), k=8)
    assert texts(near, b"p", unit(1), k=8, max_age_s=10.0) == ["young"]


def test_the_least_recently_used_leave_first() -> None:
    near = index(max_entries=3)
    for name in "abc":
        near.add(b"p", unit(1), Entry(name, b"", b""))
    near.touch(next(found.kept for found in near.search(b"p", unit(1), 0.9) if found.entry.text == "a"))
    near.add(b"p", unit(1), Entry("d", b"", b""))
    assert sorted(texts(near, b"p", unit(1))) == ["a", "c", "d"]


def test_bytes_are_bounded() -> None:
    near = index(max_bytes=20_000)
    assert not near.add(b"p", unit(1), Entry("huge", b"", b"x" * 20_000))
    for i in range(100):
        near.add(b"p", unit(1), Entry(str(i), b"", b"x" * 4000))
        assert near.held_bytes <= 20_000
    assert len(near) == 3
    near.check_integrity()


def test_answers_that_can_be_fetched_leave_before_entries() -> None:
    near = index(max_bytes=20_000, fetchable=True)
    for i in range(10):
        near.add(b"p", unit(1), Entry(str(i), b"", b"x" * 4000))
        near.check_integrity()
    held = {found.entry.text: found.entry.answer is not None for found in near.search(b"p", unit(1), 0.9, 10)}
    assert len(held) == 10
    assert {text for text, has in held.items() if has} == {"8", "9"}


def test_no_tenant_pushes_out_all_of_anothers() -> None:
    near = index(max_entries=100)
    for i in range(10):
        near.add(b"small", unit(1), Entry(str(i), b"", b"", tenant="small"))
    for i in range(1000):
        near.add(b"big", unit(1), Entry(str(i), b"", b"", tenant="big"))
        near.add(b"other", unit(1), Entry(str(i), b"", b"", tenant="other"))
    near.check_integrity()
    assert near.shares.held("small")[0] == 10, "it holds less than a third"
    assert near.shares.held("big")[0] + near.shares.held("other")[0] == 90
    assert abs(near.shares.held("big")[0] - near.shares.held("other")[0]) <= 2
    alone = index(max_entries=100)
    for i in range(1000):
        alone.add(b"p", unit(1), Entry(str(i), b"", b"", tenant="only"))
    assert alone.shares.held("only")[0] == 100, "who is alone has it all"


def test_in_a_large_cache_the_largest_tenants_share_what_the_small_leave() -> None:
    near = index(max_entries=5000, max_bytes=1 << 30)
    for i in range(300):
        near.add(b"p", unit(1), Entry(str(i), b"", b"", tenant=f"small {i % 30}"))
    for i in range(12_000):
        tenant = f"big {i % 3}"
        near.add(tenant.encode(), unit(1), Entry(str(i), b"", b"", tenant=tenant))
    assert [near.shares.held(f"small {i}")[0] for i in range(30)] == [10] * 30
    held = [near.shares.held(f"big {i}")[0] for i in range(3)]
    assert sum(held) == 4700
    assert max(held) - min(held) <= 20
    near.check_integrity()


def test_many_bytes_count_as_much_as_many_entries() -> None:
    near = index(max_bytes=100_000)
    for i in range(5):
        near.add(b"small", unit(1), Entry(str(i), b"", b"", tenant="small"))
    for i in range(50):
        near.add(b"big", unit(1), Entry(str(i), b"", b"x" * 20_000, tenant="big"))
    assert near.shares.held("small")[0] == 5
    assert near.shares.held("big")[0] == 4


def test_purges() -> None:
    near = index()

    def fill() -> None:
        for i in range(8):
            own = {"entry_id": bytes([i]) * 16, "tenant": "t" * (i % 2), "model": "ab"[i // 4], "family": "f" * (i % 4)}
            near.add(b"p", unit(1), Entry(str(i), b"", b"", epoch=i // 4 + 1, **own))  # type: ignore[arg-type]

    for purge, left in (
        (("id", "03" * 16), "0124567"),
        (("id", "ff" * 16), "01234567"),
        (("tenant", "t"), "0246"),
        (("model", "a"), "4567"),
        (("family", "ff"), "013457"),
        (("family", "?"), "01234567"),
    ):
        fill()
        assert near.purge(*purge) == 8 - len(left)
        assert sorted(texts(near, b"p", unit(1))) == list(left)
        near.check_integrity()
    fill()
    assert near.drop_before(2) == 4
    assert sorted(texts(near, b"p", unit(1))) == list("4567")
    fill()
    mark = near.mark()
    near.add(b"p", unit(1), Entry("late", b"", b"", entry_id=b"L" * 16))
    near.add(b"p", unit(1), Entry("here only", b"", b""))
    assert near.sweep(mark, {b"\0" * 16}) == 7
    assert sorted(texts(near, b"p", unit(1))) == ["0", "here only", "late"]
    near.clear()
    near.check_integrity()
    assert len(near) == 0


@pytest.mark.parametrize("vector", [unit(1) * np.nan, unit(1) * 0, np.ones(5, dtype=np.float32) / np.sqrt(5)])
def test_a_bad_vector_does_not_replace_a_good_one(vector: Vector) -> None:
    near = index(max_entries=1)
    near.add(b"p", unit(1), Entry("a", b"", b"good"))
    for text in ("a", "b"):
        with pytest.raises(InvalidArgument):
            near.add(b"p", vector, Entry(text, b"", b"bad"))
    with pytest.raises(InvalidArgument):
        near.search(b"p", vector, 0.9)
    near.check_integrity()
    assert [found.entry.answer for found in near.search(b"p", unit(1), 0.9)] == [b"good"]


# --- against a dict -----------------------------------------------------------------------------------------------

DIM = 16
TTL_S = 100.0
MAX_ENTRIES = 60
MAX_BYTES = 160_000
BIG_ROWS = 12
POINTS = np.random.default_rng(7).normal(size=(64, DIM)).astype(np.float32)
POINTS /= np.linalg.norm(POINTS, axis=1, keepdims=True)


@dataclass
class Known:
    partition: bytes
    vector: Vector
    entry: Entry
    expires: float


class Machine(RuleBasedStateMachine):
    """Everything that happens to an index, and a dict of what was added and may still be there.

    The dict forgets what was removed, replaced, purged or grew old. What the index evicted is taken over from it, after
    a check that it was full.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.near = NearIndex(
            DIM, max_entries=MAX_ENTRIES, max_bytes=MAX_BYTES, ttl_s=TTL_S, clock=self.clock, big_rows=BIG_ROWS
        )
        self.known: dict[tuple[bytes, str], Known] = {}
        self.building: tuple[object, ...] | None = None

    @rule(
        partition=st.sampled_from([b"p", b"p", b"p", b"q", b"r", b"s"]),
        numbers=st.lists(st.integers(0, 63), min_size=1, max_size=8),
        size=st.integers(0, 9000),
    )
    def add(self, partition: bytes, numbers: list[int], size: int) -> None:
        for number in numbers:
            self.add_one(partition, number, size)

    def add_one(self, partition: bytes, number: int, size: int) -> None:
        tenant = partition.decode() * 2
        entry = Entry(str(number), b"", b"x" * size, entry_id=partition * 8 + number.to_bytes(8), tenant=tenant)
        before, held = len(self.near), self.near.held_bytes
        assert self.near.add(partition, POINTS[number], entry)
        replaced = (partition, entry.text) in self.known
        self.known[(partition, entry.text)] = Known(partition, POINTS[number], entry, self.clock.now + TTL_S)
        gone = [name for name, known in self.known.items() if self.near.find(known.entry.entry_id) is None]
        if gone:
            full = before >= MAX_ENTRIES or held + size + 2000 + 4 * DIM > MAX_BYTES
            assert full, "nothing leaves while there is room"
        assert (partition, entry.text) not in gone
        assert not (replaced and len(self.near) > before)
        for name in gone:
            del self.known[name]

    @rule(partition=st.sampled_from([b"p", b"q", b"r", b"none"]), number=st.integers(0, 63), k=st.integers(1, 80))
    def search(self, partition: bytes, number: int, k: int) -> None:
        query = POINTS[number]
        want = sorted(
            (float(known.vector @ query) for known in self.known.values() if known.partition == partition), reverse=True
        )
        found = self.near.search(partition, query, -1.0, k)
        assert all(each.kept.partition == partition for each in found), "partitions never mix"
        np.testing.assert_allclose([each.score for each in found], np.minimum(want[:k], 1.0), atol=1e-4)
        for each in found:
            assert self.known[(partition, each.entry.text)].entry == each.entry
        if found:
            self.near.touch(found[-1].kept)

    @rule(partition=st.sampled_from([b"p", b"q"]), number=st.integers(0, 63))
    def remove(self, partition: bytes, number: int) -> None:
        count = self.near.purge("id", (partition * 8 + number.to_bytes(8)).hex())
        assert count == (self.known.pop((partition, str(number)), None) is not None)

    @rule(partition=st.sampled_from([b"q", b"r", b"s"]))
    def purge_tenant(self, partition: bytes) -> None:
        doomed = [name for name in self.known if name[0] == partition]
        assert self.near.purge("tenant", partition.decode() * 2) == len(doomed)
        for name in doomed:
            del self.known[name]

    @rule(seconds=st.sampled_from([0.5, 20.0, 60.0]))
    def grow_old(self, seconds: float) -> None:
        self.clock.advance(seconds)
        doomed = [name for name, known in self.known.items() if known.expires <= self.clock.now]
        assert self.near.expire() == len(doomed)
        for name in doomed:
            del self.known[name]

    @rule()
    def refuse(self) -> None:
        with pytest.raises(InvalidArgument):
            self.near.add(b"p", POINTS[0] * np.nan, Entry("0", b"", b""))

    @precondition(lambda self: self.building is None)
    @rule()
    def begin_building(self) -> None:
        arena = self.near.arena
        name = arena.wanting()
        if name is not None:
            rows, generations = arena.snapshot(name)
            self.building = (name, rows, generations, train(arena.base, rows))

    @precondition(lambda self: self.building is not None)
    @rule()
    def end_building(self) -> None:
        assert self.building is not None
        self.near.arena.install(*self.building)  # type: ignore[arg-type]
        self.building = None

    @invariant()
    def agrees(self) -> None:
        self.near.check_integrity()
        assert len(self.near) == len(self.known)

    def teardown(self) -> None:
        self.near.close()


Machine.TestCase.settings = settings(
    max_examples=200 if SOAK else 40,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestAgainstADict = Machine.TestCase
