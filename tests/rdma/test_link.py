"""Two processes, a real RDMA device, the real transport."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from typing import NamedTuple

import numpy as np
import pytest
from rdma_kit import LAYERS, PAGE, Destination, Writer, drive

pytestmark = pytest.mark.rdma
PAGES = 64


class Pair(NamedTuple):
    writer: Writer
    destination: Destination


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    destination = await Destination("destination", PAGES).start()
    writer = await Writer(PAGES).start()
    yield Pair(writer, destination)
    await writer.close()
    await destination.close()


def expected_digest(writer: Writer, src: list[int], dst: list[int], length: int = PAGE) -> str:
    """What a zeroed destination holds after these copies."""
    want = np.zeros(writer.memory.regions[0].nbytes, dtype=np.uint8)
    have = writer.memory.regions[0].view()
    for a, b in zip(src, dst, strict=True):
        want[b : b + length] = have[a : a + length]
    return hashlib.sha256(want).hexdigest()


async def test_paged_writes_are_byte_exact(pair: Pair) -> None:
    writer, destination = pair
    outbound = await writer.connect(destination, 1)
    random = np.random.default_rng(3)
    src = [int(x) * PAGE for x in random.permutation(PAGES * LAYERS)[:100]]
    dst = [int(x) * PAGE for x in random.permutation(PAGES * LAYERS)[:100]]
    for at in range(0, 100, 20):
        outbound.post(writer.write(0x123_00045, src[at : at + 20], dst[at : at + 20]))
    assert [c.error for c in drive(outbound, 5)] == [""] * 5
    arrived = await destination.ask("arrived", immediate=0x123_00045, bytes=100 * PAGE)
    assert arrived["bytes"] == 100 * PAGE
    # One receive completion a run, not a page.
    assert arrived["arrivals"] < 20
    assert (await destination.ask("digest"))["digest"] == expected_digest(writer, src, dst)
    print(f"rxe0: 100 pages of 64 KiB in {arrived['arrivals']} runs, sha256 equal")
    outbound.fence("over")
    outbound.close()
