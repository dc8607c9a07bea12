"""Who belongs to the fleet: streams, silence, incarnations; and what watchers are told about it."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvmesh.errors import FailedPrecondition, InvalidArgument, Overloaded, Unavailable
from kvmesh.proto.v1 import engine_pb2, router_pb2
from router_helpers import FakeClock, kv_events, worker_info
from services.router import watch
from services.router.fleet import Family, Fleet, Session
from services.router.watch import Watcher, WatchHub

Load = engine_pb2.WorkerLoad
HASHES = [bytes([i]) * 16 for i in range(16)]


class Recorder:
    """A listener that writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []

    def worker_changed(self, worker_id: str) -> None:
        self.heard.append(("changed", worker_id))

    def worker_loaded(self, worker_id: str) -> None:
        self.heard.append(("loaded", worker_id))

    def worker_left(self, worker_id: str) -> None:
        self.heard.append(("left", worker_id))

    def worker_replaced(self, worker_id: str) -> None:
        self.heard.append(("replaced", worker_id))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def fleet(clock: FakeClock) -> Fleet:
    return Fleet(3.0, clock)


def test_silence_removes_and_any_message_counts(fleet: Fleet, clock: FakeClock) -> None:
    a, b = Session(), Session()
    fleet.register(worker_info("a"), a)
    fleet.register(worker_info("b"), b)
    clock.advance(2.0)
    fleet.kv_events(a, router_pb2.KvEvents())
    clock.advance(2.0)
    assert fleet.expire() == ["b"]
    assert b.closed.is_set()
    assert "silent" in b.reason
    assert [worker.worker_id for worker in fleet.workers] == ["a"]
    with pytest.raises(FailedPrecondition):
        fleet.report(b, Load())


def test_a_new_incarnation_replaces_at_once_and_the_old_never_returns(fleet: Fleet) -> None:
    recorder = Recorder()
    fleet.add_listener(recorder)
    old, new = Session(), Session()
    fleet.register(worker_info("a", incarnation=1), old)
    fleet.kv_events(old, kv_events(1, [HASHES[1]]))
    assert len(fleet.index.held(0)) == 1
    fleet.register(worker_info("a", incarnation=2), new)
    assert old.closed.is_set()
    assert isinstance(old.error(), FailedPrecondition)
    assert recorder.heard[-2:] == [("replaced", "a"), ("changed", "a")]
    worker = fleet.get("a")
    assert worker is not None
    assert (worker.info.incarnation, fleet.index.held(worker.slot)) == (2, frozenset())

    # The old stream's end, its late messages and its attempt to come back change nothing.
    fleet.detach(old)
    with pytest.raises(FailedPrecondition):
        fleet.report(old, Load(running=99))
    with pytest.raises(FailedPrecondition):
        fleet.register(worker_info("a", incarnation=1), old)
    with pytest.raises(FailedPrecondition):
        fleet.register(worker_info("a", incarnation=1), Session())
    assert fleet.get("a") is worker
    assert worker.load.running == 0
    assert not new.closed.is_set()


def test_the_same_incarnation_may_come_back_after_silence(fleet: Fleet, clock: FakeClock) -> None:
    fleet.register(worker_info("a", incarnation=1), Session())
    clock.advance(4.0)
    fleet.expire()
    fleet.register(worker_info("a", incarnation=1), Session())
    assert len(fleet) == 1


def test_an_incarnation_that_left_does_not_replace_its_successor(fleet: Fleet) -> None:
    old, new = Session(), Session()
    fleet.register(worker_info("a", incarnation=7), old)
    fleet.detach(old)  # Its network is away; it lives on.
    fleet.register(worker_info("a", incarnation=3), new)
    with pytest.raises(FailedPrecondition):
        fleet.register(worker_info("a", incarnation=7), Session())
    worker = fleet.get("a")
    assert worker is not None
    assert worker.info.incarnation == 3
    fleet.detach(new)
    fleet.register(worker_info("a", incarnation=3), Session())
    with pytest.raises(FailedPrecondition):
        fleet.register(worker_info("a", incarnation=7), Session())


def test_the_same_incarnation_on_a_second_stream_takes_over(fleet: Fleet) -> None:
    first, second = Session(), Session()
    fleet.register(worker_info("a", incarnation=1), first)
    fleet.register(worker_info("a", incarnation=1), second)
    fleet.detach(first)
    assert fleet.report(second, Load(running=2)).load.running == 2


def test_state_changes_on_the_same_stream(fleet: Fleet) -> None:
    session = Session()
    fleet.register(worker_info("a", state=engine_pb2.WORKER_STATE_STARTING), session)
    fleet.report(session, Load(running=3))
    worker = fleet.register(worker_info("a"), session)
    assert worker.serving
    assert worker.load.running == 3, "a change of state keeps what is known"
    with pytest.raises(FailedPrecondition):
        fleet.register(worker_info("a", incarnation=2), session)
    with pytest.raises(FailedPrecondition):
        fleet.register(worker_info("b"), session)


