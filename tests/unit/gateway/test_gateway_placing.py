"""Which worker gets a request, and what it is told."""

from __future__ import annotations

from collections import Counter
from typing import Any

import grpc
import pytest

from gateway_fakes import MODEL
from gateway_world import World, end_of, kinds, rest, text_of
from kvmesh.errors import Internal, InvalidArgument, NotFound, Unavailable
from kvmesh.proto.v1 import engine_pb2, router_pb2
from kvmesh.proto.v1 import inference_pb2 as pb
from services.gateway import placement
from services.gateway.job import inner_salt


async def test_an_alias_that_the_router_reads_otherwise(world: World) -> None:
    first = await world.worker("first")
    second = await world.worker("second", model="other", max_model_len=500, text="other")
    router = await world.router()

    async def other_model(request: router_pb2.RouteRequest) -> router_pb2.RouteResponse:
        response = router.placement(request)
        response.placement.pair.decode.CopyFrom(second.info)
        response.model = "other"
        return response

    router.decide = other_model
    await world.start()
    await world.until(lambda: len(world.gateway.fleet.links()) == 2)
    world.gateway.fleet.example = lambda model: {"auto": first.info, "other": second.info}[model]  # type: ignore[method-assign]
    events = await world.ask(model="auto")
    assert text_of(events) == "other"
    assert events[0].accepted.model == "other"
    # By the name it was asked by: what is remembered for the alias is found by everybody who asks for it.
    assert [request.model for request in router.routes.items] == ["auto", "auto"]
    assert [request.tokenized_for for request in router.routes.items] == [first.info.model, "other"]
    (request,) = second.submits.items
    assert request.model == "other"
    assert len(request.token_ids) + request.sampling.max_tokens == 500
    assert not events[-1].finished.served.degraded


async def test_an_alias_of_the_router_is_known_here(world: World) -> None:
    await world.worker("first")
    await world.worker("second", model="other", text="other")
    router = await world.router([])
    router.workers = world.workers
    router.aliases = {"auto": "", "fast": "other"}

    async def decide(request: router_pb2.RouteRequest) -> router_pb2.RouteResponse:
        worker = world.workers[1] if request.model in ("fast", "other") else world.workers[0]
        pair = router_pb2.Pair(decode=worker.info)
        return router_pb2.RouteResponse(
            placement=router_pb2.Placement(pair=pair, revision="rev-1"), model=worker.info.model, decision_id="d"
        )

    router.decide = decide
    await world.start()
    await world.until(lambda: len(world.gateway.fleet.links()) == 2)
    events = await world.ask(model="fast")
    assert text_of(events) == "other"
    assert events[0].accepted.model == "other"
    assert [request.model for request in router.routes.items] == ["fast"]
    assert (await world.stub.GetModel(pb.GetModelRequest(name="fast"))).model.name == "other"
    assert (await end_of(world.chat(model="slow"))).code() is grpc.StatusCode.NOT_FOUND


async def test_the_default_length_fits_every_workers_pool(world: World) -> None:
    worker = await world.worker("small", max_model_len=4096)
    worker.info.total_pages = 20
    await world.worker("large", max_model_len=4096)
    await world.start(static=True)
    await world.until(lambda: len(world.gateway.fleet.links()) == 2)
    for sampling in (None, {"max_tokens": 3000}):
        events = await world.ask(sampling=sampling)
        assert text_of(events) == "hello"
    for fake in world.workers:
        for request in fake.submits.items:
            assert len(request.token_ids) + request.sampling.max_tokens == 20 * 16
    error = await end_of(world.chat("x" * 400))
    assert error.code().name == "INVALID_ARGUMENT"


@pytest.mark.parametrize("error", [InvalidArgument("?"), Internal("?"), NotFound("?")])
async def test_a_confused_router_means_degraded(world: World, error: Any) -> None:
    await world.worker()
    router = await world.router()

    async def confused(request: Any) -> router_pb2.RouteResponse:
        raise error

    router.decide = confused
    await world.start()
    assert (await world.ask())[-1].finished.served.degraded
    assert (await end_of(world.chat(model="nope"))).code().name == "NOT_FOUND"


async def test_a_router_that_only_ever_says_follow(world: World) -> None:
    await world.worker()
    router = await world.router()

    async def follow(request: Any) -> router_pb2.RouteResponse:
        return router_pb2.RouteResponse(follow=router_pb2.Flight(flight_id="f"), decision_id="f")

    router.decide = follow
    await world.start()
    events = await world.ask()
    assert events[-1].finished.served.degraded


