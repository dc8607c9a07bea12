"""Limits in Redis: one step for all of them, holds that lapse, settlements that count once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from flight_kit import Valkey, connected
from kvmesh.store.client import RedisStore
from kvmesh.store.limits import Figures, LimitStore, Spend, Terms

HOLD_MS = 15_000
_tenants = itertools.count(1)


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    server = Valkey()
    yield server
    server.close()


@pytest_asyncio.fixture
async def redis(valkey: Valkey) -> AsyncIterator[RedisStore]:
    async with connected(valkey.url) as store:
        yield store


class Tenant:
    """A fresh tenant, and its calls under a clock of the test's own."""

    def __init__(self, redis: RedisStore, **terms: Any) -> None:
        self.name = f"tenant-{next(_tenants)}"
        self.store = LimitStore(redis, hold_ms=HOLD_MS, take_s=60.0)
        self.store.clock_ms = 1_000_000
        self.terms = Terms(0, 0, 0, 0, "tokens:all")._replace(**terms)
        self._number = itertools.count(1)

    def tick(self, ms: int) -> None:
        assert self.store.clock_ms is not None
        self.store.clock_ms += ms

    async def take(self, hold: str, cost: int = 0, tokens: int = 0) -> Any:
        taken = await self.store.take(self.name, hold, self.terms, cost=cost, tokens=tokens)
        assert taken is not None
        return taken

    def spend(self, hold: str, cost: int = 0, used: int = 0, **fields: Any) -> Spend:
        made = Spend(
            number=next(self._number),
            tenant=self.name,
            hold=hold,
            period=self.terms.period,
            at=1_000_000.0,
            tokens_per_minute=self.terms.tokens_per_minute,
            cost=cost,
            used=used,
            model="m:1",
            prompt=0,
            cached=0,
            completion=used,
            request_id="r",
        )
        return replace(made, **fields)

    async def settle(self, *spends: Spend, journal: str = "j") -> None:
        assert await self.store.settle(journal, spends) == []

    async def figures(self) -> Figures:
        figures = await self.store.figures(self.name, self.terms.period)
        assert figures is not None
        return figures


async def test_requests_a_minute_come_back_one_by_one(redis: RedisStore) -> None:
    tenant = Tenant(redis, requests_per_minute=7)
    lefts = [(await tenant.take(f"h:{number}")).requests_left for number in range(7)]
    assert lefts == [6, 5, 4, 3, 2, 1, 0]
    refused = await tenant.take("h:7")
    # A seventh of a minute, to the millisecond.
    assert (refused.verdict, refused.wait_ms) == ("requests", 8572)
    tenant.tick(8571)
    assert (await tenant.take("h:7")).wait_ms == 1
    tenant.tick(1)
    taken = await tenant.take("h:7")
    assert (taken.verdict, taken.requests_left) == ("ok", 0)
    tenant.tick(3_600_000)
    assert (await tenant.take("h:8")).requests_left == 6


async def test_tokens_a_minute_take_the_hold_and_give_back_what_was_not_used(redis: RedisStore) -> None:
    tenant = Tenant(redis, tokens_per_minute=600)
    assert (await tenant.take("a", tokens=500)).tokens_left == 100
    refused = await tenant.take("b", tokens=200)
    assert (refused.verdict, refused.wait_ms, refused.tokens_left) == ("tokens", 10_000, 100)
    await tenant.settle(tenant.spend("a", used=100))
    assert (await tenant.take("b", tokens=200)).tokens_left == 300
    # More than was held is owed.
    await tenant.settle(tenant.spend("b", used=800))
    refused = await tenant.take("c", tokens=100)
    assert (refused.verdict, refused.wait_ms) == ("tokens", 40_000)


async def test_more_tokens_than_a_minute_has_need_a_full_bucket_and_owe_the_rest(redis: RedisStore) -> None:
    tenant = Tenant(redis, tokens_per_minute=600)
    assert (await tenant.take("a", tokens=1200)).verdict == "ok"
    assert (await tenant.take("b", tokens=1)).wait_ms == 60_100
    tenant.tick(119_999)
    assert (await tenant.take("b", tokens=1200)).wait_ms == 1


