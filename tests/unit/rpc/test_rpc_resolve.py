"""What a target stands for, and whose certificate is expected behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from identity_kit import Authority
from kvmesh import errors
from kvmesh.config import ServiceSettings, TlsSettings
from kvmesh.rpc import raising
from kvmesh.rpc.channel import open_inner_channel
from kvmesh.rpc.resolve import host_of, resolve
from rpc_echo import Echo, Text


@pytest.mark.parametrize(
    ("target", "host"),
    [
        ("router:50052", "router"),
        ("dns:///router.mesh.svc:50052", "router.mesh.svc"),
        ("dns://10.0.0.10/router.mesh.svc:50052", "router.mesh.svc"),
        ("dns:router:50052", "router"),
        ("127.0.0.1:50052", ""),
        ("dns:///127.0.0.1:50052", ""),
        ("[::1]:50052", ""),
        ("ipv4:10.0.0.1:1,10.0.0.2:1", ""),
        ("unix:/run/router.sock", ""),
    ],
)
def test_the_name_of_a_target(target: str, host: str) -> None:
    assert host_of(target) == host


async def test_numbers_are_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncio.get_running_loop", None)
    assert await resolve("127.0.0.1:50052") == {"127.0.0.1:50052"}
    assert await resolve("[::1]:50052") == {"[::1]:50052"}
    assert await resolve("ipv4:10.0.0.1:1,10.0.0.2:1") == {"10.0.0.1:1", "10.0.0.2:1"}
    assert await resolve("unix:/run/router.sock") == {"unix:/run/router.sock"}


async def test_a_certificate_bears_the_name_and_not_what_it_stood_for(mesh: Any, tmp_path: Path) -> None:
    async def hello(request: Text, context: Any) -> Text:
        return Text(value="hello")

    authority = Authority(tmp_path, "mesh")
    cert, key = authority.issue("router", "router.mesh.svc")
    server = await mesh.serve(unary=hello, settings={"tls": {"cert": cert, "key": key}})

    async def ask(tls: TlsSettings, name: str) -> str:
        channel = open_inner_channel(server.address, ServiceSettings(tls=tls), name=name)
        mesh.channels.append(channel)
        with raising():
            reply: str = (await Echo(channel).unary(Text())).value
        return reply

    tls = TlsSettings(ca=authority.file)
    assert await ask(tls, "router.mesh.svc") == "hello"
    for name in ("", "other.mesh.svc"):
        with pytest.raises(errors.Unavailable):
            await ask(tls, name)
    # One name for all of the mesh goes before.
    assert await ask(tls.model_copy(update={"server_name": "router.mesh.svc"}), "other.mesh.svc") == "hello"


async def test_a_name_that_is_none_resolves_to_nothing() -> None:
    assert await resolve("dns:///" + "a" * 64 + ":1") is None
    assert await resolve("dns:///a..b:1") is None
