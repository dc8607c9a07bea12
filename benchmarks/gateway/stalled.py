"""One reader that stalls among 200 streams of 10 tokens/s: what the others notice of it.

Runs without and with it alternate. It asks for four choices with the log-probabilities of 20 tokens at each position
and never reads: what it is sent fills its small window, then the gateway's buffers, and once they are full too it is
cut, alone. The others must end whole, and the p99 of their time between tokens rises by 10 ms at most, in the median of
the pairs. The floor is the scripted interval.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import socket
import statistics
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from gateway.client import Work
from gateway.rig import clients, header, mesh, percentile, seen
from kvmesh.proto.v1 import inference_pb2 as pb

GOAL_MS = 10.0
WINDOW_BYTES = 16_384
CHOICES = 4


@contextlib.asynccontextmanager
async def stalled(face: str, address: str, model: str, tokens: int) -> AsyncIterator[None]:
    """A request that is accepted and then never read."""
    if face == "grpc":
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        ]
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            call: Any = channel.unary_stream(
                "/kvmesh.v1.Inference/Generate",
                request_serializer=pb.GenerateRequest.SerializeToString,
                response_deserializer=pb.GenerateResponse.FromString,
            )(
                pb.GenerateRequest(
                    model=model,
                    text="stalled",
                    sampling=pb.SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=20, n=CHOICES),
                )
            )
            await call.read()
            yield
            call.cancel()
        return
    asked = {
        "max_tokens": tokens,
        "stream": True,
        "logprobs": True,
        "top_logprobs": 20,
        "n": CHOICES,
        "ignore_eos": True,
    }
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "stalled"}], **asked}).encode()
    host, _, port = address.rpartition(":")
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, WINDOW_BYTES)
        sock.connect((host, int(port)))
        sock.sendall(
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        yield


def cut(metrics: str) -> int:
    """Readers that the gateway has cut for their slowness."""
    with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=30) as page:
        found = re.search(r"^kvmesh:gateway_slow_readers_total (\S+)$", page.read().decode(), re.M)
    return int(float(found[1])) if found else 0


async def run(args: argparse.Namespace) -> int:
    header(f"{args.streams} streams of {args.rate:g} tokens/s, {args.tokens} tokens each, {args.pairs} pairs of runs")
    interval_ms = 1e3 / args.rate
    ok = True
    async with mesh(
        step_ms=interval_ms,
        batch=args.streams + 8,
        gateway__request_buffer_tokens=16,
        gateway__request_buffer_bytes=16_384,
    ) as (supervisor, state, http):
        metrics = supervisor.processes["gateway"].read_ready().metrics
        for face, address in (("grpc", state.gateway), ("http", http)):
            works = [
                Work(
                    face,
                    address,
                    state.model,
                    args.tokens,
                    args.streams // 2,
                    streams=args.streams // 2,
                    gaps=True,
                    seed=number,
                    connections=10,
                )
                for number in range(2)
            ]

            async def one(works: list[Work] = works) -> float:
                results = await clients(works)
                if any(item["tokens"] != args.tokens for item in seen(results)):
                    raise RuntimeError("an answer is not whole")
                return percentile([gap for result in results for gap in result["gaps"]], 99) * 1e3

            await one()
            before = cut(metrics)
            rises = []
            for _ in range(args.pairs):
                without = await one()
                async with stalled(face, address, state.model, 3900):
                    beside = await one()
                rises.append(beside - without)
                print(f"  {face}: inter-token p99 {without:.1f} ms without, {beside:.1f} ms with the stalled reader")
            median = statistics.median(rises)
            ok = ok and median <= GOAL_MS
            print(
                f"  {face}: p99 rises by {median:+.1f} ms in the median (goal {GOAL_MS:g}; the interval is "
                f"{interval_ms:g} ms); {args.streams} others whole in every run; "
                f"{cut(metrics) - before} of {args.pairs} stalled readers cut",
                flush=True,
            )
    return 0 if ok else 1


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--rate", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--pairs", type=int, default=5)
    return asyncio.run(run(parser.parse_args(argv)))
