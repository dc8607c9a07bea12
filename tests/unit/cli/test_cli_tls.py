"""ask, status and the health probe against servers that speak TLS and demand a certificate."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest_asyncio
import trustme

from kvmesh.config import ServiceSettings
from kvmesh.proto.v1 import engine_pb2, inference_pb2, router_pb2
from kvmesh.rpc import Access, RpcServer


async def chat(request: Any, context: Any) -> AsyncIterator[inference_pb2.ChatResponse]:
    yield inference_pb2.ChatResponse(
        event=inference_pb2.GenerateEvent(delta=inference_pb2.Delta(text="Paris, in secret."))
    )
    yield inference_pb2.ChatResponse(event=inference_pb2.GenerateEvent(finished=inference_pb2.Finished()))


async def watch(request: Any, context: Any) -> AsyncIterator[router_pb2.WatchResponse]:
    info = engine_pb2.WorkerInfo(worker_id="decode-of-the-fleet")
    yield router_pb2.WatchResponse(snapshot=True, workers=[router_pb2.WorkerStatus(info=info)])


def one_method(service: str, method: str, request: Any) -> Any:
    """What a stub's `add_..._to_server` does, for a single method that streams."""

    def add(behaviour: Any, server: Any) -> None:
        handler = grpc.unary_stream_rpc_method_handler(
            behaviour, request.FromString, lambda message: message.SerializeToString()
        )
        handlers = {method: handler}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        server.add_registered_method_handlers(service, handlers)

    return add


@dataclass
class Served:
    address: str
    flags: list[str]


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    ca = trustme.CA()
    files = {name: tmp_path / f"{name}.pem" for name in ("ca", "server", "server-key", "client", "client-key")}
    ca.cert_pem.write_to_path(str(files["ca"]))
    for name, identity in (("server", "kvmesh.test"), ("client", "somebody.test")):
        issued = ca.issue_cert(identity)
        files[name].write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        files[f"{name}-key"].write_bytes(issued.private_key_pem.bytes())
    tls = {"cert": files["server"], "key": files["server-key"], "ca": files["ca"], "require_client_cert": True}
    server = RpcServer(ServiceSettings(tls=tls, drain_timeout_s=1))  # type: ignore[arg-type]
    server.add(one_method("kvmesh.v1.Inference", "Chat", inference_pb2.ChatRequest), chat, access=Access.PUBLIC)
    server.add(
        one_method("kvmesh.v1.Router", "Watch", router_pb2.WatchRequest),
        watch,
        access=Access.INNER,
        long_lived=("Watch",),
    )
    address = await server.start()
    server.set_ready(True)
    flags = [f"--tls-ca={files['ca']}", f"--tls-cert={files['client']}", f"--tls-key={files['client-key']}"]
    yield Served(address, [*flags, "--tls-server-name=kvmesh.test"])
    await server.close()


async def run(module: str, *args: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *args),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **(env or {})},
    )
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, out.decode()


async def test_commands_speak_tls_with_the_given_files(served: Served) -> None:
    asked, shown, probed = await asyncio.gather(
        run("kvmesh.cli.main", "ask", "Where?", f"--address={served.address}", *served.flags),
        run("kvmesh.cli.main", "status", f"--router={served.address}", *served.flags),
        run("kvmesh.cli.health", served.address, "kvmesh.v1.Inference", "--timeout-s=60", *served.flags),
    )
    assert asked[0] == 0, asked[1]
    assert "Paris, in secret." in asked[1]
    assert shown[0] == 0, shown[1]
    assert "decode-of-the-fleet" in shown[1]
    assert probed == (0, "SERVING\n")


async def test_the_variables_of_the_services_do_as_well(served: Served) -> None:
    names = {
        "--tls-ca": "TLS__CA",
        "--tls-cert": "TLS__CERT",
        "--tls-key": "TLS__KEY",
        "--tls-server-name": "TLS_SERVER_NAME",
    }
    env = {f"KVMESH_{names[flag]}": value for flag, _, value in (item.partition("=") for item in served.flags)}
    probed, shown = await asyncio.gather(
        run("kvmesh.cli.health", served.address, "--timeout-s=60", env=env),
        run("kvmesh.cli.main", "status", f"--router={served.address}", env=env),
    )
    assert probed == (0, "SERVING\n")
    assert shown[0] == 0, shown[1]


async def test_without_them_nothing_is_told(served: Served, tmp_path: Path) -> None:
    plain, unproven, half, nowhere = await asyncio.gather(
        run("kvmesh.cli.health", served.address),
        run("kvmesh.cli.main", "status", f"--router={served.address}", served.flags[0], served.flags[3]),
        run("kvmesh.cli.main", "ask", "Where?", f"--address={served.address}", *served.flags[:2]),
        run("kvmesh.cli.health", served.address, f"--tls-ca={tmp_path / 'nowhere.pem'}"),
    )
    assert plain[0] == 1
    assert unproven[0] == 1
    assert (half[0], "--tls-key" in half[1]) == (2, True)
    assert (nowhere[0], "nowhere.pem" in nowhere[1]) == (2, True)
    assert not any("Traceback" in output for _, output in (plain, unproven, half, nowhere))
