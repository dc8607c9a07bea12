"""Real faults on a live mesh: the alert of each fires while it lasts, and is quiet once it is over.

What is shortened is said by `faults_kit.shortened`: rules are asked for every second, must hold for 2 s instead of
minutes, and look back 10 s (those that look back hours: 30 s). Expressions, thresholds and labels are the shipped ones.
That they hold for their minutes is for the cases of promtool to tell. Each wait is for a condition; nothing here is
about how fast the machine is, but that a scrape gets its second.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from faults_kit import Alerts, Faults, shortened
from kvmesh.cli.ports import free_port
from kvmesh.client import Client, Retry
from kvmesh.errors import KvmeshError
from load_kit import Loaded, kill_and_heal
from mesh_kit import SCRIPTED, Mesh, mesh_up, until
from prometheus_kit import Prometheus, prometheus

pytestmark = pytest.mark.asyncio(loop_scope="module")

SETTINGS = {
    # A prompt is a few steps, so that a step that hangs is soon come to.
    "prefill.chunk_size": "32",
    "prefill.stall_timeout_s": "1",
    "gateway.heal_wait_s": "60",
}
CLIENTS = 2
ASK_S = 5.0


@dataclass
class World:
    """What runs while faults are made. `program`: the file of the prefill worker's faults."""

    mesh: Mesh
    server: Prometheus
    program: Path

    def __post_init__(self) -> None:
        self.faults = Faults(self.mesh)
        self.alerts = Alerts(self.server, self.follow)

    def follow(self, *without: str) -> None:
        """Scrape everything that is up, but these jobs, as where discovery has forgotten them."""
        targets = Loaded(self.mesh, {}).targets()
        self.server.follow({job: addresses for job, addresses in targets.items() if job not in without})


async def ask(client: Client, numbers: itertools.count[int]) -> None:
    """Questions that a cache is asked for and that are prefilled elsewhere, whatever becomes of them."""
    while True:
        with contextlib.suppress(KvmeshError, TimeoutError):
            async with asyncio.timeout(ASK_S):
                text = f"{next(numbers)} " + "a question that is new " * 5
                await client.chat([("user", text)], max_tokens=8, temperature=0.0, seed=7, cache="exact").result()
        await asyncio.sleep(0.1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder: Path = tmp_path_factory.mktemp("faults")
    program = folder / "program.json"
    program.write_text(json.dumps({}))
    settings = {**SCRIPTED.settings, **SETTINGS, "prefill.scripted_faults": str(program)}
    # Where there is one of a kind its successor is found at once: Prometheus takes up to 5 s to hear of a new target.
    settings |= {f"{service}.metrics_listen": f"127.0.0.1:{free_port()}" for service in ("router", "prefill")}
    async with contextlib.AsyncExitStack() as stack:
        server, mesh = await asyncio.gather(
            stack.enter_async_context(prometheus(folder, shortened(folder / "deploy"), "1s")),
            stack.enter_async_context(mesh_up(SCRIPTED, decode=2, settings=settings)),
        )
        made = World(mesh, server, program)
        made.follow()
        await until(lambda: server.value('count(up{job=~"kvmesh-.*"} == 1) >= 8'), "every process scraped", every_s=0.2)
        client = await stack.enter_async_context(mesh.client(retry=Retry(attempts=1)))
        numbers = itertools.count()
        tasks = [asyncio.create_task(ask(client, numbers)) for _ in range(CLIENTS)]
        try:
            yield made
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_redis_is_killed(world: World) -> None:
    alerts = (
        ("KvmeshRedisErrors", "kvmesh-router"),
        ("KvmeshRedisErrors", "kvmesh-gateway"),
        ("KvmeshCacheErrors",),
    )
    await world.alerts.quiet(*alerts)
    async with world.faults.killed("redis"):
        await world.alerts.fire(*alerts)


async def test_a_sidecar_is_killed_while_gateways_are_forgotten(world: World) -> None:
    """The sidecar's engine lives and has nothing to offer. Meanwhile discovery finds no gateway any more."""
    alerts = (
        ("KvmeshTargetDown", "kvmesh-kvtransfer"),
        ("KvmeshNotReady", "kvmesh-prefill"),
        ("KvmeshServiceGone", "kvmesh-gateway"),
    )
    await world.alerts.quiet(*alerts)
    world.follow("kvmesh-gateway")
    try:
        async with world.faults.killed("kvtransfer-prefill-0"):
            await world.alerts.fire(*alerts)
    finally:
        world.follow()


async def test_the_router_is_killed(world: World) -> None:
    alerts = ("KvmeshTargetDown", "kvmesh-router"), ("KvmeshRoutersAway",)
    await world.alerts.quiet(*alerts)
    async with world.faults.killed("router"):
        await world.alerts.fire(*alerts)


async def test_an_engine_stalls(world: World) -> None:
    """A step that never ends: the process lives and answers, and has work to do."""
    alert = ("KvmeshEngineStalled", "kvmesh-prefill")
    await world.alerts.quiet(alert)
    async with world.faults.programmed("prefill-0", world.program, hang_step=3, hang_s=3600):
        await world.alerts.fire(alert)


async def test_workers_stand_still(world: World) -> None:
    """Stopped processes: their sockets live, and silence alone tells."""
    alerts = ("KvmeshTargetDown", "kvmesh-decode"), ("KvmeshNoWorkers",), ("KvmeshWorkerLost",)
    await world.alerts.quiet(*alerts)
    async with world.faults.stopped("decode-0", "decode-1"):
        await world.alerts.fire(*alerts)


async def test_what_is_over_is_quiet(world: World) -> None:
    await world.alerts.all_quiet()


async def test_a_worker_is_killed_in_the_middle_of_streams(world: World) -> None:
    await world.alerts.quiet(("KvmeshWorkerLost",))
    async with world.mesh.client() as client:
        await asyncio.gather(kill_and_heal(world.mesh, client), world.alerts.fire(("KvmeshWorkerLost",)))
    assert not await world.alerts.firing("KvmeshHealsFail"), "every stream came to its end"
    await world.alerts.all_quiet()
