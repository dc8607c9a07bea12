"""One step ahead of the device: steps that fail, a lost device, what the step ring says then, stop and stall."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from kvmesh.engine.core import Ended, EngineRequest, FinishReason, Mode, RequestKey
from kvmesh.engine.failures import DeviceFailed
from kvmesh.engine.runner import SamplingParams
from kvmesh.engine.scripted import scripted_output
from kvmesh.errors import Cancelled, DataLoss, Internal, Unavailable
from tests.unit.engine.overlap_kit import late, output_of, tokens_of
from tests.unit.engine.world import BASES, World, error_of

WAIT = 90.0


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
