"""The certificate that members of the mesh see, beside the one for everybody else, and the one name that all bear."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from identity_kit import Authority
from kvmesh import errors
from kvmesh.config import ServiceSettings, TlsSettings
from kvmesh.rpc import raising
from kvmesh.rpc.channel import open_inner_channel
from rpc_echo import Echo, Text

NAME = "mesh.serving.svc"


async def hello(request: Text, context: Any) -> Text:
    return Text(value="hello")


@pytest.fixture
def mesh_ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "mesh")


@pytest.fixture
def public_ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "public")


async def ask(mesh: Any, address: str, tls: TlsSettings) -> str:
    """What an inner service answers to a member with these settings."""
    channel = open_inner_channel(address, ServiceSettings(tls=tls))
    mesh.channels.append(channel)
    with raising():
        return (await Echo(channel).unary(Text())).value


@pytest.mark.parametrize("front", ["own", "plain"])
async def test_inner_hops_see_the_meshs_certificate(
    mesh: Any, mesh_ca: Authority, public_ca: Authority, front: str
) -> None:
    cert, key = mesh_ca.issue("engine", NAME)
    demanding = {"cert": cert, "key": key, "ca": mesh_ca.file, "require_client_cert": True}
    server = await mesh.serve(unary=hello, settings={"tls": demanding})
    outer = public_ca.issue("gateway", "chat.example") if front == "own" else (None, None)
    inner = mesh_ca.issue("member", NAME)
    gateway = TlsSettings(
        cert=outer[0], key=outer[1], inner_cert=inner[0], inner_key=inner[1], ca=mesh_ca.file, server_name=NAME
    )
    assert gateway.serves_tls == (front == "own")
    assert not gateway.inner.require_client_cert
    assert await ask(mesh, server.address, gateway) == "hello"

    stranger = TlsSettings(cert=outer[0], key=outer[1], ca=mesh_ca.file, server_name=NAME)
    with pytest.raises(errors.Unavailable):
        await ask(mesh, server.address, stranger)
    misled = gateway.model_copy(update={"server_name": "other.serving.svc"})
    with pytest.raises(errors.Unavailable):
        await ask(mesh, server.address, misled)


def test_one_certificate_is_both_where_there_is_one(mesh_ca: Authority) -> None:
    cert, key = mesh_ca.issue("one", NAME)
    tls = TlsSettings(cert=cert, key=key, ca=mesh_ca.file)
    assert tls.inner is tls
    with pytest.raises(ValidationError, match=r"inner_cert and tls\.inner_key"):
        TlsSettings(inner_cert=cert)
