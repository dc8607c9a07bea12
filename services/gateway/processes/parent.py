"""The parent of several gateway processes: it starts, watches, restarts and ends them, and serves their metrics.

It runs no gRPC. Each process is started by exec, in a session of its own, with a line to us (`child.Line`): a process
whose line ends has lost us and drains.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvmesh.config import GatewaySettings, split_host_port
from kvmesh.errors import KvmeshError
from kvmesh.rpc.service import write_ready_file
from kvmesh.rpc.tasks import cancel_and_wait
from kvmesh.telemetry import metrics
from kvmesh.telemetry.multiprocess import VARIABLE as METRICS_VARIABLE
from kvmesh.telemetry.multiprocess import Together
from services.gateway.processes.child import Child
from services.gateway.processes.ports import HeldPort
from services.gateway.processes.runtime import METRICS, runtime_folder

log = logging.getLogger(__name__)

RESTART_PAUSE_S = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0)
STABLE_AFTER_S = 30.0
"""A process that lived so long before it died is started again as if it had never died before."""

KILL_AFTER_S = 10.0
"""After the time for draining: a process that still lives then hangs."""


class Process:
    """One place among the processes, whoever fills it now."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.pid = 0
        self.up = self.ready = False
        self.running: asyncio.subprocess.Process | None = None
        self.writer: asyncio.StreamWriter | None = None

    def signal(self, number: int) -> None:
        """To whoever is there."""
        if self.running is not None and self.running.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.running.send_signal(number)

    def say(self, word: str) -> None:
        """A word on its line."""
        if self.writer is not None and not self.writer.is_closing():
            self.writer.write(word.encode() + b"\n")


