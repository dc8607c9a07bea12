"""Whole gateways that share generations: one submission for identical requests, and every client's own terms."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from flight_world import LEASE_MS, Valkey, until, valkey_server
from gateway_fakes import EOS, MODEL, WAIT_S, FakeRouter, FakeWorker
from gateway_world import World, end_of, next_event, rest, text_of
from kvmesh.errors import InvalidArgument
from kvmesh.proto.v1 import engine_pb2, router_pb2
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.store.client import RedisStore
from kvmesh.store.keys import FlightKeys
from services.gateway.flights.view import View
from services.gateway.generation import Generation
from services.gateway.request import Request

TEXT = "The quick brown fox jumps over the lazy dög – twice. " * 3


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    yield from valkey_server()


class PacedWorker:
    """Makes a fake worker give `TEXT`, as far as `allow` says, from wherever a submission goes on."""

    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker
        self.ids = [*TEXT.encode(), EOS]
        self.failure: Exception | None = None
        self._allowed = 0
        self._change = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        worker.on_submit = self._submitted

    def allow(self, tokens: int | None = None) -> None:
        self._allowed = len(self.ids) if tokens is None else tokens
        change, self._change = self._change, asyncio.Event()
        change.set()

    async def _submitted(self, request: engine_pb2.SubmitRequest) -> None:
        task = asyncio.create_task(self._run(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, request: engine_pb2.SubmitRequest) -> None:
        at = len(request.token_ids) - request.prompt_len
        choices = range(request.first_choice, request.first_choice + request.sampling.best_of)
        while at < len(self.ids):
            while at < min(self._allowed, len(self.ids)):
                last = at + 1 == len(self.ids)
                fields: dict[str, Any] = {"finish_reason": pb.FINISH_REASON_STOP, "stop_token_id": EOS} if last else {}
                for choice in choices:
                    self.worker.tokens(request, [self.ids[at]], at, choice, **fields)
                at += 1
            if at < len(self.ids):
                await self._change.wait()
        self.worker.end(request, completion_tokens=at)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()


class FlightRouter:
    """What a router decides about flights, for a fake one."""

    def __init__(self, router: FakeRouter, redis: RedisStore) -> None:
        self.router = router
        self._redis = redis
        self.flights: list[router_pb2.Flight] = []
        router.decide = self._decide

    async def _decide(self, request: router_pb2.RouteRequest) -> router_pb2.RouteResponse:
        response = self.router.placement(request)
        if request.no_flight:
            response.cache = "bypass"
            return response
        digest = hashlib.sha256(b"".join(m.SerializeToString() for m in request.messages)).hexdigest()
        keys = FlightKeys(digest[:32], digest)

        async def ask(client: Any) -> router_pb2.Flight:
            there = await client.get(keys.pointer)
            if there is not None:
                token, flight_id, gateway_id = there.decode().split(" ")
                return router_pb2.Flight(flight_id=flight_id, gateway_id=gateway_id, token=int(token), key=keys.key)
            token = await client.incr(keys.counter)
            flight_id = f"{digest[:8]}-{token}"
            value = f"{token} {flight_id} {request.gateway_id}"
            if not await client.set(keys.pointer, value, px=int(WAIT_S * 1000), nx=True):
                return await ask(client)
            return router_pb2.Flight(flight_id=flight_id, gateway_id=request.gateway_id, token=token, key=keys.key)

        flight = await self._redis.run("ask", ask, router_pb2.Flight())
        self.flights.append(flight)
        if flight.gateway_id == request.gateway_id and all(flight != other for other in self.flights[:-1]):
            response.lead.CopyFrom(flight)
            response.cache = "miss"
            return response
        decision_id = f"decision-{request.request_id}"
        return router_pb2.RouteResponse(follow=flight, model=MODEL, decision_id=decision_id, cache="follow")


class Mesh:
    """Three gateways, one worker, one router, one Redis."""

    def __init__(self, valkey: Valkey) -> None:
        self._valkey = valkey
        self.worlds = [World() for _ in range(3)]
        self.redis = RedisStore(valkey.url, timeout_s=5.0)
        self.clock_ms = 1_000_000

    async def start(self) -> Mesh:
        self._watch = asyncio.create_task(self.redis.watch())
        await self.redis.checked.wait()
        base = self.worlds[0]
        self.worker = await base.worker()
        self.paced = PacedWorker(self.worker)
        self.router = await base.router()
        self.decider = FlightRouter(self.router, self.redis)
        for world in self.worlds:
            world.routers = base.routers
            await world.start(redis_url=self._valkey.url)
            await world.until(lambda w=world: w.gateway.flights.enabled)
            self._store(world).clock_ms = self.clock_ms
        return self

    @staticmethod
    def _store(world: World) -> Any:
        return world.gateway.flights._store

    async def lapse(self) -> None:
        """A lease goes by."""
        self.clock_ms += LEASE_MS + 1
        for world in self.worlds:
            self._store(world).clock_ms = self.clock_ms
        keys = FlightKeys.parse(self.decider.flights[0].key)
        assert keys is not None
        await self.redis.run("lapse", lambda client: client.delete(keys.pointer), None)

    async def kill(self, number: int) -> None:
        """A gateway's process is gone: its tasks, its connections to Redis, and its streams, without a word."""
        world = self.worlds[number]
        world.gateway.redis._ok = False
        assert world._tasks is not None
        await world._tasks.close()
        await world.stop_gateway()
        world._tasks = None

    def flight(self, number: int) -> Any:
        """The one flight of a gateway."""
        (flight,) = self.worlds[number].gateway.flights._flights.values()
        return flight

    async def seen(self, number: int, tokens: int) -> None:
        await until(lambda: len(self.worlds[number].gateway.flights) and self.flight(number).log.tokens >= tokens)

    async def close(self) -> None:
        self.paced.close()
        for world in self.worlds[1:]:
            world.routers = []
        for world in reversed(self.worlds):
            await world.close()
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)
        await self.redis.close()


