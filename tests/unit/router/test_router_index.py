"""The prefix index: whatever workers say in whatever order, a chain finds exactly those that hold it."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.engine.worker.attach_events import CacheMirror, Outbox
from kvmesh.errors import FailedPrecondition
from kvmesh.kv.hashing import block_hashes, chain_hashes, request_seed
from kvmesh.kv.pool import PagePool
from kvmesh.kv.prefix import CacheEvent, PrefixCache
from router_helpers import SEED, FakeClock, kv_events, worker_info
from services.router.fleet import Fleet, Session
from services.router.placement.index import PrefixIndex

SOAK = bool(os.environ.get("KVMESH_SOAK"))
NAMES = [bytes([i]) * 16 for i in range(1, 40)]


def owners(index: PrefixIndex, *names: bytes) -> dict[int, int]:
    """Owner → leading names it holds."""
    found, depths = index.depths(b"".join(names))
    assert len(set(found.tolist())) == len(found)
    return dict(zip(found.tolist(), depths.tolist(), strict=True))


def shown(index: PrefixIndex, owner: int, *names: bytes) -> None:
    index.reset(owner)
    index.store(owner, b"".join(names))
    index.show(owner)


def test_a_chain_counts_up_to_its_first_gap() -> None:
    index = PrefixIndex()
    shown(index, 3, *NAMES[:3])
    shown(index, 5, NAMES[0], NAMES[2])
    shown(index, 7, *NAMES[1:3])
    assert owners(index, *NAMES[:4]) == {3: 3, 5: 1}
    assert owners(index, NAMES[9], *NAMES[:4]) == {}
    assert owners(index) == {}
    matched = index.match([(32, b"".join(NAMES[:3])), (8, b"".join(NAMES[1:3])), (4, b"")], 8)
    assert matched.tolist() == [0, 0, 0, 96, 0, 32, 0, 16], "the best of all chains"


def test_who_left_is_not_found_and_its_column_is_clean_before_another_gets_it() -> None:
    index = PrefixIndex()
    many = [i.to_bytes(16, "big") for i in range(1, 2000)]
    shown(index, 0, *many)
    shown(index, 1, *many[:10])
    index.drop(0)
    index.drop(0)
    assert owners(index, *many[:5]) == {1: 5}
    assert index.sweep(0) == 1, "clearing goes on behind"
    shown(index, 2, many[0])
    assert owners(index, *many[:5]) == {1: 5, 2: 1}
    assert index.sweep(10**6) == 0
    assert len(index) == 10
    shown(index, 0)
    assert owners(index, *many[:5]) == {1: 5, 2: 1}


def test_each_change_clears_more_than_it_adds() -> None:
    """A worker that comes and goes without end leaves nothing behind."""
    index = PrefixIndex()
    rng = random.Random(1)
    for _ in range(300):
        shown(index, 0, *(rng.randbytes(16) for _ in range(200)))
    assert len(index) <= 3 * 200


def test_hundreds_of_owners_at_once() -> None:
    index = PrefixIndex()
    for owner in range(300):
        shown(index, owner, *NAMES[: owner % 5])
    assert owners(index, *NAMES[:10]) == {owner: owner % 5 for owner in range(300) if owner % 5}
    for owner in range(0, 300, 2):
        index.drop(owner)
    assert owners(index, *NAMES[:10]) == {owner: owner % 5 for owner in range(1, 300, 2) if owner % 5}


class Said:
    """What a worker has said, as a set a router should have; None: not to be believed."""

    def __init__(self, session: Session, slot: int) -> None:
        self.session = session
        self.slot = slot
        self.sequence = 0
        self.blocks: set[bytes] | None = None
        self.partial: set[bytes] | None = None


@settings(max_examples=100 if SOAK else 20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_index_is_what_a_set_for_each_worker_would_be(seed: int) -> None:
    """500 steps an example: events, snapshots in parts, gaps, foreign incarnations, leaving and coming back."""
    rng = random.Random(seed)
    clock = FakeClock()
    fleet = Fleet(10**9, clock)
    workers: dict[str, Said] = {}
    for _ in range(500):
        name = rng.choice("abcdefgh")
        said = workers.get(name)
        act = rng.random()
        if said is None or act < 0.03:
            session = Session()
            info = worker_info(name, incarnation=rng.getrandbits(60) + 1 if rng.random() < 0.5 else 1, total_pages=1000)
            try:
                worker = fleet.register(info, session)
            except FailedPrecondition:
                continue  # this incarnation was replaced before
            workers[name] = Said(session, worker.slot)
            continue
        incarnation = fleet.get(name).info.incarnation  # type: ignore[union-attr]
        if act < 0.06:
            fleet.detach(said.session)
            del workers[name]
            continue
        stored = set(rng.sample(NAMES, rng.randrange(6)))
        removed = set(rng.sample(NAMES, rng.randrange(4))) - stored
        said.sequence += 1
        if act < 0.16:
            more = rng.random() < 0.4
            event = kv_events(said.sequence, stored, (), incarnation=incarnation, reset=True, more=more)
            said.blocks, said.partial = (None, stored) if more else (stored, None)
        elif act < 0.2:
            said.sequence += 1
            event = kv_events(said.sequence, stored, removed, incarnation=incarnation, reset=False)
            said.blocks = said.partial = None
        elif act < 0.22:
            event = kv_events(said.sequence, stored, removed, incarnation=incarnation + 1, reset=False)
            said.sequence -= 1
        else:
            more = said.partial is not None and rng.random() < 0.4
            event = kv_events(said.sequence, stored, removed, incarnation=incarnation, reset=False, more=more)
            for blocks in (said.blocks, said.partial):
                if blocks is not None:
                    blocks -= removed
                    blocks |= stored
            if said.partial is not None and not more:
                said.blocks, said.partial = said.partial, None
        fleet.kv_events(said.session, event)
        if said.blocks is None and said.partial is None:
            assert said.session.take_need(), "nothing of it counts, and it is not told"
        clock.advance(2.0)
        chain = rng.sample(NAMES, 5)
        expected = {}
        for each in workers.values():
            depth = 0
            while each.blocks is not None and depth < len(chain) and chain[depth] in each.blocks:
                depth += 1
            if depth:
                expected[each.slot] = depth
        assert owners(fleet.index, *chain) == expected
    fleet.index.sweep(10**9)
    kept = [b for each in workers.values() for b in (each.blocks, each.partial) if b is not None]
    assert len(fleet.index) == len(set().union(*kept))
    for each in workers.values():
        assert fleet.index.held(each.slot) == (each.blocks or each.partial or set())


PAGE = 2


class Worker:
    """A real prefix cache that publishes to a router, over messages that may get lost."""

    def __init__(self, fleet: Fleet, name: str, pages: int) -> None:
        self.fleet, self.name = fleet, name
        self.session = Session()
        self.slot = fleet.register(worker_info(name, page_size=PAGE, total_pages=pages), self.session).slot
        self.mirror = CacheMirror()
        self.outbox = Outbox(self.mirror, 1)
        self.pool = PagePool(pages)
        self.cache = PrefixCache(self.pool, PAGE, on_event=self.on_event)
        self.running: list[object] = []

    def on_event(self, event: CacheEvent) -> None:
        hashes = self.mirror.apply(event)
        if hashes:
            self.outbox.changed(hashes, stored=event.kind == "stored")

    def serve(self, tokens: list[int], rng: random.Random) -> None:
        """Admit, compute, store; some go on running and hold their pages."""
        owner = object()
        reservation = self.cache.reserve(owner, request_seed(SEED), tokens, -(-len(tokens) // PAGE), len(tokens) - 1)
        if reservation is None:
            for each in self.running:
                self.pool.release(each)
            self.running.clear()
            return
        self.cache.insert(owner, request_seed(SEED), tokens, reservation.pages)
        if rng.random() < 0.3:
            self.running.append(owner)
        else:
            self.pool.release(owner)

    def publish(self, lose: bool) -> None:
        for message in self.outbox.take_kv():
            if not lose:
                self.fleet.kv_events(self.session, message)
            lose = False
        if self.session.take_need():
            self.outbox.resync()


@settings(max_examples=40 if SOAK else 8, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_router_knows_what_the_caches_hold(seed: int) -> None:
    """Real caches under pressure, 2 % of messages lost: once a worker has told all, chains match as its cache does."""
    rng = random.Random(seed)
    clock = FakeClock()
    fleet = Fleet(10**9, clock)
    workers = [Worker(fleet, f"w{i}", pages) for i, pages in enumerate((40, 90, 200))]
    bodies = [[rng.randrange(3) for _ in range(16 * rng.randrange(1, 6))] for _ in range(4)]
    prompts = [body[: rng.randrange(1, len(body) + 1)] + [rng.randrange(3) for _ in range(9)] for body in bodies * 4]
    for _ in range(150):
        worker = rng.choice(workers)
        worker.serve(rng.choice(prompts), rng)
        if rng.random() < 0.03:
            worker.cache.clear()
        if rng.random() < 0.5:
            worker.publish(lose=rng.random() < 0.02)
        clock.advance(0.1)
    # The lost ones are noticed with the next message, and a snapshot asked for twice comes for sure.
    for _ in range(3):
        for worker in workers:
            worker.outbox._told_at = float("-inf")
            worker.publish(lose=False)
        clock.advance(3.0)
    assert fleet.columns.synced.sum() == 3
    for prompt in prompts:
        chain = chain_hashes(request_seed(SEED), prompt, PAGE)
        matched = fleet.index.match([(8 * PAGE, chain)], fleet.columns.capacity)
        for worker in workers:
            held = worker.cache.match(request_seed(SEED), prompt).num_tokens
            assert matched[worker.slot] == held // (8 * PAGE) * 8 * PAGE
    for worker in workers:
        depths = {}
        for block in worker.cache._blocks.values():
            depths[block.hash] = depths[block.parent.hash] + 1 if block.parent is not None else 1
        assert fleet.index.held(worker.slot) == {name for name, depth in depths.items() if depth % 8 == 0}
    assert np.flatnonzero(fleet.columns.synced).tolist() == sorted(worker.slot for worker in workers)


def test_a_packed_hash_is_of_the_engines_own_chain() -> None:
    tokens = list(range(40))
    hashes = block_hashes(request_seed(SEED), tokens, PAGE)
    assert chain_hashes(request_seed(SEED), tokens, PAGE) == hashes[7] + hashes[15]


@pytest.mark.parametrize("size", [0, 1, 64, 65, 4096])
def test_slots_grow_and_are_used_again(size: int) -> None:
    fleet = Fleet(3.0, FakeClock())
    sessions = [Session() for _ in range(size)]
    slots = [fleet.register(worker_info(f"w{i}"), session).slot for i, session in enumerate(sessions)]
    assert slots == list(range(size))
    for session in sessions[::2]:
        fleet.detach(session)
    again = [fleet.register(worker_info(f"x{i}"), Session()).slot for i in range(len(sessions[::2]))]
    assert again == slots[::2]
