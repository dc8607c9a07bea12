"""The receiver's slot table, case by case (the property test does the rest)."""

from __future__ import annotations

import timeit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.errors import FailedPrecondition, InvalidArgument, NotFound, Overloaded
from kvmesh.transfer.immediate import GENERATIONS, MAX_SLOTS, pack, unpack
from kvmesh.transfer.slots import AskDrain, Completed, Drained, Failed, SlotState, SlotTable


def kinds(events: object) -> list[type]:
    return [type(event) for event in events]  # type: ignore[attr-defined]


@given(st.integers(0, MAX_SLOTS - 1), st.integers(0, GENERATIONS - 1))
def test_immediate_round_trip(slot: int, generation: int) -> None:
    assert unpack(pack(slot, generation)) == (slot, generation)
    assert pack(slot, generation) < 1 << 32


@pytest.mark.parametrize(("slot", "generation"), [(-1, 0), (MAX_SLOTS, 0), (0, -1), (0, GENERATIONS)])
def test_immediate_out_of_range(slot: int, generation: int) -> None:
    with pytest.raises(InvalidArgument):
        pack(slot, generation)


def test_complete_exactly_at_the_expected_count() -> None:
    table = SlotTable(4)
    slot = table.open(10, now=0, ttl_s=5)
    table.bind(slot.slot, slot.generation, 10, "peer", now=1)
    assert table.arrived("peer", slot.immediate, 4, now=2) == []
    assert table.arrived("peer", slot.immediate, 5, now=2) == []
    (event,) = table.arrived("peer", slot.immediate, 1, now=4)
    assert isinstance(event, Completed)
    assert event.elapsed_s == 3
    assert len(table) == 0
    # One byte more is of an old generation now.
    assert table.arrived("peer", slot.immediate, 1, now=5) == []
    assert table.counters.stale == 1


def test_more_bytes_fail_and_wait_for_the_writer() -> None:
    table = SlotTable(1)
    slot = table.open(10, now=0, ttl_s=5)
    table.bind(slot.slot, slot.generation, 10, "peer", now=0)
    assert kinds(table.arrived("peer", slot.immediate, 11, now=1)) == [Failed, AskDrain]
    with pytest.raises(Overloaded):
        table.open(1, now=1, ttl_s=5)
    assert table.drained("other", slot.slot, slot.generation) == []
    assert kinds(table.drained("peer", slot.slot, slot.generation)) == [Drained]
    assert table.drained("peer", slot.slot, slot.generation) == []
    assert table.counters.overrun == 1


def test_slots_are_reused_first_in_first_out_under_a_new_generation() -> None:
    table = SlotTable(3, first_generation=GENERATIONS - 1)
    first = [table.open(1, now=0, ttl_s=9) for _ in range(3)]
    for slot in (first[1], first[0], first[2]):
        table.close(slot.slot, slot.generation, "over")
    again = [table.open(1, now=0, ttl_s=9) for _ in range(3)]
    assert [slot.slot for slot in again] == [first[1].slot, first[0].slot, first[2].slot]
    assert {slot.generation for slot in again} == {0}


def test_unbound_slot_drains_at_once_and_lets_nobody_in() -> None:
    table = SlotTable(2)
    slot = table.open(5, now=0, ttl_s=5)
    assert kinds(table.close(slot.slot, slot.generation, "gone")) == [Failed, Drained]
    with pytest.raises(NotFound):
        table.bind(slot.slot, slot.generation, 5, "peer", now=0)
    assert table.close(slot.slot, slot.generation, "again") == []


def test_bind_is_checked() -> None:
    table = SlotTable(2)
    slot = table.open(5, now=0, ttl_s=5)
    with pytest.raises(InvalidArgument, match="expects 5 bytes"):
        table.bind(slot.slot, slot.generation, 6, "peer", now=0)
    with pytest.raises(NotFound):
        table.bind(slot.slot, slot.generation + 1, 5, "peer", now=0)
    with pytest.raises(NotFound):
        table.bind(99, 0, 5, "peer", now=0)
    table.bind(slot.slot, slot.generation, 5, "peer", now=0)
    with pytest.raises(FailedPrecondition):
        table.bind(slot.slot, slot.generation, 5, "peer", now=0)


