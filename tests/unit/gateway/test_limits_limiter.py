"""The limiter with Redis: what is taken, held, charged and refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from kvmesh.errors import BudgetExceeded, Overloaded
from kvmesh.proto.v1 import inference_pb2 as pb
from limits_kit import LIMIT_S, Valkey, a_job, gateway, policy, until, usage
from services.gateway.limits.contract import NoHold, Window
from services.gateway.limits.estimate import ENOUGH, UNKNOWN, Lengths


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    server = Valkey()
    yield server
    server.close()


async def test_a_tenant_without_limits_asks_redis_nothing() -> None:
    class NoRedis:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"asked redis for {name}")

    async with gateway() as made:
        made.limits._store = NoRedis()  # type: ignore[assignment]
        assert isinstance(await made.take("free", policy()), NoHold)


async def test_rates_are_told_and_refused_with_the_time_to_wait(valkey: Valkey) -> None:
    allowed = policy(requests_per_minute=2, tokens_per_minute=1000)
    async with gateway(valkey) as made:
        hold = await made.take("rates", allowed)
        assert (hold.state.requests.limit, hold.state.requests.remaining) == (2, 1)
        assert hold.state.requests.reset_s == 30.0
        assert hold.state.tokens == Window(1000, 890, 6.6)
        await made.take("rates", allowed)
        with pytest.raises(Overloaded) as refused:
            await made.take("rates", allowed)
        assert refused.value.details == {"limit": "requests_per_minute"}
        assert refused.value.retry_after is not None
        assert 0 < refused.value.retry_after <= 30.0
        await made.take("tokens", policy(tokens_per_minute=100), a_job(max_tokens=1000))
        with pytest.raises(Overloaded) as refused:
            await made.take("tokens", policy(tokens_per_minute=100), a_job(max_tokens=1000))
        assert refused.value.details == {"limit": "tokens_per_minute"}


async def test_requests_one_after_the_other_are_never_too_many_at_a_time(valkey: Valkey) -> None:
    """The end of one may still be on its way to Redis when the next comes."""
    allowed = policy(max_concurrent=1)
    async with gateway(valkey, start=True) as made:
        for _ in range(5):
            hold = await made.take("serial", allowed)
            with pytest.raises(Overloaded) as refused:
                await made.take("serial", allowed)
            assert refused.value.details == {"limit": "max_concurrent"}
            hold.settle(usage(completion=3), None, 0)


async def test_places_are_counted_over_all_gateways(valkey: Valkey) -> None:
    allowed = policy(max_concurrent=2)
    async with gateway(valkey) as one, gateway(valkey) as other:
        hold = await one.take("places", allowed)
        await other.take("places", allowed)
        for made in (one, other):
            with pytest.raises(Overloaded):
                await made.take("places", allowed)
        hold.settle(usage(), None, 1)
        await one.settled()
        await other.take("places", allowed)


async def test_what_was_used_is_charged_once_and_the_rest_given_back(valkey: Valkey) -> None:
    allowed = policy(budget={"amount": 1000})
    async with gateway(valkey) as made:
        hold = await made.take("budget", allowed)
        assert await made.figures("budget", allowed) == (0, 110, 1)
        for _ in range(3):
            hold.settle(usage(completion=7), pb.Served(cache="miss"), 0)
        await made.settled()
        assert await made.figures("budget", allowed) == (17, 0, 0)
        assert made.limits.holds("budget") == 0


@pytest.mark.parametrize(
    ("used", "cache", "code", "cost"),
    [
        (usage(completion=5), "miss", 0, 15),
        (usage(completion=5), "follow", 0, 15),
        (usage(completion=5), "exact", 0, 0),
        (usage(completion=5), "semantic", 0, 0),
        (usage(completion=5), None, 14, 15),
        (usage(), None, 14, 0),
        (usage(), None, 1, 0),
        # Its client left: before and after a worker had taken it.
        (usage(), "", 1, 10),
        (usage(), "", 14, 0),
        (usage(), "exact", 1, 0),
    ],
)
async def test_what_an_end_costs(valkey: Valkey, used: pb.Usage, cache: str | None, code: int, cost: int) -> None:
    allowed = policy(budget={"amount": 1000})
    tenant = f"ends-{cache}-{code}-{cost}"
    async with gateway(valkey) as made:
        hold = await made.take(tenant, allowed)
        hold.settle(used, pb.Served(cache=cache) if cache is not None else None, code)
        await made.settled()
        assert await made.figures(tenant, allowed) == (cost, 0, 0)


async def test_money_is_counted_in_whole_micro_units(valkey: Valkey) -> None:
    prices = {"*": {"prompt": 9, "completion": 9}, "m*": {"prompt": 150_000, "cached": 75_000, "completion": 600_000}}
    allowed = policy(budget={"amount": 100, "unit": "money", "period": "none"}, prices=prices)
    async with gateway(valkey) as made:
        # 10 x 0.15 + 100 x 0.6 = 61.5
        hold = await made.take("money", allowed)
        assert await made.figures("money", allowed) == (0, 62, 1)
        hold.settle(usage(completion=8, cached=4), None, 0)
        await made.settled()
        # 6 x 0.15 + 4 x 0.075 + 8 x 0.6 = 6
        assert await made.figures("money", allowed) == (6, 0, 0)


async def test_a_spent_budget_refuses_for_good_and_a_held_one_for_now(valkey: Valkey) -> None:
    allowed = policy(budget={"amount": 150})
    async with gateway(valkey) as made:
        hold = await made.take("spent", allowed)
        with pytest.raises(Overloaded) as held:
            await made.take("spent", allowed)
        assert (held.value.details, held.value.retry_after) == ({"limit": "budget"}, 1.0)
        hold.settle(usage(completion=100), None, 0)
        # Of 150 there are 40: nobody is told that nothing is left.
        with pytest.raises(BudgetExceeded, match="left of this tenant's budget of the month is less") as spent:
            await made.take("spent", allowed)
        assert spent.value.details == {"limit": "budget"}
        (await made.take("spent", allowed, a_job(max_tokens=30))).settle(usage(completion=30), None, 0)
        await made.settled()
        with pytest.raises(BudgetExceeded, match="budget of the month is spent"):
            await made.take("spent", allowed)


async def test_a_long_answer_takes_more_while_it_streams(valkey: Valkey) -> None:
    allowed = policy(budget={"amount": 100_000})
    async with gateway(valkey) as made:
        hold = await made.take("long", allowed, a_job(max_tokens=4000))
        assert hold.covered == UNKNOWN
        for used in range(0, 4001, 50):
            hold.used(used)
            assert hold.covered >= used
            await until(lambda: hold._growing is None)
        assert (hold.covered, hold.held) == (4000, 4010)
        assert await made.figures("long", allowed) == (0, 4010, 1)
        assert made.stopped == []


async def test_a_running_request_ends_where_the_budget_does(valkey: Valkey) -> None:
    allowed = policy(budget={"amount": 1500})
    async with gateway(valkey) as made:
        hold = await made.take("ends", allowed, a_job(max_tokens=4000))
        stopped_at = 0
        for used in range(1, 4001):
            hold.used(used)
            await until(lambda: hold._growing is None)
            if made.stopped:
                stopped_at = used
                break
        (error,) = made.stopped
        assert isinstance(error, BudgetExceeded)
        assert stopped_at == 1490
        # What was under way is charged honestly.
        hold.settle(usage(completion=stopped_at + 4), None, 8)
        await made.settled()
        assert await made.figures("ends", allowed) == (1504, 0, 0)


async def test_what_comes_at_once_is_taken_before_it_is_shown(valkey: Valkey) -> None:
    """As of a generation that others began: thousands of tokens in one piece, for many at the same time."""
    allowed = policy(budget={"amount": 10_000})
    async with gateway(valkey) as made:
        holds = [await made.take("burst", allowed, a_job(max_tokens=4000)) for _ in range(4)]
        assert not any(hold.short(UNKNOWN) for hold in holds)
        for hold in holds:
            await hold.cover(3000)
        assert [hold.covered >= 3000 for hold in holds] == [True, True, False, False]
        assert len(made.stopped) == 2
        figures = await made.figures("burst", allowed)
        assert figures.held <= 10_000


async def test_a_rate_is_charged_while_answers_get_longer_than_was_thought(valkey: Valkey) -> None:
    """Not at their end alone: until then any number more would be let in."""
    allowed = policy(tokens_per_minute=3000)
    async with gateway(valkey) as made:
        long = await made.take("longer", allowed, a_job(prompt=100, max_tokens=8000))
        (await made.take("longer", allowed)).settle(usage(), None, 1)
        for used in range(0, 6000, 100):
            long.used(used)
            await until(lambda: long._growing is None)
        await made.settled()
        with pytest.raises(Overloaded) as refused:
            await made.take("longer", allowed)
        assert refused.value.details == {"limit": "tokens_per_minute"}
        assert made.stopped == []
        # Of what was taken, that which was not used comes back.
        long.settle(usage(prompt=100, completion=2000), None, 0)
        await made.settled()
        state = (await made.take("longer", allowed)).state.tokens
        assert state is not None
        assert 790 <= state.remaining < 3000 - 110


async def test_all_that_best_of_runs_is_held(valkey: Valkey) -> None:
    allowed = policy(budget={"amount": 100_000})
    async with gateway(valkey) as made:
        hold = await made.take("best", allowed, a_job(max_tokens=1000, best_of=16))
        assert (hold.most, hold.covered, hold.held) == (16_000, 16_000, 16_010)


async def test_an_end_in_the_middle_of_taking_more_leaves_no_hold(valkey: Valkey) -> None:
    allowed = policy(budget={"amount": 100_000})
    async with gateway(valkey) as made:
        hold = await made.take("middle", allowed, a_job(max_tokens=4000))
        hold.used(1000)
        assert hold._growing is not None
        hold.settle(usage(completion=1000), None, 0)
        await until(lambda: made.limits.ledger.unsettled)
        await made.settled()
        assert await made.figures("middle", allowed) == (1010, 0, 0)


async def test_a_request_that_leaves_while_it_is_let_in_holds_nothing(valkey: Valkey) -> None:
    allowed = policy(max_concurrent=1)
    # So long that nothing lapses here.
    async with gateway(valkey, hold_s=600) as made:
        for turns in range(12):
            task = asyncio.create_task(made.take("left", allowed))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if not task.cancelled():
                task.result().settle(usage(), None, 1)
            await until(lambda: not any("limits-take" in str(task) for task in made.tasks._tasks))
            await asyncio.sleep(0)
            await made.settled()
            assert (await made.figures("left", allowed)).running == 0


async def test_holds_are_renewed_while_requests_run_and_lapse_with_their_process(valkey: Valkey) -> None:
    allowed = policy(budget={"amount": 1000})
    async with gateway(valkey, start=True, hold_s=2) as alive, gateway(valkey, hold_s=2) as dead:
        await alive.take("lapse", allowed)
        await dead.take("lapse", allowed)
        async with asyncio.timeout(LIMIT_S):
            while await alive.figures("lapse", allowed) != (0, 110, 1):
                await asyncio.sleep(0.02)
        # A life later it is still there.
        dead_tenant = await dead.take("other", allowed)
        async with asyncio.timeout(LIMIT_S):
            while (await alive.figures("other", allowed)).held == dead_tenant.held:
                await asyncio.sleep(0.02)
        async with asyncio.timeout(LIMIT_S):
            while await alive.figures("lapse", allowed) != (0, 110, 1):
                await asyncio.sleep(0.02)


def test_a_hold_is_for_an_answer_as_long_as_most() -> None:
    lengths = Lengths()
    assert lengths.expected("t", 50) == 50
    assert lengths.expected("t", 10_000) == UNKNOWN
    for length in range(1, ENOUGH):
        lengths.add("t", length)
    assert lengths.expected("t", 10_000) == UNKNOWN
    for length in range(ENOUGH, 101):
        lengths.add("t", length)
    assert lengths.expected("t", 10_000) == int(95 * 1.25) + 1
    assert lengths.expected("t", 20) == 20
    assert lengths.expected("other", 10_000) == UNKNOWN
    for _ in range(500):
        lengths.add("t", 1)
    assert lengths.expected("t", 10_000) == 2
