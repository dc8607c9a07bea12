"""Writes spread over several NICs: each byte once, whatever the rails do."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.errors import InvalidArgument
from kvmesh.transfer.transports.base import Arrival, Completion, GrantedPages, Inbound, Write
from kvmesh.transfer.transports.fake import FakeOutbound, FaultOptions, VirtualClock
from kvmesh.transfer.transports.rails import RailsInbound, RailsOutbound, pairing
from kvmesh.transfer.transports.spread import spread

IMM = 5


def make_write(lengths: list[int], context: int = 1, immediate: int = IMM) -> Write:
    """Rows one after the other in the source, with gaps in the destination."""
    src = [sum(lengths[:i]) for i in range(len(lengths))]
    dst = [sum(lengths[:i]) + 64 * i for i in range(len(lengths))]
    return Write(context, immediate, 0, 0, src, dst, lengths, sum(lengths))


lengths = st.lists(st.integers(1, 3000), min_size=1, max_size=8)
weights = st.lists(st.sampled_from([1.0, 0.5, 400.0, 200.0, 3.3]), min_size=1, max_size=5)


@settings(max_examples=300, deadline=None)
@given(lengths, weights, st.integers(0, 4), st.sampled_from([1, 64, 4096]), st.sampled_from([1, 512, 65536]))
def test_each_byte_once(rows: list[int], shares: list[float], first: int, grain: int, least: int) -> None:
    write = make_write(rows)
    first %= len(shares)
    parts = spread(write, shares, first=first, grain=grain, min_part=least)
    assert len({part.rail for part in parts}) == len(parts) <= len(shares)
    assert len(parts) <= max(1, write.nbytes // least), "a small write is not cut to pieces"
    # Where each byte of the source goes; every one is a byte of a row.
    goes = np.full(write.nbytes, -1, dtype=np.int64)
    for part in parts:
        assert part.nbytes == sum(part.length) >= 1
        assert min(part.length) >= 1
        for src, dst, length in zip(part.src, part.dst, part.length, strict=True):
            assert (goes[src : src + length] == -1).all(), "no byte twice"
            goes[src : src + length] = np.arange(dst, dst + length)
    want = [np.arange(dst, dst + n) for dst, n in zip(write.dst, write.length, strict=True)]
    np.testing.assert_array_equal(goes, np.concatenate(want))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), weights, st.sampled_from([1, 64, 256]))
def test_shares_are_kept_to_a_grain(rows: list[int], shares: list[float], grain: int) -> None:
    write = make_write([row * 256 for row in rows])
    parts = spread(write, shares, grain=grain, min_part=1)
    total = sum(shares)
    moved = {part.rail: part.nbytes for part in parts}
    done = want = 0.0
    for rail, share in enumerate(shares):
        done += moved.get(rail, 0)
        want += write.nbytes * share / total
        # Every stretch ends at its target, or less than a grain before it.
        assert want - grain - 1 <= done <= want + 1 or math.isclose(done, want)


@settings(max_examples=100, deadline=None)
@given(lengths, st.integers(2, 4))
def test_cuts_inside_of_a_row_are_at_the_grain(rows: list[int], rails: int) -> None:
    write = make_write(rows)
    starts = set(write.src)
    for part in spread(write, [1.0] * rails, grain=1024, min_part=1):
        for src in part.src:
            row = max(start for start in starts if start <= src)
            assert (src - row) % 1024 == 0


@pytest.mark.parametrize(("shares", "first"), [([], 0), ([1.0, 0.0], 0), ([1.0], 1), ([1.0], -1), ([math.nan], 0)])
def test_what_cannot_be_spread(shares: list[float], first: int) -> None:
    with pytest.raises(InvalidArgument):
        spread(make_write([8]), shares, first=first)


def test_pairs() -> None:
    assert pairing(1, 1) == [(0, 0)]
    assert pairing(4, 2) == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert pairing(2, 4) == [(0, 0), (1, 1), (0, 2), (1, 3)]
    assert pairing(3, 2) == [(0, 0), (1, 1), (2, 0)]
    for bad in ((0, 1), (1, 0)):
        with pytest.raises(InvalidArgument):
            pairing(*bad)


class World:
    """A link over several fake rails, which copy real bytes."""

    def __init__(self, options: list[FaultOptions], size: int = 1 << 20) -> None:
        self.clock = VirtualClock()
        self.source = np.random.default_rng(1).integers(1, 256, size, dtype=np.uint8)
        self.target = np.zeros(size * 2, dtype=np.uint8)
        self.copies = np.zeros(size * 2, dtype=np.int64)
        self.told: Counter[int] = Counter()
        self.rails: list[FakeOutbound] = [
            FakeOutbound(option, self.land, self.tell, clock=self.clock) for option in options
        ]
        self.faults: list[tuple[int, str]] = []
        self.out = RailsOutbound(self.rails, on_fault=lambda rail, reason: self.faults.append((rail, reason)))
        self.ended: dict[int, Completion] = {}
        self.twice = 0

    def land(self, write: Write, first: int, last: int) -> int:
        moved = 0
        for i in range(first, last):
            src, dst, length = write.src[i], write.dst[i], write.length[i]
            self.target[dst : dst + length] = self.source[src : src + length]
            self.copies[dst : dst + length] += 1
            moved += length
        return moved

    def tell(self, immediate: int, nbytes: int) -> None:
        self.told[immediate] += nbytes

    def run(self, turns: int = 300) -> None:
        for _ in range(turns):
            for completion in self.out.poll(1 << 20):
                if completion.context == 0:
                    self.twice += 1
                else:
                    assert completion.context not in self.ended, "it completes once"
                    self.ended[completion.context] = completion
            self.clock.advance(0.1)


PAGES = [70_000, 1, 130_000, 4097, 64_000, 200_000]


@pytest.mark.parametrize("rails", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_bytes_arrive_once_over_rails_that_reorder(rails: int, seed: int) -> None:
    world = World([FaultOptions(seed=seed + i, delay_s=(0.0, 3.0), pieces=4, duplicate_rate=0.5) for i in range(rails)])
    writes = [make_write(PAGES[: 1 + i % len(PAGES)], context=i + 1, immediate=IMM + i) for i in range(6)]
    for write in writes:
        world.out.post(write)
        world.run()
    assert {c.context: (c.nbytes, c.error) for c in world.ended.values()} == {w.context: (w.nbytes, "") for w in writes}
    for write in writes:
        assert world.told[write.immediate] == write.nbytes
    whole = writes[-1]
    for src, dst, length in zip(whole.src, whole.dst, whole.length, strict=True):
        np.testing.assert_array_equal(world.target[dst : dst + length], world.source[src : src + length])


def test_all_rails_carry_their_share() -> None:
    world = World([FaultOptions()] * 3)
    world.out.post(make_write([64 << 10] * 12))
    assert [sum(part.write.nbytes for part in rail.parts.values()) > 0 for rail in world.out._rails] == [True] * 3
    world.run()
    assert world.ended[1].error == ""


def test_a_region_keeps_to_the_rails_near_to_it() -> None:
    world = World([FaultOptions()] * 4)
    world.out = RailsOutbound(world.rails, near=[[0, 2], [3], [], [7]])
    used = []
    for region in range(5):
        write = dataclasses.replace(make_write([64 << 10] * 8, context=region + 1), src_region=region)
        world.out.post(write)
        used.append([place for place, rail in enumerate(world.out._rails) if rail.parts])
        world.run(3)
    assert used == [[0, 2], [3], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert [world.ended[context].error for context in range(1, 6)] == [""] * 5


def test_small_writes_take_turns() -> None:
    world = World([FaultOptions()] * 3)
    used = []
    for context in range(1, 7):
        world.out.post(make_write([4096], context=context))
        used.append([bool(rail.parts) for rail in world.out._rails].index(True))
        world.run(3)
    assert used == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rail_that_dies_ends_the_link_and_is_named(victim: int) -> None:
    options = [FaultOptions(delay_s=(0.5, 3.0), pieces=3) for _ in range(3)]
    options[victim] = FaultOptions(delay_s=(0.5, 3.0), die_after_writes=2)
    world = World(options)
    writes = [make_write([100_000, 100_000], context=i + 1) for i in range(4)]
    for write in writes:
        world.out.post(write)
    world.run()
    assert [rail for rail, _ in world.faults] == [victim]
    assert world.out.broken
    assert all(rail.broken for rail in world.rails), "the others are fenced too"
    assert world.ended.keys() == {1, 2, 3, 4}
    assert any(completion.error for completion in world.ended.values())
    before = world.copies.copy()
    world.run()
    np.testing.assert_array_equal(world.copies, before, "nothing moves after the fence")
    world.out.post(make_write([8], context=9))
    world.run(1)
    assert world.ended[9].error


def test_an_error_of_one_part_fails_the_write_when_all_parts_are_over() -> None:
    world = World([FaultOptions(error_rate=1.0, seed=3), FaultOptions(delay_s=(5.0, 5.0))])
    world.out.post(make_write([100_000, 100_000]))
    world.run(20)
    assert world.ended == {}, "the part on the slow rail is still on its way"
    world.run(60)
    assert world.ended[1].error
    assert world.ended[1].nbytes == 0
    assert world.faults == []


def test_flush_ends_what_has_not_begun_on_every_rail() -> None:
    world = World([FaultOptions(hold_after_writes=1)] * 2)
    world.out.post(make_write([100_000, 100_000]))
    world.run(5)
    assert world.ended == {}
    world.out.flush(IMM)
    world.run(5)
    assert world.ended[1].error
    assert not world.out.broken


def test_fence_from_outside_is_no_fault_of_a_rail() -> None:
    world = World([FaultOptions(delay_s=(1.0, 1.0))] * 2)
    world.out.post(make_write([100_000, 100_000]))
    world.out.fence("over")
    world.run(1)
    assert world.ended[1].error
    assert world.faults == []
    world.out.close()


class _Counting(Inbound):
    def __init__(self, nbytes: int, error: Exception | None = None) -> None:
        self.nbytes, self.error, self.calls = nbytes, error, Counter[str]()

    def grant(self, immediate: int, pages: GrantedPages) -> None:
        self.calls["grant"] += 1

    def revoke(self, immediate: int) -> None:
        self.calls["revoke"] += 1

    def poll(self) -> list[Arrival]:
        return [Arrival(IMM, self.nbytes)]

    async def fence(self) -> None:
        self.calls["fence"] += 1
        if self.error is not None:
            raise self.error

    def unmapped(self) -> None:
        self.calls["unmapped"] += 1


async def test_the_destination_adds_its_rails_up() -> None:
    rails = [_Counting(10), _Counting(20)]
    inbound = RailsInbound(rails)
    inbound.grant(IMM, GrantedPages({}))
    inbound.revoke(IMM)
    inbound.unmapped()
    assert sum(arrival.nbytes for arrival in inbound.poll()) == 30
    await inbound.fence()
    assert all(rail.calls == {"grant": 1, "revoke": 1, "unmapped": 1, "fence": 1} for rail in rails)


async def test_every_rail_is_fenced_even_where_one_fails() -> None:
    rails = [_Counting(1, RuntimeError("no")), _Counting(1)]
    with pytest.raises(RuntimeError):
        await RailsInbound(rails).fence()
    assert rails[1].calls["fence"] == 1
