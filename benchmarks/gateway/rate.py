"""Tokens a second through one gateway process, gRPC and SSE, beside a bare grpc.aio server of the same messages.

Rounds alternate between the three. Goals: gRPC at 0.6 of the bare server or more, SSE not below gRPC. The scripted
workers make more than any of them takes; where a client's write is outstanding, tokens that come meanwhile go out
together, so that messages a second are fewer than tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys

from gateway.client import Work
from gateway.rig import HERE, clients, header, mesh, tokens_per_s


async def run(args: argparse.Namespace) -> int:
    header(
        f"{args.streams} streams of {args.tokens} tokens, {args.processes} processes of clients, {args.rounds} rounds"
    )
    bare = await asyncio.create_subprocess_exec(sys.executable, str(HERE / "bare.py"), stdout=asyncio.subprocess.PIPE)
    assert bare.stdout is not None
    bare_address = (await bare.stdout.readline()).decode().strip()
    rates: dict[str, list[float]] = {"bare": [], "grpc": [], "sse": []}
    try:
        async with mesh(step_ms=args.step_ms, batch=args.streams, unified=args.workers) as (_, state, http):
            targets = {"bare": ("grpc", bare_address), "grpc": ("grpc", state.gateway), "sse": ("http", http)}
            for round_ in range(-1, args.rounds):
                for name, (face, address) in targets.items():
                    share = args.streams // args.processes
                    works = [
                        Work(face, address, state.model, args.tokens, share, streams=share, seed=number)
                        for number in range(args.processes)
                    ]
                    rate = tokens_per_s(await clients(works))
                    if round_ >= 0:  # The first round warms all up.
                        rates[name].append(rate)
                        print(f"  round {round_}: {name:5} {rate:9.0f} tokens/s", flush=True)
    finally:
        bare.terminate()
        await bare.wait()
    middle = {name: statistics.median(values) for name, values in rates.items()}
    print(
        f"medians: bare {middle['bare']:.0f} (the floor), gRPC {middle['grpc']:.0f} = "
        f"{middle['grpc'] / middle['bare']:.2f} of it (goal 0.60), SSE {middle['sse']:.0f} = "
        f"{middle['sse'] / middle['grpc']:.2f} of gRPC (goal 1.00)"
    )
    return 0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=192)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--processes", type=int, default=4, help="processes of clients")
    parser.add_argument("--workers", type=int, default=8, help="scripted workers")
    parser.add_argument("--step-ms", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    return asyncio.run(run(parser.parse_args(argv)))
