"""Redis away: a share of the limits for each process, budgets open for a minute or closed, spend that is not lost."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvmesh.errors import Overloaded, Unavailable
from kvmesh.store.limits import LimitStore, Spend
from kvmesh.telemetry import metrics, names
from limits_kit import LIMIT_S, Valkey, a_job, gateway, lines, policy, until, usage
from services.gateway.limits.ledger import Ledger

BUDGET = policy(budget={"amount": 100_000})


@pytest.fixture
def valkey() -> Iterator[Valkey]:
    server = Valkey()
    yield server
    server.close()


async def test_each_process_has_its_share() -> None:
    async with gateway(replicas=4) as made:
        assert (await made.take("a", policy(requests_per_minute=8))).state.requests.remaining == 1
        await made.take("a", policy(requests_per_minute=8))
        with pytest.raises(Overloaded) as refused:
            await made.take("a", policy(requests_per_minute=8))
        assert refused.value.retry_after == 30.0
        made.now += 30.0
        await made.take("a", policy(requests_per_minute=8))

        hold = await made.take("b", policy(max_concurrent=5))
        second = await made.take("b", policy(max_concurrent=5))
        with pytest.raises(Overloaded):
            await made.take("b", policy(max_concurrent=5))
        hold.settle(usage(), None, 1)
        await made.take("b", policy(max_concurrent=5))
        second.settle(usage(), None, 1)

        # 440 of 100 + 440 / 4 tokens a minute; what was not used comes back.
        allowed = policy(tokens_per_minute=440)
        hold = await made.take("c", allowed)
        with pytest.raises(Overloaded) as refused:
            await made.take("c", allowed, a_job(max_tokens=45))
        assert refused.value.retry_after == pytest.approx(30.0)
        hold.settle(usage(completion=45), None, 0)
        await made.take("c", allowed, a_job(max_tokens=45))


async def test_every_process_may_do_a_little() -> None:
    async with gateway(replicas=100) as made:
        await made.take("a", policy(requests_per_minute=1, tokens_per_minute=10, max_concurrent=1))


@pytest.mark.parametrize("configured", [True, False])
async def test_a_budget_is_open_for_a_minute(valkey: Valkey, configured: bool) -> None:
    async with gateway(valkey if configured else None) as made:
        if configured:
            (await made.take("t", BUDGET)).settle(usage(), None, 1)
            valkey.kill()
        await made.take("t", BUDGET)
        made.now += 60.0
        await made.take("t", BUDGET)
        made.now += 0.1
        with pytest.raises(Unavailable) as refused:
            await made.take("t", BUDGET)
        assert refused.value.details == {"limit": "budget"}
        # Of those without a budget nothing is unknown.
        await made.take("other", policy(max_concurrent=1))
        if configured:
            valkey.start()
            assert made.redis is not None
            await asyncio.wait_for(made.redis.up.wait(), LIMIT_S)
            await made.take("t", BUDGET)
            # The next absence has a minute of its own.
            valkey.kill()
            await made.take("t", BUDGET)


async def test_the_minute_is_each_tenants_own_while_others_are_answered(valkey: Valkey) -> None:
    """As where one shard of a cluster is gone, or a key is broken."""
    async with gateway(valkey) as made:
        assert made.redis is not None
        broken = f"kvmesh:{{l:t}}:s:{BUDGET.budget.name(1.7e9)}"
        await made.redis.run("set", lambda client: client.set(broken, "no number"), None)
        for _ in range(2):
            await made.take("t", BUDGET)
            made.now += 31.0
            assert not (await made.take("other", BUDGET)).local
        with pytest.raises(Unavailable):
            await made.take("t", BUDGET)
        await made.redis.run("delete", lambda client: client.delete(broken), None)
        assert not (await made.take("t", BUDGET)).local


async def test_a_limit_that_is_new_begins_with_nothing_owed() -> None:
    async with gateway() as made:
        for _ in range(3):
            hold = await made.take("t", policy(max_concurrent=9), a_job(prompt=1000))
            hold.settle(usage(prompt=1000, completion=100), None, 0)
        taken = await made.take("t", policy(max_concurrent=9, requests_per_minute=2, tokens_per_minute=1), a_job(0, 1))
        assert taken.state.requests.remaining == 0


async def test_a_budget_is_closed_where_that_is_set(valkey: Valkey) -> None:
    async with gateway(valkey, budget_away="closed") as made:
        await made.take("t", BUDGET)
        valkey.kill()
        with pytest.raises(Unavailable):
            await made.take("t", BUDGET)


async def test_what_began_without_redis_holds_its_part_once_it_is_back(valkey: Valkey) -> None:
    async with gateway(valkey, start=True, hold_s=0.6) as made:
        valkey.kill()
        long = await made.take("t", BUDGET, a_job(max_tokens=4000))
        long.used(1000)
        await until(lambda: long.covered > 1024)
        assert made.stopped == []
        valkey.start()
        assert made.redis is not None
        await asyncio.wait_for(made.redis.up.wait(), LIMIT_S)
        async with asyncio.timeout(LIMIT_S):
            while (await made.figures("t", BUDGET)).held != long.held:
                await asyncio.sleep(0.02)
        long.settle(usage(completion=1100), None, 0)
        await until(lambda: not made.limits.ledger.unsettled)
        assert await made.figures("t", BUDGET) == (1110, 0, 0)


async def spend_away(made: Any, valkey: Valkey, requests: int) -> None:
    """Requests that end while Redis is away, each for 15."""
    hold = await made.take("t", BUDGET)
    valkey.kill()
    for number in range(requests):
        if number:
            hold = await made.take("t", BUDGET)
        hold.settle(usage(completion=5), None, 0)
    assert not await made.limits.ledger.flush()


async def test_spend_of_an_absence_is_settled_when_it_ends(valkey: Valkey, tmp_path: Path) -> None:
    exported = tmp_path / "usage.jsonl"
    async with gateway(valkey, journal=tmp_path / "journal", usage_file=exported) as made:
        await spend_away(made, valkey, 6)
        (file,) = (tmp_path / "journal").iterdir()
        assert len(lines(file)) == 6
        assert not exported.exists()
        valkey.start()
        assert made.redis is not None
        await asyncio.wait_for(made.redis.up.wait(), LIMIT_S)
        await made.settled()
        assert await made.figures("t", BUDGET) == (90, 0, 0)
        assert lines(file) == []
        assert len(lines(exported)) == 6
    assert not file.exists()


async def test_a_process_that_dies_leaves_its_spend_to_the_next(valkey: Valkey, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"journal": tmp_path / "journal", "usage_file": tmp_path / "usage.jsonl"}
    async with gateway(valkey, **settings) as dead:
        await spend_away(dead, valkey, 4)
        ledger, journal = dead.limits.ledger, dead.limits.ledger._journal
        assert journal is not None
        left = list(ledger._pending)
        # All that a kill leaves: the file, and its lock free.
        os.close(journal._handle)
        ledger._journal, ledger._pending, ledger._spilled, ledger._dirty = None, [], False, False
        valkey.start()
        async with gateway(valkey, start=True, **settings) as heir:
            async with asyncio.timeout(LIMIT_S):
                while (await heir.figures("t", BUDGET)).spent != 60:
                    await asyncio.sleep(0.02)
            await until(lambda: not journal.path.exists())
            # What was on its way when it died may still arrive.
            assert heir.limits._store is not None
            assert await heir.limits._store.settle(journal.name, left) == []
            assert (await heir.figures("t", BUDGET)).spent == 60
            assert len(lines(settings["usage_file"])) == 4


async def test_without_a_journal_memory_is_bounded(valkey: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.limits.ledger.MAX_PENDING", 3)
    async with gateway(valkey) as made:
        await spend_away(made, valkey, 5)
        assert made.limits.ledger.unsettled == 3


async def test_memory_is_bounded_while_a_look_does_not_come_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Redis that hangs, or a disk: what ends meanwhile is neither pending nor journalled yet."""
    monkeypatch.setattr("services.gateway.limits.ledger.MAX_NEW", 3)
    entered, go = asyncio.Event(), asyncio.Event()
    settled: list[int] = []

    class Hanging(LimitStore):
        async def settle(self, journal: str, spends: Sequence[Spend]) -> list[Spend]:
            entered.set()
            await go.wait()
            settled.extend(spend.number for spend in spends)
            return []

    ledger = Ledger("a", Hanging.__new__(Hanging))

    def add() -> None:
        ledger.add(
            Spend(ledger.next_number(), "t", "h", "tokens:all", 0.0, 0, 1, 1, "m", 1, 0, 1, f"r{ledger.unsettled}")
        )

    lost = metrics.counter(names.LIMITS_LOST)._value.get()
    add()
    flush = asyncio.create_task(ledger.flush())
    async with asyncio.timeout(LIMIT_S):
        await entered.wait()
    for _ in range(5):
        add()
    assert ledger.unsettled == 4
    # Told while the flush hangs.
    assert metrics.value(names.LIMITS_UNSETTLED) == 4.0
    assert metrics.counter(names.LIMITS_LOST)._value.get() - lost == 2
    go.set()
    assert await flush
    assert await ledger.flush()
    assert settled == [1, 2, 3, 4]
    assert "2 settlement(s) are lost" in caplog.text


