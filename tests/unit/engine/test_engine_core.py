"""The core's thread: waking, waiting, failing steps, stalls, stop; the ring and the doorbell."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import Counter

import pytest

from kvmesh.engine.core import CoreEvent, Ended, EngineRequest, Mode, RequestKey, Tokens
from kvmesh.engine.runner import SamplingParams, StepBatch, StepResult
from kvmesh.engine.sequence import SeqState
from kvmesh.errors import Cancelled, DataLoss, Internal, InvalidArgument, Unavailable
from tests.unit.engine.world import BASES, World, error_of

WAIT = 90.0


class Collector:
    """Events of a running core, and a way to wait for some."""

    def __init__(self, world: World) -> None:
        self.events: list[CoreEvent] = []
        self._cond = threading.Condition()
        world.core._on_events = self._take

    def _take(self, events: list[CoreEvent]) -> None:
        with self._cond:
            self.events.extend(events)
            self._cond.notify_all()

    def wait(self, condition) -> None:
        with self._cond:
            assert self._cond.wait_for(lambda: condition(self.events), WAIT), self.events

    def ended(self, count: int) -> list[Ended]:
        self.wait(lambda events: sum(isinstance(e, Ended) for e in events) >= count)
        return [event for event in self.events if isinstance(event, Ended)]


def request(name: str, length: int = 9, mode: Mode = Mode.LOCAL, **rest) -> EngineRequest:
    params = SamplingParams(max_tokens=rest.pop("max_tokens", 6))
    return EngineRequest(RequestKey(name), list(BASES[0][:length]), length, params, mode=mode, **rest)


@pytest.fixture
def world():
    world = World(threaded=True, num_pages=64)
    yield world
    world.core.stop()


# -- the thread


def test_serves_and_then_waits_without_polling(world: World) -> None:
    got = Collector(world)
    schedules = Counter()
    schedule = world.core.scheduler.schedule

    def counted():
        schedules["n"] += 1
        return schedule()

    world.core.scheduler.schedule = counted
    world.core.start()
    for index in range(3):
        world.core.submit(request(f"a{index}"))
        got.ended(index + 1)
    # At rest: the thread sits in the condition, and nothing but a command makes it schedule again.
    before = schedules["n"]
    assert not threading.Event().wait(0.2)
    assert schedules["n"] - before <= 1
    assert world.core.load().running == 0
    assert not world.core.load().stalled


def test_a_deadline_wakes_an_idle_core(world: World) -> None:
    got = Collector(world)
    world.core.start()
    world.core.submit(request("a", mode=Mode.REMOTE, ttft_deadline=time.monotonic() + 0.05))
    (ended,) = got.ended(1)
    assert ended.error is not None
    assert ended.error.reason == "DEADLINE_EXCEEDED"


def test_stop_ends_every_request_exactly_once() -> None:
    for _ in range(10):
        world = World(threaded=True, num_pages=40, max_queue=50)
        got = Collector(world)
        world.core.start()
        accepted = 0
        stopper = threading.Thread(target=world.core.stop)
        for index in range(40):
            if index == 20:
                stopper.start()
            try:
                world.core.submit(request(f"a{index}", mode=list(Mode)[index % 3], max_tokens=30))
                accepted += 1
            except Unavailable:
                continue
        stopper.join(WAIT)
        assert not stopper.is_alive()
        ends = Counter(event.key for event in got.events if isinstance(event, Ended))
        assert len(ends) == accepted
        assert set(ends.values()) == {1}
        world.core.stop()
        with pytest.raises(Unavailable):
            world.core.submit(request("late"))


def test_drain_lets_running_work_finish(world: World) -> None:
    got = Collector(world)
    world.core.start()
    world.core.submit(request("a", max_tokens=20))
    world.core.drain()
    with pytest.raises(Unavailable):
        world.core.submit(request("b"))
    assert got.ended(1)[0].error is None
    assert not world.core.load().accepting


def test_a_live_key_is_refused_and_a_finished_one_is_free_again(world: World) -> None:
    got = Collector(world)
    world.core.submit(request("a"))
    with pytest.raises(InvalidArgument):
        world.core.submit(request("a"))
    world.core.start()
    got.ended(1)
    world.core.submit(request("a"))
    got.ended(2)


def test_a_failing_callback_does_not_kill_the_core(world: World) -> None:
    got = Collector(world)
    take, failed = got._take, []

    def bad(events):
        if not failed:
            failed.append(1)
            raise RuntimeError("callback")
        take(events)

    world.core._on_events = bad
    world.core.start()
    world.core.submit(request("a"))
    got.ended(1)


def test_a_broken_scheduler_ends_everything_and_says_so(world: World) -> None:
    got = Collector(world)
    told: list[bool] = []
    world.core._watch._on_stall = told.append

    def broken():
        raise Internal("planned")

    world.core.scheduler.schedule = broken
    world.core.submit(request("a"))
    world.core.submit(request("b"))
    world.core.start()
    assert {type(e.error) for e in got.ended(2)} == {Internal}
    world.core._thread.join(WAIT)
    assert world.core.load().stalled
    assert told == [True]
    with pytest.raises(Unavailable, match="planned"):
        world.core.submit(request("c"))


@pytest.mark.parametrize("breaks", ["schedule", "prefill_here", "end_choice", "both"])
def test_whatever_breaks_every_request_has_one_terminal(world: World, breaks: str) -> None:
    """Those whose submit had not been looked at, and those that cannot be ended in order, too."""
    got = Collector(world)

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("planned")

    scheduler = world.core.scheduler
    if breaks == "schedule":
        scheduler.schedule = broken
    else:
        world.core._handoff.prefill_here = broken
    if breaks in ("end_choice", "both"):
        scheduler.end_choice = broken
    names = ["a", "b", "c"]
    world.core.submit(request("a"))
    world.core.prefill_here(RequestKey("a"))
    world.core.submit(request("b"))
    if breaks == "both":
        world.core.prefill_here(RequestKey("b"))
    world.core.submit(request("c"))
    world.core.start()
    world.core._thread.join(WAIT)
    ends = Counter(event.key.request_id for event in got.events if isinstance(event, Ended))
    assert ends == dict.fromkeys(names, 1)
    assert all("planned" in event.error.message for event in got.events if isinstance(event, Ended))


def test_expose_races_with_the_end_of_requests() -> None:
    """Threads expose while others abort: a granted generation always finds its pages still there."""
    world = World(threaded=True, num_pages=40, max_batch=32, token_budget=64, max_queue=64, prefix_cache=False)
    granted: list[tuple[RequestKey, int]] = []
    refused = Counter()
    admitted: dict[RequestKey, tuple[int, ...]] = {}
    cond = threading.Condition()
    ends = Counter()

    def on_events(events):
        with cond:
            for event in events:
                if isinstance(event, Ended):
                    ends[event.key] += 1
                elif hasattr(event, "awaiting"):
                    admitted[event.key] = event.pages
            cond.notify_all()

    world.core._on_events = on_events
    world.core.start()
    keys = [RequestKey(f"r{index}") for index in range(120)]

    def service(part):
        for key in part:
            with cond:
                assert cond.wait_for(lambda key=key: key in admitted or ends[key], WAIT)
            if key not in admitted:
                continue
            try:
                world.core.expose(key, 7)
            except Cancelled:
                refused["n"] += 1
                continue
            request = world.core.scheduler.requests.get(key) or world.core.scheduler.lingering.get(key)
            assert request is not None
            granted.append((key, request.root.seq_id))

    def aborter():
        for key in keys:
            with cond:
                cond.wait_for(lambda key=key: key in admitted or ends[key], WAIT)
            world.core.abort(key)

    threads = [threading.Thread(target=service, args=(keys[i::2],)) for i in range(2)]
    threads.append(threading.Thread(target=aborter))
    for thread in threads:
        thread.start()
    for index, key in enumerate(keys):
        with cond:
            cond.wait_for(lambda index=index: sum(ends.values()) + 5 > index, WAIT)
        world.core.submit(request(key.request_id, mode=Mode.REMOTE))
        # Its pages come back only when drained.
        for done, _ in list(granted):
            world.core.kv_drained(done, 7)
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive()
    for key, _ in granted:
        world.core.kv_drained(key, 7)
    with cond:
        assert cond.wait_for(lambda: len(ends) == len(keys), WAIT)
    world.core.stop()
    assert set(ends.values()) == {1}
    world.check_pages_back()


# -- steps that fail


def test_step_error_fails_its_requests_and_the_loop_goes_on() -> None:
    world = World()
    first = world.submit(length=9)
    waiting = world.submit(Mode.REMOTE, length=9)
    world.step()
    world.fail_next = [RuntimeError("planned")]
    world.step()
    assert isinstance(error_of(world.tracks[first]), Internal)
    assert not world.tracks[waiting].over
    after = world.submit(length=9)
    world.run()
    assert error_of(world.tracks[after]) is None
    world.finish()


def test_named_errors_of_a_runner_pass_as_they_are() -> None:
    world = World()
    key = world.submit(length=9)
    world.fail_next = [DataLoss("weights gone")]
    world.run()
    assert isinstance(error_of(world.tracks[key]), DataLoss)
    world.finish()


def test_foreign_bytes_fail_only_their_sequence() -> None:
    world = World(prefix_cache=False)
    good = world.submit(length=9, max_tokens=12)
    bad = world.submit(length=9, base=1, max_tokens=12)
    for _ in range(4):
        world.step()
    root = world.core.scheduler.requests[bad].root
    world._garbage([root.pages[1]])
    world.run()
    assert isinstance(error_of(world.tracks[bad]), DataLoss)
    assert error_of(world.tracks[good]) is None
    assert world.runner.foreign > 0
    world.check_output(world.tracks[good])
    world.check_pages_back()


def test_kv_on_which_a_sequence_failed_is_found_by_nobody_again() -> None:
    """Not even what it had itself found in the prefix cache, nor what was stored below that; others' KV stays."""
    world = World()
    for base in (0, 1):
        world.submit(base=base, length=14, max_tokens=4)
        world.run()
    assert world.core.cache is not None
    bad = world.submit(length=9, max_tokens=12)
    world.step()
    root = world.core.scheduler.requests[bad].root
    assert root.request.cached_tokens == 8
    world._garbage([root.pages[1]])
    world.run()
    assert isinstance(error_of(world.tracks[bad]), DataLoss)
    for base, cached in ((0, 0), (1, 12)):
        again = world.submit(base=base, length=14, max_tokens=4)
        world.run()
        assert world.tracks[again].ends[0].usage.cached_tokens == cached
        assert error_of(world.tracks[again]) is None
        world.check_output(world.tracks[again])
    world.check_pages_back()


