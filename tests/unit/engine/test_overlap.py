"""One step ahead of the device: what is launched ahead, and what becomes of it when the step before surprises."""

from __future__ import annotations

import pytest

from kvmesh.engine.core import FinishReason, Mode
from kvmesh.engine.runner import PENDING
from kvmesh.errors import Cancelled, DeadlineExceeded
from kvmesh.kv.pool import PageState
from tests.unit.engine.overlap_kit import fed, late, output_of, tokens_of
from tests.unit.engine.world import BASES, World, error_of

# -- what is launched ahead


def test_decode_goes_one_step_ahead_and_ends_by_length_without_a_stray() -> None:
    world = late()
    key = world.submit(length=5, max_tokens=6)
    assert world.step()
    assert len(world.device.flights) == 1
    assert world.step()
    assert len(world.device.launched) == 2
    assert tokens_of(world, key) == output_of(0, 5, 1)[:1]
    world.run()
    assert fed(world) == [[BASES[0][0]], *[[PENDING]] * 5], "one step a token, and none behind the last"
    assert world.core.counters.steps == 6
    world.check_end()


def test_a_batch_of_many_decodes_stays_ahead() -> None:
    world = late(num_pages=60)
    for base in range(3):
        world.submit(base=base, length=5, max_tokens=12)
    for _ in range(9):
        world.step()
        assert len(world.device.flights) == 1
    assert world.device.deepest == 2
    world.finish()


def test_prompt_chunks_and_the_first_decode_go_ahead() -> None:
    world = late(chunk_size=4, token_budget=32)
    world.submit(length=10, max_tokens=3)
    depths = []
    world.device.while_waiting = lambda: depths.append(len(world.device.flights))
    world.run()
    assert [[len(part.token_ids) for part in batch.slices] for batch in world.device.launched] == [
        [4],
        [4],
        [2],
        [1],
        [1],
    ]
    assert depths == [2, 2, 2, 2, 1]
    world.check_end()


def test_a_request_that_comes_meanwhile_is_admitted_ahead() -> None:
    world = late(num_pages=60)
    world.submit(length=5, max_tokens=12)
    for _ in range(3):
        world.step()
    world.submit(base=1, length=9, max_tokens=4)
    world.step()
    assert [len(part.token_ids) for part in world.device.launched[-1].slices] == [1, 9]
    assert world.device.deepest == 2
    world.finish()


def test_forks_and_scored_prompts_are_collected_first() -> None:
    world = late(num_pages=60)
    key = world.submit(length=6, n=3, max_tokens=3)
    world.step()
    world.step()
    assert len(world.device.launched) == 1, "nothing ahead of the fork"
    assert not world.device.flights
    world.step()
    assert len(world.device.launched[-1].copies) == 2
    world.run()
    world.submit(length=6, base=1, max_tokens=3, prompt_logprobs=1)
    world.step()
    world.step()
    assert not world.device.flights
    world.run()
    assert set(world.tracks[key].finished) == {0, 1, 2}
    world.check_end()


def test_what_the_flight_will_have_cached_is_waited_for() -> None:
    """A request with the same prompt comes while that is being computed: it must find it."""
    world = late()
    world.submit(length=12, max_tokens=8)
    world.step()
    again = world.submit(length=12, max_tokens=8)
    world.run()
    assert world.tracks[again].ends[0].usage.cached_tokens == 8
    world.check_end()


def test_no_overlap_where_it_is_switched_off() -> None:
    world = late(overlap=False)
    world.submit(length=5)
    world.run()
    assert not world.device.launched
    world.check_end()


def test_a_page_that_is_missing_is_preempted_for_after_collecting() -> None:
    world = late(num_pages=6, page_size=4, max_model_len=24, look_ahead=0, prefix_cache=False)
    world.submit(length=8, max_tokens=12)
    world.submit(length=8, base=1, max_tokens=12)
    world.run()
    assert world.core.counters.preemptions > 0
    assert world.device.deepest == 2
    world.check_end()


# -- what turns out otherwise


def test_the_row_behind_a_stop_is_a_stray() -> None:
    output = output_of(0, 9, 1)
    results = []
    for soon in (None, lambda: False):
        world = World(soon=soon)
        key = world.submit(length=9, seed=1, stop_token_ids=frozenset({output[3]}))
        world.run()
        assert tokens_of(world, key) == output[: output.index(output[3]) + 1]
        assert world.tracks[key].finished == {0: FinishReason.STOP}
        counters = world.core.counters
        usage = world.tracks[key].ends[0].usage
        cached = world.core.cache.hashes()
        results.append((usage.completion_tokens, counters.generation_tokens, counters.decode_tokens, cached))
        if soon is not None:
            made = len(tokens_of(world, key))
            assert fed(world)[made:] == [[PENDING]], "a row went ahead of the stop"
        world.check_end()
    assert results[0] == results[1]


