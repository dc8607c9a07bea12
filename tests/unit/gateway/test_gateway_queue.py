"""The line by priority, by its bound, and by the wait that it promises."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import os
import random
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway_fakes import MODEL
from gateway_world import World, end_of, rest, text_of
from kvmesh.errors import Overloaded
from kvmesh.proto.v1 import engine_pb2
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.rpc.status import from_rpc_error
from kvmesh.telemetry import metrics, names
from services.gateway.link import Seats
from services.gateway.queue import FairQueue, Ticket
from services.gateway.queue.fair import MAX_TOLD_S
from services.gateway.queue.pace import FORGET_S, LEAST_RELEASES, Pace

# Of what is played through at length.
EXAMPLES = 500 if os.environ.get("KVMESH_SOAK") else 20


def worker(seats: int = 1, model: str = "m") -> Any:
    made = Seats(1)
    made.ceiling = seats
    info = engine_pb2.WorkerInfo(worker_id="w", model=model, page_size=16)
    return SimpleNamespace(info=info, accepting=True, load=engine_pb2.WorkerLoad(free_pages=10_000), seats=made)


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def enter(queue: FairQueue, tenant: str = "a", cost: int = 10, **fields: Any) -> Ticket:
    fields.setdefault("eligible", lambda link: True)
    return queue.enter(tenant, fields.pop("model", "m"), cost=cost, tokens=1, **fields)


def serve(queue: FairQueue, tickets: list[Ticket]) -> Ticket | None:
    """Release one; which."""
    before = {ticket for ticket in tickets if ticket.turn.done()}
    queue.offer(worker())
    for ticket in tickets:
        if ticket.turn.done() and ticket not in before:
            queue.leave(ticket)
            return ticket
    return None


def order(queue: FairQueue, tickets: list[Ticket]) -> list[Ticket]:
    found = []
    while (ticket := serve(queue, tickets)) is not None:
        found.append(ticket)
    return found


# --- priority, weight and bound
async def test_a_higher_priority_goes_first_and_a_heal_before_all() -> None:
    queue = FairQueue(100)
    low, plain, high = (enter(queue, priority=priority) for priority in (-5, 0, 5))
    heal = enter(queue, priority=-50, ahead=True)
    later = enter(queue, "b", priority=5)
    assert order(queue, [low, plain, high, heal, later]) == [heal, high, later, plain, low]


async def test_weights_share_one_priority() -> None:
    queue = FairQueue(1000)
    tickets = [enter(queue, tenant, weight=weight) for tenant, weight in (("one", 1), ("three", 3)) for _ in range(80)]
    first = order(queue, tickets)[:80]
    counts = Counter(ticket.tenant for ticket in first)
    assert abs(counts["three"] - 60) <= 2


async def test_a_full_line_sheds_the_newest_of_the_lowest_priority() -> None:
    queue = FairQueue(3)
    low = [enter(queue, priority=-1) for _ in range(2)]
    plain = enter(queue, "b")
    high = enter(queue, "c", priority=3)
    with pytest.raises(Overloaded) as shed:
        low[1].turn.result()
    assert shed.value.retry_after
    queue.leave(low[1])
    assert not low[0].turn.done()
    assert not plain.turn.done()
    assert len(queue) == 3
    # Nobody here has less than it.
    with pytest.raises(Overloaded) as refused:
        enter(queue, "d", priority=-2)
    assert refused.value.retry_after
    assert order(queue, [low[0], plain, high]) == [high, plain, low[0]]


async def test_a_full_line_belongs_to_no_tenant_alone() -> None:
    queue = FairQueue(8)
    greedy = [enter(queue, "greedy") for _ in range(8)]
    modest = [enter(queue, "modest") for _ in range(4)]
    assert [ticket.turn.done() for ticket in greedy] == [False] * 4 + [True] * 4
    assert all(isinstance(ticket.turn.exception(), Overloaded) for ticket in greedy[4:])
    for tenant in ("greedy", "modest"):
        with pytest.raises(Overloaded):
            enter(queue, tenant)
    assert len(queue) == 8
    assert not any(ticket.turn.done() for ticket in modest)


async def test_heals_are_neither_counted_out_nor_shed() -> None:
    queue = FairQueue(1)
    heals = [enter(queue, ahead=True) for _ in range(3)]
    with pytest.raises(Overloaded):
        enter(queue, "b", priority=100)
    assert order(queue, heals) == heals


async def test_a_ticket_that_was_cancelled_just_now_gets_no_turn() -> None:
    queue = FairQueue(10)
    gone, stays = enter(queue), enter(queue)
    # Its request has not run yet to leave the line.
    gone.turn.cancel()
    queue.offer(worker())
    assert stays.turn.done()
    assert len(queue) == 1
    queue.leave(gone)
    queue.leave(stays)
    assert not len(queue)
    assert not queue.waiting("m")


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("enter"), st.sampled_from("abc"), st.integers(-1, 1), st.booleans()),
            st.tuples(st.sampled_from(["leave", "again", "cancel"]), st.integers(0, 30)),
            st.tuples(st.just("offer"), st.integers(1, 3)),
        ),
        max_size=60,
    )
)
def test_whatever_happens_the_line_is_counted_right(actions: list[Any]) -> None:
    async def run() -> None:
        queue = FairQueue(5, shared=True)
        tickets: list[Ticket] = []
        links = []
        for kind, *args in actions:
            if kind == "enter":
                try:
                    tickets.append(enter(queue, args[0], priority=args[1], ahead=args[2]))
                except Overloaded:
                    assert len(queue) >= 5
            elif kind == "offer":
                links.append(worker(args[0]))
                queue.offer(links[-1])
            elif tickets:
                ticket = tickets[args[0] % len(tickets)]
                if kind == "leave":
                    queue.leave(ticket)
                elif kind == "cancel" and not ticket.turn.done():
                    ticket.turn.cancel()
                elif kind == "again" and ticket.promised is not None:
                    queue.reenter(ticket)
            assert len(queue) == sum(ticket.lined_up for ticket in tickets)
            assert queue.busy.is_set() == bool(len(queue))
            assert sum(link.seats.promised for link in links) == sum(t.promised is not None for t in tickets)
            fresh = sum(ticket.lined_up and not ticket.ahead for ticket in tickets)
            assert fresh <= 5 + sum(1 for action in actions if action[0] == "again")
        for ticket in tickets:
            queue.leave(ticket)
        assert not len(queue)
        assert not queue.waiting("m")
        assert all(link.seats.promised == 0 for link in links)

    asyncio.run(run())


# --- the pace
def test_nothing_measured_promises_nothing() -> None:
    pace = Pace()
    pace.begin(0.0)
    assert pace.wait_s(100, 5.0) is None
    assert pace.wait_s(0, 5.0) == 0.0
    for index in range(LEAST_RELEASES):
        pace.released(10, 6.0 + index)
    wait = pace.wait_s(100, 10.0)
    assert wait is not None
    assert 10.0 < wait < 40.0


def test_answers_of_minutes_do_not_look_like_a_standstill() -> None:
    """Eight seats whose answers take a minute each, and come free together."""
    pace, now = Pace(), 0.0
    pace.begin(now)
    for _ in range(10):
        now += 60.0
        for _ in range(8):
            pace.released(100, now)
    for later in (1.0, 30.0, 59.0):
        wait = pace.wait_s(800, now + later)
        assert wait is not None
        assert 25.0 < wait < 150.0, later


def test_a_pace_that_was_just_measured_counts_more() -> None:
    pace, now = Pace(), 0.0
    pace.begin(now)
    for step, times in ((0.1, 1000), (1.0, 30)):
        for _ in range(times):
            now += step
            pace.released(10, now)
    wait = pace.wait_s(100, now)
    assert wait is not None
    assert 5.0 < wait < 11.0


def test_the_pace_counts_only_time_in_which_somebody_waited() -> None:
    pace = Pace()
    now = 0.0
    for _ in range(4):
        pace.begin(now)
        for _ in range(10):
            now += 1.0
            pace.released(20, now)
        pace.end(now)
        now += 30.0
    pace.begin(now)
    assert pace.wait_s(100, now) == pytest.approx(5.0, rel=0.1)
    pace.end(now)
    pace.begin(now + FORGET_S + 1)
    assert pace.wait_s(100, now + FORGET_S + 1) is None


@settings(max_examples=EXAMPLES)
@given(
    rate=st.sampled_from([5.0, 50.0, 1000.0]),
    costs=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40)), min_size=30, max_size=60),
    mine=st.sampled_from("abcd"),
)
def test_the_estimate_is_about_what_the_wait_is(rate: float, costs: list[tuple[str, int]], mine: str) -> None:
    """Workers give out `rate` tokens a second; a newcomer's estimate against when its turn comes."""

    async def run() -> None:
        clock = Clock()
        queue = FairQueue(1000, clock=clock)
        warm = [enter(queue, tenant, cost) for tenant in "abc" for cost in (7, 13, 20, 30, 9, 17) * 10]
        tickets = warm + [enter(queue, tenant, cost) for tenant, cost in costs]
        for _ in range(len(warm) // 2):
            ticket = serve(queue, tickets)
            assert ticket is not None
            clock.now += ticket.cost / rate
        estimate = queue.estimate(mine, "m")
        if estimate is None:  # The whole warm-up took less than it takes to tell.
            return
        newcomer = enter(queue, mine, 20)
        began = clock.now
        while not newcomer.turn.done():
            ticket = serve(queue, [*tickets, newcomer])
            assert ticket is not None
            if ticket is not newcomer:
                clock.now += ticket.cost / rate
        waited = clock.now - began
        # Released costs come in lumps of up to 40.
        assert abs(estimate - waited) <= 0.2 * waited + 4 * 40 / rate

    asyncio.run(run())


async def measured(clock: Clock, *, early_refusal: bool = True) -> tuple[FairQueue, list[Ticket]]:
    """A queue that releases 10 tokens a second, with 300 of tenant a's waiting."""
    queue = FairQueue(100, clock=clock, early_refusal=early_refusal, rng=random.Random(1))
    tickets = [enter(queue) for _ in range(50)]
    for _ in range(20):
        clock.now += 1.0
        serve(queue, tickets)
    return queue, tickets


async def test_who_cannot_be_served_in_time_is_refused_at_once() -> None:
    clock = Clock()
    queue, _ = await measured(clock)
    with pytest.raises(Overloaded) as raised:
        enter(queue, within_s=20.0)
    # Thirty wait, one a second.
    assert raised.value.retry_after == pytest.approx(30.0, rel=0.35)
    assert metrics.value(names.GATEWAY_QUEUE_DELAY, model_name="m") == pytest.approx(30.0, rel=0.2), "told all the same"
    assert len(queue) == 30
    assert enter(queue, within_s=40.0)
    # Another tenant's turn comes sooner, and a higher priority's, and a heal waits as long as it has to.
    assert enter(queue, "b", within_s=2.0)
    assert enter(queue, "c", within_s=0.5, priority=1)
    assert enter(queue, within_s=0.0, ahead=True)
    # Workers that release nothing any more.
    clock.now += 60.0
    with pytest.raises(Overloaded) as stuck:
        enter(queue, within_s=40.0)
    assert stuck.value.retry_after
    assert stuck.value.retry_after <= 72.0


async def test_early_refusal_can_be_off_and_a_cold_start_refuses_nobody() -> None:
    clock = Clock()
    queue, _ = await measured(clock, early_refusal=False)
    assert enter(queue, within_s=0.1)
    cold = FairQueue(100, clock=clock)
    for _ in range(50):
        enter(cold, within_s=0.01)
    assert cold.estimate("a", "m") is None
    assert 0.8 <= cold.retry_after("a", "m") <= 1.2


async def test_retries_are_spread() -> None:
    queue, _ = await measured(Clock())
    told = {round(queue.retry_after("a", "m"), 3) for _ in range(50)}
    assert len(told) > 20
    estimate = queue.estimate("a", "m")
    assert estimate is not None
    assert all(0.75 * estimate <= each <= 1.25 * estimate for each in told)


async def test_a_late_turn_is_refused_through_the_door(world: World) -> None:
    """With RetryInfo, at once, while those who wait wait on; and nobody's generation is begun for it."""
    worker = await world.worker(max_batch=1)
    worker.fill()
    await world.router()
    await world.start()
    queue, clock = world.gateway.queue, Clock()
    queue._clock = clock
    calls = [world.chat(str(index), sampling={"max_tokens": 100}) for index in range(8)]
    await world.until(lambda: len(queue) == 8)
    # As if a token a second had been released for a while.
    for _ in range(10):
        clock.now += 1.0
        queue._paces[MODEL].released(1, clock.now)
    refused = metrics.value(names.GATEWAY_REFUSED, cause="late")
    began = time.monotonic()
    error = from_rpc_error(await end_of(world.chat(limits=pb.Limits(ttft_ms=30_000))))
    assert isinstance(error, Overloaded)
    assert error.retry_after is not None
    assert 40 < error.retry_after <= 72
    assert time.monotonic() - began < 30
    assert len(queue) == 8
    assert metrics.value(names.GATEWAY_REFUSED, cause="late") == refused + 1
    clock.now = 0.0
    worker.empty()
    for call in calls:
        assert text_of(await rest(call)) == "hello"
    await world.until(world.idle)


async def test_a_full_line_sheds_through_the_door(world: World) -> None:
    worker = await world.worker(max_batch=1)
    worker.fill()
    await world.start(static=True, max_waiting_requests=2)
    first = world.chat("first")
    await world.until(lambda: len(world.gateway.queue) == 1)
    second = world.chat("second")
    await world.until(lambda: len(world.gateway.queue) == 2)
    # Somebody of a higher priority; the doors of a single tenant know none.
    high = world.gateway.queue.enter("vip", MODEL, cost=1, tokens=1, eligible=lambda link: False, priority=9)
    error = from_rpc_error(await end_of(second))
    assert isinstance(error, Overloaded)
    assert error.retry_after is not None
    world.gateway.queue.leave(high)
    worker.empty()
    assert text_of(await rest(first)) == "hello"
    await world.until(world.idle)


def test_infinite_waits_are_told_in_bounds() -> None:
    async def run() -> None:
        clock = Clock()
        queue, _ = await measured(clock)
        clock.now += 1e6
        assert queue.retry_after("a", "m") <= 72.0
        assert math.isfinite(queue.retry_after("a", "m"))
        with pytest.raises(Overloaded):
            enter(queue, within_s=1.0)
        assert metrics.value(names.GATEWAY_QUEUE_DELAY, model_name="m") == MAX_TOLD_S

    asyncio.run(run())


class Crowd:
    """Clients who come at random to eight seats of two seconds each, and leave after ten without a turn."""

    LIMIT_S, SEATS, SERVICE_S, TOTAL_S = 10.0, 8, 2.0, 100.0

    def __init__(self, overload: float, *, early_refusal: bool) -> None:
        self.rng = random.Random(5)
        self.clock = Clock()
        self.queue = FairQueue(1024, clock=self.clock, early_refusal=early_refusal, rng=self.rng)
        self.link = worker(self.SEATS)
        self.counts: Counter[str] = Counter()
        self._events: list[tuple[float, int, Any]] = []
        self._numbers = itertools.count()
        self._waiting: set[Ticket] = set()
        at = self.clock.now
        while at < self.clock.now + self.TOTAL_S:
            at += self.rng.expovariate(overload * self.SEATS / self.SERVICE_S)
            self._later(at, self._arrive)

    def _later(self, at: float, what: Any) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), what))

    def run(self) -> Counter[str]:
        """In time, late and refused."""
        while self._events:
            self.clock.now, _, what = heapq.heappop(self._events)
            what()
        return self.counts

    def _arrive(self) -> None:
        if self.link.seats.free > 0 and not self.queue.waiting("m"):
            self._start()
            return
        cost = self.rng.choice([50, 200, 1000])
        try:
            ticket = enter(self.queue, self.rng.choice("abc"), cost, within_s=self.LIMIT_S)
        except Overloaded:
            self.counts["refused"] += 1
            return
        self._waiting.add(ticket)
        self._later(self.clock.now + self.LIMIT_S, lambda: self._give_up(ticket))

    def _give_up(self, ticket: Ticket) -> None:
        if ticket in self._waiting:
            self._waiting.remove(ticket)
            self.queue.leave(ticket)
            self.counts["late"] += 1

    def _start(self) -> None:
        self.counts["in time"] += 1
        self.link.seats.taken += 1
        self._later(self.clock.now + self.SERVICE_S * self.rng.uniform(0.5, 1.5), self._done)

    def _done(self) -> None:
        self.link.seats.taken -= 1
        self.queue.offer(self.link)
        for ticket in [ticket for ticket in self._waiting if ticket.turn.done()]:
            self._waiting.remove(ticket)
            self.queue.leave(ticket)
            self._start()


async def test_early_refusal_spares_a_wait_for_nothing_and_costs_no_work() -> None:
    # With room for all, nobody is refused.
    assert set(Crowd(0.8, early_refusal=True).run()) == {"in time"}
    for overload in (1.3, 4.0):
        without = Crowd(overload, early_refusal=False).run()
        refusing = Crowd(overload, early_refusal=True).run()
        assert refusing["in time"] >= 0.95 * without["in time"], (without, refusing)
        assert refusing["late"] <= 0.5 * without["late"], (without, refusing)
