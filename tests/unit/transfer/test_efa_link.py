"""The efa transport over the fake of its pyverbs: nothing comes in order, every overflow is told."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from efa_world import EfaEnd, EfaLink
from kvmesh.errors import FailedPrecondition, InvalidArgument, Unavailable
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.transports.efa.stub import (
    BAD_QPN,
    LOC_PROT,
    REM_ACCESS,
    REM_OP,
    RNR_EXCEEDED,
    UNRESPONSIVE,
    EfaStubNetwork,
)
from kvmesh.transfer.transports.verbs.credits import ReceiveCredits
from verbs_world import LAYERS, PAGE, randomize

IMM = 0x0AB_0001F
ALL = 32 * LAYERS


class World:
    def __init__(self) -> None:
        self.network = EfaStubNetwork()
        self.ends: list[EfaEnd] = []

    async def end(self, name: str, *, machine: Any = None, **options: Any) -> EfaEnd:
        made = await EfaEnd(self.network, name, machine=machine, **options).start()
        self.ends.append(made)
        return made

    async def pair(self, *, machine: Any = None, **options: Any) -> EfaLink:
        source = await self.end("src", machine=machine, **options)
        target = await self.end("dst", machine=machine, **options)
        randomize(source, 1)
        return EfaLink(source, target)


@pytest.fixture(params=[False, True], ids=["no flush in ERR", "flush in ERR"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    made = World()
    made.network.flushes = request.param
    yield made
    made.network.hold = False
    for end in made.ends:
        await end.close()
    assert made.network.violations == []
    assert made.network.open_objects == 0, "queue pairs, registrations or address handles are left"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("send_depth", "receives"), [(1, 2), (3, 8), (16, 5), (64, 64)])
async def test_bytes_arrive_once_and_in_place_in_any_order(
    world: World, seed: int, send_depth: int, receives: int
) -> None:
    """The network holds: what happens next is drawn, and ends poll when they are drawn."""
    world.network._random.seed(seed)
    draw = random.Random(seed)
    link = await (await world.pair(send_depth=send_depth, receives=receives, batch=4)).open()
    world.network.hold = True
    want = np.zeros_like(link.target.bytes)
    posted: dict[int, int] = {}
    places = draw.sample(range(ALL), ALL)
    writes = []
    while places:
        chosen, places = places[:5], places[5:]
        src = [page * PAGE for page in draw.choices(range(ALL), k=len(chosen))]
        dst = [page * PAGE for page in chosen]
        for a, b in zip(src, dst, strict=True):
            want[b : b + PAGE] = link.source.bytes[a : a + PAGE]
        writes.append(link.write(IMM + draw.randrange(3), src, dst))
        posted[writes[-1].immediate] = posted.get(writes[-1].immediate, 0) + writes[-1].nbytes
    for write in writes:
        link.outbound.post(write)
    completions = []
    for _ in range(20_000):
        action = draw.randrange(4)
        if action == 0:
            completions += link.outbound.poll(draw.choice([PAGE, 1 << 30]))
            assert link.outbound.outstanding <= min(send_depth, receives)
        elif action == 1:
            link.take()
        else:
            world.network.run(draw.randint(1, 5))
        if len(completions) == len(writes) and link.received == posted:
            break
    assert sorted(c.context for c in completions) == [write.context for write in writes]
    assert [c.error for c in completions] == [""] * len(writes)
    assert link.received == posted
    np.testing.assert_array_equal(link.target.bytes, want)
    await link.close()


async def test_slow_receiver_stops_the_writer_and_nothing_overflows(world: World) -> None:
    link = await (await world.pair(receives=4, send_depth=64)).open()
    link.outbound.post(link.write(IMM, [0] * 100, [PAGE] * 100))
    for _ in range(10):
        assert link.outbound.poll(1 << 30) == []
    assert world.network.requests == 4
    assert not link.outbound.busy, "it waits for the channel and does not spin"
    assert [c.error for c in link.drain()] == [""]
    assert link.received == {IMM: 100 * PAGE}
    await link.close()


async def test_slow_writer_keeps_room_for_words(world: World) -> None:
    """It posts and posts and takes no completion but its own: words wait at its queue pair, and find receives."""
    link = await (await world.pair(receives=8, send_depth=64)).open()
    assert link.inbound is not None
    link.outbound.post(link.write(IMM, [0] * 400, [PAGE] * 400))
    done = 0
    for _ in range(200):
        done += len(link.outbound.poll(1 << 30))
        for _ in range(5):
            link.take()
        pair = link.outbound.pair._qp
        assert len(pair.receives) >= 2
    assert done == 1
    await link.close()


async def test_a_turn_posts_about_its_budget(world: World) -> None:
    link = await (await world.pair()).open()
    link.outbound.post(link.write(IMM, [0] * 20, [PAGE] * 20))
    link.outbound.poll(3 * PAGE)
    assert world.network.requests == 3
    assert link.outbound.busy
    await link.close()


async def test_rows_are_cut_at_the_largest_write(world: World) -> None:
    link = await (await world.pair(machine={"max_rdma": 4096}, receives=3)).open()
    link.outbound.post(link.write(IMM, [8], [16], 10_000))
    link.outbound.post(link.write(IMM + 1, [0], [11_000], 4096))
    assert [c.error for c in link.drain()] == ["", ""]
    assert link.received == {IMM: 10_000, IMM + 1: 4096}
    np.testing.assert_array_equal(link.target.bytes[16:10_016], link.source.bytes[8:10_008])
    assert world.network.requests >= 4
    await link.close()


@pytest.mark.parametrize("status", [UNRESPONSIVE, BAD_QPN, REM_ACCESS])
@pytest.mark.parametrize("after", [0, 3, 7, 10])
async def test_failed_write_breaks_the_link_and_a_new_one_works(world: World, status: int, after: int) -> None:
    link = await world.pair(receives=6)
    await link.open()
    world.network.fail_status, world.network.fail_after = status, after
    writes = [link.write(IMM + i, [0, PAGE, 2 * PAGE], [PAGE, 2 * PAGE, 3 * PAGE]) for i in range(4)]
    for write in writes:
        link.outbound.post(write)
    completions = link.drain()
    assert f"status {status}" in link.outbound.broken
    assert sorted(c.context for c in completions) == [w.context for w in writes], "each completes exactly once"
    failed = [c for c in completions if c.error]
    assert failed
    for write in writes:
        if write.context not in [c.context for c in failed]:
            assert link.received[write.immediate] == write.nbytes
    # Posted on a broken link: an error at the next poll.
    link.outbound.post(link.write(IMM, [0], [0]))
    assert [c.error != "" for c in link.outbound.poll(1 << 20)] == [True]
    await link.close()
    again = await EfaLink(link.source, link.target, 2).open()
    again.outbound.post(again.write(IMM, [0], [PAGE]))
    assert [c.error for c in again.drain()] == [""]
    assert again.received == {IMM: PAGE}
    await again.close()


async def test_writer_fence_ends_reading_before_pages_are_given_back(world: World) -> None:
    link = await (await world.pair()).open()
    world.network.hold = True
    link.outbound.post(link.write(IMM, [0] * 9, [PAGE] * 9))
    link.outbound.post(link.write(IMM + 1, [0] * 9, [PAGE] * 9))
    link.outbound.poll(1 << 30)
    world.network.run(5)
    link.outbound.fence("enough")
    completions = link.outbound.poll(0)
    assert sorted(c.context for c in completions) == [1, 2]
    assert all(c.error for c in completions)
    before = link.target.bytes.copy()
    randomize(link.source, 9)
    world.network.run()
    np.testing.assert_array_equal(link.target.bytes, before)
    link.outbound.close()
    link.outbound.close()
    assert link.inbound is not None
    await link.inbound.fence()


async def test_fenced_destination_takes_nothing_more_even_where_its_number_comes_again(world: World) -> None:
    """The device gives the number of a destroyed queue pair to the next one: its key is another."""
    link = await (await world.pair()).open()
    assert link.inbound is not None
    assert link.inbound.pair is not None
    number = link.inbound.pair.number
    world.network.hold = True
    link.outbound.post(link.write(IMM, [0] * 3, [PAGE] * 3))
    link.outbound.poll(1 << 30)
    await link.inbound.fence()
    again = await EfaLink(link.source, link.target, 2).open()
    assert again.inbound is not None
    assert again.inbound.pair is not None
    assert again.inbound.pair.number == number
    world.network.run()
    assert not link.target.bytes.any()
    again.take()
    assert again.received == {}
    assert again.inbound.usable
    assert [c.error for c in link.outbound.poll(0)] != [""]
    assert f"status {UNRESPONSIVE}" in link.outbound.broken
    link.outbound.close()
    world.network.hold = False
    again.outbound.post(again.write(IMM, [0], [0]))
    assert [c.error for c in again.drain()] == [""]
    await again.close()


async def test_fenced_destination_answers_nobody(world: World) -> None:
    link = await (await world.pair()).open()
    assert link.inbound is not None
    world.network.hold = True
    link.outbound.post(link.write(IMM, [0, PAGE], [PAGE, 0]))
    link.outbound.poll(1 << 30)
    await link.inbound.fence()
    world.network.run()
    assert not link.target.bytes.any()
    assert [c.error for c in link.outbound.poll(0)] != [""]
    assert f"status {BAD_QPN}" in link.outbound.broken
    link.outbound.close()


async def test_what_landed_before_the_fence_is_counted(world: World) -> None:
    link = await (await world.pair()).open()
    assert link.inbound is not None
    link.inbound._stop_reading()
    link.outbound.post(link.write(IMM, [0] * 5, [PAGE] * 5))
    link.outbound.poll(1 << 30)
    await link.inbound.fence()
    link.take()
    assert link.received == {IMM: 5 * PAGE}
    link.outbound.close()


async def test_late_immediates_come_under_their_own_name(world: World) -> None:
    """Completions of a generation that is over arrive mixed with those of the next: each counts for its own."""
    link = await (await world.pair()).open()
    world.network.hold = True
    old, new = link.write(IMM, [0] * 6, [PAGE] * 6), link.write(IMM + 1, [0] * 6, [2 * PAGE] * 6)
    link.outbound.post(old)
    link.outbound.poll(1 << 30)
    world.network.run(4)
    assert link.inbound is not None
    link.inbound.revoke(IMM)
    link.outbound.post(new)
    link.outbound.poll(1 << 30)
    world.network.run()
    link.take()
    assert link.received == {IMM: old.nbytes, IMM + 1: new.nbytes}
    world.network.hold = False
    await link.close()


async def test_flush_gives_up_what_is_not_posted(world: World) -> None:
    link = await (await world.pair(receives=2)).open()
    world.network.hold = True
    begun, fresh, kept = (link.write(IMM + i, [0] * 3, [PAGE] * 3) for i in range(3))
    for write in (begun, fresh, kept):
        link.outbound.post(write)
    assert link.outbound.poll(1 << 30) == []
    link.outbound.flush(fresh.immediate)
    assert [(c.context, c.error) for c in link.outbound.poll(0)] == [(fresh.context, "flushed")]
    # Two rows of it are in flight: it ends when they have, and says so.
    link.outbound.flush(begun.immediate)
    assert link.outbound.poll(0) == []
    world.network.hold = False
    world.network.run()
    assert sorted((c.context, c.nbytes, c.error) for c in link.drain()) == [
        (begun.context, 0, "flushed"),
        (kept.context, kept.nbytes, ""),
    ]
    assert link.received == {begun.immediate: 2 * PAGE, kept.immediate: 3 * PAGE}
    await link.close()


async def test_a_write_that_is_given_up_between_its_rows_is_forgotten(world: World) -> None:
    link = await (await world.pair(receives=2)).open()
    write = link.write(IMM, [0] * 3, [PAGE] * 3)
    link.outbound.post(write)
    # Two rows have completed, the third has no credit yet.
    assert link.outbound.poll(1 << 30) == []
    link.outbound._collect()
    link.outbound.flush(IMM)
    assert [(c.context, c.error) for c in link.outbound.poll(0)] == [(write.context, "flushed")]
    assert not link.outbound._flying
    await link.close()


# --- what is wrong ----------------------------------------------------------------------------------------------------


def _set(message: Any, **fields: Any) -> None:
    for name, value in fields.items():
        setattr(message, name, value)


@pytest.mark.parametrize(
    ("src", "dst", "length"),
    [(0, ALL * PAGE, 1), (0, ALL * PAGE - 8, 16), (-1, 0, 8), (0, -8, 8), (0, 0, 0), (1 << 60, 0, 8)],
)
async def test_out_of_bounds_is_never_posted(world: World, src: int, dst: int, length: int) -> None:
    link = await (await world.pair()).open()
    link.outbound.post(link.write(IMM, [0, src], [0, dst], length))
    (completion,) = link.outbound.poll(1 << 30)
    assert "outside of its region" in completion.error
    assert world.network.requests == 0
    await link.close()


WRONG: dict[str, tuple[Callable[[pb.PeerHelloReply], None], int]] = {
    "memory key": (lambda r: _set(r.efa.regions[0], rkey=r.efa.regions[0].rkey ^ 0xFF), REM_ACCESS),
    "queue pair's key": (lambda r: _set(r.efa, qkey=r.efa.qkey ^ 1), UNRESPONSIVE),
    "queue pair": (lambda r: _set(r.efa, qp_number=0xFFF), BAD_QPN),
    "device": (lambda r: _set(r.efa, gid=bytes(15) + b"\x99"), UNRESPONSIVE),
}


@pytest.mark.parametrize("name", WRONG)
async def test_wrong_keys_and_addresses_are_a_failed_link_and_no_byte(world: World, name: str) -> None:
    change, status = WRONG[name]
    link = await (await world.pair()).open(change=change)
    link.outbound.post(link.write(IMM, [0], [PAGE]))
    assert [c.error for c in link.drain()] == [f"a write completed with status {status}"]
    assert not link.target.bytes.any()
    await link.close()


async def test_memory_beyond_the_registration_is_refused_by_the_device(world: World) -> None:
    """Past our own check, as a writer that was told wrong."""

    def stretch(reply: pb.PeerHelloReply) -> None:
        reply.regions[0].nbytes += PAGE
        reply.efa.regions[0].nbytes += PAGE

    link = await (await world.pair()).open(change=stretch)
    link.outbound.post(link.write(IMM, [0], [ALL * PAGE - 8], 16))
    assert [c.error for c in link.drain()] == [f"a write completed with status {REM_ACCESS}"]
    await link.close()


async def test_a_device_that_does_not_know_ours_refuses(world: World) -> None:
    """Why the destination makes an address handle before it lets a writer in."""
    link = await (await world.pair()).open()
    assert link.inbound is not None
    assert link.inbound._peer is not None
    link.inbound._efa.release_peer(link.inbound._peer)
    link.inbound._peer = None
    link.outbound.post(link.write(IMM, [0], [PAGE]))
    assert [c.error for c in link.drain()] == [f"a write completed with status {REM_OP}"]
    await link.close()


async def test_a_writer_that_takes_no_notice_of_credits_is_cut_off(world: World) -> None:
    link = await (await world.pair(receives=2, send_depth=64)).open()
    link.outbound.window._granted = 1 << 20
    link.outbound.post(link.write(IMM, [0] * 20, [PAGE] * 20))
    (completion,) = link.drain()
    assert f"status {RNR_EXCEEDED}" in completion.error
    assert set(world.network.violations) == {"a write with immediate found no receive"}
    world.network.violations.clear()
    await link.close()


async def test_memory_that_went_away_under_the_writer(world: World) -> None:
    link = await (await world.pair()).open()
    mr = world.network.regions[link.outbound._sources[0].lkey]
    del world.network.regions[mr.lkey]
    link.outbound.post(link.write(IMM, [0], [PAGE]))
    assert [c.error for c in link.drain()] == [f"a write completed with status {LOC_PROT}"]
    world.network.regions[mr.lkey] = mr
    await link.close()


async def test_writes_of_strangers_are_not_counted(world: World) -> None:
    """Another device that has come to know the queue pair and its keys; its own number is the writer's."""
    link = await (await world.pair(receives=4)).open()
    other = await world.end("other")
    keys: list[pb.PeerHelloReply] = []
    spy = EfaLink(other, link.target, 2)
    await spy.open(change=keys.append)
    assert link.inbound is not None
    assert link.inbound.pair is not None
    spy.outbound._target = spy.outbound._target._replace(qpn=link.inbound.pair.number, qkey=link.inbound.pair.qkey)
    for _ in range(12):
        spy.outbound.post(spy.write(IMM, [0], [0]))
        spy.outbound.poll(1 << 20)
        link.take()
    assert link.inbound.foreign == 4, "as many as it had credit for"
    assert link.received == {}
    assert link.inbound.usable
    link.outbound.post(link.write(IMM, [0] * 30, [PAGE] * 30))
    assert [c.error for c in link.drain()] == [""]
    assert link.received == {IMM: 30 * PAGE}
    await spy.close()
    await link.close()


