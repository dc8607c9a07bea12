"""An engine that writes by itself, on host memory: the kit of test_transfer_nvlink.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvmesh.engine.nvlink.host import HostBackend
from kvmesh.engine.nvlink.poster import NvlinkPoster
from kvmesh.engine.nvlink.steps import Step
from kvmesh.kv.layout import KvLayout
from kvmesh.kv.ring import StepEntry, StepRecord
from kvmesh.transfer.client import SidecarClient
from kvmesh.transfer.handles import TransferHandle
from transfer_kit import Engine, SidecarProcess


class PostingEngine(Engine):
    """`Engine` with a poster. on_launch: see HostBackend; it runs on the backend's stream."""

    def __init__(
        self,
        name: str,
        sidecar: SidecarProcess,
        layout: KvLayout,
        incarnation: int = 1,
        on_launch: Callable[[int, int], None] | None = None,
    ) -> None:
        super().__init__(name, sidecar, layout, incarnation)
        self.backend = HostBackend({(group, 0): region for group, region in self.regions.items()}, on_launch)
        self.poster = NvlinkPoster(layout, self.backend)

    async def connect(self) -> PostingEngine:
        self.client = await SidecarClient.connect(
            self.sidecar.socket,
            engine_id=self.name,
            incarnation=self.incarnation,
            layout=self.layout,
            regions=self.regions,
            doorbell=self.doorbell_region,
            ring=self.ring_region,
            timeout_s=30,
            on_lost=self.lost.set,
            poster=self.poster,
        )
        return self

    def begin(self, transfers: Sequence[TransferHandle], first: int, count: int) -> Step | None:
        """Claim a step's pages."""
        entries = tuple(StepEntry(transfer.transfer_id, first, count) for transfer in transfers)
        return self.poster.step(StepRecord(1, self.layout.num_layers, entries))

    def step(self, transfer: TransferHandle, first: int, count: int) -> None:
        step = self.begin([transfer], first, count)
        if step is not None:
            for layer in range(self.layout.num_layers):
                step.layer(layer)

    async def close(self) -> None:
        self.backend.gate.set()
        if hasattr(self, "client"):
            await self.client.close()
            del self.client
        self.poster.close()
        await super().close()