async def test_requests_at_a_time_end_by_settling_or_by_lapsing(redis: RedisStore) -> None:
    tenant = Tenant(redis, max_concurrent=2)
    assert (await tenant.take("a")).running == 1
    assert (await tenant.take("b")).running == 2
    assert (await tenant.take("c")).verdict == "concurrent"
    await tenant.settle(tenant.spend("a"))
    assert (await tenant.take("c")).verdict == "ok"
    tenant.tick(HOLD_MS - 1)
    assert await tenant.store.renew(tenant.name, [("b", 0)])
    assert (await tenant.take("d")).verdict == "concurrent"
    tenant.tick(1)
    taken = await tenant.take("d")
    assert (taken.verdict, taken.running) == ("ok", 2)


async def test_a_budget_counts_what_is_held(redis: RedisStore) -> None:
    tenant = Tenant(redis, amount=100)
    assert (await tenant.take("a", cost=60)).verdict == "ok"
    assert (await tenant.take("b", cost=41)).verdict == "held"
    assert (await tenant.take("b", cost=101)).verdict == "spent"
    assert (await tenant.take("b", cost=40)).verdict == "ok"
    assert await tenant.figures() == (0, 100, 2)
    await tenant.settle(tenant.spend("a", cost=10))
    assert await tenant.figures() == (10, 40, 1)
    await tenant.settle(tenant.spend("b", cost=90))
    assert (await tenant.take("c", cost=1)).verdict == "spent"
    # Another period is another budget.
    tenant.terms = tenant.terms._replace(period="tokens:2026-12")
    assert (await tenant.take("c", cost=100)).verdict == "ok"


async def test_what_is_refused_changes_nothing(redis: RedisStore) -> None:
    tenant = Tenant(redis, requests_per_minute=5, tokens_per_minute=100, max_concurrent=1, amount=1000)
    before = await tenant.take("a", cost=10, tokens=10)
    for cost, tokens in ((0, 95), (2000, 0), (0, 0)):
        refused = await tenant.take("b", cost=cost, tokens=tokens)
        assert refused.verdict != "ok"
        assert refused[2:] == before[2:]
    assert await tenant.figures() == (0, 10, 1)


async def test_a_running_request_takes_more_as_far_as_the_budget_goes(redis: RedisStore) -> None:
    tenant = Tenant(redis, amount=100)
    await tenant.take("a", cost=50)
    await tenant.take("b", cost=20)

    async def more(hold: str, held: int, most: int) -> Any:
        return await tenant.store.top_up(
            tenant.name, hold, amount=100, period=tenant.terms.period, held=held, most=most
        )

    assert await more("a", 50, 20) == (20, 70)
    assert await more("a", 70, 20) == (10, 80)
    assert await more("a", 80, 20) == (0, 80)
    # One that lapsed although it runs keeps what it has, whatever the budget says.
    tenant.tick(HOLD_MS)
    assert await more("b", 20, 10) == (10, 30)
    assert await tenant.figures() == (0, 30, 1)


async def test_renewing_makes_holds_that_redis_does_not_know(redis: RedisStore) -> None:
    tenant = Tenant(redis, amount=100)
    holds = [(f"h:{number}", 1) for number in range(1203)]
    assert await tenant.store.renew(tenant.name, holds)
    assert await tenant.figures() == (0, 1203, 1203)
    assert await tenant.store.renew(tenant.name, [("h:0", 3), ("h:1", 0)])
    assert await tenant.figures() == (0, 1205, 1203)
    tenant.tick(HOLD_MS)
    assert await tenant.figures() == (0, 0, 0)


async def test_a_settlement_counts_once_however_often_it_is_told(redis: RedisStore) -> None:
    tenant = Tenant(redis, amount=100)
    first, second = tenant.spend("a", cost=5, used=5), tenant.spend("b", cost=7, used=7)
    await tenant.settle(first)
    await tenant.settle(first, second)
    await asyncio.gather(*(tenant.settle(first, second) for _ in range(5)))
    assert (await tenant.figures()).spent == 12
    # The numbers are a journal's own.
    await tenant.settle(replace(first, cost=1), journal="other")
    assert (await tenant.figures()).spent == 13


