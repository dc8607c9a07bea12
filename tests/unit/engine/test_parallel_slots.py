"""Steps through shared memory: each rank gets every step once, in order; no step is written over before it was read."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.engine.parallel.slots import SLOT_BYTES, SLOTS, StepSlots, bytes_for
from kvmesh.engine.parallel.wire import pack_step, unpack_step
from kvmesh.engine.runner import PENDING, SampleInput, SamplingParams, Slice, StepBatch
from kvmesh.errors import DataLoss, InvalidArgument
from kvmesh.kv.region import Region

SIZE = 3


class Ring:
    """Both sides over one region, the ranks' mapped for themselves."""

    def __init__(self) -> None:
        self.region = Region.create("steps", bytes_for(SIZE))
        self.leader = StepSlots(self.region, SIZE)
        self.mapped = [Region.adopt(os.dup(self.region.fd), self.region.nbytes) for _ in range(1, SIZE)]
        self.ranks = [StepSlots(region, SIZE) for region in self.mapped]

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, *_: object) -> None:
        for slots in (self.leader, *self.ranks):
            slots.close()
            slots.close()
        for region in (self.region, *self.mapped):
            region.close()


@given(st.lists(st.sampled_from(["put", 1, 2]), max_size=60), st.data())
def test_every_rank_takes_every_step_in_order_whatever_the_others_do(turns: list[object], data: st.DataObject) -> None:
    with Ring() as ring:
        sent: list[bytes] = []
        taken = {1: 0, 2: 0}
        for turn in turns:
            if turn == "put":
                body = data.draw(st.binary(max_size=40))
                number = ring.leader.put(body)
                full = len(sent) - min(taken.values()) >= SLOTS
                assert (number is None) == full
                if number is not None:
                    sent.append(body)
                    assert number == len(sent)
            elif taken[turn] < len(sent):
                taken[turn] += 1
                assert ring.ranks[turn - 1].take(turn, taken[turn]) == sent[taken[turn] - 1]
        for rank, count in taken.items():
            rest = [ring.ranks[rank - 1].take(rank, n + 1) for n in range(count, len(sent))]
            assert rest == sent[count:]


def test_the_largest_step_fits_and_a_larger_one_is_refused_whole() -> None:
    with Ring() as ring:
        bodies = [np.random.default_rng(n).bytes(SLOT_BYTES) for n in range(SLOTS)]
        assert [ring.leader.put(body) for body in bodies] == [1, 2, 3, 4]
        assert ring.leader.put(b"x") is None
        # No slot runs into its neighbours, nor into the cursors.
        assert [ring.ranks[0].take(1, n) for n in range(1, 5)] == bodies
        assert ring.leader.put(b"x") is None
        assert ring.ranks[1].take(2, 1) == bodies[0]
        with pytest.raises(InvalidArgument):
            ring.leader.put(bytes(SLOT_BYTES + 1))
        assert ring.leader.put(b"x") == 5
        assert [ring.ranks[1].take(2, n) for n in range(2, 6)] == [*bodies[1:], b"x"]


@pytest.mark.parametrize("number", [0, 2, 5, 2**64 - 1])
def test_a_number_that_is_not_there_is_data_loss(number: int) -> None:
    with Ring() as ring:
        assert ring.leader.put(b"step") == 1
        with pytest.raises(DataLoss):
            ring.ranks[0].take(1, number)
        assert ring.ranks[0].take(1, 1) == b"step"


def test_a_length_that_cannot_be_is_data_loss_before_memory_is_taken() -> None:
    with Ring() as ring:
        assert ring.leader.put(b"step") == 1
        ring.region.view(np.uint64)[ring.leader._at(1) // 8 + 1] = SLOT_BYTES + 1
        with pytest.raises(DataLoss):
            ring.ranks[0].take(1, 1)


def test_a_region_of_another_size_is_refused() -> None:
    with Region.create("steps", bytes_for(2)) as region, pytest.raises(InvalidArgument):
        StepSlots(region, 3)


def test_what_a_decode_step_costs_on_its_way(record_property: Callable[[str, object], None]) -> None:
    """64 rows of 4,250 tokens: packed, through a slot, unpacked. A measurement; only the result is checked."""
    sample = (SampleInput(SamplingParams(), 0, 0, (), ()),)
    table = np.arange(80, dtype=np.int32)
    batch = StepBatch(1, [Slice(n, np.array([PENDING], np.int32), 4250 + n, table, sample) for n in range(64)])
    with Ring() as ring:
        costs = []
        for number in range(1, 200):
            began = time.perf_counter()
            assert ring.leader.put(pack_step(batch, 64)) == number
            seen = unpack_step(ring.ranks[0].take(1, number))
            costs.append(time.perf_counter() - began)
            ring.ranks[1].take(2, number)
    assert [int(s.token_ids[0]) for s in seen.slices] == [PENDING] * 64
    assert [len(s.samples) for s in seen.slices] == [1] * 64
    record_property("measured", f"a decode step of 64 rows to a rank: {np.median(costs) * 1e6:.0f} us of Python")
