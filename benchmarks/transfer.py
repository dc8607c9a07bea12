"""KV transfer between two sidecar processes, beside a plain copy of the same pages in the same run.

From the doorbell's ring at the source engine to the destination engine's client being woken: the watcher of one sidecar
sees the ring, its mover moves scattered 64 KiB pages, the other sidecar counts the bytes and wakes its engine.

    shm floor: a loop of memmove over the very same pages, alternating with the transfers. Goal: 85 % of it at 64 MiB.
    tcp floor: a loop of sendmsg/recv_into of the same pages over loopback between two processes.

    python benchmarks/transfer.py [--transport shm|tcp|all] [--reps 30] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from kvmesh.kv.layout import KvGroup, KvLayout

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "integration"), str(ROOT)]

from transfer_kit import Engine, sidecars, soon  # noqa: E402

PAGE_BYTES = 64 << 10
POOL_PAGES = 2048
SIZES = (1, 4, 16, 64, 256, 1024)
GOAL = 0.85
LAYER_S = 0.001

RAW_RECEIVER = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
sock, _ = server.accept()
sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
pool = memoryview(bytearray(int(sys.argv[2]) * int(sys.argv[1])))
page = int(sys.argv[1])
while True:
    head = sock.recv(8)
    if not head:
        break
    count = int.from_bytes(head, "little")
    for index in range(count):
        view = pool[(index * 7 % int(sys.argv[2])) * page :][:page]
        while view:
            view = view[sock.recv_into(view) :]
    sock.sendall(b"1")
"""


def bench_layout() -> KvLayout:
    group = KvGroup("main", "full", (0,), kv_heads=4, head_dim=64)
    layout = KvLayout(version=1, dtype="bf16", page_size=64, groups=(group,), num_pages=POOL_PAGES)
    assert layout.page_bytes("main") == PAGE_BYTES
    return layout


def scattered(rng: np.random.Generator, count: int) -> list[int]:
    """Page numbers in random order: next to nothing merges."""
    return [int(page) for page in rng.permutation(POOL_PAGES)[:count]]


class Memcpy:
    """The shm floor: the same pages, one memmove each."""

    def __init__(self, source: Engine, target: Engine) -> None:
        self.src = int(source.regions["main"].view().__array_interface__["data"][0])
        self.dst = int(target.regions["main"].view().__array_interface__["data"][0])

    def run(self, src: list[int], dst: list[int]) -> float:
        move = ctypes.memmove
        begin = time.perf_counter()
        for a, b in zip(src, dst, strict=True):
            move(self.dst + b * PAGE_BYTES, self.src + a * PAGE_BYTES, PAGE_BYTES)
        return time.perf_counter() - begin