async def test_sums_of_a_day_are_what_was_settled(redis: RedisStore) -> None:
    tenant, other = Tenant(redis), Tenant(redis)
    spends = [
        tenant.spend("a", cost=30, used=30, prompt=20, cached=4, completion=10),
        other.spend("x", cost=1, used=1, model="other"),
        tenant.spend("b", cost=2, used=2, model="n", prompt=1, completion=1),
        tenant.spend("c", cost=5, used=5, prompt=5, completion=0),
        tenant.spend("d", cost=9, used=9, prompt=9, completion=0, at=1_000_000.0 + 86_400),
    ]
    await tenant.settle(*spends)
    usages = await tenant.store.usage(tenant.name, ["1970-01-12"])
    assert usages is not None
    (usage,) = usages
    assert usage.day == "1970-01-12"
    assert usage.models["m:1"] == {"requests": 2, "prompt": 25, "cached": 4, "completion": 10, "tokens": 35}
    assert usage.models["n"]["tokens"] == 2
    days = await tenant.store.usage(tenant.name, ["1970-01-11", "1970-01-12", "1970-01-13"])
    assert [day.models["m:1"]["tokens"] for day in days or ()] == [35, 9]
    assert {tenant.name, other.name} <= (await tenant.store.tenants(["1970-01-12"]) or set())


async def test_a_lost_key_does_not_hold_a_budget_for_ever(redis: RedisStore) -> None:
    tenant = Tenant(redis, amount=100)
    await tenant.take("a", cost=100)
    await redis.run("delete", lambda client: client.delete(f"kvmesh:{{l:{tenant.name}}}:h"), None)
    assert await tenant.figures() == (0, 0, 0)


async def test_half_a_settlement_is_none(redis: RedisStore) -> None:
    """What fails is told again and again: none of it may count before all of it can."""
    tenant = Tenant(redis, amount=100)
    spend = tenant.spend("a", cost=3)
    day = f"kvmesh:{{l:{tenant.name}}}:u:1970-01-12"
    await redis.run("set", lambda client: client.set(day, "of another type"), None)
    for _ in range(3):
        assert await tenant.store.settle("j", [spend]) == [spend]
    assert (await tenant.figures()).spent == 0
    await redis.run("delete", lambda client: client.delete(day), None)
    await tenant.settle(spend)
    assert (await tenant.figures()).spent == 3


async def test_a_clock_that_is_put_back_blocks_nobody(redis: RedisStore) -> None:
    tenant = Tenant(redis, requests_per_minute=1, tokens_per_minute=10, max_concurrent=1)
    tenant.tick(7_200_000)
    assert (await tenant.take("a", tokens=10)).verdict == "ok"
    tenant.tick(-3_600_000)
    taken = await tenant.take("b", tokens=10)
    assert (taken.verdict, taken.running, taken.requests_left, taken.tokens_left) == ("ok", 1, 0, 0)
    # A little is no reason to forget what was used.
    tenant.tick(-1_000)
    assert (await tenant.take("c", tokens=10)).verdict == "requests"


async def test_a_redis_that_came_back_empty_lists_its_tenants_again(redis: RedisStore) -> None:
    tenant = Tenant(redis)
    await tenant.settle(tenant.spend("a", cost=1))
    await redis.run("flush", lambda client: client.delete("kvmesh:usage:1970-01-12"), None)
    for hook in redis.on_connect:
        await hook(None)
    await tenant.settle(tenant.spend("b", cost=1))
    assert await tenant.store.tenants(["1970-01-12"]) == {tenant.name}


async def test_redis_away_is_said_at_once() -> None:
    server = Valkey()
    try:
        async with connected(server.url) as store:
            tenant = Tenant(store, amount=100)
            await tenant.take("a", cost=1)
            server.kill()
            spend = tenant.spend("a", cost=1)
            assert await tenant.store.take(tenant.name, "b", tenant.terms, cost=1, tokens=1) is None
            assert not await tenant.store.renew(tenant.name, [("a", 1)])
            assert await tenant.store.settle("j", [spend]) == [spend]
            assert await tenant.store.figures(tenant.name, "tokens:all") is None
    finally:
        server.close()
