"""Breakers: failures that accuse a worker open them, nothing else does; a probe at a time closes them again."""

from __future__ import annotations

from typing import Any

import pytest
from grpc import StatusCode
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvmesh.proto.v1 import router_pb2
from placement_kit import PLAIN, STEP, Mesh
from router_helpers import FakeClock
from services.router.placement.breaker import ACCUSING, BreakerRules, Breakers
from services.router.placement.explain import explain
from services.router.placement.placer import Rules

RULES = BreakerRules(failures=3, window_s=10.0, backoff_s=1.0, max_backoff_s=4.0, probe_s=8.0)
UNAVAILABLE = StatusCode.UNAVAILABLE.value[0]
CANCELLED = StatusCode.CANCELLED.value[0]


def test_the_life_of_a_breaker() -> None:
    clock, told = FakeClock(), []
    breakers = Breakers(RULES, clock, on_change=told.append)
    for _ in range(2):
        breakers.failed("w", 1, UNAVAILABLE)
    assert (breakers.state("w", 1), breakers.all_closed, told) == ("closed", True, [])
    breakers.failed("w", 1, UNAVAILABLE)
    assert (breakers.state("w", 1), breakers.allows("w", 1), told) == ("open", False, ["w"])
    clock.advance(0.9)
    breakers.succeeded("w", 1)
    assert breakers.state("w", 1) == "open", "what was sent before it opened says little"
    clock.advance(0.1)
    assert (breakers.state("w", 1), breakers.allows("w", 1)) == ("half_open", True)
    breakers.failed("w", 1, UNAVAILABLE)
    assert breakers.state("w", 1) == "half_open", "an old one's end; no probe was sent"
    breakers.chosen("w", 1)
    assert not breakers.allows("w", 1), "one at a time"
    breakers.failed("w", 1, UNAVAILABLE)
    assert breakers.state("w", 1) == "open"
    clock.advance(1.9)
    assert breakers.state("w", 1) == "open", "for twice as long"
    clock.advance(0.1)
    breakers.chosen("w", 1)
    breakers.succeeded("w", 1)
    assert (breakers.state("w", 1), breakers.all_closed) == ("closed", True)
    for _ in range(3):
        breakers.failed("w", 1, UNAVAILABLE)
    clock.advance(1.0)
    assert breakers.state("w", 1) == "half_open", "the backoff begins anew"


def test_a_probe_of_which_nothing_is_heard_is_given_up() -> None:
    clock = FakeClock()
    breakers = Breakers(RULES, clock)
    for _ in range(3):
        breakers.failed("w", 1, UNAVAILABLE)
    clock.advance(1.0)
    breakers.chosen("w", 1)
    clock.advance(7.9)
    assert not breakers.allows("w", 1)
    clock.advance(0.1)
    assert breakers.allows("w", 1)


def test_a_request_placed_in_spite_of_an_open_breaker_is_not_the_next_probe() -> None:
    clock = FakeClock()
    breakers = Breakers(RULES, clock)
    for _ in range(3):
        breakers.failed("w", 1, UNAVAILABLE)
    breakers.chosen("w", 1)
    breakers.failed("w", 1, UNAVAILABLE)
    clock.advance(1.0)
    assert breakers.allows("w", 1)


def test_a_breaker_of_which_nothing_is_heard_does_not_stay_for_ever() -> None:
    clock, told = FakeClock(), []
    breakers = Breakers(RULES, clock, on_change=told.append)
    for _ in range(3):
        breakers.failed("gone", 1, UNAVAILABLE)
    clock.advance(300.9)
    breakers.expire()
    assert not breakers.all_closed
    clock.advance(0.2)
    breakers.expire()
    assert (breakers.all_closed, breakers.state("gone", 1), told) == (True, "closed", ["gone", "gone"])


@pytest.mark.parametrize("code", sorted(code.value[0] for code in StatusCode))
def test_only_what_accuses_the_worker_counts(code: int) -> None:
    breakers = Breakers(RULES, FakeClock())
    for _ in range(20):
        breakers.failed("w", 1, code)
    accusing = {2, 4, 13, 14, 15}
    assert accusing == ACCUSING
    assert (breakers.state("w", 1) == "open") == (code in accusing)


def test_failures_far_apart_or_among_many_successes_do_not_open() -> None:
    clock = FakeClock()
    breakers = Breakers(RULES, clock)
    for _ in range(20):
        breakers.failed("w", 1, UNAVAILABLE)
        clock.advance(5.0)
    assert breakers.state("w", 1) == "closed", "never three within ten seconds"
    clock.advance(10.0)
    for _ in range(20):
        breakers.succeeded("w", 1)
        breakers.succeeded("w", 1)
        breakers.failed("w", 1, UNAVAILABLE)
    assert breakers.state("w", 1) == "closed", "a third of many"


def test_a_new_incarnation_begins_anew() -> None:
    breakers = Breakers(RULES, FakeClock())
    for _ in range(3):
        breakers.failed("w", 1, UNAVAILABLE)
    assert breakers.state("w", 2) == "closed"
    assert breakers.allows("w", 2)
    breakers.failed("w", 2, UNAVAILABLE)
    assert breakers.all_closed


