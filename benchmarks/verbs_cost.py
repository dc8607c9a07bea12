"""Cost per page of the RDMA transports' Python on both ends, beside what the wire allows at 400 Gbit/s.

    python benchmarks/verbs_cost.py            without a device, over calls and a driver that do nothing
    python benchmarks/verbs_cost.py --device   on this machine's RDMA device (writes of 8 bytes, so that no copy counts)

verbs: a run of 64 writes has one completion at each end. efa: every write has one at each end, and takes a receive.
Writer: rows into runs, work requests, posting, completions. Destination: polling, mailbox, receives, credits.
A page that the allocator placed after its neighbour on both sides shares a work request with it (`merged`; how often
that is with the page pool's preference for ascending runs is told at the end).
Times are those of the quietest of many short batches, in CPU time of the thread.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import importlib
import random
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvmesh.kv.layout import KvGroup, KvLayout
from kvmesh.kv.pool import PagePool
from kvmesh.kv.region import Region
from kvmesh.native import NativeUnavailable, load
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.transports.base import EngineMemory, Expected, Inbound, Transport, Write
from kvmesh.transfer.transports.efa import EfaOptions, EfaTransport
from kvmesh.transfer.transports.efa import qp as efa_qp
from kvmesh.transfer.transports.efa.stub import EfaStubNetwork
from kvmesh.transfer.transports.verbs import VerbsOptions, VerbsTransport
from kvmesh.transfer.transports.verbs.native.rings import WC, NativePair, NativeQueue, library
from kvmesh.transfer.transports.verbs.qp import KIND_CLOSE, KIND_RECEIVE, request_id
from kvmesh.transfer.transports.verbs.stub import RECEIVED, StubNetwork

BATCH = 20
WIRE_BYTES_PER_US = 400e9 / 8 / 1e6
PAGES = ((64 << 10, "64 KiB"), (256 << 10, "256 KiB"), (1 << 20, "1 MiB"))
ROWS = 64
ROW_BYTES = 8


class NullQp:
    """QPEx whose calls do nothing. What was posted is kept as numbers, for completions."""

    def __init__(self) -> None:
        self.wr_id = self.wr_flags = self.qp_num = 1
        self.closed: list[int] = []

    def wr_start(self) -> None: ...
    def wr_rdma_write(self, rkey: int, target: int) -> None: ...
    def wr_set_sge(self, sge: Any) -> None: ...
    def post_recv(self, receive: Any) -> None: ...
    def to_rts(self, attributes: Any) -> None: ...
    def modify(self, attributes: Any, mask: int) -> None: ...
    def close(self) -> None: ...

    def wr_rdma_write_imm(self, rkey: int, target: int, imm: int) -> None:
        self.closed.append(self.wr_id)

    def wr_complete(self) -> None: ...


class NullCq:
    """A queue that is filled by hand."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def poll(self, limit: int) -> tuple[int, list[Any]]:
        found, self.found = self.found[:limit], self.found[limit:]
        return len(found), found

    def req_notify(self) -> None: ...
    def close(self) -> None: ...


class TimedQp:
    """A real QPEx that keeps how long the driver's doorbell (`wr_complete`) takes: on soft-RoCE it sends in it."""

    def __init__(self, inner: Any) -> None:
        self.__dict__["inner"] = inner
        self.__dict__["driver_us"] = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.inner, name, value)

    def wr_complete(self) -> None:
        self.__dict__["driver_us"] += timed(self.inner.wr_complete)


class NullSrd(NullQp):
    """The same for SRD. receives: posted, so that credits can be told."""

    def wr_rdma_write_imm(self, rkey: int, target: int, imm: int) -> None: ...
    def wr_set_ud_addr(self, handle: Any, qpn: int, qkey: int) -> None: ...
    def wr_abort(self) -> None: ...
    def to_rtr(self, attributes: Any) -> None: ...


def null_efa() -> Any:
    """The fake of EFA with queue pairs and queues that cost nothing."""
    from dataclasses import replace

    api = EfaStubNetwork().api()
    return replace(api, verbs=replace(api.verbs, CQ=lambda *_: NullCq()), SRDQPEx=lambda *_: NullSrd())


def null_api() -> Any:
    """The fake pyverbs with queue pairs and queues that cost nothing."""
    from dataclasses import replace

    network = StubNetwork()
    return replace(network.api(), CQ=lambda *_: NullCq(), QPEx=lambda *_: NullQp())


def engine() -> EngineMemory:
    group = KvGroup("main", "full", (0,), kv_heads=1, head_dim=64)
    layout = KvLayout(version=1, dtype="bf16", page_size=16, groups=(group,), num_pages=256)
    region = Region.create("bench", layout.region_bytes("main"))
    return EngineMemory("bench", 1, layout, [pb.RegionInfo(group="main", nbytes=region.nbytes, key=1)], [region])


