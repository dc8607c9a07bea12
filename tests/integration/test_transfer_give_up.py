"""A start that is given up before its answer has one at once, whatever the destination does; pages are never in use
after it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvmesh.errors import Cancelled, TransferFailed
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.proto.v1 import kvtransfer_pb2_grpc
from kvmesh.rpc import MeshChannel
from kvmesh.transfer.mover import Mover
from kvmesh.transfer.sends import Send
from kvmesh.transfer.sidecar import Sidecar, SidecarOptions
from kvmesh.transfer.sidecar.incoming import IncomingLinks
from services.kvtransfer.service import KvTransferServicer
from transfer_kit import Engine, make_layout, soon

SRC, DST = [5, 6, 7], [40, 41, 2]


class Here:
    """A sidecar in this process that waits for its peers much longer than any test."""

    def __init__(self, name: str, folder: Path) -> None:
        self.socket = folder / f"{name}.sock"
        options = SidecarOptions(
            name,
            self.socket,
            lambda address: MeshChannel(grpc.aio.insecure_channel(address), address, None, 600.0),
            transports=("tcp",),
            connect_timeout_s=600.0,
            lease_s=600.0,
        )
        self.sidecar = Sidecar(options, on_engine=lambda present: None)
        self.server = grpc.aio.server()

    async def start(self) -> Here:
        await self.sidecar.start()
        kvtransfer_pb2_grpc.add_KvTransferServicer_to_server(KvTransferServicer(self.sidecar), self.server)
        self.sidecar.control_address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        await self.server.start()
        await self.sidecar.listen()
        return self

    async def close(self) -> None:
        await self.sidecar.close()
        await self.server.stop(0)


class World:
    def __init__(self, here: Here, there: Here, source: Engine, target: Engine) -> None:
        self.here, self.there, self.source, self.target = here, there, source, target

    def start(self, descriptor: pb.Descriptor) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self.source.client.start_transfer(descriptor, {"main": SRC}, ready_pages=0))

    async def move(self) -> None:
        """A transfer that goes well."""
        self.target.pages[:, DST] = 0
        slot = await self.target.open(DST)
        transfer = await soon(self.start(self.target.describe(slot, DST)))
        self.source.step(transfer, 0, 3)
        await soon(slot.completed)
        await soon(transfer.done)
        np.testing.assert_array_equal(self.target.pages[:, DST], self.source.pages[:, SRC])


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    here, there = await Here("src", tmp_path).start(), await Here("dst", tmp_path).start()
    source = await Engine("p", here, make_layout()).connect()  # type: ignore[arg-type]
    target = await Engine("d", there, make_layout(num_pages=48)).connect()  # type: ignore[arg-type]
    source.fill(1)
    yield World(here, there, source, target)
    await target.close()
    await source.close()
    await here.close()
    await there.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_destination_that_does_not_answer_at_all(world: World) -> None:
    slot = await world.target.open(DST)
    descriptor = world.target.describe(slot, DST)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(1)
        descriptor.control_address = f"127.0.0.1:{silent.getsockname()[1]}"
        start = world.start(descriptor)
        await until(lambda: world.here.sidecar.outgoing.all)
        assert not start.done()
        world.source.client.give_up_start(descriptor, "not wanted any more")
        with pytest.raises(Cancelled, match="not wanted any more"):
            await soon(start)
        assert world.here.sidecar.session is not None
        assert world.here.sidecar.session.idle  # type: ignore[attr-defined]
        # Once more is nothing.
        world.source.client.give_up_start(descriptor, "again")
        await world.move()


async def test_a_destination_that_does_not_answer_the_bind(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.move()
    heard: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(IncomingLinks, "_bind", lambda self, link, bind: heard.append(bind.slot))
        slot = await world.target.open(DST)
        descriptor = world.target.describe(slot, DST)
        start = world.start(descriptor)
        await until(lambda: heard == [slot.slot])
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await soon(start)
        await until(lambda: world.here.sidecar.session.idle)  # type: ignore[union-attr]
    await world.move()
    (link,) = world.here.sidecar.outgoing.all
    assert link.transfers == 2, "the same link goes on"
    await world.target.client.close_slot(slot, "over")
    await soon(slot.drained)


async def test_one_that_has_begun_is_accepted_and_then_cancelled(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()
    start_send = Mover.start_send

    async def slow(self: Mover, send: Send, ready_pages: int) -> None:
        await start_send(self, send, ready_pages)
        begun.set()
        await go_on.wait()

    slot = await world.target.open(DST)
    descriptor = world.target.describe(slot, DST)
    with monkeypatch.context() as patch:
        patch.setattr(Mover, "start_send", slow)
        start = world.start(descriptor)
        await soon(begun.wait())
        world.source.client.give_up_start(descriptor, "not wanted any more")
        # The sidecar has heard it, and says nothing before it knows that nobody reads the pages.
        session: Any = world.here.sidecar.session
        await until(lambda: any(item.given_up for item in session._starts.values()))
        assert not start.done()
        go_on.set()
        transfer = await soon(start)
    with pytest.raises(TransferFailed, match="not wanted any more"):
        await soon(transfer.done)
    with pytest.raises(TransferFailed):
        await soon(slot.completed)
    await soon(slot.drained)
    await world.move()


async def test_a_call_that_is_not_there_is_nothing(world: World) -> None:
    world.source.client._send(pb.EngineMessage(cancel_start=pb.CancelStart(call_id=12345)))
    await world.move()


@pytest.mark.parametrize("turns", range(6))
async def test_one_that_the_sidecar_reads_together_with_its_end(world: World, turns: int) -> None:
    """Both in one read: the start has a task by then, which has not had its first turn."""
    for _ in range(20):
        slot = await world.target.open(DST)
        descriptor = world.target.describe(slot, DST)
        start = world.start(descriptor)
        for _ in range(1 + turns):
            await asyncio.sleep(0)
        world.source.client.give_up_start(descriptor, "not wanted any more")
        try:
            transfer = await soon(start)
        except Cancelled:
            pass
        else:
            await world.source.client.cancel_transfer(transfer, "not wanted any more")
            with pytest.raises(TransferFailed, match="not wanted any more"):
                await soon(transfer.done)
        session: Any = world.here.sidecar.session
        await until(lambda: session.idle and not session._starts)  # noqa: B023
        await world.target.client.close_slot(slot, "over")
        await soon(slot.drained)
    await world.move()
