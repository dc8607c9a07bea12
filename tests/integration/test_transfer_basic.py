"""Real sidecars move pages, layer by layer, byte for byte."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from transfer_kit import Engine, make_layout, sidecars, soon


@pytest.mark.parametrize("transport", ["shm", "tcp", "fake"])
async def test_layer_by_layer(tmp_path: Path, transport: str) -> None:
    async with sidecars(tmp_path, f"--transports={transport}") as (a, b):
        layout = make_layout()
        source = await Engine("p", a, layout).connect()
        target = await Engine("d", b, make_layout(num_pages=48)).connect()
        source.fill(1)
        target.fill(2)
        before = target.pages.copy()
        src, dst = [5, 6, 7, 20, 3, 9], [40, 41, 2, 30, 31, 32]
        slot = await target.open(dst)
        transfer = await soon(source.client.start_transfer(target.describe(slot, dst), {"main": src}, ready_pages=2))
        assert transfer.transport == transport
        source.publish(transfer, 2, 3)
        for _ in range(layout.num_layers):
            source.doorbell.ring()
        source.client.send_pages(transfer, 5, 1)
        result = await soon(slot.completed)
        assert result.bytes == slot.expected_bytes == target.expected(dst)
        assert result.transport == transport
        assert await soon(transfer.done) == slot.expected_bytes
        await soon(slot.drained)
        want = before
        want[:, dst] = source.pages[:, src]
        np.testing.assert_array_equal(target.pages, want)
        await source.close()
        await target.close()
