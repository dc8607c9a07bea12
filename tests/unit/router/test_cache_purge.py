"""Forgetting: by id, tenant, model, revision and epoch, on every replica; limits of a tenant; what survives a loss."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from cache_kit import be_patient, exact_cache, keep, look, told
from kvmesh.errors import InvalidArgument, Unavailable
from kvmesh.store import events, keys
from router_harness import Valkey, until
from router_helpers import full_answer, route_request
from services.router.cache import epoch
from services.router.cache.answers import AnswerCache
from services.router.cache.exact import ExactCache, Head
from services.router.cache.fingerprint import family_tag, model_tag
from services.router.cache.purge import MAX_REMEMBERED, Purges
from services.router.cache.tenants import Tenants

BOTH = {("tiny", "r1"), ("tiny", "r2"), ("big", "r1")}


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


async def fill(cache: AnswerCache) -> dict[str, str]:
    """Five answers of two tenants, two models, two revisions; their purge ids by question."""
    for text, tenant, model, revision in (
        ("a", "t", "tiny", "r1"),
        ("b", "t", "tiny", "r2"),
        ("c", "t", "big", "r1"),
        ("a", "u", "tiny", "r1"),
        ("b", "u", "tiny", "r2"),
    ):
        assert await keep(cache, text, tenant, model=model, revision=revision)
    return {f"{tenant}:{text}": await purge_id(cache, text, tenant) for text, tenant in ASKED}


ASKED = [("a", "t"), ("b", "t"), ("c", "t"), ("a", "u"), ("b", "u")]


async def purge_id(cache: AnswerCache, text: str, tenant: str) -> str:
    outcome = await look(cache, text, tenant, served=BOTH)
    assert outcome.answer is not None
    return outcome.answer.purge_id


async def left(cache: AnswerCache) -> set[str]:
    return {f"{tenant}:{text}" for text, tenant in ASKED if told(await look(cache, text, tenant, served=BOTH))}


ALL = {"t:a", "t:b", "t:c", "u:a", "u:b"}


@pytest.mark.parametrize(
    ("named", "gone"),
    [
        ({"tenant": "t"}, {"t:a", "t:b", "t:c"}),
        ({"tenant": "nobody"}, set()),
        ({"model": "tiny"}, {"t:a", "t:b", "u:a", "u:b"}),
        ({"model": "tiny", "revision": "r2"}, {"t:b", "u:b"}),
        ({"model": "tiny", "revision": "r9"}, set()),
        ({"model": "big"}, {"t:c"}),
    ],
)
async def test_purge_takes_what_is_named_and_nothing_else(
    cache: AnswerCache, redis: Any, named: dict[str, str], gone: set[str]
) -> None:
    await fill(cache)
    assert await left(cache) == ALL
    assert await cache.purge(**named) == len(gone)
    assert await left(cache) == ALL - gone
    assert await cache.purge(**named) == 0
    # No index still counts what is gone.
    stats = {each.tenant: each for each in await cache.tenant_stats()}
    for tenant in "tu":
        mine = {name for name in ALL - gone if name.startswith(tenant)}
        assert stats[tenant].entries == len(mine)
        assert (stats[tenant].bytes > 0) == bool(mine)
    assert len(redis.keys("kvmesh:{i:*")) == len(ALL - gone)
    # And it can all be stored again.
    await fill(cache)
    assert await left(cache) == ALL


async def test_purge_by_id(cache: AnswerCache) -> None:
    ids = await fill(cache)
    assert len(set(ids.values())) == 5
    assert await cache.purge(purge_id=ids["t:a"]) == 1
    assert await left(cache) == ALL - {"t:a"}
    assert await cache.purge(purge_id=ids["t:a"]) == 0
    # An id names one answer, not the question: what was stored since is another's.
    await keep(cache, "a", "t")
    assert await cache.purge(purge_id=ids["t:a"]) == 0
    assert await left(cache) == ALL


async def test_an_old_id_does_not_take_what_replaced_it(cache: AnswerCache, redis: Any) -> None:
    await keep(cache)
    (name,) = redis.keys("*:a:*")
    old = Head.parse(redis.get(name))
    (index,) = redis.keys("kvmesh:{i:*")
    member = redis.get(index)
    redis.delete(name)
    await keep(cache, answer="new")
    assert old is not None
    redis.set(keys.id_index(old.entry_id.hex()), member)
    assert await cache.purge(purge_id=old.entry_id.hex()) == 0
    assert told(await look(cache)) == "new"


async def test_a_new_epoch_voids_everything_on_every_replica_at_once(valkey: Valkey, cache: AnswerCache) -> None:
    async with exact_cache(valkey.url) as other:
        await fill(cache)
        assert await left(other) == ALL
        before = cache.epoch
        plan = cache.plan(route_request("late"), "t")
        await cache.purge(everything=True)
        assert cache.epoch > before
        assert await left(cache) == set()
        await until(lambda: other.epoch == cache.epoch, "the other has heard")
        assert await left(other) == set()
        # What was generated before is not stored after.
        assert not await cache.store_answer(plan, full_answer(), model="tiny", revision="r1")
        await keep(other)
        assert told(await look(cache)) == "yes"


async def test_an_epoch_never_falls(
    valkey: Valkey, cache: AnswerCache, redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epoch, "BLOCK_MS", 100)
    for _ in range(3):
        before = cache.epoch
        await cache.purge(everything=True)
        assert cache.epoch > before
    highest = cache.epoch
    # Lost or overwritten, it begins anew no lower than anybody here has seen it.
    for junk in (None, "nonsense", "3"):
        redis.delete(keys.EPOCH)
        if junk is not None:
            redis.set(keys.EPOCH, junk)
        await until(lambda: (redis.get(keys.EPOCH) or b"") == str(highest).encode(), "put right")
    redis.delete(keys.EPOCH)
    redis.lpush(keys.EPOCH, "a list")
    await cache.purge(everything=True)
    assert cache.epoch > highest
    async with exact_cache(valkey.url) as later:
        assert later.epoch == cache.epoch


async def test_what_was_purged_while_it_was_generated_is_not_stored(valkey: Valkey, cache: AnswerCache) -> None:
    async with exact_cache(valkey.url) as other:
        plans = {name: cache.plan(route_request(name), "t") for name in ("tenant", "model", "family", "free")}
        for ordered in ({"tenant": "t"}, {"model": "tiny"}, {"model": "tiny", "revision": "r1"}):
            # Ordered at another replica: this one hears of it by the stream.
            seen = len(cache._purges)
            await other.purge(**ordered)
            await until(lambda seen=seen: len(cache._purges) > seen, "the order has come")
        for plan in plans.values():
            assert not await cache.store_answer(plan, full_answer(), model="tiny", revision="r1")
        assert await keep(cache), "a request that came after"


def test_only_what_an_order_names_is_held_back() -> None:
    now = [10.0]
    heard: list[events.Purged] = []
    purges = Purges(heard.append, lambda: now[0])
    family = family_tag("m", "r").hex()
    mine = {"tenant": "1" * 32, "model": model_tag("m"), "family": family}
    for what, value in (("tenant", "2" * 32), ("model", model_tag("n")), ("family", "0" * 16), ("id", "1" * 32)):
        purges.note(events.Purged(what, value, 0))  # type: ignore[arg-type]
    assert not purges.since(0.0, **mine)
    purges.note(events.Epoch(4))
    assert len(heard) == 4
    for what, value in mine.items():
        now[0] += 1.0
        purges.note(events.Purged(what, value, 0))  # type: ignore[arg-type]
        assert purges.since(now[0], **mine)
        assert not purges.since(now[0] + 0.5, **mine), "it was asked after the purge"


def test_no_flood_of_orders_lets_an_older_one_through() -> None:
    now = [10.0]
    purges = Purges(clock=lambda: now[0])
    mine = {"tenant": "1" * 32, "model": model_tag("m"), "family": family_tag("m", "r").hex()}
    purges.note(events.Purged("tenant", mine["tenant"], 0))
    for number in range(2 * MAX_REMEMBERED):
        purges.note(events.Purged("id", f"{number:032x}", 0))
    assert purges.since(9.0, **mine), "ids crowd nothing out"
    assert not purges.since(11.0, **mine)
    now[0] = 20.0
    for number in range(2 * MAX_REMEMBERED):
        purges.note(events.Purged("tenant", f"{number + 2:032x}", 0))
    assert purges.since(9.0, **mine), "it may have been among those forgotten"
    assert not purges.since(21.0, **mine)
    assert len(purges) <= MAX_REMEMBERED


@pytest.mark.parametrize("ordered", [{"tenant": "t"}, {"model": "tiny"}, {"model": "tiny", "revision": "r1"}])
async def test_what_is_purged_while_it_is_stored_is_gone(
    cache: AnswerCache, ordered: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = cache.plan(route_request("q"), "t")
    put = ExactCache.put

    async def slow(self: ExactCache, *args: Any, **fields: Any) -> Any:
        made = await put(self, *args, **fields)
        # The answer is there, no index has it: the sweep cannot find it.
        await cache.purge(**ordered)
        return made

    monkeypatch.setattr(ExactCache, "put", slow)
    assert not await cache.store_answer(plan, full_answer(), model="tiny", revision="r1")
    monkeypatch.undo()
    assert told(await look(cache)) == ""


@pytest.mark.parametrize("junk", ["9007199254740992", "1e300", "-5", "9" * 400])
async def test_a_number_too_high_to_count_from_is_no_epoch(
    valkey: Valkey, cache: AnswerCache, redis: Any, junk: str
) -> None:
    await keep(cache)
    redis.set(keys.EPOCH, junk)
    redis.xadd(keys.EVENTS, {"kind": "epoch", "epoch": "9999999999999999"})
    before = cache.epoch
    await cache.purge(everything=True)
    assert before < cache.epoch <= events.MAX_EPOCH
    assert told(await look(cache)) == ""


@pytest.mark.parametrize(
    "named",
    [
        {},
        {"tenant": "t", "model": "m"},
        {"purge_id": "0" * 32, "everything": True},
        {"revision": "r"},
        {"tenant": "t", "revision": "r"},
        {"purge_id": "xyz"},
        {"purge_id": "0" * 31},
        {"tenant": "t" * 513},
    ],
)
async def test_an_order_names_one_thing(cache: AnswerCache, named: dict[str, Any]) -> None:
    await fill(cache)
    before = cache.epoch
    with pytest.raises(InvalidArgument):
        await cache.purge(**named)
    assert (await left(cache), cache.epoch) == (ALL, before)


async def test_without_redis_nothing_is_claimed(redis: Any) -> None:
    own = Valkey()
    try:
        async with exact_cache(own.url) as cache:
            await fill(cache)
            own.kill()
            for named in ({"tenant": "t"}, {"model": "tiny"}, {"purge_id": "0" * 32}, {"everything": True}):
                with pytest.raises(Unavailable):
                    await cache.purge(**named)  # type: ignore[arg-type]
    finally:
        own.close()


async def test_the_oldest_of_a_tenant_go(valkey: Valkey, redis: Any) -> None:
    async with exact_cache(valkey.url, tenant_entries=3) as cache:
        await keep(cache, "other", "u")
        index = keys.tenant_index(cache.plan(route_request(), "t").tenant_tag, cache.epoch)[0]
        for i in range(6):
            # Entries of one millisecond are in no order.
            for age, member in enumerate(redis.zrange(index, 0, -1)):
                redis.zadd(index, {member: redis.time()[0] * 1000 + 30_000 + age})
            await keep(cache, str(i))
        assert [i for i in range(6) if told(await look(cache, str(i)))] == [3, 4, 5]
        assert told(await look(cache, "other", "u")) == "yes", "another tenant's stay"


async def test_bytes_of_a_tenant_are_bounded(valkey: Valkey, redis: Any) -> None:
    async with exact_cache(valkey.url, tenant_bytes=4000) as cache:
        for i in range(10):
            assert await keep(cache, str(i), answer="x" * 900)
        (stats,) = await cache.tenant_stats()
        assert 0 < stats.bytes <= 4000
        assert stats.entries == len(redis.keys("*:a:*")) == len(redis.keys("kvmesh:{i:*"))


async def test_lost_indices_cost_only_what_they_index(cache: AnswerCache, redis: Any) -> None:
    await fill(cache)
    for name in redis.keys("kvmesh:{t:*") + redis.keys("kvmesh:{m:*") + redis.keys("kvmesh:{i:*"):
        redis.delete(name)
    assert await left(cache) == ALL
    assert await cache.purge(tenant="t") == 0
    assert await keep(cache, "d")
    assert await cache.purge(tenant="t") == 1
    await cache.purge(everything=True)
    assert await left(cache) == set()


async def test_foreign_members_are_passed_over(cache: AnswerCache, redis: Any) -> None:
    await fill(cache)
    for name in redis.keys("kvmesh:{t:*:z:*"):
        redis.zadd(name, {"junk": 1e15, b"\xff\xfe": 1e15, "a b c d e": 1e15})
    assert await cache.purge(tenant="t") == 3
    assert await left(cache) == {"u:a", "u:b"}


async def test_a_stream_that_is_none_keeps_nobody_from_the_cache(valkey: Valkey, redis: Any) -> None:
    redis.set(keys.EVENTS, "no stream")
    async with exact_cache(valkey.url) as cache:
        await fill(cache)
        assert await left(cache) == ALL
        # A purge that the others do not hear of has not been done.
        with pytest.raises(Unavailable):
            await cache.purge(tenant="t")
        await cache.purge(everything=True)
        assert await left(cache) == set()


async def test_counts_by_outcome(cache: AnswerCache) -> None:
    await keep(cache)
    await look(cache)
    await look(cache, "lead", fly=True)
    await look(cache, "lead", fly=True)
    cache.missed(cache.plan(route_request("x"), "t"))
    cache.missed(cache.plan(route_request("x", exclude_workers=["w"]), "t"))
    assert dict(cache.lookups) == {"exact": 1, "follow": 1, "miss": 1, "bypass": 1}
    plan = cache.plan(route_request("q"), "t")
    assert (await cache.exact_or_flight(plan, BOTH, fly=False, budget_s=10.0, count=False)).kind == "hit"
    assert cache.lookups["exact"] == 1, "a trial"
    status = cache.status()
    assert (status.exact_hits, status.follows, status.misses, status.epoch) == (1, 1, 1, cache.epoch)


async def test_counts_by_tenant(cache: AnswerCache) -> None:
    await fill(cache)
    await look(cache, "a", "t")
    cache.missed(cache.plan(route_request("zzz"), "t"))
    stats = {each.tenant: each for each in await cache.tenant_stats()}
    assert (stats["t"].entries, stats["t"].hits, stats["t"].misses) == (3, 4, 1)
    assert (stats["u"].entries, stats["u"].hits, stats["u"].misses) == (2, 2, 0)


def test_tenants_that_are_counted_are_few() -> None:
    tenants = Tenants(limit=3)
    for name in "abcab":
        tenants.of(name, name * 32).hits += 1
    tenants.of("d", "d" * 32)
    assert [name for name, _ in tenants.latest()] == ["d", "b", "a"]
    assert [counts.hits for _, counts in tenants.latest(2)] == [0, 2]


def added(**fields: Any) -> events.Added:
    values: dict[str, Any] = {
        "entry_id": b"e" * 16,
        "partition": b"p" * 32,
        "tag": "0" * 32,
        "exact": "1" * 64,
        "text": "What is é?",
        "prompt": b"d" * 16,
        "vector": b"\0\0\x80\x3f" * 4,
        "embedder": "minilm",
        "tenant": "2" * 32,
        "model": "3" * 32,
        "family": "4" * 16,
        "epoch": 5,
        "expires_ms": 6,
    }
    return events.Added(**(values | fields))


@pytest.mark.parametrize("event", [added(), added(prompt=b""), events.Epoch(7), events.Purged("tenant", "2" * 32, 8)])
async def test_events_survive_the_stream(redis: Any, event: events.Event) -> None:
    redis.xadd(keys.EVENTS, events.encode(event))
    ((_, fields),) = redis.xrange(keys.EVENTS)
    assert events.decode(fields) == event


def test_events_that_are_none_are_skipped() -> None:
    good = events.encode(added())
    assert events.decode(good) is not None
    for name in good:
        assert events.decode({key: value for key, value in good.items() if key != name}) is None
        assert events.decode(good | {name: b"\xff" * 70_000}) is None
    for fields in ({}, None, {b"kind": b"new"}, {b"kind": b"purge", b"what": b"all", b"value": b"x", b"at_ms": b"1"}):
        assert events.decode(fields) is None
    packed = good[b"entry"]
    for bad in (packed[:-1], packed + b"x", b"kE\2" + packed[3:], packed[:-3] + b"\xff\xff\xff"):
        assert events.decode(good | {b"entry": bad}) is None
    for value in (b"-1", b"1" * 17, b""):
        assert events.decode({b"kind": b"epoch", b"epoch": value}) is None
    entry = added()
    assert events.Purged("id", entry.entry_id.hex(), 0).hits(entry)
    assert events.Purged("family", entry.family, 0).hits(entry)
    assert not events.Purged("model", "9" * 32, 0).hits(entry)
