"""Rounds of kill -9 of one process under load, restarted by the supervisor of `kvmesh up`.

Success is back to 100 %, and pages move again, within 5 s of the restarted process serving, without a manual act; no
page, descriptor, mapping or process is left behind.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvmesh.cli.health import wait_serving
from kvmesh.cli.plan import MeshOptions
from kvmesh.client import Client
from kvmesh.errors import KvmeshError
from mesh_kit import Mesh, mesh_up, settled, until

Tell = Callable[[str, str], None]
RECOVERY_S = 5.0
# A round ends after this long without a failure, with this many successes and with pages moved. Evidence may come late
# on a loaded machine: only a request that STARTED later than RECOVERY_S after SERVING and failed is a failed round.
QUIET_S = 0.5
EVIDENCE_S = 60.0
SERVING = {
    "prefill-0": "kvmesh.v1.Engine",
    "decode-0": "kvmesh.v1.Engine",
    "kvtransfer-prefill-0": "kvmesh.v1.KvTransfer",
    "kvtransfer-decode-0": "kvmesh.v1.KvTransfer",
}
ENGINES = ("decode-0", "decode-1", "prefill-0")
SETTINGS = {
    "decode.prefix_cache": "false",
    "prefill.prefix_cache": "false",
    "decode.max_queue": "64",
    "prefill.max_queue": "64",
    # Long enough steps that most requests are in the middle of something when a process dies, and that the load leaves
    # the processor to the process that starts: its start is most of a round.
    "prefill.scripted_step_ms": "20",
    "decode.scripted_step_ms": "50",
}


@dataclass
class Load:
    """Clients that ask without a pause.

    `ended`: (started, succeeded, why) of the latest requests. `moved`: when the latest one with pages from prefill was
    sent.
    """

    mesh: Mesh
    clients: int
    max_tokens: int
    timeout_s: float
    ended: deque[tuple[float, bool, str]] = field(default_factory=lambda: deque(maxlen=4096))
    total: int = 0
    moved: float = 0.0

    async def run(self) -> None:
        async with Client(self.mesh.gateway) as client, asyncio.TaskGroup() as group:
            for index in range(self.clients):
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
                    max_tokens=self.max_tokens,
                    ignore_eos=True,
                    timeout_s=self.timeout_s,
                ) as stream:
                    async for event in stream:
                        if event.HasField("finished"):
                            terminal += 1
                            ok, why = event.finished.usage.completion_tokens == self.max_tokens, "wrong length"
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
    """Seconds from `serving` until success was back to 100 %: to the start of the first QUIET_S that has successes and
    transfers and no failure."""
    begin = serving
    while True:
        failures = [started for started, ok, _ in load.ended if started >= begin and not ok]
        if failures:
            begin = max(failures) + 1e-6
        if begin - serving > RECOVERY_S:
            raise AssertionError(f"still failing {RECOVERY_S} s after SERVING: {load.failures_since(serving)[-3:]}")
        quiet = time.monotonic() - begin > QUIET_S and load.successes_since(begin) >= load.clients
        if quiet and load.moved > begin:
            return begin - serving
        if time.monotonic() - serving > EVIDENCE_S:
            what = "no pages move" if quiet else "the load has stopped"
            raise AssertionError(f"{what} {EVIDENCE_S} s after SERVING: {load.failures_since(serving)[-3:]}")
        await asyncio.sleep(0.02)


async def kill_rounds(mesh: Mesh, load: Load, victim: str, rounds: int) -> str:
    """Kill `victim` again and again under load; returns what was seen."""
    began, worst, slowest_start = time.monotonic(), 0.0, 0.0
    for round_ in range(rounds):
        before = mesh.pid(victim)
        killed = time.monotonic()
        mesh.kill(victim)
        await until(lambda: mesh.pid(victim) != before, f"{victim} restarted", timeout_s=60)  # noqa: B023
        await until(lambda: mesh.supervisor.processes[victim].read_ready(), f"{victim} up", timeout_s=120)
        assert await wait_serving(mesh.address(victim), SERVING[victim], 120), f"{victim} serves"
        slowest_start = max(slowest_start, time.monotonic() - killed)
        try:
            worst = max(worst, await recovered(load, time.monotonic()))
        except AssertionError as error:
            raise AssertionError(f"round {round_ + 1}: {error}") from None
    seconds = time.monotonic() - began
    return (
        f"{victim}: {rounds} rounds in {seconds:.0f} s, {load.total} requests so far; slowest: killed to SERVING "
        f"{slowest_start:.1f} s, SERVING to 100 % {worst:.2f} s"
    )


def held(mesh: Mesh, victims: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """(open descriptors, mapped KV regions) of each process that was never killed."""
    found = {}
    for name, process in mesh.supervisor.processes.items():
        if name not in victims:
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            found[name] = (len(os.listdir(f"/proc/{process.pid}/fd")), maps.count("/memfd:"))
    return found


async def without_leak(mesh: Mesh, before: dict[str, tuple[int, int]], victims: tuple[str, ...]) -> None:
    """Every page free, no slot open, and the survivors hold no more than before (a few descriptors may be new)."""
    await settled(mesh, *ENGINES, timeout_s=60)
    status = await mesh.status()
    assert all(reply is not None and reply.slots_open == 0 for reply in status.sidecars.values())

    def grown() -> dict[str, tuple[tuple[int, int], tuple[int, int]]]:
        now = held(mesh, victims)
        return {
            name: (before[name], now[name])
            for name in now
            if now[name][0] > before[name][0] + 3 or now[name][1] > before[name][1]
        }

    await until(lambda: not grown(), f"descriptors and mappings as before: {grown()}", timeout_s=60)


async def run(
    options: MeshOptions,
    load_of: dict[str, int],
    victims: tuple[str, ...],
    rounds: int,
    tell: Tell,
) -> None:
    async with mesh_up(options, cache=False, decode=2, settings=SETTINGS) as mesh:
        # Rounds follow one another closely on purpose: that is no crash loop, which would be restarted ever later.
        mesh.supervisor.stable_after_s = 0.0
        load = Load(mesh, timeout_s=120, **load_of)
        clients = asyncio.create_task(load.run())
        try:
            # Both decode workers have been asked, so the links between all sidecars exist before they are counted.
            await until(lambda: load.successes_since(0.0) >= 4 * load.clients, "the load to run", timeout_s=120)
            before = held(mesh, victims)
            for victim in victims:
                tell("measured", f"kill -9, {options.runner} engine: {await kill_rounds(mesh, load, victim, rounds)}")
                assert not clients.done(), f"the load ended: {clients}"
        finally:
            clients.cancel()
            await asyncio.gather(clients, return_exceptions=True)
        await without_leak(mesh, before, victims)
