"""The engine's memory: KV regions, doorbell and step ring, sized from settings. On CPU all of it is memfd."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from kvmesh.config import WorkerSettings
from kvmesh.engine.runner import Runner
from kvmesh.errors import InvalidArgument, KvmeshError
from kvmesh.kv.layout import KvLayout
from kvmesh.kv.region import Region
from kvmesh.kv.ring import DOORBELL_BYTES, Doorbell, StepRing

if TYPE_CHECKING:
    from kvmesh.engine.cuda.doorbell import HostBell
    from kvmesh.engine.cuda.memory import CudaRunnerFace
    from kvmesh.engine.nvlink.cuda_region import CudaRegion

log = logging.getLogger(__name__)

# Steps that the sidecar may be behind, each with one entry per sequence of the batch.
RING_RECORDS = 256
# Staging: so many of the longest prompts, and no more host memory than this, nor an eighth of the machine's.
STAGED_PROMPTS = 4
STAGING_BYTES = 8 << 30
STAGING_PART = 8


@dataclass(slots=True)
class StagedMemory:
    """Host memory through which KV travels: what the sidecar sees in place of the engine's own."""

    layout: KvLayout
    regions: dict[str, Region]

    @classmethod
    def create(cls, layout: KvLayout, num_pages: int) -> StagedMemory:
        """Zeroed regions of `num_pages` pages. Raises Unavailable."""
        staged = replace(layout, num_pages=num_pages)
        regions = {g.name: Region.create(f"kvmesh-staging-{g.name}", staged.region_bytes(g)) for g in staged.groups}
        return cls(staged, regions)


@dataclass(slots=True)
class KvMemory:
    """Owned by the worker; closed after core and sidecar link. Of several ranks it is the leader's: each of the others
    has its own regions, and needs no doorbell and no ring.

    regions: memfd, or (`kvmesh.engine.nvlink.cuda_region.CudaRegion`) a GPU's. unpin: what to undo before they close.
    """

    layout: KvLayout
    regions: Mapping[str, Region | CudaRegion]
    doorbell_region: Region
    ring_region: Region
    doorbell: Doorbell
    ring: StepRing
    staged: StagedMemory | None = None
    unpin: list[Callable[[], None]] = field(default_factory=list)

    @classmethod
    def create(cls, layout: KvLayout, max_batch: int, *, staging_pages: int = 0) -> KvMemory:
        """Zeroed regions for a layout, on the host. Raises Unavailable where the memory is not to be had."""
        regions = {
            group.name: Region.create(f"kvmesh-kv-{group.name}", layout.region_bytes(group)) for group in layout.groups
        }
        doorbell = Region.create("kvmesh-doorbell", DOORBELL_BYTES)
        ring = Region.create("kvmesh-ring", StepRing.bytes_for(RING_RECORDS, max_batch))
        staged = StagedMemory.create(layout, staging_pages) if staging_pages else None
        return cls(layout, regions, doorbell, ring, Doorbell(doorbell.buf), StepRing(ring.buf), staged)

    @property
    def shared_layout(self) -> KvLayout:
        """The layout that the sidecar is told."""
        return self.layout if self.staged is None else self.staged.layout

    @property
    def shared_regions(self) -> Mapping[str, Region]:
        """The regions that the sidecar is given."""
        # A CudaRegion has what a sidecar's client wants of a Region.
        return cast("Mapping[str, Region]", self.regions) if self.staged is None else self.staged.regions

    def views(self) -> dict[str, memoryview]:
        """Writable buffers by group, for a runner on CPU."""
        return {name: region.buf for name, region in self.regions.items() if isinstance(region, Region)}

    def bind(self, runner: Runner) -> None:
        """Give it to the runner, with the doorbell where that is the runner's to ring."""
        if any(not isinstance(region, Region) for region in self.regions.values()):
            device = cast("CudaRunnerFace", runner)
            device.bind_cuda(self.layout, self.regions, self.doorbell if self.staged is None else None)
            if self.staged is None:
                cast("HostBell", self.doorbell).ringer = getattr(device, "ring", None)
            return
        # Nobody sees what is rung there.
        mute = Doorbell(bytearray(DOORBELL_BYTES))
        runner.bind(self.layout, self.views(), self.doorbell if self.staged is None else mute)

    def close(self) -> None:
        """Unmap everything. What a device that has failed does not let go of goes with the process."""
        staged = () if self.staged is None else self.staged.regions.values()
        regions = (*self.regions.values(), *staged, self.doorbell_region, self.ring_region)
        for close in (*self.unpin, self.doorbell.close, self.ring.close, *(region.close for region in regions)):
            try:
                close()
            except KvmeshError as error:
                log.warning("memory is not unmapped: %s", error.message)
        self.unpin.clear()


def cuda_memory(runner: Runner, settings: WorkerSettings, *, staging: bool, dmabuf: bool = False) -> KvMemory:
    """KV on the runner's GPU, as much as the settings say or as fits; dmabuf: for NICs too. Raises Unavailable, with
    numbers, where the memory is not to be had."""
    from kvmesh.engine.cuda.doorbell import PAGE_BYTES, HostBell
    from kvmesh.engine.cuda.memory import gpu_memory, kv_regions
    from kvmesh.engine.cuda.profile import pages_that_fit

    device = cast("CudaRunnerFace", runner)
    memory = gpu_memory(settings.gpu, runner.info.weight_bytes, device.workspace_bytes())
    if settings.num_pages or settings.kv_memory_bytes:
        layout = size_layout(runner, settings)
    else:
        one = runner.layout(settings.page_size, 1)
        # Each rank has a GPU of its own, all of one kind.
        pages = pages_that_fit(memory, settings.gpu_memory_utilization, page_bytes(one) // one.tp)
        layout = runner.layout(settings.page_size, pages)
    regions = kv_regions(layout, settings.gpu, memory, dmabuf=dmabuf)
    doorbell = Region.create("kvmesh-doorbell", PAGE_BYTES)
    bell = HostBell(doorbell, settings.gpu)
    ring = Region.create("kvmesh-ring", StepRing.bytes_for(RING_RECORDS, settings.max_batch))
    staged = StagedMemory.create(layout, staging_pages(layout, runner, settings)) if staging else None
    return KvMemory(layout, regions, doorbell, ring, bell, StepRing(ring.buf), staged)


def size_layout(runner: Runner, settings: WorkerSettings) -> KvLayout:
    """The model's layout with as many pages as the settings say. Raises InvalidArgument where that is none."""
    pages = settings.num_pages
    if pages == 0:
        page = page_bytes(runner.layout(settings.page_size, 1))
        pages = settings.kv_memory_bytes // page
        if pages < 1:
            raise InvalidArgument(
                f"kv_memory_bytes {settings.kv_memory_bytes} holds no page of {page} bytes",
                details={"field": "kv_memory_bytes"},
            )
    return runner.layout(settings.page_size, pages)


def page_bytes(layout: KvLayout) -> int:
    """Bytes of a page in all layers, of all ranks."""
    one = replace(layout, num_pages=1)
    return one.tp * sum(one.region_bytes(group) for group in one.groups)


def staging_pages(layout: KvLayout, runner: Runner, settings: WorkerSettings) -> int:
    """Pages of host memory for what travels: as the settings say, or by default no more than are of use."""
    if settings.staging_pages:
        return settings.staging_pages
    longest = min(settings.max_model_len or runner.info.max_model_len, runner.info.max_model_len)
    wanted = min(STAGED_PROMPTS * layout.pages_for(longest), layout.num_pages)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(wanted, min(STAGING_BYTES, machine // STAGING_PART) // page_bytes(layout)))
