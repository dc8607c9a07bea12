"""The simulation's parts: its cache is the engine's, its trace is what it says, its counts add up."""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.kv.pool import PagePool
from kvmesh.kv.prefix import CacheEvent, PrefixCache, block_hashes, request_seed

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from router import simulation, trace
from router.policies import CacheAware, Mesh, RoundRobin
from router.trace import Cost, Request, Shape
from router.worker import TreeCache, Worker

PAGE = 2
SEED = request_seed(b"0123456789abcdef")
SHORT = Shape(prefixes=40, prefix=(200.0, 0.5, 1000), user=(60.0, 0.5, 200), output=(20.0, 0.5, 60), block=16)


def tokens_of(blocks: list[int]) -> list[int]:
    """Tokens of which blocks are equal exactly where the numbers are."""
    return [number for block in blocks for number in (block, 7)]


@settings(max_examples=60)
@given(
    st.integers(2, 24),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 8), st.integers(0, 3), st.integers(0, 4)), max_size=40),
)
def test_the_tree_is_the_engines_cache(pages: int, steps: list[tuple[int, int, int, int]]) -> None:
    """Same hits, same pages, the same blocks stored and evicted in the same order, whatever comes and goes."""
    told: list[tuple[str, list[int]]] = []
    tree = TreeCache(pages, lambda kind, blocks, depth: told.append((kind, blocks)))
    events: list[CacheEvent] = []
    pool = PagePool(pages)
    cache = PrefixCache(pool, PAGE, on_event=events.append)
    number_of: dict[bytes, int] = {}
    running: list[tuple[int, list[int], object]] = []
    for step, (family, depth, extra, end) in enumerate(steps):
        # Blocks are numbered by the whole prefix: family and depth; beyond 4 a sequence's own.
        blocks = [family * 100 + at if at < 4 else 1000 * (step + 1) + at for at in range(depth)]
        tokens = tokens_of(blocks)
        number_of.update(zip(block_hashes(SEED, tokens, PAGE), blocks, strict=True))
        most = (len(tokens) - 1) // PAGE
        held = tree.reserve(blocks, most, depth + extra)
        got = cache.reserve(step, SEED, tokens, depth + extra, len(tokens) - 1)
        assert (held is None) == (got is None)
        if held is not None and got is not None:
            assert len(held.nodes) == len(got.match.pages)
            tree.insert(held, blocks)
            cache.insert(step, SEED, tokens, got.pages)
            running.append((step, blocks, held))
        while len(running) > end:
            owner, _, kept = running.pop(0)
            tree.release(kept)  # type: ignore[arg-type]
            pool.release(owner)
        for event in events:
            if event.kind == "removed":
                assert told.pop(0) == ("removed", [number_of[key] for key in event.hashes])
            else:
                kind, blocks_told = told.pop(0)
                assert kind == "stored"
                assert blocks_told == [number_of[key] for key in event.hashes]
        events.clear()
        assert not told
        assert (tree.free, tree.evictable) == (pool.free_count, cache.evictable_count)


def test_the_trace_is_fixed_and_what_it_says() -> None:
    one, other = trace.make(4, 200.0, shape=SHORT), trace.make(4, 200.0, shape=SHORT)
    assert [(r.at, r.prompt, r.tail_base) for r in one] == [(r.at, r.prompt, r.tail_base) for r in other]
    assert [r.number for r in one] == list(range(len(one)))
    assert all(a.at <= b.at for a, b in itertools.pairwise(one))
    work = sum(Cost().work(r.prompt - r.ideal, r.output) for r in one) / (4 * 200.0)
    assert work == pytest.approx(0.7, rel=0.15)
    # Bursts: the busiest 5 seconds against the median of all.
    counts = trace.burst_times(one, 5.0)[:40]
    assert 2.0 < counts.max() / np.median(counts) < 4.5


def test_ideal_hits_are_those_of_an_infinite_cache() -> None:
    requests = trace.make(2, 60.0, shape=SHORT)
    seen: set[int] = set()
    for request in requests:
        expected = 0
        for block in request.blocks((request.prompt - 1) // SHORT.block):
            if block not in seen:
                break
            expected += SHORT.block
        assert request.ideal == expected
        seen.update(request.blocks((request.prompt + request.output) // SHORT.block))


def test_a_worker_takes_the_time_of_its_steps() -> None:
    cost = Cost(prefill_rate=1000.0, chunk=100, step_s=0.1, sequence_s=0.0)
    worker = Worker(0, 64, 10, cost, 8, None)
    firsts: dict[int, tuple[float, int]] = {}
    ends: list[int] = []
    worker.first_token = lambda request, at, hit: firsts.__setitem__(request.number, (at, hit))
    worker.ended = lambda request: ends.append(request.number)
    for number in (0, 1):
        worker.submit(Request(number, 0.0, number, 100, 10, 1 << 20, 5, (2 + number) << 20), 0.0)
    assert worker.queued_tokens == 200
    worker.advance(0.2 + 1e-6)
    # One step of 100 tokens computes the first prompt; its token comes with the next.
    assert firsts == {0: (pytest.approx(0.4), 0)}
    worker.advance(60.0)
    assert ends == [0, 1]
    assert worker.cache.available == 64
    assert worker.pending == worker.inflight_tokens == worker.queued_tokens == 0
    worker.submit(Request(2, 60.0, 2, 100, 10, 1 << 20, 5, 9 << 20), 60.0)
    worker.advance(90.0)
    assert firsts[2][1] == 50


def test_spread_sets_each_window_against_its_own_mean() -> None:
    even = np.array([[10.0, 10.0], [300.0, 300.0]])
    assert simulation.spread(even) == (1.0, 1.0)
    assert simulation.spread(np.array([[0.0, 20.0]] * 100))[1] == 2.0


@pytest.mark.parametrize("replicas", [1, 3])
def test_every_request_is_served_once_and_lost_messages_heal(replicas: int) -> None:
    requests = trace.make(4, 30.0, shape=SHORT)
    made: list[Mesh] = []

    def mesh(clock: object) -> Mesh:
        made.append(
            Mesh(4, random.Random(3), pages=600, block=16, clock=clock, replicas=replicas, lost=0.05)  # type: ignore[arg-type]
        )
        return made[-1]

    outcome = simulation.run(requests, 4, mesh, block=16, pages=600, warm_s=10.0)
    assert (outcome.ttft > 0).all()
    assert outcome.computed.sum() < outcome.tokens.sum()
    assert made[0].dropped > 10
    assert not made[0].placed
    for replica in made[0].replicas:
        assert replica.placer.credit.total == 0
    blind = simulation.run(requests, 4, lambda clock: RoundRobin(4, random.Random(3)), block=16, pages=600, warm_s=10.0)
    assert outcome.hit > blind.hit


def test_the_published_policy_follows_its_rule() -> None:
    policy = CacheAware(3, random.Random(1), threshold=0.5, absolute=2, relative=1.5, block=10)

    def ask(number: int, family: int, prompt: int = 100) -> int:
        return policy.choose(Request(number, 0.0, number, prompt, 1, family << 20, 10, (50 + number) << 20))

    first = ask(0, 1)
    # A match goes to its holder; a stranger to the smallest tree.
    assert [ask(1, 1), ask(2, 1)] == [first, first]
    # 3 more than the least and more than 1.5 times as many: the least, match or not.
    assert ask(3, 1) != first
