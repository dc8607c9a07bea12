"""The watch on a clock of the test's own: no machine is too slow for it."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any, cast

import pytest

from services.gateway.silence import SilenceWatch


class Timer:
    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Clock:
    """The part of an event loop that the watch uses. `pass_`: time goes by and due timers run; `stand_still`: time goes
    by and nothing runs, until the loop's next turn."""

    def __init__(self) -> None:
        self.now = 100.0
        self._timers: list[tuple[float, int, Timer]] = []
        self._serial = itertools.count()

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[..., object], *args: Any) -> Timer:
        timer = Timer(lambda: call(*args))
        heapq.heappush(self._timers, (when, next(self._serial), timer))
        return timer

    def turn(self) -> None:
        """Run what is due now."""
        due = []
        while self._timers and self._timers[0][0] <= self.now:
            due.append(heapq.heappop(self._timers)[2])
        for timer in due:
            if not timer.cancelled:
                timer.call()

    def pass_(self, seconds: float) -> None:
        end = self.now + seconds
        while self._timers and self._timers[0][0] <= end:
            self.now = max(self.now, self._timers[0][0])
            self.turn()
        self.now = end

    def stand_still(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def watch(clock: Clock, limit_s: float, told: list[float]) -> SilenceWatch:
    return SilenceWatch(limit_s, lambda: told.append(clock.now), loop=cast(Any, clock))


def test_silence_is_told_once_and_hearing_defers_it(clock: Clock) -> None:
    told: list[float] = []
    watched = watch(clock, 2.0, told)
    for _ in range(5):
        # Shorter than the limit each, longer all together.
        clock.pass_(1.9)
        watched.heard()
    assert not told
    clock.pass_(1.99)
    assert not told
    assert not watched.silent
    clock.pass_(0.02)
    assert told == [pytest.approx(100 + 5 * 1.9 + 2.0)]
    assert watched.silent
    clock.pass_(60)
    assert len(told) == 1


def test_our_own_standstill_is_not_the_peers_silence(clock: Clock) -> None:
    told: list[float] = []
    watched = watch(clock, 2.0, told)
    clock.stand_still(5)
    # The overdue timer runs before anything that the peer sent meanwhile can be read.
    clock.turn()
    assert not told
    watched.heard()
    clock.pass_(1.9)
    assert not told


def test_a_peer_that_says_nothing_after_the_standstill_is_silent(clock: Clock) -> None:
    told: list[float] = []
    watch(clock, 2.0, told)
    clock.stand_still(5)
    clock.turn()
    clock.pass_(0.49)
    assert not told
    clock.pass_(0.02)
    assert len(told) == 1


def test_stopped_means_stopped(clock: Clock) -> None:
    told: list[float] = []
    watch(clock, 2.0, told).stop()
    clock.pass_(60)
    assert not told


async def test_it_runs_on_the_running_loop() -> None:
    told: list[bool] = []
    watched = SilenceWatch(3600, lambda: told.append(True))
    assert not watched.silent
    watched.stop()
