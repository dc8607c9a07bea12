"""Both ends of a tcp link over sockets that take a few bytes at a time."""

from __future__ import annotations

import asyncio
import socket
import struct
import zlib
from collections.abc import AsyncIterator

import numpy as np
import pytest

from kvmesh.errors import FailedPrecondition
from kvmesh.kv.layout import KvGroup, KvLayout
from kvmesh.kv.region import Region
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.immediate import pack
from kvmesh.transfer.transports.base import Completion, EngineMemory, Expected, GrantedPages, Write
from kvmesh.transfer.transports.sockets.helpers import Helpers
from kvmesh.transfer.transports.tcp import CORRUPT, FLAG_CHECKSUM, HEAD, TcpInbound, TcpOutbound, outbound

LAYOUT = KvLayout(
    version=1,
    dtype="bf16",
    page_size=16,
    groups=(KvGroup("main", "full", (0, 1), kv_heads=2, head_dim=16),),
    num_pages=32,
)
PAGE = LAYOUT.page_bytes("main")
STRIDE = LAYOUT.layer_stride("main")
GRANTED = [3, 4, 5, 9, 10, 20]
IMMEDIATE = pack(1, 2)


class Rig:
    def __init__(self, streams: int = 1, *, checksums: bool = False, threads: int = 1) -> None:
        size = LAYOUT.region_bytes("main")
        self.source, self.target = Region.create("source", size), Region.create("target", size)
        self.source.view()[:] = np.random.default_rng(1).integers(1, 256, size, dtype=np.uint8)
        pairs = [socket.socketpair() for _ in range(streams)]
        for sock in (sock for pair in pairs for sock in pair):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        self.raw = pairs[0][0]
        self.theirs = [theirs for _, theirs in pairs]
        self.helpers = Helpers(threads)
        self.out = TcpOutbound([ours for ours, _ in pairs], [self.source], checksums=checksums, helpers=self.helpers)
        info = pb.RegionInfo(group="main", rank=0, nbytes=size, key=1)
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        expected = Expected(1, "peer", self.joined, lambda: None, self.ended.set_result)
        self.inbound = TcpInbound(EngineMemory("e", 1, LAYOUT, [info], [self.target]), expected)
        self.inbound.grant(IMMEDIATE, GrantedPages({0: np.asarray(GRANTED, dtype=np.int64)}))
        for theirs in self.theirs:
            self.inbound.add(theirs)
        self.completions: list[Completion] = []

    async def joined(self, *_: object) -> None: ...

    def write(self, number: int, pages: list[int], immediate: int = IMMEDIATE) -> Write:
        """Pages from the source's same places, layer 1."""
        at = [STRIDE + page * PAGE for page in pages]
        return Write(number, immediate, 0, 0, at, at, [PAGE] * len(at), PAGE * len(at))

    async def close(self) -> None:
        self.out.close()
        async with asyncio.timeout(30):
            await self.inbound.fence()
        self.helpers.close()
        self.source.close()
        self.target.close()

    async def poll(self, count: int, budget: int = 700) -> None:
        async with asyncio.timeout(60):
            while len(self.completions) < count:
                self.completions += self.out.poll(budget)
                await asyncio.sleep(0)

    def landed(self) -> set[int]:
        """Pages of layer 1 that hold the source's bytes, all others hold nothing."""
        here, there = (r.view().reshape(2, LAYOUT.num_pages, PAGE) for r in (self.source, self.target))
        assert not there[0].any()
        whole = {page for page in range(LAYOUT.num_pages) if (there[1, page] == here[1, page]).all()}
        assert not there[1, [page for page in range(LAYOUT.num_pages) if page not in GRANTED]].any()
        return whole


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    rig.out.close()
    async with asyncio.timeout(60):
        await rig.inbound.fence()
    rig.source.close()
    rig.target.close()


