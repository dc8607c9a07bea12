"""The poster against a sidecar played by the test: what it writes, what it counts, what it says, and when."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from kvmesh.engine.nvlink.backend import Batch, PeerMapping
from kvmesh.errors import InvalidArgument
from kvmesh.kv.planner import expected_bytes
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.descriptor import layout_to_proto
from kvmesh.transfer.posting import BYTES_MASK, GENERATION_SHIFT
from kvmesh.transfer.tail import TailBuffer
from nvlink_world import WAIT_S, World, layout_of

SRC, DST = [1, 2, 3, 8], [15, 4, 5, 0]
LAYERS = 3


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World(layout_of(), layout_of(num_pages=20))
    world.source.rank(0)[:] = np.random.default_rng(1).integers(1, 256, world.source.rank(0).shape)
    await world.mapped()
    yield world
    await world.close()


@pytest.mark.parametrize("source_tp", [1, 2, 4])
@pytest.mark.parametrize("target_tp", [1, 2, 4])
async def test_every_sharding_lands_byte_exact_and_is_counted_per_rank(source_tp: int, target_tp: int) -> None:
    world = World(layout_of(source_tp), layout_of(target_tp, num_pages=20))
    rng = np.random.default_rng(source_tp * 8 + target_tp)
    whole = rng.integers(1, 256, (LAYERS, 16, 4, 2, 64), dtype=np.uint8)
    for rank in range(source_tp):
        heads = 4 // source_tp
        world.source.rank(rank)[:] = whole[:, :, rank * heads : (rank + 1) * heads]
    await world.mapped()
    world.post(7, SRC, DST, ready=1)
    step = world.step((7, 1, 3))
    for layer in range(LAYERS):
        step.layer(layer)
    ended = await world.next("post_ended")
    total = int(expected_bytes(world.source.layout, world.target.layout, DST, group="main").sum())
    assert (ended.transfer_id, ended.bytes, ended.reason) == (7, total, "")
    for rank in range(target_tp):
        heads = 4 // target_tp
        want = np.zeros_like(world.target.rank(rank))
        want[:, DST] = whole[:, SRC, rank * heads : (rank + 1) * heads]
        np.testing.assert_array_equal(world.target.rank(rank), want)
    counted = [int(word) for word in world.words[:, 3]]
    assert {word >> GENERATION_SHIFT for word in counted} == {9}
    assert sum(word & BYTES_MASK for word in counted) == total
    assert np.count_nonzero(world.words) == source_tp
    await world.close()


async def test_the_counter_never_runs_ahead_of_the_bytes(world: World) -> None:
    """Pages that become ready while a step's layers leave wait for its end: the counter only grows."""
    page = world.source.layout.page_bytes("main")
    world.post(7, SRC, DST, generation=(1 << 20) - 1)
    step = world.step((7, 0, 2))
    step.layer(0)
    world.poster.pages_ready(7, 2, 2)
    await world.settle()
    assert int(world.words[0, 3]) == ((1 << 20) - 1) << GENERATION_SHIFT | 2 * page
    assert not world.target.rank(0)[:, DST[2:]].any()
    step.layer(1)
    step.layer(2)
    assert (await world.next("post_ended")).bytes == 4 * LAYERS * page
    np.testing.assert_array_equal(world.target.rank(0)[:, DST], world.source.rank(0)[:, SRC])


async def test_a_stop_in_the_middle_leaves_the_others_of_the_step_alone(world: World) -> None:
    world.post(7, SRC[:2], DST[:2], slot=1)
    world.post(8, SRC[2:], DST[2:], slot=2)
    step = world.step((7, 0, 2), (8, 0, 2), (99, 0, 1))
    step.layer(0)
    await world.settle()
    world.stop(7, "enough")
    ended = await world.next("post_ended")
    assert (ended.transfer_id, ended.reason) == (7, "enough")
    step.layer(1)
    step.layer(2)
    ended = await world.next("post_ended")
    assert (ended.transfer_id, ended.reason) == (8, "")
    np.testing.assert_array_equal(world.target.rank(0)[:, DST[2:]], world.source.rank(0)[:, SRC[2:]])
    assert not world.target.rank(0)[1:, DST[:2]].any()
    page = world.source.layout.page_bytes("main")
    assert [int(w) & BYTES_MASK for w in world.words[0, 1:3]] == [2 * page, 2 * page * LAYERS]


