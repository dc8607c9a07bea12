"""TLS at the public door: certificates that are asked for, files that change, the age of connections."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import kvmesh.rpc.tls as tls_module
from identity_kit import Authority
from kvmesh import errors
from kvmesh.config import GatewaySettings, ServiceSettings, TlsSettings
from kvmesh.rpc import Access, MeshAuth, RpcServer, raising
from kvmesh.rpc.certificates import PeerCertificate
from kvmesh.rpc.tls import reloading_ssl_context
from rpc_echo import Text, add_echo

LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked at with each handshake."""
    monkeypatch.setattr(tls_module, "INTERVAL_S", 0.0)


@pytest.fixture
def mesh_ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "mesh")


@pytest.fixture
def client_ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "clients")


async def who(request: Any, context: Any) -> Any:
    found = PeerCertificate.of_call(context)
    return Text(value="nobody" if found is None else f"{found.subject}|{','.join(sorted(found.names))}")


def server_tls(mesh_ca: Authority, **more: Any) -> TlsSettings:
    cert, key = mesh_ca.issue("server", "localhost", "127.0.0.1")
    return TlsSettings(cert=cert, key=key, **more)


async def test_clients_prove_themselves_at_a_door_of_their_own(mesh: Any, mesh_ca: Authority, client_ca: Authority):
    tls = server_tls(mesh_ca, client_ca=client_ca.file, client_listen="127.0.0.1:0")
    server = await mesh.serve(Access.PUBLIC, unary=who, settings={"tls": tls})
    acme = client_ca.client(mesh_ca, "Acme.example", common_name="batch.acme")
    plain = TlsSettings(ca=mesh_ca.file)
    assert (await mesh.echo(server.client_address, tls=acme).unary(Text())).value == "batch.acme|acme.example"
    assert (await mesh.echo(server, tls=plain).unary(Text())).value == "nobody"
    # Also who has one is not asked for it at the other door.
    assert (await mesh.echo(server, tls=acme).unary(Text())).value == "nobody"
    for stranger in (plain, mesh_ca.client(mesh_ca, "acme.example", common_name="batch.acme")):
        with pytest.raises(errors.Unavailable), raising():
            await mesh.echo(server.client_address, tls=stranger).unary(Text())
    # The authorities of clients follow their file, as certificates do.
    others = Authority(client_ca.folder, "others")
    others.file.replace(client_ca.file)
    newer = others.client(mesh_ca, "newer.example")
    assert (await mesh.echo(server.client_address, tls=newer).unary(Text())).value == "|newer.example"
    with pytest.raises(errors.Unavailable), raising():
        await mesh.echo(server.client_address, tls=acme).unary(Text())


async def test_a_clients_certificate_opens_no_inner_service(
    mesh: Any, mesh_ca: Authority, client_ca: Authority, write_token
):
    tls = server_tls(mesh_ca, client_ca=client_ca.file, client_listen="127.0.0.1:0")
    settings = {"tls": tls, "mesh_token_file": write_token("a-token-of-the-mesh")}
    server = await mesh.serve(Access.INNER, unary=who, settings=settings)
    assert not MeshAuth.from_settings(ServiceSettings(**settings)).mtls
    with pytest.raises(errors.Unauthenticated), raising():
        await mesh.echo(server.client_address, tls=client_ca.client(mesh_ca, "acme.example")).unary(Text())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"client_ca": "x"}, "client_ca needs"),
        ({"cert": "c", "key": "k", "client_listen": "a:1"}, "client_listen needs"),
        ({"cert": "c", "key": "k", "ca": "a", "client_ca": "x", "require_client_cert": True}, "exclude each other"),
        ({"cert": "c", "key": "k", "client_ca": "x", "client_listen": "nonsense"}, "host:port"),
    ],
)
def test_settings_that_contradict_each_other(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TlsSettings(**fields)


class Https:
    """A server of the context alone: it says what certificate it saw, and which it showed."""

    def __init__(self, tls: TlsSettings) -> None:
        self.context = reloading_ssl_context(tls)
        self.port = 0

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Https]:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            found = PeerCertificate.of_socket(writer.get_extra_info("ssl_object").getpeercert())
            writer.write(b"nobody" if found is None else f"{found.subject}|{','.join(sorted(found.names))}".encode())
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=self.context)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()

    async def ask(
        self, ca: Path, cert: Path | None = None, key: Path | None = None, name: str | None = "localhost"
    ) -> str:
        context = ssl.create_default_context(cafile=ca)
        if name is None:
            context.check_hostname = False
        if cert is not None and key is not None:
            context.load_cert_chain(cert, key)
        async with asyncio.timeout(LIMIT_S):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", self.port, ssl=context, server_hostname=name or ""
            )
            try:
                return (await reader.read()).decode()
            finally:
                writer.close()

    async def refuses(self, ca: Path, cert: Path | None = None, key: Path | None = None) -> bool:
        """Whether no answer comes: the client may be through with its part of the handshake when the server ends it."""
        try:
            return not await self.ask(ca, cert, key)
        except OSError:
            return True


