"""Ranks join, are refused by name, and take their engine's life with them."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from kvmesh.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, KvmeshError, Overloaded, Unavailable
from kvmesh.kv.fds import close_fds, send_with_fds
from kvmesh.kv.pidfd import check_pidfd, open_pidfd
from kvmesh.kv.region import Region
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.descriptor import layout_to_proto
from kvmesh.transfer.link import SidecarLink
from kvmesh.transfer.rank import RankLink, RankMember
from kvmesh.transfer.sidecar import Sidecar
from kvmesh.transfer.sidecar import door as door_module
from kvmesh.transfer.sidecar import ranks as ranks_module
from kvmesh.transfer.sidecar.door import Visitor
from kvmesh.transfer.tail import TailBuffer
from kvmesh.transfer.transports.shm import transport as shm_module
from kvmesh.transfer.wire import PROTOCOL, FrameSocket, exchange, open_unix, pack_frame
from rank_world import WAIT_S, Ranks, descriptors, make_layout, mappings, running_sidecar


@pytest.fixture(autouse=True)
def no_litter() -> None:
    """What earlier tests left behind is not let go of in the middle of a count."""
    gc.collect()


@pytest.fixture
async def sidecar(tmp_path: Path) -> AsyncIterator[Sidecar]:
    async with running_sidecar(tmp_path) as sidecar:
        yield sidecar


@pytest.fixture
async def engine(sidecar: Sidecar) -> AsyncIterator[Ranks]:
    engine = Ranks(sidecar.options.engine_socket, make_layout())
    yield engine
    await engine.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


def waiting(sidecar: Sidecar) -> int:
    return len(sidecar._server._lobby)


async def refused(awaitable: object, error: type[KvmeshError], text: str) -> None:
    with pytest.raises(error, match=text):
        async with asyncio.timeout(WAIT_S):
            await awaitable  # type: ignore[misc]


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1)])
async def test_all_join_in_any_order(sidecar: Sidecar, engine: Ranks, order: tuple[int, ...]) -> None:
    tasks = []
    door = sidecar._server._lobby
    for place, rank in enumerate(order):
        tasks.append(asyncio.ensure_future(engine.join(rank) if rank else engine.lead()))
        if place < 2:
            # Whoever came before is held, and nobody is in yet.
            await until(lambda n=place: len(door) + (door.leader is not None) == n + 1)
            assert sidecar.session is None
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*tasks)
    assert engine.client is not None
    found = {(info.group, info.rank): info for info in engine.client.region_infos}
    assert set(found) == {(name, rank) for name in ("main", "latent") for rank in range(3)}
    assert len({info.key for info in found.values()}) == 6
    for rank, member in engine.members.items():
        assert member.region_keys == [found[name, rank].key for name in ("main", "latent")]
        assert member.sidecar_incarnation == sidecar.incarnation
    # And the memory is whose it is said to be.
    assert sidecar.session is not None
    memory = sidecar.session.memory
    for rank in range(3):
        engine.regions[rank]["main"].view()[:] = 10 + rank
        assert (memory.regions[memory.index("main", rank)].view() == 10 + rank).all()


async def test_what_does_not_fit_is_refused_alone(sidecar: Sidecar, engine: Ranks) -> None:
    leader = asyncio.ensure_future(engine.lead())
    first = asyncio.ensure_future(engine.join(1))
    await until(lambda: waiting(sidecar) == 1)
    await refused(engine.join(1), FailedPrecondition, "rank 1 of engine 'e' life 5 waits here already")
    await refused(engine.join(2, incarnation=6), FailedPrecondition, "engine 'e' life 5 registers here, not .* life 6")
    await refused(engine.join(2, engine_id="x"), FailedPrecondition, "registers here, not engine 'x' life 5")
    await refused(engine.join(0), InvalidArgument, "rank 0 is not one of 1..2")
    await refused(engine.join(3), InvalidArgument, "rank 3 is not one of 1..2")
    await refused(engine.join(2, engine_id=""), InvalidArgument, "engine_id and incarnation are required")
    other = Ranks(engine.path, make_layout(num_pages=9))
    await refused(other.join(2), InvalidArgument, "rank 2 of engine 'e' life 5 has another layout than its leader")
    await refused(other.lead(), FailedPrecondition, "engine 'e' life 5 is registering here")
    tail = TailBuffer("hidden", 64, 4)
    bad = Ranks(engine.path, make_layout(), tails=(tail,))
    await refused(bad.join(2), InvalidArgument, "another layout")
    small = engine.regions[2] | {"main": other.regions[2]["main"]}
    await refused(engine.join(2, regions=small), InvalidArgument, "region 'main' has .* bytes, its layout")
    assert not leader.done()
    assert not first.done()
    async with asyncio.timeout(WAIT_S):
        await engine.join(2)
        await asyncio.gather(leader, first)
    # Now that it is in.
    await refused(engine.join(1), FailedPrecondition, "rank 1 of engine 'e' life 5 has joined already")
    await refused(other.join(1, incarnation=9), FailedPrecondition, "engine 'e' life 5 is registered here, not")
    assert not engine.lost.is_set()
    for thing in (other, bad):
        await thing.close()


async def test_garbage_is_refused_alone(sidecar: Sidecar, engine: Ranks) -> None:
    leader = asyncio.ensure_future(engine.lead())
    await until(lambda: sidecar._server._lobby.leader is not None)

    async def say(hello: pb.RankHello, fds: list[int]) -> str:
        sock = await open_unix(engine.path, 5)
        message = pb.EngineMessage(call_id=1, rank_hello=hello)
        body, _ = await exchange(sock, message, fds, max_fds=0, timeout_s=WAIT_S)
        sock.close()
        return pb.SidecarMessage.FromString(body).refused.message

    infos = [pb.RegionInfo(group=name, rank=1, nbytes=r.nbytes) for name, r in engine.regions[1].items()]
    layout = layout_to_proto(engine.layout)
    hello = pb.RankHello(engine_id="e", incarnation=5, rank=1, layout=layout, regions=infos, protocol=PROTOCOL)
    memory = [region.fd for region in engine.regions[1].values()]
    assert "3 descriptors belong to this message, 0 came along" in await say(hello, [])
    pidfd = open_pidfd()
    assert "protocol 77" in await say(_changed(hello, protocol=77), [pidfd, *memory])
    assert "pidfd" in await say(hello, [2, *memory])
    assert "no memory file" in await say(hello, [pidfd, pidfd, pidfd])
    assert "layout version 0" in await say(_changed(hello, layout=pb.Layout(tp=0)), [pidfd, *memory])
    assert "4 descriptors belong" in await say(_changed(hello, doorbell_bytes=4096), [pidfd, *memory])
    assert "was announced with 64 bytes" in await say(
        _changed(hello, doorbell_bytes=64), [pidfd, engine.doorbell.fd, *memory]
    )
    many = _changed(hello)
    many.regions.extend([infos[0]] * 100)
    assert "more than 64 regions" in await say(many, [pidfd, *memory])
    # A rank that talks on is cut off; it does not wait any more.
    sock = await open_unix(engine.path, 5)
    heard: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    frames = FrameSocket(sock, on_frame=heard.set_result, on_closed=lambda _: None)
    frames.send(pb.EngineMessage(call_id=1, rank_hello=hello), [pidfd, *memory])
    await until(lambda: waiting(sidecar) == 1)
    frames.send(pb.EngineMessage(close_slot=pb.CloseSlot()))
    async with asyncio.timeout(WAIT_S):
        assert "more than a hello" in pb.SidecarMessage.FromString(await heard).refused.message
    frames.close()
    os.close(pidfd)
    await until(lambda: waiting(sidecar) == 0)
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(engine.join(1), engine.join(2), leader)
    # And once it is in, its word ends the life.
    assert engine.members[1]._frames is not None
    engine.members[1]._frames.send(pb.EngineMessage(ring=pb.RingNotice()))
    async with asyncio.timeout(WAIT_S):
        await engine.lost.wait()


async def test_flipped_bits_at_the_door_disturb_nobody(sidecar: Sidecar, engine: Ranks) -> None:
    leader = asyncio.ensure_future(engine.lead())
    await until(lambda: sidecar._server._lobby.leader is not None)
    infos = [pb.RegionInfo(group=name, rank=1, nbytes=r.nbytes) for name, r in engine.regions[1].items()]
    layout = layout_to_proto(engine.layout)
    hello = pb.RankHello(engine_id="e", incarnation=5, rank=1, layout=layout, regions=infos, protocol=PROTOCOL)
    frame = pack_frame(pb.EngineMessage(call_id=1, rank_hello=hello))
    pidfd = open_pidfd()
    before = descriptors()
    rng = random.Random(4)
    for _ in range(150):
        raw = bytearray(frame)
        for _ in range(rng.randint(1, 3)):
            # The length stays: what is only too short is waited for.
            raw[rng.randrange(4, len(raw))] ^= 1 << rng.randrange(8)
        ended = asyncio.Event()
        sock = await open_unix(engine.path, 5)
        # Its answer, or the end without one.
        frames = FrameSocket(sock, on_frame=lambda _, e=ended: e.set(), on_closed=lambda _, e=ended: e.set())
        send_with_fds(sock, bytes(raw), [pidfd, *(region.fd for region in engine.regions[1].values())])
        # A flip that does no harm makes a rank that is held.
        await until(lambda e=ended: e.is_set() or waiting(sidecar) == 1)
        frames.close()
        await until(lambda: waiting(sidecar) == 0)
    await until(lambda: descriptors() == before)
    os.close(pidfd)
    assert not leader.done()
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(engine.join(1), engine.join(2), leader)


def _changed(hello: pb.RankHello, **fields: object) -> pb.RankHello:
    copy = pb.RankHello.FromString(hello.SerializeToString())
    for name, value in fields.items():
        if isinstance(value, pb.Layout):
            copy.layout.CopyFrom(value)
        else:
            setattr(copy, name, value)
    return copy


async def test_who_is_missing_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    async with running_sidecar(tmp_path, rank_join_s=0.3) as sidecar:
        engine = Ranks(sidecar.options.engine_socket, make_layout())
        before, mapped = descriptors(), mappings()
        await refused(engine.lead(), DeadlineExceeded, "rank 1, 2 of 3 did not join within 0.3 s")
        await refused(engine.join(1), DeadlineExceeded, "the leader and all ranks of engine 'e' life 5 did not come")
        late = asyncio.ensure_future(engine.lead())
        await refused(engine.join(2), DeadlineExceeded, "did not come|did not join")
        await refused(late, DeadlineExceeded, "rank 1(, 2)? of 3 did not join")
        await until(lambda: descriptors() == before)
        assert mappings() == mapped
        assert sidecar.vacant.is_set()
        await engine.close()


async def test_how_many_wait_is_limited(sidecar: Sidecar, engine: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "MAX_WAITING_RANKS", 2)
    stray = [asyncio.ensure_future(engine.join(1, engine_id=f"x{n}")) for n in range(2)]
    await until(lambda: waiting(sidecar) == 2)
    await refused(engine.join(1), Overloaded, "2 ranks wait here already")
    # A leader makes room: what is not of its engine is sent away.
    leader = asyncio.ensure_future(engine.lead())
    for task in stray:
        await refused(task, FailedPrecondition, "engine 'e' life 5 registers here, not engine 'x")
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(leader, engine.join(1), engine.join(2))


async def test_how_many_may_be_silent_is_limited(
    sidecar: Sidecar, engine: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "MAX_PENDING_HELLOS", 3)
    silent = [await open_unix(engine.path, 5) for _ in range(3)]
    await until(lambda: sidecar._server._pending == 3)
    fourth = await open_unix(engine.path, 5)
    async with asyncio.timeout(WAIT_S):
        assert await asyncio.get_running_loop().sock_recv(fourth, 1) == b""
    fourth.close()
    # Whoever leaves makes room, and so does its limit of time.
    for sock in silent:
        sock.close()
    await until(lambda: sidecar._server._pending == 0)
    await engine.connect()
    assert sidecar._server._pending == 0


@pytest.mark.parametrize("who", [0, 1, 2])
async def test_the_end_of_any_connection_ends_the_life(sidecar: Sidecar, engine: Ranks, who: int) -> None:
    before, mapped = descriptors(), mappings()
    for _ in range(3):
        await engine.connect()
        members = dict(engine.members)
        if who == 0:
            assert engine.client is not None
            await engine.client.close()
        else:
            await members[who].close()
        async with asyncio.timeout(WAIT_S):
            for rank, member in members.items():
                if rank != who:
                    assert await member.lost
            if who != 0:
                await engine.lost.wait()
            await sidecar.vacant.wait()
        # The engine keeps a pidfd of the last sidecar that it was registered with.
        await until(lambda: descriptors() == before + 1)
        assert mappings() == mapped


async def test_a_rank_that_dies_while_the_others_are_awaited_may_come_again(sidecar: Sidecar, engine: Ranks) -> None:
    leader = asyncio.ensure_future(engine.lead())
    gone = asyncio.ensure_future(engine.join(1))
    await until(lambda: waiting(sidecar) == 1)
    gone.cancel()
    await until(lambda: waiting(sidecar) == 0)
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(engine.join(2), engine.join(1), leader)
    assert engine.client is not None
    assert engine.client.connected


async def test_a_leader_that_leaves_lets_its_ranks_wait_for_the_next(sidecar: Sidecar, engine: Ranks) -> None:
    leader = asyncio.ensure_future(engine.lead())
    joining = asyncio.ensure_future(engine.join(1))
    await until(lambda: waiting(sidecar) == 1)
    leader.cancel()
    await until(lambda: sidecar._server._lobby.leader is None)
    assert not joining.done()
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(engine.lead(), engine.join(2), joining)


async def test_links_take_leader_and_ranks_to_a_successor(tmp_path: Path) -> None:
    layout = make_layout()
    path = tmp_path / "s.sock"
    engine = Ranks(path, layout)
    leader = SidecarLink(
        path, engine_id="e", incarnation=5, layout=layout, regions=engine.regions[0], doorbell=engine.doorbell,
        ring=engine.ring,
    )  # fmt: skip
    joined: list[RankMember] = []
    links = [
        RankLink(
            path, engine_id="e", incarnation=5, rank=rank, layout=layout, regions=engine.regions[rank],
            on_connected=joined.append,
        )
        for rank in (1, 2)
    ]  # fmt: skip
    for link in (*links, leader):
        link.start()
    incarnations = set()
    for _ in range(2):
        async with running_sidecar(tmp_path) as sidecar:
            client = await leader.wait_connected(WAIT_S)
            for link in links:
                assert (await link.wait_connected(WAIT_S)).sidecar_incarnation == sidecar.incarnation
            assert client.sidecar_incarnation == sidecar.incarnation
            assert len(client.region_infos) == 6
            incarnations.add(sidecar.incarnation)
            # One rank's connection breaks: all of them come back to the same sidecar by themselves.
            member = links[0].member
            assert member is not None
            assert member._frames is not None
            count = len(joined)
            member._frames.raw.shutdown(2)
            await until(lambda n=count: len(joined) >= n + 2)
            assert await leader.wait_connected(WAIT_S) is not client
        await until(lambda: leader.client is None and all(link.member is None for link in links))
    assert len(incarnations) == 2
    for link in (*links, leader):
        await link.close()
    with pytest.raises(Unavailable):
        await links[0].wait_connected(0.01)
    await engine.close()


async def test_a_rank_with_a_doorbell_of_its_own_holds_layers_back(sidecar: Sidecar) -> None:
    engine = Ranks(sidecar.options.engine_socket, make_layout(tp=2))
    own = Region.create("own", 4096)
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(engine.lead(), engine.join(1, doorbell=own))
    watcher = sidecar.mover._watcher
    assert watcher is not None
    assert [bell.value for bell in watcher._doorbells] == [0, 0]
    engine.doorbell.view("u8")[0] = 3
    assert watcher._rung() == 0
    own.view("u8")[0] = 2
    assert watcher._rung() == 2
    await engine.close()
    own.close()


async def test_who_does_not_belong_is_refused_at_once_while_an_engine_is_let_in(
    sidecar: Sidecar, engine: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after the last rank has come, and by an engine of one rank, which waits for nobody."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(regions: object, *, write: bool) -> None:
        begun.set()
        go_on.wait(WAIT_S)

    monkeypatch.setattr(door_module, "prefault", slow)
    single = Ranks(engine.path, make_layout(tp=1), engine_id="single")
    stray = asyncio.ensure_future(engine.join(1))
    await until(lambda: waiting(sidecar) == 1)
    leader = asyncio.ensure_future(single.lead())
    await refused(stray, FailedPrecondition, "engine 'single' life 5 registers here, not engine 'e'")
    go_on.set()
    async with asyncio.timeout(WAIT_S):
        await leader
    await single.close()
    begun.clear()
    go_on.clear()
    joining = asyncio.ensure_future(engine.connect())
    await until(begun.is_set)
    await refused(engine.join(1), FailedPrecondition, "rank 1 of engine 'e' life 5 has joined already")
    await refused(engine.join(1, incarnation=6), FailedPrecondition, "engine 'e' life 5 registers here")
    assert not joining.done()
    go_on.set()
    async with asyncio.timeout(WAIT_S):
        await joining


async def test_a_doorbell_that_is_none_is_refused_alone(sidecar: Sidecar, engine: Ranks) -> None:
    leader = asyncio.ensure_future(engine.lead())
    await until(lambda: sidecar._server._lobby.leader is not None)
    with Region.create("small", 8) as small:
        await refused(engine.join(1, doorbell=small), InvalidArgument, "a doorbell has 64 bytes at least, not 8")
    assert not leader.done()
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(engine.join(1), engine.join(2), leader)


class Elsewhere(Region):
    """Says that it is a GPU's."""

    memory = "cuda"
    device = "GPU-1"


