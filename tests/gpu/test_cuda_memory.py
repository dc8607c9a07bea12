"""An engine's memory on a GPU: regions, the doorbell that the device rings, what is said where memory is short."""

from __future__ import annotations

import time

import pytest

from kvmesh.errors import Unavailable
from kvmesh.kv.layout import KvGroup, KvLayout
from kvmesh.kv.region import Region
from kvmesh.kv.ring import Doorbell

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.version.cuda is None, reason="needs a GPU"),
]

GROUPS = (KvGroup("even", "full", (0, 2), 2, 64), KvGroup("odd", "full", (1,), 1, 64))


def reach(bell: Doorbell, value: int) -> None:
    until = time.monotonic() + 30
    while bell.value < value:
        assert time.monotonic() < until, f"{bell.value} of {value}"
        time.sleep(0.001)


def test_regions_are_zero_and_can_be_written() -> None:
    from kvmesh.engine.cuda.memory import close_all, gpu_memory, kv_regions

    layout = KvLayout(1, "bf16", 64, GROUPS, 50)
    memory = gpu_memory(0, 0, 0)
    assert 0 < memory.free <= memory.total
    regions = kv_regions(layout, 0, memory)
    for group in GROUPS:
        pages = torch.as_tensor(regions[group.name], device="cuda:0").view(torch.bfloat16)
        assert pages.numel() * 2 == layout.region_bytes(group)
        assert not pages.any()
        pages.fill_(1)
    torch.cuda.synchronize()
    del pages
    close_all(regions.values())
    assert gpu_memory(0, 0, 0).free >= memory.free - (64 << 20)


def test_too_much_is_refused_with_numbers() -> None:
    from kvmesh.engine.cuda.memory import gpu_memory, kv_regions

    memory = gpu_memory(0, 1 << 30, 0)
    pages = memory.total // KvLayout(1, "bf16", 64, GROUPS, 1).region_bytes("even")
    with pytest.raises(Unavailable, match=r"GiB were asked for \d+ pages, .* are free, weights take 1.00 GiB.*lower"):
        kv_regions(KvLayout(1, "bf16", 64, GROUPS, pages), 0, memory)
    assert gpu_memory(0, 0, 0).free >= memory.free - (64 << 20)


def test_the_device_rings_and_so_does_the_host_through_it() -> None:
    from kvmesh.engine.cuda.doorbell import PAGE_BYTES, HostBell
    from kvmesh.layers.cuda.doorbell import DeviceBell

    region = Region.create("bell", PAGE_BYTES)
    seen = Doorbell(region.buf)  # as the sidecar maps it
    bell = HostBell(region, 0)
    device = DeviceBell("cuda:0", bell.device_pointer, bell.value)
    stream = torch.cuda.Stream(0)

    def ring(count: int) -> None:
        with torch.cuda.stream(stream):
            device.ring(count)

    ring(1)
    ring(5)
    reach(seen, 6)
    bell.ringer = ring
    assert bell.ring() == 7
    assert seen.value == bell.value == 7
    torch.cuda.synchronize()
    seen.close()
    bell.close()
    bell.close()
    region.close()
