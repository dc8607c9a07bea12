"""A client that nobody here wrote: `buf curl` lists services by reflection, checks health and streams an answer."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path

from mesh_kit import Mesh, mesh_up

BUF = shutil.which("buf") or str(Path(sys.executable).with_name("buf"))


async def buf_curl(mesh: Mesh, *args: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        BUF,
        "curl",
        "--protocol",
        "grpc",
        "--http2-prior-knowledge",
        *args,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def documents(text: str) -> list[dict]:  # type: ignore[type-arg]
    """`buf curl` prints one JSON document after another."""
    decoder, found, rest = json.JSONDecoder(), [], text.strip()
    while rest:
        value, end = decoder.raw_decode(rest)
        found.append(value)
        rest = rest[end:].strip()
    return found


async def test_reflection_health_and_a_streamed_answer() -> None:
    async with mesh_up(cache=False) as mesh:
        url = f"http://{mesh.gateway}"
        code, out, err = await buf_curl(mesh, "--list-services", url)
        assert code == 0, err
        services = set(out.split())
        assert {"kvmesh.v1.Inference", "grpc.health.v1.Health"} <= services
        assert "kvmesh.v1.Decode" not in services

        code, out, err = await buf_curl(
            mesh, "-d", '{"service": "kvmesh.v1.Inference"}', f"{url}/grpc.health.v1.Health/Check"
        )
        assert code == 0, err
        assert documents(out) == [{"status": "SERVING"}]

        request = {
            "model": mesh.model,
            "messages": [{"role": "user", "content": "hello " * 12}],
            "sampling": {"maxTokens": 8, "temperature": 0},
        }
        code, out, err = await buf_curl(mesh, "-d", json.dumps(request), f"{url}/kvmesh.v1.Inference/Chat")
        assert code == 0, err
        events = [document["event"] for document in documents(out)]
        assert "accepted" in events[0]
        assert "finished" in events[-1]
        assert sum("finished" in event or "error" in event for event in events) == 1
        assert "".join(event["delta"].get("text", "") for event in events if "delta" in event)
        assert events[-1]["finished"]["usage"]["completionTokens"] == 8

        code, out, err = await buf_curl(mesh, "-d", '{"model": "no-such"}', f"{url}/kvmesh.v1.Inference/Chat")
        assert code != 0
        assert "invalid_argument" in err or "not_found" in err
