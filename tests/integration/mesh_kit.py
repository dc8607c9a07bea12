"""A whole mesh of real processes for tests: `mesh_up(options)` starts one, `Mesh` looks into it."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import psutil

from kvmesh.cli.plan import MeshOptions
from kvmesh.cli.state import MeshState
from kvmesh.cli.status import MeshStatus, read_status
from kvmesh.cli.supervisor import Supervisor
from kvmesh.cli.up import running_mesh
from kvmesh.client import Client
from kvmesh.proto.v1 import engine_pb2, engine_pb2_grpc

# A router that waits for a processor is no dead router: a request placed without it has no cache and no Report.
PATIENT = {"gateway.route_timeout_ms": "10000"}
SCRIPTED = MeshOptions(
    runner="scripted",
    model="scripted",
    gateway_port=0,
    embedder="none",
    threads=1,
    settings={
        "prefill.scripted_step_ms": "2",
        "decode.scripted_step_ms": "2",
        "prefill.num_pages": "256",
        "decode.num_pages": "256",
        **PATIENT,
    },
)


class Mesh:
    """A live mesh under test."""

    def __init__(self, supervisor: Supervisor, state: MeshState) -> None:
        self.supervisor = supervisor
        self.state = state
        self.token = (("x-kvmesh-mesh-token", Path(state.token_file).read_text().splitlines()[0]),)

    @property
    def gateway(self) -> str:
        return self.state.gateway

    @property
    def model(self) -> str:
        return self.state.model

    def client(self, **kwargs: Any) -> Client:
        return Client(self.gateway, **kwargs)

    def pid(self, name: str) -> int:
        return self.supervisor.processes[name].pid

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid(name), number)

    def log(self, name: str) -> str:
        return self.supervisor.processes[name].log.read_text(errors="replace")

    def address(self, name: str) -> str:
        ready = self.supervisor.processes[name].read_ready()
        assert ready is not None, f"{name} is not up"
        return ready.address

    def rss(self, name: str) -> int:
        return int(psutil.Process(self.pid(name)).memory_info().rss)

    async def status(self) -> MeshStatus:
        return await read_status(self.state.router, self.state.token_file)

    async def load(self, name: str) -> engine_pb2.WorkerLoad:
        async with grpc.aio.insecure_channel(self.address(name)) as channel:
            reply = await engine_pb2_grpc.EngineStub(channel).GetLoad(
                engine_pb2.GetLoadRequest(), timeout=5, metadata=self.token
            )
            return reply.load


async def until(
    condition: Callable[[], Awaitable[Any] | Any], what: str, timeout_s: float = 90.0, every_s: float = 0.05
) -> Any:
    """Poll `condition` until it is truthy; fails with `what` after the timeout. Errors of a service that restarts are
    taken as "not yet"."""
    deadline = time.monotonic() + timeout_s
    last: Any = None
    while time.monotonic() < deadline:
        try:
            last = condition()
            if inspect.isawaitable(last):
                last = await last
            if last:
                return last
        except (grpc.aio.AioRpcError, AssertionError, FileNotFoundError) as error:
            last = error
        await asyncio.sleep(every_s)
    raise AssertionError(f"{what}: not within {timeout_s} s (last: {last!r})")


async def settled(mesh: Mesh, *names: str, timeout_s: float = 90.0) -> None:
    """Until nothing runs on these workers and every page is free (or evictable: the prefix cache alone holds it)."""
    loads: dict[str, engine_pb2.WorkerLoad] = {}

    async def idle() -> bool:
        for name in names:
            loads[name] = await mesh.load(name)
        return all(
            load.running == 0 and load.waiting == 0 and load.transferring == 0 and load.free_pages == load.total_pages
            for load in loads.values()
        )

    try:
        await until(idle, f"all pages of {names} free", timeout_s=timeout_s)
    except AssertionError as error:
        status = await mesh.status()
        sidecars = {name: str(reply).replace("\n", " ") for name, reply in status.sidecars.items()}
        shown = {name: str(load).replace("\n", " ") for name, load in loads.items()}
        raise AssertionError(f"{error}; loads {shown}; sidecars {sidecars}") from None


@contextlib.asynccontextmanager
async def mesh_up(options: MeshOptions = SCRIPTED, **changes: Any) -> AsyncIterator[Mesh]:
    """Start a mesh; on exit every process of it is gone."""
    settings = {**options.settings, **changes.pop("settings", {})}
    async with running_mesh(replace(options, settings=settings, **changes), state=False) as (supervisor, state):
        mesh = Mesh(supervisor, state)
        pids = [process.pid for process in supervisor.processes.values()]
        yield mesh
        pids += [process.pid for process in supervisor.processes.values()]
    left = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
    assert not left, f"processes left behind: {left}"


async def answer(mesh: Mesh, text: str, **sampling: Any) -> tuple[str, Any]:
    """Ask once; returns (text, Finished). Fails on an error event."""
    out = []
    sampling.setdefault("max_tokens", 16)
    sampling.setdefault("temperature", 0.0)
    sampling.setdefault("seed", 7)
    async with (
        mesh.client() as client,
        client.chat([{"role": "user", "content": text}], model=mesh.model, **sampling) as stream,
    ):
        async for event in stream:
            if event.HasField("delta"):
                out.append(event.delta.text)
            elif event.HasField("finished"):
                return "".join(out), event.finished
            elif event.HasField("error"):
                raise AssertionError(f"error event: {event.error}")
    raise AssertionError("no terminal event")
