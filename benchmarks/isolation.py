"""What bad neighbours cost others: inter-token p99 with and without stalled readers and a stopped gateway process.

On the scripted engine at 10 tokens/s a stream. Runs alternate quiet, disturbed, quiet, … in one mesh; the figure is the
median over the rounds of (p99 disturbed - p99 quiet). Floor: 0 ms. Goal: at most 10 ms.

    python benchmarks/isolation.py [--rounds 5] [--streams 16] [--tokens 40] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc

from kvmesh.cli.health import wait_serving
from kvmesh.cli.plan import MeshOptions
from kvmesh.cli.process import Process
from kvmesh.cli.state import MeshState
from kvmesh.cli.supervisor import Supervisor
from kvmesh.cli.up import running_mesh
from kvmesh.proto.v1 import inference_pb2, inference_pb2_grpc

STEP_MS = 100
GOAL_MS = 10.0
NEIGHBOURS = 8
# With gRPC's usual window of 64 KiB all that a scripted stream says in a run fits, and a reader that does not read
# disturbs nobody. With 128 bytes the gateway's writes to it are blocked after a few tokens.
NARROW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 128)]


def request(model: str, text: str, tokens: int) -> inference_pb2.ChatRequest:
    return inference_pb2.ChatRequest(
        model=model,
        messages=[inference_pb2.ChatMessage(role="user", content=text)],
        sampling=inference_pb2.SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True),
    )


async def gaps(stub: inference_pb2_grpc.InferenceStub, model: str, text: str, tokens: int) -> list[float]:
    """Milliseconds between the tokens of one stream, as the client sees them."""
    found: list[float] = []
    last = 0.0
    async for response in stub.Chat(request(model, text, tokens), timeout=120):
        event = response.event
        if event.HasField("error"):
            raise RuntimeError(f"a stream failed: {event.error}")
        if event.HasField("delta") and event.delta.token_ids:
            now = time.perf_counter()
            if last:
                found.append((now - last) * 1e3)
            last = now
    return found


def p99(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]


@contextlib.asynccontextmanager
async def bad_neighbours(supervisor: Supervisor, state: MeshState, round_: int) -> AsyncIterator[None]:
    """Readers that read one event and no more, and a second gateway with live streams that is SIGSTOPped."""
    spec = next(spec for spec in supervisor.plan.specs if spec.name == "gateway")
    assert spec.ready_file is not None
    ready = spec.ready_file.with_name(f"gateway-{round_}.ready")
    replaced = {"--ready-file": str(ready), "--listen": "127.0.0.1:0", "--instance": f"gateway-{round_}"}
    argv = tuple(
        f"{flag}={replaced[flag]}" if (flag := arg.partition("=")[0]) in replaced else arg for arg in spec.argv
    )
    second = await Process.start(
        replace(spec, name=f"gateway-{round_}", argv=argv, ready_file=ready), supervisor.log_dir
    )
    try:
        deadline = time.monotonic() + 30
        while (info := second.read_ready()) is None:
            if time.monotonic() > deadline or not second.alive:
                raise RuntimeError("the second gateway did not start")
            await asyncio.sleep(0.02)
        if not await wait_serving(info.address, "kvmesh.v1.Inference", 30):
            raise RuntimeError("the second gateway is not SERVING")
        async with (
            grpc.aio.insecure_channel(state.gateway, options=NARROW) as first,
            grpc.aio.insecure_channel(info.address, options=NARROW) as other,
        ):
            calls = []
            for channel in (first, other):
                stub = inference_pb2_grpc.InferenceStub(channel)
                for index in range(NEIGHBOURS):
                    call = stub.Chat(request(state.model, f"neighbour {index}", 2000), timeout=300)
                    await call.read()
                    calls.append(call)
            second.signal(signal.SIGSTOP)
            try:
                yield
            finally:
                for call in calls:
                    call.cancel()
    finally:
        second.signal(signal.SIGCONT)
        second.signal(signal.SIGKILL)
        await second.stop()


async def run(rounds: int, streams: int, tokens: int) -> dict[str, object]:
    settings = {
        "decode.scripted_step_ms": str(STEP_MS),
        "prefill.scripted_step_ms": "1",
        "decode.max_batch": "128",
        "decode.num_pages": "32768",
        "prefill.num_pages": "4096",
    }
    options = MeshOptions(
        runner="scripted", model="scripted", gateway_port=0, embedder="none", cache=False, threads=1, settings=settings
    )
    quiet: list[float] = []
    disturbed: list[float] = []
    async with running_mesh(options, state=False) as (supervisor, state):
        async with grpc.aio.insecure_channel(state.gateway) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)

            async def measure(name: str) -> float:
                results = await asyncio.gather(
                    *(gaps(stub, state.model, f"{name} {index}", tokens) for index in range(streams))
                )
                return p99([gap for result in results for gap in result])

            await measure("warm-up")
            for round_ in range(rounds):
                quiet.append(await measure(f"quiet {round_}"))
                async with bad_neighbours(supervisor, state, round_):
                    disturbed.append(await measure(f"disturbed {round_}"))
                print(
                    f"round {round_ + 1}: inter-token p99 quiet {quiet[-1]:.1f} ms, disturbed {disturbed[-1]:.1f} ms",
                    flush=True,
                )
    rises = [b - a for a, b in zip(quiet, disturbed, strict=True)]
    return {
        "step_ms": STEP_MS,
        "streams": streams,
        "tokens": tokens,
        "quiet_p99_ms": quiet,
        "disturbed_p99_ms": disturbed,
        "rise_p99_ms_median": statistics.median(rises),
        "floor_ms": 0.0,
        "goal_ms": GOAL_MS,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--out", type=Path, help="write the raw figures as JSON")
    args = parser.parse_args()
    result = asyncio.run(run(args.rounds, args.streams, args.tokens))
    rise = float(result["rise_p99_ms_median"])  # type: ignore[arg-type]
    print(f"rise of inter-token p99, median of {args.rounds}: {rise:.2f} ms (floor 0, goal <= {GOAL_MS:.0f})")
    if args.out:
        args.out.write_text(json.dumps({"command": " ".join(sys.argv), **result}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
