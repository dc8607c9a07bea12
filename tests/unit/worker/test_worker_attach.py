"""Attach: what routers are told, when they come, go and come back. A fake router on a real gRPC server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from kvmesh.cli.ports import free_port
from kvmesh.engine.worker.attach import CacheMirror, RouterLinks, _Outbox
from kvmesh.engine.worker.resolve import resolve
from kvmesh.kv.hashing import block_hashes, request_seed
from kvmesh.kv.prefix import CacheEvent
from kvmesh.proto.v1 import engine_pb2 as pb
from kvmesh.proto.v1 import router_pb2, router_pb2_grpc
from kvmesh.rpc.limits import Deadline
from worker_harness import Gateway, prompt, running, sampling, until


class FakeRouter(router_pb2_grpc.RouterServicer):
    """Remembers what workers say; answers at once and each second."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.info: pb.WorkerInfo | None = None
        self.states: list[int] = []
        self.seen: list[str] = []
        self.loads: list[pb.WorkerLoad] = []
        self.blocks: set[bytes] = set()
        self.streams = 0

    async def Attach(self, requests: AsyncIterator[router_pb2.AttachRequest], context: Any) -> Any:
        self.streams += 1
        yield router_pb2.AttachResponse(router_id="r")
        async for message in requests:
            kind = message.WhichOneof("event")
            self.kinds.append(kind)
            if kind == "registration":
                self.info = message.registration
                self.states.append(message.registration.state)
            elif kind == "load":
                self.loads.append(message.load.load)
                self.seen.extend(message.load.seen_requests)
            else:
                if message.kv.reset:
                    self.blocks.clear()
                self.blocks -= set(message.kv.removed)
                self.blocks |= set(message.kv.stored)
            if len(self.kinds) % 5 == 0:
                yield router_pb2.AttachResponse(router_id="r")


class Served:
    """A fake router that listens."""

    def __init__(self, listen: str = "127.0.0.1:0") -> None:
        self.router = FakeRouter()
        self.server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        router_pb2_grpc.add_RouterServicer_to_server(self.router, self.server)
        self.port = self.server.add_insecure_port(listen)

    async def __aenter__(self) -> Served:
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop(0)


async def test_a_router_learns_registration_load_requests_and_blocks() -> None:
    async with Served() as served:
        router = served.router
        async with running(routers=[f"127.0.0.1:{served.port}"], report_interval_s=0.05) as worker:
            await until(lambda: router.loads, "no load report")
            assert router.kinds[0] == "registration"
            assert router.info is not None
            assert router.info.incarnation == worker.worker.incarnation
            assert router.info.address == worker.address
            assert router.info.state == pb.WORKER_STATE_SERVING
            async with Gateway(worker) as gateway:
                tokens = prompt(70)
                request = gateway.request(tokens, sampling=sampling(30))
                answer = await (await gateway.submit(request)).wait()
                await until(lambda: router.seen == [request.request_id], "the router is not told of the request")
                whole = tokens + answer.tokens[0]
                seed = request_seed(router.info.base_seed, "", "")
                hashes = set(block_hashes(seed, whole[:-1], 16))
                await until(lambda: hashes <= router.blocks, "blocks are missing")
                assert router.blocks == set(worker.core.cache.hashes())
            await worker.worker.finish_work(Deadline.after(5))
            await until(lambda: router.states[-1] == pb.WORKER_STATE_DRAINING, "the router is not told of the drain")
        assert router.streams == 1


async def test_a_router_that_comes_back_gets_everything_anew_and_serving_never_waits() -> None:
    port = free_port()
    async with Served(f"127.0.0.1:{port}") as first:
        async with (
            running(routers=[f"127.0.0.1:{port}"], report_interval_s=0.05) as worker,
            Gateway(worker) as gateway,
        ):
            await gateway.ask(prompt(70))
            await until(lambda: len(first.router.blocks) >= 4)
            await first.server.stop(0)
            alone = await gateway.ask(prompt(70, 3))
            assert alone.error is None
            async with Served(f"127.0.0.1:{port}") as second:
                await until(lambda: second.router.loads, "the worker does not attach again")
                assert second.router.kinds[0] == "registration"
                await until(lambda: second.router.blocks == set(worker.core.cache.hashes()), "blocks are missing")


async def test_a_router_that_never_was_costs_nothing() -> None:
    async with running(routers=["127.0.0.1:9", "no-such-host.invalid:1"]) as worker, Gateway(worker) as gateway:
        assert worker.server.ready
        assert (await gateway.ask(prompt(20))).error is None


async def test_each_resolved_address_gets_a_stream_of_its_own() -> None:
    async with Served() as a, Served() as b:
        addresses = f"ipv4:127.0.0.1:{a.port},127.0.0.1:{b.port}"
        async with running(routers=[addresses], report_interval_s=0.05):
            await until(lambda: a.router.loads and b.router.loads, "a replica is left out")


async def test_names_resolve_to_one_family_and_failures_to_none() -> None:
    assert await resolve("127.0.0.1:5") == {"127.0.0.1:5"}
    assert await resolve("[::1]:5") == {"[::1]:5"}
    assert await resolve("ipv4:10.0.0.1:1,10.0.0.2:2") == {"10.0.0.1:1", "10.0.0.2:2"}
    assert await resolve("unix:/x") == {"unix:/x"}
    local = await resolve("dns:///localhost:7")
    assert local is not None
    assert len(local) == 1
    assert await resolve("no-such-host.invalid:1") is None


async def test_a_name_that_does_not_resolve_leaves_the_other_routers_alone() -> None:
    async with Served() as served:
        targets = ["no-such-host.invalid:1", f"127.0.0.1:{served.port}"]
        async with running(routers=targets, report_interval_s=0.05):
            await until(lambda: served.router.loads, "one bad name keeps the worker from every router")


def test_a_router_too_slow_for_the_events_gets_a_snapshot_instead(monkeypatch: Any) -> None:
    monkeypatch.setattr("kvmesh.engine.worker.attach.MAX_PENDING_BLOCKS", 10)
    mirror = CacheMirror()
    outbox = _Outbox(mirror)

    def happen(kind: str, *numbers: int) -> None:
        event = CacheEvent(kind, tuple(n.to_bytes(16, "little") for n in numbers))
        mirror.apply(event)
        outbox.cache_event(event)

    assert [m.reset for m in outbox.take_kv()] == [True]
    happen("stored", 1, 2)
    happen("removed", 2)
    happen("stored", 2, 3)
    blocks: set[bytes] = {b"old"}
    for message in outbox.take_kv():
        assert not message.reset
        assert not (message.stored and message.removed)
        blocks = (blocks - set(message.removed)) | set(message.stored)
    assert blocks == {b"old", *(n.to_bytes(16, "little") for n in (1, 2, 3))}
    happen("stored", *range(4, 20))
    (snapshot,) = outbox.take_kv()
    assert snapshot.reset
    assert set(snapshot.stored) == set(mirror.hashes)
    assert outbox.take_kv() == []


async def test_close_ends_all_streams() -> None:
    async with Served() as served:
        async with running(routers=[f"127.0.0.1:{served.port}"], report_interval_s=0.05) as worker:
            await until(lambda: served.router.loads)
            links: RouterLinks = worker.worker.routers  # type: ignore[assignment]
            assert links.attached == {f"127.0.0.1:{served.port}": "r"}
            await links.close()
            names = {task.get_name() for task in asyncio.all_tasks()}
            assert not any(name.startswith("attach:") for name in names)
