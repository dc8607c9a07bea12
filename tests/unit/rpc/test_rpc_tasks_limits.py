"""Background tasks that are owned, and limits that only shrink."""

from __future__ import annotations

import asyncio
import logging
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.config import ServiceSettings
from kvmesh.errors import DeadlineExceeded
from kvmesh.rpc import BackgroundTasks, Deadline, RequestLimits, RpcServer, cancel_and_wait
from kvmesh.telemetry import metrics, names


async def forever() -> None:
    await asyncio.Event().wait()


async def boom() -> None:
    raise ValueError("broken")


async def test_close_cancels_all_and_waits_for_cleanup() -> None:
    cleaned: list[int] = []

    async def slow_cleanup(index: int) -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(0)
            cleaned.append(index)

    async with BackgroundTasks() as tasks:
        for index in range(5):
            tasks.spawn(slow_cleanup(index), name=f"t{index}")
        await asyncio.sleep(0)
        assert len(tasks) == 5
    assert sorted(cleaned) == [0, 1, 2, 3, 4]
    assert len(tasks) == 0
    with pytest.raises(RuntimeError, match="closed"):
        tasks.spawn(forever(), name="late")


async def test_a_task_that_dies_is_logged_counted_and_surfaces(caplog) -> None:
    before = metrics.value(names.TASK_FAILURES, task="loop")
    async with BackgroundTasks() as tasks:
        tasks.spawn(forever(), name="other")
        with caplog.at_level(logging.ERROR):
            tasks.spawn(boom(), name="loop:7")
            failure = await asyncio.wait_for(tasks.wait_failed(), 60)
        assert isinstance(failure, ValueError)
    assert "loop:7" in caplog.text
    assert metrics.value(names.TASK_FAILURES, task="loop") == before + 1


async def test_a_task_that_is_not_essential_only_logs() -> None:
    async with BackgroundTasks() as tasks:
        task = tasks.spawn(boom(), name="detail", essential=False)
        await asyncio.wait([task])
        await asyncio.sleep(0)
        assert tasks.failure is None


async def test_the_server_stops_when_an_essential_task_fails() -> None:
    server = RpcServer(ServiceSettings())
    await server.start()
    async with BackgroundTasks() as tasks:
        tasks.spawn(boom(), name="loop")
        failure = await asyncio.wait_for(server.serve_until_signal(tasks=tasks), 60)
    assert isinstance(failure, ValueError)


async def test_a_task_that_swallows_cancellation_is_reported() -> None:
    release = asyncio.Event()

    async def stubborn() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    with pytest.raises(TimeoutError, match="did not end"):
        await cancel_and_wait(task, None, timeout_s=0.05)
    release.set()
    await task


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_limits_shrink_with_the_clock() -> None:
    clock = Clock()
    limits = RequestLimits.start(1000, 5000, clock)
    clock.now += 0.4
    assert limits.remaining_ms() == (600, 4600)
    limits.check(first_token_seen=False)
    clock.now += 0.6
    with pytest.raises(DeadlineExceeded, match="first token"):
        limits.check(first_token_seen=False)
    limits.check(first_token_seen=True)
    clock.now += 10
    with pytest.raises(DeadlineExceeded, match="total"):
        limits.check(first_token_seen=True)
    assert limits.remaining_ms() == (0, 0)


def test_the_total_also_bounds_the_first_token() -> None:
    limits = RequestLimits.start(60_000, 10_000, Clock())
    assert limits.current(first_token_seen=False) is limits.total


@given(st.floats(0, 1e7), st.lists(st.floats(0, 1e5), max_size=20))
def test_no_hop_gains_time(budget_ms: float, hops: list[float]) -> None:
    """Each hop restarts the limit from the milliseconds it was told; the sum of all never exceeds the first."""
    clock = Clock()
    end = Deadline.after_ms(budget_ms, clock)
    left = end.remaining_ms()
    for spent in hops:
        hop = Deadline.after_ms(left, clock)
        assert hop.at <= max(end.at, clock.now) + 1e-6
        clock.now += spent / 1000
        left = hop.remaining_ms()
    assert left <= budget_ms


def test_no_deadline() -> None:
    never = Deadline.after(None)
    assert (never.timeout(), never.timeout(3.0), never.expired) == (None, 3.0, False)
    assert never.remaining() == math.inf
    assert never.remaining_ms() == 2**31 - 1
    assert never.earlier(Deadline.after(1)).timeout() is not None
