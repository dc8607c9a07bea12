"""A link between two sidecars' nvlink transports in one process: what is handed over, and what of it on failure."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import kvmesh.transfer.transports.nvlink as nvlink_module
from kvmesh.errors import Unavailable
from kvmesh.kv.pidfd import open_pidfd
from kvmesh.kv.region import Region
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.transports.base import EngineMemory, Expected, Inbound
from kvmesh.transfer.transports.nvlink import NvlinkTransport
from kvmesh.transfer.transports.posted import EnginePoster
from nvlink_world import WAIT_S, layout_of


class Ends:
    """source writes to target. said: what the source's engine heard."""

    def __init__(self, folder: Path) -> None:
        self.said: list[pb.SidecarMessage] = []
        self.late: list[int] = []
        self.answers = True
        layout = layout_of()
        self.regions = [Region.create(name, layout.region_bytes("main")) for name in ("source", "target")]
        infos = [pb.RegionInfo(group="main", nbytes=self.regions[0].nbytes, key=7)]
        self.poster = EnginePoster(self.tell, open_pidfd(), ["nvlink"])
        self.poster.on_released = lambda released: self.late.append(released.link_id)
        self.source = NvlinkTransport(folder / "s")
        self.source.memory = EngineMemory("s", 1, layout, infos, self.regions[:1], poster=self.poster)
        self.target = NvlinkTransport(folder / "t")
        self.target.memory = EngineMemory("t", 1, layout, infos, self.regions[1:])
        self.inbound: Any = None
        self.ended: list[str] = []

    def tell(self, message: pb.SidecarMessage, fds: Sequence[int] = ()) -> None:
        self.said.append(message)
        if message.WhichOneof("body") == "peer_memory" and self.answers:
            mapped = pb.PeerMapped(link_id=message.peer_memory.link_id, ok=True)
            asyncio.get_running_loop().call_soon(self.poster.on_message, pb.EngineMessage(peer_mapped=mapped))

    async def connect(self, link_id: int = 1, ranks: int = 1) -> Any:
        assert self.target.memory is not None
        infos = self.target.memory.infos
        end = self.target.expect(
            Expected(link_id, "s", self._joined, lambda: None, self.ended.append, source_ranks=ranks)
        )
        reply = pb.PeerHelloReply(link_id=link_id, endpoint=end.address, token=end.token, regions=infos)
        return await self.source.connect(reply, "s", WAIT_S)

    async def _joined(self, inbound: Inbound, pidfd: int | None) -> None:
        assert pidfd is not None
        os.close(pidfd)
        self.inbound = inbound

    def kinds(self) -> list[str | None]:
        return [message.WhichOneof("body") for message in self.said]


@pytest.fixture
async def ends(tmp_path: Path) -> AsyncIterator[Ends]:
    ends = Ends(tmp_path)
    await ends.source.start()
    await ends.target.start()
    yield ends
    if ends.inbound is not None:
        ends.inbound.unmapped()
        async with asyncio.timeout(WAIT_S):
            await ends.inbound.fence()
    await ends.source.close()
    await ends.target.close()
    ends.poster.lost()
    for region in ends.regions:
        region.close()


async def test_memory_is_handed_over_and_let_go_of(ends: Ends) -> None:
    link = await ends.connect()
    assert ends.kinds() == ["peer_memory"]
    assert ends.source.holds(1)
    link.fence("over")
    link.close()
    released = asyncio.ensure_future(link.released())
    async with asyncio.timeout(WAIT_S):
        while len(ends.said) < 2:
            await asyncio.sleep(0.001)
        assert ends.kinds() == ["peer_memory", "release_peer"]
        ends.poster.on_message(pb.EngineMessage(peer_released=pb.PeerReleased(link_id=1)))
        await released
        # Its last word, over the socket.
        await ends.inbound.fence()
    assert ends.late == []


async def test_a_link_that_cannot_be_made_leaves_nothing_with_the_engine(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptor is left when the engine has mapped the memory already."""

    def refuse(*_: object) -> None:
        raise OSError("too many open files")

    monkeypatch.setattr(nvlink_module, "NvlinkOutbound", refuse)
    with pytest.raises(OSError, match="too many"):
        await ends.connect()
    assert ends.kinds() == ["peer_memory", "release_peer"]
    ends.poster.on_message(pb.EngineMessage(peer_released=pb.PeerReleased(link_id=1)))
    assert ends.late == [1], "no link tells it: a notice does"
    assert not ends.source.holds(1)


async def test_an_engine_that_goes_while_its_link_is_opened(ends: Ends) -> None:
    ends.answers = False
    before = len(os.listdir("/proc/self/fd"))
    opening = asyncio.ensure_future(ends.connect())
    async with asyncio.timeout(WAIT_S):
        while not ends.said:
            await asyncio.sleep(0.001)
    ends.poster.lost()
    with pytest.raises(Unavailable, match="the engine is gone"):
        await opening
    # It may have mapped it: nobody says otherwise.
    assert ends.source.holds(1)
    with pytest.raises(Unavailable, match="the engine is gone"):
        await ends.connect(2)
    assert ends.kinds() == ["peer_memory"]
    ends.inbound.unmapped()
    async with asyncio.timeout(WAIT_S):
        await ends.inbound.fence()
    # The engine's pidfd is closed, and nothing of the links is left.
    assert len(os.listdir("/proc/self/fd")) == before - 1


async def test_a_source_of_too_many_ranks_is_refused_and_leaves_nothing(ends: Ends) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Unavailable, match=r"counters are for 1\.\.64 ranks of a source, not 4096"):
        await ends.connect(ranks=4096)
    assert ends.kinds() == []
    async with asyncio.timeout(WAIT_S):
        # The other end closes a turn later.
        while len(os.listdir("/proc/self/fd")) != before:
            await asyncio.sleep(0.005)
