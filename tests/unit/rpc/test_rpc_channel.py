"""Channels: balancing, reconnection, trace context, error mapping."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter

import grpc
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from kvmesh import errors
from kvmesh.cli.ports import free_port
from kvmesh.rpc import raising
from kvmesh.rpc.channel import resolve_target
from kvmesh.telemetry import names, tracing
from rpc_echo import SERVICE, Text


@pytest.fixture
def spans():
    exporter = InMemorySpanExporter()
    tracing.setup("test", exporter=exporter)
    yield exporter
    tracing.shutdown()


async def test_a_trace_joins_client_server_and_the_next_hop(mesh, spans) -> None:
    async def inner(request, context):
        with tracing.span(names.SPAN_ROUTER_ROUTE):
            return Text(value=tracing.current_trace_id())

    far = await mesh.serve(unary=inner)

    async def outer(request, context):
        yield await mesh.echo(far).unary(Text())

    near = await mesh.serve(stream=outer)
    with tracing.span(names.SPAN_CLIENT_REQUEST, kind=SpanKind.CLIENT):
        trace_id = tracing.current_trace_id()
        seen = [m.value async for m in mesh.echo(near).stream(Text(), timeout=60)]
    await asyncio.wait_for(near._state.idle.wait(), 60)
    assert seen == [trace_id]

    by_name = {span.name: span for span in spans.get_finished_spans()}
    chain = [names.SPAN_CLIENT_REQUEST, f"{SERVICE}/Stream", f"{SERVICE}/Unary", names.SPAN_ROUTER_ROUTE]
    assert set(by_name) == set(chain)
    for parent, child in itertools.pairwise(chain):
        assert by_name[child].parent.span_id == by_name[parent].context.span_id
        assert by_name[child].context.trace_id == by_name[parent].context.trace_id
    assert by_name[chain[1]].kind is SpanKind.SERVER
    assert by_name[chain[1]].attributes[names.RPC_STATUS] == "OK"


async def test_concurrent_calls_keep_their_traces_apart(mesh, spans) -> None:
    async def inner(request, context):
        await asyncio.sleep(0)
        return Text(value=tracing.current_trace_id())

    server = await mesh.serve(unary=inner)
    echo = mesh.echo(server)

    async def ask() -> bool:
        with tracing.span(names.SPAN_CLIENT_REQUEST):
            return (await echo.unary(Text())).value == tracing.current_trace_id()

    assert all(await asyncio.gather(*[ask() for _ in range(20)]))
    # A call from outside any span starts a trace of its own.
    first, second = (await echo.unary(Text())).value, (await echo.unary(Text())).value
    assert first
    assert first != second


async def test_failed_and_cancelled_calls_end_their_spans(mesh, spans) -> None:
    started = asyncio.Event()

    async def fail(request, context):
        if request.value:
            raise errors.NotFound("secret name")
        started.set()
        await asyncio.Event().wait()

    server = await mesh.serve(unary=fail)
    echo = mesh.echo(server)
    with pytest.raises(errors.NotFound), raising():
        await echo.unary(Text(value="x"))
    call = echo.unary(Text())
    await asyncio.wait_for(started.wait(), 60)
    call.cancel()
    await asyncio.wait_for(server._state.idle.wait(), 60)
    failed = {s.attributes[names.ERROR_TYPE]: s for s in spans.get_finished_spans()}
    assert set(failed) == {"NOT_FOUND", "CANCELLED"}
    assert not any("secret" in str(s.events) + str(s.status.description) for s in failed.values())


async def test_without_export_the_trace_context_still_travels(mesh) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

    async def inner(request, context):
        return Text(value=tracing.traceparent())

    server = await mesh.serve(unary=inner)
    with tracing.use_span(tracing.start_span("outside", parent=parent)):
        answer = await mesh.echo(server).unary(Text())
    assert answer.value == parent


async def test_calls_spread_over_all_addresses_and_survive_one(mesh) -> None:
    counts: Counter[str] = Counter()

    def named(name):
        async def unary(request, context):
            counts[name] += 1
            return Text()

        return unary

    first, second = await mesh.serve(unary=named("a")), await mesh.serve(unary=named("b"))
    channel = mesh.channel([first.address, second.address])
    assert channel.address == f"ipv4:{first.address},{second.address}"
    call = channel.unary_unary(f"/{SERVICE}/Unary", request_serializer=Text.SerializeToString)
    async with asyncio.timeout(60):
        while len(counts) < 2 or sum(counts.values()) < 20:
            await call(Text())
    assert min(counts.values()) >= 5
    await first.close()
    counts.clear()
    answered = 0
    async with asyncio.timeout(60):
        while answered < 10:
            try:
                with raising():
                    await call(Text())
                answered += 1
            except errors.Unavailable:
                pass
    assert counts["b"] == 10


async def test_a_restarted_server_is_found_again_soon(mesh) -> None:
    async def unary(request, context):
        return Text(value="up")

    first = await mesh.serve(unary=unary, settings={"listen": f"127.0.0.1:{free_port()}"})
    channel = mesh.channel(first)
    call = channel.unary_unary(f"/{SERVICE}/Unary", Text.SerializeToString, Text.FromString)
    await call(Text())
    await first.close()
    with pytest.raises(errors.Unavailable), raising():
        await call(Text())
    await mesh.serve(unary=unary, settings={"listen": first.address})
    assert (await call(Text(), wait_for_ready=True, timeout=60)).value == "up"


async def test_wait_ready_gives_up_in_time(mesh) -> None:
    channel = mesh.channel("127.0.0.1:1")
    with pytest.raises(errors.Unavailable, match=r"127\.0\.0\.1:1"):
        await channel.wait_ready(0.1)


async def test_generated_stubs_see_a_grpc_channel(mesh) -> None:
    assert isinstance(mesh.channel("127.0.0.1:1"), grpc.aio.Channel)


def test_targets() -> None:
    assert resolve_target("h:1") == "h:1"
    assert resolve_target(["dns:///h:1"]) == "dns:///h:1"
    assert resolve_target("127.0.0.1:1,127.0.0.1:2") == "ipv4:127.0.0.1:1,127.0.0.1:2"
    assert resolve_target(["[::1]:1", "[::1]:2"]) == "ipv6:[::1]:1,[::1]:2"
    for bad in ([], ["a:1", "b:2"]):
        with pytest.raises(ValueError, match="address"):
            resolve_target(bad)
