"""Nothing is left behind: 1,000 cancelled streams, a client that never reads."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from typing import Any

import pytest

from gateway_world import World, next_event, rest, text_of
from kvmesh.proto.v1 import inference_pb2 as pb
from services.gateway.generation import Generation
from services.gateway.request import Request


async def test_a_thousand_cancelled_streams_leave_nothing(world: World) -> None:
    worker = await world.worker(max_batch=10_000)
    sent = {"count": 0}

    async def some(request: Any) -> None:
        # A third each: cancelled before any token, after some, with the end on its way.
        sent["count"] += 1
        if sent["count"] % 3:
            worker.tokens(request, [65, 66])
        if sent["count"] % 3 == 2:
            worker.end(request)

    worker.on_submit = some
    router = await world.router()
    await world.start()

    async def one(index: int) -> None:
        call = world.chat(str(index))
        if index % 4:
            await next_event(call)
        call.cancel()
        await asyncio.wait([asyncio.ensure_future(call.code())])

    async def batch(count: int) -> None:
        for start in range(0, count, 50):
            await asyncio.gather(*(one(index) for index in range(start, start + 50)))
        await world.until(world.idle)
        tasks = world.gateway._context.tasks
        await world.until(lambda: not any(t.get_name() in ("abort", "report") for t in tasks._tasks))
        for log in (worker.submits, worker.aborts, worker.tenants, router.routes, router.reports):
            log.items.clear()
        gc.collect()

    await batch(200)
    tasks_before = len(asyncio.all_tasks())
    tracemalloc.start()
    try:
        before = tracemalloc.take_snapshot()
        await batch(1000)
        after = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    assert len(asyncio.all_tasks()) <= tasks_before
    ours = [tracemalloc.Filter(True, "*/services/gateway/*"), tracemalloc.Filter(True, "*/kvmesh/*")]
    growth = sum(
        stat.size_diff for stat in after.filter_traces(ours).compare_to(before.filter_traces(ours), "filename")
    )
    # The memory of recent aborts is bounded (4096 keys of a short string and a float) and may fill here.
    assert growth < 1_000_000, growth
    (link,) = world.gateway.fleet.links()
    assert len(link._aborted) <= 4096
    worker.on_submit = None
    assert text_of(await world.ask()) == "hello"


async def test_a_client_that_never_reads_is_cut_off(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.request.STALL_GRACE_S", 0.2)
    worker = await world.worker()

    async def flood(request: Any) -> None:
        logprobs = [pb.TokenLogprob(token_id=65, token=b"A" * 5000)] * 10
        for position in range(0, 2000, 10):
            worker.tokens(request, [65] * 10, first=position, logprobs=logprobs)

    worker.on_submit = flood
    await world.start(static=True, request_buffer_tokens=64)
    call = world.chat(sampling={"logprobs": 0})
    await worker.aborts.wait()
    # The client has not read a thing, and yet the gateway is done with it.
    await world.until(world.idle)
    await world.until(lambda: world.server.in_flight == 0)
    call.cancel()
    worker.on_submit = None
    assert text_of(await world.ask()) == "hello"


async def test_stopping_the_gateway_waits_for_running_requests(world: World) -> None:
    worker = await world.worker()

    async def hold(request: Any) -> None:
        """Accept and send nothing."""

    worker.on_submit = hold
    await world.start(static=True, drain_timeout_s=10)
    call = world.chat()
    await next_event(call)
    draining = asyncio.create_task(world.server.drain(world.gateway.drain))
    await world.until(lambda: world.server.draining)
    assert not draining.done()
    worker.answer(worker.submits.items[0], "last words")
    events = []
    while not events or not events[-1].HasField("finished"):
        events.append(await next_event(call))
    assert text_of(events) == "last words"
    async with asyncio.timeout(60):
        await draining


async def test_a_request_that_is_over_is_gone_without_the_collector(world: World) -> None:
    def alive() -> bool:
        return any(type(each) in (Request, Generation) for each in gc.get_objects())

    await world.worker()
    await world.router()
    await world.start()
    gc.collect()
    gc.disable()
    try:
        for left in (False, True):
            call = world.chat("hello")
            await next_event(call)
            assert alive()
            if left:
                call.cancel()
            else:
                await rest(call)
            await asyncio.wait([asyncio.ensure_future(call.code())])
        await world.until(world.idle)
        await world.until(lambda: not alive())
    finally:
        gc.enable()
