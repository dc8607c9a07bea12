"""What counts against a worker, and what a gateway makes of it where no router decides."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import random
from typing import Any

import grpc
import pytest

from gateway_fakes import FakeWorker
from gateway_world import World, end_of, next_event, rest, text_of
from kvmesh import errors
from kvmesh.errors import DeadlineExceeded, Internal, InvalidArgument, KvmeshError, Overloaded, Unavailable
from kvmesh.proto.v1 import engine_pb2
from kvmesh.rpc.status import TABLE
from services.gateway.breaker import BACKOFF_S, ENDS, FAILURES, Breaker, State, accuses

CLASSES = [
    each for _, each in inspect.getmembers(errors, inspect.isclass) if issubclass(each, KvmeshError) and each in TABLE
]
ACCUSING = {"UNAVAILABLE", "WORKER_LOST", "TRANSFER_FAILED", "INTERNAL", "DATA_LOSS", "DEADLINE_EXCEEDED"}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock) -> Breaker:
    breaker = Breaker(clock=clock, rng=random.Random(1))
    for _ in range(FAILURES):
        assert breaker.allows
        breaker.failed(Unavailable("no"))
    assert breaker.state is State.OPEN
    return breaker


def test_it_opens_after_a_few_failures_of_the_last_attempts() -> None:
    breaker = Breaker()
    for _ in range(FAILURES - 1):
        breaker.failed(Internal("no"))
    for _ in range(ENDS - FAILURES + 2):
        breaker.succeeded()
    breaker.failed(Internal("no"))
    assert breaker.allows  # The first ones are too long ago.
    for _ in range(FAILURES - 1):
        breaker.failed(Internal("no"))
    assert not breaker.allows


def test_one_probe_at_a_time_decides() -> None:
    clock = Clock()
    breaker = opened(clock)
    assert not breaker.allows
    clock.now += BACKOFF_S[0] * 1.3
    assert breaker.allows
    breaker.begun(("a", 0))
    assert not breaker.allows
    breaker.left(("b", 0))
    assert not breaker.allows
    # It said nothing: the next one may.
    breaker.left(("a", 0))
    assert breaker.allows
    breaker.begun(("c", 0))
    breaker.failed(Unavailable("no"))
    breaker.left(("c", 0))
    assert breaker.state is State.OPEN
    clock.now += BACKOFF_S[0] * 1.3
    assert not breaker.allows  # Twice as long now.
    clock.now += BACKOFF_S[0] * 1.3
    breaker.begun(("d", 0))
    breaker.succeeded()
    breaker.left(("d", 0))
    assert breaker.state is State.CLOSED
    breaker.failed(Unavailable("no"))
    assert breaker.allows


def test_the_backoff_is_bounded() -> None:
    clock = Clock()
    breaker = opened(clock)
    for _ in range(20):
        clock.now += BACKOFF_S[1] * 1.3
        assert breaker.allows
        breaker.failed(Unavailable("no"))


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.reason)
def test_what_a_client_does_wrong_never_counts(error: type[KvmeshError]) -> None:
    breaker = Breaker()
    for _ in range(ENDS):
        breaker.failed(error("no"))
    assert breaker.allows == (error.reason not in ACCUSING)
    assert accuses(error("no")) == (error.reason in ACCUSING)


@pytest.mark.parametrize("where", ["at submit", "in a frame"])
async def test_the_report_accuses_nobody_of_a_clients_error(world: World, where: str) -> None:
    first = await world.worker("first")
    await world.worker("second")
    router = await world.router()
    await world.start()
    for number, error in enumerate(CLASSES):

        async def fail(request: engine_pb2.SubmitRequest, error: type[KvmeshError] = error) -> None:
            first.on_submit = None
            if where == "at submit":
                raise error("no")
            first.end(request, error("no"))

        first.on_submit = fail
        with contextlib.suppress(grpc.aio.AioRpcError):
            await rest(world.chat())
        *_, report = await router.reports.wait(number + 1)
        # A limit that ran out on the worker is the request's own, which the worker kept.
        accused = error.reason in ACCUSING and not (error is DeadlineExceeded and where == "in a frame")
        assert [failure.worker_id for failure in report.failures] == (["first"] if accused else []), error
    await world.until(world.idle)


async def test_a_client_that_leaves_accuses_nobody(world: World) -> None:
    worker = await world.worker(text=None)
    router = await world.router()
    await world.start()
    for count in range(FAILURES + 1):
        call = world.chat()
        (*_, request) = await worker.submits.wait(count + 1)
        worker.tokens(request, list(b"a"))
        await next_event(call)
        call.cancel()
        *_, report = await router.reports.wait(count + 1)
        assert not report.failures
    (link,) = world.gateway.fleet.links()
    assert link.breaker.state is State.CLOSED


def failing(worker: FakeWorker) -> None:
    async def fail(request: engine_pb2.SubmitRequest) -> None:
        worker.end(request, Unavailable("no"))

    worker.on_submit = fail


def clocked(world: World, worker_id: str) -> tuple[Clock, Any]:
    """The clock of a worker's breaker, which the test moves from here on; and the link."""
    (link,) = [link for link in world.gateway.fleet.links() if link.info.worker_id == worker_id]
    clock = Clock()
    link.breaker = Breaker(clock=clock)
    return clock, link