def test_result_that_does_not_fit_fails_the_step() -> None:
    world = World()
    key = world.submit(length=9)
    execute = world.runner.execute
    world.runner.execute = lambda batch: StepResult(list(execute(batch).slices)[1:])
    world.run()
    assert isinstance(error_of(world.tracks[key]), Internal)
    world.check_pages_back()


# -- stalls


def test_stall_is_seen_while_the_runner_hangs() -> None:
    world = World(threaded=True, stall_timeout_s=1.0)
    told: list[bool] = []
    seen = {True: threading.Event(), False: threading.Event()}
    release = threading.Event()

    def on_stall(now: bool) -> None:
        told.append(now)
        seen[now].set()

    def hang(batch: StepBatch) -> None:
        assert release.wait(WAIT)

    world.core._watch._on_stall = on_stall
    world.runner._before_step = hang
    got = Collector(world)
    world.core.start()
    world.core.submit(request("a", max_tokens=2))
    assert seen[True].wait(WAIT)
    assert world.core.load().stalled
    release.set()
    assert got.ended(1)[0].error is None
    assert seen[False].wait(WAIT)
    assert not world.core.load().stalled
    assert told == [True, False]
    world.core.stop()


@pytest.mark.parametrize("exposed", [False, True])
def test_waiting_for_a_peer_is_no_stall(exposed: bool) -> None:
    """The pool is full of pages that a slow peer fills: nothing can run, and nothing is wrong here."""
    world = World(num_pages=4, page_size=4, max_model_len=16, stall_timeout_s=10.0, prefix_cache=False)
    holder = world.submit(Mode.REMOTE, length=13)
    world.run()
    if exposed:
        assert world.expose(holder)
    waiting = world.submit(length=9)
    world.run()
    world.clock.now += 100
    load = world.core.load()
    assert (load.running, load.waiting, load.transferring) == (0, 1, 1)
    assert not load.stalled
    # From here on there is work, and it is watched again.
    if exposed:
        world.deliver(holder)
    else:
        world.prefill_here(holder)
    assert not world.core.load().stalled
    world.clock.now += 11
    assert world.core.load().stalled
    world.run()
    assert error_of(world.tracks[waiting]) is None
    assert not world.core.load().stalled
    world.finish()


