"""KV between a GPU and pinned host memory: bytes, layer by layer, and the doorbell behind each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvmesh.engine.cuda.staging import Staging
from kvmesh.kv.layout import KvGroup, KvLayout, group_view
from kvmesh.kv.region import Region
from kvmesh.kv.ring import Doorbell, StepEntry, StepRecord

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.version.cuda is None, reason="needs a GPU"),
]

# With pages of 64 tokens 32 KiB a layer; with 4, the second has 1,000 bytes: rows that are no multiple of 16.
GROUPS = (KvGroup("even", "full", (0, 2, 4), 2, 64), KvGroup("odd", "mla", (1, 3), 1, 125))
PAGES, STAGED = 40, 16


class World:
    """One GPU's pages and their staging."""

    def __init__(self, groups: tuple[KvGroup, ...], page_size: int) -> None:
        from kvmesh.engine.cuda.doorbell import PAGE_BYTES, HostBell
        from kvmesh.engine.cuda.memory import PinnedRegions, gpu_memory, kv_regions
        from kvmesh.engine.nvlink.cuda import CudaBackend

        self.layout = KvLayout(1, "bf16", page_size, groups, PAGES)
        self.staged = replace(self.layout, num_pages=STAGED)
        self.regions = kv_regions(self.layout, 0, gpu_memory(0, 0, 0))
        self.host = {g.name: Region.create("staging", self.staged.region_bytes(g)) for g in groups}
        self.pinned = PinnedRegions(self.host, 0)
        self.bell_region = Region.create("bell", PAGE_BYTES)
        self.bell = HostBell(self.bell_region, 0)
        self.seen = Doorbell(self.bell_region.buf)
        self.stream = torch.cuda.Stream(0)
        self.out, self.into = CudaBackend({}, 0, compute=self.stream), CudaBackend({}, 0, compute=self.stream)
        self.out.warm()
        self.into.warm()
        self.staging = Staging(
            self.layout, self.staged, device={name: region.address for name, region in self.regions.items()},
            host=self.pinned.addresses, bell=self.bell.device_pointer, out=self.out, into=self.into,
        )  # fmt: skip

    def on_device(self, name: str) -> Any:
        """(layers, pages, bytes)"""
        flat = torch.as_tensor(self.regions[name], device="cuda:0")
        return flat.view(self.layout.group(name).num_layers, PAGES, self.layout.page_bytes(name))

    def on_host(self, name: str) -> Any:
        return group_view(self.host[name].buf, self.staged, name)

    def close(self) -> None:
        from kvmesh.engine.cuda.memory import close_all

        torch.cuda.synchronize()
        self.staging.close()
        self.seen.close()
        self.bell.close()
        self.pinned.close()
        close_all(self.regions.values())
        for region in (*self.host.values(), self.bell_region):
            region.close()


@pytest.fixture(params=[(GROUPS[:1], 64), (GROUPS, 4)], ids=["aligned", "odd"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(*request.param)
    yield made
    made.close()


def reach(bell: Doorbell, value: int) -> None:
    until = time.monotonic() + 30
    while bell.value < value:
        assert time.monotonic() < until, f"{bell.value} of {value}"
        time.sleep(0.001)


async def test_a_step_leaves_layer_by_layer(world: World) -> None:
    """Each layer's pages are computed on the stream just before, behind work that takes a while."""
    names = [group.name for group in world.layout.groups]
    layers = world.layout.num_layers
    places = [world.layout.locate(layer) for layer in sorted(x for g in world.layout.groups for x in g.layers)]
    lease = await world.staging.take([31, 0, 7, 39], 30)
    world.staging.start(lease, 9)
    want = {
        name: torch.randint(1, 256, world.on_device(name).shape, dtype=torch.uint8, device="cuda:0") for name in names
    }
    for name in names:
        world.on_host(name)[:] = 0
    torch.cuda.synchronize()
    for turn, (first, count) in enumerate(((0, 1), (1, 3))):
        value = world.staging.bell.value + 1
        step = world.staging.step(StepRecord(value, layers, (StepEntry(9, first, count),)))
        with torch.cuda.stream(world.stream):
            for layer, (group, index) in enumerate(places):
                torch.cuda._sleep(2_000_000)
                world.on_device(group.name)[index].copy_(want[group.name][index])
                step.layer(layer)
        for layer, (group, index) in enumerate(places):
            reach(world.seen, value + layer)
            for at in range(first, first + count):
                page = want[group.name][index, lease.device_pages[at]].cpu().numpy()
                assert (world.on_host(group.name)[index, lease.pages[at]] == page).all(), (turn, layer, at)
        assert world.seen.value == value + layers - 1
    await world.staging.give_back(lease)
    world.staging.pool.check_integrity()
    assert world.staging.pool.free_count == STAGED


async def test_ready_pages_and_what_lands(world: World) -> None:
    names = [group.name for group in world.layout.groups]
    rng = np.random.default_rng(3)
    lease = await world.staging.take([5, 6, 20], 30)
    for name in names:
        world.on_device(name).random_(0, 256)
    torch.cuda.synchronize()
    await world.staging.fill(lease, 2)
    for name in names:
        for device, host in list(zip(lease.device_pages, lease.pages, strict=True))[:2]:
            assert (world.on_host(name)[:, host] == world.on_device(name)[:, device].cpu().numpy()).all()
        world.on_host(name)[:] = rng.integers(0, 256, world.on_host(name).shape, dtype=np.uint8)
    before = {name: world.on_device(name).clone() for name in names}
    await world.staging.land(lease)
    for name in names:
        for device, host in zip(lease.device_pages, lease.pages, strict=True):
            assert (world.on_device(name)[:, device].cpu().numpy() == world.on_host(name)[:, host]).all()
        others = [page for page in range(PAGES) if page not in lease.device_pages]
        assert (world.on_device(name)[:, others] == before[name][:, others]).all()
    await asyncio.gather(world.staging.give_back(lease), world.staging.give_back(lease))
    assert world.staging.pool.free_count == STAGED
