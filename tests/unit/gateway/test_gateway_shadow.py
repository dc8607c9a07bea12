"""Shadows: a semantic hit is asked again behind the client's back, at the lowest priority, or not at all."""

from __future__ import annotations

import asyncio

import pytest

from gateway_fakes import MODEL, FakeRouter, FakeWorker
from gateway_world import World, next_event, rest, text_of
from kvmesh.errors import Internal, Overloaded
from kvmesh.proto.v1 import engine_pb2, router_pb2
from kvmesh.proto.v1 import inference_pb2 as pb
from services.gateway.shadow import PRIORITY, ShadowLimits


def remembered(router: FakeRouter) -> None:
    """Every request that may is answered from the semantic cache, and shadowed."""

    async def decide(request: router_pb2.RouteRequest) -> router_pb2.RouteResponse:
        if request.cache == pb.CACHE_MODE_OFF:
            return router.placement(request)
        choice = router_pb2.CachedChoice(text="old", token_ids=[1], finish_reason=pb.FINISH_REASON_STOP)
        answer = router_pb2.CachedAnswer(kind="semantic", choices=[choice], score=0.96, revision="rev-1")
        return router_pb2.RouteResponse(
            answer=answer, model=MODEL, decision_id="d", cache="semantic", shadow_id=f"shadow of {request.request_id}"
        )

    router.decide = decide


async def shadowed(world: World, **worker: object) -> tuple[FakeWorker, FakeRouter]:
    made = await world.worker(**worker)
    router = await world.router()
    remembered(router)
    await world.start()
    return made, router


async def test_a_semantic_hit_is_asked_again_at_the_lowest_priority(world: World) -> None:
    worker, router = await shadowed(world, text="fresh")
    events = await world.ask("hi", session_id="s", sampling={"seed": 5})
    assert text_of(events) == "old"
    (report,) = await router.shadows.wait()
    assert report.shadow_id == f"shadow of {router.routes.items[0].request_id}"
    assert [choice.text for choice in report.answer.choices] == ["fresh"]
    assert report.answer.choices[0].finish_reason == pb.FINISH_REASON_STOP
    (submit,) = worker.submits.items
    assert submit.priority == PRIORITY < 0
    assert submit.sampling.seed == 5
    asked = router.routes.items[1]
    assert (asked.cache, asked.no_flight, asked.session_id) == (pb.CACHE_MODE_OFF, True, "")
    assert submit.total_ms <= ShadowLimits().total_ms


async def test_clients_neither_wait_for_shadows_nor_hear_of_their_failures(world: World) -> None:
    worker, router = await shadowed(world)

    async def hold(request: engine_pb2.SubmitRequest) -> None:
        pass

    worker.on_submit = hold
    assert text_of(await world.ask()) == "old"
    (submit,) = await worker.submits.wait()
    assert not router.shadows.items
    worker.end(submit, Internal("broken"))
    (report,) = await router.shadows.wait()
    assert not report.HasField("answer")


async def test_shadows_are_few_and_none_while_workers_have_little_room(world: World) -> None:
    worker, router = await shadowed(world, max_batch=64)

    async def hold(request: engine_pb2.SubmitRequest) -> None:
        pass

    worker.on_submit = hold
    limit = ShadowLimits().concurrency
    for _ in range(limit + 3):
        await world.ask()
    # Those over the limit are told of at once, without an answer.
    reports = await router.shadows.wait(3)
    assert not any(report.HasField("answer") for report in reports)
    submits = await worker.submits.wait(limit)
    for submit in submits:
        worker.answer(submit, "fresh")
    await router.shadows.wait(3 + limit)
    worker.load.running = 32
    link = world.gateway.fleet.links(MODEL)[0]
    await world.until(lambda: link.load.running == 32)
    await world.ask()
    last = (await router.shadows.wait(4 + limit))[-1]
    assert not last.HasField("answer")
    assert len(worker.submits.items) == limit


async def test_a_shadow_does_not_stand_in_line(world: World) -> None:
    worker, router = await shadowed(world)
    worker.refuse = Overloaded("full")
    assert text_of(await world.ask()) == "old"
    (report,) = await router.shadows.wait()
    assert not report.HasField("answer")
    assert len(worker.submits.items) == 1
    assert not len(world.gateway.queue)


@pytest.mark.parametrize("tokens", [0, 2])
async def test_a_shadow_that_lost_its_place_does_not_go_ahead(world: World, tokens: int) -> None:
    worker, router = await shadowed(world)

    async def preempted(request: engine_pb2.SubmitRequest) -> None:
        worker.refuse = Overloaded("full")
        worker.tokens(request, list(b"ab")[:tokens])
        worker.end(request, Overloaded("its pages were needed"))

    worker.on_submit = preempted
    assert text_of(await world.ask()) == "old"
    (report,) = await router.shadows.wait()
    assert not report.HasField("answer")
    assert len(worker.submits.items) == 2
    assert not len(world.gateway.queue)


async def test_a_hit_without_a_shadow_id_is_not_asked_again(world: World) -> None:
    worker, router = await shadowed(world)
    inner = router.decide
    assert inner is not None

    async def decide(request: router_pb2.RouteRequest) -> router_pb2.RouteResponse:
        response = await inner(request)
        response.shadow_id = ""
        return response

    router.decide = decide
    call = world.chat()
    assert (await next_event(call)).HasField("accepted")
    await rest(call)
    await router.reports.wait()
    await asyncio.sleep(0)
    assert not worker.submits.items
    assert not router.shadows.items
