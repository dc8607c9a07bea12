"""Cordoned workers: a gateway that places by itself leaves them out; what a router names is asked all the same."""

from __future__ import annotations

import grpc

from gateway_world import World, end_of, text_of
from kvmesh.proto.v1 import engine_pb2
from kvmesh.proto.v1 import inference_pb2 as pb


async def test_without_a_router_nothing_goes_to_a_cordoned_worker(world: World) -> None:
    away = await world.worker("away", text="away")
    await world.worker("here")
    router = await world.router()
    await world.start(route_timeout_ms=300)
    await world.until(lambda: len(world.gateway.fleet.links()) == 2)
    away.info.state = engine_pb2.WORKER_STATE_CORDONED
    router.tell()
    await world.until(lambda: len(world.gateway.fleet.links()) == 1)
    await router.stop()
    for _ in range(6):
        events = await world.ask()
        assert events[-1].finished.served.degraded
        assert text_of(events) == "hello"
    assert not away.submits.items
    model = (await world.stub.GetModel(pb.GetModelRequest(name="scripted"))).model
    assert model.decode_workers == 2, "it is there, though it takes nothing new"


async def test_all_cordoned_is_unavailable(world: World) -> None:
    away = await world.worker("away")
    await world.start(static=True)
    await world.until(lambda: len(world.gateway.fleet.links()) == 1)
    away.info.state = engine_pb2.WORKER_STATE_CORDONED
    await world.until(lambda: not world.gateway.fleet.links())
    error = await end_of(world.chat())
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert not away.submits.items


async def test_a_router_that_names_it_is_followed(world: World) -> None:
    """The mark keeps placements away; it is no refusal: another replica may not have heard of it yet."""
    away = await world.worker("away")
    away.info.state = engine_pb2.WORKER_STATE_CORDONED
    await world.router()
    await world.start(ready=False)
    await world.until(lambda: any(member.link and member.link.open for member in world.gateway.fleet.members()))
    assert text_of(await world.ask()) == "hello"
    assert len(away.submits.items) == 1