async def test_bytes_land_whole_however_they_are_cut(rig: Rig) -> None:
    rig.out.post(rig.write(1, [3, 9]))
    rig.out.post(rig.write(2, [4]))
    rig.out.post(rig.write(3, [20, 5, 10]))
    await rig.poll(3)
    assert rig.completions == [Completion(1, 2 * PAGE), Completion(2, PAGE), Completion(3, 3 * PAGE)]
    assert rig.landed() == set(GRANTED)
    assert sum(arrival.nbytes for arrival in rig.inbound.poll()) == 6 * PAGE


async def test_what_came_before_its_grant_is_not_counted_after(rig: Rig) -> None:
    """A writer that does not wait for its bind: what was dropped must not complete the slot."""
    early = pack(9, 9)
    rig.out.post(rig.write(1, [3], immediate=early))
    await rig.poll(1)
    assert "dropped it" in rig.completions[0].error
    rig.inbound.grant(early, GrantedPages({0: np.asarray(GRANTED, dtype=np.int64)}))
    assert [(arrival.immediate, arrival.nbytes) for arrival in rig.inbound.poll()] == [(early, 0)]
    rig.out.post(rig.write(2, [3], immediate=early))
    await rig.poll(2)
    assert [(arrival.immediate, arrival.nbytes) for arrival in rig.inbound.poll()] == [(early, PAGE)]


async def test_a_flush_lets_the_begun_one_end_and_what_is_revoked_is_dropped(rig: Rig) -> None:
    rig.out.post(rig.write(1, [3, 4, 5]))
    rig.out.post(rig.write(2, [9]))
    rig.out.post(rig.write(3, [3], immediate=pack(7, 7)))
    rig.completions += rig.out.poll(100)
    rig.out.flush(IMMEDIATE)
    await rig.poll(3)
    assert {c.context: c.error for c in rig.completions if c.context != 3} == {1: "", 2: "flushed"}
    assert "dropped it" in next(c.error for c in rig.completions if c.context == 3)
    assert rig.landed() == {3, 4, 5}
    rig.inbound.revoke(IMMEDIATE)
    rig.out.post(rig.write(4, [20]))
    await rig.poll(4)
    assert "dropped it" in rig.completions[-1].error
    assert 20 not in rig.landed()