class Ends:
    """A link whose two ends are both here."""

    def __init__(self, source: Transport, target: Transport) -> None:
        self.source, self.target = source, target
        self.inbound: Any = None
        self.outbound: Any = None

    async def open(self) -> Ends:
        for end in (self.source, self.target):
            await end.start()
            end.register(engine())
        endpoint = self.target.expect(Expected(1, "w", self._joined, lambda: None, print))
        reply = pb.PeerHelloReply(link_id=1, regions=engine().infos, token=endpoint.token)
        if endpoint.verbs is not None:
            reply.verbs.CopyFrom(endpoint.verbs)
        if endpoint.efa is not None:
            reply.efa.CopyFrom(endpoint.efa)
        self.outbound = await self.source.connect_over(self.target.join, reply, "bench", 30)
        # The loop is not to take what the benchmark wants to time.
        self.inbound._stop_reading()
        return self

    async def _joined(self, inbound: Inbound, pidfd: int | None) -> None:
        self.inbound = inbound

    async def close(self) -> None:
        self.outbound.close()
        await self.inbound.fence()
        for end in (self.source, self.target):
            end.deregister()
            await end.close()


def timed(action: Callable[[], Any]) -> float:
    start = time.thread_time_ns()
    action()
    return (time.thread_time_ns() - start) / 1e3


def verbs_ends(api: Callable[[], Any] | None) -> Ends:
    options = VerbsOptions(polling="events", qps=1, run_rows=ROWS)
    return Ends(VerbsTransport(options, api() if api else None), VerbsTransport(options, api() if api else None))


def efa_ends() -> Ends:
    options = EfaOptions(polling="events")
    return Ends(EfaTransport(options, null_efa()), EfaTransport(options, null_efa()))


class Quietest:
    """Microseconds of the fastest batch: the others were disturbed."""

    def __init__(self) -> None:
        self.best = float("inf")
        self._sum = 0.0
        self._count = 0

    def add(self, us: float) -> None:
        self._sum += us
        self._count += 1
        if self._count == BATCH:
            self.best = min(self.best, self._sum / BATCH)
            self._sum, self._count = 0.0, 0


class Feed:
    """Puts completions into a link's queues, for pyverbs' way of polling. `adopt`: of an end of a link."""

    def adopt(self, queue: Any, pair: Any, handle: Any = None) -> None:
        """Nothing to be done: it is as it was made."""

    def prepare(self, completions: Sequence[Any]) -> Any:
        """Before the time is taken."""
        return list(completions)

    def give(self, queue: Any, prepared: Any) -> None:
        """The next poll finds them."""
        queue.raw.found = prepared