class Parent:
    """`await run()` until told to stop; returns the exit status."""

    def __init__(self, settings: GatewaySettings, argv: Sequence[str]) -> None:
        """`argv`: the flags that we were started with; the processes get the same."""
        self._settings = settings
        self._argv = list(argv)
        self._processes = [Process(index) for index in range(settings.processes)]
        self._stopping = asyncio.Event()
        self._failed = asyncio.Event()
        self._all_up = asyncio.Event()
        self._all_ready = False

    async def run(self) -> int:
        """Hold the ports, run the processes, end them."""
        settings = self._settings
        exporter: metrics.MetricsServer | None = None
        with contextlib.ExitStack() as stack:
            try:
                runtime = stack.enter_context(runtime_folder())
                shared = {
                    name: stack.enter_context(contextlib.closing(HeldPort(address))).address
                    for name, address in (
                        ("listen", settings.listen),
                        ("http_listen", settings.http_listen),
                        ("client_listen", settings.tls.client_listen),
                    )
                    if address
                }
                self._together = Together(
                    runtime / METRICS, lambda: [process.pid for process in self._processes if process.pid]
                )
                exporter = metrics.start_http(settings.metrics_listen, self._together.registry)
            except (KvmeshError, OSError) as exc:
                log.error("cannot run: %s", exc)
                return 1
            self._handle_signals()
            keepers = [
                asyncio.create_task(self._keep(process, runtime, shared), name=f"process {process.index}")
                for process in self._processes
            ]
            try:
                return await self._watch(keepers, exporter.address if exporter is not None else "", runtime)
            finally:
                await cancel_and_wait(*keepers)
                if exporter is not None:
                    exporter.close()

    def _pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid]

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._told_to_stop)

    def _told_to_stop(self) -> None:
        """The first time all drain; the second time they hurry."""
        self._stopping.set()
        for process in self._processes:
            process.signal(signal.SIGTERM)

    async def _watch(self, keepers: list[asyncio.Task[int]], metrics_address: str, runtime: Path) -> int:
        up, stop, failed = (asyncio.create_task(event.wait()) for event in (self._all_up, self._stopping, self._failed))
        ready_file = self._settings.ready_file
        try:
            await asyncio.wait({up, stop, failed}, return_when=asyncio.FIRST_COMPLETED)
            if up.done() and ready_file is not None and not stop.done():
                write_ready_file(ready_file, self._ready_info(metrics_address, runtime))
            await asyncio.wait({stop, failed}, return_when=asyncio.FIRST_COMPLETED)
            if not self._stopping.is_set():
                self._told_to_stop()
            limit_s = self._settings.drain_delay_s + self._settings.drain_timeout_s + KILL_AFTER_S
            _, late = await asyncio.wait(keepers, timeout=limit_s)
            for process in self._processes if late else ():
                log.error("process %d does not end; killed", process.index)
                process.signal(signal.SIGKILL)
            codes = await asyncio.gather(*keepers)
            return 1 if self._failed.is_set() or any(codes) else 0
        finally:
            await cancel_and_wait(up, stop, failed)
            if ready_file is not None and up.done():
                ready_file.unlink(missing_ok=True)

    def _ready_info(self, metrics_address: str, runtime: Path) -> dict[str, Any]:
        """As one process writes it, and `processes`: what each of ours wrote."""
        each = [json.loads((runtime / f"{process.index}.ready").read_text()) for process in self._processes]
        own = {"pid": os.getpid(), "instance": self._settings.instance_name, "metrics": metrics_address}
        return {**each[0], **own, "processes": each}

    # --- one process
    async def _keep(self, process: Process, runtime: Path, shared: dict[str, str]) -> int:
        """Run a process, and its successors; returns the exit status of the last."""
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            started = loop.time()
            code = await self._once(process, Child(process.index, runtime, -1, **shared))
            if self._stopping.is_set():
                return code
            if not self._all_up.is_set():
                # It cannot start: neither could its successor, and the reason is in the log.
                self._failed.set()
                return code
            failures = 0 if code == 0 or loop.time() - started > STABLE_AFTER_S else failures + 1
            pause = RESTART_PAUSE_S[min(failures, len(RESTART_PAUSE_S) - 1)]
            log.warning("process %d ended with status %d; starting another in %g s", process.index, code, pause)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stopping.wait()
            if self._stopping.is_set():
                return code

    async def _once(self, process: Process, child: Child) -> int:
        ours, theirs = socket.socketpair()
        with theirs:
            child = replace(child, control=theirs.fileno())
            running = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "services.gateway"),
                *self._argv,
                stdin=asyncio.subprocess.DEVNULL,
                env={**os.environ, **child.environment(), METRICS_VARIABLE: str(child.runtime / METRICS)},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        process.running, process.pid = running, running.pid
        reader, process.writer = await asyncio.open_connection(sock=ours)
        listener = asyncio.create_task(self._listen(process, reader), name=f"line {process.index}")
        if self._stopping.is_set():
            process.signal(signal.SIGTERM)
        try:
            return await running.wait()
        finally:
            if running.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    running.kill()
            await cancel_and_wait(listener)
            process.writer.close()
            process.writer, process.up, process.ready, process.pid = None, False, False, 0
            self._together.retire(running.pid)

    async def _listen(self, process: Process, reader: asyncio.StreamReader) -> None:
        if self._all_ready:
            process.say("all")
        while line := await reader.readline():
            word = line.decode().strip()
            process.up = process.up or word == "up"
            process.ready = word == "ready" if word in ("ready", "unready") else process.ready
            if all(other.up for other in self._processes):
                self._all_up.set()
            if not self._all_ready and all(other.ready for other in self._processes):
                self._all_ready = True
                for other in self._processes:
                    other.say("all")


def child_settings(settings: GatewaySettings, child: Child) -> GatewaySettings:
    """Of one process, from those that all were started with."""
    update: dict[str, Any] = {
        "listen": child.listen,
        "http_listen": child.http_listen,
        "metrics_listen": "",
        "ready_file": child.ready_file,
        "tls": settings.tls.model_copy(update={"client_listen": child.client_listen}),
    }
    if settings.instance:
        update["instance"] = f"{settings.instance}-{child.index}"
    if settings.peer_listen:
        host, port = split_host_port(settings.peer_listen)
        update["peer_listen"] = f"{host}:{port + child.index if port else 0}"
    return settings.model_copy(update=update)
