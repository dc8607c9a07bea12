"""Every service is replaced under load: no request that was accepted fails, and a client that connects once more sees
nothing of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from kvmesh.cli.plan import MeshOptions
from mesh_kit import PATIENT, until
from rolling_kit import ENGINES, SOAK, Endpoints, Rolling, rolling_mesh
from rolling_load import EOS_AFTER, Load

Tell = Callable[[str, str], None]
GRPC_CLIENTS, HTTP_CLIENTS = (12, 12) if SOAK else (4, 4)
SETTINGS = {
    "prefill.scripted_step_ms": "5",
    "decode.scripted_step_ms": "10",
    "prefill.num_pages": "2048",
    "decode.num_pages": "2048",
    "gateway.drain_delay_s": "1.5",
    "gateway.drain_timeout_s": "60",
    "router.drain_delay_s": "0.5",
    "router.fleet_wait_s": "60",
    "prefill.drain_timeout_s": "60",
    "decode.drain_timeout_s": "60",
    "kvtransfer.drain_timeout_s": "60",
    # A worker that waits for a processor is no lost worker.
    "gateway.heartbeats_missed": "30",
    "gateway.heal_wait_s": "60",
    "router.worker_timeout_s": "30",
    "router.redis_timeout_ms": "5000",
    **PATIENT,
}


def options(folder: Path) -> MeshOptions:
    program = folder / "program.json"
    program.write_text(f'{{"eos_after": {EOS_AFTER}}}')
    scripted = {f"{role}.scripted_faults": str(program) for role in ("prefill", "decode")}
    return MeshOptions(runner="scripted", model="scripted", embedder="none", threads=1, settings=SETTINGS | scripted)


@contextlib.asynccontextmanager
async def loaded(mesh: Rolling) -> AsyncIterator[Load]:
    """Clients that ask all the time; at the end all of them have had what they were to get."""
    endpoints = Endpoints(mesh.http)
    following = asyncio.create_task(endpoints.follow())
    await until(lambda: len(endpoints.ready) == 2, "both gateways are ready")
    load = Load(mesh.gateways, endpoints, "scripted")
    clients = asyncio.create_task(load.run(GRPC_CLIENTS, HTTP_CLIENTS))
    try:
        await until(lambda: len(load.seen) == 2 and sum(load.done.values()) > 10, "the load runs")
        yield load
        load.stopping = True
        async with asyncio.timeout(120):
            await clients
    finally:
        for task in (clients, following):
            task.cancel()
        await asyncio.gather(clients, following, return_exceptions=True)


async def served_more(load: Load, count: int = GRPC_CLIENTS + HTTP_CLIENTS) -> None:
    """Until so many more requests have ended well."""
    before = sum(load.done.values())
    await until(lambda: load.failures or sum(load.done.values()) >= before + count, "the load goes on")
    assert not load.failures, load.failures[:5]


async def settled(mesh: Rolling) -> None:
    """Nothing runs, no slot is open, every page is free."""

    async def idle() -> bool:
        loads = [await mesh.load(name) for name in ENGINES]
        status = await mesh.status()
        return all(
            load.running + load.waiting + load.transferring == 0 and load.free_pages == load.total_pages
            for load in loads
        ) and all(reply is not None and reply.slots_open == 0 for reply in status.sidecars.values())

    await until(idle, "all pages are free")


def report(mesh: Rolling, load: Load) -> str:
    slowest = max(mesh.ended, key=lambda each: each[2])
    return (
        f"rolling restart: {len(mesh.ended)} processes replaced, {sum(load.done.values())} requests, "
        f"{len(load.failures)} failed; {load.heals} heals, {load.retries} retries, {load.degraded} degraded, "
        f"{load.moved} with pages moved, caches {dict(load.caches)}; slowest end {slowest[0]} {slowest[2]:.1f} s"
    )


@pytest.mark.timeout(600)
async def test_every_service_is_replaced_under_load(tmp_path: Path, record_property: Tell) -> None:
    async with rolling_mesh(options(tmp_path)) as mesh:
        async with loaded(mesh) as load:
            for index in (0, 1):
                seen = len(load.seen)
                await mesh.start(f"gateway-{index + 2}")
                await until(lambda: len(load.seen) > seen, "the new gateway is found")  # noqa: B023
                await mesh.stop(f"gateway-{index}")
                await served_more(load)
            for index in (0, 1):
                await mesh.replace(f"router-{index}", f"router-{index + 2}")
                await served_more(load)
            for name in ENGINES:
                await mesh.restart(name, f"kvtransfer-{name}")
                await mesh.complete()
                await served_more(load)
            await mesh.restart("kvtransfer-decode-0")
            await served_more(load)
        record_property("measured", report(mesh, load))
        assert not load.failures, load.failures[:5]
        assert load.heals == 0
        await settled(mesh)
        await mesh.stop(*list(mesh.running)[::-1])
