"""What the mesh costs: TTFT and TPOT through gateway, router, decode, prefill and kvtransfer, against the same engine
called in this process on the same prompts.

Requests alternate between the two (in-process, mesh, in-process, …), one at a time, on the real model with one compute
thread each; every round has prompts of its own, so that no prefix cache helps. Floor: the in-process engine (ratio 1).

    python benchmarks/mesh_overhead.py [--rounds 10] [--prompt 128] [--tokens 32] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from kvmesh.cli.plan import MeshOptions
from kvmesh.cli.up import running_mesh
from kvmesh.client import Client
from kvmesh.engine.core import CoreEvent, Ended, EngineConfig, EngineCore, EngineRequest, RequestKey, Tokens
from kvmesh.engine.runner import SamplingParams
from kvmesh.engine.torch_runner import TorchRunner
from kvmesh.kv.region import Region
from kvmesh.kv.ring import DOORBELL_BYTES, Doorbell

PAGE_SIZE = 16
NUM_PAGES = 256
VOCABULARY = 40_000


class InProcess:
    """The engine core and the torch runner in this process, without any service around them."""

    def __init__(self, model: str, dtype: str) -> None:
        runner = TorchRunner.load(model, dtype, threads=1)
        layout = runner.layout(PAGE_SIZE, NUM_PAGES)
        self._regions = {group.name: Region.create(group.name, layout.region_bytes(group)) for group in layout.groups}
        doorbell = Doorbell(bytearray(DOORBELL_BYTES))
        runner.bind(layout, {name: region.buf for name, region in self._regions.items()}, doorbell)
        self._events: queue.SimpleQueue[CoreEvent] = queue.SimpleQueue()
        config = EngineConfig(max_model_len=runner.info.max_model_len)
        self.core = EngineCore(runner, layout, config, self._take, doorbell=doorbell)
        self.core.start()
        self._count = 0

    def _take(self, events: list[CoreEvent]) -> None:
        for event in events:
            self._events.put(event)

    def ask(self, prompt: list[int], tokens: int) -> tuple[float, float]:
        """(TTFT ms, TPOT ms) of one request."""
        self._count += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        begun = time.perf_counter()
        self.core.submit(EngineRequest(RequestKey(f"r{self._count}"), prompt, len(prompt), sampling))
        times: list[float] = []
        while True:
            event = self._events.get(timeout=120)
            if isinstance(event, Tokens):
                times.append(time.perf_counter())
            elif isinstance(event, Ended):
                if event.error is not None:
                    raise event.error
                break
        return (times[0] - begun) * 1e3, (times[-1] - times[0]) * 1e3 / (len(times) - 1)

    def close(self) -> None:
        self.core.stop(5.0)


async def through_mesh(client: Client, prompt: list[int], tokens: int) -> tuple[float, float, int]:
    """(TTFT ms, TPOT ms, KV bytes moved) of one request, as the client sees them."""
    begun = time.perf_counter()
    times: list[float] = []
    async with client.generate(prompt, model="auto", temperature=0.0, max_tokens=tokens, ignore_eos=True) as stream:
        async for event in stream:
            if event.HasField("delta") and event.delta.token_ids:
                times += [time.perf_counter()] * len(event.delta.token_ids)
            elif event.HasField("error"):
                raise RuntimeError(f"the mesh failed: {event.error}")
            elif event.HasField("finished"):
                moved = event.finished.served.transfer_bytes
    return (times[0] - begun) * 1e3, (times[-1] - times[0]) * 1e3 / (len(times) - 1), moved


async def run(model: str, dtype: str, rounds: int, length: int, tokens: int) -> dict[str, object]:
    random = np.random.default_rng(11)
    alone = await asyncio.to_thread(InProcess, model, dtype)
    options = MeshOptions(model=model, dtype=dtype, gateway_port=0, cache=False, embedder="none", threads=1)
    direct: list[tuple[float, float]] = []
    mesh: list[tuple[float, float, int]] = []
    try:
        async with running_mesh(options, state=False) as (_, state), Client(state.gateway) as client:
            for round_ in range(-1, rounds):
                prompts = [random.integers(10, VOCABULARY, length).tolist() for _ in range(2)]
                a = await asyncio.to_thread(alone.ask, prompts[0], tokens)
                b = await through_mesh(client, prompts[1], tokens)
                if round_ >= 0:  # the first pair warms both up
                    direct.append(a)
                    mesh.append(b)
    finally:
        alone.close()
    if not all(item[2] > 0 for item in mesh):
        raise RuntimeError("the mesh did not move pages: this is not the path that is to be measured")
    ttft = [statistics.median(item[0] for item in side) for side in (direct, mesh)]
    tpot = [statistics.median(item[1] for item in side) for side in (direct, mesh)]
    return {
        "model": model,
        "dtype": dtype,
        "prompt_tokens": length,
        "output_tokens": tokens,
        "rounds": rounds,
        "ttft_ms": {"in_process": ttft[0], "mesh": ttft[1], "ratio": ttft[1] / ttft[0], "added_ms": ttft[1] - ttft[0]},
        "tpot_ms": {"in_process": tpot[0], "mesh": tpot[1], "ratio": tpot[1] / tpot[0], "added_ms": tpot[1] - tpot[0]},
        "transfer_bytes": mesh[0][2],
        "raw": {"in_process": direct, "mesh": mesh},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=32, help="output tokens")
    parser.add_argument("--out", type=Path, help="write the raw figures as JSON")
    args = parser.parse_args()
    result = asyncio.run(run(args.model, args.dtype, args.rounds, args.prompt, args.tokens))
    print(f"{args.prompt} tokens in, {args.tokens} out, {args.rounds} alternating rounds, medians:")
    for name in ("ttft_ms", "tpot_ms"):
        row: dict[str, float] = result[name]  # type: ignore[assignment]
        print(
            f"  {name[:4].upper()}: in-process {row['in_process']:.1f} ms (the floor), mesh {row['mesh']:.1f} ms, "
            f"ratio {row['ratio']:.2f}, added {row['added_ms']:.1f} ms"
        )
    if args.out:
        args.out.write_text(json.dumps({"command": " ".join(sys.argv), **result}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
