"""A tcp link of several streams with checksums: bytes, an abort in the middle, and the end of the peer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvmesh.errors import KvmeshError
from transfer_kit import Engine, SidecarProcess, make_layout, sidecars, soon

FLAGS = ("--transports=tcp", "--tcp-checksums", "--copy-threads=2", "--heartbeat-s=0.2", "--lease-s=5")
LONG_S = 60.0


@pytest.mark.parametrize(("source_streams", "target_streams"), [(4, 3), (1, 4)])
async def test_both_ends_agree_on_the_lesser_number(tmp_path: Path, source_streams: int, target_streams: int) -> None:
    layout = make_layout(num_pages=256, layers=4, page_size=64, heads=4)
    ends = [
        SidecarProcess(name, tmp_path, *FLAGS, f"--tcp-streams={streams}")
        for name, streams in (("src", source_streams), ("dst", target_streams))
    ]
    try:
        for process in ends:
            await process.start()
        a, b = ends
        source = await Engine("p", a, layout).connect()
        target = await Engine("d", b, layout).connect()
        source.fill(1)
        target.fill(2)
        untouched = target.pages.copy()
        rng = np.random.default_rng(5)
        for _ in range(3):
            src, dst = (rng.permutation(layout.num_pages)[:96].tolist() for _ in range(2))
            slot = await target.open(dst, ttl_s=LONG_S)
            start = source.client.start_transfer(target.describe(slot, dst), {"main": src}, ready_pages=48)
            transfer = await soon(start, LONG_S)
            source.step(transfer, 48, 48)
            result = await soon(slot.completed, LONG_S)
            assert result.bytes == target.expected(dst)
            assert await soon(transfer.done, LONG_S) == target.expected(dst)
            untouched[:, dst] = source.pages[:, src]
            np.testing.assert_array_equal(target.pages, untouched)
        await source.close()
        await target.close()
    finally:
        for process in ends:
            process.stop()


async def test_an_abort_is_drained_and_the_link_serves_on(tmp_path: Path) -> None:
    layout = make_layout(num_pages=256, layers=4, page_size=64, heads=4)
    async with sidecars(tmp_path, *FLAGS, "--tcp-streams=3") as (a, b):
        source = await Engine("p", a, layout).connect()
        target = await Engine("d", b, layout).connect()
        source.fill(1)
        pages = list(range(128))
        slot = await target.open(pages, ttl_s=LONG_S)
        transfer = await soon(
            source.client.start_transfer(target.describe(slot, pages), {"main": pages}, ready_pages=64), LONG_S
        )
        await target.client.close_slot(slot, "not wanted any more")
        await soon(slot.drained, LONG_S)
        with pytest.raises(KvmeshError):
            await soon(transfer.done, LONG_S)
        slot = await target.open(pages, ttl_s=LONG_S)
        await soon(source.client.start_transfer(target.describe(slot, pages), {"main": pages}, ready_pages=128), LONG_S)
        await soon(slot.completed, LONG_S)
        assert (target.pages[:, pages] == source.pages[:, pages]).all()
        # The writer is killed with a slot bound: every stream's reader ends, the pages come back.
        slot = await target.open(pages, ttl_s=LONG_S)
        await soon(source.client.start_transfer(target.describe(slot, pages), {"main": pages}, ready_pages=8), LONG_S)
        a.kill()
        with pytest.raises(KvmeshError):
            await soon(slot.completed, LONG_S)
        await soon(slot.drained, LONG_S)
        await source.close()
        await target.close()
