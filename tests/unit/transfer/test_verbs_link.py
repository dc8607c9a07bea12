"""The verbs transport over the fake pyverbs, which tells every overflow and every wrong order of closing."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from kvmesh.errors import FailedPrecondition, InvalidArgument, Unavailable
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.transports.verbs import VerbsOptions, VerbsTransport
from kvmesh.transfer.transports.verbs.device import Device
from kvmesh.transfer.transports.verbs.stub import REM_ACCESS, RETRY_EXCEEDED, StubNetwork
from verbs_world import LAYERS, PAGE, End, Link, randomize

IMM = 0x0AB_0001F


class World:
    def __init__(self) -> None:
        self.network = StubNetwork()
        self.ends: list[End] = []

    async def pair(self, **options: Any) -> Link:
        source = await End(self.network, "src", **options).start()
        target = await End(self.network, "dst", **options).start()
        self.ends += [source, target]
        randomize(source, 1)
        return Link(source, target)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    made.network.hold = False
    for end in made.ends:
        await end.close()
    assert made.network.violations == []
    assert made.network.open_objects == 0, "queue pairs or registrations are left"


@pytest.mark.parametrize("qps", [1, 3])
@pytest.mark.parametrize("receives", [2, 5])
async def test_bytes_arrive_once_and_in_place(world: World, qps: int, receives: int) -> None:
    link = await (await world.pair(qps=qps, receives=receives, send_depth=9, run_rows=4)).open()
    draw = random.Random(qps * 10 + receives)
    pages = list(range(32 * LAYERS))
    want = np.zeros_like(link.target.bytes)
    posted: dict[int, int] = {}
    completions = []
    for turn in range(40):
        imm = IMM + turn % 3
        chosen = draw.sample(pages, draw.randint(1, 20))
        src = [page * PAGE for page in chosen]
        dst = [page * PAGE for page in draw.sample(pages, len(chosen))]
        for a, b in zip(src, dst, strict=True):
            want[b : b + PAGE] = link.source.bytes[a : a + PAGE]
        write = link.write(imm, src, dst)
        posted[imm] = posted.get(imm, 0) + write.nbytes
        link.outbound.post(write)
        # Order between queue pairs is nobody's promise, so writes to the same page wait for one another here.
        completions += link.drain()
    assert [c.error for c in completions] == [""] * 40
    assert sum(c.nbytes for c in completions) == sum(posted.values())
    assert link.received == posted
    np.testing.assert_array_equal(link.target.bytes, want)
    assert link.arrivals < sum(posted.values()) // PAGE, "a completion per run, not per page"
    await link.close()


async def test_slow_receiver_stops_the_writer_and_nothing_overflows(world: World) -> None:
    """The destination does not poll: runs in flight end at its receives, and go on when it does."""
    link = await (await world.pair(qps=2, receives=4, run_rows=1, send_depth=64)).open()
    assert link.inbound is not None
    link.outbound.post(link.write(IMM, [0] * 100, [PAGE] * 100))
    for _ in range(10):
        assert link.outbound.poll(1 << 30) == []
    assert world.network.requests == 2 * 4 * 2
    assert not link.outbound.busy, "it waits for the channel and does not spin"
    completions = link.drain()
    assert [c.error for c in completions] == [""]
    assert link.received == {IMM: 100 * PAGE}
    await link.close()


async def test_a_turn_posts_about_its_budget(world: World) -> None:
    link = await (await world.pair(qps=1, run_rows=1)).open()
    link.outbound.post(link.write(IMM, [0] * 20, [PAGE] * 20))
    link.outbound.poll(3 * PAGE)
    assert world.network.requests == 2 * 3
    assert link.outbound.busy
    await link.close()


@pytest.mark.parametrize("status", [REM_ACCESS, RETRY_EXCEEDED])
@pytest.mark.parametrize("after", [0, 3, 7, 10])
async def test_failed_request_breaks_the_link_and_a_new_one_works(world: World, status: int, after: int) -> None:
    link = await (await world.pair(qps=2, run_rows=3)).open()
    world.network.fail_status, world.network.fail_after = status, after
    writes = [link.write(IMM + i, [0, PAGE, 2 * PAGE], [PAGE, 2 * PAGE, 3 * PAGE]) for i in range(4)]
    for write in writes:
        link.outbound.post(write)
    completions = link.drain()
    if after == 10:
        completions += link.drain()
    assert f"status {status}" in link.outbound.broken
    assert sorted(c.context for c in completions) == [w.context for w in writes], "each completes exactly once"
    failed = [c for c in completions if c.error]
    assert failed
    for write in writes:
        if write.context not in [c.context for c in failed]:
            assert link.received[write.immediate] == write.nbytes
    # Posted on a broken link: an error at the next poll.
    link.outbound.post(link.write(IMM, [0], [0]))
    assert [c.error != "" for c in link.outbound.poll(1 << 20)] == [True]
    await link.close()
    again = await Link(link.source, link.target, 2).open()
    again.outbound.post(again.write(IMM, [0], [PAGE]))
    assert [c.error for c in again.drain()] == [""]
    assert again.received == {IMM: PAGE}
    await again.close()


async def test_fence_drains_before_memory_goes(world: World) -> None:
    """Requests are posted and held by the network: they are flushed, their queue pairs destroyed, then the rest."""
    link = await (await world.pair(qps=2, run_rows=2)).open()
    world.network.hold = True
    link.outbound.post(link.write(IMM, [0] * 9, [PAGE] * 9))
    link.outbound.post(link.write(IMM + 1, [0] * 9, [PAGE] * 9))
    link.outbound.poll(1 << 30)
    world.network.run(5)
    link.outbound.fence("enough")
    completions = link.outbound.poll(0)
    assert sorted(c.context for c in completions) == [1, 2]
    assert all(c.error for c in completions)
    before = link.target.bytes.copy()
    assert world.network.run() == 0
    np.testing.assert_array_equal(link.target.bytes, before)
    link.outbound.close()
    link.outbound.close()
    assert link.inbound is not None
    await link.inbound.fence()


async def test_fenced_destination_takes_nothing_more(world: World) -> None:
    link = await (await world.pair()).open()
    assert link.inbound is not None
    world.network.hold = True
    link.outbound.post(link.write(IMM, [0, PAGE], [PAGE, 0]))
    link.outbound.poll(1 << 30)
    await link.inbound.fence()
    world.network.run()
    assert not link.target.bytes.any()
    assert [c.error for c in link.outbound.poll(0)] != [""]
    assert f"status {RETRY_EXCEEDED}" in link.outbound.broken
    link.outbound.close()


async def test_flush_gives_up_what_is_not_posted(world: World) -> None:
    link = await (await world.pair(qps=1, receives=2, run_rows=2)).open()
    world.network.hold = True
    kept, begun, fresh = (link.write(IMM + i, [0] * 3, [PAGE] * 3) for i in range(3))
    for write in (begun, fresh, kept):
        link.outbound.post(write)
    # Two runs may be in flight: both are of the first write.
    assert link.outbound.poll(1 << 30) == []
    link.outbound.flush(fresh.immediate)
    assert [(c.context, c.error) for c in link.outbound.poll(0)] == [(fresh.context, "flushed")]
    world.network.hold = False
    world.network.run()
    assert sorted((c.context, c.error) for c in link.drain()) == sorted([(begun.context, ""), (kept.context, "")])
    assert link.received == {begun.immediate: 3 * PAGE, kept.immediate: 3 * PAGE}
    # One that has begun ends when what was posted of it has, and says so.
    world.network.hold = True
    long = link.write(IMM + 9, [0] * 30, [PAGE] * 30)
    link.outbound.post(long)
    link.outbound.poll(1 << 30)
    link.outbound.flush(long.immediate)
    assert link.outbound.poll(0) == []
    world.network.hold = False
    world.network.run()
    assert [(c.context, c.nbytes, c.error) for c in link.drain()] == [(long.context, 0, "flushed")]
    await link.close()


@pytest.mark.parametrize(
    ("src", "dst", "length"),
    [(0, 32 * LAYERS * PAGE, 1), (0, 32 * LAYERS * PAGE - 8, 16), (-1, 0, 8), (0, -8, 8), (0, 0, 0), (1 << 60, 0, 8)],
)
async def test_out_of_bounds_is_never_posted(world: World, src: int, dst: int, length: int) -> None:
    link = await (await world.pair()).open()
    link.outbound.post(link.write(IMM, [0, src], [0, dst], length))
    (completion,) = link.outbound.poll(1 << 30)
    assert "outside of its region" in completion.error
    assert world.network.requests == 0
    await link.close()


async def test_a_write_out_of_bounds_leaves_no_other_of_its_run_without_an_end(world: World) -> None:
    link = await (await world.pair()).open()
    writes = [link.write(IMM, [0], [PAGE]), link.write(IMM, [PAGE], [0]), link.write(IMM, [-1], [0])]
    for write in (*writes, link.write(IMM + 1, [0], [0])):
        link.outbound.post(write)
    ended = link.outbound.poll(1 << 30)
    assert sorted(c.context for c in ended) == [1, 2, 3, 4]
    assert all("outside of its region" in c.error for c in ended)
    assert world.network.requests == 0
    await link.close()


async def test_wrong_key_is_a_failed_link_and_no_byte(world: World) -> None:
    link = await (await world.pair()).open(change=lambda reply: _set(reply.verbs.regions[0], rkey=1))
    link.outbound.post(link.write(IMM, [0], [PAGE]))
    assert [c.error for c in link.drain()] == [f"a write on queue pair 0 completed with status {REM_ACCESS}"]
    assert not link.target.bytes.any()
    await link.close()


def _set(message: Any, **fields: Any) -> None:
    for name, value in fields.items():
        setattr(message, name, value)


BAD_REPLIES: dict[str, Callable[[pb.PeerHelloReply], None]] = {
    "no queue pairs": lambda r: r.ClearField("verbs"),
    "too many": lambda r: r.verbs.qp_numbers.extend(range(1, 20)),
    "number of 25 bits": lambda r: r.verbs.qp_numbers.__setitem__(0, 1 << 24),
    "number 0": lambda r: r.verbs.qp_numbers.__setitem__(0, 0),
    "psn of 25 bits": lambda r: r.verbs.psns.__setitem__(0, 1 << 24),
    "short gid": lambda r: _set(r.verbs, gid=b"x"),
    "mtu": lambda r: _set(r.verbs, mtu=9),
    "no receives": lambda r: _set(r.verbs, receives=0),
    "endless receives": lambda r: _set(r.verbs, receives=1 << 30),
    "a region less": lambda r: r.verbs.regions.__delitem__(0),
    "a smaller region": lambda r: _set(r.verbs.regions[0], nbytes=1),
    "address wraps": lambda r: _set(r.verbs.regions[0], address=(1 << 64) - 8),
    "a mailbox less": lambda r: r.verbs.mailboxes.__delitem__(0),
    "a smaller mailbox": lambda r: _set(r.verbs.mailboxes[0], nbytes=8),
}


@pytest.mark.parametrize("name", BAD_REPLIES)
async def test_bad_reply_is_refused_by_the_writer(world: World, name: str) -> None:
    link = await world.pair()
    with pytest.raises(InvalidArgument):
        await link.open(change=BAD_REPLIES[name])
    link.target.transport.forget(link.link_id)


BAD_HELLOS: dict[str, Callable[[pb.DataHello], None]] = {
    "protocol": lambda h: _set(h, protocol=99),
    "token": lambda h: _set(h, token=bytes(32)),
    "link": lambda h: _set(h, link_id=5),
    "a queue pair less": lambda h: h.verbs.qp_numbers.__delitem__(0),
    "gid": lambda h: _set(h.verbs, gid=bytes(15)),
    "nothing": lambda h: h.ClearField("verbs"),
}


@pytest.mark.parametrize("name", BAD_HELLOS)
async def test_bad_hello_is_refused_by_the_destination(world: World, name: str) -> None:
    link = await world.pair()
    with pytest.raises(Unavailable, match="refused by the destination"):
        await link.open(change_hello=BAD_HELLOS[name])
    link.target.transport.forget(link.link_id)
    # And the door is open for the next.
    good = await Link(link.source, link.target, 2).open()
    good.outbound.post(good.write(IMM, [0], [0]))
    assert [c.error for c in good.drain()] == [""]
    await good.close()


async def test_a_hello_opens_its_link_once(world: World) -> None:
    seen: list[pb.DataHello] = []
    link = await (await world.pair()).open(change_hello=lambda hello: seen.append(hello))
    assert not (await link.target.transport.join(seen[0])).ok
    await link.close()


async def test_engine_gone_takes_the_links_with_it(world: World) -> None:
    """`deregister` while a writer is not fenced yet: its queue pairs go before the memory."""
    link = await (await world.pair()).open()
    link.target.transport.deregister()
    link.outbound.post(link.write(IMM, [0], [0]))
    assert "status" in link.drain()[0].error
    link.outbound.close()
    assert link.inbound is not None
    await link.inbound.fence()
    with pytest.raises(FailedPrecondition, match="no engine"):
        await Link(link.source, link.target, 2).open()
    link.target.transport.register(link.target.memory)
    again = await Link(link.source, link.target, 3).open()
    again.outbound.post(again.write(IMM, [0], [0]))
    assert [c.error for c in again.drain()] == [""]
    await again.close()


async def test_mailbox_that_says_nothing_ends_the_link(world: World) -> None:
    """A writer that closes a run without its bytes is not believed."""
    link = await (await world.pair(qps=1)).open()
    link.outbound._mailbox.put = lambda ring, run, nbytes: link.outbound._mailbox.entry_address(ring, run)  # type: ignore[method-assign]
    link.outbound.post(link.write(IMM, [0], [0]))
    link.outbound.poll(1 << 20)
    link.take()
    assert link.received == {}
    assert not link.inbound.usable  # type: ignore[union-attr]
    await link.close()


async def test_polling_thread_serves_links(world: World) -> None:
    """The thread finds what comes without the loop's help."""
    import asyncio

    link = await world.pair(polling="thread")
    arrived = asyncio.Event()
    take = link.take

    def took() -> None:
        take()
        arrived.set()

    link.take = took  # type: ignore[method-assign]
    await link.open()
    for turn in range(3):
        link.outbound.post(link.write(IMM + turn, [0] * 5, [PAGE] * 5))
        # The fake carries it out at once: its completions are there at the second look.
        link.outbound.poll(1 << 20)
        assert [c.error for c in link.outbound.poll(1 << 20)] == [""]
        while link.received.get(IMM + turn, 0) < 5 * PAGE:
            async with asyncio.timeout(60):
                await arrived.wait()
            arrived.clear()
    assert link.received == {IMM + i: 5 * PAGE for i in range(3)}
    await link.close()


