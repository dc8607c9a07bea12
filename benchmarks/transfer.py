"""KV transfer between two sidecar processes, beside floors and peers, in alternating rounds of one run.

From the doorbell's ring at the source engine to the destination engine's client being woken: the watcher of one sidecar
sees the ring, its mover moves scattered pages, the other sidecar counts the bytes and wakes its engine.

    curve     1 page up to 64 MiB a slot; shm beside a loop of memmove over the same pages (goal: 0.85 of it at 64 MiB),
              tcp beside a raw socket loop and iperf3 (goal: 0.9 of it at 64 MiB)
    peers     64 MiB in pages of 64 KiB, 256 KiB, 1 MiB: NIXL (UCX: tcp, cma) and Mooncake (tcp) under --peer-python
    doorbell  ring to posted write, by way of waiting (see doorbell.py)

    python benchmarks/transfer.py [--parts curve,peers,doorbell] [--transport shm|tcp|all] [--reps 30]
                                  [--peer-python FILE] [--streams N] [--out FILE]

At its end it prints the tables of docs/figures.md. All that is there comes from
    python benchmarks/transfer.py --parts curve,peers,doorbell --peer-python FILE --out benchmarks/results/transfer.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from doorbell import measure_doorbell
from kvmesh.transfer.transports.tcp.transport import default_streams
from transfer_rig import Iperf, Memcpy, Mesh, Peer, RawLoopback, scattered

SIZES = (1, 4, 16, 64, 256, 1024)
PAGE_BYTES = 64 << 10
CONTEST_PAGES = (64 << 10, 256 << 10, 1 << 20)
CONTEST_BYTES = 64 << 20
GOALS = {"shm": 0.85, "tcp": 0.9}
WARM_UP = 3
IPERF_ROUNDS = 5

Row = dict[str, object]


def cpu_seconds(pid: int) -> float:
    """CPU time of a process over all its threads, in nanosecond resolution."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def quantile(values: list[float], q: float) -> float:
    return float(np.quantile(np.asarray(values), q))


