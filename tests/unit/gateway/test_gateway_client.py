"""The Python client against a gateway."""

from __future__ import annotations

import asyncio
import threading
from itertools import pairwise
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway_world import World
from kvmesh.client import Client, SyncClient
from kvmesh.errors import InvalidArgument, NotFound, Unavailable, WorkerLost
from kvmesh.telemetry import names, tracing


async def hold(request: Any) -> None:
    """Accept and send nothing."""


async def test_chat(world: World) -> None:
    await world.worker(text="héllo")
    await world.start(static=True)
    async with Client(world.server.address) as client:
        stream = client.chat([{"role": "user", "content": "hi"}, ("assistant", "x")], request_id="r", max_tokens=50)
        kinds = [event.WhichOneof("event") async for event in stream]
        assert kinds[0] == "accepted"
        assert kinds[-1] == "finished"
        assert stream.text == "héllo"
        assert stream.accepted is not None
        assert stream.accepted.request_id == "r"
        assert stream.finished is not None
        assert stream.finished.served.decode_worker == "decode-0"
        assert stream.ttft_s is not None
        assert await client.generate("abc", n=2).result() == "héllo"
        assert await client.generate([1, 2, 3]).result() == "héllo"
        (model,) = await client.models()
        assert model == await client.model("auto")
        assert not await client.abort("nothing")


async def test_refusals_are_our_errors(world: World) -> None:
    await world.worker()
    await world.start(static=True)
    async with Client(world.server.address) as client:
        with pytest.raises(InvalidArgument) as raised:
            await client.chat([("user", "x")], top_p=2.0).result()
        assert raised.value.details["field"] == "top_p"
        with pytest.raises(NotFound):
            await client.chat([("user", "x")], model="nope").result()
        with pytest.raises(NotFound):
            await client.model("nope")
        for wrong in ({"topp": 1}, {"max_tokens": "many"}, {"seed": -1}):
            with pytest.raises(InvalidArgument):
                client.chat([("user", "x")], **wrong)
        with pytest.raises(InvalidArgument):
            client.chat([("user", "x")], cache="maybe")


async def test_a_failed_stream(world: World) -> None:
    worker = await world.worker()
    worker.on_submit = hold
    await world.start(static=True, max_attempts=1)
    async with Client(world.server.address) as client:
        stream = client.chat([("user", "x")])
        await anext(stream)
        worker.tokens(worker.submits.items[0], [65])
        await anext(stream)
        worker.break_stream()
        with pytest.raises(WorkerLost):
            await stream.result()
        assert stream.text == "A"
        assert stream.finished is None
        assert stream.error is not None


async def test_leaving_early_cancels_the_request(world: World) -> None:
    worker = await world.worker()
    worker.on_submit = hold
    await world.start(static=True)
    async with Client(world.server.address) as client:
        async with client.chat([("user", "x")]) as stream:
            async for _ in stream:
                break
        await worker.aborts.wait()
        with pytest.raises(Unavailable):
            stream.raise_for_error()
    await world.until(world.idle)


async def test_nobody_listens() -> None:
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(Unavailable):
            await client.wait_ready(0.2)


async def test_the_sync_client(world: World) -> None:
    await world.worker(text="héllo")
    await world.start(static=True)
    address = world.server.address

    def use() -> list[str]:
        with SyncClient(address) as client:
            stream = client.chat([("user", "hi")])
            kinds = [str(event.WhichOneof("event")) for event in stream]
            assert stream.text == "héllo"
            assert stream.finished is not None
            with client.chat([("user", "hi")]) as early:
                next(early)
            assert client.generate("x").result() == "héllo"
            with pytest.raises(InvalidArgument):
                client.chat([("user", "x")], temperature=-1.0).result()
            assert [model.name for model in client.models()] == ["scripted"]
            assert not client.abort("nothing")
        client.close()
        return kinds

    threads = threading.active_count()
    kinds = await asyncio.to_thread(use)
    assert kinds[0] == "accepted"
    assert kinds[-1] == "finished"
    # The client's thread is gone; the one that asyncio keeps for to_thread may be new.
    assert threading.active_count() <= threads + 1


async def test_one_trace_from_the_client_to_the_worker(world: World) -> None:
    exporter = InMemorySpanExporter()
    tracing.setup("test", exporter=exporter)
    try:
        await world.worker()
        await world.router()
        await world.start()
        async with Client(world.server.address) as client:
            await client.chat([("user", "x")], request_id="traced").result()
        await world.routers[0].reports.wait()
        await world.until(lambda: world.server.in_flight == 0)
    finally:
        tracing.shutdown()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    chain = [
        names.SPAN_CLIENT_REQUEST,
        "kvmesh.v1.Inference/Chat",
        "chat auto",
        names.SPAN_GATEWAY_ATTEMPT,
        "kvmesh.v1.Decode/Submit",
    ]
    for parent, child in pairwise(chain):
        link = spans[child].parent
        assert link is not None, child
        assert link.span_id == spans[parent].context.span_id, child
    assert {span.context.trace_id for name, span in spans.items() if "Route" in name} == {
        spans["chat auto"].context.trace_id
    }
    attributes = spans["chat auto"].attributes
    assert attributes is not None
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.provider.name"] == "kvmesh"
    assert attributes["gen_ai.request.model"] == "auto"
    assert attributes["gen_ai.response.model"] == "scripted"
    assert attributes["gen_ai.usage.output_tokens"] == 6
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert attributes["kvmesh.request.id"] == "traced"


@pytest.mark.parametrize("key", ["kvm-abc\n", "kvm-ä", "kvm-\x00"])
async def test_a_key_that_cannot_be_one_is_refused_by_name(key: str) -> None:
    with pytest.raises(InvalidArgument, match="API key"):
        Client("127.0.0.1:1", api_key=key)
