"""Decisions that wait for their report: what the answer, when it comes, is an answer to.

A decision is told to nobody but the gateway that asked, counts once, and only for the tenant it was made for. Losing
one costs a cache entry.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvmesh.proto.v1 import router_pb2
from services.router.cache.policy import CachePlan

Clock = Callable[[], float]

MAX_DECISIONS = 16384
ID_BYTES = 16
GRACE_S = 30.0
MAX_LIFE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Decision:
    """A placement whose answer may be kept as `plan` says; `flight`: the one that it leads."""

    tenant: str
    model: str
    revision: str
    plan: CachePlan
    flight: router_pb2.Flight | None = None


class Decisions:
    """Open decisions by id, bounded in number and life."""

    def __init__(self, clock: Clock = time.monotonic, *, limit: int = MAX_DECISIONS) -> None:
        self._clock = clock
        self._limit = limit
        self._open: OrderedDict[str, tuple[float, Decision]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, decision: Decision | None, life_s: float) -> str:
        """A new decision id; with None nothing is kept, the id is only a name."""
        decision_id = secrets.token_hex(ID_BYTES)
        if decision is not None:
            while len(self._open) >= self._limit:
                self._open.popitem(last=False)
            self._open[decision_id] = (self._clock() + min(life_s, MAX_LIFE_S) + GRACE_S, decision)
        return decision_id

    def take(self, decision_id: str, tenant: str) -> Decision | None:
        """The decision, once; None when it is unknown, too old, or another tenant's (which leaves it open)."""
        found = self._open.get(decision_id)
        if found is None or found[1].tenant != tenant:
            return None
        del self._open[decision_id]
        expires, decision = found
        return decision if self._clock() < expires else None
