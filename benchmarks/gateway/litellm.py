"""LiteLLM's proxy and this gateway, HTTP, one process each: requests/s at saturation and added latency.

What is behind LiteLLM is a server that answers at once (`backend.py`), behind the gateway router and scripted worker,
which cost more: what is compared is what a client waits for. --litellm names the `litellm` program of an environment
that has `litellm[proxy]`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from gateway.client import Work
from gateway.rig import HERE, clients, free_port, header, mesh, percentile, seen

CONFIG = """model_list:
  - model_name: bench
    litellm_params: {{model: openai/bench, api_base: "http://127.0.0.1:{port}/v1", api_key: none}}
litellm_settings: {{telemetry: false}}
general_settings: {{dangerously_permit_weak_or_unset_master_key: true}}
"""


@contextlib.asynccontextmanager
async def proxy(program: str) -> AsyncIterator[tuple[str, str]]:
    """(address of the proxy, address of what is behind it)."""
    behind, port = free_port(), free_port()
    null = asyncio.subprocess.DEVNULL
    backend = await asyncio.create_subprocess_exec(sys.executable, str(HERE / "backend.py"), str(behind), stdout=null)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(CONFIG.format(port=behind))
        litellm = await asyncio.create_subprocess_exec(
            *(
                *program.split(),
                "--config",
                str(config),
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
                "--num_workers",
                "1",
            ),
            stdout=null,
            stderr=null,
            env={**os.environ, "LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        )
        try:
            until = time.monotonic() + 90
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    break
                except OSError:
                    if time.monotonic() > until or litellm.returncode is not None:
                        raise RuntimeError("LiteLLM's proxy did not start") from None
                    await asyncio.sleep(0.2)
            yield f"127.0.0.1:{port}", f"127.0.0.1:{behind}"
        finally:
            for process in (litellm, backend):
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
                await process.wait()


async def saturate(face: str, address: str, model: str, args: argparse.Namespace) -> float:
    works = [
        Work(face, address, model, args.tokens, args.requests, streams=16, seed=number, temperature=0.0)
        for number in range(args.processes)
    ]
    found = seen(await clients(works))
    return len(found) / (max(item["last"] for item in found) - min(item["due"] for item in found))


async def alone(face: str, address: str, model: str, args: argparse.Namespace) -> tuple[float, float]:
    """Time to the first token (p50, p99) in ms, one request at a time."""
    found = seen(await clients([Work(face, address, model, args.tokens, 200, streams=1, seed=9)]))[20:]
    times = [(item["first"] - item["due"]) * 1e3 for item in found]
    return percentile(times, 50), percentile(times, 99)


async def run(args: argparse.Namespace) -> int:
    header(f"answers of {args.tokens} tokens, {args.processes} processes of clients, 16 requests each at a time")
    async with mesh(step_ms=0.2, batch=128) as (_, state, http):
        await saturate("http", http, state.model, args)  # warms up
        ours = await saturate("http", http, state.model, args), *await alone("http", http, state.model, args)
    async with proxy(args.litellm) as (address, behind):
        await saturate("litellm", address, "bench", args)
        theirs = await saturate("litellm", address, "bench", args), *await alone("litellm", address, "bench", args)
        floor = await saturate("litellm", behind, "bench", args), *await alone("litellm", behind, "bench", args)
    for name, (rate, p50, p99) in (
        ("what is behind LiteLLM", floor),
        ("LiteLLM proxy", theirs),
        ("kvmesh gateway", ours),
    ):
        print(f"  {name:23} {rate:7.0f} requests/s; one at a time: TTFT p50 {p50:6.2f}, p99 {p99:6.2f} ms")
    print(
        f"kvmesh / LiteLLM: {ours[0] / theirs[0]:.1f} x the requests/s; added TTFT of LiteLLM "
        f"{theirs[1] - floor[1]:.2f} ms, of gateway, router and worker together {ours[1]:.2f} ms"
    )
    return 0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--litellm", required=True, help="the `litellm` program, arguments allowed")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--requests", type=int, default=400, help="of each process of clients")
    parser.add_argument("--processes", type=int, default=2)
    return asyncio.run(run(parser.parse_args(argv)))