def test_a_report_before_registration_is_refused(fleet: Fleet) -> None:
    for call in (lambda s: fleet.report(s, Load()), lambda s: fleet.kv_events(s, router_pb2.KvEvents())):
        with pytest.raises(FailedPrecondition):
            call(Session())


@pytest.mark.parametrize(
    "fields",
    [
        {"worker_id": ""},
        {"worker_id": "x" * 129},
        {"role": engine_pb2.WORKER_ROLE_UNSPECIFIED},
        {"model": ""},
        {"address": ""},
        {"revision": "r" * 513},
        {"layout_fingerprint": b"x" * 33},
    ],
)
def test_unusable_descriptions_are_refused(fleet: Fleet, fields: dict[str, object]) -> None:
    info = worker_info("a")
    for name, value in fields.items():
        setattr(info, name, value)
    with pytest.raises(InvalidArgument):
        fleet.register(info, Session())
    assert len(fleet) == 0


def test_blocks_are_bounded_by_what_the_worker_can_hold(fleet: Fleet) -> None:
    session = Session()
    worker = fleet.register(worker_info("a", total_pages=3), session)
    fleet.kv_events(session, kv_events(1, HASHES[:4]))
    assert fleet.index.held(worker.slot) == set(HASHES[:3])
    fleet.kv_events(session, kv_events(2, [HASHES[4]], [HASHES[2], HASHES[5]]))
    assert fleet.index.held(worker.slot) == {HASHES[0], HASHES[1], HASHES[4]}
    with pytest.raises(InvalidArgument):
        fleet.kv_events(session, router_pb2.KvEvents(stored_packed=b"y" * 33, sequence=3, incarnation=1))
    with pytest.raises(InvalidArgument):
        fleet.kv_events(session, router_pb2.KvEvents(stored_packed=bytes(16 << 17), removed_packed=b"y" * 16))
    fleet.kv_events(session, kv_events(3, [HASHES[0]], reset=True))
    assert fleet.index.held(worker.slot) == {HASHES[0]}


def shown(fleet: Fleet, *hashes: bytes) -> list[int]:
    """Slots of the workers that are found by a chain of these hashes, whole."""
    slots, depths = fleet.index.depths(b"".join(hashes))
    return slots[depths == len(hashes)].tolist()


def test_missing_events_hide_a_worker_until_a_whole_snapshot_came(fleet: Fleet, clock: FakeClock) -> None:
    session = Session()
    slot = fleet.register(worker_info("a"), session).slot
    fleet.kv_events(session, kv_events(1, [HASHES[0]]))
    fleet.kv_events(session, kv_events(2, [HASHES[1]]))
    assert shown(fleet, *HASHES[:2]) == [slot]
    assert not session.wake.is_set()
    fleet.kv_events(session, kv_events(4, [HASHES[3]]))
    assert shown(fleet, HASHES[0]) == []
    assert session.wake.is_set()
    assert (session.take_need(), session.take_need()) == (True, False), "asked once"
    fleet.kv_events(session, kv_events(5, [HASHES[4]]))
    assert not session.wake.is_set(), "the worker knows"
    clock.advance(2.5)
    fleet.kv_events(session, kv_events(6))
    assert session.take_need(), "nothing came for long: asked again"
    fleet.kv_events(session, kv_events(7, HASHES[:2], reset=True, more=True))
    assert shown(fleet, HASHES[0]) == [], "a part of a snapshot says nothing of what is not in it"
    fleet.kv_events(session, kv_events(8, [HASHES[2]]))
    assert shown(fleet, *HASHES[:3]) == [slot]
    fleet.kv_events(session, kv_events(9, [HASHES[3]], incarnation=7))
    assert shown(fleet, *HASHES[:3]) == [slot]
    assert session.take_need(), "another process's events"


def test_events_before_any_snapshot_are_not_believed(fleet: Fleet) -> None:
    session = Session()
    fleet.register(worker_info("a"), session)
    fleet.kv_events(session, kv_events(1, [HASHES[0]], reset=False))
    assert shown(fleet, HASHES[0]) == []
    assert session.take_need()


def test_a_model_that_left_is_remembered_for_a_while(fleet: Fleet, clock: FakeClock) -> None:
    session = Session()
    fleet.register(worker_info("a"), session)
    fleet.detach(session)
    assert fleet.known_families() == {Family("tiny", "r1", "tok")}
    clock.advance(61.0)
    assert fleet.known_families() == set()


def test_the_first_moments_are_gathering(fleet: Fleet, clock: FakeClock) -> None:
    assert fleet.gathering
    clock.advance(3.0)
    assert not fleet.gathering


