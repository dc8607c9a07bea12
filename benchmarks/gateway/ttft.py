"""Added time to the first token through gateway, router and a miss of the exact cache (Redis), open loop.

First saturation in requests a second (closed loop, short answers), then half of it with answers long enough that about
--live streams of --rate tokens/s run at a time; the worker asked directly beside them is the floor. Goals: added p50
5 ms, p99 25 ms or less.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
from pathlib import Path

from gateway.client import Work
from gateway.direct import direct
from gateway.rig import clients, header, mesh, percentile, seen


async def run(args: argparse.Namespace) -> int:
    header(f"{args.face}: ~{args.live} live streams of {args.rate:g} tokens/s, {args.requests} requests")
    step_ms = 1000.0 / args.rate
    gc.collect()
    gc.freeze()
    saturation = args.saturation
    settings = {"router__redis_timeout_ms": 1000}
    if not saturation:
        async with mesh(step_ms=1.0, batch=64, unified=args.workers, cache=True, **settings) as (_, state, http):
            address = http if args.face == "http" else state.gateway
            works = [
                Work(args.face, address, state.model, 4, 1500, streams=32, seed=number)
                for number in range(args.processes)
            ]
            results = await clients(works)
            found = seen(results)
            saturation = len(found) / (max(x["last"] for x in found) - min(x["due"] for x in found))
        print(f"saturation: {saturation:.0f} requests/s of 4 tokens", flush=True)
    arrivals = saturation * 0.5
    tokens = max(2, round(args.live * args.rate / arrivals))
    print(f"open loop: {arrivals:.0f} requests/s of {tokens} tokens", flush=True)
    async with mesh(step_ms=step_ms, batch=64, unified=args.workers, cache=True, **settings) as (
        supervisor,
        state,
        http,
    ):
        address = http if args.face == "http" else state.gateway
        ready = supervisor.processes["unified-0"].read_ready()
        token = await asyncio.to_thread(Path(state.token_file).read_text)
        each = args.requests // args.processes
        works = [
            Work(args.face, address, state.model, tokens, each, rate=arrivals / args.processes, seed=100 + number)
            for number in range(args.processes)
        ]
        floor: list[float] = []
        rng = random.Random(5)
        async with direct(ready.address, token.splitlines()[0]) as worker:
            load = asyncio.create_task(clients(works))
            while not load.done():
                floor.append(await worker.ttft(2, 16))
                # At any moment of a step, as requests come.
                await asyncio.sleep(rng.uniform(0.0, step_ms / 1e3))
            results = await load
    # The first second starts the connections.
    found = sorted(seen(results), key=lambda x: x["due"])
    begun = found[0]["due"] + 1.0
    times = [item["first"] - item["due"] for item in found if item["due"] > begun]
    row = {q: (percentile(times, q) * 1e3, percentile(floor, q) * 1e3) for q in (50, 90, 99)}
    for q, (whole, alone) in row.items():
        print(f"  p{q}: {whole:7.2f} ms, the worker alone {alone:7.2f} ms (the floor): added {whole - alone:6.2f} ms")
    waits = [item["accepted_ms"] for item in found if item["due"] > begun]
    if any(waits):
        print(f"  until a worker took it: p50 {percentile(waits, 50):.2f}, p99 {percentile(waits, 99):.2f} ms")
        slow = [item for item in found if item["due"] > begun and item["first"] - item["due"] >= row[99][0] / 1e3]
        late, taken, told = (sorted(x[key] for x in slow)[len(slow) // 2] for key in ("late", "accepted_ms", "told_ms"))
        print(f"  the slowest 1 %, medians: begun {late * 1e3:.1f} ms late, taken by a worker after {taken:.1f} ms,")
        print(f"  a token at the gateway after {told:.1f} ms")
    print(f"added TTFT p50 {row[50][0] - row[50][1]:.2f} ms (goal 5), p99 {row[99][0] - row[99][1]:.2f} ms (goal 25)")
    return 0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--face", choices=("grpc", "http"), default="grpc")
    parser.add_argument("--live", type=int, default=100)
    parser.add_argument("--rate", type=float, default=20.0, help="tokens a second of one stream")
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--saturation", type=float, default=0.0, help="requests/s, where it is known; 0 = measure it")
    return asyncio.run(run(parser.parse_args(argv)))
