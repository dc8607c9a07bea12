"""What `Route` decides, end to end over gRPC: flights, classes, shadows, explanations, the operators' face."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from kvmesh.proto.v1 import inference_pb2, router_admin_pb2, router_admin_pb2_grpc, router_pb2
from router_harness import LIMIT_S, AttachedWorker, Router, SlowProxy, Valkey, running_router, until
from router_helpers import full_answer, worker_info
from router_helpers import route_request as flying_request
from services.router.cache import exact
from services.router.classes.pools import ClassDecision
from services.router.shadow import Shadow, Shadows


def route_request(text: str = "What is the capital of France?", **fields: Any) -> router_pb2.RouteRequest:
    """One that neither leads nor follows: what these tests place is not always reported."""
    return flying_request(text, **({"no_flight": True} | fields))


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    server = Valkey()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def fresh(valkey: Valkey) -> None:
    valkey.client().flushall()


@contextlib.asynccontextmanager
async def serving(valkey: Valkey, *workers: Any, **fields: Any) -> AsyncIterator[Router]:
    async with contextlib.AsyncExitStack() as stack:
        settings = {"redis_url": valkey.url, "redis_timeout_ms": 2000, "explain_texts": True} | fields
        router = await stack.enter_async_context(running_router(**settings))
        for info in workers or (worker_info("a"),):
            await stack.enter_async_context(AttachedWorker(router, info))
        await router.settled()
        yield router


def admin(router: Router) -> router_admin_pb2_grpc.RouterAdminStub:
    return router_admin_pb2_grpc.RouterAdminStub(router.channel)


async def explained(router: Router, request_id: str) -> router_admin_pb2.ExplainResponse:
    return await admin(router).Explain(router_admin_pb2.ExplainRequest(request_id=request_id), timeout=LIMIT_S)


async def test_twins_follow_until_the_leader_reports(valkey: Valkey) -> None:
    async with serving(valkey, cache="exact") as router:
        led = await router.route(route_request(no_flight=False))
        assert led.WhichOneof("decision") == "placement"
        assert led.lead.flight_id
        assert led.lead.gateway_id == "gw-1"
        twin = await router.route(route_request(request_id="twin", gateway_id="gw-2", no_flight=False))
        assert twin.WhichOneof("decision") == "follow"
        assert twin.follow == led.lead
        assert twin.cache == "follow"
        alone = await router.route(route_request(request_id="alone", no_flight=True))
        assert alone.WhichOneof("decision") == "placement"
        assert not alone.HasField("lead")
        # A follower's own end is none of the flight's.
        await router.report(router_pb2.ReportRequest(decision_id=twin.decision_id, request_id="twin", code=1))
        again = await router.route(route_request(request_id="later", gateway_id="gw-3", no_flight=False))
        assert again.follow.flight_id == led.lead.flight_id
        report = router_pb2.ReportRequest(
            decision_id=led.decision_id, request_id="req-1", answer=full_answer("Paris."), flight=led.lead
        )
        await router.report(report)
        hit = await router.route(route_request(request_id="hit", no_flight=False))
        assert hit.answer.choices[0].text == "Paris."


async def test_a_flight_that_failed_is_led_anew(valkey: Valkey) -> None:
    async with serving(valkey, cache="exact") as router:
        led = await router.route(route_request(no_flight=False))
        await router.report(
            router_pb2.ReportRequest(decision_id=led.decision_id, request_id="req-1", code=14, flight=led.lead)
        )
        again = await router.route(route_request(request_id="again", no_flight=False))
        assert again.lead.token > led.lead.token


async def test_a_follower_that_took_over_may_store(valkey: Valkey) -> None:
    async with serving(valkey, cache="exact") as router:
        led = await router.route(route_request(no_flight=False))
        twin = await router.route(route_request(request_id="twin", gateway_id="gw-2", no_flight=False))
        from kvmesh.store.keys import FlightKeys

        keys = FlightKeys.parse(led.lead.key)
        assert keys is not None
        # The leader is dead: its lease is over, and the follower's gateway has taken the next token.
        client = valkey.client()
        token = int(client.incr(keys.counter))
        client.set(keys.pointer, f"{token} {led.lead.flight_id} gw-2")
        taken = router_pb2.Flight(flight_id=led.lead.flight_id, gateway_id="gw-2", token=token, key=led.lead.key)
        answer = full_answer("Paris.")
        answer.model = "tiny"
        await router.report(
            router_pb2.ReportRequest(decision_id=twin.decision_id, request_id="twin", answer=answer, flight=taken)
        )
        hit = await router.route(route_request(request_id="hit", no_flight=False))
        assert hit.answer.choices[0].text == "Paris."


async def test_a_flight_without_a_worker_is_let_go(valkey: Valkey) -> None:
    async with serving(valkey, cache="exact") as router:
        request = route_request(no_flight=False, prompt_tokens=10)
        router.service.fleet.get("a").info.state = 3
        router.service.fleet.epoch += 1
        for attempt in range(2):
            request.request_id = f"r{attempt}"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await router.route(request)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            await until(lambda: not valkey.client().keys("kvmesh:{*}:f:*"), "the pointer is gone")


async def test_only_if_cached_places_nothing(valkey: Valkey) -> None:
    async with serving(valkey, cache="exact") as router:
        only = inference_pb2.CacheControl(only_if_cached=True)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.route(route_request(cache_control=only, client_request_id="mine"))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert router.service.routing.placer.credit.total == 0
        why = await explained(router, "mine")
        assert why.decision == "NOT_CACHED"
        assert [row.worker_id for row in why.workers] == ["a"]
        assert not valkey.client().keys("kvmesh:{*}:f:*")
        await router.ask(route_request(), "Paris.")
        hit = await router.route(route_request(cache_control=only))
        assert hit.answer.kind == "exact"


async def test_explanation_names_guard_and_scores(valkey: Valkey) -> None:
    async with serving(valkey, worker_info("a"), worker_info("b"), semantic_threshold=0.6) as router:
        await router.ask(route_request("How do I cook rice for 4 people?"), "Slowly.")
        near = route_request("How do I cook rice for 6 people?", request_id="near", client_request_id="client-near")
        assert (await router.route(near)).WhichOneof("decision") == "placement"
        for name in ("near", "client-near"):
            why = await explained(router, name)
            assert (why.decision, why.model, why.cache.outcome, why.cache.mode) == (
                "placement",
                "tiny",
                "miss",
                "semantic",
            )
            (candidate,) = why.cache.candidates
            assert (candidate.guard, candidate.served) == ("numbers", False)
            assert candidate.text == "How do I cook rice for 4 people?"
            assert sorted(row.rank for row in why.workers) == [1, 2]
            assert set(why.parts_ms) >= {"exact", "semantic", "placement"}
            assert why.total_ms > 0
        # It waited in line: then workers alone are asked for.
        near.cache = inference_pb2.CACHE_MODE_OFF
        await router.route(near)
        why = await explained(router, "near")
        assert (why.cache.outcome, [each.guard for each in why.cache.candidates]) == ("miss", ["numbers"])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await explained(router, "nobody")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        router.service.routing.traces._by_id["near"].candidates = ()
    async with serving(valkey, semantic_threshold=0.6, explain_texts=False) as router:
        await router.ask(route_request("How do I boil 4 eggs?"), "Slowly.")
        await router.route(route_request("How do I boil 6 eggs?", request_id="near"))
        why = await explained(router, "near")
        assert [candidate.text for candidate in why.cache.candidates] == [""]


async def test_stats_and_purge(valkey: Valkey) -> None:
    async with serving(valkey, cache="exact") as router:
        await router.ask(route_request(), "Paris.")
        hit = await router.route(route_request())
        assert hit.answer.purge_id
        stats = await admin(router).CacheStats(router_admin_pb2.CacheStatsRequest(), timeout=LIMIT_S)
        assert stats.lookups["exact"] == 1
        assert stats.lookups["miss"] == 1
        (tenant,) = stats.tenants
        assert (tenant.tenant, tenant.entries, tenant.hits, tenant.misses) == ("local", 1, 1, 1)
        assert (stats.shadows, stats.false_hit_low, stats.false_hit_high) == (0, 0.0, 1.0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await admin(router).CachePurge(router_admin_pb2.CachePurgeRequest(), timeout=LIMIT_S)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        purged = await admin(router).CachePurge(
            router_admin_pb2.CachePurgeRequest(purge_id=hit.answer.purge_id), timeout=LIMIT_S
        )
        assert purged.purged == 1
        assert (await router.route(route_request())).WhichOneof("decision") == "placement"


class FakeClasses:
    """Chooses by the length of the text: what matters here is what the router makes of the choice."""

    version = "test"

    def models(self, alias: str) -> tuple[str, ...]:
        return ("large", "small") if alias == "clever" else ()

    def reading(self, text: str) -> str:
        return text

    def choose(
        self, alias: str, text: str, vector: Any, session_id: str, tenant: str, served: set[str]
    ) -> ClassDecision:
        small = len(text) < 20
        return ClassDecision(
            alias, "small" if small else "large", "small" if small else "large", 0.7, 0.5, "probability", {"chars": 1.0}
        )


async def test_an_alias_with_classes(valkey: Valkey) -> None:
    small = worker_info("s", model="small", tokenizer_fingerprint="tok")
    large = worker_info("l", model="large", tokenizer_fingerprint="tok")
    async with serving(valkey, small, large, cache="exact", aliases=["clever=large"]) as router:
        router.service.routing._classes = FakeClasses()
        easy = await router.route(route_request("2 + 2?", model="clever", request_id="easy"))
        assert (easy.model, easy.placement.pair.decode.worker_id) == ("small", "s")
        hard = await router.route(route_request("Prove the Riemann hypothesis.", model="clever", request_id="hard"))
        assert hard.model == "large"
        assert (await router.route(route_request("2 + 2?", model="large", request_id="named"))).model == "large"
        why = await explained(router, "easy")
        chosen = getattr(why, "class")
        assert (chosen.alias, chosen.pool, chosen.probability) == ("clever", "small", 0.7)
        await admin(router).Feedback(router_admin_pb2.FeedbackRequest(request_id="easy", good=True), timeout=LIMIT_S)
        for request_id, code in (("easy", grpc.StatusCode.NOT_FOUND), ("named", grpc.StatusCode.NOT_FOUND)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await admin(router).Feedback(
                    router_admin_pb2.FeedbackRequest(request_id=request_id, good=True), timeout=LIMIT_S
                )
            assert caught.value.code() is code


async def test_a_prompt_of_another_tokenizer_is_asked_for_anew(valkey: Valkey) -> None:
    small = worker_info("s", model="small", tokenizer_fingerprint="tok-s")
    large = worker_info("l", model="large", tokenizer_fingerprint="tok-l")
    async with serving(valkey, small, large, cache="exact", aliases=["clever=large"]) as router:
        router.service.routing._classes = FakeClasses()
        fields: dict[str, Any] = {"model": "clever", "no_flight": False}
        first = await router.route(
            route_request("2 + 2?", tokenized_for="large", tokenizer_fingerprint="tok-l", **fields)
        )
        assert first.model == "small"
        assert first.WhichOneof("decision") is None
        assert router.service.routing.placer.credit.total == 0
        await until(lambda: not valkey.client().keys("kvmesh:{*}:f:*"), "the flight is let go")
        second = await router.route(
            route_request("2 + 2?", tokenized_for="small", tokenizer_fingerprint="tok-s", **fields)
        )
        assert second.placement.pair.decode.worker_id == "s"
        await router.report(
            router_pb2.ReportRequest(
                decision_id=second.decision_id, request_id="req-1", answer=full_answer("4."), flight=second.lead
            )
        )
        # Whoever asks the alias tokenizes for the large model first, and finds the small one's answer all the same.
        hit = await router.route(
            route_request("2 + 2?", tokenized_for="large", tokenizer_fingerprint="tok-l", prompt_tokens=7, **fields)
        )
        assert hit.answer.kind == "exact"
        assert hit.model == "small"


async def test_a_prompt_to_be_made_anew_leads_no_flight(valkey: Valkey) -> None:
    async with serving(valkey, worker_info("s", model="small"), cache="exact") as router:
        first = await router.route(route_request(model="auto", tokenized_for="large", no_flight=False))
        assert (first.model, first.WhichOneof("decision")) == ("small", None)
        second = await router.route(route_request(model="auto", tokenized_for="small", no_flight=False))
        assert second.placement.pair.decode.worker_id == "s"
        assert second.lead.flight_id


async def test_a_look_up_that_is_cancelled_leaves_no_flight(valkey: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "LEASE_MS", 3_600_000)
    proxy = SlowProxy(valkey.port)
    url = await proxy.start()
    try:
        async with serving(valkey, cache="exact", redis_url=url, redis_timeout_ms=2000) as router:
            client = valkey.client()
            await router.route(route_request())  # Connections are there.
            proxy.flow.clear()
            call = router.stub.Route(route_request(no_flight=False), timeout=LIMIT_S)
            await until(lambda: client.keys("kvmesh:{*}:f:*"), "Redis has made the flight")
            call.cancel()
            await until(lambda: router.service.cache.exact._undoing, "the router has heard of it")
            proxy.flow.set()
            await until(lambda: not client.keys("kvmesh:{*}:f:*"), "the flight is undone")
    finally:
        await proxy.close()


async def test_shadowed_hits_are_judged(valkey: Valkey) -> None:
    async with serving(valkey, semantic_threshold=0.6, shadow_rate=0.01, shadow_per_minute=6000) as router:
        routing = router.service.routing
        routing.shadows._rate = 1.0
        await router.ask(route_request("What is the capital of France?"), "It is Paris.")
        verdicts = []
        for fresh in ("It is Paris.", "Forty-two kilometres.", "I'm sorry, but I can't help with that."):
            hit = await router.route(route_request("Tell me what is the capital of France"))
            assert hit.answer.kind == "semantic"
            assert hit.shadow_id
            report = router_pb2.ReportShadowRequest(shadow_id=hit.shadow_id, answer=full_answer(fresh))
            with pytest.MonkeyPatch.context() as patch:
                seen: list[bool | None] = []
                judge = routing.report_shadow

                async def spy(*args: Any, seen: list[bool | None] = seen, judge: Any = judge) -> bool | None:
                    seen.append(await judge(*args))
                    return seen[-1]

                patch.setattr(routing, "report_shadow", spy)
                await router.stub.ReportShadow(report, timeout=LIMIT_S)
                verdicts += seen
            await router.stub.ReportShadow(report, timeout=LIMIT_S)  # Once only.
        assert verdicts == [True, False, None]
        stats = await admin(router).CacheStats(router_admin_pb2.CacheStatsRequest(), timeout=LIMIT_S)
        assert (stats.shadows, stats.shadows_wrong, stats.shadows_untold) == (2, 1, 1)
        assert stats.false_hit_low < stats.false_hit_rate < stats.false_hit_high
        assert stats.false_hit_rate == pytest.approx(routing.shadows.estimate().rate)


def test_shadows_keep_to_rate_and_budget() -> None:
    now = 0.0
    shadows = Shadows(0.01, 60.0, clock=lambda: now, rng=random.Random(7))
    shadow = Shadow("t", "asked", "remembered", "served")
    chosen = 0
    for _ in range(20_000):
        now += 0.01
        chosen += bool(shadows.choose(shadow))
    assert 150 <= chosen <= 250, "1 % of the hits"
    busy = Shadows(1.0, 60.0, clock=lambda: now, rng=random.Random(7))
    assert sum(bool(busy.choose(shadow)) for _ in range(1000)) == 10, "the burst, then nothing"
    one = Shadows(1.0, 60.0, clock=lambda: now)
    shadow_id = one.choose(shadow)
    assert one.take(shadow_id, "other") is None
    assert one.take(shadow_id, "t") is shadow
    assert one.take(shadow_id, "t") is None
