"""What the parts share: a mesh with the scripted engine, processes of clients, percentiles."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gateway.client import Work
from kvmesh.cli.plan import MeshOptions
from kvmesh.cli.up import running_mesh

HERE = Path(__file__).resolve().parent


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.asynccontextmanager
async def mesh(
    *, step_ms: float, batch: int, unified: int = 1, cache: bool = False, token_ms: float = 0.0, **settings: object
) -> AsyncIterator[tuple[Any, Any, str]]:
    """(supervisor, state, HTTP address) of gateway, router and scripted unified workers."""
    http = f"127.0.0.1:{free_port()}"
    scripted = {
        "decode.scripted_step_ms": str(step_ms),
        "decode.scripted_token_ms": str(token_ms),
        # The worker is to be no limit: what moves and what is kept is measured elsewhere.
        "decode.scripted_verify": "off",
        "decode.scripted_layers": "1",
        "decode.max_batch": str(batch),
        "decode.max_queue": str(batch),
        "decode.token_budget": str(max(2048, 2 * batch)),
        "decode.num_pages": str(max(4096, batch * 16)),
        "decode.max_model_len": "4096",
    }
    options = MeshOptions(
        runner="scripted",
        model="scripted",
        gateway_port=0,
        cache=cache,
        embedder="none",
        threads=1,
        prefill=0,
        decode=0,
        unified=unified,
        log_level="warning",
        settings={
            **scripted,
            "gateway.http_listen": http,
            "gateway.route_timeout_ms": "2000",
            **{key.replace("__", "."): str(value) for key, value in settings.items()},
        },
    )
    async with running_mesh(replace(options), state=False) as (supervisor, state):
        yield supervisor, state, http


async def clients(works: Sequence[Work], *, prefix: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Run processes of clients at once; their results. RuntimeError when one of them fails."""

    async def one(work: Work) -> dict[str, Any]:
        process = await asyncio.create_subprocess_exec(
            *prefix,
            sys.executable,
            str(HERE / "client.py"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": f"{HERE.parents[1] / 'libs'}:{HERE.parents[1]}"},
        )
        out, _ = await process.communicate(json.dumps(asdict(work)).encode())
        if process.returncode:
            raise RuntimeError(f"a process of clients ended with {process.returncode}")
        result: dict[str, Any] = json.loads(out)
        return result

    return list(await asyncio.gather(*(one(work) for work in works)))


def seen(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All requests of all processes. RuntimeError where one failed: a figure over failures says nothing."""
    found = [item for result in results for item in result["seen"]]
    failed = [item["error"] for item in found if item["error"]]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(found)} requests failed: {failed[0]}")
    return found


def tokens_per_s(results: Sequence[dict[str, Any]]) -> float:
    """From the first token of all to the last."""
    found = seen(results)
    span = max(item["last"] for item in found) - min(item["first"] for item in found)
    return sum(item["tokens"] for item in found) / span


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q / 100 * len(ordered)))]


def header(what: str) -> None:
    """Where this ran."""
    print(f"{what}; {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}", flush=True)
