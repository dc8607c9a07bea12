"""One line over several gateways: what a tenant was given at another counts here too.

Each gateway keeps its own queue and releases by its own. While anybody waits, it adds what it released to a sum in
Redis a few times a second, and charges its tenants for what the others added since: a tenant that asks two gateways
gets its share once. Without Redis each gateway is fair by itself.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Protocol

from services.gateway.queue.fair import FairQueue

INTERVAL_S = (0.2, 0.4)


class Exchange(Protocol):
    """See `kvmesh.store.fair.FairStore`."""

    async def exchange(
        self, charges: Mapping[str, Mapping[str, int]]
    ) -> tuple[int, dict[str, dict[str, int]]] | None: ...


class SharedCharges:
    """Keeps one queue in step with those of other gateways."""

    def __init__(self, queue: FairQueue, store: Exchange) -> None:
        self._queue = queue
        self._store = store
        self._seen: dict[str, dict[str, int]] = {}
        self._period = -1

    async def run(self) -> None:
        """Until cancelled. Asks nothing while nobody waits here."""
        while True:
            await self._queue.busy.wait()
            self._seen.clear()
            while self._queue.busy.is_set() or self._queue.owes:
                await self.step()
                await asyncio.sleep(random.uniform(*INTERVAL_S))

    async def step(self) -> None:
        """One exchange."""
        mine = self._queue.take_charges()
        if not mine:
            return
        answer = await self._store.exchange(mine)
        if answer is None:
            # Whether ours were added is unknown: what is there next time is where we begin again.
            self._seen.clear()
            return
        period, totals = answer
        if period < self._period:
            self._seen.clear()  # The clock was set back.
        for model, tenants in totals.items():
            before = self._seen.get(model)
            if before is None:
                continue  # Somebody begins to wait for it: what was before that was not at anybody's cost.
            if period != self._period:
                before = {}  # The sums of a new period began with nothing.
            elif sum(tenants.values()) - sum(mine[model].values()) < sum(before.values()) / 2:
                before = {}  # Nobody takes back so much: Redis began anew, and no tenant has a credit of that.
            for tenant, total in tenants.items():
                others = total - before.get(tenant, 0) - mine[model].get(tenant, 0)
                if others:
                    self._queue.charged_elsewhere(model, tenant, others)
        self._seen, self._period = totals, period