@pytest.mark.parametrize("word", [1 << 20, 3, (1 << 31) + 5])
async def test_words_that_cannot_be_end_the_link(world: World, word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    link = await (await world.pair(receives=4)).open()
    monkeypatch.setattr(ReceiveCredits, "due", lambda credits: word)
    link.outbound.post(link.write(IMM, [0] * 2, [PAGE] * 2))
    link.outbound.poll(1 << 20)
    link.take()
    link.outbound.poll(1 << 20)
    assert "receives" in link.outbound.broken
    await link.close()


BAD_REPLIES: dict[str, Callable[[pb.PeerHelloReply], None]] = {
    "nothing": lambda r: r.ClearField("efa"),
    "number of 17 bits": lambda r: _set(r.efa, qp_number=1 << 16),
    "number 0": lambda r: _set(r.efa, qp_number=0),
    "key 0": lambda r: _set(r.efa, qkey=0),
    "key of 32 bits": lambda r: _set(r.efa, qkey=1 << 31),
    "short gid": lambda r: _set(r.efa, gid=b"x"),
    "no gid": lambda r: _set(r.efa, gid=bytes(16)),
    "no receives": lambda r: _set(r.efa, receives=0),
    "endless receives": lambda r: _set(r.efa, receives=1 << 30),
    "a region less": lambda r: r.efa.regions.__delitem__(0),
    "a smaller region": lambda r: _set(r.efa.regions[0], nbytes=1),
    "address wraps": lambda r: _set(r.efa.regions[0], address=(1 << 64) - 8),
}


@pytest.mark.parametrize("name", BAD_REPLIES)
async def test_bad_reply_is_refused_by_the_writer(world: World, name: str) -> None:
    link = await world.pair()
    with pytest.raises(InvalidArgument):
        await link.open(change=BAD_REPLIES[name])
    link.target.transport.forget(link.link_id)


BAD_HELLOS: dict[str, Callable[[pb.DataHello], None]] = {
    "protocol": lambda h: _set(h, protocol=99),
    "token": lambda h: _set(h, token=bytes(32)),
    "link": lambda h: _set(h, link_id=5),
    "gid": lambda h: _set(h.efa, gid=bytes(15)),
    "number": lambda h: _set(h.efa, qp_number=0),
    "key": lambda h: _set(h.efa, qkey=0),
    "words": lambda h: _set(h.efa.words, nbytes=7),
    "words wrap": lambda h: _set(h.efa.words, address=(1 << 64) - 4),
    "nothing": lambda h: h.ClearField("efa"),
}


@pytest.mark.parametrize("name", BAD_HELLOS)
async def test_bad_hello_is_refused_by_the_destination(world: World, name: str) -> None:
    link = await world.pair()
    with pytest.raises(Unavailable, match="refused by the destination"):
        await link.open(change_hello=BAD_HELLOS[name])
    link.target.transport.forget(link.link_id)
    # And the door is open for the next.
    good = await EfaLink(link.source, link.target, 2).open()
    good.outbound.post(good.write(IMM, [0], [0]))
    assert [c.error for c in good.drain()] == [""]
    await good.close()


async def test_a_hello_opens_its_link_once(world: World) -> None:
    seen: list[pb.DataHello] = []
    link = await (await world.pair()).open(change_hello=lambda hello: seen.append(hello))
    assert not (await link.target.transport.join(seen[0])).ok
    await link.close()


async def test_no_more_queue_pairs_is_a_reason_and_leaves_nothing(world: World) -> None:
    link = await (await world.pair(machine={"max_pairs": 1})).open()
    objects = world.network.open_objects
    with pytest.raises(Unavailable, match="no SRD queue pair"):
        await EfaLink(link.source, link.target, 2).open()
    assert world.network.open_objects == objects
    link.outbound.post(link.write(IMM, [0], [0]))
    assert [c.error for c in link.drain()] == [""]
    await link.close()
    # And at the writer: the destination still has its own to give back.
    world.network.hosts[next(iter(world.network.hosts))].max_pairs = 0
    with pytest.raises(Unavailable, match="no SRD queue pair"):
        await EfaLink(link.source, link.target, 3).open()
    link.target.transport.forget(3)
    assert list(world.network.pairs()) == []


async def test_engine_gone_takes_the_links_with_it(world: World) -> None:
    link = await (await world.pair()).open()
    link.target.transport.deregister()
    link.outbound.post(link.write(IMM, [0], [0]))
    assert "status" in link.drain()[0].error
    link.outbound.close()
    assert link.inbound is not None
    await link.inbound.fence()
    with pytest.raises(FailedPrecondition, match="no engine"):
        await EfaLink(link.source, link.target, 2).open()
    link.target.transport.register(link.target.memory)
    again = await EfaLink(link.source, link.target, 3).open()
    again.outbound.post(again.write(IMM, [0], [0]))
    assert [c.error for c in again.drain()] == [""]
    await again.close()


async def test_links_to_one_device_share_its_handle(world: World) -> None:
    link = await (await world.pair()).open()
    second = await EfaLink(link.source, link.target, 2).open()
    device = link.source.transport._open_device()
    assert device.peers == 1
    await link.close()
    second.outbound.post(second.write(IMM, [0], [0]))
    assert [c.error for c in second.drain()] == [""]
    await second.close()
    assert device.peers == 0


async def test_polling_thread_serves_links(world: World) -> None:
    """The thread finds what comes without the loop's help."""
    import asyncio

    link = await world.pair(polling="thread")
    arrived = asyncio.Event()
    take = link.take

    def took() -> None:
        take()
        arrived.set()

    link.take = took  # type: ignore[method-assign]
    await link.open()
    for turn in range(3):
        link.outbound.post(link.write(IMM + turn, [0] * 5, [PAGE] * 5))
        # The fake carries it out at once: its completions are there at the second look.
        link.outbound.poll(1 << 20)
        assert [c.error for c in link.outbound.poll(1 << 20)] == [""]
        while link.received.get(IMM + turn, 0) < 5 * PAGE:
            async with asyncio.timeout(60):
                await arrived.wait()
            arrived.clear()
    assert link.received == {IMM + i: 5 * PAGE for i in range(3)}
    await link.close()
