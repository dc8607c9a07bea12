"""From the doorbell's ring in one process to the posted write in another's mover, by way of waiting.

A ringer process rings each layer after a time of its own (a little more or less, as layers take) and notes when; the
mover of this process, with the real watcher and send table, posts to an outbound that notes when and does nothing else.

    python benchmarks/doorbell.py [--steps 40] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from kvmesh.kv.layout import KvGroup, KvLayout
from kvmesh.kv.region import Region
from kvmesh.kv.ring import StepEntry, StepRecord, StepRing
from kvmesh.transfer.mover import Mover
from kvmesh.transfer.sends import Send, SendTable
from kvmesh.transfer.transports.base import Completion, Outbound, Write
from kvmesh.transfer.watcher import Patience, RingWatcher

LAYERS = 32
LAYER_TIMES_S = (0.0003, 0.002)
WAYS = ("sleep", "yield", "spin", "signalled")

RINGER = """
import ctypes, mmap, os, random, sys, time
bell_fd, log_fd, event_fd, layers = map(int, sys.argv[1:5])
layer_s, signalled = float(sys.argv[5]), sys.argv[6] == "1"
bell = memoryview(mmap.mmap(bell_fd, 4096)).cast("Q")
log = memoryview(mmap.mmap(log_fd, os.fstat(log_fd).st_size)).cast("Q")
ctypes.CDLL(None).prctl(29, ctypes.c_ulong(1000))
for line in sys.stdin:
    for _ in range(layers):
        time.sleep(layer_s * random.uniform(0.9, 1.1))
        value = bell[0] + 1
        log[value] = time.monotonic_ns()
        bell[0] = value
        if signalled:
            os.eventfd_write(event_fd, 1)
    print(flush=True)
"""


class Noting(Outbound):
    """Notes when writes are posted; they are done at the next poll."""

    def __init__(self) -> None:
        self.times: list[int] = []
        self._done: list[Completion] = []

    def post(self, write: Write) -> None:
        self.times.append(time.monotonic_ns())
        self._done.append(Completion(write.context, write.nbytes))

    def poll(self, budget: int) -> list[Completion]:
        done, self._done = self._done, []
        return done

    def flush(self, immediate: int) -> None: ...

    def fence(self, reason: str) -> None: ...

    def close(self) -> None: ...

    @property
    def busy(self) -> bool:
        return bool(self._done)

    @property
    def broken(self) -> str:
        return ""


async def one_way(way: str, layer_s: float, steps: int) -> dict[str, object]:
    """p50 and p99 of the delay, and the mover's CPU time a layer."""
    group = KvGroup("main", "full", tuple(range(LAYERS)), kv_heads=1, head_dim=64)
    layout = KvLayout(version=1, dtype="bf16", page_size=16, groups=(group,), num_pages=steps)
    ring_region, bell_region = Region.create("ring", 1 << 16), Region.create("bell", 4096)
    log_region = Region.create("log", 8 * (steps * LAYERS + 1))
    eventfd = os.eventfd(0, os.EFD_NONBLOCK)
    ring = StepRing(ring_region.buf)
    table, out = SendTable(layout), Noting()
    mover = Mover(on_events=lambda _: None, on_broken=lambda *_: None, on_engine_fault=print)
    mover.start()
    patience = Patience.named("sleep" if way == "signalled" else way)
    await mover.attach(table, RingWatcher(ring_region, bell_region, os.dup(eventfd), patience))
    await mover.add_link(out)
    pages = list(range(steps))
    send = Send(
        transfer_id=1,
        immediate=1,
        outbound=out,
        src_layout=layout,
        dst_layout=layout,
        src_pages={"main": pages},
        dst_pages={"main": pages},
        src_region={("main", 0): 0},
        dst_region={("main", 0): 0},
        expected=layout.region_bytes("main"),
    )
    await mover.start_send(send, 0)
    fds = (bell_region.fd, log_region.fd, eventfd)
    command = [sys.executable, "-c", RINGER, *map(str, fds), str(LAYERS), str(layer_s), str(int(way == "signalled"))]
    ringer = subprocess.Popen(  # noqa: ASYNC220
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=fds
    )
    assert ringer.stdin is not None
    assert ringer.stdout is not None
    cpu = await mover.call(time.thread_time)
    for step in range(steps):
        assert ring.publish(StepRecord(step * LAYERS + 1, LAYERS, (StepEntry(1, step, 1),)))
        os.eventfd_write(eventfd, 1)
        ringer.stdin.write(b"go\n")
        ringer.stdin.flush()
        await asyncio.to_thread(ringer.stdout.readline)
    async with asyncio.timeout(30):
        while len(out.times) < steps * LAYERS:
            await asyncio.sleep(0.01)
    cpu = await mover.call(time.thread_time) - cpu
    ringer.stdin.close()
    ringer.wait(10)
    rung = log_region.view(np.uint64)[1:].astype(np.int64)
    # The first step teaches the watcher what a layer takes.
    delays = (np.asarray(out.times) - rung)[LAYERS:] / 1e3
    await mover.remove_link(out, "over")
    await mover.detach()
    await mover.stop()
    ring.close()
    for region in (ring_region, bell_region, log_region):
        region.close()
    os.close(eventfd)
    return {
        "part": "doorbell",
        "way": way,
        "layer_ms": layer_s * 1e3,
        "p50_us": float(np.quantile(delays, 0.5)),
        "p90_us": float(np.quantile(delays, 0.9)),
        "p99_us": float(np.quantile(delays, 0.99)),
        "cpu_us_a_layer": cpu / (steps * LAYERS) * 1e6,
    }


async def measure_doorbell(steps: int = 40) -> list[dict[str, object]]:
    """All ways, at all layer times."""
    rows = []
    for layer_s in LAYER_TIMES_S:
        for way in WAYS:
            row = await one_way(way, layer_s, steps)
            rows.append(row)
            print(
                f"doorbell to posted write, layers of {row['layer_ms']:.1f} ms, {way:9s}: p50 {row['p50_us']:6.0f} us"
                f"  p90 {row['p90_us']:6.0f} us  p99 {row['p99_us']:6.0f} us,"
                f"  CPU {row['cpu_us_a_layer']:4.0f} us a layer",
                flush=True,
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = asyncio.run(measure_doorbell(args.steps))
    if args.out is not None:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
