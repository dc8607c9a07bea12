"""A gateway in this process, with fake workers and routers around it, and what tests do with its streams."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc.aio

from gateway_fakes import MODEL, WAIT_S, FakeRouter, FakeWorker
from kvmesh.config import GatewaySettings
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.proto.v1 import inference_pb2_grpc
from kvmesh.rpc import MeshChannel, RpcServer, open_channel
from kvmesh.rpc.service import ServiceContext
from kvmesh.rpc.tasks import BackgroundTasks
from services.gateway.app import Gateway


class World:
    """Everything a test starts; all of it ends with the test."""

    def __init__(self) -> None:
        self.workers: list[FakeWorker] = []
        self.routers: list[FakeRouter] = []
        self.gateway: Gateway
        self.server: RpcServer
        self.stub: Any
        self._channels: list[MeshChannel] = []
        self._tasks: BackgroundTasks | None = None

    async def worker(self, *args: Any, **kwargs: Any) -> FakeWorker:
        worker = await FakeWorker(*args, **kwargs).start()
        self.workers.append(worker)
        return worker

    async def router(self, workers: Sequence[FakeWorker] | None = None) -> FakeRouter:
        router = await FakeRouter(self.workers if workers is None else workers).start()
        self.routers.append(router)
        return router

    async def start(
        self, *, ready: bool = True, static: bool = False, gateway: dict[str, Any] | None = None, **settings: Any
    ) -> World:
        """Start the gateway; with `static` it gets the workers' addresses instead of the routers'.

        `gateway`: more arguments of its constructor.
        """
        given: dict[str, Any] = {
            "listen": "127.0.0.1:0",
            "model": MODEL,
            "heartbeat_s": 3.0,
            "drain_timeout_s": 1.0,
            # Two shared cores: a router that is merely slow to be scheduled must not look dead.
            "route_timeout_ms": 3000,
        }
        if static:
            given["workers"] = [worker.info.address for worker in self.workers]
        else:
            given["routers"] = [router.address for router in self.routers]
        config = GatewaySettings(**({"empty_fleet_grace_s": 0} | given | settings))
        self.server = RpcServer(config)
        self._tasks = BackgroundTasks()
        context = ServiceContext(config, self.server, self.server.auth, self._tasks)
        self.gateway = Gateway(context, **(gateway or {}))
        await self.server.start()
        await self.gateway.started()
        if ready:
            await self.until(lambda: self.server.ready)
        self.stub = inference_pb2_grpc.InferenceStub(self.channel())
        return self

    def channel(self, **kwargs: Any) -> MeshChannel:
        channel = open_channel(self.server.address, **kwargs)
        self._channels.append(channel)
        return channel

    async def until(self, condition: Any) -> None:
        """Wait until a condition of the gateway's own state holds (it has no event of its own)."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.005)

    async def stop_gateway(self) -> None:
        await self.server.close()
        await self.gateway.close()
        assert self._tasks is not None
        await self._tasks.close()

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()
        if self._tasks is not None:
            await self.stop_gateway()
        for fake in (*self.workers, *self.routers):
            await fake.stop()

    # --- client side
    def chat(self, text: str = "hi", *, model: str = MODEL, **fields: Any) -> Any:
        timeout = fields.pop("timeout", 30.0)
        metadata = fields.pop("metadata", None)
        sampling = fields.pop("sampling", None)
        if isinstance(sampling, dict):
            sampling = pb.SamplingParams(**sampling)
        messages = fields.pop("messages", None) or [pb.ChatMessage(role="user", content=text)]
        request = pb.ChatRequest(model=model, messages=messages, sampling=sampling, **fields)
        return self.stub.Chat(request, timeout=timeout, metadata=metadata)

    async def ask(self, *args: Any, **kwargs: Any) -> list[pb.GenerateEvent]:
        """All events of one chat."""
        return await rest(self.chat(*args, **kwargs))

    def idle(self) -> bool:
        """True when nothing of any request is left in the gateway."""
        links = [member.link for member in self.gateway.fleet.members() if member.link is not None]
        return (
            not len(self.gateway.registry)
            and not len(self.gateway.queue)
            and not any(len(link.demux) or link.seats.promised for link in links)
        )


def kinds(events: Sequence[pb.GenerateEvent]) -> list[str]:
    """Names of the events, repeated deltas once."""
    names = [str(event.WhichOneof("event")) for event in events]
    return [name for index, name in enumerate(names) if index == 0 or name != "delta" or names[index - 1] != "delta"]


def text_of(events: Sequence[pb.GenerateEvent], choice: int = 0) -> str:
    return "".join(event.delta.text for event in events if event.HasField("delta") and event.delta.choice == choice)


async def next_event(call: Any) -> pb.GenerateEvent:
    """The next event of a stream that is not at its end."""
    async with asyncio.timeout(WAIT_S):
        response = await call.read()
    assert response is not grpc.aio.EOF
    event: pb.GenerateEvent = response.event
    return event


async def rest(call: Any) -> list[pb.GenerateEvent]:
    """The remaining events of a stream that ends well."""
    events = []
    async with asyncio.timeout(WAIT_S):
        while (response := await call.read()) is not grpc.aio.EOF:
            events.append(response.event)
    return events


async def end_of(call: Any) -> grpc.aio.AioRpcError:
    """The error a call ends with."""
    try:
        async with asyncio.timeout(WAIT_S):
            while await call.read() is not grpc.aio.EOF:
                pass
    except grpc.aio.AioRpcError as exc:
        return exc
    raise AssertionError("the call ended well")
