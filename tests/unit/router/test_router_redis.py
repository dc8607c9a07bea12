"""The answer caches against a real Valkey: what is kept, what never is, and life with a dead or slow Redis."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvmesh.proto.v1 import inference_pb2, router_pb2
from kvmesh.telemetry import metrics, names
from router_harness import LIMIT_S, AttachedWorker, Router, SlowProxy, Valkey, running_router, until
from router_helpers import chat, full_answer, route_request, worker_info
from services.router.cache import exact
from services.router.cache.answers import AnswerCache, Mode
from services.router.cache.exact import PREFIX, ExactCache
from services.router.cache.fingerprint import cache_key
from services.router.fleet import Family
from services.router.near.embedder import HashEmbedder
from services.router.near.nearcache import NearCache
from test_router_fingerprint import CHANGES, base

FAMILY = Family("tiny", "r1", "tok")


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
        assert kind(await router.route(route_request(model="auto"))) == "exact", "the alias stands for the model"
        status = router.service.cache.status()
        assert (status.redis_ok, status.exact_hits, status.misses) == (True, 2, 1)
        # The hit takes no worker.
        assert router.service.routing.placer.credit.total == 0
    async with serving(valkey, cache="exact") as another:
        assert kind(await another.route(route_request())) == "exact", "another replica, or the same restarted"


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


@pytest.mark.parametrize("offered", list(Mode))
def test_a_mode_is_never_wider_than_offered(offered: Mode) -> None:
    cache = AnswerCache(None, None, mode=offered, max_entry_bytes=1)
    assert cache.mode(inference_pb2.CACHE_MODE_UNSPECIFIED) == offered
    for asked in Mode:
        assert cache.mode(asked) == min(asked, offered)
    assert cache.mode(99) == Mode.OFF, "a mode of a newer gateway"


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
    ]
    async with serving(valkey) as router:
        for case in cases:
            await router.ask(route_request(), "Paris.", **case)
            assert kind(await router.route(route_request())) == "placement", case
        for sampling in ({"logprobs": 0}, {"logprobs": 5}):
            request = route_request(sampling=inference_pb2.SamplingParams(**sampling))
            await router.ask(request, "scored")
            assert kind(await router.route(request)) == "placement"
        assert valkey.client().dbsize() == 0
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
        keys = valkey.client().keys()
        assert len(keys) == 1
        assert keys[0].startswith(PREFIX)
        assert 0 < valkey.client().pttl(keys[0]) <= 100_000


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
        (name,) = valkey.client().keys()
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
    redis = ExactCache(valkey.url, timeout_s=5.0, ttl_s=60.0, max_entry_bytes=1 << 16)
    near = NearCache(HashEmbedder, max_entries=1000, max_bytes=1 << 24, ttl_s=60.0)
    cache = AnswerCache(redis, near, mode=Mode.SEMANTIC, max_entry_bytes=1 << 16)
    cache.start()
    watch = asyncio.create_task(redis.watch())
    try:
        async with asyncio.timeout(LIMIT_S):
            await redis.checked.wait()
        assert await asyncio.to_thread(near.settled.wait, LIMIT_S)
        yield cache
    finally:
        watch.cancel()
        await cache.close()


async def find(cache: AnswerCache, request: router_pb2.RouteRequest, tenant: str = "t", family: Family = FAMILY) -> str:
    key = cache_key(request, tenant, family)
    found = await cache.lookup(key, Mode.SEMANTIC, tau=0.5, revision=family.revision, budget_s=5.0)
    return "" if found is None else f"{found.kind}:{found.choices[0].text}"


async def keep(cache: AnswerCache, request: router_pb2.RouteRequest, text: str, tenant: str = "t") -> None:
    assert await cache.store(cache_key(request, tenant, FAMILY), full_answer(text), revision="r1", near=True)


async def test_any_change_of_any_field_is_a_miss_in_both(valkey: Valkey) -> None:
    async with both_caches(valkey) as cache:
        await keep(cache, base(), "answer")
        assert await find(cache, base()) == "exact:answer"
        for name, change in CHANGES:
            changed = base()
            change(changed)
            assert await find(cache, changed) == "", name
        for family in (Family("big", "r1", "tok"), Family("tiny", "r2", "tok"), Family("tiny", "r1", "kot")):
            assert await find(cache, base(), family=family) == ""
        # With Redis gone the semantic cache alone must refuse them too.
        assert cache.exact is not None
        cache.exact._ok = False
        assert await find(cache, base()) == "semantic:answer"
        for name, change in CHANGES:
            changed = base()
            change(changed)
            assert await find(cache, changed) == "", name


tenants = st.sampled_from(["a", "b", "ab", "a.b", "A", "local"])
questions = st.sampled_from(["Who wrote Hamlet?", "who wrote hamlet", "Please tell me who wrote Hamlet", "Why me?"])


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
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
            assert kind(await router.route(route_request("Question 1"))) == "semantic", "what is in memory still serves"
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
            before = metrics.value(names.REDIS_ERRORS, operation="get")
            for i in range(30):
                assert kind(await router.route(route_request(request_id=f"r{i}"))) == "placement"
            assert not router.service.cache.status().redis_ok
            assert metrics.value(names.REDIS_ERRORS, operation="get") - before == exact.TIMEOUTS_TO_OPEN
            # Nor was Redis asked by the others: whoever asks one that hangs waits its timeout and counts an error.
            proxy.flow.set()
            await until(lambda: router.service.cache.status().redis_ok, "recovers")
    finally:
        await proxy.close()


async def test_a_caller_in_a_hurry_does_not_open_the_circuit(valkey: Valkey) -> None:
    proxy = SlowProxy(valkey.port)
    cache = ExactCache(await proxy.start(), timeout_s=0.05, ttl_s=60.0, max_entry_bytes=1 << 16)
    cache._ok = True
    try:
        proxy.flow.clear()
        for _ in range(5):
            assert await cache.get(b"k", 0.001) is None
        assert cache.ok
        for _ in range(exact.TIMEOUTS_TO_OPEN):
            assert cache.ok
            assert await cache.get(b"k", 1.0) is None
        assert not cache.ok
        assert await cache.get(b"k", 1.0) is None
    finally:
        await cache.close()
        await proxy.close()


async def test_a_late_answer_is_never_taken_for_another(valkey: Valkey) -> None:
    """A look-up given up in the middle must not leave its answer in the connection for the next one."""
    proxy = SlowProxy(valkey.port)
    url = await proxy.start()
    cache = ExactCache(url, timeout_s=0.1, ttl_s=60.0, max_entry_bytes=1 << 16)
    cache._ok = True
    try:
        for i in range(8):
            valkey.client().set(PREFIX + str(i).encode(), f"value {i}")
        hits = 0
        for round_ in range(60):
            if round_ % 3 == 0:
                proxy.flow.clear()
            else:
                proxy.flow.set()
            cache._ok, cache._timeouts = True, 0
            wanted = [i % 8 for i in range(round_, round_ + 5)]
            got = await asyncio.gather(*(cache.get(str(i).encode(), 0.1) for i in wanted))
            for i, value in zip(wanted, got, strict=True):
                assert value in (None, f"value {i}".encode())
                hits += value is not None
        assert hits > 0
    finally:
        await cache.close()
        await proxy.close()


async def test_many_at_once_do_not_look_like_a_broken_redis(valkey: Valkey) -> None:
    async with serving(valkey, cache="exact", redis_timeout_ms=10_000) as router:
        await router.ask(route_request(), "Paris.")
        cache = router.service.cache.exact
        assert cache is not None
        key = cache_key(route_request(), "local", FAMILY).exact
        found = await asyncio.gather(*(cache.get(key, 10.0) for _ in range(300)))
        assert all(found)
        assert cache.ok
        assert len(valkey.client().client_list()) <= exact.MAX_CONNECTIONS + 2


async def test_no_redis_configured() -> None:
    async with running_router() as router, AttachedWorker(router, worker_info("a")):
        assert not router.service.cache.status().redis_ok
        await router.ask(route_request("How are you today"), "fine")
        assert kind(await router.route(route_request("How are you today"))) == "semantic"


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