async def curve(transport: str, reps: int, streams: int) -> list[Row]:
    """Slots of 1 page and up, each beside its floor."""
    rows: list[Row] = []
    async with Mesh.open(transport, PAGE_BYTES, streams) as mesh:
        floor = (Memcpy if transport == "shm" else RawLoopback)(mesh, PAGE_BYTES)
        iperf = Iperf(streams or default_streams())
        rng = np.random.default_rng(7)
        for pages in SIZES:
            times: list[float] = []
            floors: list[float] = []
            iperfs: list[float] = []
            cpu = floor_cpu = 0.0
            for rep in range(reps + WARM_UP):
                measured = rep >= WARM_UP
                src, dst = scattered(rng, pages), scattered(rng, pages)
                before = cpu_seconds(mesh.processes[0].pid)
                took = await mesh.move(src, dst, check=rep == 0)
                cpu += (cpu_seconds(mesh.processes[0].pid) - before) * measured
                src, dst = scattered(rng, pages), scattered(rng, pages)
                before = time.thread_time()
                plain = floor.run(src, dst)
                floor_cpu += (time.thread_time() - before) * measured
                if measured:
                    times.append(took)
                    floors.append(plain)
                beside_iperf = measured and transport == "tcp" and pages == SIZES[-1] and iperf.usable
                if beside_iperf and rep % max(1, reps // IPERF_ROUNDS) == 0:
                    iperfs.append(await asyncio.to_thread(iperf.run))
            nbytes = pages * PAGE_BYTES
            row: Row = {
                "part": "curve",
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
            if iperfs:
                row |= {"iperf_gb_s": statistics.median(iperfs), "iperf_streams": iperf.streams, "iperf_all": iperfs}
            rows.append(row)
            show_curve(row)
        iperf.close()
        floor.close()
    return rows


def show_curve(row: Row) -> None:
    print(
        f"{row['transport']} {row['bytes'] / 2**20:8.3f} MiB  p50 {row['p50_ms']:8.3f} ms  p99 {row['p99_ms']:8.3f} ms"
        f"  {row['gb_s']:6.2f} GB/s  floor {row['floor_gb_s']:6.2f} GB/s  ratio {row['ratio']:.2f}"
        f"  (quickest tenth {row['quiet_ratio']:.2f}, by CPU time of the writer {row['cpu_ratio']:.2f})"
        + (f"  iperf3 {row['iperf_gb_s']:.2f} GB/s" if "iperf_gb_s" in row else ""),
        flush=True,
    )
    if row["bytes"] == SIZES[-1] * PAGE_BYTES:
        transport = str(row["transport"])
        ratio, of = float(row["ratio"]), "the floor"  # type: ignore[arg-type]
        if "iperf_gb_s" in row:
            ratio, of = row["gb_s"] / row["iperf_gb_s"], "iperf3"  # type: ignore[operator]
        met = "met" if ratio >= GOALS[transport] else "MISSED"
        print(f"{transport} at 64 MiB: {ratio:.2f} of {of}, goal {GOALS[transport]:.2f}: {met}", flush=True)


async def contest(transport: str, page_bytes: int, reps: int, streams: int, python: Path) -> Row:
    """The same bytes by everybody who can, one after the other, again and again."""
    pages = CONTEST_BYTES // page_bytes
    rng = np.random.default_rng(11)
    async with Mesh.open(transport, page_bytes, streams) as mesh:
        names = ("nixl",) if transport == "shm" else ("nixl", "mooncake")
        peers = [Peer(python, name, transport, page_bytes) for name in names]
        times: dict[str, list[float]] = {"kvmesh": [], **{name: [] for name in names}}
        try:
            for rep in range(reps + WARM_UP):
                src, dst = scattered(rng, pages, page_bytes), scattered(rng, pages, page_bytes)
                round_times = {"kvmesh": await mesh.move(src, dst, check=rep == 0)}
                for peer in peers:
                    round_times[peer.name] = await asyncio.to_thread(peer.run, src, dst, check=rep == 0)
                if rep >= WARM_UP:
                    for name, took in round_times.items():
                        times[name].append(took)
        finally:
            for peer in peers:
                peer.close()
    rates = {name: CONTEST_BYTES / statistics.median(values) / 1e9 for name, values in times.items()}
    best = {name: CONTEST_BYTES / min(values) / 1e9 for name, values in times.items()}
    print(
        f"{transport} pages of {page_bytes >> 10:4d} KiB: "
        + ", ".join(f"{name} {rates[name]:.2f} GB/s (best {best[name]:.2f})" for name in rates)
        + f"  ahead of both: {'yes' if max(rates, key=rates.__getitem__) == 'kvmesh' else 'NO'}",
        flush=True,
    )
    return {
        "part": "peers",
        "transport": transport,
        "page_bytes": page_bytes,
        "gb_s": rates,
        "best_gb_s": best,
        "times_ms": {name: [round(t * 1e3, 3) for t in values] for name, values in times.items()},
    }


def tables(rows: list[Row]) -> str:
    """What docs/figures.md shows, in its form."""
    lines = []
    by_part = {part: [row for row in rows if row["part"] == part] for part in ("curve", "peers", "doorbell")}
    if by_part["curve"]:
        lines += ["| | size of a slot | p50 | p99 | GB/s | floor GB/s | ratio |", "|---|---|---|---|---|---|---|"]
        for row in by_part["curve"]:
            nbytes = int(row["bytes"])  # type: ignore[call-overload]
            size = f"{nbytes >> 20} MiB" if nbytes >> 20 else f"{nbytes >> 10} KiB"
            lines.append(
                f"| {row['transport']} | {size} | {row['p50_ms']:.2f} ms | {row['p99_ms']:.2f} ms | {row['gb_s']:.2f}"
                f" | {row['floor_gb_s']:.2f} | {row['ratio']:.2f} |"
            )
            if "iperf_gb_s" in row:
                share = row["gb_s"] / row["iperf_gb_s"]  # type: ignore[operator]
                lines.append(f"| iperf3 -P {row['iperf_streams']} | | | | {row['iperf_gb_s']:.2f} | | {share:.2f} |")
        lines.append("")
    if by_part["peers"]:
        lines += ["| 64 MiB in pages of | kvmesh | NIXL (UCX) | Mooncake | × the better |", "|---|---|---|---|---|"]
        for row in by_part["peers"]:
            rates = dict(row["gb_s"])  # type: ignore[call-overload]
            ours = rates.pop("kvmesh")
            others = " | ".join(f"{rates[name]:.2f}" if name in rates else "" for name in ("nixl", "mooncake"))
            page = int(row["page_bytes"]) >> 10  # type: ignore[call-overload]
            lines.append(
                f"| {page} KiB, {row['transport']} | {ours:.2f} | {others} | {ours / max(rates.values()):.1f} |"
            )
        lines.append("")
    if by_part["doorbell"]:
        lines += ["| layers of | way | p50 | p99 | CPU of the mover a layer |", "|---|---|---|---|---|"]
        for row in by_part["doorbell"]:
            lines.append(
                f"| {row['layer_ms']:.1f} ms | {row['way']} | {row['p50_us']:.0f} µs | {row['p99_us']:.0f} µs"
                f" | {row['cpu_us_a_layer']:.0f} µs |"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="curve", help="of curve, peers, doorbell; with commas between them")
    parser.add_argument("--peers", action="store_true", help="the part peers, in addition")
    parser.add_argument("--transport", choices=["shm", "tcp", "all"], default="all")
    parser.add_argument("--reps", type=int, default=30)
    parser.add_argument("--streams", type=int, default=0, help="of tcp, 0 = by cores")
    parser.add_argument("--peer-python", type=Path, help="the Python that has nixl_cu12 and mooncake")
    parser.add_argument("--out", type=Path, help="file for the raw results, JSON")
    args = parser.parse_args()
    parts = {*args.parts.split(","), *(["peers"] if args.peers else [])}
    if "peers" in parts and args.peer_python is None:
        parser.error("the peers need --peer-python")
    transports = ("shm", "tcp") if args.transport == "all" else (args.transport,)
    rows: list[Row] = []
    load = [os.getloadavg()[0]]
    for transport in transports:
        if "curve" in parts:
            rows += asyncio.run(curve(transport, args.reps, args.streams))
        if "peers" in parts:
            for page_bytes in CONTEST_PAGES:
                rows.append(asyncio.run(contest(transport, page_bytes, args.reps, args.streams, args.peer_python)))
    if "doorbell" in parts:
        rows += asyncio.run(measure_doorbell())
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        load.append(os.getloadavg()[0])
        machine = {
            "load_before_and_after": load,
            "cores": os.cpu_count(),
            "machine": platform.machine(),
            "kernel": platform.release(),
        }
        command = ["benchmarks/transfer.py", *(x for x in sys.argv[1:] if "/" not in x)]
        args.out.write_text(json.dumps({"command": command, "machine": machine, "rows": rows}, indent=1) + "\n")
    print("\n" + tables(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
