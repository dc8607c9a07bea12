"""Cost per page of the verbs transport's Python on both ends, beside what the wire allows at 400 Gbit/s.

    python benchmarks/verbs_cost.py            natively, over pyverbs calls that do nothing
    python benchmarks/verbs_cost.py --device   on this machine's RDMA device (writes of 8 bytes, so that no copy counts)

Writer: rows into runs, work requests, posting, completions. Destination: polling, mailbox, receives, credits.
A page that the allocator placed after its neighbour on both sides shares a work request with it (`merged`).
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import socket
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kvmesh.kv.layout import KvGroup, KvLayout
from kvmesh.kv.region import Region
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.transports.base import EngineMemory, Expected, Inbound, Write
from kvmesh.transfer.transports.verbs import VerbsOptions, VerbsTransport
from kvmesh.transfer.transports.verbs.outbound import VerbsOutbound
from kvmesh.transfer.transports.verbs.qp import KIND_CLOSE, KIND_RECEIVE, request_id
from kvmesh.transfer.transports.verbs.stub import RECEIVED, StubNetwork

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

    def __init__(self, api: Any, **options: Any) -> None:
        self.options = VerbsOptions(polling="events", qps=1, run_rows=ROWS, **options)
        self.source = VerbsTransport(self.options, api() if api else None)
        self.target = VerbsTransport(self.options, api() if api else None)
        self.inbound: Any = None
        self.outbound: VerbsOutbound

    async def open(self) -> Ends:
        for end in (self.source, self.target):
            await end.start()
            end.register(engine())
        endpoint = self.target.expect(Expected(1, "w", self._joined, lambda: None, print))
        reply = pb.PeerHelloReply(link_id=1, regions=engine().infos, token=endpoint.token)
        reply.verbs.CopyFrom(endpoint.verbs)
        outbound = await self.source.connect_over(self.target.join, reply, "bench", 30)
        assert isinstance(outbound, VerbsOutbound)
        self.outbound = outbound
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
    start = time.perf_counter()
    action()
    return (time.perf_counter() - start) * 1e6


async def native(rounds: int) -> tuple[float, float]:
    """Microseconds per work request at the writer, per run at the destination. Best of five."""
    ends = await Ends(null_api).open()
    writer, inbound = ends.outbound, ends.inbound
    lane = writer._lanes[0]
    columns = [row * ROW_BYTES for row in range(ROWS)]
    post_us, take_us = [], []
    number = 0
    for _ in range(5):
        posting = taking = 0.0
        for _ in range(rounds):
            write = Write(number, 1, 0, 0, columns, columns, [ROW_BYTES] * ROWS, ROWS * ROW_BYTES)
            completion = SimpleNamespace(wr_id=request_id(KIND_CLOSE, 0, number), status=0, opcode=1, imm_data=0)

            def post(write: Write = write, completion: Any = completion) -> None:
                writer.post(write)
                writer.poll(1 << 40)
                writer._cq.raw.found = [completion]
                writer.poll(0)

            posting += timed(post)
            inbound.mailbox.put(0, number, ROWS * ROW_BYTES)
            inbound.queue.raw.found = [
                SimpleNamespace(
                    wr_id=request_id(KIND_RECEIVE, 0, 0), status=0, opcode=RECEIVED, imm_data=socket.htonl(1)
                )
            ]
            taking += timed(inbound.poll)
            # The credits that the wire would have carried.
            inbound._credits[0]._sending = 0
            lane.credits.returned(inbound._credits[0]._posted)
            number += 1
        post_us.append(posting / rounds / ROWS)
        take_us.append(taking / rounds)
    return min(post_us), min(take_us)


async def on_device(rounds: int) -> tuple[float, float]:
    """The same on a device; completions are waited for outside of the times."""
    ends = await Ends(None).open()
    writer, inbound = ends.outbound, ends.inbound
    print(f"device: {ends.source.status[1]}")
    columns = [row * ROW_BYTES for row in range(ROWS)]
    post_us, take_us, driver_us = [], [], []
    pair = writer._lanes[0].pair
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


def pyverbs_share() -> tuple[float, float]:
    """What pyverbs itself takes without a device: setting a scatter entry, making a completion object. Microseconds; 0
    where it is not there."""
    try:
        wc = importlib.import_module("pyverbs.cq").WC
        sge = importlib.import_module("pyverbs.wr").SGE(0, 0, 0)
    except ImportError:
        return 0.0, 0.0
    count = 20_000

    def entries() -> None:
        for number in range(count):
            sge.addr = number
            sge.length = 65536

    def completions() -> None:
        for number in range(count):
            wc(wr_id=number, status=0, opcode=129, vendor_err=0, byte_len=8, qp_num=1, src_qp=1, imm_data=7, wc_flags=0)

    shares = min(timed(entries) for _ in range(5)) / count, min(timed(completions) for _ in range(5)) / count
    sge.close()
    return shares


def table(request_us: float, run_us: float) -> None:
    per_page = run_us / ROWS
    print(f"writer {request_us:.2f} us a work request; destination {run_us:.2f} us a run of {ROWS}")
    print(f"{'page':>8} {'merged':>6} {'wire us':>8} {'writer us':>10} {'dest. us':>9}  within the wire's time")
    for size, name in PAGES:
        for merged in (1, 2, 4, 16):
            if size * merged > 1 << 20:
                continue
            budget = size / WIRE_BYTES_PER_US
            writer, destination = request_us / merged, per_page / merged
            verdict = "yes" if max(writer, destination) <= budget else f"no: {writer / budget:.1f} times"
            print(f"{name:>8} {merged:>6} {budget:>8.2f} {writer:>10.2f} {destination:>9.2f}  {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", action="store_true")
    parser.add_argument("--rounds", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.device:
        table(*asyncio.run(on_device(arguments.rounds or 200)))
    else:
        request_us, run_us = asyncio.run(native(arguments.rounds or 500))
        entry_us, completion_us = pyverbs_share()
        if completion_us:
            print(f"with pyverbs' own {entry_us:.2f} us a scatter entry and {completion_us:.2f} us a completion:")
        else:
            print("without pyverbs' own share (it is not installed):")
        table(request_us + entry_us + completion_us / ROWS, run_us + completion_us)


if __name__ == "__main__":
    main()
