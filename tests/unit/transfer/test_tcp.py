"""Both ends of a tcp link over sockets that take a few bytes at a time."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator

import numpy as np
import pytest

from kvmesh.kv.layout import KvGroup, KvLayout
from kvmesh.kv.region import Region
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.immediate import pack
from kvmesh.transfer.transports.base import Completion, EngineMemory, Expected, GrantedPages, Write
from kvmesh.transfer.transports.tcp import HEAD, TcpInbound, TcpOutbound

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
    def __init__(self) -> None:
        size = LAYOUT.region_bytes("main")
        self.source, self.target = Region.create("source", size), Region.create("target", size)
        self.source.view()[:] = np.random.default_rng(1).integers(1, 256, size, dtype=np.uint8)
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        self.raw = ours
        self.out = TcpOutbound([ours], [self.source])
        info = pb.RegionInfo(group="main", rank=0, nbytes=size, key=1)
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        expected = Expected(1, "peer", self.joined, lambda: None, self.ended.set_result)
        self.inbound = TcpInbound(EngineMemory("e", 1, LAYOUT, [info], [self.target]), expected)
        self.inbound.grant(IMMEDIATE, GrantedPages({0: np.asarray(GRANTED, dtype=np.int64)}))
        self.inbound.add(theirs)
        self.completions: list[Completion] = []

    async def joined(self, *_: object) -> None: ...

    def write(self, number: int, pages: list[int], immediate: int = IMMEDIATE) -> Write:
        """Pages from the source's same places, layer 1."""
        at = [STRIDE + page * PAGE for page in pages]
        return Write(number, immediate, 0, 0, at, at, [PAGE] * len(at), PAGE * len(at))

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
