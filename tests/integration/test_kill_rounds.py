"""kill -9 of any one process under load, restarted by the supervisor of `kvmesh up`.

Success is back to 100 %, and pages move again, within 5 s of the restarted process serving, without a manual act; no
page is left behind.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from dataclasses import dataclass, field

import pytest

from kvmesh.cli.health import wait_serving
from kvmesh.client import Client
from kvmesh.errors import KvmeshError
from mesh_kit import Mesh, mesh_up, settled, until

ROUNDS = 50 if os.environ.get("KVMESH_SOAK") else 5
CLIENTS = 8
RECOVERY_S = 5.0
QUIET_S = 1.0
SERVING = {
    "prefill-0": "kvmesh.v1.Engine",
    "decode-0": "kvmesh.v1.Engine",
    "kvtransfer-prefill-0": "kvmesh.v1.KvTransfer",
    "kvtransfer-decode-0": "kvmesh.v1.KvTransfer",
}


@dataclass
class Load:
    """Clients that ask without a pause.

    `ended`: (started, succeeded, why) of the latest requests. `moved`: when the latest one with pages from prefill was
    sent.
    """

    mesh: Mesh
    ended: deque[tuple[float, bool, str]] = field(default_factory=lambda: deque(maxlen=4096))
    total: int = 0
    moved: float = 0.0

    async def run(self) -> None:
        async with Client(self.mesh.gateway) as client, asyncio.TaskGroup() as group:
            for index in range(CLIENTS):
                group.create_task(self._client(client, index))

    async def _client(self, client: Client, index: int) -> None:
        while True:
            self.total += 1
            started = time.monotonic()
            ok, why, terminal = False, "no terminal event", 0
            try:
                async with client.chat(
                    [{"role": "user", "content": f"{self.total} client {index} " + "and so on " * 8}],
                    model=self.mesh.model,
                    max_tokens=8,
                    ignore_eos=True,
                    timeout_s=30,
                ) as stream:
                    async for event in stream:
                        if event.HasField("finished"):
                            terminal += 1
                            ok, why = event.finished.usage.completion_tokens == 8, "wrong length"
                            if event.finished.served.transfer_bytes:
                                self.moved = max(self.moved, started)
                        elif event.HasField("error"):
                            terminal += 1
                            why = f"{event.error.reason}: {event.error.message}"
                assert terminal == 1, f"{terminal} terminal events"
            except KvmeshError as error:
                why = f"status {error.reason}: {error.message}"
                await asyncio.sleep(0.02)
            self.ended.append((started, ok, why))

    def failures_since(self, moment: float) -> list[str]:
        return [why for started, ok, why in self.ended if started >= moment and not ok]

    def successes_since(self, moment: float) -> int:
        return sum(1 for started, ok, _ in self.ended if started >= moment and ok)


async def recovered(load: Load, serving: float) -> float:
    """Seconds from `serving` to the start of the first QUIET_S with successes, transfers and without a failure."""
    begin = serving
    while True:
        failures = [started for started, ok, _ in load.ended if started >= begin and not ok]
        if failures:
            begin = max(failures) + 1e-6
        if begin - serving > RECOVERY_S:
            raise AssertionError(f"still failing {RECOVERY_S} s after SERVING: {load.failures_since(serving)[-3:]}")
        quiet = time.monotonic() - begin > QUIET_S and load.successes_since(begin) >= CLIENTS
        if quiet and load.moved > begin:
            return begin - serving
        if time.monotonic() - serving > RECOVERY_S + QUIET_S:
            what = "no pages move" if quiet else "the load has stopped"
            raise AssertionError(f"{what} {RECOVERY_S} s after SERVING: {load.failures_since(serving)[-3:]}")
        await asyncio.sleep(0.02)


@pytest.mark.timeout(300 + 60 * ROUNDS)
@pytest.mark.parametrize("victim", list(SERVING))
async def test_any_one_process_may_be_killed(victim: str) -> None:
    settings = {
        "decode.prefix_cache": "false",
        "prefill.prefix_cache": "false",
        "decode.max_queue": "64",
        "prefill.max_queue": "64",
    }
    async with mesh_up(cache=False, decode=2, settings=settings) as mesh:
        load = Load(mesh)
        clients = asyncio.create_task(load.run())
        worst = 0.0
        try:
            await until(lambda: load.successes_since(0.0) >= 2 * CLIENTS, "the load to run")
            for round_ in range(ROUNDS):
                before = mesh.pid(victim)
                mesh.kill(victim)
                await until(lambda: mesh.pid(victim) != before, f"{victim} restarted")  # noqa: B023
                await until(lambda: mesh.supervisor.processes[victim].read_ready(), f"{victim} up", timeout_s=30)
                assert await wait_serving(mesh.address(victim), SERVING[victim], 30), f"{victim} serves"
                worst = max(worst, await recovered(load, time.monotonic()))
                assert not clients.done(), f"round {round_}: the load ended: {clients}"
        finally:
            clients.cancel()
            await asyncio.gather(clients, return_exceptions=True)
        print(f"{victim}: {ROUNDS} rounds, {load.total} requests, slowest recovery {worst:.2f} s after SERVING")
        await settled(mesh, "decode-0", "decode-1", "prefill-0")
        status = await mesh.status()
        assert all(reply is not None and reply.slots_open == 0 for reply in status.sidecars.values())
