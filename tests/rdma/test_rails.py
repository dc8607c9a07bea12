"""A link of several pairs of NICs on a real device. There is one device: every pair is of that one, with queue pairs,
credits and mailboxes of its own."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from rdma_kit import LAYERS, PAGE, WAIT_S, Destination, Writer, drive

from kvmesh.transfer.transports.rails import RailsOutbound

pytestmark = [pytest.mark.rdma, pytest.mark.asyncio(loop_scope="module")]
PAGES = 32
PAIRS = 3


async def test_bytes_are_exact_over_several_pairs_and_a_broken_one_ends_the_link() -> None:
    destination = await Destination("destination", PAGES).start()
    writer = await Writer(PAGES).start()
    (here,) = [nic for nic in writer.transport.nics() if nic.used]
    print(f"\n{here.name}: {here.reason}; NUMA node {here.numa_node}, {here.rate_gbps:g} Gbit/s")
    await destination.ask("fill", byte=0)

    async def connect(link: int) -> RailsOutbound:
        reply = await destination.expect(link, PAIRS)
        assert len(reply.verbs.rails) == PAIRS - 1
        outbound = await writer.transport.connect_over(destination.join, reply, "writer", WAIT_S)
        assert isinstance(outbound, RailsOutbound)
        return outbound

    outbound = await connect(1)
    assert [(nic.name, nic.peer, nic.used) for nic in outbound.nics()] == [(here.name, here.name, True)] * PAIRS
    want = np.zeros(writer.memory.regions[0].nbytes, dtype=np.uint8)
    have = writer.memory.regions[0].view()
    order = np.random.default_rng(3).permutation(PAGES * LAYERS)
    count = len(order) // 2
    src, dst = order[:count] * PAGE, order[count : 2 * count] * PAGE
    for a, b in zip(src, dst, strict=True):
        want[b : b + PAGE] = have[a : a + PAGE]
    writes = []
    for first in range(0, count, 8):
        part = slice(first, first + 8)
        writes.append(writer.write(7, src[part].tolist(), dst[part].tolist()))
        outbound.post(writes[-1])
    assert [c.error for c in drive(outbound, len(writes))] == [""] * len(writes)  # type: ignore[arg-type]
    assert (await destination.ask("arrived", immediate=7, bytes=count * PAGE))["bytes"] == count * PAGE
    assert (await destination.ask("digest"))["digest"] == hashlib.sha256(want).hexdigest()

    # One pair breaks: every write ends, with an error where its bytes may be missing, and the link is over.
    outbound.outbounds[1].fence("broken by the test")
    outbound.post(writer.write(8, src[:8].tolist(), dst[:8].tolist()))
    (completion,) = drive(outbound, 1)  # type: ignore[arg-type]
    assert completion.error
    assert outbound.broken
    outbound.close()
    await destination.ask("fence", link=1)

    again = await connect(2)
    again.post(writer.write(9, src[:8].tolist(), dst[:8].tolist()))
    assert [c.error for c in drive(again, 1)] == [""]  # type: ignore[arg-type]
    assert (await destination.ask("arrived", immediate=9, bytes=8 * PAGE))["bytes"] == 8 * PAGE
    again.close()
    await destination.ask("fence", link=2)
    await writer.close()
    await destination.close()
