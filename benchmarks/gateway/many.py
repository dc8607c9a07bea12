"""2,000 streams of 2 tokens/s on two cores: inter-token p99 (goal: at most twice the scripted interval) and the
gateway's memory; then 10,000 streams that are cancelled, and what they leave.

Gateway, router and worker share the two cores; clients run on the others where there are any.
"""

from __future__ import annotations

import argparse
import asyncio
import os

import psutil

from gateway.client import Work
from gateway.rig import clients, header, mesh, percentile, seen


async def run(args: argparse.Namespace) -> int:
    cores = sorted(os.sched_getaffinity(0))
    two, rest = cores[:2], cores[2:] or cores
    os.sched_setaffinity(0, two)  # What the mesh inherits.
    header(f"{args.streams} streams of {args.rate:g} tokens/s, {args.tokens} tokens each; mesh on cores {two}")
    prefix = ("taskset", "-c", ",".join(map(str, rest)))
    interval = 1.0 / args.rate
    async with mesh(
        step_ms=interval * 1e3, batch=args.streams, gateway__max_concurrent_requests=args.streams + 100
    ) as (supervisor, state, http):
        gateway = psutil.Process(supervisor.processes["gateway"].pid)
        for face, address in (("grpc", state.gateway), ("http", http)):
            memory: list[float] = []

            async def watch(memory: list[float] = memory) -> None:
                while True:
                    memory.append(gateway.memory_info().rss / 2**20)
                    await asyncio.sleep(2.0)

            watching = asyncio.create_task(watch())
            share = args.streams // args.processes
            works = [
                Work(
                    face,
                    address,
                    state.model,
                    args.tokens,
                    share,
                    streams=share,
                    gaps=True,
                    seed=number,
                    connections=20,
                )
                for number in range(args.processes)
            ]
            results = await clients(works, prefix=prefix)
            watching.cancel()
            seen(results)
            gaps = [gap for result in results for gap in result["gaps"]]
            half = memory[len(memory) // 2 :]
            print(
                f"  {face}: inter-token p50 {percentile(gaps, 50) * 1e3:.0f}, p99 {percentile(gaps, 99) * 1e3:.0f} ms "
                f"(interval {interval * 1e3:.0f}, goal {2 * interval * 1e3:.0f}); gateway {half[0]:.0f} MiB at half "
                f"time, {half[-1]:.0f} at the end",
                flush=True,
            )
        before = gateway.memory_info().rss / 2**20, gateway.num_fds()
        for face, address in (("grpc", state.gateway), ("http", http)):
            works = [
                Work(face, address, state.model, 400, args.cancelled // 4, streams=250, stop_after=1, seed=number)
                for number in range(2)
            ]
            seen(await clients(works, prefix=prefix))
        await asyncio.sleep(2.0)
        after = gateway.memory_info().rss / 2**20, gateway.num_fds()
        left = f"{after[0] - before[0]:+.1f} MiB, {after[1] - before[1]:+d} descriptors"
        print(f"  {args.cancelled} cancelled streams: {left}")
    return 0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=2.0)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--cancelled", type=int, default=10_000)
    return asyncio.run(run(parser.parse_args(argv)))
