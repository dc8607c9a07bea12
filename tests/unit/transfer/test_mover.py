"""The mover's thread: quick when there is something to do, asleep when there is not."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator

import pytest

from kvmesh.errors import Unavailable
from kvmesh.kv.region import Region
from kvmesh.kv.ring import Doorbell, StepEntry, StepRecord, StepRing
from kvmesh.transfer.mover import Mover
from kvmesh.transfer.sends import SendDone, SendDrained, SendEvent, SendTable
from kvmesh.transfer.transports.base import Completion
from kvmesh.transfer.watcher import RingWatcher
from test_sends import LAYOUT, Recorder, make


class Instant(Recorder):
    """Completes at the next poll."""

    def poll(self, budget: int) -> list[object]:  # type: ignore[override]
        self.ready += [Completion(write.context, write.nbytes) for write in self.writes]
        self.writes.clear()
        return super().poll(budget)  # type: ignore[return-value]


class Rig:
    def __init__(self) -> None:
        self.events: asyncio.Queue[SendEvent] = asyncio.Queue()
        self.faults: asyncio.Queue[str] = asyncio.Queue()
        self.broken: asyncio.Queue[str] = asyncio.Queue()
        self.mover = Mover(
            on_events=lambda events: [self.events.put_nowait(event) for event in events] and None,
            on_broken=lambda outbound, reason: self.broken.put_nowait(reason),
            on_engine_fault=self.faults.put_nowait,
        )
        self.ring_region = Region.create("ring", 4096)
        self.bell_region = Region.create("bell", 4096)
        self.ring = StepRing(self.ring_region.buf)
        self.bell = Doorbell(self.bell_region.buf)
        self.eventfd = os.eventfd(0, os.EFD_NONBLOCK)
        self.table = SendTable(LAYOUT)
        self.out = Instant()

    async def event(self) -> SendEvent:
        async with asyncio.timeout(60):
            return await self.events.get()

    def publish(self, first: int, transfer_id: int = 1) -> None:
        assert self.ring.publish(StepRecord(first, 4, (StepEntry(transfer_id, 0, 1),)))
        os.eventfd_write(self.eventfd, 1)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    rig.mover.start()
    await rig.mover.attach(rig.table, RingWatcher(rig.ring_region, rig.bell_region, os.dup(rig.eventfd)))
    await rig.mover.add_link(rig.out)
    yield rig
    await rig.mover.remove_link(rig.out, "test over")
    await rig.mover.detach()
    await rig.mover.stop()
    rig.ring.close()
    rig.bell.close()
    rig.ring_region.close()
    rig.bell_region.close()
    os.close(rig.eventfd)


async def test_pages_leave_with_the_doorbell(rig: Rig) -> None:
    for number in range(1, 6):
        await rig.mover.start_send(make(rig.out, [1], [2], transfer_id=number), 0)
        rig.publish(rig.bell.value + 1, number)
        for _ in range(4):
            rig.bell.ring()
        event = await rig.event()
        assert isinstance(event, SendDone)
        assert event.send.transfer_id == number


async def test_without_eventfd_the_ring_is_still_found(rig: Rig) -> None:
    await rig.mover.start_send(make(rig.out, [1], [2]), 0)
    assert rig.ring.publish(StepRecord(1, 4, (StepEntry(1, 0, 1),)))
    for _ in range(4):
        rig.bell.ring()
    assert isinstance(await rig.event(), SendDone)


async def test_idle_means_idle(rig: Rig) -> None:
    """It comes to a second of nothing: a few turns, next to no CPU time."""
    seen = []
    for _ in range(30):
        # The mover's own thread: others of this process may be busy.
        cpu = await rig.mover.call(time.thread_time)
        turns, began = rig.mover.turns, time.monotonic()
        await asyncio.sleep(1.0)
        seconds, turned = time.monotonic() - began, rig.mover.turns - turns
        seen.append((turned / seconds, (await rig.mover.call(time.thread_time) - cpu) / seconds))
        if seen[-1][0] <= 4 and seen[-1][1] < 0.05:
            return
    raise AssertionError(f"turns and CPU seconds a second: {seen}")


async def test_a_step_that_hangs_is_polled_ever_more_rarely(rig: Rig) -> None:
    await rig.mover.start_send(make(rig.out, [1], [2]), 0)
    rig.publish(1)
    rig.bell.ring()
    await asyncio.sleep(0.2)
    turns = rig.mover.turns
    await asyncio.sleep(0.5)
    assert rig.mover.turns - turns < 120
    for _ in range(3):
        rig.bell.ring()
    assert isinstance(await rig.event(), SendDone)


async def test_broken_link_is_told_once_and_its_sends_end(rig: Rig) -> None:
    await rig.mover.start_send(make(rig.out, [1, 2], [3, 4]), 0)
    await rig.mover.call(lambda: rig.out.fence("cable cut"))
    async with asyncio.timeout(60):
        assert await rig.broken.get() == "cable cut"
    event = await rig.event()
    assert isinstance(event, SendDrained)
    assert event.send.reason == "cable cut"
    await rig.mover.call(lambda: None)
    assert rig.broken.empty()


class Faulty(Instant):
    """Its poll fails while it is not fenced; then it completes with an error, as everything fenced does."""

    def poll(self, budget: int) -> list[object]:
        if not self.down:
            raise IndexError("pop from an empty deque")
        self.ready += [Completion(write.context, 0, self.down) for write in self.writes]
        self.writes.clear()
        return super().poll(budget)


async def test_a_link_with_a_fault_is_given_up_and_keeps_no_other_from_its_turn(rig: Rig) -> None:
    # Behind it in every turn: the good one.
    await rig.mover.remove_link(rig.out, "to the end of the line")
    bad, rig.out = Faulty(), Instant()
    await rig.mover.add_link(bad)
    await rig.mover.add_link(rig.out)
    await rig.mover.start_send(make(rig.out, [1], [2], transfer_id=1), 1)
    event = await rig.event()
    assert isinstance(event, SendDone)
    async with asyncio.timeout(60):
        assert await rig.broken.get() == "IndexError: pop from an empty deque"
    await rig.mover.remove_link(bad, "over")


async def test_a_corrupt_ring_ends_the_engines_transfers(rig: Rig) -> None:
    await rig.mover.start_send(make(rig.out, [1], [2]), 0)
    words = memoryview(rig.ring_region.buf).cast("B").cast("Q")
    words[0] = 1 << 60
    words.release()
    os.eventfd_write(rig.eventfd, 1)
    async with asyncio.timeout(60):
        assert "corrupt" in await rig.faults.get()
    assert isinstance(await rig.event(), SendDrained)
    # The thread lives on.
    assert await rig.mover.call(lambda: 7) == 7


async def test_what_a_command_raises_comes_back(rig: Rig) -> None:
    with pytest.raises(ZeroDivisionError):
        await rig.mover.call(lambda: 1 // 0)
    assert await rig.mover.call(lambda: 7) == 7


async def test_no_transfer_starts_on_a_link_that_is_gone(rig: Rig) -> None:
    gone = Instant()
    await rig.mover.add_link(gone)
    await rig.mover.remove_link(gone, "over")
    with pytest.raises(Unavailable, match="the link is gone"):
        await rig.mover.start_send(make(gone, [1], [2]), 1)
    assert len(rig.table) == 0
