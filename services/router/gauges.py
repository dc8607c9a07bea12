"""The router's metrics of its fleet: who is there, how even the load is, what was placed where, which breakers are
open. Gauges are published by the sweep, a few times a second, whatever the traffic."""

from __future__ import annotations

from collections import defaultdict

from kvmesh.telemetry import metrics, names
from services.router.fleet import ROLES, Family, Fleet
from services.router.placement.breaker import Breakers, State
from services.router.placement.pairs import RankedPair

DECISIONS = ("exact", "semantic", "follow", "placement", "other prompt")
EXACT = ("hit", "follow", "lead", "miss", "skipped")
SEMANTIC = ("hit", "miss", "guarded", "timeout", "skipped")


class FleetGauges:
    """A `FleetListener`. The series of a worker end when it leaves: names of workers are many over the months."""

    def __init__(self, fleet: Fleet, breakers: Breakers) -> None:
        self._fleet = fleet
        self._breakers = breakers
        # Worker id → its role in the series.
        self._roles: dict[str, str] = {}
        metrics.at_zero(names.ROUTER_DECISIONS, DECISIONS)
        metrics.at_zero(names.CACHE_LOOKUPS, "exact", EXACT)
        metrics.at_zero(names.CACHE_LOOKUPS, "semantic", SEMANTIC)
        metrics.at_zero(names.CACHE_HIT_AGE, ("exact", "semantic"))
        metrics.at_zero(names.CACHE_SHADOWS, ("right", "wrong", "untold"))
        fleet.add_listener(self)

    def placed(self, pair: RankedPair) -> None:
        """A request was given to this pair first."""
        for candidate in (pair.decode, *pair.prefill[:1]):
            role = self._roles.get(candidate.worker_id)
            if role is not None:
                metrics.counter(names.ROUTER_PLACEMENTS).labels(role, candidate.worker_id).inc()

    # --- the fleet
    def worker_changed(self, worker_id: str) -> None:
        """See FleetListener."""
        worker = self._fleet.get(worker_id)
        role = ROLES[worker.info.role] if worker is not None else ""
        if self._roles.get(worker_id, role) != role:
            self.worker_left(worker_id)
        if role:
            self._roles[worker_id] = role
            metrics.at_zero(names.ROUTER_PLACEMENTS, role, worker_id)

    def worker_left(self, worker_id: str) -> None:
        """See FleetListener."""
        role = self._roles.pop(worker_id, None)
        if role is not None:
            metrics.counter(names.ROUTER_PLACEMENTS).remove(role, worker_id)

    def worker_loaded(self, worker_id: str) -> None:
        """See FleetListener."""

    def worker_replaced(self, worker_id: str) -> None:
        """See FleetListener."""

    # --- gauges
    def publish(self) -> None:
        """Set them to what is now."""
        states = dict.fromkeys(State, 0)
        loads: defaultdict[tuple[str, Family], list[float]] = defaultdict(list)
        columns = self._fleet.columns
        for worker in self._fleet.workers:
            states[self._breakers.state(worker.worker_id, worker.info.incarnation)] += 1
            if worker.serving:
                slot = worker.slot
                tokens = columns.queued[slot] + columns.inflight[slot] + columns.credit[slot]
                loads[ROLES[worker.info.role], worker.family].append(float(tokens))
        for role, count in self._fleet.count_by_role().items():
            metrics.gauge(names.ROUTER_WORKERS).labels(role).set(count)
            # What one model gets more of than another is its clients' doing: the least even family counts.
            ratios = [uneven(each) for (of, _), each in loads.items() if of == role]
            metrics.gauge(names.ROUTER_IMBALANCE).labels(role).set(max(ratios, default=1.0))
        for state, count in states.items():
            metrics.gauge(names.ROUTER_BREAKERS).labels(state.value).set(count)


def uneven(loads: list[float]) -> float:
    """The highest over the mean; 1 where nobody has anything to do."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total > 0 else 1.0
