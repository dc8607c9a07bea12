"""One step ahead of the device: what is launched ahead, and what becomes of it when the step before surprises."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from kvmesh.engine.core import Ended, EngineRequest, FinishReason, Mode, RequestKey, Tokens
from kvmesh.engine.failures import DeviceFailed
from kvmesh.engine.runner import PENDING, SamplingParams
from kvmesh.engine.scripted import scripted_output
from kvmesh.errors import Cancelled, DataLoss, DeadlineExceeded, Internal, Unavailable
from kvmesh.kv.pool import PageState
from tests.unit.engine.world import BASES, World, error_of

WAIT = 90.0


def late(**config) -> World:
    """A device that runs a step no sooner than it is collected."""
    return World(soon=lambda: False, **config)


def output_of(base: int, length: int, seed: int, max_tokens: int = 8) -> list[int]:
    return scripted_output(list(BASES[base][:length]), SamplingParams(max_tokens=max_tokens, seed=seed))[0]


def tokens_of(world: World, key: RequestKey) -> list[int]:
    return [t for e in world.log if isinstance(e, Tokens) and e.key == key for t in e.token_ids]


def fed(world: World) -> list[list[int]]:
    """First token of every slice of every launched step."""
    return [[int(part.token_ids[0]) for part in batch.slices] for batch in world.device.launched]


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


# -- steps that fail


def test_a_failed_launch_fails_its_sequences_after_the_step_before() -> None:
    world = late()
    key = world.submit(length=5, max_tokens=8)
    world.step()
    world.step()
    awaiting = world.submit(Mode.REMOTE, base=1, length=9)
    world.fail_next = [RuntimeError("planned")]
    world.step()
    assert tokens_of(world, key) == output_of(0, 5, 1)[:2], "what was in flight is told first"
    assert isinstance(error_of(world.tracks[key]), Internal)
    assert world.tracks[key].ends[0].usage.completion_tokens == 2
    assert not world.device.flights
    assert not world.tracks[awaiting].over
    assert world.core.counters.step_errors == 1
    after = world.submit(length=5)
    world.finish()
    assert error_of(world.tracks[after]) is None


def test_a_failed_launch_does_not_touch_who_had_ended_before() -> None:
    """The pending token was a stop: the row of the step that failed was a stray."""
    output = output_of(0, 9, 1)
    world = late()
    key = world.submit(length=9, seed=1, stop_token_ids=frozenset({output[1]}))
    world.step()
    world.step()
    world.fail_next = [RuntimeError("planned")]
    world.run()
    assert error_of(world.tracks[key]) is None
    assert tokens_of(world, key) == output[: output.index(output[1]) + 1]
    world.check_end()


def test_a_failed_collect_fails_both_steps() -> None:
    world = late(num_pages=60)
    key = world.submit(length=5, max_tokens=8)
    world.step()
    world.step()
    newer = world.submit(base=1, length=9, max_tokens=4)  # in the second of them only
    world.device.fail_collect = [DataLoss("bits fell over")]
    world.step()
    assert not world.device.flights, "both were collected"
    for failed in (key, newer):
        assert isinstance(error_of(world.tracks[failed]), DataLoss)
    assert world.core.counters.step_errors == 2
    after = world.submit(length=5)
    world.finish()
    assert error_of(world.tracks[after]) is None


def test_sequences_that_fail_with_a_row_ahead_leave_the_others_alone() -> None:
    world = late(num_pages=60)
    bad = world.submit(length=9, max_tokens=12)
    good = world.submit(length=9, base=1, max_tokens=12)
    for _ in range(4):
        world.step()
    root = world.core.scheduler.requests[bad].root
    world._garbage([root.pages[1]])
    world.step()
    assert isinstance(error_of(world.tracks[bad]), DataLoss)
    assert world.core.pool.pages_of(root.seq_id), "its row ahead still writes"
    world.run()
    assert error_of(world.tracks[good]) is None
    assert len(world.tracks[bad].ends) == 1
    again = world.submit(length=9, max_tokens=4)
    world.run()
    assert world.tracks[again].ends[0].usage.cached_tokens == 0, "what it failed on is found by nobody"
    assert error_of(world.tracks[again]) is None
    world.check_output(world.tracks[good])
    world.check_output(world.tracks[again])
    world.check_pages_back()


def test_kv_of_who_was_aborted_in_flight_is_forgotten_when_it_failed() -> None:
    world = late(num_pages=60)
    bad = world.submit(length=9, max_tokens=12)
    for _ in range(4):
        world.step()
    world._garbage([world.core.scheduler.requests[bad].root.pages[0]])
    world.abort(bad)
    world.run()
    assert isinstance(error_of(world.tracks[bad]), Cancelled)
    assert len(world.core.cache) == 0
    world.check_pages_back()


def test_a_stray_that_fails_does_not_end_its_request() -> None:
    """One choice of two has stopped; only its row ahead finds wrong KV."""
    outputs = [scripted_output(list(BASES[0][:8]), SamplingParams(max_tokens=9, seed=1), c)[0] for c in range(2)]
    stop = next(i for i in range(2, 8) if outputs[1][i] not in outputs[0] + outputs[1][:i])
    world = late(num_pages=60, prefix_cache=False, page_size=1)
    key = world.submit(length=8, n=2, seed=1, max_tokens=9, stop_token_ids=frozenset({outputs[1][stop]}))
    world.step()
    while len(world.tracks[key].outputs.get(1, [])) <= stop:
        fork = world.core.scheduler.requests[key].seqs[1]
        pages = list(fork.pages)
        world.step()
    (flight,) = world.device.flights
    assert len(flight.batch.slices) == 2
    world._garbage([pages[9]])
    world.run()
    assert world.runner.foreign > 0
    assert error_of(world.tracks[key]) is None
    assert world.tracks[key].finished == {0: FinishReason.LENGTH, 1: FinishReason.STOP}


@pytest.mark.parametrize("where", ["launch", "collect", "stop"])
def test_a_lost_device_ends_everything(where: str) -> None:
    world = late(num_pages=60)
    keys = [world.submit(length=5, max_tokens=8), world.submit(Mode.REMOTE, base=1, length=9)]
    world.step()
    world.step()
    keys.append(world.submit(length=6, base=2))
    if where == "launch":
        world.device.device_lost = True
    else:
        world.device.while_waiting = lambda: setattr(world.device, "device_lost", True)
    if where == "stop":
        world.core.stop()
        assert {type(error_of(world.tracks[key])) for key in keys} == {DeviceFailed}
        return
    assert not world.step()
    assert {type(error_of(world.tracks[key])) for key in keys} == {DeviceFailed}
    assert [type(error) for error in world.failures] == [DeviceFailed]
    assert world.core.failure is world.failures[0]
    assert not world.core.load().accepting
    assert world.core.load().stalled
    with pytest.raises(Unavailable, match="bus"):
        world.core.submit(EngineRequest(RequestKey("late"), [1], 1))
    assert not world.step()
    world.core.stop()
    world.core.pool.check_integrity()


def test_a_lost_device_ends_the_thread() -> None:
    world = late(threaded=True, num_pages=60)
    failed = threading.Event()
    world.core._on_failed = lambda error: failed.set()
    world.device.while_waiting = lambda: setattr(world.device, "device_lost", len(world.device.launched) > 3)
    key = world.submit(length=5, max_tokens=40)
    world.core.start()
    assert failed.wait(WAIT)
    world.core._thread.join(WAIT)
    assert not world.core._thread.is_alive()
    assert isinstance(error_of(world.tracks[key]), DeviceFailed)
    world.core.stop()


# -- step records


def prefill(world: World, base: int = 0, length: int = 15) -> RequestKey:
    key = world.submit(Mode.PREFILL_ONLY, base=base, length=length)
    world.step()
    world.start_prefill(key)
    return key


def spy(world: World) -> list:
    records: list = []
    publish = world.ring.publish

    def published(record) -> bool:
        if publish(record):
            records.append(record)
            return True
        return False

    world.ring.publish = published
    return records


@pytest.mark.parametrize("soon", [True, False])
def test_records_ahead_name_the_rings_to_come(soon: bool) -> None:
    world = World(soon=lambda: soon, page_size=4, chunk_size=4, token_budget=32, num_pages=60)
    world.submit(base=1, length=5, max_tokens=20)
    key = prefill(world)
    records = spy(world)
    world.run()
    firsts = [record.first_value for record in records]
    assert firsts == [firsts[0] + 2 * i for i in range(4)], "two layers a step"
    assert world.doorbell.value == 2 * world.core.counters.steps
    assert len(world.tracks[key].arrived) == 4
    world.finish()


def test_a_failed_launch_leaves_the_count_to_the_step_before() -> None:
    world = late(page_size=4, chunk_size=4, token_budget=32, num_pages=60)
    records = spy(world)
    key = prefill(world)
    world.step()
    world.fail_next = [RuntimeError("planned")]
    world.step()
    assert isinstance(error_of(world.tracks[key]), Internal)
    assert [record.first_value for record in records] == [1, 3]
    assert world.doorbell.value == 2
    after = world.submit(base=1, length=9)
    assert not world.step(), "blocked"
    world.release(key)
    world.run()
    assert error_of(world.tracks[after]) is None
    other = prefill(world, base=2)
    world.run()
    assert records[2].first_value > 4
    assert len(world.tracks[other].arrived) == 4
    world.finish()


@pytest.mark.parametrize("silent", [True, False])
def test_a_failed_collect_blocks_until_both_steps_are_released(silent: bool) -> None:
    world = late(page_size=4, chunk_size=4, token_budget=32, num_pages=60)
    records = spy(world)
    key = prefill(world)
    world.step()
    second = prefill(world, base=1)
    assert len(world.device.flights) == 1
    world.device.fail_collect = [RuntimeError("planned"), RuntimeError("and behind it")]
    world.device.silent = silent
    world.step()
    assert not world.device.flights
    failed = [k for k in (key, second) if world.tracks[k].over]
    assert len(failed) == 2
    end = max(record.first_value + record.num_layers - 1 for record in records)
    assert not world.step()
    world.release(key)
    assert not world.step()
    assert world.doorbell.value <= end
    world.release(second)
    world.run()
    assert world.doorbell.value == end
    other = prefill(world, base=2)
    world.run()
    assert len(world.tracks[other].arrived) == 4
    world.finish()


def test_a_release_before_the_failure_does_not_block_for_good() -> None:
    world = late(page_size=4, chunk_size=4, token_budget=32, num_pages=60)
    records = spy(world)
    key = prefill(world)
    world.step()
    world.device.fail_collect = [RuntimeError("planned"), RuntimeError("and behind it")]
    world.device.silent = True
    world.release(key)
    world.run()
    assert world.tracks[key].over
    assert world.doorbell.value == records[-1].first_value + 1
    after = world.submit(base=1, length=9)
    world.run()
    assert error_of(world.tracks[after]) is None
    world.check_end()


def test_the_count_is_caught_up_when_nothing_rings_by_itself_any_more() -> None:
    """The failed step's transfer is gone before the step behind it, which rings as ever, was collected."""
    world = late(num_pages=60)
    records = spy(world)
    other = world.submit(base=1, length=5, max_tokens=20)
    key = prefill(world, length=8)
    world.step()
    assert len(world.device.flights[-1].batch.slices) == 2
    world.device.fail_collect = [RuntimeError("planned")]
    world.device.silent = True
    world.release(key)
    world.step()
    assert not world.device.flights
    assert world.tracks[key].over
    assert world.tracks[other].over
    assert world.doorbell.value == records[-1].first_value + 1
    world.check_pages_back()


