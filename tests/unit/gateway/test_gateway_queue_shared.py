"""One line over several gateways: nobody gets a double share by asking two."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flight_world import Valkey
from kvmesh.store.client import RedisStore
from kvmesh.store.fair import FairStore
from services.gateway.queue import FairQueue, Ticket
from services.gateway.queue.shared import SharedCharges
from test_gateway_queue import EXAMPLES, Clock, enter, serve


class Sums:
    """A store of one process: what all gateways released, by period."""

    def __init__(self) -> None:
        self.period = 0
        self.away = False
        self.sums: Counter[tuple[int, str, str]] = Counter()
        self.calls = 0

    async def exchange(self, charges: Mapping[str, Mapping[str, int]]) -> tuple[int, dict[str, dict[str, int]]] | None:
        self.calls += 1
        if self.away:
            return None
        for model, tenants in charges.items():
            for tenant, cost in tenants.items():
                self.sums[self.period, model, tenant] += cost
        return self.period, {
            model: {t: cost for (p, m, t), cost in self.sums.items() if (p, m) == (self.period, model)}
            for model in charges
        }


async def gateways(stores: list[Any], rounds: int, *, ask: list[str], on_round: Any = None) -> list[Counter[str]]:
    """Each releases one request a round, and tells the others every other round; what each tenant got at each. `ask`:
    for each gateway its tenants, who always have requests waiting. Costs are alike."""
    queues = [FairQueue(10_000, shared=True) for _ in stores]
    shared = [SharedCharges(queue, store) for queue, store in zip(queues, stores, strict=True)]
    waiting: list[dict[str, Ticket]] = [{} for _ in queues]
    got: list[Counter[str]] = [Counter() for _ in queues]
    for number in range(rounds):
        for queue, tenants, tickets, mine in zip(queues, ask, waiting, got, strict=True):
            for tenant in tenants:
                if tenant not in tickets:
                    tickets[tenant] = enter(queue, tenant)
            served = serve(queue, list(tickets.values()))
            assert served is not None
            del tickets[served.tenant]
            mine[served.tenant] += served.cost
        if on_round is not None:
            on_round(number)
        if number % 2:
            for each in shared:
                await each.step()
    for queue, tickets in zip(queues, waiting, strict=True):
        for ticket in tickets.values():
            queue.leave(ticket)
    return got


@pytest.mark.parametrize("ask", [["xy", "xz"], ["xy", "x"], ["xyz", "xyz"], ["xy", "z"]])
async def test_two_gateways_give_no_tenant_a_double_share(ask: list[str]) -> None:
    store = Sums()

    def turn(number: int) -> None:
        store.period = number // 70

    got = sum(await gateways([store, store], 300, ask=ask, on_round=turn), Counter[str]())
    if ask == ["xy", "z"]:
        # Apart: nobody has a share to give away.
        assert got["z"] == 3000
        assert abs(got["x"] - got["y"]) <= 20
    else:
        assert max(got.values()) - min(got.values()) <= 0.05 * max(got.values()), got


async def test_without_the_store_each_gateway_is_fair_by_itself() -> None:
    store = Sums()
    store.away = True
    got = await gateways([store, store], 100, ask=["xy", "xz"])
    assert got == [{"x": 500, "y": 500}, {"x": 500, "z": 500}]


async def test_a_store_that_comes_and_goes_charges_nobody_twice() -> None:
    store = Sums()

    def flicker(number: int) -> None:
        store.away = number % 20 in (5, 6, 7)

    got = sum(await gateways([store, store], 400, ask=["xy", "xz"], on_round=flicker), Counter[str]())
    # What was released while the store was away is not known of.
    assert max(got.values()) - min(got.values()) <= 0.25 * max(got.values()), got


@settings(max_examples=EXAMPLES)
@given(st.lists(st.text("vwxyz", min_size=1, max_size=4).map(set), min_size=2, max_size=4))
def test_who_has_more_in_all_is_given_nothing_here(asked: list[set[str]]) -> None:
    """Where two tenants wait, the one that has more over all gateways got it elsewhere."""
    ask = ["".join(sorted(tenants)) for tenants in asked]
    got = asyncio.run(gateways([Sums()] * len(ask), 150, ask=ask))
    total = sum(got, Counter[str]())
    lumps = 150
    for tenants, mine in zip(ask, got, strict=True):
        for more in tenants:
            if any(total[more] > total[less] + lumps for less in tenants):
                assert mine[more] <= lumps, (ask, got)


async def test_a_store_that_lost_its_sums_gives_nobody_a_credit() -> None:
    store = Sums()
    queue, other = FairQueue(100, shared=True), FairQueue(100, shared=True)
    shared, others = SharedCharges(queue, store), SharedCharges(other, store)
    tickets = [enter(queue, tenant, 100) for tenant in "xy" for _ in range(10)]
    elsewhere = [enter(other, "x", 100) for _ in range(10)]
    charged: list[tuple[str, int]] = []
    charge = queue.charged_elsewhere
    queue.charged_elsewhere = lambda *args: (charged.append(args[1:]), charge(*args))[1]  # type: ignore[method-assign]
    await shared.step()
    for _ in range(6):
        serve(other, elsewhere)
        serve(queue, tickets)
        await others.step()
        await shared.step()
    assert charged == [("x", 100)] * 6
    store.sums.clear()
    serve(other, elsewhere)
    serve(queue, tickets)
    await others.step()
    await shared.step()
    assert charged == [("x", 100)] * 7
    for line in (queue, other):
        for ticket in tickets + elsewhere:
            line.leave(ticket)


async def test_nothing_is_asked_while_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.queue.shared.INTERVAL_S", (0.001, 0.002))
    store = Sums()
    queue = FairQueue(10, shared=True)
    task = asyncio.create_task(SharedCharges(queue, store).run())
    for _ in range(20):
        await asyncio.sleep(0)
    assert store.calls == 0
    tickets = [enter(queue), enter(queue)]
    async with asyncio.timeout(60):
        while store.calls < 3:
            await asyncio.sleep(0.001)
        serve(queue, tickets)
        serve(queue, tickets)
        # What was released last is told as well, and then it is quiet.
        while queue.owes or sum(store.sums.values()) < 20:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        quiet = store.calls
        await asyncio.sleep(0.02)
    assert store.calls == quiet
    task.cancel()


async def test_over_a_real_store() -> None:
    valkey = Valkey()
    stores = [RedisStore(valkey.url, timeout_s=5.0) for _ in range(2)]
    watches = [asyncio.create_task(store.watch()) for store in stores]
    try:
        async with asyncio.timeout(60):
            for store in stores:
                await store.checked.wait()
        clock = Clock()
        each = await gateways(
            [FairStore(store, clock) for store in stores],
            200,
            ask=["xy", "xz"],
            on_round=lambda number: setattr(clock, "now", 100.0 + number),
        )
        got = sum(each, Counter[str]())
        assert max(got.values()) - min(got.values()) <= 60, got
        valkey.kill()
        assert await FairStore(stores[0]).exchange({"m": {"x": 1}}) is None
    finally:
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        for store in stores:
            await store.close()
        valkey.close()