def test_waiting_without_running_is_a_stall(caplog) -> None:
    """Running 0, waiting 1, no transfer, and nothing moves: a drain that never comes holds the pages."""
    world = World(num_pages=4, page_size=4, max_model_len=16, stall_timeout_s=10.0, prefix_cache=False)
    holder = world.submit(Mode.REMOTE, length=13)
    world.run()
    assert world.expose(holder)
    world.abort(holder)
    world.run()
    stuck = world.submit(length=9)
    world.run()
    world.core._watch.look()
    assert not world.core.load().stalled
    world.clock.now += 11
    load = world.core.load()
    assert load.stalled
    assert (load.running, load.waiting, load.transferring) == (0, 1, 0)
    world.core._watch.look()
    assert "draining=3" in caplog.text
    assert "waiting" in caplog.text
    world.drained(holder)
    world.run()
    assert not world.core.load().stalled
    assert error_of(world.tracks[stuck]) is None
    world.clock.now += 11
    assert not world.core.load().stalled, "an idle engine does not stall"
    assert world.core.counters.stalls == 1


def test_work_that_waits_for_others_is_no_stall() -> None:
    world = World()
    world.submit(Mode.REMOTE, length=13)
    world.run()
    world.clock.now += 100
    assert not world.core.load().stalled