def test_a_fork_aborted_while_its_copy_is_in_flight_in_a_step_that_fails() -> None:
    world = late(num_pages=60)
    key = world.submit(length=6, n=3, max_tokens=6)
    while not (world.device.launched and world.device.launched[-1].copies):
        world.step()
    assert len(world.device.flights) == 1
    world.abort(key, {2})
    world.device.fail_collect = [RuntimeError("planned")]
    world.run()
    assert isinstance(error_of(world.tracks[key]), Internal)
    world.check_pages_back()


def test_a_ring_that_is_full_with_a_step_in_flight_fails_its_transfers_alone() -> None:
    world = late(page_size=4, chunk_size=4, token_budget=32, ring_records=1, num_pages=60)
    consume, world.sidecar_ring.consume = world.sidecar_ring.consume, lambda: None
    other = world.submit(base=1, length=9, max_tokens=12)
    key = prefill(world, length=40)
    world.run()
    assert isinstance(error_of(world.tracks[key]), Unavailable)
    assert world.core.counters.ring_full == 1
    assert world.device.deepest == 2
    assert error_of(world.tracks[other]) is None
    world.sidecar_ring.consume = consume
    world.release(key)
    world.finish()


# -- stop, stall


def test_stop_collects_the_step_in_flight_first() -> None:
    world = late()
    key = world.submit(length=5, max_tokens=8)
    world.step()
    world.step()
    assert len(world.device.flights) == 1
    world.core.stop()
    assert not world.device.flights
    assert tokens_of(world, key) == output_of(0, 5, 1)[:2]
    assert isinstance(error_of(world.tracks[key]), Unavailable)
    world.check_pages_back()
    world.core.stop()