async def test_https_takes_a_certificate_that_is_given(
    mesh_ca: Authority, client_ca: Authority, tmp_path: Path
) -> None:
    async with Https(server_tls(mesh_ca, client_ca=client_ca.file)).serving() as https:
        assert await https.ask(mesh_ca.file) == "nobody"
        acme = client_ca.issue("acme", "acme.example", common_name="batch.acme")
        assert await https.ask(mesh_ca.file, *acme) == "batch.acme|acme.example"
        # An address for the server's name: TLS then carries no name, and the files are followed all the same.
        assert await https.ask(mesh_ca.file, *acme, name="127.0.0.1") == "batch.acme|acme.example"
        assert await https.refuses(mesh_ca.file, *Authority(tmp_path, "others").issue("other", "acme.example"))


async def test_https_demands_a_certificate_of_the_mesh(mesh_ca: Authority) -> None:
    async with Https(server_tls(mesh_ca, ca=mesh_ca.file, require_client_cert=True)).serving() as https:
        assert await https.ask(mesh_ca.file, *mesh_ca.issue("member", "gateway.mesh")) == "|gateway.mesh"
        assert await https.refuses(mesh_ca.file)


async def test_new_files_are_for_new_connections(mesh_ca: Authority, client_ca: Authority, tmp_path: Path) -> None:
    tls = server_tls(mesh_ca, client_ca=client_ca.file)
    acme = client_ca.issue("acme", "acme.example")
    async with Https(tls).serving() as https:
        assert await https.ask(mesh_ca.file, *acme) == "|acme.example"
        # Half of a change, and then a broken one: what was good stays.
        newer = Authority(tmp_path, "newer")
        cert, key = newer.issue("newer-server", "localhost")
        tls.key.write_bytes(key.read_bytes())
        assert await https.ask(mesh_ca.file) == "nobody"
        tls.cert.write_bytes(cert.read_bytes())
        assert await https.ask(newer.file, *acme) == "|acme.example"
        with pytest.raises(ssl.SSLCertVerificationError):
            await https.ask(mesh_ca.file)
        # So are the authorities of clients.
        others = Authority(tmp_path, "others")
        others.file.replace(client_ca.file)
        assert await https.refuses(newer.file, *acme)
        assert await https.ask(newer.file, *others.issue("other", "other.example")) == "|other.example"


def test_unusable_files_are_named(mesh_ca: Authority, tmp_path: Path) -> None:
    tls = server_tls(mesh_ca)
    with pytest.raises(errors.FailedPrecondition, match=r"nowhere\.pem"):
        reloading_ssl_context(tls.model_copy(update={"client_ca": tmp_path / "nowhere.pem"}))
    other = Authority(tmp_path, "other").issue("mismatch", "localhost")
    with pytest.raises(errors.FailedPrecondition, match="cannot be used"):
        reloading_ssl_context(tls.model_copy(update={"key": other[1]}))


class Aged(ServiceSettings):
    """A server whose connections live for half a second."""

    @property
    def connection_life_s(self) -> tuple[float, float]:
        return 0.5, LIMIT_S


async def test_a_connection_that_is_too_old_ends_with_its_streams(mesh: Any) -> None:
    """A stream goes on over the age of its connection; the calls after it come over a new one, without an error."""
    ended, peers = asyncio.Event(), []

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        peers.append(context.peer())
        yield Text(value="first")
        await asyncio.wait_for(ended.wait(), LIMIT_S)
        yield Text(value="last")

    async def unary(request: Any, context: Any) -> Any:
        peers.append(context.peer())
        return Text()

    server = RpcServer(Aged(drain_timeout_s=1.0))
    mesh.servers.append(server)
    add_echo(server, Access.PUBLIC, unary=unary, stream=stream)
    await server.start()
    echo = mesh.echo(server)
    call = echo.stream(Text(), timeout=LIMIT_S)
    assert (await call.read()).value == "first"
    async with asyncio.timeout(LIMIT_S):
        # Each is answered; at some time from another port, which means another connection.
        while len(set(peers)) == 1:
            await echo.unary(Text(), timeout=LIMIT_S)
            await asyncio.sleep(0.02)
    ended.set()
    assert (await call.read()).value == "last"
    assert (await call.code()).name == "OK"


def test_the_age_is_a_setting_of_the_gateway() -> None:
    assert GatewaySettings().connection_life_s[0] == 0
    age_s, grace_s = GatewaySettings(max_connection_age_s=60).connection_life_s
    assert (age_s, grace_s) == (60, 86_400)
