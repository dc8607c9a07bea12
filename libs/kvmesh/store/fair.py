"""What tenants were given out of full workers, told between gateways.

    kvmesh:{f:<model tag>}:<minute>    hash  tenant -> cost that all gateways released in that minute

`<model tag>` is 16 hex digits of the model's name. A hash expires two minutes after its last use.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from kvmesh.store.client import RedisStore

PERIOD_S = 60
LIFE_MS = 2 * PERIOD_S * 1000

Totals = dict[str, dict[str, int]]
"""Model -> tenant -> cost."""


def key(model: str, period: int) -> str:
    """Of one model's charges in one period."""
    return f"kvmesh:{{f:{hashlib.sha256(model.encode()).hexdigest()[:16]}}}:{period}"


class FairStore:
    """Charges of all gateways. No call raises for Redis being away."""

    def __init__(self, store: RedisStore, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock

    async def exchange(self, charges: Mapping[str, Mapping[str, int]]) -> tuple[int, Totals] | None:
        """Add what was released here; the period's number and what was released anywhere in it, this included.

        One round trip. None when Redis is away or does not answer: what was added may be lost or not.
        """
        period = int(self._clock() // PERIOD_S)
        models = list(charges)

        async def ask(client: Any) -> list[Any]:
            pipeline = client.pipeline(transaction=False)
            for model in models:
                name = key(model, period)
                for tenant, cost in charges[model].items():
                    if cost:
                        pipeline.hincrby(name, tenant, cost)
                pipeline.pexpire(name, LIFE_MS)
                pipeline.hgetall(name)
            answers: list[Any] = await pipeline.execute()
            return [answer for answer in answers if isinstance(answer, dict)]

        answers = await self._store.run("fair", ask, None, write=True)
        if answers is None:
            return None
        return period, {model: _totals(answer) for model, answer in zip(models, answers, strict=True)}


def _totals(answer: Mapping[Any, Any]) -> dict[str, int]:
    """Whatever lies there: what is no number is left out."""
    out: dict[str, int] = {}
    for tenant, cost in answer.items():
        try:
            out[tenant.decode()] = int(cost)
        except (ValueError, AttributeError):
            continue
    return out
