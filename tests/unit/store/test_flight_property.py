"""Any order of leaders, followers, delays and ends: Redis answers as the model does, no old leader is ever heard."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from flight_kit import Valkey, begin, connected, fresh_ref
from kvmesh.proto.v1 import router_pb2
from kvmesh.store.flights import FIRST, MAX_TAKEOVERS, FlightStore, How

LEASE_MS = 3000
GATEWAYS = "abcd"
names = st.sampled_from(GATEWAYS)


def machine(runner: asyncio.Runner, redis: Any) -> type[RuleBasedStateMachine]:
    class Flights(RuleBasedStateMachine):
        """The model: who holds which token, until when, who follows, and what the stream holds."""

        @initialize()
        def start(self) -> None:
            self.ref = fresh_ref()
            self.stores = {name: FlightStore(redis, name, lease_ms=LEASE_MS) for name in GATEWAYS}
            self.now = 1_000_000
            self.tick(0)
            self.token = runner.run(begin(redis, self.ref, "a"))
            self.leader, self.until, self.ended, self.takeovers = "a", self.now + LEASE_MS, False, 0
            self.tokens = {"a": self.token}
            self.seen: dict[str, int] = {}
            self.frames: list[tuple[int, str]] = []
            assert runner.run(self.stores["a"].renew(self.ref, self.token)) == (True, 0)

        def token_of(self, name: str) -> int:
            """The token a gateway goes by: its own last one, or one that it only guesses."""
            return self.tokens.get(name, self.token)

        def leads(self, name: str) -> bool:
            return self.leader == name and self.tokens.get(name) == self.token and not self.ended

        @rule(ms=st.sampled_from([0, 1, 500, 1000, LEASE_MS - 1, LEASE_MS, LEASE_MS + 1]))
        def tick(self, ms: int) -> None:
            self.now += ms
            for store in self.stores.values():
                store.clock_ms = self.now

        @rule(name=names)
        def renew(self, name: str) -> None:
            got = runner.run(self.stores[name].renew(self.ref, self.token_of(name)))
            assert got is not None
            assert got.held == self.leads(name)
            if got.held:
                self.until = self.now + LEASE_MS
                self.seen = {who: at for who, at in self.seen.items() if at > self.now - LEASE_MS}
                assert got.followers == len(self.seen)

        @rule(name=names, count=st.integers(1, 3), stale=st.booleans())
        def append(self, name: str, count: int, stale: bool) -> None:
            # Stale: on its way since the gateway led the last time.
            token = self.token_of(name) - stale
            frame = router_pb2.FlightFrame(token=token, opened=router_pb2.FlightOpened(model=name))
            given = [frame.SerializeToString()] * count
            got = runner.run(self.stores[name].append(self.ref, token, given, begun=bool(self.frames)))
            assert got == ("ok" if self.leads(name) and not stale else "lost")
            if got == "ok":
                self.frames += [(token, name)] * count

        @rule(name=names, how=st.sampled_from(["finished", "failed", "free", "handed"]))
        def end(self, name: str, how: How) -> None:
            got = runner.run(self.stores[name].end(self.ref, self.token_of(name), how))
            assert got == self.leads(name)
            if got:
                self.ended, self.until = how in ("finished", "failed"), 0
                self.leader = name if self.ended else ""
                self.takeovers = max(0, self.takeovers - (how == "handed"))

        @rule(name=names)
        def keep(self, name: str) -> None:
            got = runner.run(self.stores[name].keep(self.ref))
            assert got == (self.standing(), self.token, self.leader)
            self.seen[name] = self.now

        @rule(name=names)
        def leave(self, name: str) -> None:
            runner.run(self.stores[name].leave(self.ref))
            self.seen.pop(name, None)

        @rule(name=names)
        def take_over(self, name: str) -> None:
            got = runner.run(self.stores[name].take_over(self.ref, self.token_of(name)))
            assert got is not None
            standing = self.standing()
            if standing == "free" and self.takeovers >= MAX_TAKEOVERS:
                assert got.standing == "spent"
            elif standing == "free":
                assert got.standing == "taken"
                assert got.token > self.token
                self.token, self.leader, self.until = got.token, name, self.now + LEASE_MS
                self.takeovers += 1
                self.tokens[name] = got.token
                self.seen.pop(name, None)
            else:
                assert got == (standing, self.token, self.leader)

        @rule()
        def another_flight_of_the_same_question_begins(self) -> None:
            runner.run(begin(redis, self.ref, "z"))

        def standing(self) -> str:
            return "ended" if self.ended else "led" if self.until > self.now else "free"

        @invariant()
        def the_stream_holds_what_leaders_wrote_in_order(self) -> None:
            if not hasattr(self, "ref"):
                return
            read = runner.run(self.stores["a"].read({self.ref: FIRST}))
            assert read is not None
            got = [(frame.token, frame.opened.model) for frame in read[self.ref].frames]
            assert got == self.frames[: len(got)]
            assert len(got) == min(len(self.frames), 256)
            assert got == sorted(got, key=lambda frame: frame[0])

    return Flights


def test_flights_as_the_model_has_them() -> None:
    soak = bool(os.environ.get("KVMESH_SOAK"))
    server = Valkey()
    try:
        with asyncio.Runner() as runner:
            connection = connected(server.url)
            redis = runner.run(connection.__aenter__())
            try:
                run_state_machine_as_test(
                    machine(runner, redis),
                    settings=settings(max_examples=250 if soak else 25, stateful_step_count=40),
                )
            finally:
                runner.run(connection.__aexit__(None, None, None))
    finally:
        server.close()
