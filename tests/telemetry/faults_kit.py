"""Faults that are made on a live mesh and last until they are taken back, and rules that need not wait for minutes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from kvmesh.cli.process import Process, ProcessSpec
from mesh_kit import Mesh, until
from prometheus_kit import RULES, Prometheus

Alert = tuple[str] | tuple[str, str]
"""Name of an alert, and which job's it is where it has that label."""

HOLD = "2s"
RANGE, LONG_RANGE = "10s", "30s"


def shortened(folder: Path) -> Path:
    """A folder with the shipped rules in which every `for:` is HOLD, every range RANGE, and those of hours LONG_RANGE.
    Nothing else is changed: neither a threshold nor what is looked at."""
    (folder / "rules").mkdir(parents=True)
    for path in sorted(RULES.glob("*.yml")):
        text = re.sub(r"\bfor: \w+", f"for: {HOLD}", path.read_text())
        text = re.sub(r"\[\d+h\]", f"[{LONG_RANGE}]", text)
        text = re.sub(r"\[\d+m(:\d+s)?\]", lambda found: f"[{RANGE}{':1s' if found[1] else ''}]", text)
        (folder / "rules" / path.name).write_text(text)
    return folder


class Faults:
    """What dies stays dead while it is held: the supervisor waits with its restart."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._held: dict[str, asyncio.Event] = {}
        self._launch = mesh.supervisor._launch
        mesh.supervisor._launch = self._launch_later  # type: ignore[method-assign]

    async def _launch_later(self, spec: ProcessSpec) -> Process:
        if spec.name in self._held:
            await self._held[spec.name].wait()
        return await self._launch(spec)

    @contextlib.asynccontextmanager
    async def killed(self, name: str) -> AsyncIterator[None]:
        """SIGKILL; at the end it is started again, and up."""
        self._held[name] = asyncio.Event()
        process = self.mesh.supervisor.processes[name]
        try:
            process.signal(signal.SIGKILL)
            await process.exited
            yield
        finally:
            self._held.pop(name).set()
        await self._back(process)

    async def _back(self, before: Process) -> None:
        name = before.spec.name

        def up() -> bool:
            now = self.mesh.supervisor.processes[name]
            return now is not before and (now.spec.ready_file is None or now.read_ready() is not None)

        await until(up, f"{name} is back")

    @contextlib.asynccontextmanager
    async def stopped(self, *names: str) -> AsyncIterator[None]:
        """SIGSTOP; at the end they go on."""
        processes = [self.mesh.supervisor.processes[name] for name in names]
        try:
            for process in processes:
                process.signal(signal.SIGSTOP)
            yield
        finally:
            for process in processes:
                process.signal(signal.SIGCONT)

    @contextlib.asynccontextmanager
    async def programmed(self, name: str, path: Path, **program: int) -> AsyncIterator[None]:
        """The engine is started again with this program in the file that its `scripted_faults` names; at the end once
        more, without (who comes next need not wait for it)."""
        try:
            await self._back(await self._again(name, path, program))
            yield
        finally:
            await self._again(name, path, {})

    async def _again(self, name: str, path: Path, program: dict[str, int]) -> Process:
        await asyncio.to_thread(path.write_text, json.dumps(program))
        process = self.mesh.supervisor.processes[name]
        process.signal(signal.SIGKILL)
        return process


def _selector(name: str, job: str) -> str:
    return f'ALERTS{{alertname="{name}",alertstate="firing"' + (f',job="{job}"' if job else "") + "}"


class Alerts:
    """What Prometheus says. `follow` tells it of what is up now."""

    def __init__(self, server: Prometheus, follow: Callable[[], None]) -> None:
        self._server = server
        self._follow = follow
        self.fired: set[str] = set()

    async def firing(self, name: str, job: str = "") -> bool:
        """Whether an alert of this name fires now, of this job ("" = of any or none)."""
        return bool(await self._server.query(_selector(name, job)))

    async def fire(self, *alerts: Alert) -> None:
        """Until each has fired, in whatever order: some do for a while only. `all_quiet` waits for their end."""
        await asyncio.gather(*(self._fires(*alert) for alert in alerts))

    async def _fires(self, name: str, job: str = "") -> None:
        await until(lambda: self.firing(name, job), f"{name} of {job or 'all'} fires", timeout_s=60.0, every_s=0.2)
        self.fired.add(_selector(name, job))

    async def quiet(self, *alerts: Alert) -> None:
        """Until none fires: the fault is still to come, and a machine that is much too busy may look like one."""
        for alert in alerts:
            await until(lambda alert=alert: self._none(*alert), f"{alert} is quiet", timeout_s=60.0, every_s=0.2)

    async def _none(self, name: str, job: str = "") -> bool:
        return not await self.firing(name, job)

    async def all_quiet(self) -> None:
        """Until nothing that `fires` saw does any more."""
        assert self.fired
        left = sorted(self.fired)

        async def none_left() -> bool:
            nonlocal left
            self._follow()
            left = [selector for selector in left if await self._server.query(selector)]
            return not left

        try:
            await until(none_left, "quiet", timeout_s=60.0, every_s=0.5)
        except AssertionError as error:
            raise AssertionError(f"{error}: {left}") from None