async def test_an_end_is_said_only_behind_what_is_in_flight(world: World) -> None:
    world.backend.gate.clear()
    world.post(7, SRC, DST)
    world.step((7, 0, 4)).layer(0)
    drained = asyncio.Event()
    world.poster.when_drained(drained.set, 7)
    world.stop(7, "no more")
    world.release()
    # The poster's thread has had a whole turn: what it does at the turn's start has come through twice.
    for link_id in (2, 3):
        world.memory(link_id)
        assert (await world.next("peer_mapped")).link_id == link_id
    assert not drained.is_set()
    world.backend.gate.set()
    assert (await world.next("post_ended")).reason == "no more"
    await asyncio.wait_for(drained.wait(), WAIT_S)
    released = await world.next("peer_released")
    assert (released.link_id, released.engine_id, released.incarnation) == (1, "d", 5)
    assert released.control_address == "there:1"


async def test_what_cannot_be_claimed_fails_its_transfer(world: World) -> None:
    for number, entry, layers, text in (
        (1, (1, 3), None, r"pages \[1, \+3\) of a list of 2"),
        (2, (0, 1), 5, "a step of 5 layers, the model has 3"),
    ):
        world.post(number, [1, 2], [3, 4], slot=number)
        assert world.step((number, *entry), layers=layers) is None
        ended = await world.next("post_ended")
        assert ended.transfer_id == number
        assert re.search(text, ended.reason)
    world.post(3, [1, 2], [3, 4], ready=1)
    assert world.step((3, 0, 1)) is None
    assert "named before" in (await world.next("post_ended")).reason
    # Out of range at the destination: nothing of it is written.
    world.post(4, [1], [400], ready=1)
    assert "400" in (await world.next("post_ended")).reason


async def test_steps_in_order_and_one_at_a_time(world: World) -> None:
    world.post(7, SRC, DST)
    first, second = world.step((7, 0, 1)), world.step((7, 1, 1))
    with pytest.raises(InvalidArgument, match="layer 1 of a step of 3, expected 0"):
        first.layer(1)
    first.layer(0)
    second.layer(0)
    assert "before the last one's layers were through" in (await world.next("post_ended")).reason


