"""How a gateway process and the others reach each other: its sockets, its directories, their upkeep."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kvmesh.config import GatewaySettings
from kvmesh.rpc.auth import MeshAuth, MeshToken
from kvmesh.rpc.channel import MeshChannel, open_channel, open_inner_channel
from kvmesh.rpc.server import RpcServer
from kvmesh.rpc.tasks import BackgroundTasks
from kvmesh.store.client import RedisStore
from kvmesh.store.peers import PeerStore
from services.gateway.peers.abort import LIMIT_S, Peers
from services.gateway.peers.directory import RENEW_S, Directory, RedisDirectory, SocketDirectory
from services.gateway.peers.service import AbortLocal, serve_peers


class Peering:
    """Everything between gateways. `siblings`: folder and token file of the processes that share our port."""

    def __init__(
        self,
        settings: GatewaySettings,
        auth: MeshAuth,
        redis: RedisStore | None,
        siblings: tuple[Path, Path] | None,
        *,
        instance: str,
    ) -> None:
        self._settings = settings
        self._auth = auth
        self._redis = redis
        self._siblings = siblings
        self._sibling_token = MeshToken(siblings[1]) if siblings is not None else None
        self._servers: list[RpcServer] = []
        self._directories: list[Directory] = []
        self._replicas: RedisDirectory | None = None
        self._instance = instance
        self.peers = Peers(self._directories, self._open, instance=instance)

    def _open(self, target: str) -> MeshChannel:
        if target.startswith("unix:"):
            return open_channel(target, token=self._sibling_token, default_timeout_s=LIMIT_S)
        return open_inner_channel(target, self._settings, self._auth.token, default_timeout_s=LIMIT_S)

    async def start(self, abort: AbortLocal, tasks: BackgroundTasks) -> str:
        """Listen and be known. Returns the address for other gateways, "" where there is none.

        FailedPrecondition when it cannot be bound.
        """
        address = ""
        if self._siblings is not None:
            folder = SocketDirectory(self._siblings[0])
            path = folder.path(self._instance)
            sibling_auth = MeshAuth(self._sibling_token)
            self._servers.append(await serve_peers(f"unix:{path}", self._settings, sibling_auth, abort))
            self._directories.append(folder)
        if self._settings.peer_listen:
            server = await serve_peers(self._settings.peer_listen, self._settings, self._auth, abort)
            self._servers.append(server)
            address = server.address
        if self._redis is not None:
            self._replicas = RedisDirectory(PeerStore(self._redis), self._instance, address, self._auth.token)
            self._directories.append(self._replicas)
            tasks.spawn(self._announce(self._redis, self._replicas), name="peers-announce")
        if self._directories:
            tasks.spawn(self._tidy(), name="peers-tidy")
        return address

    async def _announce(self, redis: RedisStore, replicas: RedisDirectory) -> None:
        await redis.up.wait()
        await replicas.run()

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            await self.peers.tidy()

    async def close(self) -> None:
        """Stop listening, be forgotten, close the channels."""
        if self._replicas is not None:
            await self._replicas.leave()
        for server in self._servers:
            await server.close()
        if self._siblings is not None:
            SocketDirectory(self._siblings[0]).path(self._instance).unlink(missing_ok=True)
        await self.peers.close()