class BreakerMachine(RuleBasedStateMachine):
    """Against a plain model: counts in a list, states by the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.breakers = Breakers(RULES, self.clock)
        self.ends: list[tuple[float, bool]] = []
        self.until: float | None = None
        self.backoff = 0.0
        self.probe: float | None = None

    def open(self, backoff: float) -> None:
        self.until, self.backoff, self.probe, self.ends = self.clock.now + backoff, backoff, None, []

    @rule()
    def fail(self) -> None:
        self.breakers.failed("w", 1, UNAVAILABLE)
        if self.until is not None:
            if self.probe is not None and self.clock.now >= self.until:
                self.open(min(4.0, 2 * self.backoff))
            self.probe = None
            return
        self.ends.append((self.clock.now, False))
        recent = [ok for at, ok in self.ends if at > self.clock.now - 10.0]
        if recent.count(False) >= 3 and recent.count(False) >= recent.count(True):
            self.open(1.0)

    @rule()
    def succeed(self) -> None:
        # A worker that never failed has no breaker, and its successes are not counted.
        had = bool(self.breakers._breakers)
        self.breakers.succeeded("w", 1)
        if self.until is None:
            self.ends += [(self.clock.now, True)] if had else []
        elif self.probe is not None:
            self.until, self.probe, self.ends = None, None, []

    @rule()
    def choose(self) -> None:
        self.breakers.chosen("w", 1)
        if self.until is not None:
            self.probe = self.clock.now

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def agrees(self) -> None:
        state = "closed" if self.until is None else "open" if self.clock.now < self.until else "half_open"
        assert self.breakers.state("w", 1) == state
        free = self.probe is None or self.clock.now - self.probe >= 8.0
        assert self.breakers.allows("w", 1) == (state == "closed" or (state == "half_open" and free))
        assert self.breakers.all_closed == (state == "closed")


TestBreakerMachine = BreakerMachine.TestCase
TestBreakerMachine.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


# --- in placement -------------------------------------------------------------------------------------------------


def failing(mesh: Mesh, worker_id: str, times: int = 3, code: int = UNAVAILABLE, incarnation: int = 1) -> None:
    for _ in range(times):
        failure = router_pb2.AttemptFailure(worker_id=worker_id, incarnation=incarnation, code=code)
        mesh.placer.report(router_pb2.ReportRequest(request_id="x", code=code, failures=[failure]))


def make() -> Mesh:
    mesh = Mesh(Rules(weights=PLAIN, breakers=RULES))
    return mesh.add("bad", matched=3 * STEP).add("good", load=500).add("p-bad", "prefill").add("p", "prefill", load=90)


def test_an_open_worker_gets_nothing_and_watchers_see_it() -> None:
    mesh = make()
    assert mesh.ranked()[0] == "bad"
    failing(mesh, "bad")
    failing(mesh, "p-bad")
    assert mesh.pairs() == {"good": ["p"]}
    assert {w.worker_id: w.status().breaker for w in mesh.fleet.workers} == {
        "bad": "open",
        "good": "closed",
        "p-bad": "open",
        "p": "closed",
    }
    rows = {row.worker_id: row for row in explain(mesh.placer.survey(mesh.ask()))}
    assert (rows["bad"].breaker, rows["bad"].excluded, rows["bad"].rank) == ("open", "breaker", 0)
    mesh.clock.advance(1.0)
    mesh.placer.sweep()
    assert mesh.fleet.get("bad").status().breaker == "half_open"  # type: ignore[union-attr]
    ask = mesh.ask()
    pairs = mesh.placer.place(ask)
    assert pairs[0].decode.worker_id == "bad"
    mesh.placer.take("probe", pairs[0], ask)
    assert mesh.ranked() == ["good"], "one probe at a time"
    mesh.placer.report(router_pb2.ReportRequest(request_id="probe", decode_worker="bad"))
    assert mesh.fleet.get("bad").status().breaker == "closed"  # type: ignore[union-attr]
    assert mesh.ranked()[0] == "bad"


@pytest.mark.parametrize("end", [{"code": CANCELLED, "decode_worker": "bad"}, {"decode_worker": "good"}])
def test_a_probe_that_says_nothing_makes_way_for_the_next(end: dict[str, Any]) -> None:
    mesh = make()
    failing(mesh, "bad")
    mesh.clock.advance(1.0)
    ask = mesh.ask()
    mesh.placer.take("probe", mesh.placer.place(ask)[0], ask)
    mesh.placer.report(router_pb2.ReportRequest(request_id="another", code=CANCELLED, decode_worker="bad"))
    assert mesh.ranked() == ["good"]
    mesh.placer.report(router_pb2.ReportRequest(request_id="probe", **end))
    assert mesh.ranked()[0] == "bad"
    assert mesh.fleet.get("bad").status().breaker != "closed"  # type: ignore[union-attr]


def test_where_all_are_open_the_least_bad_serves() -> None:
    mesh = make()
    for name in ("bad", "good", "p", "p-bad"):
        failing(mesh, name)
    assert mesh.pairs() == {"bad": [], "good": ["p-bad", "p"]}


def test_reports_of_another_process_or_of_nobody_do_not_count() -> None:
    mesh = make()
    failing(mesh, "bad", incarnation=9)
    failing(mesh, "gone")
    failing(mesh, "bad", code=StatusCode.RESOURCE_EXHAUSTED.value[0])
    failing(mesh, "bad", code=StatusCode.CANCELLED.value[0])
    assert mesh.ranked()[0] == "bad"
    failing(mesh, "bad", times=2)
    mesh.placer.report(router_pb2.ReportRequest(request_id="x", code=3, decode_worker="bad"))
    assert mesh.placer.breakers.all_closed, "a client's own error is in no list of failures"


def test_a_worker_that_comes_back_keeps_its_breaker() -> None:
    mesh = make()
    failing(mesh, "bad")
    mesh.leave("bad")
    mesh.add("bad", matched=3 * STEP)
    assert mesh.ranked() == ["good"]
    assert mesh.fleet.get("bad").status().breaker == "open"  # type: ignore[union-attr]
    mesh.leave("bad")
    mesh.add("bad", matched=3 * STEP, incarnation=2)
    assert mesh.ranked()[0] == "bad"