@pytest.mark.parametrize("cut", [10, 31, 32, 40, 63, 64, 65, 64 + PAGE, 63 + 2 * PAGE])
async def test_a_connection_that_ends_inside_a_write(rig: Rig, cut: int) -> None:
    """Head (32), table (2 x 16), bytes: wherever it ends, nothing is counted and the fence ends."""
    write = rig.write(1, [3, 4])
    head = HEAD.pack(IMMEDIATE, 0, 2, 0, write.nbytes, 1) + struct.pack(
        "<4Q", *(x for at in write.dst for x in (at, PAGE))
    )
    data = head + rig.source.view()[STRIDE + 3 * PAGE :][: 2 * PAGE].tobytes()
    assert len(data) == 64 + 2 * PAGE
    rig.raw.setblocking(True)
    await asyncio.to_thread(rig.raw.sendall, data[:cut])
    rig.raw.shutdown(socket.SHUT_WR)
    assert "inside a write" in await asyncio.wait_for(asyncio.shield(rig.ended), 60)
    await rig.inbound.fence()
    assert rig.inbound.poll() == []
    assert rig.landed() <= {3}


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes of a few pages are cut over the streams too."""
    monkeypatch.setattr(outbound, "MIN_PART_BYTES", PAGE)
    monkeypatch.setattr(outbound, "CHECKED_PART_BYTES", 2 * PAGE)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize(("streams", "threads"), [(1, 1), (3, 1), (4, 3)])
async def test_several_streams_carry_every_byte_once(streams: int, threads: int, checksums: bool) -> None:
    rig = Rig(streams, checksums=checksums, threads=threads)
    rig.out.post(rig.write(1, [3, 9, 4, 20, 5]))
    rig.out.post(rig.write(2, [10]))
    await rig.poll(2)
    assert sorted(rig.completions) == [Completion(1, 5 * PAGE), Completion(2, PAGE)]
    assert rig.landed() == set(GRANTED)
    assert sum(arrival.nbytes for arrival in rig.inbound.poll()) == 6 * PAGE
    assert len(rig.out.wait_fds()) == streams
    await rig.close()


@pytest.mark.usefixtures("small_parts")
async def test_a_write_is_over_when_its_last_part_is_on_whatever_stream() -> None:
    """Drained may be said when nothing is outstanding: parts that have begun must hold their write open."""
    rig = Rig(2)
    rig.out.post(rig.write(1, [3, 4, 5, 9]))
    rig.out.post(rig.write(2, [10, 20]))
    # A page of each stream's first part is on its way.
    assert rig.out.poll(2) == []
    rig.out.flush(IMMEDIATE)
    assert rig.out.poll(0) == [Completion(2, 0, "flushed")]
    await rig.poll(1)
    assert rig.completions == [Completion(1, 4 * PAGE)]
    assert rig.landed() == {3, 4, 5, 9}
    await rig.close()


@pytest.mark.usefixtures("small_parts")
async def test_one_stream_that_breaks_ends_the_link_once() -> None:
    rig = Rig(3)
    rig.out.post(rig.write(1, [3, 4, 5]))
    rig.out.post(rig.write(2, [9, 10, 20]))
    rig.theirs[1].shutdown(socket.SHUT_RDWR)
    await rig.poll(2)
    assert all(c.error for c in rig.completions)
    assert rig.out.broken
    assert rig.out.wait_fds() == []
    assert await asyncio.wait_for(asyncio.shield(rig.ended), 30)
    await rig.close()
    # All readers are joined, and a stream that comes too late is not let in.
    late, other = socket.socketpair()
    with pytest.raises(FailedPrecondition):
        rig.inbound.add(late)
    other.close()


async def test_bytes_that_arrive_changed_fail_the_write_by_name() -> None:
    rig = Rig(checksums=True)
    write = rig.write(1, [3, 4])
    rig.raw.setblocking(True)
    rig.raw.settimeout(30)
    head = HEAD.pack(IMMEDIATE, 0, 2, FLAG_CHECKSUM, write.nbytes, 9)
    table = struct.pack("<4Q", *(x for at in write.dst for x in (at, PAGE)))
    data = rig.source.view()[STRIDE + 3 * PAGE :][: 2 * PAGE].tobytes()
    wrong = struct.pack("<Q", zlib.crc32(data) ^ 1)
    await asyncio.to_thread(rig.raw.sendall, head + table + data + wrong)
    answer = await asyncio.to_thread(rig.raw.recv, 16, socket.MSG_WAITALL)
    assert struct.unpack("<QQ", answer) == (9, CORRUPT)
    # They are nothing that has arrived, and the connection goes on.
    assert rig.inbound.poll() == []
    rig.raw.setblocking(False)
    rig.out.post(rig.write(2, [5]))
    await rig.poll(1)
    assert rig.completions == [Completion(2, PAGE)]
    await rig.close()


async def test_the_writer_fails_what_was_found_changed() -> None:
    ours, theirs = socket.socketpair()
    source = Region.create("source", LAYOUT.region_bytes("main"))
    out = TcpOutbound([ours], [source], checksums=True)
    out.post(Write(1, IMMEDIATE, 0, 0, [0], [0], [PAGE], PAGE))
    assert out.poll(1 << 20) == []
    theirs.sendall(struct.pack("<QQ", 1, CORRUPT))
    (completion,) = out.poll(0)
    assert "checksum mismatch" in completion.error
    out.close()
    theirs.close()
    source.close()


async def test_unknown_flags_are_refused_before_a_byte_is_taken(rig: Rig) -> None:
    rig.raw.setblocking(True)
    await asyncio.to_thread(rig.raw.sendall, HEAD.pack(IMMEDIATE, 0, 1, 4, PAGE, 1))
    assert "unknown flags" in await asyncio.wait_for(asyncio.shield(rig.ended), 30)
    assert rig.landed() == set()
