"""Engines of several ranks, in the test process, beside real sidecars; KV that every shard can be checked against."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmesh.kv.layout import KvGroup, KvLayout
from kvmesh.kv.region import Region
from kvmesh.kv.ring import Doorbell, StepEntry, StepRecord, StepRing
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.client import SidecarClient
from kvmesh.transfer.descriptor import build_descriptor, slot_bytes
from kvmesh.transfer.handles import SlotHandle, TransferHandle
from kvmesh.transfer.link import SidecarLink
from kvmesh.transfer.rank import RankLink
from kvmesh.transfer.tail import TailBuffer, region_sizes, tail_bytes
from transfer_kit import SidecarProcess, soon

Bytes = npt.NDArray[np.uint8]

FULL = KvGroup("main", "full", (0, 1, 3), kv_heads=4, head_dim=16)
DRAFT = KvGroup("draft", "full", (2,), kv_heads=2, head_dim=8)
LATENT = KvGroup("latent", "mla", (0, 1, 2), kv_heads=1, head_dim=40)


def sharded(tp: int, page_size: int, groups: Sequence[KvGroup] = (FULL,), num_pages: int = 40) -> KvLayout:
    return KvLayout(version=1, dtype="bf16", page_size=page_size, groups=tuple(groups), num_pages=num_pages, tp=tp)


class Kv:
    """A sequence's KV, unsharded: per group bytes of (layers, tokens, heads, planes, line)."""

    def __init__(self, groups: Sequence[KvGroup], tokens: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.tokens = tokens
        self.lines: dict[str, Bytes] = {
            group.name: rng.integers(
                0, 256, (group.num_layers, tokens, group.kv_heads, group.planes, 2 * group.head_dim), dtype=np.uint8
            )
            for group in groups
        }


class ShardedEngine:
    """Memory of all ranks, doorbell, ring, and links to a sidecar: the leader's and one per further rank."""

    def __init__(
        self,
        name: str,
        sidecar: SidecarProcess,
        layout: KvLayout,
        tails: Sequence[TailBuffer] = (),
        incarnation: int = 1,
    ) -> None:
        self.name = name
        self.layout = layout
        self.tails = tuple(tails)
        sizes = region_sizes(layout, tails)
        self.regions = [
            {part: Region.create(f"{name}-{part}-{rank}", nbytes) for part, nbytes in sizes.items()}
            for rank in range(layout.tp)
        ]
        self.doorbell_region = Region.create("doorbell", 4096)
        self.ring_region = Region.create("ring", 1 << 16)
        self.doorbell = Doorbell(self.doorbell_region.buf)
        self.ring = StepRing(self.ring_region.buf)
        shared: dict[str, Any] = {
            "engine_id": name, "incarnation": incarnation, "layout": layout, "tails": tails, "join_timeout_s": 60.0
        }  # fmt: skip
        self.link = SidecarLink(
            sidecar.socket, regions=self.regions[0], doorbell=self.doorbell_region, ring=self.ring_region, **shared
        )
        self.ranks = [
            RankLink(sidecar.socket, rank=rank, regions=self.regions[rank], **shared) for rank in range(1, layout.tp)
        ]

    async def connect(self) -> ShardedEngine:
        """All ranks are in, in the order in which they happen to come: the leader last."""
        for link in (*self.ranks, self.link):
            link.start()
        await self.settled()
        return self

    async def settled(self) -> None:
        await self.link.wait_connected(60)
        for rank in self.ranks:
            await rank.wait_connected(60)

    @property
    def client(self) -> SidecarClient:
        assert self.link.client is not None
        return self.link.client

    def view(self, rank: int, group: KvGroup) -> Bytes:
        """A rank's region: (layers, pages, heads, planes, page_size, line)."""
        layout = self.layout
        heads, size = layout.heads_per_rank(group), layout.page_size
        shape = (group.num_layers, layout.num_pages, heads, group.planes, size, 2 * group.head_dim)
        flat: Bytes = self.regions[rank][group.name].view()
        return flat.reshape(shape)

    def noise(self, seed: int) -> None:
        """Bytes everywhere that are nobody's."""
        rng = np.random.default_rng(seed)
        for regions in self.regions:
            for region in regions.values():
                region.view()[:] = rng.integers(0, 256, region.nbytes, dtype=np.uint8)

    def snapshot(self) -> list[dict[str, Bytes]]:
        return [{name: region.view().copy() for name, region in regions.items()} for regions in self.regions]

    def put(self, kv: Kv, pages: Mapping[str, Sequence[int]], first_token: int, end_token: int, start: int) -> None:
        """Tokens [first_token, end_token) of a sequence into every rank's pages; the lists begin at token start."""
        size = self.layout.page_size
        for group in self.layout.groups:
            held = self.layout.heads_per_rank(group)
            for rank in range(self.layout.tp):
                head = rank * group.kv_heads // self.layout.tp
                view = self.view(rank, group)
                for token in range(first_token, end_token):
                    page, at = divmod(token - start, size)
                    lines = kv.lines[group.name][:, token, head : head + held]
                    view[:, pages[group.name][page], :, :, at] = lines

    async def open(
        self, pages: Mapping[str, Sequence[int]], num_tokens: int, rows: Mapping[str, int] | None = None
    ) -> SlotHandle:
        nbytes = slot_bytes(self.layout, pages) + tail_bytes(self.layout, self.tails, rows or {})
        return await self.client.open_slot(
            expected_bytes=nbytes, groups=pages, request_id="r", ttl_s=60, num_tokens=num_tokens, tails=rows
        )

    def describe(
        self,
        slot: SlotHandle,
        pages: Mapping[str, Sequence[int]],
        first_block: int,
        num_tokens: int,
        rows: Mapping[str, int] | None = None,
    ) -> pb.Descriptor:
        return build_descriptor(
            self.client, slot, groups=pages, first_block=first_block, num_tokens=num_tokens, tails=rows
        )

    def step(self, transfer: TransferHandle, first: int, count: int) -> None:
        """A whole step that fills these pages of the transfer's list."""
        entry = StepEntry(transfer.transfer_id, first, count)
        assert self.ring.publish(StepRecord(self.doorbell.value + 1, self.layout.num_layers, (entry,)))
        self.client_notify()
        for _ in range(self.layout.num_layers):
            self.doorbell.ring()

    def client_notify(self) -> None:
        self.link.notify_ring()

    async def close(self) -> None:
        await self.link.close()
        for rank in self.ranks:
            await rank.close()
        self.doorbell.close()
        self.ring.close()
        for region in (
            *(r for regions in self.regions for r in regions.values()),
            self.doorbell_region,
            self.ring_region,
        ):
            region.close()


class Transfer:
    """One sequence on its way from a source to a destination of whatever shape."""

    def __init__(
        self,
        source: ShardedEngine,
        target: ShardedEngine,
        *,
        tokens: int,
        first_block: int = 0,
        rows: tuple[int, int] | None = None,
        seed: int = 1,
    ) -> None:
        self.source = source
        self.target = target
        self.tokens = tokens
        self.first_block = first_block
        self.first_token = first_block * target.layout.page_size
        here, there = source.layout.page_size, target.layout.page_size
        self.src_start = self.first_token // here * here
        count = -(-tokens // here) - self.src_start // here
        rng = np.random.default_rng(seed)
        names = [group.name for group in source.layout.groups]
        # Each group has its own pages, in its own order.
        self.src = {name: rng.permutation(source.layout.num_pages)[:count].tolist() for name in names}
        wanted = -(-tokens // there) - first_block
        self.dst = {name: rng.permutation(target.layout.num_pages)[:wanted].tolist() for name in names}
        self.count = count
        self.src_rows = {tail.name: rows[0] for tail in source.tails} if rows is not None else {}
        self.dst_rows = {tail.name: rows[1] for tail in target.tails} if rows is not None else {}
        self.kv = Kv(source.layout.groups, -(-tokens // max(here, there)) * max(here, there), seed)

    def fill(self, seed: int = 7) -> None:
        """Noise everywhere, the sequence in the source's pages, and what must be found at the end in `wanted`."""
        self.source.noise(seed)
        self.target.noise(seed + 1)
        end = min(self.kv.tokens, self.src_start + self.count * self.source.layout.page_size)
        self.source.put(self.kv, self.src, self.src_start, end, self.src_start)
        before = self.target.snapshot()
        equal = self.source.layout.page_size == self.target.layout.page_size
        self.target.put(self.kv, self.dst, self.first_token, end if equal else self.tokens, self.first_token)
        for name, row in self.dst_rows.items():
            size = next(tail.row_bytes for tail in self.target.tails if tail.name == name)
            data: Bytes = self.source.regions[0][name].view()[self.src_rows[name] * size :][:size]
            for regions in self.source.regions:
                regions[name].view()[self.src_rows[name] * size :][:size] = data
            for regions in self.target.regions:
                regions[name].view()[row * size :][:size] = data
        self.wanted = self.target.snapshot()
        for regions, old in zip(self.target.regions, before, strict=True):
            for name, region in regions.items():
                region.view()[:] = old[name]

    async def begin(self, ready: int = 0) -> None:
        self.slot = await soon(self.target.open(self.dst, self.tokens - self.first_token, self.dst_rows))
        self.descriptor = self.target.describe(self.slot, self.dst, self.first_block, self.tokens, self.dst_rows)
        self.handle = await soon(
            self.source.client.start_transfer(self.descriptor, self.src, ready_pages=ready, tails=self.src_rows)
        )

    async def end(self, ready: int = 0, chunk: int = 2) -> None:
        """The rest in chunks, then the tail; every byte of every rank is then what it must be."""
        for first in range(ready, self.count, chunk):
            self.source.step(self.handle, first, min(chunk, self.count - first))
        if self.src_rows:
            self.source.client.send_tail(self.handle)
        result = await soon(self.slot.completed)
        assert await soon(self.handle.done) == result.bytes
        for rank, found in enumerate(self.target.snapshot()):
            for name, data in found.items():
                np.testing.assert_array_equal(data, self.wanted[rank][name], err_msg=f"{name} of rank {rank}")


async def all_of(*engines: ShardedEngine) -> None:
    await asyncio.gather(*(engine.close() for engine in engines))
