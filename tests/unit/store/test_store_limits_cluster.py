"""Limits on a Redis Cluster: all that one call touches is in the slot of its tenant."""

from __future__ import annotations

from flight_kit import connected
from kvmesh.store.limits import LimitStore, Spend, Terms
from test_flight_cluster import cluster  # noqa: F401


async def test_limits_of_tenants_in_many_slots(cluster: str) -> None:  # noqa: F811
    async with connected(cluster) as redis:
        store = LimitStore(redis, hold_ms=15_000, take_s=60.0)
        terms = Terms(10, 1000, 5, 100, "tokens:2026-11")
        spends = []
        for number in range(8):
            tenant = f"tenant-{number}"
            taken = await store.take(tenant, f"h:{number}", terms, cost=50, tokens=50)
            assert taken is not None
            assert taken.verdict == "ok"
            assert await store.renew(tenant, [(f"h:{number}", 50)])
            more = await store.top_up(tenant, f"h:{number}", amount=100, period=terms.period, held=50, most=80)
            assert more == (50, 100)
            spends.append(
                Spend(number + 1, tenant, f"h:{number}", terms.period, 0.0, 1000, 60, 60, "m", 10, 0, 50, "r")
            )
        assert await store.settle("journal", spends) == []
        for number in range(8):
            assert await store.figures(f"tenant-{number}", terms.period) == (60, 0, 0)
        assert await store.tenants(["1970-01-01"]) == {f"tenant-{number}" for number in range(8)}
