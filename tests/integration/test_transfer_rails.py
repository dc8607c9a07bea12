"""Sidecars with several NICs each: pages go over all of them, one that fails is gone without, and status tells it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvmesh.errors import TransferFailed
from kvmesh.telemetry import metrics, names
from kvmesh.transfer.sidecar import SidecarOptions
from kvmesh.transfer.sidecar import sidecar as sidecar_module
from kvmesh.transfer.transports.efa import EfaOptions, EfaTransport
from kvmesh.transfer.transports.efa.stub import UNRESPONSIVE, EfaStubNetwork
from kvmesh.transfer.transports.verbs import VerbsOptions, VerbsTransport
from kvmesh.transfer.transports.verbs.stub import RETRY_EXCEEDED, StubNetwork
from test_transfer_verbs import Here
from transfer_kit import Engine, make_layout, soon

SRC, DST = [5, 6, 7, 20, 3, 9], [40, 41, 2, 30, 31, 32]


@pytest.fixture(params=["verbs", "efa"])
async def network(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[StubNetwork | EfaStubNetwork]:
    made = StubNetwork() if request.param == "verbs" else EfaStubNetwork()

    def make(name: str, options: SidecarOptions) -> VerbsTransport | EfaTransport:
        devices = tuple(f"{options.sidecar_id}{place}" for place in range(2))
        if isinstance(made, StubNetwork):
            return VerbsTransport(VerbsOptions(polling="events", qps=2), made.api(devices=devices))
        return EfaTransport(EfaOptions(polling="events"), made.api(devices=devices, efa=devices))

    monkeypatch.setattr(sidecar_module, "make_transport", make)
    yield made
    assert made.violations == []
    assert made.open_objects == 0


async def test_two_nics_at_each_end(tmp_path: Path, network: StubNetwork | EfaStubNetwork) -> None:
    name, failure = ("verbs", RETRY_EXCEEDED) if isinstance(network, StubNetwork) else ("efa", UNRESPONSIVE)
    a, b = await Here("src", tmp_path, name).start(), await Here("dst", tmp_path, name).start()
    links = {way: metrics.value(names.TRANSFER_LINKS, **labels(name, way)) for way in ("in", "out")}
    try:
        source = await Engine("p", a, make_layout()).connect()  # type: ignore[arg-type]
        target = await Engine("d", b, make_layout(num_pages=48)).connect()  # type: ignore[arg-type]
        source.fill(1)
        want = target.pages.copy()
        want[:, DST] = source.pages[:, SRC]

        async def move() -> None:
            slot = await target.open(DST)
            transfer = await soon(
                source.client.start_transfer(target.describe(slot, DST), {"main": SRC}, ready_pages=2)
            )
            source.step(transfer, 2, 4)
            assert (await soon(slot.completed)).bytes == slot.expected_bytes
            assert await soon(transfer.done) == slot.expected_bytes
            np.testing.assert_array_equal(target.pages, want)

        def pairs(here: Here) -> list[tuple[str, str, bool]]:
            # One that has failed may not have heard of its end yet.
            link = [link for link in here.sidecar.status().links if link.state == "up"][-1]
            assert [(item.name, item.chosen, item.code) for item in link.candidates] == [(name, True, "chosen")]
            assert link.waiting == "completion channels (by setting)"
            return [(nic.name, nic.peer, nic.used) for nic in link.nics]

        await move()
        assert pairs(a) == [("src0", "dst0", True), ("src1", "dst1", True)]
        assert pairs(b) == [("dst0", "src0", True), ("dst1", "src1", True)]
        for way in ("in", "out"):
            assert metrics.value(names.TRANSFER_LINKS, **labels(name, way)) == links[way] + 1
        found = {nic.name: nic.used for nic in a.sidecar.status().transports[0].nics}
        assert found == {"src0": True, "src1": True}
        assert [thread.name for thread in a.sidecar.status().threads] == ["mover"]

        # A NIC fails in flight: the generation fails, and the next link is without that pair.
        network.fail_status, network.fail_after = failure, 1
        slot = await target.open(DST)
        transfer = await soon(source.client.start_transfer(target.describe(slot, DST), {"main": SRC}, ready_pages=6))
        with pytest.raises(TransferFailed, match=f"status {failure}"):
            await soon(transfer.done)
        with pytest.raises(TransferFailed):
            await soon(slot.completed)
        await soon(slot.drained)
        target.pages[:, DST] = 0
        await move()
        after = pairs(a)
        assert [used for _, _, used in after].count(True) == 1
        left_out = next(pair for pair in after if not pair[2])
        (there,) = pairs(b)
        assert there[0] != left_out[1]
        await target.close()
        await source.close()
    finally:
        await a.close()
        await b.close()
    async with asyncio.timeout(60):
        while links != {way: metrics.value(names.TRANSFER_LINKS, **labels(name, way)) for way in ("in", "out")}:
            await asyncio.sleep(0.01)


def labels(transport: str, direction: str) -> dict[str, Any]:
    return {"transport": transport, "direction": direction, "reason_code": "first"}
