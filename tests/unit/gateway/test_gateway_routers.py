"""A name of routers: every replica behind it is known, those that come are found, and those that leave cost nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from gateway_fakes import FakeRouter
from gateway_world import World, kinds, text_of
from kvmesh.errors import Unavailable
from kvmesh.proto.v1 import router_pb2
from kvmesh.telemetry import metrics
from kvmesh.telemetry import names as metric_names
from services.gateway import routers as module

NAME = "dns:///routers.test:50052"


class Names:
    """What the name stands for now."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: set[str] | None = None
        monkeypatch.setattr(module, "resolve", self._resolve)
        monkeypatch.setattr(module, "LOOK_UP_S", (0.01, 0.05))

    async def _resolve(self, target: str) -> set[str] | None:
        assert target == NAME
        return set(self.found) if self.found is not None else None


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    return Names(monkeypatch)


def watched(world: World) -> set[str]:
    return {replica.address for replica in world.gateway.routers._replicas if replica.watched}


async def test_all_routers_are_replaced_one_after_the_other(world: World, names: Names) -> None:
    await world.worker(text="an answer")
    old = [await world.router(), await world.router()]
    names.found = {router.address for router in old}
    await world.start(routers=[NAME])
    await world.until(lambda: watched(world) == names.found)
    for leaving in old:
        coming = await world.router()
        names.found = names.found | {coming.address}
        await world.until(lambda: watched(world) == names.found)
        names.found = names.found - {leaving.address}
        # As long as it tells of the fleet, it is asked.
        before = len(leaving.routes.items)
        for _ in range(4):
            assert text_of(await world.ask()) == "an answer"
        assert len(leaving.routes.items) > before
        await leaving.stop()
        for _ in range(4):
            events = await world.ask()
            assert kinds(events)[-1] == "finished"
            assert not events[-1].finished.served.degraded
        await world.until(lambda: {each.address for each in world.gateway.routers._replicas} == names.found)
    assert world.server.ready


async def test_a_name_that_cannot_be_found_keeps_what_it_stood_for(world: World, names: Names) -> None:
    await world.worker()
    router = await world.router()
    await world.start(routers=[NAME], ready=False)
    assert not world.server.ready
    names.found = {router.address}
    await world.until(lambda: world.server.ready)
    names.found = None
    await router.stop()
    await world.until(lambda: not watched(world))
    events = await world.ask()
    assert events[-1].finished.served.degraded
    assert [each.address for each in world.gateway.routers._replicas] == [router.address]


class Leaving(FakeRouter):
    """Once `leaves` is set it tells nothing of the fleet; what it is asked still gets its answer."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.leaves = asyncio.Event()
        self.gone = asyncio.Event()

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[router_pb2.WatchResponse]:
        if self.leaves.is_set():
            raise Unavailable("this router is stopping")
        yield self.snapshot()
        await self.leaves.wait()

    async def _late(self, request: router_pb2.RouteRequest) -> router_pb2.RouteResponse:
        self.leaves.set()
        await self.gone.wait()
        return self.placement(request)


async def test_a_router_that_leaves_answers_what_it_was_asked(
    world: World, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await world.worker()
    leaving = await Leaving(world.workers).start()
    world.routers.append(leaving)
    names.found = {leaving.address}
    await world.start(routers=[NAME], route_timeout_ms=60_000)
    await world.until(lambda: watched(world) == names.found)
    staying = await world.router()
    # Its name is gone before it is asked the last time.
    names.found = {staying.address}
    await world.until(lambda: staying.address in watched(world))
    leaving.decide, staying.decide = leaving._late, leaving._late
    asked = [asyncio.create_task(world.ask(f"question {number}")) for number in range(2)]
    await world.until(lambda: [each.address for each in world.gateway.routers._replicas] == [staying.address])
    assert leaving.routes.items
    leaving.gone.set()
    for events in await asyncio.gather(*asked):
        assert kinds(events)[-1] == "finished"
        assert not events[-1].finished.served.degraded
    assert worker.submits.items
    await world.until(lambda: leaving.reports.items)


async def test_the_report_to_a_router_that_has_left_is_lost_quietly(
    world: World, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LINGER_S", 0.0)
    worker = await world.worker()
    worker.text = None
    leaving = await Leaving(world.workers).start()
    world.routers.append(leaving)
    names.found = {leaving.address}
    await world.start(routers=[NAME])
    await world.until(lambda: watched(world) == names.found)
    failed = metrics.value(metric_names.TASK_FAILURES, task="report")
    replica = world.gateway.routers._replicas[0]
    asked = asyncio.create_task(world.ask())
    request = (await worker.submits.wait(1))[0]
    names.found = {(await world.router()).address}
    leaving.leaves.set()
    await world.until(lambda: replica.channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN)
    worker.answer(request, "an answer")
    assert kinds(await asked)[-1] == "finished"
    await world.until(lambda: not world.gateway.routers._reports)
    assert metrics.value(metric_names.TASK_FAILURES, task="report") == failed


class Mute(FakeRouter):
    """It decides, and tells nothing of the fleet."""

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[router_pb2.WatchResponse]:
        raise Unavailable("this router is stopping")
        yield


async def test_who_tells_nothing_of_the_fleet_is_asked_last(world: World) -> None:
    await world.worker()
    telling, mute = await world.router(), await Mute(world.workers).start()
    world.routers.append(mute)
    await world.start()
    await world.until(lambda: watched(world) == {telling.address})
    for _ in range(4):
        await world.ask()
    assert (len(telling.routes.items), len(mute.routes.items)) == (4, 0)
    # Where nobody else is, it is asked all the same.
    await telling.stop()
    events = await world.ask()
    assert not events[-1].finished.served.degraded
    assert mute.routes.items
