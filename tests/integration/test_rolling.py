"""Every service is replaced under load: no request that was accepted fails, and a client that connects once more sees
nothing of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from kvmesh.cli.plan import MeshOptions
from kvmesh.client import Client
from mesh_kit import PATIENT, until
from rolling_kit import ENGINES, SOAK, Endpoints, Rolling, rolling_mesh
from rolling_load import EOS_AFTER, LIMIT_S, Load, Question

Tell = Callable[[str, str], None]
# Half of them over gRPC, half over HTTP.
CLIENTS = 24 if SOAK else 8
WINDOW_S = 1.0
TEXTS = [
    f"{opening} {topic}" for opening in ("Once upon a time", "The reason for") for topic in ("rain", "a king", "it")
]
SETTINGS = {
    "prefill.scripted_step_ms": "5",
    "decode.scripted_step_ms": "10",
    "prefill.num_pages": "2048",
    "decode.num_pages": "2048",
    # Until the balancer, which looks ten times a second, has heard of it on a machine that is busy.
    "gateway.drain_delay_s": "3",
    "router.drain_delay_s": "0.5",
    "router.fleet_wait_s": "60",
    # As long as a request may take: none is cut by a drain, however slow the machine. A process that does not end in
    # END_S is told of by `Rolling.stop`.
    **{f"{service}.drain_timeout_s": str(LIMIT_S) for service in ("gateway", "prefill", "decode", "kvtransfer")},
    # Who waits for a processor is not lost.
    "gateway.heartbeats_missed": "100",
    "gateway.submit_timeout_s": "60",
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
async def loaded(mesh: Rolling, model: str = "scripted", clients: int = CLIENTS) -> AsyncIterator[Load]:
    """Clients that ask all the time; at the end all of them have had what they were to get."""
    endpoints = Endpoints(mesh.http)
    following = asyncio.create_task(endpoints.follow())
    await until(lambda: len(endpoints.ready) == 2, "both gateways are ready")
    load = Load(mesh.gateways, endpoints, model)
    if model != "scripted":
        await load.learn(TEXTS)
    asking = asyncio.create_task(load.run(clients // 2, clients // 2))
    try:
        await until(lambda: len(load.seen) == 2 and sum(load.done.values()) > 10, "the load runs")
        yield load
        load.stopping = True
        async with asyncio.timeout(120):
            await asking
    finally:
        for task in (asking, following):
            task.cancel()
        await asyncio.gather(asking, following, return_exceptions=True)


async def served_more(load: Load, count: int = CLIENTS) -> None:
    """Until so many more requests have ended well."""
    before = sum(load.done.values())
    await until(lambda: load.failures or load.refused or sum(load.done.values()) >= before + count, "the load goes on")
    assert not load.failures + load.refused, (load.failures + load.refused)[:5]


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
        f"{len(load.failures)} failed, {len(load.refused)} refused; "
        f"{load.heals} heals, {load.retries} retries, {load.degraded} degraded, "
        f"{load.moved} with pages moved, caches {dict(load.caches)}; slowest end {slowest[0]} {slowest[2]:.1f} s"
    )


@pytest.mark.timeout(900)
async def test_every_service_is_replaced_under_load(tmp_path: Path, record_property: Tell) -> None:
    async with rolling_mesh(options(tmp_path), replacements=3 if SOAK else 1) as mesh:
        async with loaded(mesh) as load:
            if SOAK:
                await in_turn(mesh, load)
            await upgrade(mesh, load)
            # All of them had the time that they needed (see SETTINGS): nothing was computed twice.
            assert load.heals == 0
            await handed_over(mesh, load)
        record_property("measured", report(mesh, load))
        assert not load.failures + load.refused, (load.failures + load.refused)[:5]
        await settled(mesh)
        await all_at_once(mesh, record_property)


async def in_turn(mesh: Rolling, load: Load) -> None:
    """One after the other, each of them."""
    for index in (0, 1):
        await one_gateway(mesh, load, f"gateway-{index}", f"gateway-{index + 3}")
    for index in (0, 1):
        await mesh.replace(f"router-{index}", f"router-{index + 3}")
        await served_more(load)
    for name in ENGINES:
        await mesh.restart(name, f"kvtransfer-{name}")
        await mesh.complete()
        await served_more(load)
    for name in ENGINES:
        # A sidecar alone.
        await mesh.restart(f"kvtransfer-{name}")
        await served_more(load)
    await mesh.restart("redis")
    await served_more(load)


async def upgrade(mesh: Rolling, load: Load) -> None:
    """One of each kind, several at a time, as in an upgrade of all."""
    gateway = next(name for name in mesh.running if name.startswith("gateway"))
    router = next(name for name in mesh.running if name.startswith("router"))
    await asyncio.gather(
        one_gateway(mesh, load, gateway, "gateway-2"),
        mesh.replace(router, "router-2"),
        mesh.restart("prefill-0", "kvtransfer-prefill-0"),
    )
    await mesh.complete()
    await served_more(load)
    # Of the next process of that name.
    mesh.change("decode-0", drain_timeout_s=WINDOW_S)
    await asyncio.gather(
        mesh.restart("decode-0", "kvtransfer-decode-0"),
        # A sidecar alone.
        mesh.restart("kvtransfer-decode-1"),
        mesh.restart("redis"),
    )
    await mesh.complete()
    await served_more(load)


async def one_gateway(mesh: Rolling, load: Load, old: str, new: str) -> None:
    """Its successor is there, and found, before it goes."""
    seen = len(load.seen)
    await mesh.start(new)
    await until(lambda: len(load.seen) > seen, "the new gateway is found")
    await mesh.stop(old)
    await served_more(load)


async def handed_over(mesh: Rolling, load: Load) -> None:
    """What runs longer than the time for draining goes on elsewhere, where it was."""
    mesh.change("decode-0", drain_timeout_s=LIMIT_S)
    async with Client(load.gateways) as client, asyncio.TaskGroup() as group:
        before = load.heals
        for number in range(6):
            group.create_task(load.ask("grpc", client, Question.draw("endless", number)))

        async def both_run() -> bool:
            # All of them have a worker by then: one that is told to stop first would be given none.
            return load.speaking["endless"] == 6 and all(
                [(await mesh.load(name)).running >= 2 for name in ("decode-0", "decode-1")]
            )

        await until(both_run, "long streams on both workers")
        await mesh.restart("decode-0", "kvtransfer-decode-0")
    assert load.done["grpc endless"] == 6, load.failures[:5]
    assert load.heals > before


async def all_at_once(mesh: Rolling, record_property: Tell) -> None:
    """SIGTERM for all services: each ends in time with status 0, and what was accepted gets its whole answer.

    Redis goes last: whose answer comes by way of it could not go on anywhere.
    """
    async with loaded(mesh) as load:
        await until(lambda: load.running >= CLIENTS // 2, "the load runs")
        load.stopping = True
        began = time.monotonic()
        await mesh.stop(*(name for name in mesh.running if name != "redis"))
        record_property(
            "measured", f"all services told to stop under load: all ended in {time.monotonic() - began:.1f} s"
        )
    assert not load.failures, load.failures[:5]
    await mesh.stop(*list(mesh.running))


@pytest.mark.model
@pytest.mark.skipif(not SOAK, reason="eleven processes, four of them with a model: `make soak`")
@pytest.mark.timeout(1800)
async def test_the_same_on_the_real_model(record_property: Tell) -> None:
    scripted = ("scripted_step_ms", "num_pages")
    settings = {key: value for key, value in SETTINGS.items() if not key.endswith(scripted)}
    # The same words in any batch, and from any worker: that is promised in fp32.
    real = MeshOptions(dtype="fp32", embedder="none", threads=1, settings=settings)
    async with rolling_mesh(real) as mesh:
        async with loaded(mesh, "auto", 4) as load:
            await one_gateway(mesh, load, "gateway-0", "gateway-2")
            await mesh.replace("router-0", "router-2")
            await served_more(load, 8)
            for name in ENGINES:
                await mesh.restart(name, f"kvtransfer-{name}")
                await mesh.complete()
                await served_more(load, 8)
        record_property("measured", f"real model, {report(mesh, load)}")
        assert not load.failures + load.refused, (load.failures + load.refused)[:5]
        assert load.heals == 0
        await settled(mesh)
        await mesh.stop(*list(mesh.running))
