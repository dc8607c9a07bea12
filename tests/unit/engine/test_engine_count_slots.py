"""Slots of token counts: no two sequences of a step share one, and only a sequence's continuation keeps its counts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.engine.cuda.sampler_slots import CountSlots, Key

STEPS = st.lists(
    st.tuples(
        st.dictionaries(st.tuples(st.integers(0, 7), st.integers(0, 1)), st.integers(0, 3), max_size=6),
        st.booleans(),
        st.sets(st.integers(0, 7), max_size=2),
    ),
    max_size=20,
)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_counts_belong_to_whom_they_were_made_for(steps: list[tuple[dict[Key, int], bool, set[int]]]) -> None:
    """A device is played along: what a slot holds is what the last queued step left there."""
    slots = CountSlots(3)
    held: dict[int, tuple[Key, int]] = {}
    for wanted, queued, ended in steps:
        keys, lengths = list(wanted), list(wanted.values())
        before = slots.capacity
        places, fresh = slots.take(keys, lengths)
        assert len(set(places)) == len(keys)
        assert all(0 <= place < slots.capacity for place in places)
        assert slots.capacity <= max(before, len(keys))
        for key, length, place, new in zip(keys, lengths, places, fresh, strict=True):
            assert new or held[place] == (key, length)
            if queued:
                held[place] = (key, length + 1)
        if queued:
            slots.counted(keys, lengths)
        slots.forget(ended)


def test_the_next_step_of_a_sequence_finds_its_counts() -> None:
    slots = CountSlots(2)
    keys: list[Key] = [(1, 0), (2, 0)]
    first, fresh = slots.take(keys, [0, 5])
    assert fresh == [True, True]
    slots.counted(keys, [0, 5])
    assert slots.take(keys, [1, 6]) == (first, [False, False])
    slots.counted(keys, [1, 6])
    # Not the token that was counted: it went on elsewhere, or lost one.
    assert slots.take(keys, [1, 9])[1] == [True, True]


def test_what_was_used_last_stays() -> None:
    slots = CountSlots(2)
    for key in ((1, 0), (2, 0), (1, 0), (3, 0)):
        slots.take([key], [4])
        slots.counted([key], [3])
    assert slots.take([(1, 0)], [4])[1] == [False]
    assert slots.take([(2, 0)], [4])[1] == [True]
    assert len(slots) == slots.capacity == 2


def test_forgotten_sequences_give_their_slots_back() -> None:
    slots = CountSlots(4)
    slots.take([(7, 0), (7, 1), (8, 0)], [0, 0, 0])
    slots.forget([7, 99])
    assert len(slots) == 1
    slots.take([(9, choice) for choice in range(3)], [0, 0, 0])
    assert (len(slots), slots.capacity) == (4, 4)
