"""One script decides between answer, flight and lead: against a real Valkey."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
from redis.cluster import key_slot

from cache_kit import SERVED, be_patient, exact_cache, keep, look, told
from kvmesh.proto.v1 import inference_pb2, router_pb2
from kvmesh.store import RedisStore, keys
from kvmesh.store.keys import FlightKeys
from router_harness import Valkey, until
from router_helpers import full_answer, route_request
from services.router.cache import exact, indices
from services.router.cache.answers import AnswerCache
from services.router.cache.exact import HEADER, MAGIC, ExactCache, Head
from services.router.cache.fingerprint import family_tag, model_tag


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    server = Valkey()
    yield server
    server.close()


@pytest.fixture
def redis(valkey: Valkey) -> Iterator[Any]:
    client = valkey.client()
    client.flushall()
    yield client
    client.close()


@pytest_asyncio.fixture
async def cache(valkey: Valkey, redis: Any) -> AsyncIterator[AnswerCache]:
    async with exact_cache(valkey.url) as made:
        yield made


def the(redis: Any, pattern: str) -> bytes:
    (name,) = redis.keys(pattern)
    return bytes(name)


async def test_hit_tells_where_it_comes_from(cache: AnswerCache, redis: Any) -> None:
    assert (await look(cache)).kind == "miss"
    assert await keep(cache)
    hit = await look(cache)
    assert (hit.kind, told(hit)) == ("hit", "yes")
    assert hit.answer is not None
    assert (hit.answer.kind, hit.answer.score, hit.answer.model, hit.answer.revision) == ("exact", 1.0, "tiny", "r1")
    assert 0.0 <= hit.answer.age_s < 60.0
    head = Head.parse(redis.get(the(redis, "*:a:*")))
    assert head is not None
    assert hit.answer.purge_id == head.entry_id.hex()
    assert head.expires_ms - head.stored_ms == 60_000
    assert (head.family, head.model) == (family_tag("tiny", "r1"), model_tag("tiny"))


async def test_age_is_counted_by_redis(cache: AnswerCache, redis: Any) -> None:
    await keep(cache)
    name = the(redis, "*:a:*")
    value = redis.get(name)
    head = Head.parse(value)
    assert head is not None
    older = MAGIC + (head.stored_ms - 30_000).to_bytes(8, "big") + value[11:]
    redis.set(name, older, keepttl=True)
    old = await look(cache)
    assert old.answer is not None
    assert 30.0 <= old.answer.age_s < 90.0
    control = inference_pb2.CacheControl
    assert (await look(cache, cache_control=control(max_age_s=29))).kind == "miss"
    assert (await look(cache, cache_control=control(max_age_s=3000))).kind == "hit"
    assert (await look(cache, cache_control=control(max_age_s=29), fly=True)).kind == "lead"


async def test_time_to_live_is_absolute(cache: AnswerCache, redis: Any) -> None:
    """Neither being read nor being stored again by another that raced lets an answer live longer."""
    await keep(cache, answer="first")
    name = the(redis, "*:a:*")
    redis.pexpire(name, 20_000)
    for _ in range(3):
        assert told(await look(cache)) == "first"
    assert await keep(cache, answer="second")
    assert told(await look(cache)) == "first"
    assert 0 < redis.pttl(name) <= 20_000
    # Whoever wanted a fresh one replaces it; its life begins anew.
    await keep(cache, answer="third", cache_control=inference_pb2.CacheControl(no_cache=True))
    assert told(await look(cache)) == "third"
    assert redis.pttl(name) > 20_000
    assert redis.zcard(keys.tenant_index(cache.plan(route_request(), "t").tenant_tag, cache.epoch)[0]) == 1


async def test_expired_by_its_own_header_is_a_miss(cache: AnswerCache, redis: Any) -> None:
    await keep(cache)
    name = the(redis, "*:a:*")
    value = redis.get(name)
    redis.set(name, value[:11] + (1).to_bytes(8, "big") + value[19:])
    assert (await look(cache)).kind == "miss"


async def test_another_revision_is_a_miss_until_it_is_replaced(cache: AnswerCache) -> None:
    await keep(cache, answer="old")
    new = {("tiny", "r2")}
    assert (await look(cache, served=new)).kind == "miss"
    assert (await look(cache, served=set())).kind == "miss"
    assert (await look(cache, served={("other", "r1")})).kind == "miss"
    assert told(await look(cache, served={*new, *SERVED})) == "old"
    assert await keep(cache, answer="new", revision="r2")
    assert told(await look(cache, served=new)) == "new"
    assert (await look(cache)).kind == "miss"


async def test_one_leads_and_the_others_follow(cache: AnswerCache, redis: Any) -> None:
    first = await look(cache, gateway="gw-1", fly=True)
    assert first.kind == "lead"
    assert first.flight is not None
    assert (first.flight.gateway_id, first.flight.token) == ("gw-1", 1)
    for gateway in ("gw-1", "gw-2"):
        joined = await look(cache, gateway=gateway, fly=True)
        assert (joined.kind, joined.flight) == ("follow", first.flight)
    assert (await look(cache)).kind == "miss", "without leave to fly"
    assert (await look(cache, tenant="u", fly=True)).kind == "lead", "another tenant's is another flight"
    parsed = FlightKeys.parse(first.flight.key)
    assert parsed is not None
    assert 0 < redis.pttl(parsed.pointer) <= exact.LEASE_MS
    assert redis.get(parsed.pointer) == f"1 {first.flight.flight_id} gw-1".encode()
    assert await keep(cache, flight=first.flight)
    assert not redis.exists(parsed.pointer)
    assert (await look(cache, fly=True)).kind == "hit"


async def test_fifty_at_once_have_one_leader(cache: AnswerCache) -> None:
    outcomes = await asyncio.gather(*(look(cache, gateway=f"gw-{i}", fly=True) for i in range(50)))
    assert sorted(outcome.kind for outcome in outcomes) == ["follow"] * 49 + ["lead"]
    assert len({outcome.flight.flight_id for outcome in outcomes if outcome.flight is not None}) == 1


async def test_tokens_only_grow(cache: AnswerCache, redis: Any) -> None:
    last = 0
    for ending in ("lease", "end", "store", "lease"):
        led = await look(cache, fly=True, text="q")
        assert led.kind == "lead"
        assert led.flight is not None
        assert led.flight.token > last
        last = led.flight.token
        parsed = FlightKeys.parse(led.flight.key)
        assert parsed is not None
        if ending == "lease":
            # As when it has run out.
            redis.delete(parsed.pointer)
        elif ending == "end":
            await cache.end_flight(led.flight)
        else:
            assert await keep(cache, flight=led.flight)
            redis.delete(keys.answer(*parsed))


async def test_a_lease_runs_out_by_itself(cache: AnswerCache, redis: Any) -> None:
    led = await look(cache, fly=True)
    assert led.flight is not None
    parsed = FlightKeys.parse(led.flight.key)
    assert parsed is not None
    redis.pexpire(parsed.pointer, 1)
    await until(lambda: not redis.exists(parsed.pointer), "the lease has run out")
    again = await look(cache, fly=True, gateway="gw-2")
    assert again.kind == "lead"
    assert again.flight is not None
    assert (again.flight.token, again.flight.gateway_id) == (2, "gw-2")
    assert again.flight.flight_id != led.flight.flight_id


async def test_an_old_leader_neither_ends_nor_stores_for_the_new_one(cache: AnswerCache, redis: Any) -> None:
    led = await look(cache, fly=True)
    assert led.flight is not None
    parsed = FlightKeys.parse(led.flight.key)
    assert parsed is not None
    # Taken over: the same flight under a higher token.
    redis.set(parsed.pointer, f"5 {led.flight.flight_id} gw-2", px=3000)
    await cache.end_flight(led.flight)
    assert redis.exists(parsed.pointer)
    assert not await keep(cache, flight=led.flight)
    assert (await look(cache, fly=True)).kind == "follow"
    # Another flight altogether is not this one's to end; its own answer is whole, and may be kept.
    redis.set(parsed.pointer, "6 abcdef gw-3", px=3000)
    assert await keep(cache, flight=led.flight)
    assert redis.exists(parsed.pointer)


async def test_an_answer_that_is_not_kept_ends_the_flight(cache: AnswerCache) -> None:
    led = await look(cache, fly=True)
    assert not await keep(cache, answer="", flight=led.flight)
    assert (await look(cache, fly=True)).kind == "lead"


@pytest.mark.parametrize("junk", [b"\xff" * 300, b"x", MAGIC, MAGIC + b"\0" * 72, MAGIC + b"x" * 300, b"y" * (1 << 17)])
async def test_corrupt_answers_are_misses_and_go(cache: AnswerCache, redis: Any, junk: bytes) -> None:
    await keep(cache)
    name = the(redis, "*:a:*")
    redis.set(name, junk)
    assert (await look(cache)).kind == "miss"
    assert cache.store is not None
    assert cache.store.ok
    assert await keep(cache, answer="again")
    assert told(await look(cache)) == "again"


async def test_a_header_over_junk_is_a_miss_and_goes(cache: AnswerCache, redis: Any) -> None:
    await keep(cache)
    name = the(redis, "*:a:*")
    value = redis.get(name)
    for body in (b"\xff\xff\xff", b"", router_pb2.CachedAnswer(revision="r1", model="tiny").SerializeToString()):
        redis.set(name, value[:HEADER] + body)
        led = await look(cache, fly=True)
        assert led.kind == "lead", "the next one makes it anew"
        assert not redis.exists(name)
        await cache.end_flight(led.flight)


@pytest.mark.parametrize("kind", ["a", "f", "n"])
async def test_a_value_of_another_type_is_overcome(cache: AnswerCache, redis: Any, kind: str) -> None:
    plan = cache.plan(route_request("q"), "t")
    name = f"{keys.prefix(plan.key.tag)}{kind}:{plan.key.exact.hex()}"
    redis.lpush(name, "a list")
    led = await look(cache, fly=True)
    assert led.kind == "lead"
    redis.delete(name)
    redis.lpush(name, "a list")
    assert await keep(cache, flight=led.flight)
    assert told(await look(cache)) == "yes"


async def test_pointers_that_are_none_are_overcome(cache: AnswerCache, redis: Any) -> None:
    plan = cache.plan(route_request("q"), "t")
    # The last two would not fit into the protocol, or would be sent to every client that asks.
    large = (b"9" * 30 + b" ab gw", b"1 ab " + b"g" * 1000)
    for junk in (b"", b"x", b"1", b"-1 ab gw", b"1 xyz gw", b"\xff\xfe 1", *large):
        name = keys.pointer(plan.key.tag, plan.key.exact.hex())
        redis.set(name, junk)
        led = await look(cache, fly=True)
        assert led.kind == "lead", junk
        await cache.end_flight(led.flight)


async def test_limits_of_one_answer(valkey: Valkey, redis: Any) -> None:
    async with exact_cache(valkey.url, max_entry_bytes=1024) as small:
        assert not await keep(small, answer="x" * 1000)
        assert await keep(small, answer="x" * 100)
        assert told(await look(small)) == "x" * 100


async def test_a_script_is_sent_again_after_redis_has_forgotten_it(cache: AnswerCache, redis: Any) -> None:
    await keep(cache)
    redis.script_flush()
    assert told(await look(cache)) == "yes"
    redis.script_flush()
    assert await keep(cache, text="other")


class Recorder(RedisStore):
    """Notes the keys of each script instead of running it."""

    def __init__(self) -> None:
        super().__init__("redis://127.0.0.1:1", timeout_s=1.0)
        self.calls: list[tuple[str, list[str]]] = []

    async def script(self, script: Any, keys: Any, args: Any, **_: Any) -> Any:
        self.calls.append((script.name, list(keys)))


async def test_keys_of_one_script_share_a_slot() -> None:
    """In a cluster a script over two slots is refused."""
    store = Recorder()
    plan_key = ("0" * 31 + "a", "f" * 64)
    cache = ExactCache(store, ttl_s=1.0, max_entry_bytes=100)
    await cache.get_or_join(*plan_key, [], timeout_s=1.0, fly=True)
    await cache.put(*plan_key, b"x", family=b"f" * 8, tenant="0" * 32, model="1" * 32, replace=False)
    await cache.end_flight(*plan_key, "ab", 1)
    await cache.delete(*plan_key, b"e" * 16)
    index = indices.Indices(store, cache, max_entries=1, max_bytes=1)
    head = Head(1, 2, b"e" * 16, b"f" * 8, "0" * 32, "1" * 32)
    member = keys.Member(*plan_key, "e" * 32, "f" * 16, 1)
    await index.add(member, head, 7)
    await index.forget(member, head, 7)
    assert {name for name, _ in store.calls} >= {
        "get_or_join",
        "put",
        "end_flight",
        "drop",
        "index_add",
        "index_remove",
    }
    for name, names in store.calls:
        assert len({key_slot(each.encode()) for each in names}) == 1, (name, names)
    flight = FlightKeys(*plan_key)
    of_flight = [flight.pointer, flight.counter, flight.frames("ab"), flight.joined("ab"), keys.answer(*plan_key)]
    assert len({key_slot(each.encode()) for each in of_flight}) == 1
    await store.close()


async def test_stored_form_is_read_back_as_it_was(cache: AnswerCache) -> None:
    """Whatever the text: join(chunks) of a hit is the stored text, byte for byte."""
    text = "é\n\t\0 '\"\\ \U0001f600" + "x" * 5000 + "\r\n"
    plan = cache.plan(route_request("q"), "t")
    answer = full_answer(text)
    assert await cache.store_answer(plan, answer, model="tiny", revision="r1")
    hit = (await look(cache)).answer
    assert hit is not None
    assert hit.choices[0] == answer.choices[0]
