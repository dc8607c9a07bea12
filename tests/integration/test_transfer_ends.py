"""However a transfer ends, both sides get their pages back, and the sidecars serve on."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvmesh.cli.ports import free_port
from kvmesh.errors import FailedPrecondition, KvmeshError, TransferFailed
from kvmesh.transfer.handles import SlotHandle, TransferHandle
from kvmesh.transfer.link import SidecarLink
from transfer_kit import Engine, SidecarProcess, make_layout, soon

# A lease that a process outlives which is merely kept waiting for a processor.
FAST = ("--heartbeat-s=0.2", "--lease-s=2.5")
SRC, DST = [5, 6, 7, 20, 3, 9], [40, 41, 2, 30, 31, 32]


class Pair:
    """Two sidecars with an engine each."""

    def __init__(self, a: SidecarProcess, b: SidecarProcess, source: Engine, target: Engine) -> None:
        self.a = a
        self.b = b
        self.source = source
        self.target = target

    async def begin(self, pages: int = 6, ready: int = 0) -> tuple[SlotHandle, TransferHandle]:
        slot = await self.target.open(DST[:pages])
        descriptor = self.target.describe(slot, DST[:pages])
        transfer = await soon(self.source.client.start_transfer(descriptor, {"main": SRC[:pages]}, ready_pages=ready))
        return slot, transfer

    async def half(self, slot: SlotHandle, transfer: TransferHandle) -> None:
        """Some layers of some pages are over there; the rest is announced or not even that."""
        self.target.pages[1, DST[0]] = ~self.source.pages[1, SRC[0]]
        before = self.target.pages[1, DST[0]].copy()
        self.source.publish(transfer, 0, 3)
        self.source.doorbell.ring()
        self.source.doorbell.ring()
        async with asyncio.timeout(60):
            while (self.target.pages[1, DST[0]] == before).all():
                await asyncio.sleep(0.002)

    async def works(self) -> None:
        """A whole transfer, byte for byte."""
        self.source.fill(11)
        slot, transfer = await self.begin()
        self.source.step(transfer, 0, 6)
        await soon(slot.completed)
        await soon(transfer.done)
        np.testing.assert_array_equal(self.target.pages[:, DST], self.source.pages[:, SRC])


async def fails(handle: SlotHandle, match: str | None = None) -> None:
    with pytest.raises(TransferFailed, match=match):
        await soon(handle.completed)


@pytest.fixture(scope="module", params=["shm", "tcp"])
def processes(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[list[SidecarProcess]]:
    """Sidecars take seconds to start and one engine after the other: the tests share them, and restart the dead."""
    folder = tmp_path_factory.mktemp("sidecars")
    made = [SidecarProcess(name, folder, f"--transports={request.param}", *FAST) for name in ("src", "dst")]
    yield made
    for process in made:
        process.stop()


@pytest.fixture
async def pair(processes: list[SidecarProcess]) -> AsyncIterator[Pair]:
    a, b = processes
    await asyncio.gather(*(process.start() for process in processes if not process.alive))
    source = await Engine("p", a, make_layout()).connect()
    target = await Engine("d", b, make_layout()).connect()
    source.fill(1)
    yield Pair(a, b, source, target)
    await source.close()
    await target.close()


async def test_cancel_at_destination_at_each_stage(pair: Pair) -> None:
    slot = await pair.target.open(DST)
    await pair.target.client.close_slot(slot, "not wanted")
    await fails(slot, "not wanted")
    await soon(slot.drained)
    # Its descriptor is worth nothing from now on.
    with pytest.raises(TransferFailed, match="NOT_FOUND"):
        await pair.source.client.start_transfer(pair.target.describe(slot, DST), {"main": SRC}, ready_pages=0)

    slot, transfer = await pair.begin()
    await pair.target.client.close_slot(slot, "bound")
    await soon(slot.drained)
    with pytest.raises(TransferFailed, match="aborted by the destination"):
        await soon(transfer.done)

    slot, transfer = await pair.begin()
    await pair.half(slot, transfer)
    await pair.target.client.close_slot(slot, "half way")
    await soon(slot.drained)
    # Over TCP what was on its way may say so before the message does.
    with pytest.raises(TransferFailed, match=r"half way|its generation is over"):
        await soon(transfer.done)
    # What the engine still says about it is stale and changes nothing.
    pair.target.pages[:, DST] = 7
    while pair.source.doorbell.value % 4:
        pair.source.doorbell.ring()
    pair.source.step(transfer, 3, 3)
    pair.source.client.send_pages(transfer, 0, 6)

    slot, transfer = await pair.begin(2, ready=2)
    await soon(slot.completed)
    await pair.target.client.close_slot(slot, "too late")
    await soon(slot.drained)
    assert await soon(transfer.done) == slot.expected_bytes
    assert (pair.target.pages[:, DST[2:]] == 7).all()

    await pair.works()
    assert (await pair.b.status()).slots_open == 0


async def test_cancel_at_source_at_each_stage(pair: Pair) -> None:
    slot, transfer = await pair.begin()
    await pair.source.client.cancel_transfer(transfer, "given up")
    with pytest.raises(TransferFailed, match="given up"):
        await soon(transfer.done)
    await fails(slot, "given up")
    await soon(slot.drained)

    slot, transfer = await pair.begin()
    await pair.half(slot, transfer)
    await pair.source.client.cancel_transfer(transfer, "half way")
    with pytest.raises(TransferFailed, match="half way"):
        await soon(transfer.done)
    await fails(slot, "half way")
    await soon(slot.drained)
    while pair.source.doorbell.value % 4:
        pair.source.doorbell.ring()

    slot, transfer = await pair.begin(2, ready=2)
    await soon(transfer.done)
    await pair.source.client.cancel_transfer(transfer, "too late")
    await soon(slot.completed)
    await soon(slot.drained)
    await pair.works()


async def test_expiry_fails_and_drains(pair: Pair) -> None:
    # A slot may have run out before its writer is there, on a machine that is busy enough: the next lives longer.
    opened = 0
    for ttl_s in (0.2, 2.0, 20.0):
        opened += 1
        slot = await pair.target.open(DST, ttl_s=ttl_s)
        starting = pair.source.client.start_transfer(pair.target.describe(slot, DST), {"main": SRC}, ready_pages=0)
        try:
            transfer = await soon(starting)
            break
        except KvmeshError:
            await fails(slot, f"not complete within {ttl_s:g} s")
    await fails(slot, f"not complete within {ttl_s:g} s")
    await soon(slot.drained)
    with pytest.raises(TransferFailed):
        await soon(transfer.done)
    assert (await pair.b.status()).counters.slots_expired == opened
    await pair.works()


async def test_page_named_twice_fails_the_generation(pair: Pair) -> None:
    slot, transfer = await pair.begin(ready=2)
    pair.source.client.send_pages(transfer, 1, 1)
    with pytest.raises(TransferFailed, match="named before"):
        await soon(transfer.done)
    await fails(slot, "named before")
    await soon(slot.drained)
    await pair.works()


async def test_writers_sidecar_is_killed(pair: Pair) -> None:
    slot, transfer = await pair.begin()
    await pair.half(slot, transfer)
    pair.a.kill()
    await fails(slot)
    await soon(slot.drained)
    with pytest.raises(TransferFailed):
        await soon(transfer.done)
    await soon(pair.source.lost.wait())
    await pair.a.start()
    await pair.source.connect()
    while pair.source.doorbell.value % 4:
        pair.source.doorbell.ring()
    await pair.works()


async def test_destinations_sidecar_is_killed(pair: Pair, tmp_path: Path) -> None:
    target = pair.target
    await target.client.close()
    link = SidecarLink(
        pair.b.socket,
        engine_id="d",
        incarnation=2,
        layout=target.layout,
        regions=target.regions,
        doorbell=target.doorbell_region,
        ring=target.ring_region,
    )
    link.start()
    target.client = await link.wait_connected(60)
    slot, transfer = await pair.begin()
    await pair.half(slot, transfer)
    old = target.client
    pair.b.kill()
    with pytest.raises(TransferFailed):
        await soon(transfer.done)
    await fails(slot, "sidecar is lost")
    shm = transfer.transport == "shm"
    if shm:
        # The writer lives and nobody has heard that it let go: the pages stay exposed.
        await asyncio.sleep(0.3)
        assert not slot.drained.done()
    await pair.b.start()
    target.client = await link.wait_connected(60)
    assert target.client is not old
    await soon(slot.drained)
    # The dead sidecar's descriptor is refused by its successor.
    stale = target.describe(slot, DST)
    stale.sidecar_incarnation = old.sidecar_incarnation
    with pytest.raises(KvmeshError, match="successor"):
        await pair.source.client.start_transfer(stale, {"main": SRC}, ready_pages=0)
    while pair.source.doorbell.value % 4:
        pair.source.doorbell.ring()
    await pair.works()
    await link.close()


async def test_successor_at_another_address_hears_of_unmapped_memory(pair: Pair) -> None:
    target = pair.target
    await target.client.close()
    link = SidecarLink(
        pair.b.socket,
        engine_id="d",
        incarnation=3,
        layout=target.layout,
        regions=target.regions,
        doorbell=target.doorbell_region,
        ring=target.ring_region,
    )
    link.start()
    target.client = await link.wait_connected(60)
    slot, transfer = await pair.begin()
    pair.b.kill()
    with pytest.raises(TransferFailed):
        await soon(transfer.done)
    await fails(slot)
    pair.b.port = free_port()
    await pair.b.start()
    target.client = await link.wait_connected(60)
    if transfer.transport == "shm":
        assert not slot.drained.done()
    # The next transfer brings the writer to the new address, and with it the word that the old memory is let go of.
    await pair.works()
    await soon(slot.drained)
    await link.close()


async def test_stopped_writer_is_fenced_only_when_it_lets_go(pair: Pair) -> None:
    slot, transfer = await pair.begin()
    await pair.half(slot, transfer)
    pair.a.kill(signal.SIGSTOP)
    await fails(slot, "silent")
    if transfer.transport == "shm":
        await asyncio.sleep(0.5)
        assert not slot.drained.done(), "pages were given back while a stopped process could still write them"
        assert [link.state for link in (await pair.b.status()).links] == ["fencing"]
    pair.a.kill(signal.SIGCONT)
    await soon(slot.drained)
    with pytest.raises(TransferFailed):
        await soon(transfer.done)
    assert (await pair.b.status()).counters.heartbeat_failures >= 1
    while pair.source.doorbell.value % 4:
        pair.source.doorbell.ring()
    await pair.works()


async def test_stopped_destination_fails_the_transfer(pair: Pair) -> None:
    slot, transfer = await pair.begin()
    await pair.half(slot, transfer)
    pair.b.kill(signal.SIGSTOP)
    with pytest.raises(TransferFailed):
        await soon(transfer.done)
    pair.b.kill(signal.SIGCONT)
    await fails(slot)
    await soon(slot.drained)
    while pair.source.doorbell.value % 4:
        pair.source.doorbell.ring()
    await pair.works()


async def test_engines_end_is_the_end_of_its_life(pair: Pair) -> None:
    slot, transfer = await pair.begin()
    await pair.half(slot, transfer)
    await pair.target.client.close()
    with pytest.raises(TransferFailed):
        await soon(transfer.done)
    while pair.source.doorbell.value % 4:
        pair.source.doorbell.ring()
    pair.target.incarnation = 2
    await pair.target.connect()
    await pair.works()

    slot, transfer = await pair.begin()
    await pair.half(slot, transfer)
    await pair.source.client.close()
    await fails(slot)
    await soon(slot.drained)
    while pair.source.doorbell.value % 4:
        pair.source.doorbell.ring()
    pair.source.incarnation = 2
    await pair.source.connect()
    await pair.works()


async def test_second_engine_is_refused_while_the_first_lives(pair: Pair) -> None:
    other = Engine("other", pair.b, make_layout())
    with pytest.raises(FailedPrecondition, match="engine 'd' is registered here"):
        await other.connect()
    await other.close()
    await pair.works()


async def test_sigterm_lets_transfers_end(pair: Pair) -> None:
    slot, transfer = await pair.begin()
    await pair.half(slot, transfer)
    pair.a.kill(signal.SIGTERM)
    await asyncio.sleep(0.2)
    pair.source.doorbell.ring()
    pair.source.doorbell.ring()
    pair.source.client.send_pages(transfer, 3, 3)
    await soon(slot.completed)
    assert await soon(transfer.done) == slot.expected_bytes
    await soon(pair.source.lost.wait())
    assert await asyncio.to_thread(pair.a.wait) == 0


async def test_many_transfers_leave_nothing_behind(pair: Pair) -> None:
    async def round_() -> None:
        slot, transfer = await pair.begin()
        pair.source.step(transfer, 0, 6)
        await soon(slot.completed)
        await soon(transfer.done)

    for _ in range(20):
        await round_()
    fds = pair.a.fds(), pair.b.fds()
    rss = pair.a.rss(), pair.b.rss()
    for _ in range(200):
        await round_()
    # gRPC may open one of its own; a leak would be hundreds.
    assert pair.a.fds() <= fds[0] + 3
    assert pair.b.fds() <= fds[1] + 3
    assert pair.a.rss() - rss[0] < 8 << 20
    assert pair.b.rss() - rss[1] < 8 << 20
    assert (await pair.b.status()).counters.slots_completed == 220