class RawLoopback:
    """The tcp floor: the same pages through one loopback connection, answered by a byte when all have been read."""

    def __init__(self, source: Engine) -> None:
        self.view = source.regions["main"].buf
        self.process = subprocess.Popen(
            [sys.executable, "-c", RAW_RECEIVER, str(PAGE_BYTES), str(POOL_PAGES)], stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        self.sock = socket.create_connection(("127.0.0.1", int(self.process.stdout.readline())), timeout=30)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def run(self, src: list[int], dst: list[int]) -> float:
        begin = time.perf_counter()
        self.sock.sendall(len(src).to_bytes(8, "little"))
        for page in src:
            self.sock.sendall(self.view[page * PAGE_BYTES : (page + 1) * PAGE_BYTES])
        assert self.sock.recv(1) == b"1"
        return time.perf_counter() - begin

    def close(self) -> None:
        self.sock.close()
        self.process.wait(10)
        self.view.release()


async def one(source: Engine, target: Engine, src: list[int], dst: list[int]) -> float:
    """Seconds from the ring to the wake-up."""
    slot = await target.open(dst)
    transfer = await soon(source.client.start_transfer(target.describe(slot, dst), {"main": src}, ready_pages=0))
    woken = 0.0

    def wake(_: object) -> None:
        nonlocal woken
        woken = time.perf_counter()

    slot.completed.add_done_callback(wake)
    source.publish(transfer, 0, len(src))
    # The engine computes a layer: the watcher waits for its end, as it would.
    await asyncio.sleep(LAYER_S)
    begin = time.perf_counter()
    source.doorbell.ring()
    await soon(slot.completed)
    await soon(transfer.done)
    await asyncio.sleep(0)
    assert woken
    return woken - begin


def cpu_seconds(pid: int) -> float:
    """CPU time of a process over all its threads, in nanosecond resolution."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def quantile(values: list[float], q: float) -> float:
    return float(np.quantile(np.asarray(values), q))


async def measure(transport: str, reps: int) -> list[dict[str, float]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        async with sidecars(Path(folder), f"--transports={transport}", "--log-level=warning") as (a, b):
            source = await Engine("p", a, bench_layout()).connect()
            target = await Engine("d", b, bench_layout()).connect()
            source.fill(1)
            target.fill(2)
            floor = Memcpy(source, target) if transport == "shm" else RawLoopback(source)
            rng = np.random.default_rng(7)
            for pages in SIZES:
                times: list[float] = []
                floors: list[float] = []
                cpu = floor_cpu = 0.0
                for rep in range(reps + 3):
                    src, dst = scattered(rng, pages), scattered(rng, pages)
                    before = cpu_seconds(a.pid)
                    took = await one(source, target, src, dst)
                    cpu += (cpu_seconds(a.pid) - before) * (rep >= 3)
                    if rep == 0:
                        assert (target.pages[:, dst] == source.pages[:, src]).all(), "bytes differ"
                    src, dst = scattered(rng, pages), scattered(rng, pages)
                    before = time.thread_time()
                    plain = floor.run(src, dst)
                    floor_cpu += (time.thread_time() - before) * (rep >= 3)
                    if rep >= 3:
                        times.append(took)
                        floors.append(plain)
                nbytes = pages * PAGE_BYTES
                rows.append(
                    {
                        "transport": transport,
                        "bytes": nbytes,
                        "p50_ms": quantile(times, 0.5) * 1e3,
                        "p99_ms": quantile(times, 0.99) * 1e3,
                        "gb_s": nbytes / statistics.median(times) / 1e9,
                        "floor_p50_ms": quantile(floors, 0.5) * 1e3,
                        "floor_gb_s": nbytes / statistics.median(floors) / 1e9,
                        # Of the quickest tenth of each side: what is left when others use the cores.
                        "quiet_ratio": quantile(floors, 0.1) / quantile(times, 0.1),
                        "ratio": statistics.median(floors) / statistics.median(times),
                        # The writer's whole process against the copying alone: steadier where cores are shared.
                        "cpu_ratio": floor_cpu / cpu,
                        "times_ms": [round(t * 1e3, 4) for t in times],
                        "floor_times_ms": [round(t * 1e3, 4) for t in floors],
                    }
                )
                show(rows[-1])
            if isinstance(floor, RawLoopback):
                floor.close()
            await source.close()
            await target.close()
    return rows


def show(row: dict[str, float]) -> None:
    print(
        f"{row['transport']} {row['bytes'] / 2**20:8.3f} MiB  p50 {row['p50_ms']:8.3f} ms  p99 {row['p99_ms']:8.3f} ms"
        f"  {row['gb_s']:6.2f} GB/s  floor {row['floor_gb_s']:6.2f} GB/s  ratio {row['ratio']:.2f}"
        f"  (quickest tenth {row['quiet_ratio']:.2f}, by CPU time of the writer {row['cpu_ratio']:.2f})",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=["shm", "tcp", "all"], default="all")
    parser.add_argument("--reps", type=int, default=30)
    parser.add_argument("--out", type=Path, help="file for the raw results, JSON")
    args = parser.parse_args()
    rows: list[dict[str, float]] = []
    load = [os.getloadavg()[0]]
    for transport in ("shm", "tcp") if args.transport == "all" else (args.transport,):
        rows += asyncio.run(measure(transport, args.reps))
    for row in rows:
        if row["bytes"] >= 64 << 20:
            goal = (
                f", goal {GOAL:.2f}: {'met' if row['ratio'] >= GOAL else 'MISSED'}" if row["transport"] == "shm" else ""
            )
            print(
                f"{row['transport']} at 64 MiB: ratio {row['ratio']:.2f} of the floor"
                f" (quickest tenth {row['quiet_ratio']:.2f}){goal}"
            )
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        load.append(os.getloadavg()[0])
        machine = {
            "load_before_and_after": load,
            "cores": os.cpu_count(),
            "machine": platform.machine(),
            "kernel": platform.release(),
        }
        args.out.write_text(json.dumps({"command": sys.argv, "machine": machine, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
