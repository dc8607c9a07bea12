"""An exact hit of the answer cache, end to end: one client, one question again and again. Goal: 6 ms (p50)."""

from __future__ import annotations

import argparse
import asyncio

from gateway.client import Work
from gateway.rig import clients, header, mesh, percentile, seen


async def run(args: argparse.Namespace) -> int:
    header(f"{args.requests} exact hits, one after another")
    async with mesh(step_ms=1.0, batch=32, cache=True) as (_, state, http):
        for face, address in (("grpc", state.gateway), ("http", http)):
            work = Work(face, address, state.model, 64, args.requests, streams=1, same_prompt=True, temperature=0.0)
            found = seen(await clients([work]))[5:]
            times = [(item["last"] - item["due"]) * 1e3 for item in found]
            print(f"  {face}: p50 {percentile(times, 50):.2f} ms, p99 {percentile(times, 99):.2f} ms (goal 6)")
    return 0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    return asyncio.run(run(parser.parse_args(argv)))
