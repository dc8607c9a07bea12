"""An engine's memory on a GPU: regions that other processes can map, and host memory that its kernels reach."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from kvmesh.engine.cuda.profile import GpuMemory, gib, no_memory
from kvmesh.engine.nvlink.cuda_region import CudaRegion
from kvmesh.engine.nvlink.driver import CudaDriver, load
from kvmesh.engine.nvlink.host import address_of
from kvmesh.errors import Unavailable
from kvmesh.kv.layout import KvLayout
from kvmesh.kv.region import Region

PAGE = 4096


class CudaRunnerFace(Protocol):
    """What a runner on a GPU has beside `kvmesh.engine.runner.Runner`: see `kvmesh.engine.cuda.runner`. It may have
    `ring(count)`, which queues rings that belong to no layer."""

    stream: Any
    """torch.cuda.Stream on which it queues."""

    def workspace_bytes(self) -> int:
        """Device memory that `bind_cuda` and the largest step take beside weights and KV, from above."""

    def bind_cuda(self, layout: KvLayout, regions: Mapping[str, Any], doorbell: Any) -> None:
        """`bind`; doorbell None: somebody else rings."""


def gpu_memory(device: int, weights: int, workspaces: int) -> GpuMemory:
    """As it is now, without what torch keeps for itself."""
    import torch

    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return GpuMemory(free, total, weights, workspaces)


def kv_regions(layout: KvLayout, device: int, memory: GpuMemory, *, dmabuf: bool = False) -> dict[str, CudaRegion]:
    """A zeroed region per group; dmabuf: exported for NICs too. Raises Unavailable with numbers where the memory
    is not to be had."""
    regions: dict[str, CudaRegion] = {}
    try:
        for group in layout.groups:
            name, size = f"kvmesh-kv-{group.name}", layout.region_bytes(group)
            regions[group.name] = CudaRegion(name, size, device, dmabuf=dmabuf)
        zero(regions.values(), device)
    except Unavailable as error:
        close_all(regions.values())
        asked = sum(layout.region_bytes(group) for group in layout.groups)
        raise no_memory(memory, asked, layout.num_pages, error.message) from None
    except BaseException:
        close_all(regions.values())
        raise
    return regions


def zero(regions: Iterable[CudaRegion], device: int) -> None:
    """Old bytes may be NaN, which a masked row would carry into a sum."""
    import torch

    for region in regions:
        torch.as_tensor(region, device=f"cuda:{device}").zero_()
    torch.cuda.synchronize(device)


def close_all(regions: Iterable[CudaRegion]) -> None:
    """Unmap what is mapped."""
    for region in regions:
        region.close()


class PinnedRegions:
    """Host regions that a GPU's kernels read and write. addresses: of each, as the device sees it."""

    def __init__(self, regions: Mapping[str, Region], device: int) -> None:
        """Raises Unavailable, with the size, where the driver does not pin them."""
        self._driver: CudaDriver = load()
        self._device = device
        self._registered: list[int] = []
        self.addresses: dict[str, int] = {}
        self._driver.set_device(device)
        try:
            for name, region in regions.items():
                address = address_of(region)
                # Whole pages, as they are mapped.
                self.addresses[name] = self._driver.register_host(address, -(-region.nbytes // PAGE) * PAGE)
                self._registered.append(address)
        except Unavailable as error:
            self.close()
            size = sum(region.nbytes for region in regions.values())
            raise Unavailable(
                f"{gib(size)} of host memory cannot be pinned for staging ({error.message}): lower staging_pages",
                details={"field": "staging_pages"},
            ) from None

    def close(self) -> None:
        """Unpin. Idempotent. No kernel may use them any more."""
        if self._registered:
            self._driver.set_device(self._device)
            while self._registered:
                self._driver.unregister_host(self._registered.pop())