def test_a_writer_whose_pages_make_other_bytes_of_the_same_tokens() -> None:
    """What is expected is fixed by the bind, and from then on as firmly as by the opening."""
    table = SlotTable(1)
    slot = table.open(100, now=0, ttl_s=5)
    with pytest.raises(InvalidArgument, match="expects 90 bytes, the writer has 100"):
        table.bind(slot.slot, slot.generation, 100, "peer", now=0, expected=90)
    assert slot.expected == 100
    assert table.bind(slot.slot, slot.generation, 90, "peer", now=0, expected=90) is slot
    assert not table.arrived("peer", slot.immediate, 89, now=0)
    assert kinds(table.arrived("peer", slot.immediate, 1, now=0)) == [Completed]


def test_bytes_of_another_peer_are_not_believed() -> None:
    table = SlotTable(2)
    slot = table.open(5, now=0, ttl_s=5)
    assert table.arrived("peer", slot.immediate, 5, now=0) == []
    table.bind(slot.slot, slot.generation, 5, "peer", now=0)
    assert table.arrived("other", slot.immediate, 5, now=0) == []
    assert slot.received == 0
    assert table.counters.stale == 2


def test_lost_peer_fails_now_and_drains_when_fenced() -> None:
    table = SlotTable(4)
    mine, other, unbound = (table.open(5, now=0, ttl_s=5) for _ in range(3))
    table.bind(mine.slot, mine.generation, 5, "a", now=0)
    table.bind(other.slot, other.generation, 5, "b", now=0)
    assert kinds(table.peer_lost("a", "gone")) == [Failed]
    # A count that was under way does not raise the dead.
    assert table.arrived("a", mine.immediate, 5, now=0) == []
    assert mine.state is SlotState.DRAINING
    assert kinds(table.fenced("a")) == [Drained]
    assert table.fenced("a") == []
    assert {slot.slot for slot in table} == {other.slot, unbound.slot}


def test_expiry() -> None:
    table = SlotTable(4)
    bound = table.open(5, now=0, ttl_s=2)
    waiting = table.open(5, now=0, ttl_s=3)
    table.bind(bound.slot, bound.generation, 5, "a", now=0)
    assert table.next_expiry() == 2
    assert table.expire(1.9) == []
    assert kinds(table.expire(2.0)) == [Failed, AskDrain]
    assert table.next_expiry() == 3
    assert kinds(table.expire(10.0)) == [Failed, Drained]
    assert table.next_expiry() is None
    assert table.counters.expired == 2
    assert waiting.reason == "not complete within 3 s"


def test_writer_that_failed_has_drained() -> None:
    table = SlotTable(1)
    slot = table.open(5, now=0, ttl_s=5)
    table.bind(slot.slot, slot.generation, 5, "a", now=0)
    assert kinds(table.writer_failed("a", slot.slot, slot.generation, "broke")) == [Failed, Drained]
    assert slot.reason == "broke"
    table.check_integrity()


@pytest.mark.parametrize("expected", [0, -1])
def test_an_expectation_is_of_something(expected: int) -> None:
    with pytest.raises(InvalidArgument):
        SlotTable(1).open(expected, now=0, ttl_s=1)


def test_free_slots_cost_nothing_at_an_event() -> None:
    """Each slot opened, completed or drained looks for the next expiry, on the loop that wakes the engine."""
    tables = SlotTable(max_slots=1), SlotTable()
    for table in tables:
        table.open(8, now=0.0, ttl_s=1.0)
    small, large = (min(timeit.repeat(table.next_expiry, number=200, repeat=5)) for table in tables)
    assert large < 10 * small
