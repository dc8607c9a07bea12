"""Starts the processes of a local mesh in order, restarts what dies, stops everything.

Stages start one after another; a stage is up when each of its processes has bound its server. Readiness (SERVING) is
awaited at the end over all of them, because an engine, its sidecar, the router and the gateway become ready together.
A process that dies later is started again with growing pauses, without any manual act.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable
from pathlib import Path

from kvmesh.cli.health import wait_serving
from kvmesh.cli.plan import MeshPlan
from kvmesh.cli.process import Process, ProcessSpec, ReadyInfo

log = logging.getLogger(__name__)

RESTART_PAUSE_S = (0.05, 0.2, 0.5, 1.0, 2.0, 5.0)
STABLE_AFTER_S = 30.0
POLL_S = 0.02


class StartFailed(Exception):
    """A process did not come up; the message holds the end of its log."""


class Supervisor:
    """`await start()`, then `await stop()`. `on_event(name, what)` tells progress: started, up, died, restarted.

    `stable_after_s`: a process that ran this long before it died is restarted as if it had never died before.
    """

    def __init__(
        self,
        plan: MeshPlan,
        log_dir: Path,
        on_event: Callable[[str, str], None] | None = None,
        *,
        stable_after_s: float = STABLE_AFTER_S,
    ) -> None:
        self.plan = plan
        self.stable_after_s = stable_after_s
        self.log_dir = log_dir
        self.processes: dict[str, Process] = {}
        self.restarts: dict[str, int] = {}
        self._on_event = on_event or (lambda name, what: None)
        self._keepers: list[asyncio.Task[None]] = []
        self._stopping = False

    async def start(self) -> None:
        """Start all stages and wait until every service is SERVING. Raises StartFailed; the caller then stops."""
        for stage in self.plan.stages:
            for spec in stage:
                await self._launch(spec)
            await asyncio.gather(*(self._wait_bound(self.processes[spec.name]) for spec in stage))
        await asyncio.gather(*(self._wait_serving(spec) for spec in self.plan.specs if spec.serving))
        self._keepers = [asyncio.create_task(self._keep(spec), name=f"keep {spec.name}") for spec in self.plan.specs]

    async def _launch(self, spec: ProcessSpec) -> Process:
        process = await Process.start(spec, self.log_dir)
        self.processes[spec.name] = process
        self._on_event(spec.name, "started")
        return process

    async def _wait_bound(self, process: Process) -> ReadyInfo | None:
        if process.spec.ready_file is None:
            return None
        deadline = time.monotonic() + process.spec.start_timeout_s
        while time.monotonic() < deadline:
            info = process.read_ready()
            if info is not None:
                return info
            if not process.alive:
                raise StartFailed(self._why(process, f"ended with code {process.exited.result()}"))
            await asyncio.sleep(POLL_S)
        raise StartFailed(self._why(process, f"did not bind within {process.spec.start_timeout_s:.0f} s"))

    async def _wait_serving(self, spec: ProcessSpec) -> None:
        process = self.processes[spec.name]
        info = process.read_ready()
        if info is None:
            raise StartFailed(self._why(process, "lost its ready file"))
        ready = asyncio.create_task(wait_serving(info.address, spec.serving, spec.start_timeout_s))
        try:
            await asyncio.wait({ready, process.exited}, return_when=asyncio.FIRST_COMPLETED)
            if not process.alive:
                raise StartFailed(self._why(process, f"ended with code {process.exited.result()}"))
            if not ready.result():
                raise StartFailed(self._why(process, f"not SERVING after {spec.start_timeout_s:.0f} s"))
        finally:
            ready.cancel()
        self._on_event(spec.name, "up")

    def _why(self, process: Process, what: str) -> str:
        return f"{process.spec.name} {what}; the end of {process.log}:\n{process.last_log_lines()}"

    async def _keep(self, spec: ProcessSpec) -> None:
        """Restart `spec` for as long as the mesh runs."""
        failures = 0
        while True:
            process = self.processes[spec.name]
            started = time.monotonic()
            code = await asyncio.shield(process.exited)
            if self._stopping:
                return
            failures = 0 if time.monotonic() - started > self.stable_after_s else failures + 1
            self._on_event(spec.name, f"died ({code})")
            log.warning("%s died with code %s; restarting", spec.name, code)
            await asyncio.sleep(RESTART_PAUSE_S[min(failures, len(RESTART_PAUSE_S)) - 1] if failures else 0.0)
            self.restarts[spec.name] = self.restarts.get(spec.name, 0) + 1
            await self._launch(spec)
            self._on_event(spec.name, "restarted")

    def hurry(self) -> None:
        """A second SIGTERM to everything that still runs: services then end at once instead of draining."""
        for process in self.processes.values():
            if process.alive:
                process.signal(signal.SIGTERM)

    async def stop(self) -> None:
        """Stop stages in reverse order, each at once: gateway and engines drain while the sidecars still run."""
        self._stopping = True
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for stage in reversed(self.plan.stages):
            running = [self.processes[spec.name] for spec in stage if spec.name in self.processes]
            await asyncio.gather(*(process.stop() for process in running), return_exceptions=True)
        for spec in self.plan.specs:
            if spec.ready_file is not None:
                with contextlib.suppress(OSError):
                    spec.ready_file.unlink()