async def test_all_ranks_have_one_kind_of_memory(tmp_path: Path) -> None:
    async with running_sidecar(tmp_path, transports=("nvlink", "tcp")) as sidecar:
        engine = Ranks(sidecar.options.engine_socket, make_layout(tp=2))
        plain = engine.regions[1]
        held = [{name: Elsewhere.hold(os.dup(region.fd), region.nbytes) for name, region in regions.items()}
                for regions in engine.regions]  # fmt: skip
        engine.regions[0] = held[0]
        leader = asyncio.ensure_future(engine.lead())
        await until(lambda: sidecar._server._lobby.leader is not None)
        await refused(engine.join(1), InvalidArgument, "rank 1 of .* has host memory, its leader cuda")
        engine.regions[1] = held[1]
        async with asyncio.timeout(WAIT_S):
            client, _ = await asyncio.gather(leader, engine.join(1))
        assert {(info.memory, info.device) for info in client.region_infos} == {("cuda", "GPU-1")}
        assert client.transports == ["nvlink"]
        await engine.close()
        for region in plain.values():
            region.close()


async def test_more_regions_than_a_message_passes_leave_the_other_transports(
    sidecar: Sidecar, engine: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm_module, "MAX_FDS", 5)
    await engine.connect()
    assert engine.client is not None
    assert engine.client.transports == ["tcp"]
    assert "at most 5 regions, the engine has 6" in sidecar.transports["shm"].ready[1]


