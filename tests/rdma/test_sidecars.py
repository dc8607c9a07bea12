"""Two real kvtransfer processes with `--transports=efa,verbs`, of which only the latter can be used here."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration"))
import transfer_kit
from kvmesh.errors import TransferFailed
from transfer_kit import Engine, make_layout, sidecars, soon

pytestmark = pytest.mark.rdma
# Everything in the VM is 20 to 30 times slower.
transfer_kit.START_S = 600.0
FLAGS = ("--transports=efa,verbs", "--heartbeat-s=2", "--lease-s=20")
SRC, DST = [5, 6, 7, 20, 3, 9], [40, 41, 2, 30, 31, 32]


async def test_layer_by_layer_kill_and_again(tmp_path: Path) -> None:
    async with sidecars(tmp_path, *FLAGS) as (a, b):
        layout = make_layout()
        source = Engine("p", a, layout)
        target = await Engine("d", b, make_layout(num_pages=48)).connect()
        await source.connect()
        source.fill(1)
        target.fill(2)
        want = target.pages.copy()
        want[:, DST] = source.pages[:, SRC]

        async def move() -> None:
            slot = await target.open(DST, ttl_s=300)
            descriptor = target.describe(slot, DST)
            transfer = await soon(source.client.start_transfer(descriptor, {"main": SRC}, ready_pages=2), 300)
            assert transfer.transport == "verbs"
            source.publish(transfer, 2, 3)
            for _ in range(layout.num_layers):
                source.doorbell.ring()
            source.client.send_pages(transfer, 5, 1)
            result = await soon(slot.completed, 300)
            assert result.bytes == slot.expected_bytes
            assert result.transport == "verbs"
            assert await soon(transfer.done, 300) == slot.expected_bytes
            np.testing.assert_array_equal(target.pages, want)

        await move()
        status = await b.status()
        efa, usable = status.transports
        assert not efa.usable
        assert "is no EFA device (errno 95)" in efa.reason
        assert usable.usable
        link = status.links[0]
        print(f"\nverbs between sidecars: {usable.reason}; link {link.direction} {link.state}: {link.reason}")

        # The writer's sidecar dies with a generation half written.
        slot = await target.open(DST, ttl_s=300)
        transfer = await soon(
            source.client.start_transfer(target.describe(slot, DST), {"main": SRC}, ready_pages=3), 120
        )
        a.kill()
        with pytest.raises(TransferFailed):
            await soon(slot.completed, 300)
        await soon(slot.drained, 300)
        with pytest.raises(TransferFailed):
            await soon(transfer.done, 300)
        await soon(source.lost.wait(), 300)
        await a.start()
        await source.connect()
        target.pages[:, DST] = 0
        await move()
        status = await b.status()
        assert status.counters.slots_completed == 2
        assert status.slots_open == 0
        await asyncio.gather(source.close(), target.close())
