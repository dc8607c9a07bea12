"""Who calls, as both faces of a gateway see it: odd headers on the wire, certificates of clients, certificates anew."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
import trustme

import kvmesh.rpc.tls as tls_module
from gateway_fakes import MODEL, WAIT_S
from gateway_world import World, end_of, next_event, rest, text_of
from http_world import start_http
from kvmesh.config import GatewaySettings, TlsSettings
from kvmesh.errors import FailedPrecondition
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.proto.v1 import inference_pb2_grpc
from kvmesh.rpc import BackgroundTasks, MeshChannel, RpcServer, ServiceContext, hash_key, open_channel
from kvmesh.rpc.status import from_rpc_error
from services.gateway.app import Gateway

KEY = "kvm-" + "k" * 43
KEYS = f"""
[[keys]]
sha256 = "{hash_key(KEY)}"
tenant = "keyed"
[[certificates]]
san = "acme.example"
tenant = "acme"
"""
REFUSED = "a valid API key is needed: authorization: Bearer <key>"


def write(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


class Authority:
    """A certificate authority, and its certificates as files."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._ca = folder, trustme.CA()
        self.file = write(folder, f"{name}.pem", self._ca.cert_pem.bytes())

    def issue(self, label: str, identity: str) -> tuple[Path, Path]:
        made = self._ca.issue_cert(identity)
        chain = b"".join(blob.bytes() for blob in made.cert_chain_pems)
        return (
            write(self._folder, f"{label}.pem", chain),
            write(self._folder, f"{label}.key", made.private_key_pem.bytes()),
        )


