"""The router as a real server on loopback: attach, watch, route, report, tenants, errors, drain."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvmesh.errors import FailedPrecondition, InvalidArgument, KvmeshError, NotFound, Unauthenticated, Unavailable
from kvmesh.proto.v1 import engine_pb2, inference_pb2, router_pb2, router_pb2_grpc
from kvmesh.rpc import from_rpc_error, open_channel
from kvmesh.telemetry import metrics, names, tracing
from router_harness import LIMIT_S, TOKEN, AttachedWorker, Router, running_router, until
from router_helpers import chain, full_answer, kv_events, route_request, worker_info
from services.router import service as service_module
from services.router.placement.index import split

SERVICE = "kvmesh.v1.Router"


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    async with running_router() as made:
        yield made


@contextlib.asynccontextmanager
async def attached(router: Router, *infos: engine_pb2.WorkerInfo) -> AsyncIterator[list[AttachedWorker]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(AttachedWorker(router, info)) for info in infos]


@contextlib.contextmanager
def raises(kind: type[KvmeshError], match: str = "") -> object:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield
    error = from_rpc_error(caught.value)
    assert type(error) is kind, error
    assert match in error.message


def decode_id(response: router_pb2.RouteResponse) -> str:
    return response.placement.pair.decode.worker_id


# --- placement --------------------------------------------------------------------------------------------------


async def test_a_request_is_placed_on_what_attached(router: Router) -> None:
    async with attached(router, worker_info("d"), worker_info("p", "prefill")):
        response = await router.route(route_request())
        assert response.model == "tiny"
        assert response.placement.revision == "r1"
        assert response.placement.pair.decode == worker_info("d")
        assert [t.worker_id for t in response.placement.pair.prefill] == ["p"]
        assert response.decision_id
        aliased = await router.route(route_request(model="auto"))
        assert aliased.model == "tiny"


async def test_route_says_what_is_wrong(router: Router) -> None:
    async with attached(router, worker_info("d")) as (worker,):
        router.service.fleet._started -= 60.0  # No longer gathering.
        with raises(NotFound):
            await router.route(route_request(model="nope"))
        for bad in (
            {"prompt_tokens": 0},
            {"chains": [router_pb2.PrefixChain(block_size=4, hashes=b"x")]},
            {"request_id": ""},
            {"model": ""},
            {"request_id": "x" * 129},
            {"chains": [router_pb2.PrefixChain(block_size=4)] * 65},
            {"client_request_id": "x" * 513},
            {"session_id": "é" * 257},
            {"gateway_id": "x" * 513},
        ):
            with raises(InvalidArgument):
                await router.route(route_request(**bad))
        for tau in (float("nan"), -0.1, 1.1):
            with raises(InvalidArgument, "tau"):
                await router.route(route_request(tau=tau))
        with raises(Unavailable):
            await router.route(route_request(exclude_workers=["d"]))
        with raises(FailedPrecondition, "unified"):
            await router.route(route_request(sampling=inference_pb2.SamplingParams(prompt_logprobs=1)))
        for state in (engine_pb2.WORKER_STATE_DRAINING, engine_pb2.WORKER_STATE_STALLED):
            await worker.send(router_pb2.AttachRequest(registration=worker_info("d", state=state)))
            await until(lambda state=state: router.service.fleet.get("d").info.state == state, "state")
            with raises(Unavailable):
                await router.route(route_request())


async def test_a_young_router_does_not_deny_models(router: Router) -> None:
    with raises(Unavailable, "attaching"):
        await router.route(route_request())


async def test_load_reports_and_credit_steer(router: Router) -> None:
    async with attached(router, worker_info("a"), worker_info("b")) as (a, b):
        await a.load(inflight_tokens=100_000)
        await b.load(inflight_tokens=100)
        await until(lambda: router.service.fleet.get("b").load.inflight_tokens == 100, "load")
        assert decode_id(await router.route(route_request(request_id="r1"))) == "b"
        await b.load(inflight_tokens=100_000)
        await until(lambda: router.service.fleet.get("b").load.inflight_tokens == 100_000, "load")
        # Both equal but for the credit of r1 on b.
        assert decode_id(await router.route(route_request(request_id="r2"))) == "a"
        credit = router.service.routing.placer.credit
        assert credit.requests("a") == credit.requests("b") == 1
        await a.load("r2", inflight_tokens=100_000)
        await until(lambda: credit.requests("a") == 0, "seen")
        assert credit.requests("b") == 1
        await router.report(router_pb2.ReportRequest(request_id="r1", code=14))
        assert credit.total == 0


async def test_a_burst_spreads_before_any_report(router: Router) -> None:
    async with attached(router, *(worker_info(f"w{i}") for i in range(4))) as workers:
        for worker in workers:
            await worker.send(router_pb2.AttachRequest(kv=kv_events(1)))
        await until(lambda: router.service.fleet.columns.synced.sum() == 4, "snapshots")
        request = route_request(chains=[chain(list(range(65)))])
        requests = [router_pb2.RouteRequest() for _ in range(40)]
        for i, each in enumerate(requests):
            each.CopyFrom(request)
            each.request_id = f"r{i}"
        responses = await asyncio.gather(*map(router.route, requests))
        counts = [sum(decode_id(r) == f"w{i}" for r in responses) for i in range(4)]
        assert counts == [10, 10, 10, 10]


async def test_a_held_prefix_attracts(router: Router) -> None:
    request = route_request(token_ids=list(range(65)), chains=[chain(list(range(65)))])
    held = split(chain(list(range(65))).hashes)
    async with attached(router, *(worker_info(f"w{i}") for i in range(4))) as workers:
        await workers[2].send(router_pb2.AttachRequest(kv=kv_events(1, held)))
        await until(lambda: len(router.service.fleet.index) == 2, "blocks")
        for i in range(3):
            request.request_id = f"r{i}"
            assert decode_id(await router.route(request)) == "w2"
            await router.report(router_pb2.ReportRequest(request_id=request.request_id))


# --- fleet ------------------------------------------------------------------------------------------------------


async def test_the_end_of_the_stream_removes(router: Router) -> None:
    async with attached(router, worker_info("a"), worker_info("b")) as (a, _):
        assert (await a.heartbeat()).router_id == "router-1"
        await a.done_writing()
        await until(lambda: router.service.fleet.get("a") is None, "gone")
    await until(lambda: len(router.service.fleet) == 0, "all gone")


async def test_lost_events_are_asked_for_at_once(router: Router) -> None:
    """Not with the next heartbeat: until then the worker's prefixes are not known."""
    async with attached(router, worker_info("a")) as (a,):
        await a.send(router_pb2.AttachRequest(kv=kv_events(1, [b"x" * 16])))
        await a.send(router_pb2.AttachRequest(kv=kv_events(3, [b"y" * 16])))
        beats = []
        while not beats or not beats[-1].need_snapshot:
            beats.append(await a.heartbeat())
        assert len(router.service.fleet.index) in (0, 1), "hidden, and cleared behind"
        assert router.service.fleet.columns.synced.sum() == 0
        await a.send(router_pb2.AttachRequest(kv=kv_events(4, [b"y" * 16], reset=True)))
        await until(lambda: router.service.fleet.columns.synced.sum() == 1, "snapshot")
        assert not (await a.heartbeat()).need_snapshot


