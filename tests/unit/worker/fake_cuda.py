"""A GPU that is not there: driver calls over host memory, and a scripted runner that is bound like one on CUDA."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from kvmesh.engine.cuda import doorbell, memory
from kvmesh.engine.cuda.profile import GpuMemory
from kvmesh.engine.nvlink import cuda_region
from kvmesh.engine.nvlink.host import HostBackend
from kvmesh.engine.runner import StepBatch, StepResult
from kvmesh.engine.scripted import ScriptedModel, ScriptedRunner
from kvmesh.engine.worker import bootstrap, gpudirect, posting
from kvmesh.errors import Unavailable
from kvmesh.kv.layout import KvLayout
from kvmesh.kv.ring import Doorbell

GRANULARITY = 1 << 16


class FakeDriver:
    """`CudaDriver`'s face. limit: bytes that the GPU has. Device addresses of host memory are `shift` away, which the
    fake backend takes back."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self.limit = limit
        self.used = 0
        self.sizes: dict[int, int] = {}
        self.maps: dict[int, mmap.mmap] = {}
        self.registered: dict[int, int] = {}
        # For NICs: what the device can, and what became of it.
        self.dmabufs = self.exports = True
        self.ordered = False
        self.flushable = True
        self.flush_fails = ""
        self.flushes = 0

    def device_uuid(self, device: int) -> str:
        return f"gpu-{device}"

    def set_device(self, device: int) -> None:
        pass

    def granularity(self, device: int) -> int:
        return GRANULARITY

    def create(self, device: int, nbytes: int) -> int:
        if self.used + nbytes > self.limit:
            raise Unavailable("cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY")
        self.used += nbytes
        fd = os.memfd_create("fake-gpu")
        os.ftruncate(fd, nbytes)
        self.sizes[fd] = nbytes
        return fd

    def export_fd(self, handle: int) -> int:
        return os.dup(handle)

    def map(self, handle: int, nbytes: int, device: int) -> int:
        mapping = mmap.mmap(handle, nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self.maps[address] = mapping
        return address

    def unmap(self, address: int, nbytes: int) -> None:
        del self.maps[address]
        self.used -= nbytes

    def release(self, handle: int) -> None:
        os.close(handle)

    def has_dmabufs(self, device: int) -> bool:
        return self.dmabufs

    def pci_address(self, device: int) -> str:
        return "0000:18:00.0"

    def export_dmabuf(self, address: int, nbytes: int) -> int:
        if not self.exports:
            raise Unavailable("cuMemGetHandleForAddressRange: CUDA_ERROR_NOT_SUPPORTED")
        assert len(self.maps[address]) == nbytes
        fd = os.memfd_create("fake-dmabuf")
        os.ftruncate(fd, nbytes)
        return fd

    def nic_writes_ordered(self, device: int) -> bool:
        return self.ordered

    def can_flush_nic_writes(self, device: int) -> bool:
        return self.flushable

    def flush_nic_writes(self, device: int) -> None:
        self.flushes += 1
        if self.flush_fails:
            raise Unavailable(self.flush_fails)

    def register_host(self, address: int, nbytes: int) -> int:
        assert address % 4096 == nbytes % 4096 == 0
        self.registered[address] = nbytes
        return address

    def unregister_host(self, address: int) -> None:
        del self.registered[address]


class FakeCudaRunner(ScriptedRunner):
    """A scripted runner whose pages are a GPU's. bound: the doorbell it was given, None where somebody else rings."""

    stream = "the stream"

    def __init__(self, model: ScriptedModel | None = None, workspace: int = 1 << 20) -> None:
        super().__init__(model)
        self.workspace = workspace
        self.bound: Any = "not yet"
        self.rung = 0

    def workspace_bytes(self) -> int:
        return self.workspace

    def bind_cuda(self, layout: KvLayout, regions: Mapping[str, Any], bell: Any) -> None:
        self.bound = bell
        views = {
            name: memoryview((ctypes.c_ubyte * region.nbytes).from_address(region.address)).cast("B")
            for name, region in regions.items()
        }
        self.bind(layout, views, bell if bell is not None else Doorbell(bytearray(64)))


class AheadCudaRunner(FakeCudaRunner):
    """Is given a step while the one before is not collected yet. For prefill: its steps sample nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.flights = 0
        self.most = 0

    def launch(self, batch: StepBatch, on_layer: Callable[[int], None] | None = None) -> StepResult:
        self.flights += 1
        self.most = max(self.most, self.flights)
        return self.execute(batch, on_layer)

    def collect(self, flight: StepResult) -> StepResult:
        self.flights -= 1
        return flight


def fake_gpu(monkeypatch: pytest.MonkeyPatch, runner: FakeCudaRunner, total: int = 64 << 20) -> FakeDriver:
    """Workers of this process that ask for CUDA get this."""
    driver = FakeDriver(total)
    for module in (doorbell, memory, cuda_region, gpudirect):
        monkeypatch.setattr(module, "load", lambda: driver)
    monkeypatch.setattr(memory, "zero", lambda regions, device: None)
    monkeypatch.setattr(
        memory,
        "gpu_memory",
        lambda device, weights, workspaces: GpuMemory(total - driver.used, total, weights, workspaces),
    )

    async def load_runner(settings: Any) -> FakeCudaRunner:
        return runner

    def backend(settings: Any, kv: Any, made: Any, blocks: int = 0) -> HostBackend:
        assert made.stream == "the stream"
        return HostBackend({})

    monkeypatch.setattr(bootstrap, "load_runner", load_runner)
    monkeypatch.setattr(posting, "_cuda_backend", backend)
    return driver
