"""NICs and a GPU's memory, without either: which way is taken and why, and that what a NIC wrote is flushed first."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fake_cuda import FakeCudaRunner, FakeDriver, fake_gpu
from kvmesh.config import WorkerSettings
from kvmesh.engine.cuda.doorbell import HostBell
from kvmesh.engine.failures import DeviceFailed
from kvmesh.engine.nvlink.cuda_region import CudaRegion
from kvmesh.engine.nvlink.driver import CudaDriver
from kvmesh.engine.runner import SamplingParams
from kvmesh.engine.scripted import scripted_output
from kvmesh.engine.worker import gpudirect, posting
from kvmesh.engine.worker.gpudirect import NicWrites, SidecarSays, why_not_gpudirect
from kvmesh.engine.worker.memory import KvMemory, cuda_memory
from kvmesh.engine.worker.posting import Route, choose_route
from kvmesh.errors import FailedPrecondition, Unavailable
from kvmesh.kv.layout import KvGroup, KvLayout
from kvmesh.kv.region import Region
from worker_fakes import Fabric
from worker_harness import Gateway, Running, prompt, running, until

LAYOUT = KvLayout(1, "bf16", 16, (KvGroup("kv", "full", (0, 1), 2, 16), KvGroup("more", "mla", (2,), 1, 8)), 8)
NICS = SidecarSays(("verbs", "shm"), dmabufs=True)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return fake_gpu(monkeypatch, FakeCudaRunner())


def gpu(**values: Any) -> WorkerSettings:
    return WorkerSettings(
        **({"sidecar_socket": Path("/nowhere"), "device": "cuda:1", "role": "decode", "gpudirect": "auto"} | values)
    )


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


# -- which way


async def asked(settings: WorkerSettings, says: SidecarSays, shown: Sequence[str] = ("verbs",)) -> tuple[str, int]:
    """Why not, and how often the sidecar was shown the GPU's memory; nothing may be left of that."""
    times = 0

    async def show(regions: Mapping[str, Region]) -> SidecarSays:
        nonlocal times
        times += 1
        assert set(regions) == {"kv", "more"}
        for group in LAYOUT.groups:
            region = regions[group.name]
            assert (region.memory, region.nbytes) == ("cuda", LAYOUT.region_bytes(group) // LAYOUT.num_pages)
            assert region.dmabuf is not None
            assert os.fstat(region.dmabuf.fd).st_size >= region.nbytes
        return SidecarSays(tuple(shown), dmabufs=True)

    before = descriptors()
    why = await why_not_gpudirect(settings, LAYOUT, says, show)
    assert descriptors() == before
    return why, times


@pytest.mark.parametrize(
    ("says", "device", "role", "shown", "why"),
    [
        (NICS, {}, "decode", ("verbs",), ""),
        (SidecarSays(("efa",), True), {}, "unified", ("efa",), ""),
        (NICS, {"ordered": True, "flushable": False}, "decode", ("verbs",), ""),
        (SidecarSays(("shm", "tcp"), True), {}, "decode", None, "neither verbs nor efa"),
        (SidecarSays(), {}, "decode", None, "neither verbs nor efa"),
        (SidecarSays(("verbs",), False), {}, "decode", None, "takes no dma-bufs"),
        (NICS, {"dmabufs": False}, "decode", None, "does not export this GPU's memory"),
        (NICS, {"exports": False}, "decode", None, "exports no dma-buf"),
        (NICS, {"flushable": False}, "decode", None, "is not ordered, and the driver cannot flush it"),
        (NICS, {"flushable": False}, "unified", None, "is not ordered, and the driver cannot flush it"),
        # It only reads.
        (NICS, {"flushable": False}, "prefill", ("verbs",), ""),
        (NICS, {}, "decode", ("shm",), "verbs: no NIC takes it"),
        (NICS, {}, "decode", (), "verbs: no NIC takes it"),
        (NICS, {"limit": 100}, "decode", None, "CUDA_ERROR_OUT_OF_MEMORY"),
    ],
)
async def test_why_not(
    driver: FakeDriver,
    says: SidecarSays,
    device: dict[str, Any],
    role: str,
    shown: tuple[str, ...] | None,
    why: str,
) -> None:
    for name, value in device.items():
        setattr(driver, name, value)
    found, times = await asked(gpu(role=role), says, shown or ())
    assert (found == "") is (why == "")
    assert why in found
    assert times == (shown is not None)
    assert driver.used == 0


async def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> Any:
        raise FailedPrecondition("no CUDA driver")

    monkeypatch.setattr(gpudirect, "load", load)
    assert await asked(gpu(), NICS) == ("no CUDA driver", 0)


@pytest.mark.parametrize(
    ("given", "transports", "shown", "expected", "says"),
    [
        ({}, ["verbs", "tcp"], ["verbs"], Route.GPUDIRECT, "KV goes by GPUDirect: verbs"),
        ({}, ["nvlink", "verbs"], ["verbs"], Route.NVLINK, ""),
        ({"nvlink": "off"}, ["nvlink", "efa"], ["efa"], Route.GPUDIRECT, "KV goes by GPUDirect: efa"),
        ({"gpudirect": "off"}, ["verbs"], ["verbs"], Route.STAGING, ""),
        ({"staging": "on"}, ["verbs"], ["verbs"], Route.STAGING, ""),
        ({"staging": "off"}, ["verbs"], ["verbs"], Route.GPUDIRECT, "KV goes by GPUDirect"),
        ({"staging": "off"}, ["tcp"], [], Route.SIDECAR, "does not go by GPUDirect: the sidecar has neither"),
        ({}, ["verbs", "tcp"], [], Route.STAGING, "does not go by GPUDirect: verbs: no NIC takes it"),
        ({}, ["tcp"], [], Route.STAGING, "does not go by GPUDirect: the sidecar has neither verbs nor efa"),
        ({"device": "cpu"}, ["verbs"], ["verbs"], Route.SIDECAR, ""),
    ],
)
async def test_routes(
    driver: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    given: dict[str, Any],
    transports: list[str],
    shown: list[str],
    expected: Route,
    says: str,
) -> None:
    async def ask(settings: Any, layout: Any, regions: Any = None) -> SidecarSays:
        return SidecarSays(transports if regions is None else shown, dmabufs=True)

    monkeypatch.setattr(posting, "ask_sidecar", ask)
    with caplog.at_level(logging.INFO, posting.__name__):
        assert await choose_route(gpu(**given), LAYOUT) is expected
    assert says in caplog.text
    assert ("GPUDirect" in caplog.text) is bool(says)


# -- memory


@pytest.mark.parametrize("dmabuf", [True, False])
def test_memory_comes_with_dmabufs_where_nics_are_to_have_it(driver: FakeDriver, dmabuf: bool) -> None:
    before = descriptors()
    memory = cuda_memory(FakeCudaRunner(), gpu(num_pages=8, max_batch=4), staging=False, dmabuf=dmabuf)
    assert memory.staged is None
    assert all((region.dmabuf is not None) is dmabuf for region in memory.shared_regions.values())
    for region in memory.shared_regions.values():
        if region.dmabuf is not None:
            assert not os.get_inheritable(region.dmabuf.fd)
    memory.close()
    assert descriptors() == before


def test_a_region_without_a_dmabuf_is_a_region(driver: FakeDriver, caplog: pytest.LogCaptureFixture) -> None:
    driver.exports = False
    region = CudaRegion("r", 4096, 0, dmabuf=True)
    assert region.dmabuf is None
    assert "not exported as a dma-buf: cuMemGetHandleForAddressRange" in caplog.text
    region.close()


# -- the flush


@pytest.mark.parametrize(
    ("ordered", "transport", "flushes"),
    [(False, "verbs", 1), (False, "efa", 1), (False, "shm", 0), (False, "nvlink", 0), (True, "verbs", 0)],
)
def test_what_is_flushed(driver: FakeDriver, ordered: bool, transport: str, flushes: int) -> None:
    driver.ordered = ordered
    NicWrites(1, pytest.fail).landed(transport)
    assert driver.flushes == flushes


def test_a_flush_that_fails_is_the_devices_end(driver: FakeDriver) -> None:
    driver.flush_fails = "cuFlushGPUDirectRDMAWrites: CUDA_ERROR_UNKNOWN"
    told: list[str] = []
    with pytest.raises(DeviceFailed, match="CUDA_ERROR_UNKNOWN"):
        NicWrites(1, told.append).landed("verbs")
    assert len(told) == 1


class Lib:
    """libcuda's calls that are of NICs. attributes: of device 3."""

    def __init__(self, **attributes: int) -> None:
        self.attributes = {int(name[1:]): value for name, value in attributes.items()}
        self.calls: list[tuple[Any, ...]] = []
        self.code = 0

    def cuInit(self, flags: int) -> int:
        return 0

    def cuGetErrorName(self, code: int, name: Any) -> int:
        name._obj.value = b"CUDA_ERROR_X"
        return 0

    def cuDeviceGetAttribute(self, value: Any, number: int, device: int) -> int:
        assert device == 3
        value._obj.value = self.attributes.get(number, 99)
        return 0 if number in self.attributes else 1

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:
        context._obj.value = 77
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.calls.append(("current", context.value))
        return 0

    def cuFlushGPUDirectRDMAWrites(self, target: int, scope: int) -> int:
        self.calls.append(("flush", target, scope))
        return self.code

    def cuMemGetHandleForAddressRange(self, fd: Any, address: Any, size: Any, kind: int, flags: Any) -> int:
        self.calls.append(("export", address.value, size.value, kind, flags.value))
        fd._obj.value = 55
        return self.code

    def cuDeviceGetPCIBusId(self, text: Any, length: int, device: int) -> int:
        text.value = b"0000:AB:00.0"
        return 0


@pytest.mark.parametrize(
    ("attributes", "ordered", "flushable", "dmabufs"),
    [
        ({"a118": 0, "a117": 1, "a124": 1}, False, True, True),
        ({"a118": 0, "a117": 2, "a124": 0}, False, False, False),
        ({"a118": 0, "a117": 3, "a124": 1}, False, True, True),
        ({"a118": 100, "a117": 1, "a124": 1}, True, True, True),
        ({"a118": 200, "a117": 0, "a124": 1}, True, False, True),
        ({}, False, False, False),
    ],
)
def test_what_the_driver_is_asked(attributes: dict[str, int], ordered: bool, flushable: bool, dmabufs: bool) -> None:
    lib = Lib(**attributes)
    driver = CudaDriver(lib)
    assert driver.nic_writes_ordered(3) is ordered
    assert driver.can_flush_nic_writes(3) is flushable
    assert driver.has_dmabufs(3) is dmabufs
    driver.flush_nic_writes(3)
    assert lib.calls == [("current", 77), ("flush", 0, 100)]
    lib.calls.clear()
    assert driver.export_dmabuf(1 << 40, 1 << 21) == 55
    assert lib.calls == [("export", 1 << 40, 1 << 21, 1, 0)]
    assert driver.pci_address(3) == "0000:ab:00.0"
    lib.code = 1
    for call in (lambda: driver.flush_nic_writes(3), lambda: driver.export_dmabuf(0, 4096)):
        with pytest.raises(Unavailable, match="CUDA_ERROR_X"):
            call()


# -- whole workers


def _buf(region: CudaRegion) -> memoryview:
    """What a NIC would reach."""
    return memoryview((ctypes.c_ubyte * region.nbytes).from_address(region.address)).cast("B")


@pytest.fixture
def nics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sidecars whose NICs take a GPU's memory."""

    async def ask(settings: Any, layout: Any, regions: Any = None) -> SidecarSays:
        return NICS

    monkeypatch.setattr(posting, "ask_sidecar", ask)
    monkeypatch.setattr(CudaRegion, "buf", property(_buf), raising=False)


COMMON: dict[str, Any] = {"device": "cuda", "gpudirect": "auto", "page_size": 16, "max_batch": 8, "num_pages": 100}


def watched(worker: Running, driver: FakeDriver) -> list[str]:
    """What happens to each sequence there, in order."""
    seen: list[str] = []
    core: Any = worker.core
    ready, flush = core.kv_ready, driver.flush_nic_writes

    def kv_ready(*args: Any) -> None:
        seen.append("ready")
        ready(*args)

    def flush_nic_writes(device: int) -> None:
        seen.append("flush")
        flush(device)

    core.kv_ready = kv_ready
    writes = worker.worker.ctx.nic_writes  # type: ignore[union-attr]
    assert writes is not None
    writes._driver = SimpleNamespace(flush_nic_writes=flush_nic_writes)  # type: ignore[assignment]
    return seen


@pytest.mark.parametrize("lands_by", ["verbs", "shm"])
async def test_pages_go_from_gpu_to_gpu_and_are_flushed_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch, nics: None, lands_by: str
) -> None:
    source, target = FakeCudaRunner(), FakeCudaRunner()
    fabric = Fabric()
    fake_gpu(monkeypatch, source)
    async with running(fabric=fabric, role="prefill", instance="p", chunk_size=40, **COMMON) as prefill:
        driver = fake_gpu(monkeypatch, target)
        async with running(fabric=fabric, role="decode", instance="d", **COMMON) as decode, Gateway(decode) as gateway:
            # The runner rings, as it does where nobody stages.
            assert isinstance(source.bound, HostBell)
            for worker in (prefill, decode):
                memory: KvMemory = worker.sidecar.memory
                assert memory.staged is None
                assert all(region.dmabuf is not None for region in memory.shared_regions.values())
                assert worker.worker.ctx.staging is None  # type: ignore[union-attr]
            decode.sidecar.lands_by = lands_by
            seen = watched(decode, driver)
            prompts = [prompt(300, 1), prompt(33, 4), prompt(300, 1)[:200] + prompt(50, 3)]
            for tokens in prompts:
                answer = await gateway.submit(gateway.request(tokens, prefill=[prefill.target()]))
                await answer.wait()
                want = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
                assert answer.tokens[0] == scripted_output(tokens, want)[0]
                assert answer.finished.transfer_bytes > 0
            assert seen == (["flush", "ready"] if lands_by == "verbs" else ["ready"]) * len(prompts)
            assert source.foreign == target.foreign == 0
            for worker in (prefill, decode):
                await worker.pages_are_back()


