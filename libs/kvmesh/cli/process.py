"""One child process of the local mesh: how it is started, how it tells that it is up, how it ends.

A child gets its own session, so that Ctrl-C in the terminal reaches `kvmesh up` alone and the order of stopping is
ours. If `kvmesh up` itself is killed, the kernel sends the child SIGTERM (PR_SET_PDEATHSIG): no orphan is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

# Asks for SIGTERM at the parent's death, then becomes the service. A program of its own instead of a `preexec_fn`:
# Python code between fork and exec is not safe in a process that runs gRPC's threads.
_WRAPPER = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True)
class ProcessSpec:
    """What to run. `ready_file` is written by the service once its server is bound; `serving` is the health name that
    must be SERVING before the mesh counts as up ("" = the ready file is enough)."""

    name: str
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    ready_file: Path | None = None
    serving: str = ""
    start_timeout_s: float = 60.0
    stop_timeout_s: float = 20.0


@dataclass(frozen=True)
class ReadyInfo:
    """What a service wrote to its ready file."""

    pid: int
    address: str
    metrics: str


class Process:
    """A running child. `exited` resolves to its return code."""

    def __init__(self, spec: ProcessSpec, process: asyncio.subprocess.Process, log: Path) -> None:
        self.spec = spec
        self.log = log
        self._process = process
        self.exited: asyncio.Task[int] = asyncio.create_task(process.wait(), name=f"wait {spec.name}")

    @classmethod
    async def start(cls, spec: ProcessSpec, log_dir: Path) -> Process:
        """Fork and exec; output goes to `<log_dir>/<name>.log`."""
        log = log_dir / f"{spec.name}.log"
        if spec.ready_file is not None:
            spec.ready_file.unlink(missing_ok=True)
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-c", _WRAPPER, str(os.getpid())),
                *spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **spec.env},
                start_new_session=True,
            )
        return cls(spec, process, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    def read_ready(self) -> ReadyInfo | None:
        """The ready file of THIS process, or None while it is not there."""
        if self.spec.ready_file is None:
            return None
        try:
            data = json.loads(self.spec.ready_file.read_text())
        except (FileNotFoundError, ValueError):
            return None
        if data.get("pid") != self.pid:
            return None
        return ReadyInfo(int(data["pid"]), str(data.get("address", "")), str(data.get("metrics") or ""))

    def last_log_lines(self, count: int = 12) -> str:
        """The end of its log, for an error message."""
        try:
            with self.log.open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - 16384))
                lines = file.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-count:])

    def signal(self, number: int) -> None:
        """Send a signal to the child alone; a dead child is fine."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def stop(self) -> int:
        """SIGTERM, then SIGKILL to the whole session after the spec's stop timeout; returns the exit code."""
        if self.alive:
            self.signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(asyncio.shield(self.exited), self.spec.stop_timeout_s)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
        return await self.exited
