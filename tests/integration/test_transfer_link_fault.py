"""A link that is open and cannot be taken up: what was mapped and made for it is let go of, and the peer hears it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from kvmesh.errors import KvmeshError
from kvmesh.transfer.mover import Mover
from kvmesh.transfer.sidecar import sidecar as sidecar_module
from kvmesh.transfer.transports.base import Outbound
from kvmesh.transfer.transports.verbs import VerbsOptions, VerbsTransport
from kvmesh.transfer.transports.verbs.stub import StubNetwork
from test_transfer_verbs import Here
from transfer_kit import Engine, make_layout, soon

SRC, DST = [5, 6, 7], [40, 41, 2]


@pytest.mark.parametrize("transport", ["shm", "verbs"])
async def test_nothing_is_left_of_a_link_that_the_mover_does_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    network = StubNetwork()
    if transport == "verbs":
        monkeypatch.setattr(
            sidecar_module,
            "make_transport",
            lambda name, options: VerbsTransport(VerbsOptions(polling="events", qps=2), network.api()),
        )
    here, there = await Here("src", tmp_path, transport).start(), await Here("dst", tmp_path, transport).start()
    source = await Engine("p", here, make_layout()).connect()  # type: ignore[arg-type]
    target = await Engine("d", there, make_layout(num_pages=48)).connect()  # type: ignore[arg-type]
    source.fill(1)
    kept: list[Outbound] = []

    async def busy(self: Mover, outbound: Outbound) -> None:
        # As one that hangs for longer than anybody waits: the link is not collected as garbage meanwhile.
        kept.append(outbound)
        raise TimeoutError

    slot = await target.open(DST)
    objects = network.open_objects
    with monkeypatch.context() as patch:
        patch.setattr(Mover, "add_link", busy)
        with pytest.raises(KvmeshError, match="the link failed"):
            await soon(source.client.start_transfer(target.describe(slot, DST), {"main": SRC}, ready_pages=3))
    async with asyncio.timeout(60):
        while there.sidecar.incoming.links or here.sidecar.outgoing.all or network.open_objects != objects:
            await asyncio.sleep(0.01)
    assert len(kept) == 1
    # The slot was never bound: the next link serves it.
    transfer = await soon(source.client.start_transfer(target.describe(slot, DST), {"main": SRC}, ready_pages=3))
    await soon(slot.completed)
    await soon(transfer.done)
    np.testing.assert_array_equal(target.pages[:, DST], source.pages[:, SRC])
    await target.close()
    await source.close()
    await here.close()
    await there.close()
    assert network.violations == []
