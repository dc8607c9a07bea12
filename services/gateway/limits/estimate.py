"""How long answers of a tenant are: what a request holds until it is known how long its own gets."""

from __future__ import annotations

from collections import OrderedDict, deque

WINDOW = 128
"""Answers remembered of a tenant."""

ENOUGH = 16
"""Answers from which there is something to be learnt."""

UNKNOWN = 1024
"""Output tokens of a tenant of which too little is known."""

MARGIN = 1.25
"""An answer as long as the 95th percentile shall not need more while it streams."""

MAX_TENANTS = 10_000


class Lengths:
    """Of the tenants that were here last."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, deque[int]] = OrderedDict()

    def add(self, tenant: str, completion_tokens: int) -> None:
        """An answer of all its choices together."""
        seen = self._seen.get(tenant)
        if seen is None:
            if len(self._seen) >= MAX_TENANTS:
                self._seen.popitem(last=False)
            seen = self._seen[tenant] = deque(maxlen=WINDOW)
        self._seen.move_to_end(tenant)
        seen.append(completion_tokens)

    def expected(self, tenant: str, most: int) -> int:
        """Output tokens to hold for a request that may have `most`."""
        seen = self._seen.get(tenant, ())
        if len(seen) < ENOUGH:
            return min(most, UNKNOWN)
        p95 = sorted(seen)[(len(seen) * 95 + 99) // 100 - 1]
        return max(1, min(most, int(p95 * MARGIN) + 1))
