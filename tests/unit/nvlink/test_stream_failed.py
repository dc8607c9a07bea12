"""A stream that has failed: said once to whoever ends the process, and nothing waits for it any more."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvmesh.engine.cuda.lost import leave_to_the_process
from kvmesh.engine.cuda.staging import Staging
from kvmesh.engine.nvlink.host import HostBackend, address_of
from kvmesh.engine.worker.posting import Movers
from kvmesh.errors import Unavailable
from kvmesh.kv.region import Region
from kvmesh.kv.ring import DOORBELL_BYTES
from nvlink_world import WAIT_S, World, layout_of

SRC, DST = [1, 2, 3, 8], [15, 4, 5, 0]
LAYERS = 3


class Told:
    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.event = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def __call__(self, reason: str) -> None:
        self.reasons.append(reason)
        self._loop.call_soon_threadsafe(self.event.set)


def fail(*_: object) -> Any:
    raise RuntimeError("CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA` …")


@pytest.mark.parametrize("broken", ["reached", "mark"])
async def test_the_poster_tells_once_and_can_be_closed(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world, told = World(layout_of(), layout_of(num_pages=20)), Told()
    world.source.rank(0)[:] = np.random.default_rng(1).integers(1, 256, world.source.rank(0).shape)
    await world.mapped()
    Movers(poster=world.poster).on_failed(told)
    monkeypatch.setattr(world.backend, broken, fail)
    with caplog.at_level(logging.ERROR):
        world.post(7, SRC, DST)
        step = world.step((7, 0, 4))
        for layer in range(LAYERS):
            step.layer(layer)
        world.post(8, [4], [7], ready=1, slot=4)
        async with asyncio.timeout(WAIT_S):
            await told.event.wait()
        # Neither is said to have ended: what was launched may be in flight for as long as the process lives.
        world.stop(8, "not wanted")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(world.said.get(), 0.2)
    assert len(told.reasons) == 1
    assert "device-side assert" in told.reasons[0]
    assert "Compile" not in told.reasons[0]
    assert len([record for record in caplog.records if record.name.endswith("poster")]) == 1
    started = time.monotonic()
    await world.poster.leave(0.1)
    await asyncio.to_thread(world.poster.close)
    assert time.monotonic() - started < 20
    assert not world.poster._thread.is_alive()


@pytest.mark.parametrize("broken", ["reached", "mark", "prepare"])
async def test_staging_tells_and_the_waiting_fail(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, told = layout_of(), Told()
    staged = replace(layout, num_pages=8)
    regions = [Region.create(name, one.region_bytes("main")) for name, one in (("d", layout), ("h", staged))]
    bell = Region.create("bell", DOORBELL_BYTES)
    out, into = HostBackend({}), HostBackend({})
    staging = Staging(
        layout, staged, device={"main": address_of(regions[0])}, host={"main": address_of(regions[1])},
        bell=address_of(bell), out=out, into=into,
    )  # fmt: skip
    Movers(staging=staging).on_failed(told)
    lease = await staging.take([3, 4], WAIT_S)
    for backend in (out, into):
        monkeypatch.setattr(backend, broken, fail)
    with pytest.raises(Unavailable, match=r"device-side assert triggered$"):
        await staging.fill(lease, 2)
    with pytest.raises(Unavailable):
        await staging.land(lease)
    if broken != "prepare":
        with pytest.raises(Unavailable):
            await staging.give_back(lease)
        # It stays away.
        assert staging.pool.free_count == 6
    assert told.reasons
    monkeypatch.undo()
    staging.close()
    for region in (*regions, bell):
        region.close()


class Thing:
    pass


def test_what_is_left_to_the_process_is_never_freed() -> None:
    kept, freed = Thing(), Thing()
    references = [weakref.ref(kept), weakref.ref(freed)]
    leave_to_the_process(kept)
    del kept, freed
    gc.collect()
    assert references[0]() is not None
    assert references[1]() is None
