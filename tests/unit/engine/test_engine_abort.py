"""Abort, deadline and failure in every named state: pages come back, and the request ends exactly once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvmesh.engine.core import Mode, RequestKey
from kvmesh.engine.sequence import OVER, TRANSITIONS, SeqState
from kvmesh.errors import Cancelled, DeadlineExceeded
from tests.unit.engine.world import World, error_of

LIVE = [state for state in SeqState if state not in OVER]


def waiting(world: World) -> RequestKey:
    world.submit(length=30, max_tokens=40)
    world.step()
    key = world.submit(length=30, n=2)
    world.step()
    return key


def preempted(world: World) -> RequestKey:
    """The newer of two that cannot both grow."""
    world.submit(length=8, max_tokens=40)
    key = world.submit(length=8, max_tokens=40)
    for _ in range(60):
        world.step()
        if world.core.counters.preemptions:
            break
    return key


def forking(world: World) -> RequestKey:
    key = world.submit(length=20, n=3)
    world.step()
    return key


def awaiting_kv(world: World) -> RequestKey:
    key = world.submit(Mode.REMOTE, length=14, n=2)
    world.step()
    return key


def exposed(world: World) -> RequestKey:
    key = awaiting_kv(world)
    assert world.expose(key)
    world.step()
    return key


def draining(world: World) -> RequestKey:
    key = exposed(world)
    world.give_up(key)
    world.step()
    return key


def awaiting_start(world: World) -> RequestKey:
    key = world.submit(Mode.PREFILL_ONLY, length=14)
    world.step()
    return key


def prefill(world: World) -> RequestKey:
    key = world.submit(length=20)
    world.step()
    return key


def prefill_only_running(world: World) -> RequestKey:
    key = awaiting_start(world)
    world.start_prefill(key)
    world.step()
    return key


def decode(world: World) -> RequestKey:
    key = world.submit(length=6, n=2, max_tokens=20)
    for _ in range(4):
        world.step()
    return key


def held(world: World) -> RequestKey:
    key = awaiting_start(world)
    world.start_prefill(key)
    world.run()
    return key


RECIPES: dict[SeqState, list[Callable[[World], RequestKey]]] = {
    SeqState.WAITING: [waiting],
    SeqState.PREEMPTED: [preempted],
    SeqState.FORKING: [forking],
    SeqState.AWAITING_KV: [awaiting_kv],
    SeqState.EXPOSED: [exposed],
    SeqState.DRAINING: [draining],
    SeqState.AWAITING_START: [awaiting_start],
    SeqState.PREFILL: [prefill, prefill_only_running],
    SeqState.DECODE: [decode],
    SeqState.HELD: [held],
}
CASES = [pytest.param(state, recipe, id=recipe.__name__) for state, recipes in RECIPES.items() for recipe in recipes]


def make_world(overlap: bool) -> World:
    soon = (lambda: False) if overlap else None
    return World(soon=soon, num_pages=10, page_size=4, chunk_size=4, max_batch=4, token_budget=8, max_model_len=60)


def settle(world: World, key: RequestKey) -> None:
    """What the service owes after an end."""
    track = world.tracks[key]
    world.step()
    if track.generation is not None:
        assert world.core.pool.counts().draining == len(track.exposed_pages)
        world.drained(key)
    if track.request.mode is Mode.PREFILL_ONLY and track.admitted:
        world.release(key)
    world.step()


def test_every_live_state_has_a_recipe() -> None:
    assert set(RECIPES) == set(LIVE)
    reachable = {to for targets in TRANSITIONS.values() for to in targets}
    assert set(TRANSITIONS) == set(SeqState)
    assert reachable == set(SeqState) - {SeqState.WAITING, SeqState.FORKING}, "every state but the first is entered"


@pytest.mark.parametrize("how", ["abort", "total deadline", "choices", "stop"])
@pytest.mark.parametrize(("state", "recipe"), CASES)
@pytest.mark.parametrize("overlap", [False, True])
def test_end_in_every_state(state: SeqState, recipe: Callable[[World], RequestKey], how: str, overlap: bool) -> None:
    world = make_world(overlap)
    key = recipe(world)
    track = world.tracks[key]
    request = world.core.scheduler.requests[key]
    assert state in {choice.state for choice in request.seqs}
    if how == "abort":
        world.abort(key)
        world.core.abort(key)  # idempotent
    elif how == "total deadline":
        world.core._deadlines.append((world.clock.now, 0, key, False))
    elif how == "choices":
        world.abort(key, {choice.choice for choice in request.seqs})
        if track.request.mode is Mode.PREFILL_ONLY:  # has no choices: nothing happens
            world.step()
            assert not track.ends
            world.abort(key)
            how = "abort"
    else:
        world.core.stop()
    world.step()
    assert len(track.ends) == 1
    error = error_of(track)
    if how == "abort":
        assert isinstance(error, Cancelled)
    elif how == "total deadline":
        assert isinstance(error, DeadlineExceeded)
    elif how == "choices":
        assert error is None
    else:
        assert error is not None
        assert error.reason == "UNAVAILABLE"
    settle(world, key)
    assert request.root.state is SeqState.ENDED
    assert not any(world.core.pool.pages_of(choice.seq_id) for choice in request.seqs)
    for other in world.keys("live"):
        world.abort(other)
    world.step()
    assert all(len(t.ends) == 1 for t in world.tracks.values())
    world.check_pages_back()


@pytest.mark.parametrize("choice", [0, 1, 2])
def test_one_choice_of_three_ends_silently(choice: int) -> None:
    """Before and after the fork; the others are not disturbed."""
    for steps in (0, 1, 3, 7, 8):
        world = World(num_pages=24, chunk_size=4)
        key = world.submit(length=22, n=3, max_tokens=10)
        for _ in range(steps):
            world.step()
        world.abort(key, {choice})
        world.run()
        track = world.tracks[key]
        assert error_of(track) is None
        assert choice not in track.finished
        assert set(track.finished) == {0, 1, 2} - {choice}
        world.check_end()


def test_cancelled_prefill_stops_at_the_next_chunk() -> None:
    world = World(chunk_size=2, token_budget=32)
    key = world.submit(Mode.PREFILL_ONLY, length=40)
    world.step()
    world.start_prefill(key)
    world.step()
    world.step()
    world.abort(key)
    computed = world.core.counters.prefill_tokens
    assert not world.step()
    assert world.core.counters.prefill_tokens == computed == 4
    assert not world.tracks[key].computed
    world.release(key)
    world.step()
    world.check_pages_back()


def test_pages_of_a_prefill_stay_until_release_even_after_its_end() -> None:
    """The sidecar may still read them: nobody else gets them, though the request is over and others starve."""
    world = World(num_pages=8, page_size=4, max_model_len=32, prefix_cache=False)
    key = world.submit(Mode.PREFILL_ONLY, length=20)
    world.step()
    world.start_prefill(key)
    world.step()
    world.abort(key)
    other = world.submit(length=18)
    world.run()
    assert world.tracks[key].over
    assert not world.tracks[other].admitted
    world.release(key)
    world.run()
    assert error_of(world.tracks[other]) is None
    world.check_pages_back()


def test_exposed_pages_outlive_the_request_until_drained() -> None:
    world = World(num_pages=6, page_size=4, max_model_len=24, prefix_cache=False)
    key = world.submit(Mode.REMOTE, length=17)
    world.step()
    assert world.expose(key)
    world.abort(key)
    other = world.submit(length=14, max_tokens=4)
    world.run()
    assert not world.tracks[other].admitted
    world.drained(key)
    world.run()
    world.check_end()


def test_completion_after_abort_frees_the_pages() -> None:
    world = World(num_pages=8)
    key = world.submit(Mode.REMOTE, length=17)
    world.step()
    assert world.expose(key)
    world.abort(key)
    world.step()
    world.deliver(key)
    world.step()
    world.check_pages_back()


def test_expose_is_refused_once_the_request_is_over() -> None:
    world = World()
    key = world.submit(Mode.REMOTE, length=17, ttft=1.0)
    world.step()
    world.clock.now += 2
    world.step()
    assert isinstance(error_of(world.tracks[key]), DeadlineExceeded)
    assert not world.expose(key)
    world.check_pages_back()


def test_second_generation_before_the_core_saw_the_first_drained() -> None:
    """The service is ahead of the core: expose, drained, expose again, and only then does the core look."""
    world = World()
    key = world.submit(Mode.REMOTE, length=17)
    world.step()
    assert world.expose(key)
    assert not world.expose(key), "one generation at a time"
    world.drained(key)
    assert world.expose(key)
    world.abort(key)
    world.step()
    assert world.core.pool.counts().draining == 4
    world.drained(key)
    world.step()
    world.check_pages_back()


def test_prefill_here_while_draining_starts_over_in_other_pages() -> None:
    world = World(num_pages=16, prefix_cache=False)
    key = world.submit(Mode.REMOTE, length=17)
    world.step()
    assert world.expose(key)
    world.give_up(key)
    world.step()
    dirty = set(world.tracks[key].exposed_pages)
    world.prefill_here(key)
    world.batches.clear()
    world.run()
    assert error_of(world.tracks[key]) is None
    used = {int(page) for batch in world.batches for part in batch.slices for page in part.block_table}
    assert not used & dirty
    assert world.core.pool.counts().draining == len(dirty)
    world.drained(key)
    world.step()
    world.check_end()