@pytest_asyncio.fixture
async def mesh(valkey: Valkey) -> AsyncIterator[Mesh]:
    await asyncio.to_thread(_flush, valkey)
    made = Mesh(valkey)
    try:
        yield await made.start()
    finally:
        await made.close()


def _flush(valkey: Valkey) -> None:
    import redis

    redis.Redis(port=valkey.port).flushall()


async def test_fifty_identical_requests_over_three_gateways(mesh: Mesh) -> None:
    calls = [mesh.worlds[number % 3].chat("same", request_id=f"r{number}") for number in range(50)]
    streams = [asyncio.create_task(rest(call)) for call in calls]
    await mesh.worker.submits.wait()
    await until(lambda: len(mesh.decider.flights) == 50)
    mesh.paced.allow(20)
    for number in range(3):
        await mesh.seen(number, 20)
    late = asyncio.create_task(rest(mesh.worlds[1].chat("same")))
    mesh.paced.allow()
    async with asyncio.timeout(WAIT_S):
        answers = await asyncio.gather(*streams, late)
    assert len(mesh.worker.submits.items) == 1
    assert {text_of(events) for events in answers} == {TEXT}
    ids = [events[0].accepted.request_id for events in answers[:50]]
    assert ids == [f"r{number}" for number in range(50)]
    assert len({events[0].accepted.seed for events in answers}) == 1
    cache = sorted(events[-1].finished.served.cache for events in answers)
    assert cache == ["follow"] * 50 + ["miss"]
    usages = {(e[-1].finished.usage.prompt_tokens, e[-1].finished.usage.completion_tokens) for e in answers}
    assert len(usages) == 1
    assert usages.pop()[1] == len(TEXT.encode()) + 1
    for events in answers:
        served = events[-1].finished.served
        assert served.decode_worker == "decode-0"
        assert served.total_ms >= served.ttft_ms >= 0
    reports = await mesh.router.reports.wait(51)
    (leading,) = [report for report in reports if report.HasField("flight")]
    assert leading.flight == mesh.decider.flights[0]
    assert leading.answer.choices[0].text == TEXT
    assert (leading.answer.model, leading.answer.revision) == (MODEL, "rev-1")
    assert not any(report.HasField("answer") for report in reports if report is not leading)
    assert {report.code for report in reports} == {0}
    for world in mesh.worlds:
        await world.until(world.idle)


