"""What NICs need of the driver: dma-bufs of regions, and that their writes can be flushed. No NIC takes part."""

from __future__ import annotations

import os
import re
import time

import pytest

from kvmesh.kv.region import DmaBuf, Region

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.version.cuda is None, reason="needs a GPU"),
]


def test_a_region_is_exported_as_a_dmabuf() -> None:
    from kvmesh.engine.nvlink.cuda_region import CudaRegion
    from kvmesh.engine.nvlink.driver import load

    if not load().has_dmabufs(0):
        pytest.skip("this driver exports no dma-bufs")
    region = CudaRegion("test", 5 << 20, 0, dmabuf=True)
    again = CudaRegion("again", 5 << 20, 0, dmabuf=True)
    assert region.dmabuf is not None
    assert again.dmabuf is not None
    assert os.fstat(region.dmabuf.fd).st_ino != os.fstat(again.dmabuf.fd).st_ino
    assert re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", region.dmabuf.pci_address)
    # As a sidecar takes it.
    held = Region.hold(os.dup(region.fd), region.nbytes)
    held.attach(DmaBuf(os.dup(region.dmabuf.fd), 0))
    region.close()
    again.close()
    assert held.dmabuf is not None
    assert os.lseek(held.dmabuf.fd, 0, os.SEEK_END) >= 5 << 20
    held.close()


def test_what_a_nic_wrote_can_be_flushed() -> None:
    from kvmesh.engine.nvlink.driver import load

    driver = load()
    ordered, flushable = driver.nic_writes_ordered(0), driver.can_flush_nic_writes(0)
    print(f"ordered {ordered}, flushable {flushable}, dma-bufs {driver.has_dmabufs(0)}, at {driver.pci_address(0)}")
    if not flushable:
        pytest.skip("this driver cannot flush")
    driver.flush_nic_writes(0)
    started = time.perf_counter()
    for _ in range(100):
        driver.flush_nic_writes(0)
    print(f"a flush takes {(time.perf_counter() - started) * 1e4:.1f} us")
