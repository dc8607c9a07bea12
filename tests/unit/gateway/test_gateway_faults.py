"""Lost workers, slow clients, dead routers, limits: every request ends in exactly one way and nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from gateway_fakes import FakeWorker
from gateway_world import World, end_of, kinds, next_event, rest, text_of
from kvmesh.errors import (
    Internal,
    InvalidArgument,
    KvmeshError,
    Overloaded,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from kvmesh.proto.v1 import engine_pb2, router_pb2
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.rpc.status import from_rpc_error
from kvmesh.telemetry import metrics, names


async def hold(request: Any) -> None:
    """Accept and send nothing."""


# --- a lost worker


async def test_worker_lost_before_any_token_is_replaced(world: World) -> None:
    first = await world.worker("first")
    second = await world.worker("second", text="saved")
    first.on_submit = hold
    router = await world.router()
    await world.start()
    call = world.chat()
    assert (await next_event(call)).HasField("accepted")
    await first.submits.wait()
    first.break_stream()
    events = await rest(call)
    # Accepted was not sent a second time, and the client sees one whole stream.
    assert kinds(events) == ["delta", "finished"]
    assert text_of(events) == "saved"
    assert events[-1].finished.served.retries == 1
    assert events[-1].finished.served.decode_worker == "second"
    (again,) = second.submits.items
    assert again.attempt == 1
    assert again.sampling.seed == first.submits.items[0].sampling.seed
    assert list(router.routes.items[-1].exclude_workers) == ["first"]
    await world.until(world.idle)


async def test_worker_lost_after_tokens_ends_the_stream_once(world: World) -> None:
    worker = await world.worker()
    worker.on_submit = hold
    await world.worker("second")
    router = await world.router([worker])
    await world.start(max_attempts=1)
    call = world.chat()
    await next_event(call)
    (request,) = await worker.submits.wait()
    worker.tokens(request, [65])
    assert (await next_event(call)).delta.text == "A"
    worker.break_stream()
    events = await rest(call)
    assert kinds(events) == ["error"]
    error = events[0].error
    assert (error.reason, error.retryable, error.code) == ("WORKER_LOST", True, grpc.StatusCode.UNAVAILABLE.value[0])
    (report,) = await router.reports.wait()
    assert report.code == error.code
    assert not report.HasField("answer")
    await world.until(world.idle)


async def test_with_nobody_else_the_loss_itself_is_told(world: World) -> None:
    worker = await world.worker()
    worker.on_submit = hold
    await world.start(static=True)
    call = world.chat()
    await next_event(call)
    worker.break_stream()
    events = await rest(call)
    assert events[0].error.reason == "WORKER_LOST"


async def test_three_missed_heartbeats_lose_a_worker_and_it_comes_back(world: World) -> None:
    worker = await world.worker()
    worker.on_submit = hold
    await world.start(static=True, heartbeat_s=0.3)
    call = world.chat()
    await next_event(call)
    missed = metrics.value(names.HEARTBEATS_MISSED, peer_kind="worker")
    worker.beating = False
    events = await rest(call)
    assert events[0].error.reason == "WORKER_LOST"
    assert "silent" in events[0].error.message
    assert metrics.value(names.HEARTBEATS_MISSED, peer_kind="worker") == missed + 1
    assert not world.server.ready
    worker.beating, worker.on_submit = True, None
    await worker.opened.wait(2)
    await world.until(lambda: world.server.ready)
    assert text_of(await world.ask()) == "hello"


async def test_a_gap_in_the_frames_loses_the_worker(world: World) -> None:
    worker = await world.worker()
    worker.on_submit = hold
    await world.start(static=True)
    call = world.chat()
    await next_event(call)
    worker.skip_sequence = True
    events = await rest(call)
    assert "is missing" in events[0].error.message
    await worker.opened.wait(2)


async def test_a_gap_in_a_choice_ends_that_attempt(world: World) -> None:
    worker = await world.worker()
    worker.on_submit = hold
    await world.start(static=True, max_attempts=1)
    broken, other = world.chat("broken"), world.chat("other")
    await next_event(broken)
    await next_event(other)
    requests = {request.request_id: request for request in await worker.submits.wait(2)}
    by_text = {"broken" if b"broken" in bytes(t % 256 for t in r.token_ids) else "other": r for r in requests.values()}
    worker.tokens(by_text["broken"], [65, 66])
    worker.tokens(by_text["broken"], [67], first=3)
    events = await rest(broken)
    assert "start at 3, not at 2" in events[-1].error.message
    assert events[-1].error.retryable
    (abort,) = await worker.aborts.wait()
    assert abort.request_id == by_text["broken"].request_id
    worker.answer(by_text["other"], "whole")
    assert text_of(await rest(other)) == "whole"


async def test_frames_of_an_old_attempt_are_dropped_and_aborted(world: World) -> None:
    first = await world.worker("first")
    second = await world.worker("second")
    first.on_submit = second.on_submit = hold
    await world.router()
    await world.start()
    call = world.chat()
    await next_event(call)
    (old,) = await first.submits.wait()
    first.end(old, Unavailable("preempted for good"))
    (new,) = await second.submits.wait()
    # The worker contradicts itself: it ended the attempt and goes on all the same.
    first.tokens(old, [66])
    (abort,) = await first.aborts.wait()
    assert (abort.request_id, abort.attempt) == (old.request_id, old.attempt)
    second.answer(new, "A")
    assert text_of(await rest(call)) == "A"


async def test_a_worker_error_before_tokens_is_tried_elsewhere_only_if_retryable(world: World) -> None:
    first = await world.worker("first")
    await world.worker("second", text="second")
    await world.router()
    await world.start()

    def failing(error: KvmeshError) -> Callable[[engine_pb2.SubmitRequest], Any]:
        async def on_submit(request: engine_pb2.SubmitRequest) -> None:
            first.end(request, error)

        return on_submit

    first.on_submit = failing(Unavailable("sidecar gone"))
    assert text_of(await world.ask()) == "second"
    first.on_submit = failing(Internal("broken"))
    events = await world.ask()
    assert kinds(events) == ["accepted", "error"]
    assert events[-1].error.reason == "INTERNAL"


async def test_attempts_are_bounded(world: World) -> None:
    workers = [await world.worker(f"w{index}") for index in range(5)]

    def fail(worker: FakeWorker) -> Callable[[engine_pb2.SubmitRequest], Any]:
        async def on_submit(request: engine_pb2.SubmitRequest) -> None:
            worker.end(request, Unavailable("no"))

        return on_submit

    for worker in workers:
        worker.on_submit = fail(worker)
    await world.router()
    await world.start(max_attempts=3)
    events = await world.ask()
    assert kinds(events) == ["accepted", "error"]
    assert sum(len(worker.submits.items) for worker in workers) == 3


# --- a slow client


async def test_a_stalled_reader_costs_its_own_request_alone(world: World) -> None:
    worker = await world.worker()
    worker.on_submit = hold
    await world.start(static=True, request_buffer_tokens=64)
    slow_readers = metrics.value(names.GATEWAY_SLOW_READERS)
    stalled, other = world.chat("stalled", sampling={"logprobs": 0}), world.chat("other")
    await next_event(stalled)
    await next_event(other)
    requests = await worker.submits.wait(2)
    slow = next(r for r in requests if b"stalled" in bytes(t % 256 for t in r.token_ids))
    fine = next(r for r in requests if r is not slow)
    stop = asyncio.Event()

    async def flood() -> None:
        # Big deltas fill the transport's own buffers; then the gateway's buffer for this client fills.
        logprobs = [pb.TokenLogprob(token_id=65, token=b"A" * 5000)] * 10
        for position in range(0, 1_000_000, 10):
            if stop.is_set():
                return
            worker.tokens(slow, [65] * 10, first=position, logprobs=logprobs)
            await asyncio.sleep(0.001)

    flooding = asyncio.create_task(flood())
    try:
        texts = []
        for index in range(20):
            worker.tokens(fine, [66], first=index)
            texts.append((await next_event(other)).delta.text)
        assert texts == ["B"] * 20
        (abort,) = await worker.aborts.wait()
        assert abort.request_id == slow.request_id
    finally:
        stop.set()
        await flooding
    worker.end(fine)  # no finish reason: an error, but of this request only
    worker_events = await rest(other)
    assert worker_events[-1].error.reason == "INTERNAL"
    assert metrics.value(names.GATEWAY_SLOW_READERS) == slow_readers + 1
    # Now the stalled client reads on: what was on its way, then one terminal.
    events = await rest(stalled)
    assert events[-1].error.reason == "SLOW_READER"
    assert events[-1].error.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert [event.WhichOneof("event") for event in events].count("error") == 1
    await world.until(world.idle)


# --- cancelled


async def test_a_client_that_leaves_is_noticed_by_the_worker_at_once(world: World) -> None:
    worker = await world.worker()
    worker.on_submit = hold
    router = await world.router()
    await world.start()
    call = world.chat()
    await next_event(call)
    (request,) = await worker.submits.wait()
    began = time.monotonic()
    call.cancel()
    (abort,) = await worker.aborts.wait()
    assert time.monotonic() - began < 10, "noticed by the call's deadline, not by its end"
    assert (abort.request_id, abort.attempt) == (request.request_id, request.attempt)
    (report,) = await router.reports.wait()
    assert report.code == grpc.StatusCode.CANCELLED.value[0]
    await world.until(world.idle)


async def test_cancelled_during_submit_reaches_the_worker(world: World) -> None:
    worker = await world.worker()
    release = asyncio.Event()

    async def wait(request: Any) -> None:
        await release.wait()

    worker.on_submit = wait
    await world.start(static=True)
    call = world.chat()
    (request,) = await worker.submits.wait()
    call.cancel()
    (abort,) = await worker.aborts.wait()
    assert abort.request_id == request.request_id
    release.set()
    await world.until(world.idle)


async def test_cancelled_while_waiting_in_the_gateway(world: World) -> None:
    worker = await world.worker()
    worker.fill()
    await world.start(static=True)
    call = world.chat()
    await world.until(lambda: len(world.gateway.queue) == 1)
    call.cancel()
    await world.until(world.idle)
    assert not worker.aborts.items


async def test_abort_ends_a_stream_of_the_same_tenant(world: World) -> None:
    worker = await world.worker()
    worker.on_submit = hold
    await world.start(static=True)
    call = world.chat(request_id="mine")
    await next_event(call)
    assert not (await world.stub.Abort(pb.AbortRequest(request_id="other"))).found
    assert (await world.stub.Abort(pb.AbortRequest(request_id="mine"))).found
    events = await rest(call)
    assert kinds(events) == ["error"]
    assert events[0].error.code == grpc.StatusCode.CANCELLED.value[0]
    await worker.aborts.wait()
    assert not (await world.stub.Abort(pb.AbortRequest(request_id="mine"))).found


async def test_abort_of_a_waiting_request_is_a_status(world: World) -> None:
    worker = await world.worker()
    worker.fill()
    await world.start(static=True)
    call = world.chat(request_id="mine")
    await world.until(lambda: len(world.gateway.queue) == 1)
    assert (await world.stub.Abort(pb.AbortRequest(request_id="mine"))).found
    assert (await end_of(call)).code() is grpc.StatusCode.CANCELLED
    await world.until(world.idle)


async def test_an_id_in_use_is_refused_and_free_again_afterwards(world: World) -> None:
    worker = await world.worker()
    worker.on_submit = hold
    await world.start(static=True)
    call = world.chat(request_id="twice")
    await next_event(call)
    assert (await end_of(world.chat(request_id="twice"))).code() is grpc.StatusCode.ALREADY_EXISTS
    worker.answer(worker.submits.items[0], "x")
    assert text_of(await rest(call)) == "x"
    worker.on_submit = None
    assert text_of(await world.ask(request_id="twice")) == "hello"


async def test_an_abort_that_gets_lost_is_repeated_when_tokens_still_come(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.link.ABORT_AGAIN_S", 0.0)
    worker = await world.worker()
    worker.on_submit = hold
    await world.start(static=True)
    call = world.chat()
    await next_event(call)
    (request,) = await worker.submits.wait()
    call.cancel()
    await worker.aborts.wait(1)
    worker.tokens(request, [65])
    aborts = await worker.aborts.wait(2)
    assert {abort.request_id for abort in aborts} == {request.request_id}


# --- limits


async def test_ttft_limit_before_the_first_token(world: World) -> None:
    worker = await world.worker()
    worker.on_submit = hold
    await world.start(static=True)
    events = await world.ask(limits=pb.Limits(ttft_ms=1000))
    assert kinds(events) == ["accepted", "error"]
    assert events[-1].error.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
    assert "first token" in events[-1].error.message
    await worker.aborts.wait()
    await world.until(world.idle)


async def test_ttft_limit_is_over_with_the_first_token(world: World) -> None:
    worker = await world.worker()
    worker.on_submit = hold
    await world.start(static=True)
    call = world.chat(limits=pb.Limits(ttft_ms=2000, total_ms=4000))
    await next_event(call)
    (request,) = await worker.submits.wait()
    assert 0 < request.ttft_ms <= 2000
    assert 2000 < request.total_ms <= 4000
    worker.tokens(request, [65])
    events = await rest(call)
    assert kinds(events) == ["delta", "error"]
    assert "(total)" in events[-1].error.message


async def test_limit_while_waiting_for_room_is_overload(world: World) -> None:
    worker = await world.worker()
    worker.fill()
    await world.start(static=True)
    call = world.chat(limits=pb.Limits(ttft_ms=1000))
    error = await end_of(call)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert from_rpc_error(error).retry_after is not None
    await world.until(world.idle)


async def test_limit_during_submit(world: World) -> None:
    worker = await world.worker()
    never = asyncio.Event()

    async def stuck(request: Any) -> None:
        await never.wait()

    worker.on_submit = stuck
    await world.start(static=True)
    assert (await end_of(world.chat(limits=pb.Limits(ttft_ms=1000)))).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await worker.aborts.wait()
    never.set()
    await world.until(world.idle)


async def test_limit_during_route(world: World) -> None:
    await world.worker()
    router = await world.router()
    never = asyncio.Event()

    async def stuck(request: Any) -> router_pb2.RouteResponse:
        await never.wait()
        return router.placement(request)

    router.decide = stuck
    await world.start(route_timeout_ms=5000)
    assert (await end_of(world.chat(limits=pb.Limits(ttft_ms=1000)))).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    never.set()
    await world.until(world.idle)


async def test_the_calls_own_deadline_travels_to_the_worker(world: World) -> None:
    worker = await world.worker()
    worker.on_submit = hold
    await world.start(static=True)
    call = world.chat(timeout=2)
    (request,) = await worker.submits.wait()
    # gRPC rounds a timeout up on its way; the defaults would be a minute and more.
    assert request.total_ms < 3000
    assert request.ttft_ms < 3000
    # Both sides watch the same clock: whichever is first tells it, the gateway's terminal event or the call's own end.
    events: list[pb.GenerateEvent] = []
    with contextlib.suppress(grpc.aio.AioRpcError):
        events = await rest(call)
    if events:
        assert events[-1].error.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
    else:
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await worker.aborts.wait()
    await world.until(world.idle)


async def test_metadata_goes_out_while_waiting(world: World) -> None:
    worker = await world.worker()
    worker.fill()
    await world.start(static=True, first_metadata_s=0.1)
    call = world.chat()
    async with asyncio.timeout(60):
        await call.initial_metadata()
    await world.until(lambda: len(world.gateway.queue) == 1)
    worker.empty()
    assert text_of(await rest(call)) == "hello"


# --- routers


async def test_dead_router_means_degraded(world: World) -> None:
    await world.worker("a")
    await world.worker("b")
    router = await world.router()
    await world.start(route_timeout_ms=300)
    await router.stop()
    events = await world.ask()
    assert text_of(events) == "hello"
    assert events[-1].finished.served.degraded
    # The last list stands, whoever told it.
    assert text_of(await world.ask()) == "hello"


async def test_silent_router_means_degraded_in_time(world: World) -> None:
    await world.worker()
    router = await world.router()

    async def silent(request: Any) -> router_pb2.RouteResponse:
        await asyncio.sleep(30)
        raise Internal("never")

    router.decide = silent
    await world.start(route_timeout_ms=100)
    began = time.monotonic()
    events = await world.ask()
    assert time.monotonic() - began < 20
    assert events[-1].finished.served.degraded
    assert not router.reports.items


async def test_a_second_replica_answers_for_a_dead_one(world: World) -> None:
    await world.worker()
    dead = await world.router()
    alive = await world.router()
    await world.start()
    await dead.stop()
    for _ in range(3):
        events = await world.ask()
        assert not events[-1].finished.served.degraded
    assert len(alive.routes.items) == 3


@pytest.mark.parametrize("one_name", [False, True], ids=["two addresses", "one name"])
async def test_the_replica_that_decided_gets_the_report(world: World, one_name: bool) -> None:
    """The other one does not know the decision: the answer would not be remembered."""
    await world.worker()
    routers = [await world.router(), await world.router()]
    addresses = [router.address for router in routers]
    await world.start(routers=[f"ipv4:{','.join(addresses)}"] if one_name else addresses)
    for _ in range(6):
        assert not (await world.ask())[-1].finished.served.degraded
    await world.until(lambda: sum(len(router.reports.items) for router in routers) == 6)
    for router in routers:
        decided = [f"decision-{request.request_id}" for request in router.routes.items]
        assert sorted(report.decision_id for report in router.reports.items) == sorted(decided)
        assert one_name or len(decided) == 3


async def test_a_router_that_knows_less_than_the_frames_is_overruled(world: World) -> None:
    await world.worker()
    router = await world.router()

    async def unavailable(request: Any) -> router_pb2.RouteResponse:
        raise Unavailable("no worker has attached yet")

    router.decide = unavailable
    await world.start()
    events = await world.ask()
    assert events[-1].finished.served.degraded


async def test_a_worker_that_only_the_router_knows_is_connected(world: World) -> None:
    known = await world.worker("known")
    fresh = await world.worker("fresh", text="fresh")
    router = await world.router([known])
    await world.start()

    async def place(request: router_pb2.RouteRequest) -> router_pb2.RouteResponse:
        response = router.placement(request)
        response.placement.pair.decode.CopyFrom(fresh.info)
        return response

    router.decide = place
    events = await world.ask()
    assert text_of(events) == "fresh"
    assert not events[-1].finished.served.degraded


async def test_overloaded_pair_falls_to_an_alternate(world: World) -> None:
    full = await world.worker("full")
    full.refuse = Overloaded("queue full")
    await world.worker("free", text="free")
    await world.router()
    await world.start()
    events = await world.ask()
    assert text_of(events) == "free"
    assert events[-1].finished.served.retries == 1


async def test_a_refusal_that_is_about_the_request_is_final(world: World) -> None:
    first = await world.worker("first")
    first.refuse = InvalidArgument("sampling: no", details={"field": "sampling"})
    second = await world.worker("second")
    await world.router()
    await world.start()
    assert (await end_of(world.chat())).code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not second.submits.items


async def test_full_workers_release_the_line_when_frames_say_so(world: World) -> None:
    worker = await world.worker(max_batch=1)
    worker.fill()
    await world.router()
    await world.start()
    calls = [world.chat(str(index)) for index in range(5)]
    await world.until(lambda: len(world.gateway.queue) == 5)
    worker.empty()
    for call in calls:
        assert text_of(await rest(call)) == "hello"
    await world.until(world.idle)


async def test_a_line_that_is_too_long_refuses_at_once(world: World) -> None:
    worker = await world.worker()
    worker.fill()
    await world.start(static=True, max_waiting_requests=1)
    waiting = world.chat()
    await world.until(lambda: len(world.gateway.queue) == 1)
    error = await end_of(world.chat())
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert from_rpc_error(error).retry_after is not None
    waiting.cancel()
    await world.until(world.idle)


async def test_readiness_follows_the_frames(world: World) -> None:
    worker = await world.worker()
    router = await world.router()
    await world.start()
    assert world.server.ready
    worker.info.state = engine_pb2.WORKER_STATE_STALLED
    router.tell()
    await world.until(lambda: not world.server.ready)
    worker.info.state = engine_pb2.WORKER_STATE_SERVING
    router.tell()
    await world.until(lambda: world.server.ready)
    router.workers.clear()
    router.tell()
    await world.until(lambda: not world.server.ready)


async def test_no_worker_at_all(world: World) -> None:
    await world.router()
    await world.start(ready=False)
    await world.until(world.gateway.fleet.known.is_set)
    assert (await end_of(world.chat())).code() is grpc.StatusCode.NOT_FOUND


async def test_a_retiring_worker_finishes_what_it_runs(world: World) -> None:
    worker = await world.worker()
    worker.on_submit = hold
    router = await world.router()
    await world.start()
    call = world.chat()
    await next_event(call)
    (request,) = await worker.submits.wait()
    router.workers.clear()
    router.tell()
    await world.until(lambda: not world.server.ready)
    worker.answer(request, "done")
    assert text_of(await rest(call)) == "done"


# --- the end of the gateway


async def test_requests_that_outlast_the_drain_get_their_terminal_event(world: World) -> None:
    worker = await world.worker()
    worker.on_submit = hold
    await world.start(static=True, drain_timeout_s=2.0)
    call = world.chat()
    assert (await next_event(call)).HasField("accepted")
    draining = asyncio.create_task(world.server.drain(world.gateway.drain))
    (event,) = await rest(call)
    assert (event.error.reason, event.error.retryable) == ("UNAVAILABLE", True)
    await draining
    assert world.idle()


async def test_a_drain_does_not_wait_when_nothing_runs(world: World) -> None:
    await world.worker()
    await world.start(static=True, drain_timeout_s=30.0)
    await world.ask()
    async with asyncio.timeout(60):
        await world.server.drain(world.gateway.drain)


async def test_a_tokenizer_that_does_not_load_ends_at_the_limit(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.worker()
    await world.start(static=True)
    monkeypatch.setattr(world.gateway.tokenizers, "_get", lambda spec: asyncio.Event().wait())
    error = await end_of(world.chat(limits=pb.Limits(ttft_ms=50)))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert from_rpc_error(error).details["limit"] == "time to first token"
    await world.until(world.idle)


@pytest.mark.parametrize("refusal", [Unauthenticated("no"), PermissionDenied("no")])
async def test_a_worker_that_refuses_the_gateway_does_not_blame_the_client(world: World, refusal: KvmeshError) -> None:
    first = await world.worker("first")
    first.refuse = refusal
    router = await world.router()
    await world.start()
    assert (await end_of(world.chat())).code() is grpc.StatusCode.UNAVAILABLE
    router.workers.append(await world.worker("second", text="served"))
    router.tell()
    assert text_of(await world.ask()) == "served"
