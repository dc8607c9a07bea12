"""Requests go on while what the router needs, and the routers themselves, come and go."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio

from kvmesh.cli.health import wait_serving
from mesh_kit import SCRIPTED, Mesh, mesh_up, until

SOAK = bool(os.environ.get("KVMESH_SOAK"))
AWAY_S = 60.0 if SOAK else 4.0
CLIENTS = 4

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Load:
    """Clients that ask without a pause; every one of their requests must end well."""

    mesh: Mesh
    done: int = 0
    degraded: int = 0
    how: dict[str, int] = field(default_factory=dict)

    async def one(self, text: str, **fields: Any) -> Any:
        """The finished event of a request; fails the test for anything else."""
        async with self.mesh.client() as client:
            stream = client.chat(
                [("user", text)], model=self.mesh.model, max_tokens=12, seed=1, timeout_s=120, **fields
            )
            async with stream:
                async for event in stream:
                    assert not event.HasField("error"), event.error
                    if event.HasField("finished"):
                        served = event.finished.served
                        self.done += 1
                        self.degraded += served.degraded
                        self.how[served.cache] = self.how.get(served.cache, 0) + 1
                        return event.finished
        raise AssertionError("no terminal event")

    async def _client(self, number: int, over: asyncio.Event) -> None:
        turn = 0
        while not over.is_set():
            # Some questions come again, most are new.
            await self.one(f"client {number} asks {turn // 3 if turn % 3 else turn}")
            turn += 1

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Load while the body runs; the first request that fails ends it."""
        over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(self._client(number, over))
            try:
                yield
            finally:
                over.set()

    async def more(self, count: int = 2 * CLIENTS) -> None:
        """Until that many further requests have ended."""
        target = self.done + count
        await until(lambda: self.done >= target, f"{count} more requests", timeout_s=120)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    program = tmp_path_factory.mktemp("scripted") / "program.json"
    # Answers end by themselves: others are not remembered.
    program.write_text('{"eos_after": 8}')
    settings = {
        "decode.scripted_faults": str(program),
        "prefill.scripted_step_ms": "5",
        "decode.scripted_step_ms": "5",
        "decode.max_queue": "64",
        "prefill.max_queue": "64",
        # A worker that waits for a processor is no dead worker.
        "router.worker_timeout_s": "30",
        "gateway.heartbeat_s": "5",
        "gateway.heal_wait_s": "60",
    }
    async with mesh_up(SCRIPTED, routers=2, decode=2, settings=settings) as made:
        yield made


async def serving(mesh: Mesh, name: str, service: str) -> None:
    """Until the supervisor has started `name` again and it serves."""

    async def up() -> bool:
        return await wait_serving(mesh.address(name), service, 60.0)

    await until(up, f"{name} serves again")


async def test_redis_away_while_a_worker_dies_and_joins(mesh: Mesh) -> None:
    load = Load(mesh)
    async with load.running():
        await load.more()
        # Stopped, not closed: connections hang, which is the worse of the two.
        mesh.kill("redis", signal.SIGSTOP)
        try:
            await load.more()
            before = mesh.pid("decode-1")
            mesh.kill("decode-1")
            await until(lambda: mesh.pid("decode-1") != before, "decode-1 was started again")
            await serving(mesh, "decode-1", "kvmesh.v1.Engine")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AWAY_S):
                    while True:
                        await load.more(CLIENTS)
        finally:
            mesh.kill("redis", signal.SIGCONT)
        await load.more()
    assert load.degraded == 0, "the routers went on deciding"

    async def hits() -> bool:
        await load.one("Is it remembered again?")
        return load.how.get("exact", 0) > 0

    await until(hits, "the cache is back")


async def test_routers_restarted_in_turn(mesh: Mesh) -> None:
    load = Load(mesh)
    async with load.running():
        await load.more()
        for name in ("router", "router-1"):
            before = mesh.pid(name)
            mesh.kill(name, signal.SIGTERM)
            await until(lambda before=before, name=name: mesh.pid(name) != before, f"{name} ended")
            await serving(mesh, name, "kvmesh.v1.Router")

            async def knows_the_fleet(name: str = name) -> bool:
                from kvmesh.cli.status import read_status

                status = await read_status(mesh.address(name), mesh.state.token_file)
                return len(status.fleet.workers) == 3

            await until(knows_the_fleet, f"{name} knows the fleet")
            await load.more()


async def test_no_router_at_all(mesh: Mesh) -> None:
    load = Load(mesh)
    async with load.running():
        await load.more()
        for name in ("router", "router-1"):
            mesh.kill(name, signal.SIGSTOP)
        try:
            seen = load.degraded
            await until(lambda: load.degraded >= seen + 2, "requests placed by the gateway alone", timeout_s=120)
        finally:
            for name in ("router", "router-1"):
                mesh.kill(name, signal.SIGCONT)

        async def with_a_router() -> bool:
            return not (await load.one("Is anybody there?", cache="off")).served.degraded

        await until(with_a_router, "routers decide again", timeout_s=120)