async def test_a_flush_that_fails_ends_the_worker(monkeypatch: pytest.MonkeyPatch, nics: None) -> None:
    fabric = Fabric()
    fake_gpu(monkeypatch, FakeCudaRunner())
    async with running(fabric=fabric, role="prefill", instance="p", **COMMON) as prefill:
        driver = fake_gpu(monkeypatch, FakeCudaRunner())
        driver.flush_fails = "cuFlushGPUDirectRDMAWrites: CUDA_ERROR_UNKNOWN"
        async with running(fabric=fabric, role="decode", instance="d", **COMMON) as decode, Gateway(decode) as gateway:
            decode.sidecar.lands_by = "verbs"
            seen = watched(decode, driver)
            answer = await gateway.submit(gateway.request(prompt(100), prefill=[prefill.target()]))
            await until(lambda: decode.tasks.failure is not None)
            assert "what a NIC has written to the GPU cannot be flushed" in str(decode.tasks.failure)
            assert decode.worker.status.draining
            # Nothing was computed from those bytes.
            await answer.wait()
            assert answer.error is not None or answer.finished.transfer_bytes == 0
            assert seen == ["flush"]


@pytest.mark.parametrize(("transports", "complains"), [(["efa"], False), (["shm", "tcp"], True), ([], True)])
async def test_memory_that_no_nic_takes_as_a_whole_is_complained_of(
    monkeypatch: pytest.MonkeyPatch,
    nics: None,
    caplog: pytest.LogCaptureFixture,
    transports: list[str],
    complains: bool,
) -> None:
    fake_gpu(monkeypatch, FakeCudaRunner())
    async with running(fabric=Fabric(), role="prefill", **COMMON) as worker:
        client: Any = SimpleNamespace(transports=transports)
        worker.worker._connected(client)
        assert ("no NIC takes all of this GPU's KV memory" in caplog.text) is complains