async def test_without_a_router_a_failing_worker_is_left_out_and_tried_again(world: World) -> None:
    bad = await world.worker("bad")
    good = await world.worker("good", text="good")
    failing(bad)
    await world.start(static=True)
    await world.until(lambda: len(world.gateway.fleet.links()) == 2)
    clock, link = clocked(world, "bad")
    while link.breaker.state is State.CLOSED:
        assert text_of(await world.ask()) == "good"
    assert len(bad.submits.items) == FAILURES
    for _ in range(10):
        assert text_of(await world.ask()) == "good"
    assert len(bad.submits.items) == FAILURES
    # Half-open: one request is the probe, all others go elsewhere until it has ended.
    clock.now += 100.0
    bad.on_submit, bad.text = None, None
    first_probe = asyncio.create_task(bad.submits.wait(FAILURES + 1))
    calls = []
    while not first_probe.done():
        calls.append(world.chat())
        placed = asyncio.create_task(good.submits.wait(len(good.submits.items) + 1))
        await asyncio.wait({placed, first_probe}, return_when=asyncio.FIRST_COMPLETED)
        placed.cancel()
    for _ in range(10):
        assert text_of(await world.ask()) == "good"
    (probe,) = bad.submits.items[FAILURES:]
    bad.answer(probe, "well")
    texts = [text_of(await rest(call)) for call in calls]
    assert texts.count("well") == 1
    assert link.breaker.state is State.CLOSED


async def test_a_probe_that_gives_tokens_makes_way_for_the_next(world: World) -> None:
    """Its stream may go on for long."""
    worker = await world.worker()
    await world.start(static=True)
    clock, link = clocked(world, worker.info.worker_id)
    failing(worker)
    while link.breaker.state is State.CLOSED:
        await world.ask()
    clock.now += 100.0
    worker.on_submit = lambda request: asyncio.sleep(0)
    count = len(worker.submits.items)
    call = world.chat()
    *_, probe = await worker.submits.wait(count + 1)
    await next_event(call)
    assert not link.breaker.allows
    worker.tokens(probe, [65])
    assert (await next_event(call)).delta.text == "A"
    assert (link.breaker.state, link.breaker.allows) == (State.HALF_OPEN, True)
    call.cancel()
    await world.until(world.idle)


async def test_a_failing_worker_is_better_than_none(world: World) -> None:
    only = await world.worker("only")
    await world.start(static=True, max_attempts=1)
    _, link = clocked(world, "only")
    failing(only)
    for _ in range(FAILURES):
        events = await world.ask()
        assert events[-1].HasField("error")
    assert link.breaker.state is State.OPEN
    only.on_submit = None
    assert text_of(await world.ask()) == "hello"


async def test_routers_decide_where_there_are_any(world: World) -> None:
    worker = await world.worker("w")
    await world.worker("other", text="other")
    await world.router()
    await world.start()
    await world.until(lambda: len(world.gateway.fleet.links()) == 2)
    _, link = clocked(world, "w")
    for _ in range(FAILURES):
        link.breaker.failed(Unavailable("no"))
    assert not link.breaker.allows
    assert text_of(await world.ask()) == "hello"
    assert len(worker.submits.items) == 1


async def test_a_refusal_for_the_request_itself_goes_to_the_client_alone(world: World) -> None:
    worker = await world.worker()
    await world.start(static=True)
    _, link = clocked(world, worker.info.worker_id)
    worker.refuse = InvalidArgument("sampling: no")
    for _ in range(FAILURES + 1):
        await end_of(world.chat())
    worker.refuse = Overloaded("full")
    assert link.breaker.state is State.CLOSED
