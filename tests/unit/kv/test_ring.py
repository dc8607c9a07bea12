"""Doorbell and step ring: order and completeness against a deque, corruption refused, both across processes."""

import os
import subprocess
import sys
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvmesh.errors import DataLoss, InvalidArgument
from kvmesh.kv.region import Region
from kvmesh.kv.ring import DOORBELL_BYTES, RING_HEADER_BYTES, Doorbell, StepEntry, StepRecord, StepRing

U64 = 2**64 - 1
entries = st.lists(
    st.builds(StepEntry, st.integers(0, U64), st.integers(0, 2**31), st.integers(1, 2**31 - 1)), max_size=9
).map(tuple)


def record(first_value=1, layers=2, n=1):
    return StepRecord(first_value, layers, tuple(StepEntry(i, i, 1) for i in range(n)))


class RingMachine(RuleBasedStateMachine):
    """A ring of a few dozen words, so that records wrap all the time; cursors start anywhere below 2**64."""

    @initialize(words=st.integers(5, 61), start=st.sampled_from([0, 7, 2**32 - 9, 2**40 + 3]))
    def start(self, words, start):
        self.memory = np.zeros((RING_HEADER_BYTES // 8) + words, dtype=np.uint64)
        self.memory[0] = self.memory[8] = start
        self.capacity = words
        self.producer, self.consumer = StepRing(self.memory.data), StepRing(self.memory.data)
        self.model: deque[StepRecord] = deque()
        self.value = 1

    def used(self):
        return sum(3 + 2 * len(r.entries) for r in self.model)

    @rule(entries=entries, layers=st.integers(1, 65536), gap=st.integers(0, 3))
    def publish(self, entries, layers, gap):
        item = StepRecord(self.value + gap, layers, entries)
        size = 3 + 2 * len(entries)
        if size > self.capacity:
            before = self.memory.copy()
            with pytest.raises(InvalidArgument):
                self.producer.publish(item)
            assert (before == self.memory).all()
            return
        fits = self.used() + size <= self.capacity
        before = self.memory.copy()
        assert self.producer.publish(item) is fits
        if fits:
            self.model.append(item)
            self.value = item.first_value + layers
        else:
            assert (before == self.memory).all()

    @rule()
    def consume(self):
        assert self.consumer.consume() == (self.model.popleft() if self.model else None)

    @rule()
    @precondition(lambda self: not self.model)
    def successor_attaches(self):
        self.consumer = StepRing(self.memory.data)


RingMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestRing = RingMachine.TestCase


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, U64)), min_size=1, max_size=4),
)
def test_corrupt_memory_is_refused_by_name_and_stays_refused(sizes, damage):
    memory = np.zeros(RING_HEADER_BYTES // 8 + 64, dtype=np.uint64)
    ring = StepRing(memory.data)
    for i, n in enumerate(sizes):
        ring.publish(record(1 + 2 * i, 2, n))
    for at, value in damage:
        memory[at % len(memory)] = value
    for _ in range(80):
        try:
            got = ring.consume()
        except DataLoss:
            with pytest.raises(DataLoss, match=r"^step ring is corrupt: "):
                ring.consume()
            return
        if got is None:
            return
        assert len(got.entries) <= ring.max_entries
    pytest.fail("a ring of 64 words gave more records than fit")


def test_each_kind_of_corruption_has_its_words():
    def broken(change, match):
        memory = np.zeros(RING_HEADER_BYTES // 8 + 32, dtype=np.uint64)
        ring = StepRing(memory.data)
        assert ring.publish(record(1, 2, 1))
        assert ring.consume() is not None
        assert ring.publish(record(3, 2, 1))
        change(memory, RING_HEADER_BYTES // 8 + 5)
        with pytest.raises(DataLoss, match=match):
            ring.consume()

    def put(index, value):
        return lambda memory, at: memory.__setitem__(at + index, value)

    broken(lambda memory, at: memory.__setitem__(0, 1000), "cursors")
    broken(lambda memory, at: memory.__setitem__(8, 1000), "cursors")
    broken(lambda memory, at: memory.__setitem__(0, 6), "no record")
    broken(put(0, 1), "none was published")
    broken(put(0, 5 << 32 | 9), "longer than what was published")
    broken(put(1, 2), "goes back")
    broken(put(1, U64), "not a doorbell value")
    broken(put(2, 0), "num_layers")
    broken(put(4, 7), "not a range")


def test_producer_refuses_a_consumer_cursor_that_makes_no_sense():
    memory = np.zeros(RING_HEADER_BYTES // 8 + 32, dtype=np.uint64)
    ring = StepRing(memory.data)
    memory[8] = 5
    with pytest.raises(DataLoss, match="cursors"):
        ring.publish(record())


@pytest.mark.parametrize(
    "bad",
    [
        StepRecord(-1, 1, ()),
        StepRecord(U64, 1, ()),
        StepRecord(1, 0, ()),
        StepRecord(1, 65537, ()),
        StepRecord(1, 1, (StepEntry(-1, 0, 1),)),
        StepRecord(1, 1, (StepEntry(U64 + 1, 0, 1),)),
        StepRecord(1, 1, (StepEntry(1, -1, 1),)),
        StepRecord(1, 1, (StepEntry(1, 0, 0),)),
        StepRecord(1, 1, (StepEntry(1, 2**32 - 1, 1),)),
    ],
)
def test_producer_refuses_fields_out_of_range(bad):
    ring = StepRing(bytearray(1024))
    with pytest.raises(InvalidArgument):
        ring.publish(bad)
    assert ring.consume() is None


def test_buffers_that_cannot_hold_one():
    for make in (lambda: StepRing(bytearray(RING_HEADER_BYTES + 32)), lambda: Doorbell(bytearray(63))):
        with pytest.raises(InvalidArgument, match="bytes"):
            make()
    aligned = np.zeros(100, dtype=np.uint64).view(np.uint8)
    with pytest.raises(InvalidArgument, match="aligned"):
        Doorbell(aligned.data[1:])
    assert StepRing(bytearray(StepRing.bytes_for(10, 4))).max_entries >= 4


def test_doorbells_have_a_cache_line_each():
    memory = bytearray(3 * DOORBELL_BYTES)
    first, third = Doorbell(memory), Doorbell(memory, 2)
    assert [first.ring(), first.ring(), third.ring()] == [1, 2, 1]
    assert (first.value, Doorbell(memory, 1).value, Doorbell(memory, 2).value) == (2, 0, 1)
    assert memory[64:128] == bytes(64)
    first.close()
    first.close()


CHILD = """
import os, sys
from kvmesh.kv.region import Region
from kvmesh.kv.ring import Doorbell, StepEntry, StepRecord, StepRing
fd, size, wake, room, count = map(int, sys.argv[1:])
region = Region.adopt(fd, size)
bell, ring = Doorbell(region.buf), StepRing(region.buf[64:])
for i in range(count):
    item = StepRecord(3 * i + 1, 3, tuple(StepEntry(i * 7 + k, k, i + 1) for k in range(i % 5)))
    while not ring.publish(item):
        assert os.read(room, 4096)
    for _ in range(3):
        bell.ring()
    os.write(wake, b"x")
"""


def test_across_processes_every_record_arrives_in_order_and_the_doorbell_never_goes_back():
    count = 3000
    size = DOORBELL_BYTES + StepRing.bytes_for(8, 4)
    with Region.create("ring", size) as region:
        wake_r, wake_w = os.pipe()
        room_r, room_w = os.pipe()
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, *map(str, (region.fd, size, wake_w, room_r, count))],
            pass_fds=(region.fd, wake_w, room_r),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        os.close(wake_w)
        os.close(room_r)
        bell, ring = Doorbell(region.buf), StepRing(region.buf[64:])
        got, last = [], 0
        while os.read(wake_r, 4096):
            value = bell.value
            assert value >= last
            last = value
            while (item := ring.consume()) is not None:
                got.append(item)
                os.write(room_w, b"x")
        os.close(wake_r)
        assert child.wait(30) == 0
        os.close(room_w)
        assert bell.value == 3 * count
        assert [item.first_value for item in got] == [3 * i + 1 for i in range(count)]
        assert all(
            item.entries == tuple(StepEntry(i * 7 + k, k, i + 1) for k in range(i % 5)) for i, item in enumerate(got)
        )
