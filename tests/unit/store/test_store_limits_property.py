"""Any order of taking, renewing, growing, settling and lapsing, under any limits: Redis says what the model says."""

from __future__ import annotations

import asyncio
import itertools
import os
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from flight_kit import Valkey, connected
from kvmesh.store.limits import LimitStore, Spend, Terms

HOLD_MS = 15_000
_tenants = itertools.count(1)
amounts = st.sampled_from([0, 1, 7, 50, 100])
holds = st.integers(0, 6).map(lambda number: f"h:{number}")


class Bucket:
    """Whole numbers of 1/60000, as in the script."""

    def __init__(self) -> None:
        self.level: int | None = None
        self.at = 0

    def now(self, limit: int, at: int) -> int:
        full = limit * 60_000
        return full if self.level is None else min(full, self.level + (at - self.at) * limit)

    def put(self, level: int, at: int) -> None:
        self.level, self.at = level, at


def ceil(number: int, by: int) -> int:
    return -(-number // by)


def machine(runner: asyncio.Runner, redis: Any) -> type[RuleBasedStateMachine]:
    class Limits(RuleBasedStateMachine):
        """The model: what each hold has and when it lapses, two buckets, the spend of the period."""

        @initialize(
            rpm=st.sampled_from([0, 1, 3, 60]),
            tpm=st.sampled_from([0, 10, 120]),
            most=st.sampled_from([0, 1, 3]),
            amount=st.sampled_from([0, 100, 400]),
        )
        def start(self, rpm: int, tpm: int, most: int, amount: int) -> None:
            self.tenant = f"tenant-{next(_tenants)}"
            self.store = LimitStore(redis, hold_ms=HOLD_MS, take_s=60.0)
            self.terms = Terms(rpm, tpm, most, amount, "tokens:all")
            self.now = 1_000_000
            self.holds: dict[str, tuple[int, int, int]] = {}
            self.requests, self.tokens = Bucket(), Bucket()
            self.spent = 0
            self.number = 0
            self.last: list[Spend] = []
            self.tick(0)

        @rule(ms=st.sampled_from([0, 1, 333, 1000, 5000, HOLD_MS - 1, HOLD_MS, 61_000]))
        def tick(self, ms: int) -> None:
            self.now += ms
            self.store.clock_ms = self.now

        def lapse(self) -> None:
            self.holds = {name: hold for name, hold in self.holds.items() if hold[2] > self.now}

        @property
        def held(self) -> int:
            return sum(hold[0] for hold in self.holds.values())

        @rule(hold=holds, cost=amounts, tokens=st.sampled_from([0, 1, 9, 40, 500]))
        def take(self, hold: str, cost: int, tokens: int) -> None:
            if hold in self.holds:
                return
            self.lapse()
            rpm, tpm, most, amount, _ = self.terms
            requests, level = self.requests.now(rpm, self.now), self.tokens.now(tpm, self.now)
            need = min(tokens, tpm) * 60_000
            verdict, wait = "ok", 0
            if amount and self.spent + cost > amount:
                verdict = "spent"
            elif rpm and requests < 60_000:
                verdict, wait = "requests", ceil(60_000 - requests, rpm)
            elif tpm and level < need:
                verdict, wait = "tokens", ceil(need - level, tpm)
            elif most and len(self.holds) >= most:
                verdict = "concurrent"
            elif amount and self.spent + self.held + cost > amount:
                verdict = "held"
            got = runner.run(self.store.take(self.tenant, hold, self.terms, cost=cost, tokens=tokens))
            assert got is not None
            assert (got.verdict, got.wait_ms) == (verdict, wait)
            if verdict == "ok":
                if rpm:
                    requests -= 60_000
                    self.requests.put(requests, self.now)
                if tpm:
                    level -= tokens * 60_000
                    self.tokens.put(level, self.now)
                self.holds[hold] = (cost, tokens if tpm else 0, self.now + HOLD_MS)
            assert (got.running, got.spent, got.held) == (len(self.holds), self.spent, self.held)
            assert got.requests_left == max(0, requests // 60_000)
            assert got.tokens_left == max(0, level // 60_000)
            assert got.requests_reset_ms == (ceil(rpm * 60_000 - requests, rpm) if rpm else 0)
            assert got.tokens_reset_ms == (ceil(tpm * 60_000 - level, tpm) if tpm else 0)

        @rule(names=st.lists(holds, unique=True), more=st.sampled_from([-5, 0, 3]))
        def renew(self, names: list[str], more: int) -> None:
            given = [(name, max(0, self.holds.get(name, (0, 0, 0))[0] + more)) for name in names]
            assert runner.run(self.store.renew(self.tenant, given))
            for name, cost in given:
                had, tokens, _ = self.holds.get(name, (0, 0, 0))
                self.holds[name] = (max(had, cost), tokens, self.now + HOLD_MS)
            self.lapse()

        @rule(hold=holds, held=amounts, most=amounts)
        def top_up(self, hold: str, held: int, most: int) -> None:
            self.lapse()
            cost, tokens, _ = self.holds.get(hold, (held, 0, 0))
            self.holds[hold] = (cost, tokens, self.now + HOLD_MS)
            amount = self.terms.amount
            grant = max(0, min(most, amount - self.spent - self.held)) if amount else most
            got = runner.run(
                self.store.top_up(self.tenant, hold, amount=amount, period=self.terms.period, held=held, most=most)
            )
            assert got == (grant, cost + grant)
            self.holds[hold] = (cost + grant, tokens, self.now + HOLD_MS)

        @rule(names=st.lists(holds, min_size=1, max_size=3), cost=amounts, used=st.sampled_from([0, 3, 90]))
        def settle(self, names: list[str], cost: int, used: int) -> None:
            spends = []
            for name in names:
                self.number += 1
                spends.append(
                    Spend(
                        number=self.number,
                        tenant=self.tenant,
                        hold=name,
                        period=self.terms.period,
                        at=0.0,
                        tokens_per_minute=self.terms.tokens_per_minute,
                        cost=cost,
                        used=used,
                        model="m",
                        prompt=0,
                        cached=0,
                        completion=used,
                        request_id="r",
                    )
                )
            # Of what was told already nothing counts again.
            assert runner.run(self.store.settle("journal", [*self.last, *spends])) == []
            back = 0
            for spend in spends:
                back += self.holds.pop(spend.hold, (0, 0, 0))[1] - spend.used
                self.spent += spend.cost
            tpm = self.terms.tokens_per_minute
            if tpm and back:
                self.tokens.put(min(tpm * 60_000, self.tokens.now(tpm, self.now) + back * 60_000), self.now)
            self.last = spends
            self.lapse()

        @invariant()
        def figures(self) -> None:
            if hasattr(self, "store"):
                self.lapse()
                got = runner.run(self.store.figures(self.tenant, self.terms.period))
                assert got == (self.spent, self.held, len(self.holds))

    return Limits


def test_limits_as_the_model_has_them() -> None:
    soak = bool(os.environ.get("KVMESH_SOAK"))
    server = Valkey()
    try:
        with asyncio.Runner() as runner:
            connection = connected(server.url)
            redis = runner.run(connection.__aenter__())
            try:
                run_state_machine_as_test(
                    machine(runner, redis),
                    settings=settings(max_examples=400 if soak else 25, stateful_step_count=40),
                )
            finally:
                runner.run(connection.__aexit__(None, None, None))
    finally:
        server.close()
