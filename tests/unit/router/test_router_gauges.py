"""What the router tells of its fleet: placements by worker, how even the load is, breakers."""

from __future__ import annotations

import grpc
import pytest

from kvmesh.telemetry import metrics, names
from router_harness import AttachedWorker, running_router, until
from router_helpers import route_request, worker_info
from services.router.fleet import Fleet, Session
from services.router.gauges import FleetGauges, uneven
from services.router.placement.breaker import BreakerRules, Breakers

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE.value[0]


def placements(role: str, worker: str) -> float | None:
    return metrics.REGISTRY.get_sample_value(names.ROUTER_PLACEMENTS.name, {"role": role, "worker": worker})


def imbalance(role: str) -> float:
    return metrics.value(names.ROUTER_IMBALANCE, role=role)


def breakers() -> dict[str, float]:
    return {state: metrics.value(names.ROUTER_BREAKERS, state=state) for state in ("closed", "open", "half_open")}


class World:
    """A fleet with a clock of its own, and gauges of it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.fleet = Fleet(1e9, lambda: self.now)
        self.breakers = Breakers(BreakerRules(failures=2, backoff_s=1.0), lambda: self.now)
        self.gauges = FleetGauges(self.fleet, self.breakers)

    def attach(self, name: str, role: str = "decode", tokens: float = 0.0, **given: object) -> int:
        worker = self.fleet.register(worker_info(name, role, **given), Session())  # type: ignore[arg-type]
        self.fleet.columns.inflight[worker.slot] = tokens
        return worker.info.incarnation


@pytest.mark.parametrize(
    ("loads", "ratio"), [([], 1.0), ([0.0, 0.0], 1.0), ([5.0], 1.0), ([4.0, 4.0], 1.0), ([9.0, 0.0, 0.0], 3.0)]
)
def test_evenness(loads: list[float], ratio: float) -> None:
    assert (uneven(loads) if loads else 1.0) == ratio


def test_each_role_and_family_is_judged_for_itself() -> None:
    world = World()
    for name, tokens in (("a", 300.0), ("b", 100.0)):
        world.attach(name, tokens=tokens)
    # Another model, with much more to do and evenly so.
    for name in ("c", "d"):
        world.attach(name, tokens=10_000.0, model="large")
    world.attach("p", "prefill", tokens=77.0)
    world.gauges.publish()
    assert imbalance("decode") == 1.5
    assert imbalance("prefill") == 1.0
    assert imbalance("unified") == 1.0
    assert metrics.value(names.ROUTER_WORKERS, role="decode") == 4


def test_breakers_are_counted_by_state() -> None:
    world = World()
    incarnation = world.attach("a")
    world.attach("b")
    for _ in range(2):
        world.breakers.failed("a", incarnation, UNAVAILABLE)
    world.gauges.publish()
    assert breakers() == {"closed": 1, "open": 1, "half_open": 0}
    world.now += 1.5
    world.gauges.publish()
    assert breakers() == {"closed": 1, "open": 0, "half_open": 1}
    world.breakers.chosen("a", incarnation)
    world.breakers.succeeded("a", incarnation)
    world.gauges.publish()
    assert breakers() == {"closed": 2, "open": 0, "half_open": 0}


async def test_placements_are_counted_until_their_worker_leaves() -> None:
    async with running_router() as router:
        async with (
            AttachedWorker(router, worker_info("d-gauge")),
            AttachedWorker(router, worker_info("p-gauge", "prefill")),
        ):
            assert placements("decode", "d-gauge") == 0
            for number in range(3):
                await router.route(route_request(request_id=f"r{number}"))
            assert placements("decode", "d-gauge") == 3
            assert placements("prefill", "p-gauge") == 3
        await until(lambda: placements("decode", "d-gauge") is None, "its series ends")
