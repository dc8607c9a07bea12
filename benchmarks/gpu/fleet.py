"""Real workers and sidecars as processes, without gateway and router: for clients that speak the worker API."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvmesh.cli.plan import ENGINE_HEALTH, MeshPlan
from kvmesh.cli.ports import free_port
from kvmesh.cli.process import ProcessSpec
from kvmesh.cli.supervisor import Supervisor

ROOT = Path(__file__).resolve().parents[2]
LOAD_S = 300.0


@dataclass(frozen=True)
class Engine:
    """A worker to start. flags: further settings, without `--`."""

    name: str
    role: str
    device: str
    flags: Sequence[str] = ()
    sidecar: bool = True


@dataclass
class Fleet:
    """What runs. addresses by engine name."""

    folder: Path
    token: str
    addresses: dict[str, str]
    supervisor: Supervisor
    _marks: dict[str, dict[str, float]] = field(default_factory=dict)

    def marks(self) -> dict[str, dict[str, float]]:
        """By request id: the named steps that it passed, on whichever worker, and when (time.monotonic)."""
        found: dict[str, dict[str, float]] = {}
        for path in self.folder.glob("*.steps"):
            for line in path.read_text(encoding="utf-8").splitlines():
                step, request_id, at = line.split(" ")
                found.setdefault(request_id, {})[step] = float(at)
        return found

    def logs(self, lines: int = 15) -> str:
        """The end of each process's log."""
        parts = [f"--- {name}\n{process.last_log_lines(lines)}" for name, process in self.supervisor.processes.items()]
        return "\n".join(parts)

    def keep_logs(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for path in (self.folder / "logs").glob("*.log"):
            shutil.copy(path, folder / path.name)


@contextlib.asynccontextmanager
async def running(engines: Sequence[Engine], model: str, transports: str, served: str) -> AsyncIterator[Fleet]:
    """All SERVING on entry, all gone on exit. Raises StartFailed with the failing process's last lines."""
    folder = Path(tempfile.mkdtemp(prefix="kvbench-"))
    try:
        token = secrets.token_urlsafe(32)
        (folder / "mesh.token").touch(mode=0o600)
        (folder / "mesh.token").write_text(token + "\n")
        (folder / "logs").mkdir()

        def spec(name: str, program: Sequence[str], flags: Sequence[str], serving: str) -> ProcessSpec:
            common = [
                f"--instance={name}", f"--ready-file={folder / (name + '.ready')}", "--metrics-listen=127.0.0.1:0",
                f"--mesh-token-file={folder / 'mesh.token'}", "--drain-timeout-s=5",
            ]  # fmt: skip
            return ProcessSpec(
                name=name, argv=(sys.executable, *program, *common, *flags), ready_file=folder / f"{name}.ready",
                serving=serving, start_timeout_s=LOAD_S, stop_timeout_s=20.0,
            )  # fmt: skip

        sidecars, workers = [], []
        for engine in engines:
            socket = folder / f"{engine.name}.sock"
            flags = [
                f"--role={engine.role}",
                f"--device={engine.device}",
                f"--model={model}",
                f"--served-name={served}",
            ]
            if engine.sidecar:
                flags.append(f"--sidecar-socket={socket}")
                beside = [f"--listen=127.0.0.1:{free_port()}", f"--engine-socket={socket}"]
                beside.append(f"--transports={transports}")
                sidecars.append(spec(f"kvtransfer-{engine.name}", ["-m", "services.kvtransfer"], beside, ""))
            service = "prefill" if engine.role == "prefill" else "decode"
            program = [str(Path(__file__).with_name("traced_worker.py")), service, str(folder / f"{engine.name}.steps")]
            workers.append(spec(engine.name, program, [*flags, *engine.flags], ENGINE_HEALTH))
        plan = MeshPlan((tuple(sidecars), tuple(workers)), "", "")
        supervisor = Supervisor(plan, folder / "logs")
        try:
            await supervisor.start()
            addresses = {}
            for engine in engines:
                ready = supervisor.processes[engine.name].read_ready()
                assert ready is not None
                addresses[engine.name] = ready.address
            yield Fleet(folder, token, addresses, supervisor)
        finally:
            await supervisor.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
