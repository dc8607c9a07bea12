"""The RDMA transports in sidecars: over fakes of pyverbs in this process, and where there is no device."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvmesh.errors import KvmeshError, TransferFailed
from kvmesh.kv.region import DmaBuf
from kvmesh.proto.v1 import kvtransfer_pb2_grpc
from kvmesh.rpc import MeshChannel
from kvmesh.transfer.sidecar import Sidecar, SidecarOptions
from kvmesh.transfer.sidecar import sidecar as sidecar_module
from kvmesh.transfer.transports.efa import EfaOptions, EfaTransport
from kvmesh.transfer.transports.efa.stub import UNRESPONSIVE, EfaStubNetwork
from kvmesh.transfer.transports.verbs import VerbsOptions, VerbsTransport
from kvmesh.transfer.transports.verbs.shim import load
from kvmesh.transfer.transports.verbs.stub import RETRY_EXCEEDED, StubNetwork
from services.kvtransfer.service import KvTransferServicer
from transfer_kit import Engine, SidecarProcess, make_layout, sidecars, soon

SRC, DST = [5, 6, 7, 20, 3, 9], [40, 41, 2, 30, 31, 32]


class Here:
    """A sidecar in the test's own process; to an Engine it looks like a SidecarProcess."""

    def __init__(self, name: str, folder: Path, transport: str) -> None:
        self.socket = folder / f"{name}.sock"
        options = SidecarOptions(
            name,
            self.socket,
            lambda address: MeshChannel(grpc.aio.insecure_channel(address), address, None, 5.0),
            transports=(transport,),
            heartbeat_s=0.2,
            lease_s=2.0,
        )
        self.sidecar = Sidecar(options, on_engine=lambda present: None)
        self.server = grpc.aio.server()

    async def start(self) -> Here:
        await self.sidecar.start()
        kvtransfer_pb2_grpc.add_KvTransferServicer_to_server(KvTransferServicer(self.sidecar), self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        self.sidecar.control_address = f"127.0.0.1:{port}"
        await self.sidecar.listen()
        return self

    async def close(self) -> None:
        await self.sidecar.close()
        await self.server.stop(0)


@pytest.fixture(params=["verbs", "efa"])
async def network(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[StubNetwork | EfaStubNetwork]:
    made = StubNetwork() if request.param == "verbs" else EfaStubNetwork()

    def make(name: str, options: Any) -> VerbsTransport | EfaTransport:
        assert name == request.param
        if isinstance(made, StubNetwork):
            return VerbsTransport(VerbsOptions(polling="events", qps=2, receives=4, run_rows=2), made.api())
        return EfaTransport(EfaOptions(polling="events", receives=5, send_depth=8, batch=2), made.api())

    monkeypatch.setattr(sidecar_module, "make_transport", make)
    yield made
    assert made.violations == []
    assert made.open_objects == 0


@pytest.fixture
async def pair(tmp_path: Path, network: StubNetwork | EfaStubNetwork) -> AsyncIterator[tuple[Here, Here]]:
    name = "verbs" if isinstance(network, StubNetwork) else "efa"
    a, b = await Here("src", tmp_path, name).start(), await Here("dst", tmp_path, name).start()
    yield a, b
    network.hold = False
    await a.close()
    await b.close()


async def test_layer_by_layer_failure_and_again(pair: tuple[Here, Here], network: StubNetwork | EfaStubNetwork) -> None:
    a, b = pair
    name, failure, device = (
        ("verbs", RETRY_EXCEEDED, "stub0 port 1 gid 2")
        if isinstance(network, StubNetwork)
        else ("efa", UNRESPONSIVE, "efa0 port 1 gid 0")
    )
    layout = make_layout()
    source = await Engine("p", a, layout).connect()  # type: ignore[arg-type]
    target = await Engine("d", b, make_layout(num_pages=48)).connect()  # type: ignore[arg-type]
    source.fill(1)
    want = target.pages.copy()
    want[:, DST] = source.pages[:, SRC]

    async def move() -> None:
        slot = await target.open(DST)
        transfer = await soon(source.client.start_transfer(target.describe(slot, DST), {"main": SRC}, ready_pages=2))
        assert transfer.transport == name
        source.step(transfer, 2, 3)
        source.client.send_pages(transfer, 5, 1)
        assert (await soon(slot.completed)).bytes == slot.expected_bytes
        assert await soon(transfer.done) == slot.expected_bytes
        np.testing.assert_array_equal(target.pages, want)

    await move()
    # A request fails: the generation fails on both sides, its pages come back, and the next link is a new one.
    network.fail_status, network.fail_after = failure, 5
    slot = await target.open(DST)
    transfer = await soon(source.client.start_transfer(target.describe(slot, DST), {"main": SRC}, ready_pages=6))
    # It may be one of the writer's, or the one that gives credit back.
    with pytest.raises(TransferFailed, match=f"status {failure}|the destination is gone"):
        await soon(transfer.done)
    with pytest.raises(TransferFailed):
        await soon(slot.completed)
    await soon(slot.drained)
    target.pages[:, DST] = 0
    await move()
    # Aborted half way: drained on the same link.
    network.hold = True
    slot = await target.open(DST)
    transfer = await soon(source.client.start_transfer(target.describe(slot, DST), {"main": SRC}, ready_pages=6))
    await target.client.close_slot(slot, "not wanted")
    with pytest.raises(TransferFailed, match="not wanted"):
        await soon(slot.completed)
    await asyncio.sleep(0)
    assert not slot.drained.done(), "writes are in flight"
    network.hold = False
    network.run()
    await soon(slot.drained)
    # Whether the abort or the last completion came first is open.
    with contextlib.suppress(TransferFailed):
        await soon(transfer.done)
    await move()
    status = b.sidecar.status()
    assert status.counters.slots_completed == 3
    assert status.slots_open == 0
    assert status.transports[0].reason == f"{device}, completion channels"
    # The engines go: links are fenced, and nothing is left registered (see the fixture).
    await target.close()
    await source.close()


def on_gpu(engine: Engine) -> Engine:
    """Its memory as a GPU's: the sidecar can map nothing, and gets a dma-buf, which the fakes can map."""
    for region in engine.regions.values():
        region.memory = "cuda"
        region.dmabuf = DmaBuf(os.dup(region.fd))
    return engine


@pytest.mark.parametrize("where", [("gpu", "gpu"), ("gpu", "host"), ("host", "gpu")])
async def test_layer_by_layer_from_and_to_gpu_memory(
    pair: tuple[Here, Here], network: StubNetwork | EfaStubNetwork, where: tuple[str, str]
) -> None:
    """One end need not know what the other's memory is."""
    a, b = pair
    source = Engine("p", a, make_layout())  # type: ignore[arg-type]
    target = Engine("d", b, make_layout(num_pages=48))  # type: ignore[arg-type]
    for engine, kind in zip((source, target), where, strict=True):
        await (on_gpu(engine) if kind == "gpu" else engine).connect()
    source.fill(1)
    want = target.pages.copy()
    want[:, DST] = source.pages[:, SRC]
    slot = await target.open(DST)
    transfer = await soon(source.client.start_transfer(target.describe(slot, DST), {"main": SRC}, ready_pages=2))
    source.step(transfer, 2, 3)
    source.client.send_pages(transfer, 5, 1)
    result = await soon(slot.completed)
    assert (result.bytes, result.transport) == (slot.expected_bytes, transfer.transport)
    assert await soon(transfer.done) == slot.expected_bytes
    np.testing.assert_array_equal(target.pages, want)
    await target.close()
    await source.close()


async def test_no_device_no_verbs_and_the_reason_is_told(tmp_path: Path) -> None:
    try:
        load().get_device_list()
        pytest.skip("this machine has an RDMA device")
    except KvmeshError:
        pass
    except Exception:
        # pyverbs is there, and finds none.
        pass
    async with sidecars(tmp_path, "--transports=efa,verbs,shm") as (a, b):
        for process in (a, b):
            efa, verbs, shm = (await process.status()).transports
            assert (efa.name, efa.usable) == ("efa", False)
            assert (verbs.name, verbs.usable, shm.usable) == ("verbs", False, True)
            for each in (efa, verbs):
                assert "pyverbs" in each.reason or "no RDMA device" in each.reason
        source = await Engine("p", a, make_layout()).connect()
        target = await Engine("d", b, make_layout()).connect()
        slot = await target.open(DST)
        transfer = await soon(source.client.start_transfer(target.describe(slot, DST), {"main": SRC}, ready_pages=6))
        assert transfer.transport == "shm"
        await soon(slot.completed)
        await source.close()
        await target.close()


async def test_verbs_alone_without_a_device_is_a_clear_end(tmp_path: Path) -> None:
    process = SidecarProcess("src", tmp_path, "--transports=verbs")
    try:
        with pytest.raises(AssertionError, match="no transport can be used"):
            await process.start()
        assert "transport verbs cannot be used: " in process.log()
    finally:
        process.stop()