async def test_a_cordoned_fleet_says_so(router: Router) -> None:
    async with attached(router, worker_info("d", state=engine_pb2.WORKER_STATE_CORDONED)):
        with raises(Unavailable, "1 cordoned"):
            await router.route(route_request())


async def test_silence_removes_and_tells_why() -> None:
    async with running_router(worker_timeout_s=1.0) as router, attached(router, worker_info("a")) as (a,):
        await until(lambda: len(router.service.fleet) == 0, "silent worker")
        with raises(Unavailable, "silent"):
            while True:
                await a.heartbeat()


async def test_a_stream_that_never_registers_is_ended() -> None:
    async with running_router(worker_timeout_s=0.1) as router:
        call = router.stub.Attach()
        with raises(FailedPrecondition):
            async with asyncio.timeout(LIMIT_S):
                await call.read()
                await call.wait_for_connection()
                raise AssertionError(await call.code())


async def test_a_new_incarnation_replaces_the_old_at_once(router: Router) -> None:
    async with attached(router, worker_info("a", incarnation=1)) as (old,):
        await router.route(route_request())
        assert router.service.routing.placer.credit.total > 0
        async with attached(router, worker_info("a", incarnation=2, address="127.0.0.1:2")):
            placed = await router.route(route_request(request_id="r2"))
            assert placed.placement.pair.decode.incarnation == 2
            assert router.service.routing.placer.credit.requests("a") == 1, "credit on the dead process is void"
            with raises(FailedPrecondition, "incarnation"):
                while True:
                    await old.heartbeat()
            assert router.service.fleet.get("a").info.incarnation == 2


async def test_bad_attach_messages_end_the_stream(router: Router) -> None:
    for message, kind in (
        (router_pb2.AttachRequest(), InvalidArgument),
        (router_pb2.AttachRequest(load=router_pb2.LoadReport()), FailedPrecondition),
        (router_pb2.AttachRequest(registration=worker_info("")), InvalidArgument),
    ):
        call = router.stub.Attach()
        await call.write(message)
        with raises(kind):
            async with asyncio.timeout(LIMIT_S):
                async for _ in call:
                    pass
    assert len(router.service.fleet) == 0


async def test_watch_follows_the_fleet(router: Router) -> None:
    async with attached(router, worker_info("a")):
        call = router.stub.Watch(router_pb2.WatchRequest(watcher_id="gw"))
        async with asyncio.timeout(LIMIT_S):
            first = await call.read()
            assert first.snapshot
            assert [w.info for w in first.workers] == [worker_info("a")]
            assert (first.cache.embedder, first.cache.redis_ok) == ("hash", False)
            async with attached(router, worker_info("b")):
                message = await call.read()
                while not message.workers:
                    message = await call.read()
                assert [w.info.worker_id for w in message.workers] == ["b"]
            while not message.removed:
                message = await call.read()
            assert list(message.removed) == ["b"]
        call.cancel()
        await until(lambda: len(router.service.hub) == 0, "watcher gone")


