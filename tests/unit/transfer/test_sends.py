"""The writer's transfers: what is posted when, and how each ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.errors import InvalidArgument
from kvmesh.kv.layout import KvGroup, KvLayout
from kvmesh.kv.ring import StepEntry, StepRecord
from kvmesh.transfer.sends import Send, SendDone, SendDrained, SendTable
from kvmesh.transfer.transports.base import Completion, Outbound, Write


class Recorder(Outbound):
    """Keeps what is posted; completes when told."""

    def __init__(self) -> None:
        self.writes: list[Write] = []
        self.flushed: list[int] = []
        self.ready: list[Completion] = []
        self.down = ""

    def post(self, write: Write) -> None:
        self.writes.append(write)

    def poll(self, budget: int) -> list[Completion]:
        ready, self.ready = self.ready, []
        return ready

    def flush(self, immediate: int) -> None:
        self.flushed.append(immediate)

    def fence(self, reason: str) -> None:
        self.down = reason

    def close(self) -> None: ...

    @property
    def busy(self) -> bool:
        return bool(self.ready)

    @property
    def broken(self) -> str:
        return self.down


# Two groups whose layers alternate: step layer l is model layer l.
LAYOUT = KvLayout(
    version=1,
    dtype="fp32",
    page_size=2,
    groups=(
        KvGroup("even", "full", (0, 2), kv_heads=1, head_dim=2),
        KvGroup("odd", "full", (1, 3), kv_heads=2, head_dim=2),
    ),
    num_pages=16,
)
PAGE = {"even": LAYOUT.page_bytes("even"), "odd": LAYOUT.page_bytes("odd")}


def make(outbound: Outbound, src: list[int], dst: list[int], transfer_id: int = 1) -> Send:
    region = {("even", 0): 0, ("odd", 0): 1}
    return Send(
        transfer_id=transfer_id,
        immediate=transfer_id,
        outbound=outbound,
        src_layout=LAYOUT,
        dst_layout=LAYOUT,
        src_pages={"even": src, "odd": src},
        dst_pages={"even": dst, "odd": dst},
        src_region=region,
        dst_region=region,
        expected=len(src) * 2 * (PAGE["even"] + PAGE["odd"]),
    )


def finish(table: SendTable, outbound: Recorder, choose: Callable[[Write], str] = lambda write: "") -> None:
    for write in outbound.writes:
        error = choose(write)
        table.complete(Completion(write.context, 0 if error else write.nbytes, error))
    outbound.writes.clear()


def test_layers_leave_as_the_doorbell_reaches_them() -> None:
    table, out = SendTable(LAYOUT), Recorder()
    table.start(make(out, [3, 4, 9], [7, 8, 1]), 0)
    assert table.awaiting_pages
    table.record(StepRecord(11, 4, (StepEntry(1, 0, 3),)))
    assert not table.awaiting_pages
    assert not table.advance(10)
    assert not out.writes
    assert table.awaiting_doorbell == 11
    for layer in range(4):
        assert table.advance(11 + layer)
        (write,) = out.writes
        name = "even" if layer % 2 == 0 else "odd"
        assert write.src_region == layer % 2
        # Pages 3, 4 → 7, 8 merge into one run.
        base = (layer // 2) * LAYOUT.layer_stride(name)
        assert write.src == [base + 3 * PAGE[name], base + 9 * PAGE[name]]
        assert write.dst == [base + 7 * PAGE[name], base + 1 * PAGE[name]]
        assert write.length == [2 * PAGE[name], PAGE[name]]
        finish(table, out)
    assert table.awaiting_doorbell is None
    assert [type(event) for event in table.events()] == [SendDone]
    assert len(table) == 0


def test_ready_pages_leave_at_once_in_all_layers() -> None:
    table, out = SendTable(LAYOUT), Recorder()
    send = make(out, [1, 2, 3], [4, 5, 6])
    table.start(send, 2)
    assert sorted(write.src_region for write in out.writes) == [0, 1]
    assert sum(write.nbytes for write in out.writes) == 2 * 2 * (PAGE["even"] + PAGE["odd"])
    finish(table, out)
    assert not table.events()
    table.pages_ready(1, 2, 1)
    finish(table, out)
    assert [type(event) for event in table.events()] == [SendDone]
    assert send.written == send.expected


# No deadline: the first call of all loads what planning needs.
@settings(deadline=None)
@given(
    cuts=st.lists(st.integers(1, 7), unique=True, max_size=6),
    ready=st.integers(0, 3),
    jumps=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    seed=st.integers(0, 99),
)
def test_every_byte_once_however_it_is_cut(cuts: list[int], ready: int, jumps: list[int], seed: int) -> None:
    table, out = SendTable(LAYOUT), Recorder()
    rng = np.random.default_rng(seed)
    src, dst = rng.permutation(16)[:8].tolist(), rng.permutation(16)[:8].tolist()
    table.start(make(out, src, dst), ready)
    edges = sorted({ready, 8, *(cut for cut in cuts if cut > ready)})
    value = 1
    for first, last in itertools.pairwise(edges):
        table.record(StepRecord(value, 4, (StepEntry(1, first, last - first),)))
        value += 4
    doorbell = 0
    for jump in [*jumps, 1000]:
        doorbell += jump
        table.advance(doorbell)
    written = {name: np.zeros(LAYOUT.region_bytes(name), dtype=np.uint8) for name in PAGE}
    for write in out.writes:
        name = ["even", "odd"][write.src_region]
        for a, b, n in zip(write.src, write.dst, write.length, strict=True):
            page, layer = a // PAGE[name] % 16, a // LAYOUT.layer_stride(name)
            assert b // LAYOUT.layer_stride(name) == layer
            assert b // PAGE[name] % 16 == dst[src.index(page)]
            written[name][b : b + n] += 1
    for name, counts in written.items():
        want = np.zeros_like(counts).reshape(2, 16, PAGE[name])
        want[:, dst] = 1
        np.testing.assert_array_equal(counts, want.reshape(-1))
    finish(table, out)
    assert [type(event) for event in table.events()] == [SendDone]


def test_stop_waits_for_what_is_in_flight() -> None:
    table, out = SendTable(LAYOUT), Recorder()
    table.start(make(out, [1, 2], [3, 4]), 1)
    assert table.stop(1, "cancelled")
    assert out.flushed == [1]
    assert not table.events()
    posted = len(out.writes)
    # What is said about it from now on moves nothing.
    table.pages_ready(1, 1, 1)
    table.record(StepRecord(1, 4, (StepEntry(1, 1, 1),)))
    table.advance(100)
    assert len(out.writes) == posted
    finish(table, out)
    (event,) = table.events()
    assert isinstance(event, SendDrained)
    assert event.send.reason == "cancelled"
    assert not table.stop(1, "again")


def test_stop_in_the_middle_of_a_record() -> None:
    table, out = SendTable(LAYOUT), Recorder()
    table.start(make(out, [1, 2], [3, 4]), 0)
    table.start(make(out, [5, 6], [8, 9], transfer_id=2), 0)
    table.record(StepRecord(1, 4, (StepEntry(1, 0, 2), StepEntry(2, 0, 2))))
    table.advance(2)
    table.stop(1, "aborted", by_peer=True)
    finish(table, out)
    table.advance(4)
    assert {write.immediate for write in out.writes} == {2}
    finish(table, out)
    events = table.events()
    assert [(type(event), event.send.transfer_id) for event in events] == [(SendDrained, 1), (SendDone, 2)]
    assert events[0].send.by_peer


def test_a_failed_write_fails_the_generation_and_nothing_is_posted_again() -> None:
    table, out = SendTable(LAYOUT), Recorder()
    table.start(make(out, [1, 2, 3], [4, 5, 6]), 2)
    first = out.writes[0]
    table.complete(Completion(first.context, 0, "broke"))
    table.pages_ready(1, 2, 1)
    assert len(out.writes) == 2
    # A duplicate of the same completion is no other write's.
    table.complete(Completion(first.context, 0, "broke"))
    assert table.stray_completions == 1
    assert not table.events()
    table.complete(Completion(out.writes[1].context, out.writes[1].nbytes))
    (event,) = table.events()
    assert isinstance(event, SendDrained)
    assert event.send.reason == "broke"


@pytest.mark.parametrize(("first", "count"), [(1, 1), (0, 4), (3, 1), (2, 0xFFFF_FFF0)])
def test_wrong_claims_fail_the_generation(first: int, count: int) -> None:
    table, out = SendTable(LAYOUT), Recorder()
    table.start(make(out, [1, 2, 3], [4, 5, 6]), 2)
    table.record(StepRecord(1, 4, (StepEntry(1, first, count),)))
    finish(table, out)
    assert [type(event) for event in table.events()] == [SendDrained]


def test_a_step_of_another_model_fails_the_generation() -> None:
    table, out = SendTable(LAYOUT), Recorder()
    table.start(make(out, [1], [4]), 0)
    table.record(StepRecord(1, 5, (StepEntry(1, 0, 1),)))
    (event,) = table.events()
    assert "a step of 5 layers" in event.send.reason


def test_entries_of_ended_transfers_are_ignored() -> None:
    table = SendTable(LAYOUT)
    table.record(StepRecord(1, 4, (StepEntry(77, 0, 1),)))
    assert table.stale_entries == 1
    assert table.awaiting_doorbell is None


def test_what_start_refuses() -> None:
    table, out = SendTable(LAYOUT), Recorder()
    table.start(make(out, [1], [4]), 0)
    with pytest.raises(InvalidArgument, match="runs already"):
        table.start(make(out, [1], [4]), 0)
    with pytest.raises(InvalidArgument, match="ready_pages"):
        table.start(make(out, [1], [4], transfer_id=2), 2)
    with pytest.raises(InvalidArgument, match="as many pages"):
        make(out, [1, 2], [4])


def test_broken_link_stops_its_transfers_alone() -> None:
    table, a, b = SendTable(LAYOUT), Recorder(), Recorder()
    table.start(make(a, [1], [4]), 0)
    table.start(make(b, [2], [5], transfer_id=2), 0)
    table.stop_link(a, "gone")
    assert [event.send.transfer_id for event in table.events()] == [1]
    assert [send.transfer_id for send in table] == [2]
    table.stop_all("engine gone")
    assert [event.send.transfer_id for event in table.events()] == [2]


def test_long_writes_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvmesh.transfer import sends

    monkeypatch.setattr(sends, "MAX_WRITE_BYTES", 5 * PAGE["even"])
    monkeypatch.setattr(sends, "MAX_WRITE_RUNS", 3)
    table, out = SendTable(LAYOUT), Recorder()
    send = make(out, [0, 2, 4, 6, 8, 10, 12], [1, 3, 5, 7, 9, 11, 13])
    table.start(send, 7)
    assert len(out.writes) > 4
    for write in out.writes:
        assert len(write.length) <= 3
        assert sum(write.length) == write.nbytes < 5 * PAGE["even"] + PAGE["odd"]
    placed = [(w.dst_region, dst) for w in out.writes for dst in w.dst]
    assert len(set(placed)) == len(placed) == send.runs == 7 * 4
    finish(table, out)
    assert [type(event) for event in table.events()] == [SendDone]


def test_a_record_that_nobody_waits_for_is_forgotten() -> None:
    """A failed step never rings its layers: a watcher that waited for them would look for them for ever."""
    outbound = Recorder()
    table = SendTable(LAYOUT)
    table.start(make(outbound, [1, 2], [3, 4]), 0)
    table.start(make(outbound, [5], [6], transfer_id=2), 0)
    table.record(StepRecord(1, 4, (StepEntry(1, 0, 1),)))
    table.record(StepRecord(5, 4, (StepEntry(1, 1, 1), StepEntry(2, 0, 1))))
    table.stop(1, "given up")
    table.advance(0)
    assert table.awaiting_doorbell == 5
    table.stop(2, "given up")
    table.advance(0)
    assert table.awaiting_doorbell is None
    assert not outbound.writes