@pytest.fixture
def keyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Keys at the gateway, the mesh token inside."""
    monkeypatch.setenv("KVMESH_MESH_TOKEN_FILE", str(write(tmp_path, "token", b"mesh-token-for-tests\n")))
    return {"credentials_file": write(tmp_path, "keys.toml", KEYS.encode())}


def head(*lines: bytes) -> bytes:
    return b"\r\n".join([b"GET /v1/models HTTP/1.1", b"host: x", b"connection: close", *lines, b"", b""])


BEARER = b"Bearer " + KEY.encode()
LINES: dict[str, list[bytes]] = {
    "none": [],
    "empty": [b"authorization:"],
    "key alone": [b"authorization: " + KEY.encode()],
    "another scheme": [b"authorization: Basic " + KEY.encode()],
    "tab": [b"authorization: Bearer\t" + KEY.encode()],
    "twice": [b"authorization: " + BEARER, b"Authorization: " + BEARER],
    "right after wrong": [b"authorization: Bearer x", b"authorization: " + BEARER],
    "list": [b"authorization: " + BEARER + b", " + BEARER],
    "10 kB": [b"authorization: Bearer " + b"x" * 10_000],
    "not ASCII": [b"authorization: Bearer k\xc3\xa9y"],
    "not UTF-8": [b"authorization: Bearer \xff\xfe"],
    "another header": [b"x-api-key: " + KEY.encode(), b"api-key: " + KEY.encode()],
    "in the proxy's": [b"proxy-authorization: " + BEARER],
}


async def http(address: str, *lines: bytes, context: ssl.SSLContext | None = None) -> tuple[int, Any]:
    host, port = address.partition("://")[2].rsplit(":", 1)
    async with asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection(
            host, int(port), ssl=context, server_hostname="localhost" if context else None
        )
        writer.write(head(*lines))
        raw = await reader.read()
        writer.close()
    status, _, body = raw.partition(b"\r\n\r\n")
    return int(status.split(b" ", 2)[1]), json.loads(body)


async def test_odd_headers_over_http(world: World, keyed: dict[str, Any]) -> None:
    """All on one gateway: none of them may break it for the next."""
    worker = await world.worker()
    address = await start_http(world, **keyed)
    for name, lines in LINES.items():
        status, body = await http(address, *lines)
        assert (name, status, body["error"]["message"]) == (name, 401, REFUSED)
        assert body["error"]["type"] == "authentication_error" or body["error"]["code"], name
    for good in (b"authorization: " + BEARER, b"AUTHORIZATION:bearer " + KEY.encode() + b" "):
        assert (await http(address, good))[0] == 200
    named = b"x-kvmesh-tenant: "
    status, body = await http(address, b"authorization: " + BEARER, named + b"keyed", named + b"acme")
    assert (status, body["error"]["param"]) == (403, "x-kvmesh-tenant")
    assert (await http(address, b"authorization: " + BEARER, named + b"keyed"))[0] == 200
    assert not worker.submits.items


async def test_odd_headers_over_grpc(world: World, keyed: dict[str, Any]) -> None:
    worker = await world.worker()
    await world.start(static=True, **keyed)
    for name, lines in LINES.items():
        pairs = [line.partition(b":")[::2] for line in lines]
        if not all(value.isascii() and value.decode().isprintable() for _, value in pairs):
            continue  # gRPC's own clients do not send it
        metadata = [(key.decode().lower(), value.decode().strip()) for key, value in pairs]
        for call in (
            world.stub.ListModels(pb.ListModelsRequest(), metadata=metadata, timeout=WAIT_S),
            world.stub.GetModel(pb.GetModelRequest(name=MODEL), metadata=metadata, timeout=WAIT_S),
            world.stub.Tokenize(pb.TokenizeRequest(model=MODEL, text="hi"), metadata=metadata, timeout=WAIT_S),
            world.stub.Embed(pb.EmbedRequest(model=MODEL, input=["hi"]), metadata=metadata, timeout=WAIT_S),
            world.stub.Abort(pb.AbortRequest(request_id="x"), metadata=metadata, timeout=WAIT_S),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert (name, refused.value.code()) == (name, grpc.StatusCode.UNAUTHENTICATED)
            assert from_rpc_error(refused.value).message == REFUSED
        assert (await end_of(world.chat(metadata=metadata))).code() is grpc.StatusCode.UNAUTHENTICATED
    assert not worker.submits.items
    assert text_of(await world.ask(metadata=[("authorization", BEARER.decode())])) == "hello"
    assert worker.tenants.items == ["keyed"]


async def accept(request: Any) -> None:
    """And send nothing."""


class Doors:
    """A gateway with certificates, and what clients need to come to its doors."""

    def __init__(self, world: World, mesh: Authority, clients: Authority, tls: TlsSettings, http: str) -> None:
        self.world, self.mesh, self.clients, self.tls, self.http = world, mesh, clients, tls, http
        self.channels: list[MeshChannel] = []

    def stub(self, address: str, ca: Path, cert: tuple[Path, Path] | None = None) -> Any:
        own = {} if cert is None else {"cert": cert[0], "key": cert[1]}
        channel = open_channel(address, tls=TlsSettings(ca=ca, **own), server_name="localhost")
        self.channels.append(channel)
        return inference_pb2_grpc.InferenceStub(channel)

    async def get(self, ca: Path, cert: tuple[Path, Path] | None = None, *lines: bytes) -> int:
        context = ssl.create_default_context(cafile=ca)
        if cert is not None:
            context.load_cert_chain(*cert)
        return (await http(self.http, *lines, context=context))[0]


@pytest_asyncio.fixture
async def doors(
    world: World, keyed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Doors]:
    monkeypatch.setattr(tls_module, "INTERVAL_S", 0.0)
    mesh, clients = Authority(tmp_path, "mesh"), Authority(tmp_path, "clients")
    # Workers have certificates of their own, which do not change here.
    cert, key = mesh.issue("worker", "127.0.0.1")
    for name, path in (("CERT", cert), ("KEY", key), ("CA", mesh.file)):
        monkeypatch.setenv(f"KVMESH_TLS__{name}", str(path))
    await world.worker()
    cert, key = mesh.issue("gateway", "localhost")
    tls = TlsSettings(cert=cert, key=key, ca=mesh.file, client_ca=clients.file, client_listen="127.0.0.1:0")
    address = await start_http(world, tls=tls, **keyed)
    made = Doors(world, mesh, clients, tls, address)
    yield made
    for channel in made.channels:
        await channel.close()


async def ask(stub: Any, key: str | None = None) -> Any:
    metadata = [] if key is None else [("authorization", f"Bearer {key}")]
    request = pb.ChatRequest(model=MODEL, messages=[pb.ChatMessage(role="user", content="hi")])
    return stub.Chat(request, metadata=metadata, timeout=WAIT_S)


async def test_a_clients_certificate_is_a_credential_at_both_faces(doors: Doors) -> None:
    worker, server, ca = doors.world.workers[0], doors.world.server, doors.mesh.file
    assert doors.http.startswith("https://")
    acme, stranger = doors.clients.issue("acme", "acme.example"), doors.clients.issue("nobody", "nobody.example")
    for cert, key, tenant in [
        (acme, None, "acme"),
        (acme, KEY, "keyed"),
        (stranger, KEY, "keyed"),
        (stranger, None, None),
        (acme, "wrong", None),
    ]:
        lines = [] if key is None else [f"authorization: Bearer {key}".encode()]
        assert await doors.get(ca, cert, *lines) == (401 if tenant is None else 200)
        call = await ask(doors.stub(server.client_address, ca, cert), key)
        if tenant is None:
            assert (await end_of(call)).code() is grpc.StatusCode.UNAUTHENTICATED
        else:
            assert text_of(await rest(call)) == "hello"
            assert worker.tenants.items[-1] == tenant
    # At the other gRPC door a key is needed; over HTTP there is but one, where a certificate is optional.
    call = await ask(doors.stub(server.address, ca, acme))
    assert (await end_of(call)).code() is grpc.StatusCode.UNAUTHENTICATED
    assert await doors.get(ca) == 401
    assert await doors.get(ca, None, b"authorization: " + BEARER) == 200


async def test_certificates_change_while_streams_go_on(doors: Doors, tmp_path: Path) -> None:
    worker, server = doors.world.workers[0], doors.world.server
    worker.on_submit = accept
    running = await ask(doors.stub(server.address, doors.mesh.file), KEY)
    await next_event(running)
    submitted = worker.submits.items[-1]
    worker.on_submit = None
    newer = Authority(tmp_path, "newer")
    cert, key = newer.issue("gateway-anew", "localhost")
    assert doors.tls.key is not None
    assert doors.tls.cert is not None
    key.replace(doors.tls.key)
    cert.replace(doors.tls.cert)
    # New connections see the new certificate, and the old one no more.
    assert text_of(await rest(await ask(doors.stub(server.address, newer.file), KEY))) == "hello"
    assert await doors.get(newer.file, None, b"authorization: " + BEARER) == 200
    with pytest.raises(ssl.SSLCertVerificationError):
        await doors.get(doors.mesh.file)
    refused = await end_of(await ask(doors.stub(server.address, doors.mesh.file), KEY))
    assert refused.code() is grpc.StatusCode.UNAVAILABLE
    worker.answer(submitted, "whole")
    assert text_of(await rest(running)) == "whole"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keys_in_redis": True}, "redis_url"),
        ({"keys_in_redis": True, "redis_url": "redis://127.0.0.1:1/0"}, "mesh_token_file"),
        ({"jwt": {"jwks": "https://login.example/keys", "issuer": "i", "audience": "a"}}, "mesh_token_file"),
    ],
)
async def test_sources_that_do_not_go_together_do_not_start(settings: dict[str, Any], message: str) -> None:
    config = GatewaySettings(**settings)
    server = RpcServer(config)
    try:
        with pytest.raises(FailedPrecondition, match=message):
            Gateway(ServiceContext(config, server, server.auth, BackgroundTasks()))
    finally:
        await server.close()