# -- ring and doorbell


def test_step_records_name_what_the_step_completes() -> None:
    world = World(page_size=4, chunk_size=6, token_budget=32)
    key = world.submit(Mode.PREFILL_ONLY, length=15)
    world.step()
    records = []
    consume = world.sidecar_ring.consume

    def spy():
        record = consume()
        if record is not None:
            records.append(record)
        return record

    world.sidecar_ring.consume = spy
    world.start_prefill(key, base=1)
    world.run()
    # Chunks end at 6, 12, 15; the descriptor starts at block 1; 2 layers a step, rung once each.
    transfer = world.tracks[key].transfer_id
    assert [list(map(tuple, r.entries)) for r in records] == [[(transfer, 0, 2)], [(transfer, 2, 1)]]
    assert [r.first_value for r in records] == [3, 5]
    assert world.notified == 2
    assert world.tracks[key].computed[0].chunks == 3
    world.finish()


def test_cached_pages_are_not_recorded_again() -> None:
    world = World(page_size=4)
    first = world.submit(Mode.PREFILL_ONLY, length=15)
    world.step()
    world.start_prefill(first)
    world.run()
    world.release(first)
    second = world.submit(Mode.PREFILL_ONLY, length=15)
    world.step()
    assert world.tracks[second].admitted[0].first_block == 3
    world.start_prefill(second)
    world.run()
    assert world.tracks[second].arrived == {0, 1, 2, 3}
    world.finish()


def test_full_ring_fails_the_transfers_and_nothing_else() -> None:
    world = World(page_size=4, chunk_size=4, token_budget=32, ring_records=1, num_pages=60)
    taken = 0
    consume = world.sidecar_ring.consume
    world.sidecar_ring.consume = lambda: None
    while world.ring.publish(_record(taken)):
        taken += 1
    key = world.submit(Mode.PREFILL_ONLY, length=15)
    other = world.submit(length=9)
    world.step()
    world.start_prefill(key)
    world.run()
    assert isinstance(error_of(world.tracks[key]), Unavailable)
    assert world.core.counters.ring_full == 1
    assert error_of(world.tracks[other]) is None
    assert world.core.pool.counts().draining == 4, "held until the service says that nothing reads them"
    world.sidecar_ring.consume = consume
    world.release(key)
    world.run()
    world.finish()


def test_after_a_failed_step_no_step_runs_until_its_transfers_are_released() -> None:
    """Later steps reach the doorbell values that the failed step's record names: the sidecar must have dropped it."""
    world = World(page_size=4, chunk_size=4, token_budget=32, num_pages=60)
    key = world.submit(Mode.PREFILL_ONLY, length=15)
    other = world.submit(length=9, max_tokens=20)
    world.step()
    world.start_prefill(key)
    world.step()
    late = world.submit(Mode.REMOTE, base=1, length=9)
    world.fail_next = [RuntimeError("planned")]
    world.step()
    assert isinstance(error_of(world.tracks[key]), Internal)
    assert isinstance(error_of(world.tracks[other]), Internal), "it was in the same step"
    (pending,) = world.records
    assert world.doorbell.value < pending.first_value
    next_one = world.submit(length=9)
    assert not world.step()
    assert not world.step()
    world.release(key)
    world.run()
    assert world.doorbell.value >= pending.first_value + pending.num_layers - 1
    assert error_of(world.tracks[next_one]) is None
    assert not world.tracks[late].over
    world.finish()


def _record(number: int):
    from kvmesh.kv.ring import StepEntry, StepRecord

    return StepRecord(10_000 + number, 1, (StepEntry(999, 0, 1),))


def test_describe_names_every_state() -> None:
    world = World()
    world.submit(length=9, n=2)
    world.submit(Mode.REMOTE, length=9)
    world.step()
    text = world.core.scheduler.describe()
    assert SeqState.AWAITING_KV.value in text
    assert "r1/1" in text


def test_tokens_of_a_step_come_in_one_batch() -> None:
    world = World(num_pages=60)
    for _ in range(3):
        world.submit(length=5)
    batches = []
    world.core._on_events = lambda events: batches.append(sum(isinstance(e, Tokens) for e in events))
    for _ in range(4):
        world.step()
    assert batches.count(3) == 4


def test_the_core_imports_no_torch_and_no_grpc() -> None:
    code = (
        "import sys; import kvmesh.engine.core, kvmesh.engine.scripted; "
        "print([m for m in ('torch', 'grpc', 'prometheus_client') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