class _Poster:
    """An engine's that is never asked."""

    transports = ("nvlink",)

    def lost(self) -> None:
        pass


async def test_a_poster_that_leaves_while_it_is_let_in_leaves_nothing(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(regions: object, *, write: bool) -> None:
        begun.set()
        go_on.wait(WAIT_S)

    monkeypatch.setattr(door_module, "prefault", slow)
    engine = Ranks(sidecar.options.engine_socket, make_layout(tp=1))
    before, mapped = descriptors(), mappings()
    seen = asyncio.Event()
    over = Visitor._over

    def watched(self: Visitor, why: str) -> None:
        over(self, why)
        seen.set()

    monkeypatch.setattr(Visitor, "_over", watched)
    leader = asyncio.ensure_future(engine.lead(poster=_Poster()))
    await until(begun.is_set)
    leader.cancel()
    async with asyncio.timeout(WAIT_S):
        await seen.wait()
    go_on.set()
    await until(lambda: not sidecar._server._turn.locked())
    gc.collect()
    await until(lambda: descriptors() == before)
    assert mappings() == mapped
    await engine.close()


async def test_a_rank_whose_memory_the_leader_brings_is_refused(sidecar: Sidecar, engine: Ranks) -> None:
    early = asyncio.ensure_future(engine.join(1))
    await until(lambda: waiting(sidecar) == 1)
    infos = [
        pb.RegionInfo(group=name, rank=rank, nbytes=region.nbytes)
        for rank in (0, 1)
        for name, region in engine.regions[rank].items()
    ]
    hello = pb.EngineHello(
        engine_id="e", incarnation=5, layout=layout_to_proto(engine.layout), regions=infos, protocol=PROTOCOL,
        doorbell_bytes=engine.doorbell.nbytes, ring_bytes=engine.ring.nbytes,
    )  # fmt: skip
    pidfd, eventfd = open_pidfd(), os.eventfd(0)
    memory = [region.fd for rank in (0, 1) for region in engine.regions[rank].values()]
    sock = await open_unix(engine.path, 5)
    leader = asyncio.ensure_future(
        exchange(
            sock,
            pb.EngineMessage(call_id=1, hello=hello),
            [pidfd, engine.doorbell.fd, engine.ring.fd, eventfd, *memory],
            max_fds=1,
            timeout_s=WAIT_S,
        )
    )
    await refused(early, FailedPrecondition, "rank 1 of engine 'e' life 5 has joined already")
    await refused(engine.join(1), FailedPrecondition, "rank 1 of engine 'e' life 5 has joined already")
    assert not leader.done()
    await engine.join(2)
    async with asyncio.timeout(WAIT_S):
        body, passed = await leader
    welcome = pb.SidecarMessage.FromString(body).hello
    assert len(welcome.regions) == 6
    assert welcome.pidfd
    check_pidfd(passed[0])
    close_fds(passed)
    sock.close()
    os.close(pidfd)
    os.close(eventfd)