class NativeFeed(Feed):
    """The same for the native code, over C structures of a driver that does nothing."""

    def __init__(self) -> None:
        code = load(Path(__file__).with_name("null_driver.cpp"), ("-O2", "-fPIC", "-std=c++17"))
        rings = library()
        if rings is None:
            raise NativeUnavailable("it is not there")
        self._fill = code.null_fill
        context, queue, pair = (ctypes.c_uint64 * 40)(), (ctypes.c_uint64 * 8)(), (ctypes.c_uint64 * 48)()
        self._kept = (context, queue, pair)
        context[12] = _address(code.null_poll)
        queue[0] = ctypes.addressof(context)
        for offset in (224, 232, 272, 304, 320, 328):
            pair[offset // 8] = _address(code.null_call)
        self._queue = NativeQueue(rings, ctypes.addressof(queue), OSError)
        self._pair = NativePair(rings, ctypes.addressof(pair))

    def adopt(self, queue: Any, pair: Any, handle: Any = None) -> None:
        queue._poll = self._queue.poll
        pair._native = self._pair
        pair._handle = (handle, 1)

    def prepare(self, completions: Sequence[Any]) -> Any:
        fields = ("byte_len", "imm_data", "qp_num", "src_qp", "wc_flags", "pkey_index", "slid")
        return len(completions), b"".join(
            WC.pack(wc.wr_id, wc.status, wc.opcode, 0, *(getattr(wc, name, 0) for name in fields), 0, 0)
            for wc in completions
        )

    def give(self, queue: Any, prepared: Any) -> None:
        self._fill(prepared[1], prepared[0])


def _address(function: Any) -> int:
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


async def native(rounds: int, feed: Feed) -> tuple[float, float]:
    """verbs: microseconds per work request at the writer, per run at the destination."""
    ends = await verbs_ends(null_api).open()
    writer, inbound = ends.outbound, ends.inbound
    lane = writer._lanes[0]
    feed.adopt(writer._cq, lane.pair)
    feed.adopt(inbound.queue, SimpleNamespace())
    columns = [row * ROW_BYTES for row in range(ROWS)]
    posting, taking = Quietest(), Quietest()
    receive = SimpleNamespace(wr_id=request_id(KIND_RECEIVE, 0, 0), status=0, opcode=RECEIVED, imm_data=socket.htonl(1))
    none, received = feed.prepare([]), feed.prepare([receive])
    for number in range(rounds):
        write = Write(number, 1, 0, 0, columns, columns, [ROW_BYTES] * ROWS, ROWS * ROW_BYTES)
        done = feed.prepare([SimpleNamespace(wr_id=request_id(KIND_CLOSE, 0, number), status=0, opcode=1, imm_data=0)])

        def post(write: Write = write, done: Any = done) -> None:
            feed.give(writer._cq, none)
            writer.post(write)
            writer.poll(1 << 40)
            feed.give(writer._cq, done)
            writer.poll(0)

        posting.add(timed(post))
        inbound.mailbox.put(0, number, ROWS * ROW_BYTES)
        feed.give(inbound.queue, received)
        taking.add(timed(inbound.poll))
        # The credits that the wire would have carried.
        inbound._credits[0]._sending = 0
        lane.credits.returned(inbound._credits[0]._posted)
    return posting.best / ROWS, taking.best


async def native_efa(rounds: int, feed: Feed) -> tuple[float, float]:
    """efa: microseconds per write at the writer, and at the destination."""
    ends = await efa_ends().open()
    writer, inbound = ends.outbound, ends.inbound
    feed.adopt(writer._cq, writer.pair, writer._peer.handle)
    feed.adopt(inbound.queue, inbound.pair, inbound._peer.handle)
    columns = [row * ROW_BYTES for row in range(ROWS)]
    posting, taking = Quietest(), Quietest()
    qpn, handle = inbound._source
    arrived = SimpleNamespace(
        wr_id=efa_qp.KIND_RECEIVE,
        status=0,
        opcode=RECEIVED,
        imm_data=socket.htonl(1),
        byte_len=ROW_BYTES,
        src_qp=qpn,
        slid=handle,
    )
    none = feed.prepare([])
    for number in range(1, rounds + 1):
        write = Write(number, 1, 0, 0, columns, columns, [ROW_BYTES] * ROWS, ROWS * ROW_BYTES)
        done = feed.prepare([SimpleNamespace(wr_id=number << efa_qp.KIND_BITS, status=0, opcode=1)] * ROWS)
        received = feed.prepare([arrived] * ROWS)

        def post(write: Write = write, done: Any = done) -> None:
            feed.give(writer._cq, none)
            writer.post(write)
            writer.poll(1 << 40)
            feed.give(writer._cq, done)
            writer.poll(0)

        posting.add(timed(post))
        feed.give(inbound.queue, received)
        taking.add(timed(inbound.poll))
        inbound._credits._sending = 0
        writer.window.returned(inbound._credits._posted)
    return posting.best / ROWS, taking.best / ROWS


async def on_device(rounds: int) -> tuple[float, float]:
    """The same on a device; completions are waited for outside of the times."""
    ends = await verbs_ends(None).open()
    writer, inbound = ends.outbound, ends.inbound
    print(f"device: {ends.source.status[1]}")
    columns = [row * ROW_BYTES for row in range(ROWS)]
    post_us, take_us, driver_us = [], [], []
    pair = writer._lanes[0].pair
    # The driver's share can be told apart where Python makes the calls.
    pair._native = None
    pair._qp = doorbell = TimedQp(pair._qp)
    for number in range(rounds):
        before = doorbell.driver_us
        writer.post(Write(number, 1, 0, 0, columns, columns, [ROW_BYTES] * ROWS, ROWS * ROW_BYTES))
        spent = timed(lambda: writer._fill(1 << 40))
        while writer.outstanding:
            writer._cq.wait(1.0)
            spent += timed(writer._collect)
        driver_us.append((doorbell.driver_us - before) / ROWS)
        post_us.append(spent / ROWS - driver_us[-1])
        inbound.queue.wait(1.0)
        take_us.append(timed(inbound.poll))
        assert writer.poll(0), "it has completed"
    await ends.close()
    print(
        f"the driver's own {sorted(driver_us)[len(driver_us) // 2]:.2f} us a work request is left out (it sends there)"
    )
    return sorted(post_us)[len(post_us) // 2], sorted(take_us)[len(take_us) // 2]


def merging(pages: int = 4096, longest: int = 256) -> list[tuple[int, float]]:
    """(percent of each pool that others hold, pages per work request): sequences come and go at both ends, each end's
    own, and those that are sent from one to the other get what is free there. A run is what ascends on both sides."""
    found = []
    for percent in (25, 50, 75, 90):
        draw = random.Random(percent)
        ends = [_End(PagePool(pages), draw, percent, longest) for _ in range(2)]
        runs = moved = 0
        for turn in range(400):
            for end in ends:
                end.churn(draw.randint(1, 8))
            size = draw.randint(1, longest)
            taken = [end.pool.allocate(-1, size) for end in ends]
            if taken[0] is not None and taken[1] is not None and turn >= 100:
                moved += size
                steps = zip(taken[0], taken[0][1:], taken[1], taken[1][1:], strict=False)
                runs += 1 + sum(b != a + 1 or d != c + 1 for a, b, c, d in steps)
            for end, got in zip(ends, taken, strict=True):
                if got is not None:
                    end.pool.release(-1)
        found.append((percent, moved / runs))
    return found


class _End:
    """A pool with others' sequences in it."""

    def __init__(self, pool: PagePool, draw: random.Random, percent: int, longest: int) -> None:
        self.pool, self._draw, self._longest = pool, draw, longest
        self._held = pool.total * percent // 100
        self._alive: list[int] = []
        self._owner = 0
        self.churn(200)

    def churn(self, count: int) -> None:
        for _ in range(count):
            size = self._draw.randint(1, self._longest)
            while self._alive and self.pool.total - self.pool.free_count + size > self._held:
                self.pool.release(self._alive.pop(self._draw.randrange(len(self._alive))))
            self._owner += 1
            if self.pool.allocate(self._owner, size) is not None:
                self._alive.append(self._owner)


def pyverbs_share() -> tuple[float, float]:
    """What pyverbs itself takes without a device: setting a scatter entry, making a completion object. Microseconds; 0
    where it is not there."""
    try:
        wc = importlib.import_module("pyverbs.cq").WC
        sge = importlib.import_module("pyverbs.wr").SGE(0, 0, 0)
    except ImportError:
        return 0.0, 0.0
    count = 2_000

    def entries() -> None:
        for number in range(count):
            sge.addr = number
            sge.length = 65536

    def completions() -> None:
        for number in range(count):
            wc(wr_id=number, status=0, opcode=129, vendor_err=0, byte_len=8, qp_num=1, src_qp=1, imm_data=7, wc_flags=0)

    shares = min(timed(entries) for _ in range(15)) / count, min(timed(completions) for _ in range(15)) / count
    sge.close()
    return shares


def table(name: str, writer_us: float, destination_us: float) -> None:
    """Microseconds per work request at both ends."""
    print(f"{name}: writer {writer_us:.2f} us a work request, destination {destination_us:.2f} us")
    print(f"{'page':>8} {'merged':>6} {'wire us':>8} {'writer us':>10} {'dest. us':>9}  within the wire's time")
    for size, label in PAGES:
        for merged in (1, 2, 4, 16):
            if size * merged > 1 << 20:
                continue
            budget = size / WIRE_BYTES_PER_US
            writer, destination = writer_us / merged, destination_us / merged
            verdict = (
                "yes" if max(writer, destination) <= budget else f"no: {max(writer, destination) / budget:.1f} times"
            )
            print(f"{label:>8} {merged:>6} {budget:>8.2f} {writer:>10.2f} {destination:>9.2f}  {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", action="store_true")
    parser.add_argument("--rounds", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.device:
        request_us, run_us = asyncio.run(on_device(arguments.rounds or 200))
        table("verbs", request_us, run_us / ROWS)
        return
    rounds = arguments.rounds or 2000
    feeds: list[tuple[str, Feed]] = [("Python", Feed())]
    try:
        feeds.append(("native", NativeFeed()))
    except NativeUnavailable as error:
        print(f"no native code: {error}")
    for way, feed in feeds:
        # Native code makes none of pyverbs' objects.
        entry_us, completion_us = pyverbs_share() if way == "Python" else (0.0, 0.0)
        if way == "Python":
            what = f"{entry_us:.2f} us a scatter entry and {completion_us:.2f} us a completion"
            print(f"Python's figures have pyverbs' own {what} in them" if completion_us else "pyverbs is not installed")
        request_us, run_us = asyncio.run(native(rounds, feed))
        table(f"verbs, {way}", request_us + entry_us + completion_us / ROWS, (run_us + completion_us) / ROWS)
        write_us, take_us = asyncio.run(native_efa(rounds, feed))
        table(f"efa, {way}", write_us + entry_us + completion_us, take_us + completion_us)
    for percent, merged in merging():
        print(f"pools at {percent} %: {merged:.1f} pages a work request")


if __name__ == "__main__":
    main()
