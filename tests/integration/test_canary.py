"""What is asked and answered stays out of logs, spans, metrics and errors, at level debug too: a canary through a whole
mesh of real processes, with an answer, a cached one, refused ones, and one whose worker dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from kvmesh.client import Client
from kvmesh.errors import KvmeshError
from mesh_kit import SCRIPTED, Mesh, mesh_up, until

CANARY = "CANARYcanary8372"
SERVICES = ("gateway", "router", "decode", "prefill", "kvtransfer")


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps whatever is exported, as bytes."""

    def __init__(self) -> None:
        self.raw = b""
        self.services: set[str] = set()

    async def Export(self, request, context):  # type: ignore[no-untyped-def]
        self.raw += request.SerializeToString()
        for resource in request.resource_spans:
            self.services |= {a.value.string_value for a in resource.resource.attributes if a.key == "service.name"}
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
async def receiver() -> AsyncIterator[tuple[Receiver, str]]:
    server = grpc.aio.server()
    servicer = Receiver()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield servicer, f"http://127.0.0.1:{port}"
    await server.stop(0)


def fetch(url: str, body: bytes | None = None) -> str:
    """The text of an answer, whatever its status."""
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    try:
        return str(urllib.request.urlopen(request, timeout=60).read().decode())
    except urllib.error.HTTPError as error:
        return str(error.read().decode())


async def refused(client: Client, text: str, **fields: Any) -> str:
    with pytest.raises(KvmeshError) as caught:
        await client.chat([("user", text)], **fields).result()
    return f"{caught.value!r} {caught.value.message} {caught.value.details}"


async def speak(mesh: Mesh, http: str) -> tuple[str, list[str]]:
    """All that a client may do with the canary; the answer to it, and all errors that it got to see."""
    said = f"{CANARY} " * 30
    errors = []
    async with mesh.client() as client:
        first = await client.chat([("user", said)], max_tokens=48, temperature=0.0, seed=7).result()
        again = await client.chat([("user", said)], max_tokens=48, temperature=0.0, seed=7).result()
        assert first == again
        errors.append(await refused(client, said, temperature=-3.0))
        errors.append(await refused(client, said * 10_000))
    chat = {"model": mesh.model, "messages": [{"role": "user", "content": said}], "max_tokens": 8}
    assert "choices" in await asyncio.to_thread(fetch, f"{http}/v1/chat/completions", json.dumps(chat).encode())
    for wrong in (
        {**chat, "messages": [{"role": "nobody", "content": said}]},
        {**chat, "temperature": -3},
        {**chat, "messages": said},
    ):
        errors.append(await asyncio.to_thread(fetch, f"{http}/v1/chat/completions", json.dumps(wrong).encode()))
    errors.append(await asyncio.to_thread(fetch, f"{http}/v1/chat/completions", f'{{"messages": "{said}'.encode()))
    async with mesh.client() as client:
        await lose(mesh, client, f"{said} and then")
    return first, errors


async def lose(mesh: Mesh, client: Client, text: str) -> None:
    """A stream whose worker is killed, once: it is healed by the one that comes in its place, or it fails."""
    killed = False
    with contextlib.suppress(KvmeshError, TimeoutError):
        async with asyncio.timeout(20):
            async for _ in client.chat([("user", text)], max_tokens=500, temperature=0.0):
                if not killed:
                    killed = True
                    mesh.kill("decode-0")
    assert killed


async def test_nothing_of_what_is_said_is_told(receiver: tuple[Receiver, str]) -> None:
    servicer, endpoint = receiver
    settings = {f"{service}.log_format": "json" for service in SERVICES}
    async with mesh_up(
        SCRIPTED, settings=settings, log_level="debug", otlp_endpoint=endpoint, http_port=0, playground=False
    ) as mesh:
        pages = {
            name: process.read_ready().metrics  # type: ignore[union-attr]
            for name, process in mesh.supervisor.processes.items()
            if process.read_ready() is not None and process.read_ready().metrics  # type: ignore[union-attr]
        }
        ready = json.loads(mesh.supervisor.processes["gateway"].spec.ready_file.read_text())
        out, errors = await speak(mesh, ready["http"])
        told = {f"metrics of {name}": await asyncio.to_thread(_page, at) for name, at in pages.items()}
        await until(lambda: len(servicer.services) == 5, "spans of all services")
        told |= {f"log of {name}": mesh.log(name) for name in mesh.supervisor.processes}
        told |= {f"error {number}": error for number, error in enumerate(errors)}
    told["spans"] = servicer.raw.decode("latin-1")
    assert len(errors) == 6
    assert all(errors)
    assert len([name for name in told if name.startswith("log of")]) >= 5
    for name, text in told.items():
        assert CANARY not in text, f"{name} tells what was asked"
        for piece in pieces(out):
            assert piece not in text, f"{name} tells what was answered"
    lines = [json.loads(line) for line in told["log of gateway"].splitlines() if line.startswith("{")]
    asked = [line for line in lines if line["logger"] == "kvmesh.access"]
    assert len(asked) >= 5
    assert all(line["request_id"] and line["trace_id"] for line in asked)
    assert {line["outcome"] for line in asked} >= {"ok", "refused"}


def _page(address: str) -> str:
    try:
        return fetch(f"http://{address}/metrics")
    except OSError:
        return ""  # of the worker that was killed


def pieces(text: str) -> list[str]:
    """Stretches of an answer that occur nowhere by chance."""
    return [text[at : at + 12] for at in range(0, max(0, len(text) - 12), 12) if len(set(text[at : at + 12])) > 5]
