"""Two processes, a real RDMA device, the real transport.

KVMESH_RDMA_TRANSFERS: number of small transfers (default 10,000; CI's VM, which is slow, makes 2,000).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import pytest_asyncio
from rdma_kit import LAYERS, PAGE, WAIT_S, Destination, Writer, drive

from kvmesh.errors import Unavailable
from kvmesh.proto.v1 import kvtransfer_pb2 as pb

pytestmark = [pytest.mark.rdma, pytest.mark.asyncio(loop_scope="module")]
PAGES = 64
CHUNK = 4096
TRANSFERS = int(os.environ.get("KVMESH_RDMA_TRANSFERS", "10000"))
REMOTE_ACCESS, RETRY_EXCEEDED = 10, 12


class Pair(NamedTuple):
    writer: Writer
    destination: Destination


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ends() -> AsyncIterator[Pair]:
    destination = await Destination("destination", PAGES).start()
    writer = await Writer(PAGES).start()
    yield Pair(writer, destination)
    await writer.close()
    await destination.close()


@pytest_asyncio.fixture(loop_scope="module")
async def pair(ends: Pair) -> Pair:
    await ends.destination.ask("fill", byte=0)
    return ends


def wanted(writer: Writer, src: Sequence[int], dst: Sequence[int], length: int = PAGE) -> str:
    """The digest of a zeroed destination after these copies."""
    want = np.zeros(writer.memory.regions[0].nbytes, dtype=np.uint8)
    have = writer.memory.regions[0].view()
    for a, b in zip(src, dst, strict=True):
        want[b : b + length] = have[a : a + length]
    return hashlib.sha256(want).hexdigest()


async def works(writer: Writer, destination: Destination, link: int) -> None:
    """A fresh link moves a page."""
    await destination.ask("fill", byte=0)
    outbound = await writer.connect(destination, link)
    outbound.post(writer.write(link, [3 * PAGE], [5 * PAGE]))
    assert [c.error for c in drive(outbound, 1)] == [""]
    assert (await destination.ask("arrived", immediate=link, bytes=PAGE))["bytes"] == PAGE
    assert (await destination.ask("digest"))["digest"] == wanted(writer, [3 * PAGE], [5 * PAGE])
    outbound.close()
    await destination.ask("fence", link=link)


async def test_paged_writes_are_byte_exact(pair: Pair) -> None:
    writer, destination = pair
    print(f"\nwriter: {writer.transport.status[1]}")
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
    assert (await destination.ask("digest"))["digest"] == wanted(writer, src, dst)
    print(f"rxe0: 100 pages of 64 KiB in {arrived['arrivals']} runs, sha256 equal")
    outbound.close()
    await destination.ask("fence", link=1)


async def test_wrong_key_and_a_rebuilt_queue_pair(pair: Pair) -> None:
    writer, destination = pair

    def spoil(reply: pb.PeerHelloReply) -> None:
        reply.verbs.regions[0].rkey ^= 0xFF

    outbound = await writer.connect(destination, 2, spoil)
    outbound.post(writer.write(2, [0] * 3, [PAGE, 2 * PAGE, 3 * PAGE]))
    (completion,) = drive(outbound, 1)
    assert f"status {REMOTE_ACCESS}" in completion.error
    print(f"\nrxe0: wrong key: {completion.error}")
    assert outbound.outstanding == 0, "flushed and drained"
    # The destination's queue pair is in ERR too, and it knows.
    assert "status 5" in (await destination.ask("ended", link=2))["reason"]
    outbound.close()
    await destination.ask("fence", link=2)
    assert (await destination.ask("digest"))["digest"] == wanted(writer, [], [])
    await works(writer, destination, 3)


async def test_address_out_of_range(pair: Pair) -> None:
    writer, destination = pair
    size = writer.memory.regions[0].nbytes
    outbound = await writer.connect(destination, 4)
    outbound.post(writer.write(4, [0], [size - PAGE + 1]))
    assert "outside of its region" in drive(outbound, 1)[0].error
    outbound.close()
    await destination.ask("fence", link=4)

    # Past our own check, as a writer that was told wrong: the device refuses.
    def stretch(reply: pb.PeerHelloReply) -> None:
        reply.regions[0].nbytes += PAGE
        reply.verbs.regions[0].nbytes += PAGE

    outbound = await writer.connect(destination, 5, stretch)
    outbound.post(writer.write(5, [0], [size - PAGE + 64]))
    (completion,) = drive(outbound, 1)
    assert f"status {REMOTE_ACCESS}" in completion.error
    print(f"\nrxe0: out of range: {completion.error}")
    outbound.close()
    await destination.ask("fence", link=5)
    assert (await destination.ask("digest"))["digest"] == wanted(writer, [], [])


async def test_a_fenced_writer_cannot_write(pair: Pair) -> None:
    writer, destination = pair
    outbound = await writer.connect(destination, 6)
    outbound.post(writer.write(6, [0], [PAGE]))
    assert [c.error for c in drive(outbound, 1)] == [""]
    await destination.ask("fence", link=6)
    await destination.ask("fill", byte=0)
    outbound.post(writer.write(6, [0], [2 * PAGE]))
    (completion,) = drive(outbound, 1)
    assert f"status {RETRY_EXCEEDED}" in completion.error
    print(f"\nrxe0: fenced: {completion.error}")
    assert (await destination.ask("digest"))["digest"] == wanted(writer, [], [])
    outbound.close()


async def test_refused_hellos(pair: Pair) -> None:
    writer, destination = pair

    def wrong_token(reply: pb.PeerHelloReply) -> None:
        reply.token = bytes(32)

    with pytest.raises(Unavailable, match="wrong token"):
        await writer.connect(destination, 7, wrong_token)
    await works(writer, destination, 8)


async def test_32_queue_pairs_between_two_processes(ends: Pair) -> None:
    destination = await Destination("wide", PAGES, qps=16, receives=4).start()
    writer = await Writer(PAGES, qps=16, receives=4, run_rows=2).start()
    try:
        links = [await writer.connect(destination, number) for number in (1, 2)]
        random = np.random.default_rng(5)
        src = [int(x) * PAGE for x in random.permutation(PAGES * LAYERS)]
        dst = [int(x) * PAGE for x in random.permutation(PAGES * LAYERS)]
        for number, outbound in enumerate(links):
            outbound.post(writer.write(number + 1, src[number::2], dst[number::2]))
        for outbound in links:
            assert [c.error for c in drive(outbound, 1)] == [""]
            used = {lane.pair.place for lane in outbound._lanes if lane.credits._started}
            assert len(used) == 16, "every queue pair has carried a run"
        for number in (1, 2):
            arrived = await destination.ask("arrived", immediate=number, bytes=PAGES * LAYERS // 2 * PAGE)
            assert arrived["bytes"] == PAGES * LAYERS // 2 * PAGE
        assert (await destination.ask("digest"))["digest"] == wanted(writer, src, dst)
        print(f"\nrxe0: 2 links of 16 queue pairs, {arrived['arrivals']} runs, sha256 equal")
        for outbound in links:
            outbound.close()
    finally:
        await destination.close()
        await writer.close()


async def test_small_transfers(pair: Pair) -> None:
    """Each its own generation; after each batch the region and every generation's count are compared."""
    writer, destination = pair
    outbound = await writer.connect(destination, 9)
    random = np.random.default_rng(9)
    places = writer.memory.regions[0].nbytes // CHUNK
    have = writer.memory.regions[0].view()
    want = np.zeros_like(have)
    arrivals = 0
    for first in range(0, TRANSFERS, 600):
        numbers = range(first, min(TRANSFERS, first + 600))
        order = random.permutation(places)
        counts: dict[int, int] = {}
        at = 0
        for number in numbers:
            pieces = int(random.integers(1, 4))
            dst = [int(x) * CHUNK for x in order[at : at + pieces]]
            src = [int(x) * CHUNK for x in random.integers(0, places, pieces)]
            at += pieces
            for a, b in zip(src, dst, strict=True):
                want[b : b + CHUNK] = have[a : a + CHUNK]
            outbound.post(writer.write(number, src, dst, CHUNK))
            counts[number] = pieces * CHUNK
        assert {c.error for c in drive(outbound, len(numbers))} == {""}
        totals = await destination.ask("totals", bytes=sum(counts.values()))
        assert totals["ok"]
        assert totals["digest"] == hashlib.sha256(json.dumps(sorted(counts.items())).encode()).hexdigest()
        assert (await destination.ask("digest"))["digest"] == hashlib.sha256(want).hexdigest()
        arrivals = totals["arrivals"]
    print(f"\nrxe0: {TRANSFERS} transfers, {arrivals} arrivals so far, every batch sha256 equal")
    outbound.close()
    await destination.ask("fence", link=9)


async def test_destination_killed_in_the_middle(ends: Pair) -> None:
    writer = ends.writer
    victim = await Destination("victim", PAGES).start()
    outbound = await writer.connect(victim, 1)
    writes: list[Any] = [writer.write(1, [0] * 64, [page * PAGE for page in range(64)]) for _ in range(40)]
    for write in writes:
        outbound.post(write)
    found = drive(outbound, 1)
    victim.process.kill()
    await asyncio.wait_for(victim.process.wait(), WAIT_S)
    found += drive(outbound, len(writes) - len(found))
    assert sorted(c.context for c in found) == [write.context for write in writes]
    failed = [c for c in found if c.error]
    assert failed, "it was killed in the middle"
    assert f"status {RETRY_EXCEEDED}" in outbound.broken
    print(f"\nrxe0: killed after {len(found) - len(failed)} of {len(writes)} writes: {outbound.broken}")
    assert outbound.outstanding == 0
    outbound.close()
    # Same device, new queue pairs, another peer.
    await works(writer, ends.destination, 10)
