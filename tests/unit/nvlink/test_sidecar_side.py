"""What sidecars keep of nvlink: the counters' watch, and the account of memory that the engine holds."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Sequence

import pytest

from kvmesh.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, Unavailable
from kvmesh.kv.pidfd import open_pidfd
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.immediate import MAX_SLOTS, pack
from kvmesh.transfer.transports.base import Arrival, Expected, Inbound
from kvmesh.transfer.transports.counters import CounterWatch, LinkCounters
from kvmesh.transfer.transports.nvlink import NvlinkInbound, NvlinkOutbound
from kvmesh.transfer.transports.posted import EnginePoster


def word(generation: int, nbytes: int) -> int:
    return generation << 44 | nbytes


def test_counters_add_up_over_ranks_and_start_from_zero() -> None:
    counters = LinkCounters(2, lambda: None)
    words = counters.region.view("u8")
    words[5] = word(3, 1000)
    words[MAX_SLOTS + 5] = word(3, 1)
    counters.grant(pack(5, 4))
    assert not words[5]
    assert not words[MAX_SLOTS + 5]
    assert counters.read() == []
    words[5] = word(4, 100)
    words[MAX_SLOTS + 5] = word(4, 7)
    assert counters.read() == [Arrival(pack(5, 4), 100), Arrival(pack(5, 4), 7)]
    words[5] = word(4, 150)
    assert counters.read() == [Arrival(pack(5, 4), 50)]
    assert counters.read() == []
    counters.revoke(pack(5, 4))
    words[5] = word(4, 500)
    assert counters.read() == []
    del words
    counters.close()


def test_a_word_of_another_generation_is_stale_once() -> None:
    counters = LinkCounters(1, lambda: None)
    words = counters.region.view("u8")
    counters.grant(pack(0, (1 << 20) - 1))
    words[0] = word(17, 4096)
    assert counters.read() == [Arrival(pack(0, 17), 4096)]
    assert counters.read() == []
    words[0] = word((1 << 20) - 1, 64)
    assert counters.read() == [Arrival(pack(0, (1 << 20) - 1), 64)]
    del words
    counters.close()


def test_the_watch_sees_a_change_and_stops() -> None:
    watch = CounterWatch()
    seen = threading.Event()
    counters = LinkCounters(1, seen.set)
    other = LinkCounters(1, lambda: None)
    words = counters.region.view("u8")
    watch.grant(counters, pack(1, 1))
    watch.grant(other, pack(1, 1))
    words[1] = word(1, 10)
    assert seen.wait(60)
    watch.revoke(counters, pack(1, 1))
    del words
    watch.remove(counters)
    watch.remove(other)
    watch.stop()


class Engine:
    """Hears what the sidecar says to it."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[pb.SidecarMessage] = asyncio.Queue()
        self.late: list[int] = []
        self.poster = EnginePoster(self.tell, open_pidfd(os.getpid()), ["nvlink"])
        self.poster.on_released = lambda released: self.late.append(released.link_id)

    def tell(self, message: pb.SidecarMessage, fds: Sequence[int] = ()) -> None:
        self.heard.put_nowait(message)

    def mapped(self, link_id: int, reason: str = "") -> None:
        self.poster.on_message(
            pb.EngineMessage(peer_mapped=pb.PeerMapped(link_id=link_id, ok=not reason, reason=reason))
        )

    def released(self, link_id: int) -> None:
        self.poster.on_message(pb.EngineMessage(peer_released=pb.PeerReleased(link_id=link_id)))

    async def map(self, link_id: int, timeout_s: float = 60.0) -> asyncio.Task[None]:
        task = asyncio.create_task(self.poster.map(pb.PeerMemory(link_id=link_id), [], timeout_s))
        assert (await self.heard.get()).WhichOneof("body") == "peer_memory"
        return task


async def test_memory_is_held_from_its_handing_over_to_its_release() -> None:
    engine = Engine()
    task = await engine.map(1)
    assert engine.poster.holds(1)
    engine.mapped(1)
    await task
    waiting = asyncio.create_task(engine.poster.released(1, 60.0))
    engine.poster.release(1, "over")
    assert (await engine.heard.get()).release_peer.link_id == 1
    engine.released(1)
    await waiting
    assert not engine.poster.holds(1)
    assert engine.late == []
    engine.poster.lost()


async def test_memory_that_cannot_be_mapped_is_not_held() -> None:
    engine = Engine()
    task = await engine.map(1)
    engine.mapped(1, "no peer access")
    with pytest.raises(FailedPrecondition, match="no peer access"):
        await task
    assert not engine.poster.holds(1)
    engine.poster.lost()