class FleetMachine(RuleBasedStateMachine):
    """Streams that register, report and end in any order: the fleet holds exactly the latest live stream of each id."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.fleet = Fleet(3.0, self.clock)
        self.streams: list[tuple[Session, str, int]] = []
        self.owner: dict[str, tuple[Session, int, float]] = {}
        self.retired: set[tuple[str, int]] = set()
        self.latest: dict[str, int] = {}

    @rule(worker=st.sampled_from("ab"), incarnation=st.integers(1, 3))
    def attach(self, worker: str, incarnation: int) -> None:
        session = Session()
        info = worker_info(worker, incarnation=incarnation)
        if (worker, incarnation) in self.retired:
            with pytest.raises(FailedPrecondition):
                self.fleet.register(info, session)
            return
        self.fleet.register(info, session)
        old = self.latest.get(worker)
        if old is not None and old != incarnation:
            self.retired.add((worker, old))
        self.latest[worker] = incarnation
        self.owner[worker] = (session, incarnation, self.clock.now)
        self.streams.append((session, worker, incarnation))

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def report(self, data: st.DataObject) -> None:
        session, worker, incarnation = data.draw(st.sampled_from(self.streams))
        if self.owner.get(worker, (None,))[0] is session:
            self.fleet.report(session, Load())
            self.owner[worker] = (session, incarnation, self.clock.now)
        else:
            with pytest.raises(FailedPrecondition):
                self.fleet.report(session, Load())

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        session, worker, _ = data.draw(st.sampled_from(self.streams))
        self.fleet.detach(session)
        if self.owner.get(worker, (None,))[0] is session:
            del self.owner[worker]

    @rule(seconds=st.sampled_from([0.5, 2.0, 3.5]))
    def silence(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.fleet.expire()
        self.owner = {w: o for w, o in self.owner.items() if o[2] >= self.clock.now - 3.0}

    @invariant()
    def holds_the_owners(self) -> None:
        assert {w.worker_id: w.session for w in self.fleet.workers} == {w: o[0] for w, o in self.owner.items()}
        for session, worker, _ in self.streams:
            assert session.closed.is_set() == (self.owner.get(worker, (None,))[0] is not session)


TestFleetMachine = FleetMachine.TestCase
TestFleetMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


# --- watchers ---------------------------------------------------------------------------------------------------


def ids(message: router_pb2.WatchResponse) -> list[str]:
    return [status.info.worker_id for status in message.workers]


def test_a_watcher_gets_the_whole_then_changes(fleet: Fleet) -> None:
    a = Session()
    fleet.register(worker_info("a"), a)
    watcher = Watcher(fleet)
    first = watcher.take()
    assert first.snapshot
    assert ids(first) == ["a"]
    fleet.report(a, Load(running=1))
    watcher.add("a", urgent=False)
    assert not watcher.wake.is_set(), "a load waits for the heartbeat"
    fleet.report(a, Load(running=2))
    watcher.add("a", urgent=True)
    second = watcher.take()
    assert not second.snapshot
    assert [s.load.running for s in second.workers] == [2], "the present state, once"
    fleet.detach(a)
    watcher.add("a", urgent=True)
    assert list(watcher.take().removed) == ["a"]


def test_a_slow_watcher_gets_a_fresh_whole_instead_of_a_backlog(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MAX_PENDING", 3)
    watcher = Watcher(fleet)
    watcher.take()
    for i in range(100):
        fleet.register(worker_info(f"w{i}"), Session())
        watcher.add(f"w{i}", urgent=True)
        assert watcher.pending <= 3
    message = watcher.take()
    assert message.snapshot
    assert len(message.workers) == 100
    assert not watcher.take().snapshot


async def test_the_stream_heartbeats_and_ends_on_close(fleet: Fleet) -> None:
    aliases = {"auto": "", "fast": "m"}
    hub = WatchHub(fleet, lambda: router_pb2.CacheStatus(embedder="none"), heartbeat_s=0.01, aliases=aliases)
    stream = hub.stream()
    async with asyncio.timeout(60):
        first = await anext(stream)
        assert first.snapshot
        assert dict(first.aliases) == aliases
        assert len(hub) == 1
        beat = await anext(stream)
        assert (ids(beat), list(beat.removed), beat.cache.embedder) == ([], [], "none")
        hub.close()
        with pytest.raises(Unavailable):
            await anext(stream)
    assert len(hub) == 0


async def test_a_change_is_told_at_once(fleet: Fleet) -> None:
    hub = WatchHub(fleet, router_pb2.CacheStatus, heartbeat_s=3600)
    stream = hub.stream()
    async with asyncio.timeout(60):
        await anext(stream)
        waiting = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        fleet.register(worker_info("a"), Session())
        assert ids(await waiting) == ["a"]
        await stream.aclose()
    assert len(hub) == 0


async def test_watchers_are_bounded(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MAX_WATCHERS", 1)
    hub = WatchHub(fleet, router_pb2.CacheStatus)
    first = hub.stream()
    await anext(first)
    with pytest.raises(Overloaded):
        await anext(hub.stream())
    await first.aclose()
