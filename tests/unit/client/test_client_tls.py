"""The client over TLS: it verifies the gateway, and proves itself where that is asked for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
import trustme

from client_kit import Gateway
from kvmesh.client import NO_RETRY, Client, SyncClient
from kvmesh.config import TlsSettings
from kvmesh.errors import FailedPrecondition, Unavailable


@pytest.fixture
def ca() -> trustme.CA:
    return trustme.CA()


async def serve(ca: trustme.CA, *, mutual: bool) -> Gateway:
    cert = ca.issue_cert("localhost")
    credentials = grpc.ssl_server_credentials(
        [(cert.private_key_pem.bytes(), b"".join(blob.bytes() for blob in cert.cert_chain_pems))],
        root_certificates=ca.cert_pem.bytes() if mutual else None,
        require_client_auth=mutual,
    )
    gateway = Gateway()
    await gateway.start(credentials=credentials)
    return gateway


def files(ca: trustme.CA, folder: Path, *, own: bool) -> TlsSettings:
    ca.cert_pem.write_to_path(folder / "ca.pem")
    if not own:
        return TlsSettings(ca=folder / "ca.pem")
    cert = ca.issue_cert("client")
    cert.private_key_pem.write_to_path(folder / "key.pem")
    cert.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    return TlsSettings(ca=folder / "ca.pem", cert=folder / "cert.pem", key=folder / "key.pem")


async def test_the_gateway_is_verified(ca: trustme.CA, tmp_path: Path) -> None:
    gateway = await serve(ca, mutual=False)
    tls = files(ca, tmp_path, own=False)
    async with Client(gateway.address, tls=tls, server_name="localhost", api_key="kvm-x") as client:
        assert await client.chat([("user", "x")]).result() == "Hello"
    (folder := tmp_path / "other").mkdir()
    stranger = files(trustme.CA(), folder, own=False)
    for wrong in (Client(gateway.address, tls=tls, retry=NO_RETRY), Client(gateway.address, tls=stranger)):
        async with wrong as client:
            with pytest.raises(Unavailable):
                await client.models()
    assert gateway.server is not None
    await gateway.server.stop(None)


async def test_a_client_proves_itself(ca: trustme.CA, tmp_path: Path) -> None:
    gateway = await serve(ca, mutual=True)
    with_own, without = files(ca, tmp_path, own=True), files(ca, tmp_path, own=False)

    def use() -> str:
        with SyncClient(gateway.address, tls=with_own, server_name="localhost") as client:
            return client.generate("x").result()

    assert await asyncio.to_thread(use) == "Hello"
    async with Client(gateway.address, tls=without, server_name="localhost", retry=NO_RETRY) as client:
        with pytest.raises(Unavailable):
            await client.models()
    assert gateway.server is not None
    await gateway.server.stop(None)


async def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match=r"no\.pem"):
        Client("localhost:1", tls=TlsSettings(ca=tmp_path / "no.pem"))
    with pytest.raises(FailedPrecondition, match=r"no\.pem"):
        SyncClient("localhost:1", tls=TlsSettings(ca=tmp_path / "no.pem"))
