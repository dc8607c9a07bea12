"""An engine of several ranks in the test's own process, and a sidecar beside it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from kvmesh.kv.layout import KvGroup, KvLayout
from kvmesh.kv.region import Region
from kvmesh.rpc import MeshChannel
from kvmesh.transfer.client import SidecarClient
from kvmesh.transfer.orphans import Writers
from kvmesh.transfer.posting import Poster
from kvmesh.transfer.rank import RankMember
from kvmesh.transfer.sidecar import Sidecar, SidecarOptions
from kvmesh.transfer.tail import TailBuffer, region_sizes

WAIT_S = 90.0


def make_layout(tp: int = 3, num_pages: int = 8) -> KvLayout:
    groups = (
        KvGroup("main", "full", (0, 1), kv_heads=6, head_dim=4),
        KvGroup("latent", "mla", (2,), kv_heads=1, head_dim=6),
    )
    return KvLayout(version=1, dtype="bf16", page_size=4, groups=groups, num_pages=num_pages, tp=tp)


def _no_channel(address: str) -> MeshChannel:
    raise AssertionError(f"nobody is called here, not {address}")


@contextlib.asynccontextmanager
async def running_sidecar(
    folder: Path,
    *,
    rank_join_s: float = WAIT_S,
    transports: tuple[str, ...] = ("shm", "tcp"),
    open_channel: Callable[[str], MeshChannel] = _no_channel,
) -> AsyncIterator[Sidecar]:
    """A sidecar without a control API."""
    options = SidecarOptions(
        "s", folder / "s.sock", open_channel, transports=transports, lease_s=2.0, rank_join_s=rank_join_s
    )
    sidecar = Sidecar(options, on_engine=lambda present: None)
    await sidecar.start()
    sidecar.control_address = "127.0.0.1:1"
    await sidecar.listen()
    try:
        yield sidecar
    finally:
        await sidecar.close()


class Ranks:
    """Memory and connections of one engine."""

    def __init__(
        self,
        path: Path,
        layout: KvLayout,
        *,
        engine_id: str = "e",
        incarnation: int = 5,
        tails: tuple[TailBuffer, ...] = (),
    ) -> None:
        self.path = path
        self.layout = layout
        self.engine_id = engine_id
        self.incarnation = incarnation
        self.tails = tails
        sizes = region_sizes(layout, tails)
        self.regions = [
            {name: Region.create(f"{name}{rank}", nbytes) for name, nbytes in sizes.items()}
            for rank in range(layout.tp)
        ]
        self.doorbell = Region.create("doorbell", 4096)
        self.ring = Region.create("ring", 4096)
        self.lost = asyncio.Event()
        self.writers = Writers()
        self.client: SidecarClient | None = None
        self.members: dict[int, RankMember] = {}

    async def lead(self, timeout_s: float = WAIT_S, poster: Poster | None = None) -> SidecarClient:
        self.lost.clear()
        self.client = await SidecarClient.connect(
            self.path,
            engine_id=self.engine_id,
            incarnation=self.incarnation,
            layout=self.layout,
            regions=self.regions[0],
            doorbell=self.doorbell,
            ring=self.ring,
            tails=self.tails,
            timeout_s=timeout_s,
            on_lost=self.lost.set,
            writers=self.writers,
            poster=poster,
        )
        return self.client

    async def join(self, rank: int, timeout_s: float = WAIT_S, **changes: object) -> RankMember:
        arguments: dict[str, object] = {
            "engine_id": self.engine_id,
            "incarnation": self.incarnation,
            "rank": rank,
            "layout": self.layout,
            "regions": self.regions[rank % self.layout.tp],
            "tails": self.tails,
            "timeout_s": timeout_s,
        }
        member = await RankMember.connect(self.path, **(arguments | changes))  # type: ignore[arg-type]
        self.members[rank] = member
        return member

    async def connect(self) -> Ranks:
        """Leader and all ranks."""
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(self.lead(), *(self.join(rank) for rank in range(1, self.layout.tp)))
        return self

    async def leave(self) -> None:
        if self.client is not None:
            await self.client.close()
        for member in self.members.values():
            await member.close()

    async def close(self) -> None:
        await self.leave()
        self.writers.close()
        for region in (*(r for regions in self.regions for r in regions.values()), self.doorbell, self.ring):
            region.close()


def descriptors() -> int:
    """Open in this process."""
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    """Shared memory regions that are mapped in this process."""
    with open("/proc/self/maps") as file:
        return sum("/memfd:" in line for line in file)
