"""A sidecar that is told to stop: with its engine, which it serves until that has left, or alone."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvmesh.errors import Unavailable
from test_transfer_ends import DST, Pair
from transfer_kit import Engine, make_layout, sidecars, soon


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    async with sidecars(tmp_path, "--drain-timeout-s=600") as (a, b):
        source, target = Engine("source", a, make_layout()), Engine("target", b, make_layout())
        try:
            await source.connect()
            await target.connect()
            yield Pair(a, b, source, target)
        finally:
            await source.close()
            await target.close()


async def test_an_engine_that_leaves_too_is_served_until_it_has_left(pair: Pair) -> None:
    for engine in (pair.source, pair.target):
        engine.client.leaving()
    for sidecar in (pair.a, pair.b):
        sidecar.kill(signal.SIGTERM)
    # Longer than a sidecar waits for its engine's word; the link is made here, and slots and transfers are taken.
    async with asyncio.timeout(60):
        while any("draining" not in sidecar.log() for sidecar in (pair.a, pair.b)):
            await asyncio.sleep(0.02)
    await asyncio.sleep(3.0)
    await pair.works()
    assert pair.a.alive
    assert pair.b.alive
    for engine, sidecar in ((pair.source, pair.a), (pair.target, pair.b)):
        await engine.client.close()
        assert await asyncio.to_thread(sidecar.wait) == 0
        assert not engine.lost.is_set()


async def test_alone_it_takes_nothing_new_and_goes_when_all_has_ended(pair: Pair) -> None:
    pair.source.fill(3)
    slot, transfer = await pair.begin()
    await pair.half(slot, transfer)
    pair.b.kill(signal.SIGTERM)
    async with asyncio.timeout(60):
        while True:
            try:
                more = await pair.target.open(DST[:2])
            except Unavailable:
                break
            # Not yet: its engine might have been about to leave.
            await pair.target.client.close_slot(more, "a try")
            await asyncio.sleep(0.05)
    assert pair.b.alive
    for _ in range(2):
        pair.source.doorbell.ring()
    pair.source.step(transfer, 3, 3)
    await soon(slot.completed)
    await soon(transfer.done)
    await soon(pair.target.lost.wait())
    assert await asyncio.to_thread(pair.b.wait) == 0