async def test_a_launch_that_fails_costs_its_transfers_and_not_the_step(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("the GPU says no")

    world.post(7, SRC, DST)
    step = world.step((7, 0, 4))
    step.layer(0)
    monkeypatch.setattr(world.backend, "launch", refuse)
    step.layer(1)
    step.layer(2)
    assert (await world.next("post_ended")).reason == "a launch failed: the GPU says no"


async def test_a_link_that_is_not_there(world: World) -> None:
    world.release()
    await world.next("peer_released")
    world.post(7, SRC, DST)
    ended = await world.next("post_ended")
    assert (ended.transfer_id, ended.bytes, ended.reason) == (7, 0, "there is no such link any more")


@pytest.mark.parametrize(("here", "there"), [(4, 8), (8, 4), (4, 4)])
async def test_pages_of_unequal_size_and_a_first_block(here: int, there: int) -> None:
    """Tokens 8..21 of a sequence, page by page of the source."""
    world = World(layout_of(page_size=here), layout_of(num_pages=20, page_size=there))
    world.source.rank(0)[:] = np.random.default_rng(3).integers(1, 256, world.source.rank(0).shape)
    await world.mapped()
    first, end = 8, 22
    count = -(-end // here) - first // here
    src, dst = [7, 2, 9, 5][:count], [3, 11, 12, 6][: -(-end // there) - first // there]
    world.post(7, src, dst, first_block=first // there, num_tokens=end)
    for page in range(count):
        step = world.step((7, page, 1))
        for layer in range(LAYERS):
            step.layer(layer)
    ended = await world.next("post_ended")
    assert ended.reason == ""

    def tokens(memory: np.ndarray, pages: list[int], size: int) -> np.ndarray:
        """(layers, heads, 2, tokens, bytes)."""
        lines = memory.reshape(*memory.shape[:4], size, 16)[:, pages]
        return np.moveaxis(lines, 1, 3).reshape(LAYERS, 4, 2, -1, 16)

    want, got = tokens(world.source.rank(0), src, here), tokens(world.target.rank(0), dst, there)
    np.testing.assert_array_equal(got[:, :, :, : end - first], want[:, :, :, : end - first])
    # Pages of equal size are written whole.
    sent = count * here if here == there else end - first
    assert ended.bytes == LAYERS * 4 * 2 * sent * 16
    await world.close()


async def test_kept_pages_leave_with_the_last_claim_compacted(world: World) -> None:
    world.post(7, SRC, DST[:2], num_tokens=16, kept=[1, 3])
    first, second = world.step((7, 0, 2)), world.step((7, 2, 2))
    for layer in range(LAYERS):
        first.layer(layer)
    await world.settle()
    assert not world.target.rank(0).any()
    for layer in range(LAYERS):
        second.layer(layer)
    ended = await world.next("post_ended")
    assert (ended.bytes, ended.reason) == (2 * LAYERS * world.source.layout.page_bytes("main"), "")
    np.testing.assert_array_equal(world.target.rank(0)[:, DST[:2]], world.source.rank(0)[:, [SRC[1], SRC[3]]])


async def test_tail_rows_go_once_and_are_counted() -> None:
    here, there = TailBuffer("logits", 48, 4), TailBuffer("logits", 48, 6)
    world = World(layout_of(), layout_of(tp=2), [here], [there])
    world.source.tail("logits", 0, 48)[:] = np.random.default_rng(5).integers(1, 256, (4, 48))
    await world.mapped()
    world.post(7, SRC, DST, tails=[("logits", 2, 5)])
    step = world.step((7, 0, 4))
    step.layer(0)
    # Behind the step: the counter only grows.
    world.poster.tail_ready(7)
    step.layer(1)
    await world.settle()
    assert not world.target.tail("logits", 1, 48).any()
    step.layer(2)
    ended = await world.next("post_ended")
    assert (ended.bytes, ended.reason) == (4 * LAYERS * 512 + 2 * 48, "")
    assert int(world.words[0, 3]) & BYTES_MASK == ended.bytes
    for rank in range(2):
        rows = world.target.tail("logits", rank, 48)
        np.testing.assert_array_equal(rows[5], world.source.tail("logits", 0, 48)[2])
        assert not rows[:5].any()
    world.post(8, SRC, DST, ready=4, tails=[("logits", 0, 0)])
    world.poster.tail_ready(8)
    assert (await world.next("post_ended")).reason == ""
    world.post(9, SRC, DST)
    world.poster.tail_ready(9)
    assert (await world.next("post_ended")).reason == "it has no tail"
    world.post(10, SRC, DST, tails=[("logits", 9, 0)])
    assert "row 9 of 'logits' is not one of 4" in (await world.next("post_ended")).reason
    await world.close()


async def test_memory_that_does_not_fit_is_refused_and_let_go_of(world: World) -> None:
    before = len(os.listdir("/proc/self/fd"))
    bad = world.target.infos()
    bad[0].nbytes -= 1
    for changes, text in (
        ({"counter_bytes": 8}, "counters of 8 bytes, 1 ranks have 32768"),
        ({"counter_bytes": 1 << 40}, f"counters of {1 << 40} bytes, 1 ranks have 32768"),
        ({"link_id": 4}, ""),
    ):
        world.memory(**{"link_id": 3, **changes})
        mapped = await world.next("peer_mapped")
        assert (mapped.ok, text in mapped.reason) == (not text, True)
    message = pb.PeerMemory(link_id=6, counter_bytes=world.counters.nbytes, regions=bad)
    message.layout.CopyFrom(layout_to_proto(world.target.layout))
    fds = [os.dup(region.fd) for region in (*world.target.regions.values(), world.counters)]
    world.poster.take(pb.SidecarMessage(peer_memory=message), lambda count: fds)
    mapped = await world.next("peer_mapped")
    assert not mapped.ok
    assert "smaller than its layout" in mapped.reason
    world.release(4)
    await world.next("peer_released")
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_lost_sidecar_hears_nothing_and_its_successor_what_was_unmapped(world: World) -> None:
    world.backend.gate.clear()
    world.post(7, SRC, DST, ready=4)
    drained = asyncio.Event()
    world.poster.lost()
    world.poster.when_drained(drained.set)
    assert not drained.is_set()
    world.backend.gate.set()
    await asyncio.wait_for(drained.wait(), WAIT_S)
    async with asyncio.timeout(WAIT_S):
        while world.poster._peers or world.poster._mapping:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)
    assert world.said.empty()
    world.poster.connected(world.said.put_nowait)
    assert (await world.next("peer_released")).link_id == 1
    assert world.said.empty()


async def test_ready_pages_that_cannot_be_launched_end_behind_what_was(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first launch is in flight when the second fails: no end may be said before it has landed."""
    launch = world.backend.launch
    calls = 0

    def refuse(*args: Any) -> None:
        nonlocal calls
        calls += 1
        launch(*args)
        raise RuntimeError("the GPU says no")

    world.backend.gate.clear()
    monkeypatch.setattr(world.backend, "launch", refuse)
    world.post(7, SRC, DST, ready=4)
    assert calls == 1
    world.memory(link_id=2)
    assert (await world.next("peer_mapped")).link_id == 2
    world.memory(link_id=3)
    assert (await world.next("peer_mapped")).link_id == 3
    assert 7 in world.poster._transfers, "it is in flight"
    world.backend.gate.set()
    ended = await world.next("post_ended")
    assert (ended.transfer_id, ended.bytes, ended.reason) == (7, 0, "a launch failed: the GPU says no")


async def test_what_fails_behind_a_step_costs_its_transfer_and_not_the_engine(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(batch: Batch) -> object:
        raise RuntimeError("no memory for the table")

    world.post(7, SRC[:2], DST[:2], slot=1)
    world.post(8, SRC[2:], DST[2:], slot=2)
    step = world.step((7, 0, 1), (8, 0, 2))
    world.poster.pages_ready(7, 1, 1)
    step.layer(0)
    step.layer(1)
    monkeypatch.setattr(world.backend, "prepare", refuse)
    step.layer(2)
    ends = {end.transfer_id: end.reason for end in [await world.next("post_ended") for _ in range(2)]}
    assert ends == {7: "a launch failed: no memory for the table", 8: ""}


async def test_no_end_is_said_where_the_stream_cannot_be_marked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> object:
        raise RuntimeError("the context is lost")

    world.post(7, SRC, DST)
    step = world.step((7, 0, 4))
    with monkeypatch.context() as patch:
        patch.setattr(world.backend, "mark", refuse)
        step.layer(0)
        world.stop(7, "enough")
        for link_id in (2, 3):
            world.memory(link_id=link_id)
            assert (await world.next("peer_mapped")).link_id == link_id
    assert 7 in world.poster._transfers
    world.poster._transfers[7].mark = None
    assert (await world.next("post_ended")).reason == "enough"


async def test_two_entries_of_one_transfer_in_a_step_count_together(world: World) -> None:
    page = world.source.layout.page_bytes("main")
    world.post(7, SRC, DST)
    step = world.step((7, 2, 2), (7, 0, 1))
    step.layer(0)
    await world.settle()
    assert int(world.words[0, 3]) & BYTES_MASK == 3 * page
    world.poster.pages_ready(7, 1, 1)
    step.layer(1)
    step.layer(2)
    ended = await world.next("post_ended")
    assert (ended.bytes, ended.reason) == (4 * LAYERS * page, "")
    assert int(world.words[0, 3]) & BYTES_MASK == ended.bytes
    np.testing.assert_array_equal(world.target.rank(0)[:, DST], world.source.rank(0)[:, SRC])


async def test_memory_that_cannot_be_unmapped_keeps_no_other_from_being_said(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = world.backend.close_peer

    def refuse(peer: PeerMapping) -> None:
        if peer is stuck:
            raise RuntimeError("it is in use")
        close(peer)

    world.memory(link_id=2)
    assert (await world.next("peer_mapped")).ok
    stuck = world.poster._peers[1].mapping
    monkeypatch.setattr(world.backend, "close_peer", refuse)
    # Both in one turn, the one that fails first.
    with world.poster._lock:
        world.release(1)
        world.release(2)
    assert (await world.next("peer_released")).link_id == 2
    close(stuck)


async def test_memory_that_comes_while_the_engine_leaves_is_let_go_of_too(world: World) -> None:
    world.backend.gate.clear()
    world.post(7, SRC, DST, ready=4)
    leaving = asyncio.create_task(world.poster.leave(WAIT_S))
    await asyncio.sleep(0)
    world.memory(link_id=2)
    assert (await world.next("peer_mapped")).ok
    world.backend.gate.set()
    async with asyncio.timeout(WAIT_S / 2):
        await leaving
    said = [world.said.get_nowait() for _ in range(world.said.qsize())]
    assert {x.peer_released.link_id for x in said if x.WhichOneof("body") == "peer_released"} == {1, 2}
