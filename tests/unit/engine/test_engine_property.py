"""Random lives of many requests on a small pool: whatever happens, outputs, ends and pages come out right.

About 3,000 actions of the shrinking test and 6,000 of the long one; KVMESH_SOAK=1 runs twelve times as many.
"""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvmesh.engine.core import Mode
from kvmesh.engine.scripted import ScriptedModel
from tests.unit.engine.world import World

SCALE = 12.0 if os.environ.get("KVMESH_SOAK") else 1.0
MODES = [Mode.LOCAL, Mode.LOCAL, Mode.REMOTE, Mode.REMOTE, Mode.PREFILL_ONLY]
AT = st.integers(0, 1 << 16)
# Of the runner: none (it runs each step at once), or a device that the host is ahead of.
PACES = ["none", "none", "late", "late", "soon", "any"]


def make_world(
    pages: int, page_size: int, chunk: int, cache: bool, resume: bool, eos_after: int | None, pace: str = "none"
) -> World:
    rng = random.Random(pages)
    soon = {"none": None, "late": lambda: False, "soon": lambda: True, "any": lambda: rng.random() < 0.5}[pace]
    return World(
        soon=soon,
        num_pages=pages,
        page_size=page_size,
        model=ScriptedModel(layers=2, kv_heads=1, head_dim=8, eos_after=eos_after),
        chunk_size=chunk,
        max_batch=6,
        token_budget=8,
        max_queue=6,
        prefix_cache=cache,
        remote_resume=resume,
        max_model_len=60,
    )


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        capacity=st.integers(12, 80),
        page_size=st.sampled_from([1, 2, 4, 5]),
        chunk=st.sampled_from([1, 2, 3, 4, 5, 8]),
        cache=st.booleans(),
        resume=st.booleans(),
        eos_after=st.sampled_from([None, None, 0, 3]),
        pace=st.sampled_from(PACES),
    )
    def begin(self, capacity, page_size, chunk, cache, resume, eos_after, pace):
        self.world = make_world(max(3, capacity // page_size), page_size, chunk, cache, resume, eos_after, pace)

    @rule(
        mode=st.sampled_from(MODES),
        base=st.integers(0, 2),
        length=st.integers(1, 24),
        max_tokens=st.integers(1, 20),
        min_tokens=st.integers(0, 6),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.integers(-1, 1),
        scored=st.booleans(),
        stops=st.frozensets(st.integers(32, 126), max_size=8),
        tail=st.sampled_from([0, 0, 0, 1, 4]),
        ttft=st.sampled_from([None, None, 3.0]),
        local_remainder=st.sampled_from([0, 0, 4]),
    )
    def submit(self, mode, base, length, n, scored, tail, stops, **rest):
        local = mode is Mode.LOCAL
        healed = tail and n == 1 and mode is not Mode.PREFILL_ONLY and self.world.runner.model.eos_after is None
        self.world.submit(
            mode,
            base=base,
            length=length,
            n=n,
            tail=tail if healed else 0,
            stop_token_ids=stops if not healed else frozenset(),
            prompt_logprobs=1 if scored and local else None,
            **rest,
        )

    @rule()
    def step(self):
        self.world.step()

    @rule(count=st.integers(2, 6))
    def steps(self, count):
        for _ in range(count):
            self.world.step()

    @precondition(lambda self: self.world.keys("live"))
    @rule(at=AT, choice=st.sampled_from([None, None, 0, 1, 2]))
    def abort(self, at, choice):
        keys = self.world.keys("live")
        self.world.abort(keys[at % len(keys)], None if choice is None else {choice})

    @precondition(lambda self: self.world.keys("remote"))
    @rule(at=AT, here=st.sampled_from([False, False, False, True]))
    def go_on(self, at, here):
        keys = self.world.keys("remote")
        key = keys[at % len(keys)]
        if here:
            self.world.prefill_here(key)
        else:
            self.world.expose(key)

    @precondition(lambda self: self.world.keys("exposed"))
    @rule(at=AT, what=st.sampled_from(["deliver", "deliver", "deliver", "give_up", "drained"]))
    def exposed(self, at, what):
        keys = self.world.keys("exposed")
        getattr(self.world, what)(keys[at % len(keys)])

    @precondition(lambda self: self.world.keys("draining"))
    @rule(at=AT)
    def drained(self, at):
        keys = self.world.keys("draining")
        self.world.drained(keys[at % len(keys)])

    @precondition(lambda self: self.world.keys("admitted"))
    @rule(at=AT, base=st.integers(0, 2), never=st.sampled_from([False, False, False, True]))
    def start(self, at, base, never):
        keys = self.world.keys("admitted")
        key = keys[at % len(keys)]
        if never:
            self.world.release(key)
        else:
            pages = self.world.layout.pages_for(len(self.world.tracks[key].request.token_ids))
            self.world.start_prefill(key, min(base, pages - 1))

    @precondition(lambda self: self.world.keys("started"))
    @rule(at=AT)
    def release(self, at):
        keys = self.world.keys("started")
        self.world.release(keys[at % len(keys)])

    @rule(seconds=st.sampled_from([0.5, 2.0, 4.0]))
    def time_passes(self, seconds):
        self.world.clock.now += seconds

    @rule()
    def next_step_fails(self):
        self.world.fail_next = [RuntimeError("planned")]

    @invariant()
    def nothing_foreign(self):
        if hasattr(self, "world"):
            assert self.world.runner.foreign == 0

    def teardown(self):
        if hasattr(self, "world"):
            self.world.fail_next = []
            self.world.finish()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=max(5, round(60 * SCALE)),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("pace", ["none", "late", "any"])
@pytest.mark.parametrize("seed", range(6))
def test_long_random_life(seed: int, pace: str) -> None:
    """The same actions without shrinking, over longer lives and fuller pools."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 4, 8])
    cache, resume = rng.random() < 0.8, rng.random() < 0.5
    world = make_world(
        rng.randint(50, 130) // page_size, page_size, rng.choice([1, 3, 4, 8]), cache, resume, None, pace
    )

    def pick(state: str):
        keys = world.keys(state)
        return rng.choice(keys) if keys else None

    def act() -> None:
        kind = rng.random()
        if kind < 0.18 and len(world.keys("live")) < 12:
            mode = rng.choice(MODES)
            n = rng.choice([1, 1, 1, 2, 3])
            world.submit(
                mode,
                base=rng.randrange(3),
                length=rng.randint(1, 30),
                max_tokens=rng.randint(1, 30),
                min_tokens=rng.choice([0, 0, 3]),
                n=n,
                priority=rng.choice([0, 0, 1]),
                tail=rng.choice([0, 0, 3]) if n == 1 and mode is not Mode.PREFILL_ONLY else 0,
                total=rng.choice([None, None, 30.0]),
                prompt_logprobs=rng.choice([None, 0, 2]) if mode is Mode.LOCAL else None,
            )
        elif kind < 0.22 and (key := pick("live")):
            world.abort(key, rng.choice([None, {rng.randrange(3)}]))
        elif kind < 0.36 and (key := pick("remote")):
            world.expose(key) if rng.random() < 0.85 else world.prefill_here(key)
        elif kind < 0.50 and (key := pick("exposed")):
            getattr(world, rng.choice(["deliver", "deliver", "deliver", "give_up", "drained"]))(key)
        elif kind < 0.55 and (key := pick("draining")):
            world.drained(key)
        elif kind < 0.62 and (key := pick("admitted")):
            world.start_prefill(key) if rng.random() < 0.9 else world.release(key)
        elif kind < 0.68 and (key := pick("started")):
            world.release(key)
        elif kind < 0.70:
            world.clock.now += rng.random() * 4
        elif kind < 0.705:
            world.fail_next = [RuntimeError("planned")]
        else:
            world.step()

    for count in range(round(1000 * SCALE)):
        act()
        if count % 100 == 99:  # forget what is over, so that the checks stay fast
            for key in [k for k, t in world.tracks.items() if t.over and not world._states(t)]:
                world.check_output(world.tracks.pop(key))
    world.fail_next = []
    world.finish()
    counters = world.core.counters
    print(counters)
    assert counters.requests_ok > (20 if pace == "none" else 12) * SCALE, "too little of this life was worth checking"
    assert counters.preemptions > 0
    assert counters.ring_records > 0