async def test_a_watcher_that_does_not_read_costs_nothing(router: Router) -> None:
    call = router.stub.Watch(router_pb2.WatchRequest())
    await until(lambda: len(router.service.hub) == 1, "watching")
    async with attached(router, worker_info("a")) as (a,):
        for i in range(2000):
            await a.send(router_pb2.AttachRequest(registration=worker_info("a", architecture=f"{i}" * 40)))
        await until(lambda: router.service.fleet.get("a").info.architecture == "1999" * 40, "all read")
        assert all(watcher.pending <= 1 for watcher in router.service.hub._watchers)
    call.cancel()


async def test_drain_sends_workers_and_watchers_away() -> None:
    async with running_router() as router, attached(router, worker_info("a")) as (a,):
        call = router.stub.Watch(router_pb2.WatchRequest())
        async with asyncio.timeout(LIMIT_S):
            await call.read()
            draining = asyncio.create_task(router.server.drain(router.service.drain))
            with raises(Unavailable):
                while True:
                    await a.heartbeat()
            with raises(Unavailable):
                while await call.read() is not grpc.aio.EOF:
                    pass
                await call.wait_for_connection()
            await draining


async def test_readiness_and_metrics(router: Router) -> None:
    health = health_pb2_grpc.HealthStub(router.channel)
    status = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=LIMIT_S)
    assert status.status == health_pb2.HealthCheckResponse.SERVING
    before = metrics.value(names.ROUTER_DECISIONS, decision="placement")
    async with attached(router, worker_info("a"), worker_info("u", "unified")):
        await router.route(route_request())
        assert metrics.value(names.ROUTER_DECISIONS, decision="placement") == before + 1
        await until(lambda: metrics.value(names.ROUTER_WORKERS, role="unified") == 1, "gauge")
        assert metrics.value(names.RPC_DURATION, method=f"{SERVICE}/Route", code="OK") >= 1


async def test_spans_of_a_decision() -> None:
    exporter = InMemorySpanExporter()
    tracing.setup("router-test", exporter=exporter)
    try:
        async with running_router() as router, attached(router, worker_info("a")):
            await router.ask(route_request("How do whales sleep"), "fine")
            await router.ask(route_request("How do whales sleep"), "fine")
        spans = {span.name: span for span in exporter.get_finished_spans()}
        route = spans[names.SPAN_ROUTER_ROUTE]
        near = spans[names.SPAN_CACHE_SEMANTIC]
        assert near.parent.span_id == route.context.span_id
        assert route.attributes[names.ATTR_DECISION] == "semantic"
        server = spans[f"{SERVICE}/Route"]
        assert server.context.trace_id == route.context.trace_id
    finally:
        tracing.shutdown()


# --- tenants ----------------------------------------------------------------------------------------------------


async def test_only_members_of_the_mesh_get_in(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    async with running_router(token_file=token) as router, attached(router, worker_info("a")):
        await router.route(route_request(), tenant="acme")
        stranger = open_channel(router.server.address)
        try:
            stub = router_pb2_grpc.RouterStub(stranger)
            with raises(Unauthenticated):
                await stub.Route(route_request(), timeout=LIMIT_S)
            with raises(Unauthenticated):
                async for _ in stub.Watch(router_pb2.WatchRequest()):
                    pass
        finally:
            await stranger.close()


async def test_answers_stay_with_their_tenant(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    question = route_request("How do whales sleep")
    async with running_router(token_file=token) as router, attached(router, worker_info("a")):
        await router.ask(question, "secret of acme", "acme")
        for tenant in ("evil", "local", "acme2", "Acme"):
            assert (await router.route(question, tenant)).HasField("placement")
        hit = await router.route(question, "acme")
        assert hit.answer.choices[0].text == "secret of acme"

        # A decision of one tenant cannot be reported by another.
        placed = await router.route(route_request("Another question", request_id="r9"), "acme")
        forged = router_pb2.ReportRequest(decision_id=placed.decision_id, request_id="r9", answer=full_answer("poison"))
        await router.report(forged, "evil")
        assert (await router.route(route_request("Another question"), "acme")).HasField("placement")


async def test_an_unproved_hop_cannot_name_a_tenant(router: Router) -> None:
    async with attached(router, worker_info("a")):
        with raises(Unauthenticated):
            await router.route(route_request(), "acme")


# --- a router that replaces another -------------------------------------------------------------------------------


async def test_it_is_ready_when_the_workers_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "QUIET_S", 0.2)
    async with running_router(fleet_wait_s=600) as router:
        assert not router.server.ready
        # One that only prefills is nobody who answers.
        async with attached(router, worker_info("p", "prefill")):
            await asyncio.sleep(0.4)
            assert not router.server.ready
            # Decisions are there to be had all the same.
            async with attached(router, worker_info("d")):
                assert decode_id(await router.route(route_request())) == "d"
                await until(lambda: router.server.ready, "ready")


async def test_it_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_router(fleet_wait_s=0.3) as router:
        await until(lambda: router.server.ready, "ready")
