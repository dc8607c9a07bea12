"""Pairs of engine and sidecar in a folder, with real sidecars: who gets whom, and who finds a partner again."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from kvmesh.errors import KvmeshError, TransferFailed, Unavailable
from kvmesh.transfer.client import SidecarClient
from kvmesh.transfer.folder import sockets
from kvmesh.transfer.link import SidecarLink
from transfer_kit import Engine, SidecarProcess, make_layout, soon

DST = [30, 31, 8, 9]
SRC = [3, 4, 5, 40]
LEASE = ("--heartbeat-s=0.2", "--lease-s=2")


class Folder:
    """Sidecars that share a folder, and engines that look for one of them there."""

    def __init__(self, path: Path) -> None:
        self.path = path / "sockets"
        self.path.mkdir()
        self._logs = path
        self.sidecars: list[SidecarProcess] = []
        self.links: list[SidecarLink] = []
        self.engines: list[Engine] = []

    async def sidecar(self, name: str) -> SidecarProcess:
        process = SidecarProcess(name, self._logs, f"--engine-socket={self.path}", "--log-level=debug", *LEASE)
        self.sidecars.append(process)
        await process.start()
        return process

    def engine(self, name: str, timeout_s: float = 60.0) -> tuple[Engine, SidecarLink]:
        """An engine's memory and its link, started."""
        engine = Engine(name, self.sidecars[0], make_layout())
        self.engines.append(engine)
        link = SidecarLink(
            self.path,
            engine_id=name,
            incarnation=1,
            layout=engine.layout,
            regions=engine.regions,
            doorbell=engine.doorbell_region,
            ring=engine.ring_region,
            connect_timeout_s=timeout_s,
        )
        self.links.append(link)
        link.start()
        return engine, link

    def process_of(self, client: SidecarClient) -> SidecarProcess:
        return next(process for process in self.sidecars if process.name == client.sidecar_id)


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[Folder]:
    made = Folder(tmp_path)
    yield made
    for link in made.links:
        await link.close()
    for engine in made.engines:
        await engine.close()
    for process in made.sidecars:
        process.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


async def test_pairs_form_and_form_again(folder: Folder) -> None:
    await asyncio.gather(*(folder.sidecar(name) for name in ("s0", "s1")))
    assert len(sockets(folder.path)) == 2
    # Together, so that they ask at the same time.
    links = [folder.engine(f"e{n}")[1] for n in range(2)]
    first, second = [await link.wait_connected(60) for link in links]
    assert {first.sidecar_id, second.sidecar_id} == {"s0", "s1"}

    # One more than there are sidecars waits, and is told of each why.
    third = folder.engine("e2")[1]
    await until(lambda: third.error.count("is registered here") == 2)
    with pytest.raises(Unavailable, match="no free sidecar"):
        await third.wait_connected(0.1)

    # An engine's place is free when it has gone.
    await links[0].close()
    assert (await third.wait_connected(60)).sidecar_id == first.sidecar_id

    # A killed sidecar's engine waits for another one; the other pair is not touched.
    killed = folder.process_of(second)
    killed.kill()
    await until(lambda: links[1].client is None)
    await folder.sidecar("s2")
    again = await links[1].wait_connected(60)
    assert again.sidecar_id == "s2"
    assert third.client is not None
    assert third.client.connected
    # Nothing is left of the dead one: the engine that looked for a new one has met it, or meets it now.
    fourth = folder.engine("e3")[1]
    await until(lambda: len(sockets(folder.path)) == 2)
    assert len(list(folder.path.iterdir())) == 4, "two sidecars, each with the socket of shm beside its own"
    await fourth.close()


async def test_a_sidecar_that_stands_still_is_passed_over(folder: Folder) -> None:
    stopped = await folder.sidecar("s0")
    stopped.kill(signal.SIGSTOP)
    _, link = folder.engine("e0", timeout_s=0.5)
    await until(lambda: "within" in link.error)
    await folder.sidecar("s1")
    assert (await link.wait_connected(60)).sidecar_id == "s1"
    # It is not dead, so it keeps its name.
    assert len(sockets(folder.path)) == 2


async def test_pages_come_back_through_another_sidecar(folder: Folder) -> None:
    """Decode's sidecar dies in the middle of a transfer. Its engine registers with one at another address; prefill's
    sidecar, whose word the pages wait for, finds it there, though the old address has another engine by now."""
    await asyncio.gather(*(folder.sidecar(name) for name in ("s0", "s1")))
    source, source_link = folder.engine("p")
    target, target_link = folder.engine("d")
    source.client = await source_link.wait_connected(60)
    target.client = await target_link.wait_connected(60)
    source.fill(7)
    slot = await target.open(DST)
    transfer = await source.client.start_transfer(target.describe(slot, DST), {"main": SRC}, ready_pages=0)
    source.step(transfer, 0, 2)
    dead = folder.process_of(target.client)
    dead.kill()
    with pytest.raises(TransferFailed):
        await soon(transfer.done)
    with pytest.raises(TransferFailed):
        await soon(slot.completed)
    assert not slot.drained.done()
    await folder.sidecar("s2")
    target.client = await target_link.wait_connected(60)
    assert target.client.sidecar_id == "s2"
    # A container that starts again has its old address, and its sidecar may get another engine.
    successor = SidecarProcess(dead.name, dead.folder, *dead.flags)
    successor.port = dead.port
    folder.sidecars.append(successor)
    await successor.start()
    _, other = folder.engine("other")
    await other.wait_connected(60)
    # The word has been said there once, in vain.
    writer = folder.process_of(source.client)
    await until(lambda: "engine 'other' is registered here" in writer.log())
    assert not slot.drained.done()
    while source.doorbell.value % 4:
        source.doorbell.ring()
    again = await target.open(DST[:2])
    moved = await source.client.start_transfer(target.describe(again, DST[:2]), {"main": SRC[:2]}, ready_pages=2)
    await soon(moved.done)
    assert (await soon(again.completed)) is not None
    await soon(slot.drained)
    assert (target.pages[:, DST[:2]] == source.pages[:, SRC[:2]]).all()
    with contextlib.suppress(KvmeshError):
        await target.client.close_slot(again, "done")
