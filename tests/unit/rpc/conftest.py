from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from kvmesh.config import ServiceSettings
from kvmesh.rpc import Access, MeshChannel, RpcServer, open_channel
from rpc_echo import SERVICE, Echo, add_echo


class Mesh:
    """Makes servers and channels that end with the test."""

    def __init__(self) -> None:
        self.servers: list[RpcServer] = []
        self.channels: list[MeshChannel] = []

    async def serve(
        self, access: Access = Access.INNER, *, settings: dict[str, Any] | None = None, auth: Any = None, **echo: Any
    ) -> RpcServer:
        server = RpcServer(ServiceSettings(**({"drain_timeout_s": 5.0} | (settings or {}))), auth=auth)
        self.servers.append(server)
        add_echo(server, access, **echo)
        await server.start()
        return server

    def channel(self, server: RpcServer | str | list[str], **kwargs: Any) -> MeshChannel:
        channel = open_channel(server.address if isinstance(server, RpcServer) else server, **kwargs)
        self.channels.append(channel)
        return channel

    def echo(self, server: RpcServer | str, name: str = SERVICE, **kwargs: Any) -> Echo:
        return Echo(self.channel(server, **kwargs), name)


@pytest_asyncio.fixture
async def mesh(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Mesh]:
    made = Mesh()
    yield made
    for channel in made.channels:
        await channel.close()
    for server in made.servers:
        await server.close()


@pytest.fixture
def write_token(tmp_path: Any) -> Callable[..., Any]:
    def write(*tokens: str, name: str = "token") -> Any:
        path = tmp_path / name
        path.write_text("\n".join(tokens) + "\n")
        return path

    return write
