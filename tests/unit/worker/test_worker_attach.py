"""Attach: what routers are told, when they come, go and come back. A fake router on a real gRPC server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from kvmesh.cli.ports import free_port
from kvmesh.engine.worker import attach_events
from kvmesh.engine.worker.attach import RouterLinks
from kvmesh.engine.worker.attach_events import CacheMirror, Outbox
from kvmesh.kv.hashing import block_hashes, request_seed
from kvmesh.kv.prefix import CacheEvent
from kvmesh.proto.v1 import engine_pb2 as pb
from kvmesh.proto.v1 import router_pb2, router_pb2_grpc
from kvmesh.rpc.limits import Deadline
from kvmesh.rpc.resolve import resolve
from worker_harness import Gateway, prompt, running, sampling, until


def split(packed: bytes) -> set[bytes]:
    assert len(packed) % 16 == 0
    return {packed[at : at + 16] for at in range(0, len(packed), 16)}


def told(worker: Any) -> set[bytes]:
    """What a router should know of a worker's cache: blocks 8, 16, … of each chain."""
    depths: dict[bytes, int] = {}
    for block in worker.core.cache._blocks.values():
        depths[block.hash] = depths[block.parent.hash] + 1 if block.parent is not None else 1
    return {name for name, depth in depths.items() if depth % 8 == 0}


