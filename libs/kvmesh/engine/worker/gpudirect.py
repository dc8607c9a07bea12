"""NICs that reach the GPU's memory by themselves: whether they do here, and when their writes may be read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from kvmesh.config import WorkerSettings
from kvmesh.engine.failures import DeviceFailed
from kvmesh.engine.nvlink.driver import CudaDriver, load
from kvmesh.errors import KvmeshError
from kvmesh.kv.layout import KvLayout
from kvmesh.kv.region import Region

if TYPE_CHECKING:
    from kvmesh.engine.nvlink.cuda_region import CudaRegion

# Transports that register a GPU's memory by its dma-buf.
NIC_TRANSPORTS = frozenset({"verbs", "efa"})


@dataclass(frozen=True, slots=True)
class SidecarSays:
    """transports: those that serve the memory that it was shown. dmabufs: whether it takes these along with regions."""

    transports: Sequence[str] = ()
    dmabufs: bool = False

    @property
    def nics(self) -> list[str]:
        """Those of the transports that are of NICs."""
        return [name for name in self.transports if name in NIC_TRANSPORTS]


Show = Callable[[Mapping[str, Region]], Awaitable[SidecarSays]]
"""Registers an engine with these regions, a page a group, for a moment."""


async def why_not_gpudirect(settings: WorkerSettings, layout: KvLayout, says: SidecarSays, show: Show) -> str:
    """Why NICs cannot have this GPU's memory, "" where they can: a little of it has been registered with one then.
    says: of host memory."""
    if not says.nics:
        return "the sidecar has neither verbs nor efa"
    if not says.dmabufs:
        return "the sidecar takes no dma-bufs"
    try:
        driver = load()
        if not driver.has_dmabufs(settings.gpu):
            return "the driver does not export this GPU's memory as dma-bufs"
        if settings.role != "prefill" and not _visible(driver, settings.gpu):
            return "what a NIC writes to this GPU is not ordered, and the driver cannot flush it"
        regions = await asyncio.to_thread(_a_page, layout, settings.gpu)
    except KvmeshError as error:
        return error.message
    try:
        without = [name for name, region in regions.items() if region.dmabuf is None]
        if without:
            return "the driver exports no dma-buf of this GPU's memory"
        # A CudaRegion has what a sidecar's client wants of a Region.
        shown = await show(cast("Mapping[str, Region]", regions))
    finally:
        for region in regions.values():
            region.close()
    return "" if shown.nics else f"{', '.join(says.nics)}: no NIC takes it (the sidecar's status tells why)"


class NicWrites:
    """What NICs have written to the GPU, before its kernels read it.

    on_failed(reason): the device is of no use any more. Lives on one thread.
    """

    def __init__(self, device: int, on_failed: Callable[[str], None]) -> None:
        """Raises KvmeshError without a driver."""
        self._driver: CudaDriver = load()
        self._device = device
        self._on_failed = on_failed
        self.needs_flush = not self._driver.nic_writes_ordered(device)

    def landed(self, transport: str) -> None:
        """Every byte of a slot was counted, by that transport: steps that are launched from now on may read them. Takes
        microseconds. Raises DeviceFailed."""
        if not self.needs_flush or transport not in NIC_TRANSPORTS:
            return
        try:
            self._driver.flush_nic_writes(self._device)
        except KvmeshError as error:
            reason = f"what a NIC has written to the GPU cannot be flushed: {error.message}"
            self._on_failed(reason)
            raise DeviceFailed(reason) from None


def _visible(driver: CudaDriver, device: int) -> bool:
    return driver.nic_writes_ordered(device) or driver.can_flush_nic_writes(device)


def _a_page(layout: KvLayout, device: int) -> dict[str, CudaRegion]:
    from kvmesh.engine.nvlink.cuda_region import CudaRegion

    one = replace(layout, num_pages=1)
    regions: dict[str, CudaRegion] = {}
    try:
        for group in one.groups:
            regions[group.name] = CudaRegion("kvmesh-probe", one.region_bytes(group), device, dmabuf=True)
    except BaseException:
        for region in regions.values():
            region.close()
        raise
    return regions