def test_the_ban_of_stops_counts_the_pending_token() -> None:
    output = output_of(0, 9, 1)
    for min_tokens in range(5):
        world = late()
        world.submit(length=9, seed=1, min_tokens=min_tokens, stop_token_ids=frozenset(output))
        world.run()
        world.check_end()


@pytest.mark.parametrize("how", ["abort", "stop token", "deadline"])
def test_pages_of_who_ends_stay_until_their_last_step_is_collected(how: str) -> None:
    """Others starve meanwhile, and a peer gets none of them to write."""
    world = late(num_pages=5, page_size=4, max_model_len=20, prefix_cache=False)
    output = output_of(0, 13, 1, 6)
    stops = frozenset({output[1]}) if how == "stop token" else frozenset()
    key = world.submit(length=13, seed=1, max_tokens=6, stop_token_ids=stops, total=5.0)
    world.step()
    world.step()
    pages = list(world.core.scheduler.requests[key].root.pages)
    waiting = world.submit(Mode.REMOTE, base=1, length=13)
    collects = []

    def watch() -> None:
        world._check_in_flight()
        collects.append(bool(world.tracks[waiting].admitted))

    world.device.while_waiting = watch
    if how == "abort":
        world.abort(key)
    elif how == "deadline":
        world.clock.now += 6.0
    while world.device.flights:
        assert {world.core.pool.state(page) for page in pages} == {PageState.OWNED}
        assert not world.tracks[waiting].admitted
        world.step()
    assert world.tracks[key].over
    world.step()
    assert len(collects) == (2 if how == "stop token" else 1)
    assert not any(collects)
    assert set(world.tracks[waiting].admitted[0].pages) & set(pages)
    assert world.expose(waiting)
    world.deliver(waiting)
    world.finish()


def test_a_choice_aborted_while_the_prompt_is_in_flight_gets_no_token() -> None:
    for choices in ({0}, {1}, {0, 2}, {0, 1, 2}):
        world = late()
        key = world.submit(length=6, n=3, max_tokens=4)
        world.step()
        world.abort(key, choices)
        world.run()
        assert set(world.tracks[key].outputs) == {0, 1, 2} - choices
        assert error_of(world.tracks[key]) is None
        world.check_end()


def test_the_first_token_in_flight_is_in_time() -> None:
    world = late(chunk_size=4)
    key = world.submit(length=8, ttft=5.0, max_tokens=3)
    slow = world.submit(base=1, length=40, ttft=5.0, max_tokens=3)
    world.step()
    world.step()
    world.clock.now += 6.0
    world.run()
    assert error_of(world.tracks[key]) is None
    assert isinstance(error_of(world.tracks[slow]), DeadlineExceeded)
    world.check_end()


@pytest.mark.parametrize("times", [1, 2])
def test_a_release_that_overtakes_the_collect_finds_the_prompt_computed(times: int) -> None:
    """The sidecar sees the doorbell before the core sees the step's end."""
    world = World(soon=lambda: True)
    key = world.submit(Mode.PREFILL_ONLY, length=14)
    world.step()
    world.start_prefill(key)
    world.step()
    assert world.tracks[key].arrived == {0, 1, 2, 3}
    assert not world.tracks[key].computed
    for _ in range(times):
        world.release(key)
    world.run()
    assert error_of(world.tracks[key]) is None
    assert len(world.tracks[key].computed) == 1
    world.check_end()


def test_a_prefill_released_in_flight_keeps_its_pages_until_collected() -> None:
    world = late(num_pages=8, page_size=4, chunk_size=4, max_model_len=32, prefix_cache=False)
    key = world.submit(Mode.PREFILL_ONLY, length=24)
    world.step()
    world.start_prefill(key)
    world.step()
    world.step()
    world.abort(key)
    world.release(key)
    other = world.submit(Mode.REMOTE, base=1, length=20)
    while world.device.flights:
        assert not world.tracks[other].admitted
        assert world.step()
    world.run()
    assert isinstance(error_of(world.tracks[key]), Cancelled)
    assert world.tracks[other].admitted
    assert world.expose(other)
    world.deliver(other)
    world.finish()