class FakeRouter(router_pb2_grpc.RouterServicer):
    """Remembers what workers say; answers at once and each second."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.info: pb.WorkerInfo | None = None
        self.states: list[int] = []
        self.seen: list[str] = []
        self.loads: list[pb.WorkerLoad] = []
        self.blocks: set[bytes] = set()
        self.numbers: list[tuple[int, int]] = []
        self.resets = 0
        self.lose = False
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
                    self.resets += 1
                self.blocks -= split(message.kv.removed_packed)
                self.blocks |= split(message.kv.stored_packed)
                self.numbers.append((message.kv.incarnation, message.kv.sequence))
                if self.lose:
                    self.lose = False
                    yield router_pb2.AttachResponse(router_id="r", need_snapshot=True)
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
                tokens = prompt(250)
                request = gateway.request(tokens, sampling=sampling(30))
                answer = await (await gateway.submit(request)).wait()
                await until(lambda: router.seen == [request.request_id], "the router is not told of the request")
                whole = tokens + answer.tokens[0]
                seed = request_seed(router.info.base_seed, "", "")
                hashes = block_hashes(seed, whole[:-1], 16)
                assert len(hashes) > 16
                await until(lambda: router.blocks == {hashes[7], hashes[15]}, "blocks are missing, or others came")
                assert router.blocks == told(worker)
                incarnation = worker.worker.incarnation
                assert router.numbers == [(incarnation, i + 1) for i in range(len(router.numbers))]
                assert router.resets == 1
                router.blocks.clear()
                router.lose = True
                await until(lambda: router.resets == 2, "no snapshot though the router asked")
                assert router.blocks == {hashes[7], hashes[15]}
                assert router.numbers == [(incarnation, i + 1) for i in range(len(router.numbers))]
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
            await gateway.ask(prompt(300))
            await until(lambda: len(first.router.blocks) == 2)
            await first.server.stop(0)
            alone = await gateway.ask(prompt(70, 3))
            assert alone.error is None
            async with Served(f"127.0.0.1:{port}") as second:
                await until(lambda: second.router.loads, "the worker does not attach again")
                assert second.router.kinds[0] == "registration"
                await until(lambda: second.router.blocks == told(worker) != set(), "blocks are missing")


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


def number(n: int) -> bytes:
    return n.to_bytes(16, "little")


class Publisher:
    """Mirror and outbox as a worker has them, and a router that does what the protocol says."""

    def __init__(self, incarnation: int = 7) -> None:
        self.clock = 100.0
        self.mirror = CacheMirror()
        self.outbox = Outbox(self.mirror, incarnation, lambda: self.clock)
        self.known: set[bytes] = set()
        self.last = 0

    def event(self, event: CacheEvent) -> None:
        hashes = self.mirror.apply(event)
        if hashes:
            self.outbox.changed(hashes, stored=event.kind == "stored")

    def deliver(self) -> list[router_pb2.KvEvents]:
        messages = self.outbox.take_kv()
        for message in messages:
            assert message.sequence == self.last + 1
            self.last = message.sequence
            if message.reset:
                self.known.clear()
            self.known -= split(message.removed_packed)
            self.known |= split(message.stored_packed)
        return messages


def test_of_a_chain_each_eighth_block_is_told_wherever_a_run_begins() -> None:
    for first in range(1, 20):
        publisher = Publisher()
        run = tuple(number(depth) for depth in range(first, first + 20))
        publisher.event(CacheEvent("stored", run, b"parent", first))
        assert list(publisher.mirror.hashes) == [number(d) for d in (8, 16, 24, 32) if first <= d < first + 20]


def test_a_batch_is_one_message_whatever_happened_in_it() -> None:
    publisher = Publisher()
    assert [m.reset for m in publisher.deliver()] == [True]

    def happen(kind: str, *numbers: int) -> None:
        publisher.event(CacheEvent(kind, tuple(map(number, numbers)), depth=8 if kind == "stored" else 0))

    for n in range(1, 5):
        happen("stored", n)
    publisher.deliver()
    happen("removed", 2, 3)
    happen("stored", 2)
    happen("stored", 5)
    happen("removed", 5)
    (message,) = publisher.deliver()
    assert (split(message.stored_packed), split(message.removed_packed)) == ({number(2)}, {number(3), number(5)})
    assert publisher.known == set(publisher.mirror.hashes) == {number(1), number(2), number(4)}


def test_a_quiet_cache_is_told_as_well() -> None:
    publisher = Publisher()
    assert len(publisher.deliver()) == 1
    assert publisher.deliver() == []
    publisher.clock += attach_events.KEEPALIVE_S
    (message,) = publisher.deliver()
    assert (message.reset, message.stored_packed, message.sequence) == (False, b"", 2)
    assert publisher.deliver() == []


def test_a_router_too_slow_for_the_events_gets_a_snapshot_in_parts(monkeypatch: Any) -> None:
    monkeypatch.setattr(attach_events, "MAX_PENDING_BLOCKS", 10)
    monkeypatch.setattr(attach_events, "BATCH_BLOCKS", 8)
    publisher = Publisher()
    publisher.deliver()
    publisher.known.add(b"o" * 16)
    for n in range(20):
        publisher.event(CacheEvent("stored", (number(n),), depth=8))
    parts = publisher.deliver()
    assert [(m.reset, m.more) for m in parts] == [(True, True), (False, True), (False, False)]
    assert publisher.known == set(publisher.mirror.hashes)
    assert publisher.deliver() == []


async def test_an_ended_stream_takes_nothing_from_its_successor() -> None:
    links = RouterLinks([], incarnation=7, info=pb.WorkerInfo, load=pb.WorkerLoad, open_channel=Any, interval_s=60.0)
    outbox = Outbox(links.mirror, 7)
    ended = links._messages(outbox, outbox.stream)
    assert [(await anext(ended)).WhichOneof("event") for _ in range(3)] == ["registration", "kv", "load"]
    asked = asyncio.ensure_future(anext(ended))
    await asyncio.sleep(0)  # It waits for the next report to be due.
    outbox.restart()
    outbox.seen("r")
    links.on_change()
    with pytest.raises(StopAsyncIteration):
        async with asyncio.timeout(10):
            await asked
    current = links._messages(outbox, outbox.stream)
    registration, kv, load = [await anext(current) for _ in range(3)]
    assert registration.HasField("registration")
    assert kv.kv.reset
    assert load.load.seen_requests == ["r"]


async def test_an_idle_worker_says_what_changed_and_little_else() -> None:
    load, now = pb.WorkerLoad(free_pages=3), 0.0
    links = RouterLinks([], incarnation=7, info=pb.WorkerInfo, load=lambda: load, open_channel=Any, interval_s=0.001)
    outbox = Outbox(links.mirror, 7, clock=lambda: now)
    messages = links._messages(outbox, outbox.stream)

    async def following() -> router_pb2.AttachRequest:
        return await asyncio.wait_for(anext(messages), 30.0)

    assert [(await following()).WhichOneof("event") for _ in range(3)] == ["registration", "kv", "load"]
    # Nothing changes: nothing comes, however many intervals go by.
    waiting = asyncio.ensure_future(following())
    assert not (await asyncio.wait([waiting], timeout=0.05))[0]
    load = pb.WorkerLoad(free_pages=2)
    assert (await waiting).load.load.free_pages == 2
    outbox.seen("request")
    assert list((await following()).load.seen_requests) == ["request"]
    # A cache's keepalive brings the load with it.
    now = attach_events.KEEPALIVE_S
    assert (await following()).WhichOneof("event") == "kv"
    assert (await following()).load.load.free_pages == 2
    await messages.aclose()


async def test_close_ends_all_streams() -> None:
    async with Served() as served:
        async with running(routers=[f"127.0.0.1:{served.port}"], report_interval_s=0.05) as worker:
            await until(lambda: served.router.loads)
            links: RouterLinks = worker.worker.routers  # type: ignore[assignment]
            assert links.attached == {f"127.0.0.1:{served.port}": "r"}
            await links.close()
            names = {task.get_name() for task in asyncio.all_tasks()}
            assert not any(name.startswith("attach:") for name in names)