async def test_the_routers_prefill_targets_go_with_the_pair(world: World) -> None:
    worker = await world.worker()
    router = await world.router()
    target = engine_pb2.PrefillTarget(worker_id="p", address="127.0.0.1:1", incarnation=7)

    async def with_prefill(request: router_pb2.RouteRequest) -> router_pb2.RouteResponse:
        response = router.placement(request)
        response.placement.pair.prefill.append(target)
        return response

    router.decide = with_prefill
    await world.start()
    await world.ask(cache_salt="salt")
    (request,) = worker.submits.items
    assert list(request.prefill) == [target]
    assert request.cache_salt == inner_salt("local", "salt")
    assert request.prompt_len == len(request.token_ids)
    assert request.attempt == 0


async def test_without_a_router_prefill_workers_that_fit_are_named(world: World) -> None:
    decode = await world.worker("decode")
    decode.info.kvtransfer_address = "127.0.0.1:1"
    decode.info.layout_fingerprint = b"same"
    fits = await world.worker("fits", role=engine_pb2.WORKER_ROLE_PREFILL)
    fits.info.kvtransfer_address = "127.0.0.1:2"
    fits.info.layout_fingerprint = b"same"
    other = await world.worker("other-layout", role=engine_pb2.WORKER_ROLE_PREFILL)
    other.info.kvtransfer_address = "127.0.0.1:3"
    other.info.layout_fingerprint = b"other"
    # Tokens of it would fit; but there is one whose pages do.
    sizes = await world.worker("other-page", role=engine_pb2.WORKER_ROLE_PREFILL)
    sizes.info.kvtransfer_address = "127.0.0.1:4"
    sizes.info.page_size *= 4
    for worker in (decode, fits, sizes):
        worker.info.kv_fingerprint = b"kv"
    router = await world.router()
    await world.start(route_timeout_ms=200)
    await world.until(lambda: len(list(world.gateway.fleet.members())) == 4)
    await router.stop()
    await world.ask()
    (request,) = decode.submits.items
    assert [target.worker_id for target in request.prefill] == ["fits"]
    (model,) = (await world.stub.ListModels(pb.ListModelsRequest())).models
    assert (model.prefill_workers, model.decode_workers) == (3, 1)


async def test_power_of_two_prefers_the_idle_and_spreads_a_burst(world: World) -> None:
    workers = [await world.worker(f"w{index}", max_batch=100) for index in range(4)]
    workers[0].load.running = 90

    async def hold(request: Any) -> None:
        """Accept and send nothing."""

    for worker in workers:
        worker.on_submit = hold
    await world.start(static=True)
    await world.until(lambda: len(world.gateway.fleet.links()) == 4)
    await world.until(lambda: any(link.load.running == 90 for link in world.gateway.fleet.links()))
    calls = [world.chat(str(index)) for index in range(60)]
    await world.until(lambda: sum(len(worker.submits.items) for worker in workers) == 60)
    counts = Counter({worker.info.worker_id: len(worker.submits.items) for worker in workers})
    # The loaded one is never the lesser of two; the others share evenly, by our own counts alone: no load moved.
    assert counts["w0"] == 0
    assert min(counts[f"w{index}"] for index in (1, 2, 3)) >= 12
    for call in calls:
        call.cancel()
    await world.until(world.idle)


