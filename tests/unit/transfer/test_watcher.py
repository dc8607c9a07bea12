"""The close look at the doorbell: it sees every ring, burns no more than it may, and never where no step runs."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterator

import pytest

from kvmesh.errors import InvalidArgument
from kvmesh.kv.region import Region
from kvmesh.kv.ring import Doorbell, StepEntry, StepRecord, StepRing
from kvmesh.transfer.native import moves
from kvmesh.transfer.poller import Poller
from kvmesh.transfer.sends import SendTable
from kvmesh.transfer.watcher import Patience, RingWatcher
from rank_world import mappings
from test_sends import LAYOUT, Recorder, make

pytestmark = pytest.mark.skipif(moves.library() is None, reason="nothing compiles here")
PATIENCE = Patience(spin_s=0.01, yield_s=0.05)


class Rig:
    def __init__(self, patience: Patience, ranks: int = 1) -> None:
        self.ring_region = Region.create("ring", 4096)
        self.regions = [Region.create("bell", 4096) for _ in range(ranks)]
        self.ring = StepRing(self.ring_region.buf)
        self.bells = [Doorbell(region.buf) for region in self.regions]
        eventfd = os.eventfd(0, os.EFD_NONBLOCK)
        self.watcher = RingWatcher(self.ring_region, self.regions, eventfd, patience)
        self.table = SendTable(LAYOUT)
        self.out = Recorder()
        self.poller = Poller()

    def begin(self) -> None:
        self.table.start(make(self.out, [1], [2]), 0)
        assert self.ring.publish(StepRecord(1, 4, (StepEntry(1, 0, 1),)))
        self.watcher.feed(self.table)

    def due(self) -> None:
        """Make the next ring due now, and for many minutes: layers take long, and this one has taken that long."""
        self.watcher._layer_s = 1000.0
        self.watcher._changed = time.monotonic() - 1000.0

    def wait(self, seconds: float) -> list[int]:
        return self.watcher.wait(self.table, self.poller, seconds)

    def close(self) -> None:
        self.watcher.close()
        self.ring.close()
        for bell in self.bells:
            bell.close()
        for region in (*self.regions, self.ring_region):
            region.close()


@pytest.fixture
def rigs() -> Iterator[list[Rig]]:
    made: list[Rig] = []
    yield made
    for rig in made:
        rig.close()


def test_a_ring_ends_the_look(rigs: list[Rig]) -> None:
    rig = Rig(Patience(0.0, 0.0))
    rigs.append(rig)
    rig.begin()
    rig.due()
    ringer = threading.Timer(0.05, rig.bells[0].ring)
    ringer.start()
    # By the bell alone: neither a descriptor nor the time ends it before.
    began = time.monotonic()
    assert rig.wait(60.0) == []
    assert time.monotonic() - began < 50.0
    ringer.join()
    assert rig.watcher.feed(rig.table)
    assert len(rig.out.writes) == 1


def test_a_descriptor_ends_the_look(rigs: list[Rig]) -> None:
    rig = Rig(PATIENCE)
    rigs.append(rig)
    rig.begin()
    rig.due()
    event = os.eventfd(1, os.EFD_NONBLOCK)
    rig.poller.set(event, select.POLLIN)
    assert rig.wait(60.0) == [event]
    # Also while the layer is far from due.
    rig.watcher._changed = time.monotonic()
    assert rig.wait(60.0) == [event]
    os.close(event)


@pytest.mark.parametrize("age", [-1000.0, 10_000.0])
def test_no_close_look_where_nothing_is_due(rigs: list[Rig], age: float) -> None:
    """Just rung, and late: neither may burn a minute."""
    rig = Rig(Patience(60.0, 0.0))
    rigs.append(rig)
    rig.begin()
    rig.due()
    rig.watcher._changed = time.monotonic() - age
    cpu = time.thread_time()
    for _ in range(5):
        assert rig.wait(0.02) == []
    assert time.thread_time() - cpu < 1.0


def test_the_look_is_bounded(rigs: list[Rig]) -> None:
    rig = Rig(Patience(0.05, 0.05))
    rigs.append(rig)
    rig.begin()
    rig.due()
    cpu = time.thread_time()
    assert rig.wait(1.0) == []
    # The second without a ring was slept through but for a tenth, and looks every 50 us.
    assert time.thread_time() - cpu < 0.8


def test_ranks_ring_for_themselves_and_a_layer_leaves_at_the_least(rigs: list[Rig]) -> None:
    rig = Rig(PATIENCE, ranks=3)
    rigs.append(rig)
    rig.begin()
    for bell in rig.bells[:2]:
        bell.ring()
        bell.ring()
    assert not rig.watcher.feed(rig.table)
    rig.due()
    ringer = threading.Timer(0.05, rig.bells[2].ring)
    ringer.start()
    began = time.monotonic()
    assert rig.wait(60.0) == []
    assert time.monotonic() - began < 50.0
    ringer.join()
    assert rig.watcher.feed(rig.table)
    assert len(rig.out.writes) == 1


def test_auto_goes_by_cores() -> None:
    assert Patience.named("auto") in (Patience.named("sleep"), Patience.named("spin"))
    assert Patience.named("sleep") == (0.0, 0.0)


def test_memory_that_is_no_doorbell_leaves_nothing_mapped() -> None:
    """What was looked at before it is let go of at once, also while its error is held."""
    with Region.create("ring", 4096) as ring, Region.create("bell", 4096) as bell, Region.create("small", 8) as small:
        mapped = mappings()
        with pytest.raises(InvalidArgument, match="doorbell needs 64 bytes") as caught:
            RingWatcher(ring, [bell, small], 0)
        ring.close()
        bell.close()
        assert mappings() == mapped - 2
        assert caught.value
