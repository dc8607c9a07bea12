"""A poster, its sidecar played by the test, and a destination's memory in the same process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

from kvmesh.engine.nvlink.host import HostBackend
from kvmesh.engine.nvlink.poster import NvlinkPoster
from kvmesh.kv.layout import KvGroup, KvLayout
from kvmesh.kv.region import Region
from kvmesh.kv.ring import StepEntry, StepRecord
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.descriptor import layout_to_proto
from kvmesh.transfer.immediate import MAX_SLOTS
from kvmesh.transfer.posting import WORD_BYTES
from kvmesh.transfer.tail import TailBuffer, region_sizes

WAIT_S = 60.0


def layout_of(tp: int = 1, num_pages: int = 16, page_size: int = 4) -> KvLayout:
    """Three layers, four heads of 16 bytes a token and plane."""
    group = KvGroup("main", "full", (0, 1, 2), kv_heads=4, head_dim=8)
    return KvLayout(version=1, dtype="bf16", page_size=page_size, groups=(group,), num_pages=num_pages, tp=tp)


class Memory:
    """All ranks' regions of one engine."""

    def __init__(self, layout: KvLayout, tails: Sequence[TailBuffer] = ()) -> None:
        self.layout = layout
        self.regions = {
            (name, rank): Region.create(name, nbytes)
            for name, nbytes in region_sizes(layout, tails).items()
            for rank in range(layout.tp)
        }

    def rank(self, rank: int) -> Any:
        """(layers, pages, heads, 2, page_size * head_dim * 2 bytes)."""
        layout, group = self.layout, self.layout.groups[0]
        heads = max(1, group.kv_heads // layout.tp)
        return self.regions["main", rank].view().reshape(group.num_layers, layout.num_pages, heads, 2, -1)

    def infos(self) -> list[pb.RegionInfo]:
        return [pb.RegionInfo(group=g, rank=r, nbytes=x.nbytes) for (g, r), x in self.regions.items()]

    def tail(self, name: str, rank: int, row_bytes: int) -> Any:
        """(rows, row_bytes)."""
        return self.regions[name, rank].view().reshape(-1, row_bytes)

    def close(self) -> None:
        for region in self.regions.values():
            region.close()


class World:
    """source and target memory; `said` is what the poster tells its sidecar."""

    def __init__(
        self,
        source: KvLayout,
        target: KvLayout,
        source_tails: Sequence[TailBuffer] = (),
        target_tails: Sequence[TailBuffer] = (),
    ) -> None:
        self.source = Memory(source, source_tails)
        self.target = Memory(target, target_tails)
        self.target_tails = tuple(target_tails)
        self.counters = Region.create("counters", source.tp * MAX_SLOTS * WORD_BYTES)
        self.words = self.counters.view("u8").reshape(source.tp, MAX_SLOTS)
        self.backend = HostBackend(self.source.regions)
        self.poster = NvlinkPoster(source, self.backend, source_tails)
        self.said: asyncio.Queue[pb.EngineMessage] = asyncio.Queue()
        self.poster.connected(self.said.put_nowait)

    async def next(self, kind: str) -> Any:
        """The next thing it says, which is of this kind."""
        message = await asyncio.wait_for(self.said.get(), WAIT_S)
        assert message.WhichOneof("body") == kind, message
        return getattr(message, kind)

    def memory(self, link_id: int = 1, **changes: Any) -> None:
        message = pb.PeerMemory(
            link_id=link_id,
            engine_id="d",
            incarnation=5,
            control_address="there:1",
            layout=layout_to_proto(self.target.layout, self.target_tails),
            regions=self.target.infos(),
            counter_bytes=self.counters.nbytes,
        )
        for name, value in changes.items():
            setattr(message, name, value)
        fds = [os.dup(region.fd) for region in (*self.target.regions.values(), self.counters)]
        self.poster.take(pb.SidecarMessage(peer_memory=message), lambda count: fds)

    async def mapped(self, link_id: int = 1) -> None:
        self.memory(link_id)
        assert (await self.next("peer_mapped")).ok

    def post(
        self,
        transfer_id: int,
        src: Sequence[int],
        dst: Sequence[int],
        ready: int = 0,
        slot: int = 3,
        generation: int = 9,
        first_block: int = 0,
        num_tokens: int = 0,
        kept: Sequence[int] = (),
        tails: Sequence[tuple[str, int, int]] = (),
    ) -> None:
        """tails: (name, source's row, destination's row)."""
        descriptor = pb.Descriptor(slot=slot, generation=generation, first_block=first_block, num_tokens=num_tokens)
        descriptor.groups.add(group="main", pages=dst)
        request = pb.StartTransfer(descriptor=descriptor, ready_pages=ready)
        request.pages.add(group="main", pages=src, kept=kept)
        for name, here, there in tails:
            request.tails.add(name=name, row=here)
            descriptor.tails.add(name=name, row=there)
        request.descriptor.CopyFrom(descriptor)
        post = pb.PostTransfer(transfer_id=transfer_id, link_id=1, request=request)
        self.poster.take(pb.SidecarMessage(post_transfer=post), lambda count: [])

    def stop(self, transfer_id: int, reason: str) -> None:
        stop = pb.StopTransfer(transfer_id=transfer_id, reason=reason)
        self.poster.take(pb.SidecarMessage(stop_transfer=stop), lambda count: [])

    def release(self, link_id: int = 1) -> None:
        self.poster.take(
            pb.SidecarMessage(release_peer=pb.ReleasePeer(link_id=link_id, reason="over")), lambda count: []
        )

    def step(self, *entries: tuple[int, int, int], layers: int | None = None) -> Any:
        number = self.source.layout.num_layers if layers is None else layers
        return self.poster.step(StepRecord(1, number, tuple(StepEntry(*entry) for entry in entries)))

    async def settle(self) -> None:
        """Everything launched has been copied."""
        mark = self.backend.mark()
        async with asyncio.timeout(WAIT_S):
            while not self.backend.reached(mark):
                await asyncio.sleep(0.001)

    async def close(self) -> None:
        self.backend.gate.set()
        await self.poster.leave(WAIT_S)
        self.poster.close()
        del self.words
        for memory in (self.source, self.target):
            memory.close()
        self.counters.close()
