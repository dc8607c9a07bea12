"""The engine's shared memory: KV regions, doorbell and step ring, sized from settings. All memfd."""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.config import WorkerSettings
from kvmesh.engine.runner import Runner
from kvmesh.errors import InvalidArgument
from kvmesh.kv.layout import KvLayout
from kvmesh.kv.region import Region
from kvmesh.kv.ring import DOORBELL_BYTES, Doorbell, StepRing

# Steps that the sidecar may be behind, each with one entry per sequence of the batch.
RING_RECORDS = 256


@dataclass(slots=True)
class KvMemory:
    """Owned by the worker; closed after core and sidecar link. Of several ranks it is the leader's: each of the others
    has its own regions, and needs no doorbell and no ring."""

    layout: KvLayout
    regions: dict[str, Region]
    doorbell_region: Region
    ring_region: Region
    doorbell: Doorbell
    ring: StepRing

    @classmethod
    def create(cls, layout: KvLayout, max_batch: int) -> KvMemory:
        """Zeroed regions for a layout. Raises Unavailable where the memory is not to be had."""
        regions = {
            group.name: Region.create(f"kvmesh-kv-{group.name}", layout.region_bytes(group)) for group in layout.groups
        }
        doorbell = Region.create("kvmesh-doorbell", DOORBELL_BYTES)
        ring = Region.create("kvmesh-ring", StepRing.bytes_for(RING_RECORDS, max_batch))
        return cls(layout, regions, doorbell, ring, Doorbell(doorbell.buf), StepRing(ring.buf))

    def views(self) -> dict[str, memoryview]:
        """Writable buffers by group, for the runner."""
        return {name: region.buf for name, region in self.regions.items()}

    def close(self) -> None:
        """Unmap everything."""
        self.doorbell.close()
        self.ring.close()
        for region in (*self.regions.values(), self.doorbell_region, self.ring_region):
            region.close()


def size_layout(runner: Runner, settings: WorkerSettings) -> KvLayout:
    """The model's layout with as many pages as the settings say. Raises InvalidArgument where that is none."""
    pages = settings.num_pages
    if pages == 0:
        one = runner.layout(settings.page_size, 1)
        page = one.tp * sum(one.region_bytes(group) for group in one.groups)
        pages = settings.kv_memory_bytes // page
        if pages < 1:
            raise InvalidArgument(
                f"kv_memory_bytes {settings.kv_memory_bytes} holds no page of {page} bytes",
                details={"field": "kv_memory_bytes"},
            )
    return runner.layout(settings.page_size, pages)