async def test_the_leaders_client_leaves_and_the_last_one_frees_the_worker(mesh: Mesh) -> None:
    leader = mesh.worlds[0].chat("same")
    await mesh.worker.submits.wait()
    near, far = mesh.worlds[0].chat("same"), mesh.worlds[1].chat("same")
    mesh.paced.allow(9)
    for call in (leader, near, far):
        assert (await next_event(call)).HasField("accepted")
    await mesh.seen(1, 9)
    leader.cancel()
    await until(lambda: len(mesh.flight(0)) == 1)
    mesh.paced.allow(30)
    await mesh.seen(1, 30)
    near.cancel()
    await until(lambda: len(mesh.flight(0)) == 0)
    mesh.paced.allow(40)
    await mesh.seen(1, 40)
    assert not mesh.worker.aborts.items, "somebody follows elsewhere"
    far.cancel()
    (abort,) = await mesh.worker.aborts.wait()
    assert abort.request_id == mesh.worker.submits.items[0].request_id
    (report,) = [r for r in await mesh.router.reports.wait(3) if r.HasField("flight")]
    assert report.code == grpc.StatusCode.CANCELLED.value[0]
    for world in mesh.worlds:
        await world.until(world.idle)


async def test_the_leaders_gateway_dies_and_one_follower_takes_over(mesh: Mesh) -> None:
    leader = mesh.worlds[0].chat("same")
    (first,) = await mesh.worker.submits.wait()
    calls = [mesh.worlds[1 + number % 2].chat("same") for number in range(6)]
    mesh.paced.allow(57)
    streams = [asyncio.create_task(rest(call)) for call in calls]
    for number in (1, 2):
        await mesh.seen(number, 57)
    await mesh.kill(0)
    with contextlib.suppress(grpc.aio.AioRpcError):
        await end_of(leader)
    await mesh.lapse()
    first, second = await mesh.worker.submits.wait(2)
    assert list(second.token_ids[second.prompt_len :]) == mesh.paced.ids[:57]
    assert second.sampling.seed == first.sampling.seed
    mesh.paced.allow()
    async with asyncio.timeout(WAIT_S):
        answers = await asyncio.gather(*streams)
    assert {text_of(events) for events in answers} == {TEXT}
    assert len(mesh.worker.submits.items) == 2, "one takeover"
    tokens = {events[-1].finished.usage.completion_tokens for events in answers}
    assert tokens == {len(mesh.paced.ids)}
    reports = await mesh.router.reports.wait(6)
    (leading,) = [report for report in reports if report.HasField("flight")]
    assert leading.flight.token > mesh.decider.flights[0].token
    assert leading.answer.choices[0].text == TEXT


def expire(world: World, request_id: str) -> None:
    """The total limit of a request runs out."""
    ((_, request),) = [item for item in world.gateway.registry._running.items() if item[0][1] == request_id]
    request._expire("total")  # type: ignore[attr-defined]


async def test_a_lost_worker_is_no_matter_of_those_who_follow(mesh: Mesh) -> None:
    leader = mesh.worlds[0].chat("same")
    await mesh.worker.submits.wait()
    near, far = mesh.worlds[0].chat("same"), mesh.worlds[1].chat("same")
    mesh.paced.allow(20)
    for call in (leader, near, far):
        assert (await next_event(call)).HasField("accepted")
    await mesh.seen(1, 20)
    mesh.worker.break_stream()
    _, again = await mesh.worker.submits.wait(2)
    assert len(again.token_ids) - again.prompt_len == 20
    mesh.paced.allow()
    for call in (leader, near, far):
        events = await rest(call)
        assert text_of(events) == TEXT
        assert events[-1].finished.usage.completion_tokens == len(mesh.paced.ids)
    assert len(mesh.worker.submits.items) == 2


@pytest.mark.parametrize(("best_of", "replayed"), [(2, 41), (3, 0)])
async def test_several_choices_are_taken_over_too(mesh: Mesh, best_of: int, replayed: int) -> None:
    sampling = {"n": 2, "best_of": best_of, "temperature": 1.0, "seed": 3}
    leader = mesh.worlds[0].chat("same", sampling=sampling)
    await mesh.worker.submits.wait()
    call = mesh.worlds[1].chat("same", sampling=sampling)
    mesh.paced.allow(41)
    assert (await next_event(call)).HasField("accepted")
    # Of best_of nothing is shown before its end: it is computed anew, and is the same.
    await mesh.seen(1, 2 * replayed)
    await mesh.kill(0)
    with contextlib.suppress(grpc.aio.AioRpcError):
        await end_of(leader)
    await mesh.lapse()
    submits = await mesh.worker.submits.wait(2 if best_of == 3 else 3)
    assert [len(submit.token_ids) - submit.prompt_len for submit in submits[1:]] == [replayed] * (len(submits) - 1)
    # Readers were told the revision, be there output or not.
    assert {route.pinned_revision for route in mesh.router.routes.items if route.no_flight} == {"rev-1"}
    mesh.paced.allow()
    events = await rest(call)
    assert [text_of(events, choice) for choice in (0, 1)] == [TEXT, TEXT]
    assert events[-1].finished.usage.completion_tokens == 2 * len(mesh.paced.ids)