# --- what a machine lacks ---------------------------------------------------------------------------------------------


async def test_reasons_why_not() -> None:
    network = StubNetwork()
    cases = [
        (VerbsOptions(), network.api(devices=()), "no RDMA device"),
        (VerbsOptions(device="mlx5_9"), network.api(), "no RDMA device 'mlx5_9'; there is stub0"),
        (VerbsOptions(), network.api(active=False), "not active"),
        (VerbsOptions(), network.api(max_cqe=10), "max_cqe 10"),
        (VerbsOptions(gid_index=1), network.api(), "no GID"),
    ]
    for options, api, reason in cases:
        transport = VerbsTransport(options, api)
        with pytest.raises((Unavailable, FailedPrecondition), match=reason):
            await transport.start()
        assert transport.status[0] is False
        assert reason in transport.status[1]
        await transport.close()


async def test_status_names_the_device() -> None:
    transport = VerbsTransport(VerbsOptions(polling="events"), StubNetwork().api())
    await transport.start()
    assert transport.status == (True, "stub0 port 1 gid 2, completion channels")
    assert transport.judge(transport.offer()) == (True, "RDMA by stub0")
    assert transport.judge(pb.TransportOffer(name="verbs", link_layer=1))[0] is False
    await transport.close()
    assert transport.status == (False, "closed")


def test_memory_is_registered_once() -> None:
    network = StubNetwork()
    device = Device(network.api(), VerbsOptions())
    first = device.register(1 << 20, 4096)
    assert device.register(1 << 20, 4096) == first
    assert device.registered == 1
    device.release(first)
    assert device.registered == 1
    device.release(first)
    assert device.registered == network.open_objects == 0
    with pytest.raises(InvalidArgument):
        device.release(first)
    device.close()
    with pytest.raises(Unavailable, match="closed"):
        device.register(0, 1)
    assert network.violations == []


async def test_unpinnable_memory_leaves_the_engine_to_other_transports(world: World) -> None:
    end = End(world.network, "x")
    await end.transport.start()
    (device,) = end.transport._nics.devices

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise device.api.error("Cannot allocate memory")

    object.__setattr__(device, "_host_mr", refuse)
    end.transport.register(end.memory)
    assert end.transport.status[0] is False
    assert "memlock" in end.transport.status[1]
    world.ends.append(end)
