"""Spans of a mesh through a real collector (rotel) into a receiver that keeps them."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import shutil
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from kvmesh.cli.ports import free_port

START_S = 60.0


@dataclass(frozen=True)
class Seen:
    """One span. `links`: attributes of each link, with the span it points to under "" (trace id, span id)."""

    service: str
    name: str
    trace: bytes
    id: bytes
    parent: bytes
    failed: bool
    attributes: dict[str, str]
    links: tuple[tuple[bytes, bytes, dict[str, str]], ...] = ()


@dataclass
class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps every span by trace id."""

    traces: dict[bytes, list[Seen]] = field(default_factory=lambda: defaultdict(list))

    async def Export(self, request, context):  # type: ignore[no-untyped-def]
        for resource in request.resource_spans:
            service = _attributes(resource.resource.attributes).get("service.name", "?").removeprefix("kvmesh-")
            for scope in resource.scope_spans:
                for span in scope.spans:
                    links = tuple((each.trace_id, each.span_id, _attributes(each.attributes)) for each in span.links)
                    failed = span.status.code == 2
                    seen = Seen(
                        service,
                        span.name,
                        span.trace_id,
                        span.span_id,
                        span.parent_span_id,
                        failed,
                        _attributes(span.attributes),
                        links,
                    )
                    self.traces[span.trace_id].append(seen)
        return trace_service_pb2.ExportTraceServiceResponse()

    def all(self) -> list[Seen]:
        return [span for spans in self.traces.values() for span in spans]


def _attributes(attributes) -> dict[str, str]:  # type: ignore[no-untyped-def]
    return {each.key: each.value.string_value or str(each.value.int_value) for each in attributes}


def orphans(spans: list[Seen]) -> list[Seen]:
    """Spans whose parent is not there."""
    ids = {span.id for span in spans}
    return [span for span in spans if span.parent and span.parent not in ids]


@contextlib.asynccontextmanager
async def collector(folder: Path) -> AsyncIterator[tuple[Receiver, str]]:
    """(receiver, endpoint): what is sent to the endpoint reaches the receiver through rotel."""
    found = importlib.util.find_spec("rotel")
    assert found is not None, "no rotel: `make dev-env` installs it"
    assert found.origin is not None
    # The wheel's program has no execute bit.
    program = folder / "rotel-agent"
    shutil.copyfile(Path(found.origin).with_name("rotel-agent"), program)
    program.chmod(0o700)
    server = grpc.aio.server()
    receiver = Receiver()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    port, http, out = free_port(), free_port(), server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with (folder / "rotel.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            program,
            "start",
            *("--otlp-grpc-endpoint", f"127.0.0.1:{port}", "--otlp-http-endpoint", f"127.0.0.1:{http}"),
            *("--exporter", "otlp", "--otlp-exporter-endpoint", f"http://127.0.0.1:{out}"),
            *("--otlp-exporter-protocol", "grpc"),
            cwd=folder,
            stdout=log,
            stderr=log,
        )
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            try:
                await asyncio.wait_for(channel.channel_ready(), START_S)
            except TimeoutError:
                raise AssertionError((folder / "rotel.log").read_text(errors="replace")) from None
        yield receiver, f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 20)
            except TimeoutError:
                process.kill()
                await process.wait()
        await server.stop(0)
