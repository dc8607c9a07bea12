"""What each tenant gets of the caches, as this router has seen it: a bounded number of tenants, the latest seen."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from services.router.cache.indices import Held

MAX_TENANTS = 1024
NOTHING = Held(0, 0)


@dataclass(slots=True)
class TenantCounts:
    """Look-ups of one tenant by their end, and what it held when that was last told."""

    tag: str
    hits: int = 0
    misses: int = 0
    held: Held = NOTHING


class Tenants:
    """Counts by tenant's name."""

    def __init__(self, limit: int = MAX_TENANTS) -> None:
        self._limit = limit
        self._counts: OrderedDict[str, TenantCounts] = OrderedDict()

    def of(self, tenant: str, tag: str) -> TenantCounts:
        """The counts of a tenant, made when there are none."""
        counts = self._counts.get(tenant)
        if counts is None:
            while len(self._counts) >= self._limit:
                self._counts.popitem(last=False)
            counts = self._counts[tenant] = TenantCounts(tag)
        else:
            self._counts.move_to_end(tenant)
        return counts

    def latest(self, limit: int = MAX_TENANTS) -> list[tuple[str, TenantCounts]]:
        """The latest seen first."""
        return list(reversed(self._counts.items()))[:limit]