def hanging(world: World) -> tuple[threading.Event, threading.Event]:
    """(a collect has begun, let it end)"""
    begun, go = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert go.wait(WAIT)

    world.device.while_waiting = wait
    return begun, go


def test_stop_waits_for_a_collect_and_no_longer_than_told() -> None:
    world = late(threaded=True)
    begun, go = hanging(world)
    key = world.submit(length=5, max_tokens=8)
    world.core.start()
    assert begun.wait(WAIT)
    with pytest.raises(Internal, match="did not end"):
        world.core.stop(timeout_s=0.01)
    # Waiting in collect holds no lock: others are answered.
    assert not world.core.load().accepting
    world.core.abort(key)
    go.set()
    world.core.stop(WAIT)
    assert not world.device.flights
    assert len(world.tracks[key].ends) == 1
    world.check_pages_back()


def test_a_device_that_hangs_is_a_stall() -> None:
    world = late(threaded=True, stall_timeout_s=0.5)
    stalled = threading.Event()
    world.core._watch._on_stall = lambda now: stalled.set() if now else None
    ended = threading.Event()
    take: Callable = world.core._on_events
    world.core._on_events = lambda events: (take(events), any(isinstance(e, Ended) for e in events) and ended.set())
    _, go = hanging(world)
    world.submit(length=5, max_tokens=8)
    world.core.start()
    assert stalled.wait(WAIT)
    go.set()
    assert ended.wait(WAIT)
    world.core.stop(WAIT)
    world.check_end()
