"""Traces of a gateway: what is exported of requests that are not sampled, and links between requests and attempts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from flight_world import Valkey, until, valkey_server
from gateway_fakes import MODEL
from gateway_world import World, end_of, next_event, rest, text_of
from kvmesh.errors import Internal
from kvmesh.proto.v1 import engine_pb2
from kvmesh.telemetry import names, tracing
from test_gateway_heal import TEXT, dies, play
from test_gateway_shared import Mesh, _flush

REQUEST = f"chat {MODEL}"
CALL = "kvmesh.v1.Inference/Chat"


@pytest.fixture
def sampled() -> Iterator[InMemorySpanExporter]:
    yield from exporting(1.0)


@pytest.fixture
def unsampled() -> Iterator[InMemorySpanExporter]:
    yield from exporting(0.0)


def exporting(ratio: float) -> Iterator[InMemorySpanExporter]:
    memory = InMemorySpanExporter()
    tracing.setup("test", ratio=ratio, exporter=memory)
    yield memory
    tracing.shutdown()


def found(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    """Spans of that name, in the order of their beginnings."""
    return sorted((s for s in exporter.get_finished_spans() if s.name == name), key=lambda s: s.start_time or 0)


def links(span: ReadableSpan) -> set[tuple[str, int, int]]:
    """(what the other is to it, trace id, span id) of each link."""
    return {
        (str((link.attributes or {})[names.ATTR_LINK]), link.context.trace_id, link.context.span_id)
        for link in span.links
    }


def to(what: str, span: ReadableSpan) -> tuple[str, int, int]:
    assert span.context is not None
    return what, span.context.trace_id, span.context.span_id


# --- sampling
async def test_a_good_request_that_is_not_sampled_leaves_nothing(world: World, unsampled: InMemorySpanExporter) -> None:
    await world.worker()
    await world.router()
    await world.start()
    assert text_of(await world.ask()) == "hello"
    await world.until(world.idle)
    assert unsampled.get_finished_spans() == ()


async def test_a_failed_request_is_exported_whole(world: World, unsampled: InMemorySpanExporter) -> None:
    worker = await world.worker()
    await world.router()
    await world.start(max_attempts=1)

    async def fails(request: engine_pb2.SubmitRequest) -> None:
        worker.end(request, Internal("it broke"))

    worker.on_submit = fails
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    await world.ask(metadata=(("traceparent", f"00-{trace_id}-b7ad6b7169203331-00"),))
    await world.until(lambda: found(unsampled, CALL))
    own = [s for s in unsampled.get_finished_spans() if f"{s.context.trace_id:032x}" == trace_id]
    have = {span.name for span in own}
    assert {CALL, REQUEST, names.SPAN_GATEWAY_TOKENIZE, names.SPAN_GATEWAY_PLACE, names.SPAN_GATEWAY_ATTEMPT} <= have
    (request,) = [span for span in own if span.name == REQUEST]
    assert request.attributes[names.ERROR_TYPE] == "INTERNAL"
    assert request.attributes[names.ATTR_KEPT] == "failed"
    assert "it broke" not in "".join(span.to_json() for span in own)


async def test_a_client_that_leaves_is_not_exported(world: World, unsampled: InMemorySpanExporter) -> None:
    worker = await world.worker(text=None)
    await world.router()
    await world.start()
    call = world.chat()
    (request,) = await worker.submits.wait()
    worker.tokens(request, [65])
    await next_event(call)
    call.cancel()
    await worker.aborts.wait()
    await world.until(world.idle)
    held: Any = tracing._held
    await world.until(lambda: not any(trace.spans for trace in held._traces.values()))
    assert found(unsampled, REQUEST) == []


async def test_a_refusal_is_exported_too(world: World, unsampled: InMemorySpanExporter) -> None:
    await world.worker()
    await world.router()
    await world.start()
    assert (await end_of(world.chat(model="nobody's"))).code() is grpc.StatusCode.NOT_FOUND
    await world.until(lambda: found(unsampled, CALL))


# --- attempts
async def lose_one(world: World) -> None:
    """One request, whose first worker dies in the middle of it."""
    first, second = await world.worker("first"), await world.worker("second")
    await world.router()
    await world.start()
    await world.until(lambda: len(world.gateway.fleet.links()) == 2)
    first.on_submit = play(first, until=3, then=dies(first))
    second.on_submit = play(second)
    assert text_of(await world.ask()) == TEXT


async def test_an_attempt_that_heals_names_the_one_that_was_lost(world: World, sampled: InMemorySpanExporter) -> None:
    await lose_one(world)
    await world.until(lambda: found(sampled, REQUEST))
    lost, healed = found(sampled, names.SPAN_GATEWAY_ATTEMPT)
    assert links(lost) == set()
    assert links(healed) == {to("replaces", lost)}
    assert (lost.attributes[names.ATTR_WORKER], healed.attributes[names.ATTR_WORKER]) == ("first", "second")


async def test_a_healed_request_is_exported_though_its_client_saw_nothing(
    world: World, unsampled: InMemorySpanExporter
) -> None:
    await lose_one(world)
    await world.until(lambda: found(unsampled, REQUEST))
    lost, healed = found(unsampled, names.SPAN_GATEWAY_ATTEMPT)
    assert links(healed) == {to("replaces", lost)}


# --- flights
@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    yield from valkey_server()


@pytest_asyncio.fixture
async def mesh(valkey: Valkey) -> AsyncIterator[Mesh]:
    await asyncio.to_thread(_flush, valkey)
    made = Mesh(valkey)
    try:
        yield await made.start()
    finally:
        await made.close()


@pytest.mark.parametrize("ratio", [1.0, 0.0])
async def test_followers_and_their_leader_name_each_other(mesh: Mesh, ratio: float) -> None:
    exporter = InMemorySpanExporter()
    tracing.setup("test", ratio=ratio, exporter=exporter)
    try:
        await follow_and_check(mesh, exporter, lambda: fail_all(mesh) if ratio == 0 else mesh.paced.allow())
    finally:
        tracing.shutdown()


def fail_all(mesh: Mesh) -> None:
    """Of what is not sampled only what fails can be looked at: the worker gives up on it."""
    for request in mesh.worker.submits.items:
        mesh.worker.end(request, Internal("it broke"))


async def follow_and_check(mesh: Mesh, exporter: InMemorySpanExporter, end: Callable[[], None]) -> None:
    """A leader, a follower beside it, one on another gateway; `end` ends all three."""
    leader = asyncio.create_task(rest(mesh.worlds[0].chat("same", request_id="leader")))
    await mesh.worker.submits.wait()
    streams = [leader]
    for number, name in ((0, "here"), (1, "elsewhere")):
        streams.append(asyncio.create_task(rest(mesh.worlds[number].chat("same", request_id=name))))
    await until(lambda: len(mesh.decider.flights) == 3 and len(mesh.flight(0)) == 2)
    mesh.paced.allow(5)
    await mesh.seen(1, 5)
    # The leader may know of its followers from Redis before it hears of their traces.
    await until(lambda: len(mesh.flight(0)._kin._span.links) == 2)
    end()
    await asyncio.wait(streams)
    await until(lambda: len(found(exporter, CALL)) >= 3)
    requests = {str(span.attributes[names.ATTR_REQUEST_ID]): span for span in found(exporter, REQUEST)}
    followers = {span.parent.span_id: span for span in found(exporter, names.SPAN_GATEWAY_FOLLOW)}
    led = requests["leader"]
    here, elsewhere = (followers[requests[name].context.span_id] for name in ("here", "elsewhere"))
    assert links(here) == links(elsewhere) == {to("leader", led)}
    assert links(led) == {to("follower", here), to("follower", elsewhere)}
