"""What a sidecar counts when a link ends: an alert asks for those that took transfers with them."""

from __future__ import annotations

import asyncio
import json
import signal
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvmesh.telemetry import names
from test_transfer_ends import FAST, Pair, fails
from transfer_kit import Engine, SidecarProcess, make_layout, sidecars


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    async with sidecars(tmp_path, "--metrics-listen=127.0.0.1:0", *FAST) as (a, b):
        source, target = Engine("source", a, make_layout()), Engine("target", b, make_layout())
        try:
            await source.connect()
            await target.connect()
            source.fill(1)
            yield Pair(a, b, source, target)
        finally:
            await source.close()
            await target.close()


def fenced(sidecar: SidecarProcess) -> dict[str, float]:
    """Links that ended there, by cause."""
    address = json.loads((sidecar.folder / f"{sidecar.name}.{sidecar.starts}.json").read_text())["metrics"]
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as reply:
        families = text_string_to_metric_families(reply.read().decode())
    return {
        sample.labels["cause"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == names.PEER_FENCED.name
    }


async def comes_to(sidecar: SidecarProcess, **causes: float) -> None:
    async with asyncio.timeout(60):
        while await asyncio.to_thread(fenced, sidecar) != {"engine": 0.0, "idle": 0.0, "link": 0.0} | causes:
            await asyncio.sleep(0.05)


async def test_a_writer_that_is_killed_in_a_transfer(pair: Pair) -> None:
    await comes_to(pair.b)
    slot, transfer = await pair.begin()
    await pair.half(slot, transfer)
    pair.a.kill()
    await fails(slot)
    await comes_to(pair.b, link=1.0)


async def test_a_writer_that_leaves_after_its_transfers(pair: Pair) -> None:
    await pair.works()
    await pair.source.client.close()
    pair.a.kill(signal.SIGTERM)
    assert await asyncio.to_thread(pair.a.wait) == 0
    await comes_to(pair.b, idle=1.0)
