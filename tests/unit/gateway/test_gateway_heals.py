"""The pace of heals."""

from __future__ import annotations

import asyncio
import random

import pytest

from services.gateway.heals import Heals


async def test_few_at_a_time_whatever_ends_them() -> None:
    heals = Heals(concurrency=3, jitter_s=0.001)
    now, most, served = 0, 0, 0

    async def one(index: int) -> None:
        nonlocal now, most, served
        async with heals.turn(index % 4):
            now += 1
            most = max(most, now)
            try:
                await asyncio.sleep(0)
                if index % 5 == 0:
                    raise ValueError(index)
                served += 1
            finally:
                now -= 1

    tasks = [asyncio.create_task(one(index)) for index in range(50)]
    for task in tasks[1::7]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert 0 < most <= 3
    assert served > 25
    # Every seat came back.
    async with asyncio.timeout(60), heals.turn(), heals.turn(), heals.turn():
        pass


@pytest.mark.parametrize(("failures", "longest"), [(0, 1.0), (1, 2.0), (3, 8.0), (50, 64.0)])
async def test_delays_are_spread_and_grow(monkeypatch: pytest.MonkeyPatch, failures: int, longest: float) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    heals = Heals(jitter_s=1.0, rng=random.Random(3))
    monkeypatch.setattr("services.gateway.heals.asyncio.sleep", sleep)
    for _ in range(200):
        async with heals.turn(failures):
            pass
    assert min(slept) < 0.1 * longest
    assert 0.9 * longest < max(slept) <= longest


async def test_a_change_wakes_all_who_wait() -> None:
    heals = Heals()
    waiting = [asyncio.create_task(heals.wait_changed(60.0)) for _ in range(5)]
    await asyncio.sleep(0)
    heals.changed()
    assert await asyncio.gather(*waiting) == [True] * 5
    assert not await heals.wait_changed(0.0)