async def test_memory_that_is_mapped_too_late_is_held_until_it_is_let_go_of() -> None:
    engine = Engine()
    task = await engine.map(1, timeout_s=0.0)
    with pytest.raises(DeadlineExceeded):
        await task
    assert (await engine.heard.get()).release_peer.link_id == 1
    engine.mapped(1)
    assert engine.poster.holds(1)
    engine.released(1)
    assert not engine.poster.holds(1)
    # No link waits for it any more: somebody has to tell the destination.
    assert engine.late == [1]
    engine.released(77)
    assert engine.late == [1, 77]
    engine.poster.lost()


async def test_a_lost_engine_holds_for_ever_what_it_had() -> None:
    engine = Engine()
    task = await engine.map(1)
    engine.mapped(1)
    await task
    task = await engine.map(2)
    ends: list[tuple[int, str]] = []
    engine.poster.post(9, 1, pb.StartTransfer(), lambda nbytes, reason: ends.append((nbytes, reason)))
    engine.poster.lost()
    with pytest.raises(Unavailable):
        await task
    await engine.poster.released(1, 60.0)
    assert engine.poster.holds(1)
    assert engine.poster.holds(2)
    assert ends == []


async def test_a_transfer_ends_once() -> None:
    engine = Engine()
    ends: list[tuple[int, str]] = []
    engine.poster.post(9, 1, pb.StartTransfer(), lambda nbytes, reason: ends.append((nbytes, reason)))
    assert (await engine.heard.get()).post_transfer.transfer_id == 9
    engine.poster.stop(9, "enough")
    assert (await engine.heard.get()).stop_transfer.transfer_id == 9
    for _ in range(2):
        engine.poster.on_message(pb.EngineMessage(post_ended=pb.PostEnded(transfer_id=9, bytes=5, reason="enough")))
    assert ends == [(5, "enough")]
    engine.poster.stop(9, "again")
    assert engine.heard.empty()
    engine.poster.lost()


async def test_a_closed_link_leaves_descriptors_of_others_alone() -> None:
    """It is looked at once more when its stream has ended in order, and its engine may speak late: by then the number
    of its descriptor may be a socket's."""
    engine = Engine()
    other, peer = socket.socketpair()
    for sock in (other, peer):
        sock.setblocking(False)
    ours, theirs = socket.socketpair()
    link = NvlinkOutbound(ours, 1, engine.poster)
    number = link._wake
    link.fence("over")
    link.close()
    await link.released()
    os.dup2(other.fileno(), number)
    try:
        peer.send(b"12345678")
        assert link.poll(1) == []
        assert other.recv(64) == b"12345678"
        link.ended(9, 5, "")
        with pytest.raises(BlockingIOError):
            peer.recv(64)
    finally:
        os.close(number)
        for sock in (theirs, other, peer):
            sock.close()
    engine.poster.lost()


async def test_a_peer_cannot_put_its_memory_in_the_place_of_anothers() -> None:
    """Destinations name the links: one that takes another's name would get what is written there."""
    engine = Engine()
    task = await engine.map(1)
    engine.mapped(1)
    await task
    with pytest.raises(InvalidArgument, match="link 1 is another's"):
        await engine.poster.map(pb.PeerMemory(link_id=1), [], 60.0)
    assert engine.heard.empty()
    assert engine.poster.holds(1)
    engine.released(1)
    # Its link has not ended yet: the word was for that one.
    with pytest.raises(InvalidArgument, match="link 1 is another's"):
        await engine.poster.map(pb.PeerMemory(link_id=1), [], 60.0)
    await engine.poster.released(1, 60.0)
    task = await engine.map(1)
    engine.mapped(1)
    await task
    engine.poster.lost()


async def test_the_process_of_a_lost_engine_is_not_named_by_a_number_of_another() -> None:
    engine = Engine()
    copy = engine.poster.pidfd_copy()
    assert copy != engine.poster.pidfd
    os.close(copy)
    engine.poster.lost()
    with pytest.raises(Unavailable):
        engine.poster.pidfd_copy()


async def test_a_busy_loop_is_told_once_of_what_the_watch_sees_often() -> None:
    ready: list[list[Arrival]] = []

    async def joined(inbound: Inbound, pidfd: int | None) -> None:
        pass

    ours, theirs = socket.socketpair()
    watch = CounterWatch()
    expected = Expected(1, "s", joined, lambda: ready.append(inbound.poll()), lambda reason: None)
    inbound = NvlinkInbound(ours, open_pidfd(), expected, watch)
    words = inbound.counters.region.view("u8")
    for count in (1, 2):
        inbound.counters.grant(pack(1, count))
        words[1] = word(count, 10)
        # As the watch's thread does while the loop is busy.
        for _ in range(500):
            inbound._changed()
        for _ in range(3):
            await asyncio.sleep(0)
        assert ready == [[Arrival(pack(1, count), 10)]]
        ready.clear()
        inbound.counters.revoke(pack(1, count))
    del words
    inbound.abandon()
    watch.stop()
    ours.close()
    theirs.close()