async def test_with_a_journal_nothing_is_lost_that_memory_has_no_room_for(
    valkey: Valkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.limits.ledger.MAX_PENDING", 3)
    async with gateway(valkey, journal=tmp_path) as made:
        await spend_away(made, valkey, 5)
        for _ in range(4):
            (await made.take("t", BUDGET)).settle(usage(completion=5), None, 0)
            assert not await made.limits.ledger.flush()
        assert made.limits.ledger.unsettled == 3
        valkey.start()
        assert made.redis is not None
        await asyncio.wait_for(made.redis.up.wait(), LIMIT_S)
        await made.settled()
        assert await made.figures("t", BUDGET) == (135, 0, 0)


async def test_a_closed_budget_ends_what_runs_where_its_hold_does(valkey: Valkey) -> None:
    async with gateway(valkey, budget_away="closed") as made:
        hold = await made.take("t", BUDGET, a_job(max_tokens=4000))
        valkey.kill()
        asked = 0
        for used in range(1, 4001):
            hold.used(used)
            asked += hold._growing is not None
            await until(lambda: hold._growing is None)
            if made.stopped:
                break
        (error,) = made.stopped
        assert isinstance(error, Unavailable)
        assert used == hold.covered == 1024
        # Not at every token.
        assert 2 <= asked <= 16


async def test_a_closed_budget_goes_on_once_redis_is_back(valkey: Valkey) -> None:
    async with gateway(valkey, budget_away="closed") as made:
        hold = await made.take("t", BUDGET, a_job(max_tokens=4000))
        valkey.kill()
        for used in range(1, 1000):
            hold.used(used)
            await until(lambda: hold._growing is None)
        assert hold.covered == 1024
        valkey.start()
        assert made.redis is not None
        await asyncio.wait_for(made.redis.up.wait(), LIMIT_S)
        for used in range(1000, 1100):
            hold.used(used)
            await until(lambda: hold._growing is None)
        assert hold.covered > 1100
        assert made.stopped == []


@pytest.mark.parametrize("journal", [True, False])
async def test_what_is_lost_with_the_process_is_counted(valkey: Valkey, tmp_path: Path, journal: bool) -> None:
    lost = metrics.value(names.LIMITS_LOST)
    async with gateway(valkey, journal=tmp_path if journal else None) as made:
        hold = await made.take("t", BUDGET)
        valkey.kill()
        hold.settle(usage(completion=5), None, 0)
        assert not await made.limits.ledger.flush()
        assert metrics.value(names.LIMITS_UNSETTLED) == 1.0
        await made.limits.close()
        assert metrics.value(names.LIMITS_LOST) == lost + (not journal)
