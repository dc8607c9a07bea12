"""The answer caches against a real Valkey: what is kept, what never is, and life with a dead or slow Redis."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache_kit import be_patient
from cache_requests import base, every_change
from kvmesh.proto.v1 import inference_pb2, router_pb2
from kvmesh.store import RedisStore, client
from kvmesh.telemetry import metrics, names
from router_harness import LIMIT_S, AttachedWorker, Router, SlowProxy, Valkey, running_router, until
from router_helpers import chat, full_answer, worker_info
from router_helpers import route_request as flying_request
from services.router.cache.answers import AnswerCache
from services.router.cache.fingerprint import NOT_COMPARED
from services.router.cache.policy import CacheRules, Mode
from services.router.near.embedder import HashEmbedder
from services.router.near.nearcache import NearCache


def route_request(text: str = "What is the capital of France?", **fields: Any) -> router_pb2.RouteRequest:
    """One that neither leads nor follows: what these tests place is not always reported."""
    return flying_request(text, **({"no_flight": True} | fields))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    server = Valkey()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def fresh(valkey: Valkey) -> None:
    valkey.client().flushall()


@contextlib.asynccontextmanager
async def serving(valkey: Valkey | str, **fields: Any) -> AsyncIterator[Router]:
    """A router with one decode worker and this Redis; the limit is generous, the machine may be busy."""
    url = valkey if isinstance(valkey, str) else valkey.url
    async with running_router(redis_url=url, **({"redis_timeout_ms": 2000} | fields)) as router:
        async with AttachedWorker(router, worker_info("a")):
            yield router


def kind(response: router_pb2.RouteResponse) -> str:
    return response.answer.kind if response.HasField("answer") else "placement"


async def test_an_answer_is_remembered_exactly(valkey: Valkey) -> None:
    async with serving(valkey, cache="exact") as router:
        assert kind(await router.ask(route_request(), "Paris.")) == "placement"
        hit = await router.route(route_request(request_id="other", gateway_id="other", priority=3, ttft_ms=1))
        assert kind(hit) == "exact"
        assert (hit.answer.choices[0].text, hit.answer.score, hit.model) == ("Paris.", 1.0, "tiny")
        assert hit.cache == "exact"
        # The hit takes no worker.
        assert router.service.routing.placer.credit.total == 0
        assert kind(await router.route(route_request(model="auto"))) == "placement", "an alias may stand for another"
        status = router.service.cache.status()
        assert (status.redis_ok, status.exact_hits, status.misses) == (True, 1, 2)
    ages = metrics.value(names.CACHE_HIT_AGE, cache="exact")
    async with serving(valkey, cache="exact") as another:
        assert kind(await another.route(route_request())) == "exact", "another replica, or the same restarted"
    assert metrics.value(names.CACHE_HIT_AGE, cache="exact") == ages + 1


async def test_order_is_exact_then_semantic(valkey: Valkey) -> None:
    async with serving(valkey, semantic_threshold=0.7) as router:
        await router.ask(route_request("What is the capital of France?"), "Paris.")
        assert kind(await router.route(route_request("What is the capital of France?"))) == "exact"
        near = await router.route(route_request("Tell me what is the capital of France"))
        assert kind(near) == "semantic"
        assert 0.7 <= near.answer.score < 1.0
        assert kind(await router.route(route_request("Tell me what is the capital of Spain"))) == "placement"
        assert (
            kind(await router.route(route_request("Tell me what is the capital of France", tau=0.999))) == "placement"
        )


async def test_cache_mode_narrows(valkey: Valkey) -> None:
    off, exact_only, semantic = (
        inference_pb2.CACHE_MODE_OFF,
        inference_pb2.CACHE_MODE_EXACT,
        inference_pb2.CACHE_MODE_SEMANTIC,
    )
    similar = "Tell me what is the capital of France"
    async with serving(valkey, semantic_threshold=0.7) as router:
        await router.ask(route_request(cache=off), "never kept")
        assert kind(await router.route(route_request())) == "placement", "OFF does not write"
        await router.ask(route_request(cache=exact_only), "Paris.")
        assert kind(await router.route(route_request(cache=off))) == "placement", "OFF does not read"
        assert kind(await router.route(route_request(cache=exact_only))) == "exact"
        assert kind(await router.route(route_request(similar))) == "placement", "EXACT was not kept semantically"
    valkey.client().flushall()
    async with serving(valkey, semantic_threshold=0.7) as router:
        await router.ask(route_request(cache=semantic), "Paris.")
        assert kind(await router.route(route_request(similar, cache=exact_only))) == "placement"
        assert kind(await router.route(route_request(similar))) == "semantic"
    async with serving(valkey, cache="off") as router:
        assert kind(await router.route(route_request(cache=semantic))) == "placement", "never more than is offered"


async def test_what_is_never_kept(valkey: Valkey) -> None:
    cut = full_answer("Par")
    cut.choices[0].finish_reason = inference_pb2.FINISH_REASON_LENGTH
    half = full_answer()
    half.choices.append(router_pb2.CachedChoice(text="x", finish_reason=inference_pb2.FINISH_REASON_LENGTH))
    cases: list[dict[str, Any]] = [
        {"answer": cut},
        {"answer": half},
        {"answer": router_pb2.CachedAnswer(revision="r1")},
        {"answer": full_answer(revision="r2")},
        {"answer": full_answer("x" * 300_000)},
        {"code": 1},
        {"code": 14},
        {"answer": None},
        {"answer": full_answer("")},
        {"answer": full_answer("I'm sorry, but I can't help with that.")},
    ]
    async with serving(valkey) as router:
        for case in cases:
            await router.ask(route_request(), "Paris.", **case)
            assert kind(await router.route(route_request())) == "placement", case
        for sampling in ({"logprobs": 0}, {"logprobs": 5}):
            request = route_request(sampling=inference_pb2.SamplingParams(**sampling))
            await router.ask(request, "scored")
            assert kind(await router.route(request)) == "placement"
        assert valkey.client().keys("kvmesh:{*") == []
        assert router.service.cache.near is not None
        assert router.service.cache.near.entries == 0


async def test_a_report_counts_once_and_only_for_its_decision(valkey: Valkey) -> None:
    async with serving(valkey) as router:
        placed = await router.route(route_request())
        report = router_pb2.ReportRequest(request_id="req-1", decision_id="unknown", answer=full_answer("made up"))
        await router.report(report)
        report.decision_id = placed.decision_id
        report.answer.CopyFrom(full_answer("Paris."))
        await router.report(report)
        report.answer.CopyFrom(full_answer("Rome."))
        await router.report(report)
        assert (await router.route(route_request())).answer.choices[0].text == "Paris."
        assert len(router.service.routing.decisions) == 0


async def test_identical_requests_follow_the_first(valkey: Valkey) -> None:
    async with serving(valkey) as router:
        led = await router.route(flying_request(gateway_id="gw-1"))
        assert led.HasField("placement")
        assert led.lead.gateway_id == "gw-1"
        follower = await router.route(flying_request(gateway_id="gw-2", request_id="req-2"))
        assert (follower.follow, follower.cache) == (led.lead, "follow")
        assert kind(await router.route(route_request(request_id="req-3"))) == "placement", "asked not to"
        report = router_pb2.ReportRequest(
            request_id="req-1", decision_id=led.decision_id, answer=full_answer("Paris."), flight=led.lead
        )
        await router.report(report)
        assert kind(await router.route(flying_request(request_id="req-4"))) == "exact"
        # One that fails lets the next one lead at once.
        led = await router.route(flying_request("Why?"))
        await router.report(router_pb2.ReportRequest(request_id="req-1", decision_id=led.decision_id, code=14))
        again = await router.route(flying_request("Why?"))
        assert again.lead.token == led.lead.token + 1


async def test_a_second_try_does_not_touch_the_cache(valkey: Valkey) -> None:
    async with serving(valkey) as router, AttachedWorker(router, worker_info("b")):
        await router.ask(route_request(), "Paris.")
        retry = await router.route(route_request(exclude_workers=["a"]))
        assert retry.placement.pair.decode.worker_id == "b"


async def test_answers_outlive_their_workers(valkey: Valkey) -> None:
    async with running_router(redis_url=valkey.url, redis_timeout_ms=2000) as router:
        async with AttachedWorker(router, worker_info("a")):
            await router.ask(route_request(), "Paris.")
        await until(lambda: len(router.service.fleet) == 0, "gone")
        assert kind(await router.route(route_request())) == "exact"


async def test_another_revision_is_another_answer(valkey: Valkey) -> None:
    async with serving(valkey) as router:
        await router.ask(route_request(), "Paris.")
        async with AttachedWorker(router, worker_info("a", incarnation=2, revision="r2")):
            assert kind(await router.route(route_request())) == "placement"


async def test_answers_grow_old(valkey: Valkey) -> None:
    async with serving(valkey, cache_ttl_s=100.0) as router:
        await router.ask(route_request(), "Paris.")
        client = valkey.client()
        names = client.keys("kvmesh:{*")
        assert len([name for name in names if b":a:" in name]) == 1
        for name in names:
            assert 0 < client.pttl(name) <= 100_000, name


async def test_seeds_and_draws(valkey: Valkey) -> None:
    def seeded(**sampling: Any) -> router_pb2.RouteRequest:
        return route_request(sampling=inference_pb2.SamplingParams(temperature=1.0, **sampling))

    async with serving(valkey) as router:
        await router.ask(seeded(), "drawn")
        assert kind(await router.route(seeded())) == "exact", "identical requests share a draw"
        assert kind(await router.route(seeded(seed=0))) == "placement", "a seed the client set is part of it"
        await router.ask(seeded(seed=7), "seven")
        assert (await router.route(seeded(seed=7))).answer.choices[0].text == "seven"
        assert kind(await router.route(seeded(seed=8))) == "placement"


async def test_foreign_bytes_in_redis_are_a_miss(valkey: Valkey) -> None:
    async with serving(valkey, cache="exact") as router:
        await router.ask(route_request(), "Paris.")
        (name,) = valkey.client().keys("*:a:*")
        for junk in (b"", b"\xff" * 10, full_answer(revision="r2").SerializeToString(), b"x" * 3_000_000):
            valkey.client().set(name, junk)
            assert kind(await router.route(route_request())) == "placement"
        valkey.client().delete(name)
        valkey.client().lpush(name, b"a list")
        assert kind(await router.route(route_request())) == "placement"
        assert router.service.cache.status().redis_ok, "a wrong type is an error of the value, Redis lives"


# --- properties over both caches ----------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def both_caches(valkey: Valkey) -> AsyncIterator[AnswerCache]:
    store = RedisStore(valkey.url, timeout_s=5.0)
    near = NearCache(HashEmbedder, max_entries=1000, max_bytes=1 << 24, ttl_s=60.0)
    rules = CacheRules(mode=Mode.SEMANTIC, embedder="hash", tau=0.5)
    cache = AnswerCache(store, near, rules=rules, ttl_s=60.0, max_entry_bytes=1 << 16)
    cache.start()
    run = asyncio.create_task(cache.run())
    try:
        async with asyncio.timeout(LIMIT_S):
            await store.checked.wait()
        assert await asyncio.to_thread(near.settled.wait, LIMIT_S)
        yield cache
    finally:
        run.cancel()
        await cache.close()


SERVED = {("tiny", "r1")}


async def find(
    cache: AnswerCache, request: router_pb2.RouteRequest, tenant: str = "t", *, skip_exact: bool = False
) -> str:
    plan = cache.plan(request, tenant)
    found = None
    if not skip_exact:
        found = (await cache.exact_or_flight(plan, SERVED, fly=False, budget_s=5.0)).answer
    found = found or (await cache.near_answer(plan, SERVED, budget_s=5.0)).answer
    return "" if found is None else f"{found.kind}:{found.choices[0].text}"


async def keep(cache: AnswerCache, request: router_pb2.RouteRequest, text: str, tenant: str = "t") -> None:
    assert await cache.store_answer(cache.plan(request, tenant), full_answer(text), model="tiny", revision="r1")


async def test_any_change_of_any_field_is_a_miss_in_both(valkey: Valkey) -> None:
    """Also in the semantic cache alone, which the exact one must not shield."""
    async with both_caches(valkey) as cache:
        await keep(cache, base(), "answer")
        assert await find(cache, base()) == "exact:answer"
        assert await find(cache, base(), skip_exact=True) == "semantic:answer"
        for name, change in every_change():
            changed = base()
            change(changed)
            neutral = re.split(r"\W", name)[0] in (*NOT_COMPARED, "token_ids")
            # The same text over other tokens, or none: the near miss that only the digest tells.
            expected = "" if name.startswith("messages[3].content") or not neutral else "answer"
            if name.startswith(("cache ", "cache_control", "exclude_workers", "tau", "no_flight")):
                # Controls: covered one by one in the policy's tests.
                continue
            assert (await find(cache, changed)).partition(":")[2] == expected, name
            assert (await find(cache, changed, skip_exact=True)).partition(":")[2] == expected, name


tenants = st.sampled_from(["a", "b", "ab", "a.b", "A", "local"])
questions = st.sampled_from(["Who wrote Hamlet?", "who wrote hamlet", "Please tell me who wrote Hamlet", "Why me?"])


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(asked=st.lists(st.tuples(tenants, questions), min_size=1, max_size=12))
def test_tenants_never_cross(valkey: Valkey, asked: list[tuple[str, str]]) -> None:
    """Every answer carries its tenant's name; whatever is asked in whatever order, nobody sees another's."""

    async def run() -> None:
        valkey.client().flushall()
        async with both_caches(valkey) as cache:
            for tenant, text in asked:
                request = route_request(text)
                found = await find(cache, request, tenant)
                assert found.partition(":")[2] in ("", f"for {tenant}")
                if not found:
                    await keep(cache, request, f"for {tenant}", tenant)
                assert (await find(cache, request, tenant)).endswith(f":for {tenant}")

    asyncio.run(run())


# --- a dead or slow Redis -----------------------------------------------------------------------------------------


async def test_a_killed_redis_costs_only_the_cache_and_comes_back(valkey: Valkey) -> None:
    own = Valkey()
    try:
        async with serving(own) as router:
            await router.ask(route_request(), "Paris.")
            assert kind(await router.route(route_request())) == "exact"
            own.kill()
            for i in range(20):
                response = await router.ask(route_request(f"Question {i}", request_id=f"r{i}"), "yes")
                assert kind(response) == "placement"
            assert not router.service.cache.status().redis_ok
            # What is in memory could serve, but nobody knows what was purged meanwhile.
            assert kind(await router.route(route_request("Question 1"))) == "placement"
            own.restart()
            await until(lambda: router.service.cache.status().redis_ok, "found again")
            await router.ask(route_request("After"), "again")
            assert kind(await router.route(route_request("After"))) == "exact"
    finally:
        own.close()


async def test_a_router_starts_without_redis_and_finds_it_later() -> None:
    own = Valkey()
    own.kill()
    try:
        async with serving(own, cache="exact") as router:
            assert not router.service.cache.status().redis_ok
            assert kind(await router.ask(route_request(), "lost")) == "placement"
            own.restart()
            await until(lambda: router.service.cache.status().redis_ok, "found")
            await router.ask(route_request(), "kept")
            assert kind(await router.route(route_request())) == "exact"
    finally:
        own.close()


async def test_a_hanging_redis_is_paid_for_twice_at_most(valkey: Valkey) -> None:
    proxy = SlowProxy(valkey.port)
    url = await proxy.start()
    try:
        async with serving(url, cache="exact", redis_timeout_ms=250) as router:
            await until(lambda: router.service.cache.status().redis_ok, "up")
            proxy.flow.clear()
            before = metrics.value(names.REDIS_ERRORS, operation="get_or_join")
            for i in range(30):
                assert kind(await router.route(route_request(request_id=f"r{i}"))) == "placement"
            assert not router.service.cache.status().redis_ok
            assert metrics.value(names.REDIS_ERRORS, operation="get_or_join") - before == client.TIMEOUTS_TO_OPEN
            # Nor was Redis asked by the others: whoever asks one that hangs waits its timeout and counts an error.
            proxy.flow.set()
            await until(lambda: router.service.cache.status().redis_ok, "recovers")
    finally:
        await proxy.close()


async def test_no_redis_configured() -> None:
    async with running_router() as router, AttachedWorker(router, worker_info("a")):
        assert not router.service.cache.status().redis_ok
        await router.ask(route_request("How do whales sleep"), "fine")
        assert kind(await router.route(route_request("How do whales sleep"))) == "semantic"


async def test_a_raw_prompt_and_a_conversation(valkey: Valkey) -> None:
    async with serving(valkey, semantic_threshold=0.7) as router:
        raw = {"messages": [], "prompt_text": "The capital of France is"}
        await router.ask(route_request(**raw), "Paris.")
        assert kind(await router.route(route_request(**raw))) == "exact"
        talk = [chat("user", "Hi"), chat("assistant", "Hello"), chat("user", "What is the capital of France?")]
        await router.ask(route_request(messages=talk), "Paris.")
        talk[2].content = "Tell me what is the capital of France"
        assert kind(await router.route(route_request(messages=talk))) == "semantic"
        talk[1].content = "Go away"
        assert kind(await router.route(route_request(messages=talk))) == "placement", "another history"
