"""A mesh of two of everything, whose services are replaced under load as an orchestrator does it: SIGTERM and time.

Gateways and routers as a Deployment does: the replacement comes first, at another address. An engine and its sidecar as
a StatefulSet does: both are told at the same moment, and come back under the same name as another incarnation.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx

from kvmesh.cli.health import wait_serving
from kvmesh.cli.plan import MeshOptions, plan_mesh
from kvmesh.cli.ports import free_port
from kvmesh.cli.process import Process, ProcessSpec
from kvmesh.cli.status import MeshStatus, read_status, wait_fleet
from kvmesh.cli.up import embedded_redis
from kvmesh.proto.v1 import engine_pb2, engine_pb2_grpc
from mesh_kit import until

SERVING = {
    "gateway": "kvmesh.v1.Inference",
    "router": "kvmesh.v1.Router",
    "prefill": "kvmesh.v1.Engine",
    "decode": "kvmesh.v1.Engine",
    "kvtransfer": "kvmesh.v1.KvTransfer",
}
ENGINES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
UP_S = 120.0
# What any end may take, the work in flight included.
END_S = 120.0
LOOK_S = 0.1


def with_flags(spec: ProcessSpec, **flags: object) -> ProcessSpec:
    """The same with other values of some settings."""
    given = {f"--{name.replace('_', '-')}": value for name, value in flags.items()}
    kept = [part for part in spec.argv if part.partition("=")[0] not in given]
    return dataclasses.replace(spec, argv=(*kept, *(f"{flag}={value}" for flag, value in given.items())))


class Rolling:
    """The mesh. `addresses` of gateways and routers name those to come too, as a name in DNS would in time."""

    def __init__(self, folder: Path, options: MeshOptions, *, replacements: int = 2) -> None:
        self.folder = folder
        self.token_file = folder / "mesh.token"
        self.token_file.touch(mode=0o600)
        self.token_file.write_text(secrets.token_urlsafe(32) + "\n")
        self.token = (("x-kvmesh-mesh-token", self.token_file.read_text().strip()),)
        redis, url = embedded_redis(folder)
        options = dataclasses.replace(
            options, routers=2, prefill=2, decode=2, gateway_port=free_port(), http_port=free_port(), playground=False
        )
        plan = plan_mesh(options, folder, free_port=free_port, redis=redis, redis_url=url)
        specs = {spec.name: spec for spec in plan.specs}
        count = 2 + replacements
        self.routers = [f"127.0.0.1:{free_port()}" for _ in range(count)]
        self.gateways = [f"127.0.0.1:{free_port()}" for _ in range(count)]
        self.http = [f"127.0.0.1:{free_port()}" for _ in range(count)]
        routers = ",".join(self.routers)
        self.specs: dict[str, ProcessSpec] = {}
        for name, spec in specs.items():
            if name.startswith("router"):
                continue
            if name == "gateway":
                for index in range(count):
                    self._add(
                        spec,
                        f"gateway-{index}",
                        listen=self.gateways[index],
                        http_listen=self.http[index],
                        routers=routers,
                    )
            elif name in ENGINES:
                self._add(spec, name, routers=routers)
            else:
                self.specs[name] = spec
        for index in range(count):
            self._add(specs["router"], f"router-{index}", listen=self.routers[index])
        self.running: dict[str, Process] = {}
        self.ended: list[tuple[str, int, float]] = []
        """Name, exit status and seconds to the end of each process that was told to stop."""

    def _add(self, spec: ProcessSpec, name: str, **flags: object) -> None:
        ready = self.folder / f"{name}.ready"
        changed = with_flags(spec, instance=name, ready_file=ready, **flags)
        self.specs[name] = dataclasses.replace(changed, name=name, ready_file=ready)

    def change(self, name: str, **flags: object) -> None:
        """Settings of the next process of that name."""
        self.specs[name] = with_flags(self.specs[name], **flags)

    # --- processes
    async def start(self, *names: str) -> None:
        """Start, and wait until each of them is SERVING; those without health are not waited for."""
        log_dir = self.folder / "logs"
        log_dir.mkdir(exist_ok=True)
        for name in names:
            self.running[name] = await Process.start(self.specs[name], log_dir)
        await asyncio.gather(*(self._up(name) for name in names if self.specs[name].ready_file is not None))

    async def _up(self, name: str) -> None:
        process = self.running[name]

        def bound() -> bool:
            if not process.alive:
                raise RuntimeError(f"{name} ended: {process.last_log_lines()}")
            return process.read_ready() is not None

        await until(bound, f"{name} is bound", timeout_s=UP_S)
        service = SERVING[name.partition("-")[0]]
        assert await wait_serving(self.address(name), service, UP_S), f"{name} serves: {process.last_log_lines()}"

    async def stop(self, *names: str, limit_s: float = END_S) -> None:
        """SIGTERM to all at the same moment; each ends by itself, in time, with status 0."""
        began = time.monotonic()
        for name in names:
            self.running[name].signal(signal.SIGTERM)
        for name in names:
            process = self.running.pop(name)
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + limit_s):
                    code = await asyncio.shield(process.exited)
            except TimeoutError:
                raise AssertionError(f"{name} does not end: {process.last_log_lines(40)}") from None
            self.ended.append((name, code, time.monotonic() - began))
            assert code == 0, f"{name} ended with status {code}: {process.last_log_lines(40)}"

    async def replace(self, old: str, new: str) -> None:
        """Another one first, then the end of the old one."""
        await self.start(new)
        await self.stop(old)

    async def restart(self, *names: str) -> None:
        """The end first, of all together, then the same names again."""
        await self.stop(*names)
        await self.start(*names)

    async def kill(self) -> None:
        """Whatever is left, at the end of a test that failed."""
        for process in self.running.values():
            process.signal(signal.SIGKILL)
        await asyncio.gather(*(process.exited for process in self.running.values()), return_exceptions=True)

    def log(self, name: str) -> str:
        path = self.folder / "logs" / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def address(self, name: str) -> str:
        ready = self.running[name].read_ready()
        assert ready is not None, f"{name} is not up"
        return ready.address

    # --- looking into it
    async def status(self) -> MeshStatus:
        """As the first living router has it."""
        name = next(name for name in self.running if name.startswith("router"))
        return await read_status(self.address(name), str(self.token_file))

    async def complete(self) -> None:
        """Until every living router knows every engine."""
        for name in [each for each in self.running if each.startswith("router")]:
            missing = await wait_fleet(self.address(name), str(self.token_file), set(ENGINES), UP_S)
            assert not missing, f"{name} does not know {missing}"

    async def load(self, name: str) -> engine_pb2.WorkerLoad:
        async with grpc.aio.insecure_channel(self.address(name)) as channel:
            stub = engine_pb2_grpc.EngineStub(channel)
            reply = await stub.GetLoad(engine_pb2.GetLoadRequest(), timeout=5, metadata=self.token)
            return reply.load


@contextlib.asynccontextmanager
async def rolling_mesh(options: MeshOptions, **changes: Any) -> AsyncIterator[Rolling]:
    """All of it SERVING; on exit no process is left."""
    # A short path: those of Unix sockets may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="kvmesh-roll-") as folder:
        mesh = Rolling(Path(folder), options, **changes)
        try:
            await mesh.start(*(["redis"] if "redis" in mesh.specs else []))
            sidecars = [f"kvtransfer-{name}" for name in ENGINES]
            await mesh.start("router-0", "router-1", *sidecars, *ENGINES, "gateway-0", "gateway-1")
            await mesh.complete()
            yield mesh
        finally:
            await mesh.kill()


class Endpoints:
    """Which HTTP addresses a balancer sends new connections to: those that were ready when it last looked."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._all = list(addresses)
        self.ready: list[str] = []
        self._turn = 0

    async def follow(self) -> None:
        """Until cancelled."""
        async with httpx.AsyncClient(timeout=5, trust_env=False) as client:
            while True:
                # At once: what takes long here, gateways wait for (drain_delay_s) before they close connections.
                answers = await asyncio.gather(*(self._is_ready(client, address) for address in self._all))
                self.ready = [address for address, ready in zip(self._all, answers, strict=True) if ready]
                await asyncio.sleep(LOOK_S)

    @staticmethod
    async def _is_ready(client: httpx.AsyncClient, address: str) -> bool:
        try:
            return (await client.get(f"http://{address}/readyz")).status_code == 200
        except httpx.TransportError:
            return False

    def next(self) -> str:
        """Where the next connection goes."""
        self._turn += 1
        if not self.ready:
            raise httpx.ConnectError("no endpoint is ready")
        return self.ready[self._turn % len(self.ready)]


class Balanced(httpx.AsyncBaseTransport):
    """Sends each request to the next endpoint, on a connection that is kept where the gateway keeps it. A connection
    that cannot be made is tried once more, at another endpoint; nothing else is tried again."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        self._inner = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=None, max_keepalive_connections=64))
        self.reconnects = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            return await self._send(request)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            self.reconnects += 1
            return await self._send(request)

    async def _send(self, request: httpx.Request) -> httpx.Response:
        host, _, port = self._endpoints.next().rpartition(":")
        request.url = request.url.copy_with(host=host, port=int(port))
        return await self._inner.handle_async_request(request)

    async def aclose(self) -> None:
        await self._inner.aclose()


SOAK = bool(os.environ.get("KVMESH_SOAK"))