async def test_a_seat_that_the_router_does_not_name_is_not_asked_about_at_every_report(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as of a worker that it trusts no more, whose reports say many times a second that there is room."""
    monkeypatch.setattr(placement, "NOT_NAMED_S", 1000.0)
    full, other = await world.worker("full"), await world.worker("other")
    full.fill()
    router = await world.router()
    await world.start()
    await world.until(lambda: len(world.gateway.fleet.links()) == 2)
    # It has told that it is full: no report of its own ends the wait.
    await world.until(lambda: any(link.load.running for link in world.gateway.fleet.links()))

    async def one(request: router_pb2.RouteRequest) -> router_pb2.RouteResponse:
        return router_pb2.RouteResponse(
            placement=router_pb2.Placement(pair=router_pb2.Pair(decode=full.info), revision="rev-1"), model=MODEL
        )

    router.decide = one
    queue = world.gateway.queue
    call = world.chat()
    await world.until(lambda: len(queue) == 1)
    (link,) = [link for link in world.gateway.fleet.links() if link.info.worker_id == "other"]
    for _ in range(10):
        queue.offer(link)
        await world.until(lambda: len(queue) == 1 and not link.seats.promised)
    assert len(router.routes.items) <= 2
    assert not other.submits.items
    full.empty()
    for link in world.gateway.fleet.links():
        queue.offer(link)
    assert text_of(await rest(call)) == "hello"
    await world.until(world.idle)


async def test_the_worker_whose_seat_ended_the_wait_is_among_our_own_choice(world: World) -> None:
    """However many there are, and however much emptier others look."""
    workers = [await world.worker(f"w{index}", text=f"w{index}") for index in range(8)]
    for worker in workers:
        worker.fill()
    await world.start(static=True)
    await world.until(lambda: len(world.gateway.fleet.links()) == 8)
    queue, links = world.gateway.queue, world.gateway.fleet.links()
    # All have told that they are full: no report ends the wait.
    await world.until(lambda: all(link.load.running for link in links))
    for each in links:
        each.seats.ceiling = each.seats.taken
    call = world.chat()
    await world.until(lambda: len(queue) == 1)
    (link,) = [link for link in links if link.info.worker_id == "w5"]
    workers[5].refuse = None
    for each in links:
        each.load.running = 20 if each is link else 10
    before = sum(len(worker.submits.items) for worker in workers)
    link.seats.reported(0)
    queue.offer(link)
    assert text_of(await rest(call)) == "w5"
    assert sum(len(worker.submits.items) for worker in workers) == before + 1
    await world.until(world.idle)


async def test_a_restarted_worker_is_used_again(world: World) -> None:
    old = await world.worker("w")
    router = await world.router()
    await world.start()
    assert text_of(await world.ask()) == "hello"
    await old.stop()
    await world.until(lambda: not world.server.ready)
    new = await world.worker("w", text="again")
    router.workers[:] = [new]
    router.tell()
    await world.until(lambda: world.server.ready)
    events = await world.ask()
    assert kinds(events) == ["accepted", "delta", "finished"]
    assert text_of(events) == "again"


async def test_a_lagging_replica_does_not_bring_a_dead_incarnation_back(world: World) -> None:
    worker = await world.worker("w")
    await world.router()
    lagging = await world.router([])
    await world.start()
    old = engine_pb2.WorkerInfo()
    old.CopyFrom(worker.info)
    old.incarnation -= 1
    old.address = "127.0.0.1:1"
    stale = router_pb2.WatchResponse(snapshot=True, workers=[router_pb2.WorkerStatus(info=old)])
    world.gateway.fleet.update(lagging.address, stale)
    assert world.server.ready
    assert text_of(await world.ask()) == "hello"


async def test_workers_of_one_live_replica_are_enough(world: World) -> None:
    worker = await world.worker("w")
    await world.router()
    await world.start()
    fleet = world.gateway.fleet
    fleet.update("second", router_pb2.WatchResponse(snapshot=True))
    assert len(fleet.links()) == 1
    # The first goes away and the second, which is live, knows of no worker.
    fleet.source_lost(world.routers[0].address)
    assert not fleet.links()
    # With none live, what was said last stands.
    fleet.update(world.routers[0].address, router_pb2.WatchResponse(snapshot=True, workers=[worker.status()]))
    await world.until(lambda: len(fleet.links()) == 1)
    fleet.source_lost("second")
    fleet.source_lost(world.routers[0].address)
    assert len(fleet.links()) == 1


async def test_an_empty_fleet_is_not_believed_while_frames_flow(world: World) -> None:
    """All routers have just started, or stood still: they will hear of the workers that are connected here."""
    worker = await world.worker("w", text="here")
    router = await world.router()

    async def nobody(request: router_pb2.RouteRequest) -> router_pb2.RouteResponse:
        raise Unavailable("no worker serves it now")

    await world.start(empty_fleet_grace_s=60)
    await world.until(lambda: len(world.gateway.fleet.links()) == 1)
    watched = len(router.watches.items)
    router.workers, router.decide = [], nobody
    router.tell()
    await world.until(lambda: world.gateway.fleet._unlisted == {"w"})
    events = await world.ask(model=MODEL)
    assert text_of(events) == "here"
    assert events[-1].finished.served.degraded
    assert len(router.watches.items) == watched, "the routers were there all the time"
    # Once its frames end it is gone.
    await worker.stop()
    await world.until(lambda: not list(world.gateway.fleet.members()))


async def test_an_empty_fleet_is_believed_in_the_end(world: World) -> None:
    await world.worker("w")
    router = await world.router()
    await world.start(empty_fleet_grace_s=0.2)
    await world.until(lambda: len(world.gateway.fleet.links()) == 1)
    router.workers = []
    router.tell()
    await world.until(lambda: not list(world.gateway.fleet.members()))