async def test_a_followers_limits_and_abort_are_its_own(mesh: Mesh) -> None:
    leader = asyncio.create_task(rest(mesh.worlds[0].chat("same")))
    await mesh.worker.submits.wait()
    mesh.paced.allow(5)
    short = mesh.worlds[1].chat("same", request_id="short")
    aborted = mesh.worlds[0].chat("same", request_id="mine")
    stays = asyncio.create_task(rest(mesh.worlds[1].chat("same")))
    for call in (aborted, short):
        while not (await next_event(call)).HasField("delta"):
            pass
    expire(mesh.worlds[1], "short")
    abort = await mesh.worlds[0].stub.Abort(pb.AbortRequest(request_id="mine"), timeout=WAIT_S)
    assert abort.found
    assert (await rest(aborted))[-1].error.reason == "CANCELLED"
    assert (await rest(short))[-1].error.reason == "DEADLINE_EXCEEDED"
    assert not mesh.worker.aborts.items
    mesh.paced.allow()
    assert text_of(await leader) == text_of(await stays) == TEXT
    assert len(mesh.worker.submits.items) == 1


async def test_the_leaders_own_limit_ends_it_alone(mesh: Mesh) -> None:
    leader = mesh.worlds[0].chat("same", request_id="first", limits=pb.Limits(total_ms=60_000))
    (submit,) = await mesh.worker.submits.wait()
    assert submit.total_ms > 100_000, "others may have longer limits"
    follower = asyncio.create_task(rest(mesh.worlds[1].chat("same")))
    mesh.paced.allow(5)
    await mesh.seen(1, 5)
    assert (await next_event(leader)).HasField("accepted")
    expire(mesh.worlds[0], "first")
    assert (await rest(leader))[-1].error.reason == "DEADLINE_EXCEEDED"
    mesh.paced.allow()
    assert text_of(await follower) == TEXT
    assert len(mesh.worker.submits.items) == 1


async def test_an_error_of_the_request_itself_ends_all(mesh: Mesh) -> None:
    calls = [mesh.worlds[number % 2].chat("same") for number in range(2)]
    (submit,) = await mesh.worker.submits.wait()
    mesh.paced.allow(5)
    await mesh.seen(0, 5)
    await mesh.seen(1, 5)
    mesh.worker.end(submit, InvalidArgument("this prompt"))
    for call in calls:
        assert (await rest(call))[-1].error.reason == "INVALID_ARGUMENT"
    assert len(mesh.worker.submits.items) == 1


async def test_a_gateway_that_stops_hands_over(mesh: Mesh) -> None:
    leader = mesh.worlds[0].chat("same")
    await mesh.worker.submits.wait()
    follower = asyncio.create_task(rest(mesh.worlds[1].chat("same")))
    mesh.paced.allow(31)
    await mesh.seen(1, 31)
    draining = asyncio.create_task(mesh.worlds[0].server.drain(mesh.worlds[0].gateway.drain))
    _, second = await mesh.worker.submits.wait(2)
    assert (await rest(leader))[-1].error.reason == "UNAVAILABLE"
    await draining
    assert list(second.token_ids[second.prompt_len :]) == mesh.paced.ids[:31]
    mesh.paced.allow()
    assert text_of(await follower) == TEXT


async def test_without_redis_requests_are_served_as_before(mesh: Mesh) -> None:
    for world in mesh.worlds:
        world.gateway.redis._ok = False
    mesh.paced.allow()
    answers = await asyncio.gather(*(mesh.worlds[number % 3].ask("same") for number in range(6)))
    assert {text_of(events) for events in answers} == {TEXT}
    assert len(mesh.worker.submits.items) == 6
    assert all(route.no_flight for route in mesh.router.routes.items)


async def test_a_request_that_is_over_is_gone_without_the_collector(mesh: Mesh) -> None:
    def alive() -> bool:
        return any(type(each) in (Request, View, Generation) for each in gc.get_objects())

    world = mesh.worlds[0]
    mesh.paced.allow()
    await rest(world.chat("warm"))
    gc.collect()
    gc.disable()
    try:
        calls = [world.chat("same") for _ in range(3)]
        assert (await next_event(calls[0])).HasField("accepted")
        assert alive()
        await asyncio.gather(*map(rest, calls))
        await world.until(world.idle)
        await until(lambda: not alive())
    finally:
        gc.enable()
