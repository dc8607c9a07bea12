from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.errors import Overloaded
from kvmesh.proto.v1 import engine_pb2
from services.gateway.link import Seats
from services.gateway.queue import FairQueue, Ticket


def link(*, seats: int = 1, pages: int = 10_000, worker_id: str = "w") -> Any:
    made = Seats(1)
    made.ceiling = seats
    info = engine_pb2.WorkerInfo(worker_id=worker_id, model="m", page_size=16)
    return SimpleNamespace(info=info, accepting=True, load=engine_pb2.WorkerLoad(free_pages=pages), seats=made)


def enter(
    queue: FairQueue,
    tenant: str,
    cost: int = 10,
    tokens: int = 10,
    eligible: Any = lambda link: True,
    *,
    ahead: bool = False,
) -> Ticket:
    return queue.enter(tenant, "m", cost=cost, tokens=tokens, eligible=eligible, ahead=ahead)


def released(tickets: list[Ticket]) -> list[Ticket]:
    return [ticket for ticket in tickets if ticket.turn.done() and not ticket.turn.cancelled()]


def serve_all(queue: FairQueue, tickets: list[Ticket]) -> list[Ticket]:
    """Release one by one; the order."""
    order: list[Ticket] = []
    while len(queue):
        worker = link()
        queue.offer(worker)
        (new,) = [ticket for ticket in released(tickets) if ticket not in order]
        order.append(new)
        queue.leave(new)
    return order


async def test_a_greedy_tenant_does_not_hold_up_a_modest_one() -> None:
    queue = FairQueue(100)
    greedy = [enter(queue, "greedy") for _ in range(50)]
    modest = [enter(queue, "modest") for _ in range(3)]
    order = serve_all(queue, greedy + modest)
    assert max(order.index(ticket) for ticket in modest) <= 6
    assert [ticket for ticket in order if ticket in greedy] == greedy


async def test_cost_counts_not_requests() -> None:
    queue = FairQueue(100)
    big = [enter(queue, "big", cost=100) for _ in range(4)]
    small = [enter(queue, "small", cost=10) for _ in range(40)]
    order = serve_all(queue, big + small)
    before_third_big = order[: order.index(big[2])]
    # By the time the third big one starts, both tenants have had about 200 tokens of work.
    assert 18 <= len([ticket for ticket in before_third_big if ticket in small]) <= 22


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), min_size=1, max_size=40))
def test_backlogged_tenants_get_equal_work(requests: list[tuple[str, int]]) -> None:
    async def run() -> None:
        queue = FairQueue(1000)
        tickets = [enter(queue, tenant, cost=cost) for tenant, cost in requests]
        served = dict.fromkeys("abc", 0)
        left = {tenant: sum(1 for t, _ in requests if t == tenant) for tenant in "abc"}
        for ticket in serve_all(queue, tickets):
            served[ticket.tenant] += ticket.cost
            left[ticket.tenant] -= 1
            backlogged = [served[tenant] for tenant in "abc" if left[tenant]]
            if len(backlogged) > 1:
                # The classic bound of start-time fair queueing: one request of each at most.
                assert max(backlogged) - min(backlogged) <= 2 * 50
        assert not queue.waiting("m")

    asyncio.run(run())


async def test_seats_and_pages_bound_what_is_released() -> None:
    queue = FairQueue(100)
    tickets = [enter(queue, "a", tokens=32) for _ in range(5)]
    worker = link(seats=2)
    queue.offer(worker)
    assert len(released(tickets)) == 2
    queue.offer(worker)
    assert len(released(tickets)) == 2
    for ticket in tickets[:2]:
        queue.leave(ticket)
    assert worker.seats.promised == 0
    # Three pages each, seven free: two fit.
    worker = link(seats=5, pages=7)
    queue.offer(worker)
    assert len(released(tickets)) == 4


async def test_a_worker_that_runs_nothing_is_asked_even_without_pages() -> None:
    queue = FairQueue(100)
    ticket = enter(queue, "a", tokens=1000)
    queue.offer(link(pages=1))
    assert released([ticket])


async def test_reentering_keeps_the_place_and_the_charge() -> None:
    queue = FairQueue(100)
    first, second = enter(queue, "a"), enter(queue, "a")
    other = enter(queue, "b")
    worker = link()
    queue.offer(worker)
    assert released([first, second, other]) == [first]
    queue.reenter(first)
    assert worker.seats.promised == 0
    assert len(queue) == 3
    order = serve_all(queue, [first, second, other])
    assert order == [first, other, second]


async def test_ineligible_tickets_do_not_block_others() -> None:
    queue = FairQueue(100)
    picky = enter(queue, "a", eligible=lambda link: link.info.worker_id == "special")
    easy = enter(queue, "a")
    queue.offer(link(seats=2))
    assert released([picky, easy]) == [easy]
    queue.offer(link(worker_id="special"))
    assert released([picky])


async def test_leaving_is_idempotent_and_costs_nothing() -> None:
    queue = FairQueue(2)
    ticket = enter(queue, "a", cost=1000)
    enter(queue, "a")
    with pytest.raises(Overloaded) as raised:
        enter(queue, "a")
    assert raised.value.retry_after
    queue.leave(ticket)
    queue.leave(ticket)
    assert len(queue) == 1
    late, other = enter(queue, "b"), None
    assert other is None
    queue.offer(link(seats=5))
    assert released([late])
    assert len(queue) == 0


def test_seats_learn_from_refusals() -> None:
    seats = Seats(8)
    assert seats.free == 12
    seats.taken = 5
    seats.refused()
    assert seats.free == 0
    seats.taken = 4
    assert seats.free == 1
    seats.accepted()
    seats.accepted()
    assert seats.ceiling == 6
    seats.taken = 0
    seats.refused()
    # A worker that runs nothing must be asked again, or the line would never move.
    assert seats.free == 1


def test_a_refusal_from_before_the_last_report_does_not_hold_a_worker_down() -> None:
    seats = Seats(64)
    # Other gateways have just filled it, and no frame has told yet.
    seats.refused()
    assert seats.ceiling == 1
    seats.reported(96)
    assert seats.free == 0
    seats.reported(80)
    assert seats.free == 16


async def test_what_ran_before_goes_ahead_in_the_order_of_its_coming() -> None:
    queue = FairQueue(4)
    fresh = [enter(queue, tenant) for tenant in "aabb"]
    assert queue.waiting("m")
    assert not queue.waiting("m", ahead=True)
    # The line is full for what has not begun, not for these.
    ahead = [enter(queue, tenant, cost=1000, ahead=True) for tenant in "bab"]
    assert queue.waiting("m", ahead=True)
    with pytest.raises(Overloaded):
        enter(queue, "a")
    order = serve_all(queue, fresh + ahead)
    assert order[:3] == ahead
    # What went ahead is charged to its tenant: b has had twice as much.
    assert [ticket.tenant for ticket in order[3:]] == ["a", "a", "b", "b"]
    assert not len(queue)


async def test_a_turn_that_was_none_keeps_its_place_behind_those_ahead() -> None:
    queue = FairQueue(10)
    fresh = [enter(queue, "a") for _ in range(2)]
    worker = link()
    queue.offer(worker)
    assert fresh[0].turn.done()
    first, second = (enter(queue, "a", ahead=True) for _ in range(2))
    queue.reenter(fresh[0])
    full = link()
    queue.offer(full)
    assert first.turn.done()
    queue.reenter(first)
    assert serve_all(queue, [*fresh, first, second]) == [first, second, *fresh]
