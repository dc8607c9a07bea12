"""Limits of one process alone, while Redis is away or where there is none: each process has its share of a tenant's."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvmesh.rpc.policy import Policy
from kvmesh.store.limits import Taken

MAX_TENANTS = 10_000


@dataclass(slots=True)
class _Bucket:
    """Fills by `limit` a minute up to `limit`; below zero something is owed."""

    limit: float
    level: float
    at: float

    def fill(self, limit: float, now: float) -> None:
        """As of now, under the limit of now."""
        self.level = min(limit, self.level + max(0.0, now - self.at) * limit / 60.0)
        self.limit, self.at = limit, now

    def wait_s(self, need: float) -> float:
        """Until there is as much."""
        return max(0.0, min(need, self.limit) - self.level) * 60.0 / self.limit

    def left(self) -> int:
        """Whole ones there are."""
        return max(0, math.floor(self.level))


class LocalLimits:
    """Rates of the tenants that were here last; what a tenant runs at a time is told."""

    def __init__(self, replicas: int, now: Callable[[], float]) -> None:
        self._replicas = replicas
        self._now = now
        self._buckets: OrderedDict[str, tuple[_Bucket, _Bucket]] = OrderedDict()

    def _share(self, limit: int) -> float:
        return max(1.0, limit / self._replicas)

    def _of(self, tenant: str, policy: Policy) -> tuple[_Bucket, _Bucket]:
        now = self._now()
        requests, tokens = self._share(policy.requests_per_minute), self._share(policy.tokens_per_minute)
        found = self._buckets.get(tenant)
        if found is None:
            if len(self._buckets) >= MAX_TENANTS:
                self._buckets.popitem(last=False)
            found = self._buckets[tenant] = (_Bucket(requests, requests, now), _Bucket(tokens, tokens, now))
        self._buckets.move_to_end(tenant)
        found[0].fill(requests, now)
        found[1].fill(tokens, now)
        return found

    def take(self, tenant: str, policy: Policy, *, running: int, tokens: int) -> Taken:
        """As Redis' script has it, without the budget."""
        by_requests, by_tokens = self._of(tenant, policy)
        waits = {
            "requests": by_requests.wait_s(1.0) if policy.requests_per_minute else 0.0,
            "tokens": by_tokens.wait_s(tokens) if policy.tokens_per_minute else 0.0,
        }
        verdict = next((name for name, wait_s in waits.items() if wait_s > 0), "ok")
        if verdict == "ok" and policy.max_concurrent and running >= math.ceil(self._share(policy.max_concurrent)):
            verdict = "concurrent"
        if verdict == "ok":
            # What has no limit owes nothing to one that comes later.
            by_requests.level -= 1.0 if policy.requests_per_minute else 0.0
            by_tokens.level -= tokens if policy.tokens_per_minute else 0.0
        return Taken(
            verdict,  # type: ignore[arg-type]
            math.ceil(waits.get(verdict, 0.0) * 1e3),
            running,
            0,
            0,
            by_requests.left(),
            math.ceil((by_requests.limit - by_requests.level) * 60e3 / by_requests.limit),
            by_tokens.left(),
            math.ceil((by_tokens.limit - by_tokens.level) * 60e3 / by_tokens.limit),
        )

    def give_back(self, tenant: str, policy: Policy, tokens: int) -> None:
        """Of what was taken here under `policy` and not used; less than nothing where more was."""
        found = self._buckets.get(tenant)
        if found is not None and policy.tokens_per_minute:
            found[1].level = min(found[1].limit, found[1].level + tokens)
