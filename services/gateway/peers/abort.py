"""Ending a request wherever it runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from kvmesh.errors import KvmeshError
from kvmesh.proto.v1 import gateway_peer_pb2, gateway_peer_pb2_grpc
from kvmesh.rpc.auth import tenant_metadata
from kvmesh.rpc.channel import MeshChannel, raising
from kvmesh.rpc.tasks import cancel_and_wait
from services.gateway.peers.directory import Directory
from services.gateway.registry import INSTANCE, owner

log = logging.getLogger(__name__)

LIMIT_S = 1.0
"""What all peers together get: one that is away costs an Abort this much and no more."""

FAN_OUT = 32
MAX_PEERS = 1024


class Peers:
    """The other gateways, by all directories; the first that knows an instance decides."""

    def __init__(
        self, directories: Sequence[Directory], open_channel: Callable[[str], MeshChannel], *, instance: str = INSTANCE
    ) -> None:
        self._directories = directories
        self._open_channel = open_channel
        self._channels: dict[str, MeshChannel] = {}
        self.instance = instance

    def known(self) -> dict[str, str]:
        """Instance → target, without ourselves."""
        found: dict[str, str] = {}
        for directory in self._directories:
            for instance, target in directory.addresses().items():
                found.setdefault(instance, target)
        found.pop(self.instance, None)
        return dict(list(found.items())[:MAX_PEERS])

    async def abort(self, tenant: str, request_id: str) -> bool:
        """True when some other gateway ran a request of this tenant under this id. Never raises for a peer."""
        try:
            async with asyncio.timeout(LIMIT_S):
                return await self._abort(tenant, request_id)
        except TimeoutError:
            return False

    async def _abort(self, tenant: str, request_id: str) -> bool:
        made_by = owner(request_id)
        if made_by and made_by not in self.known() and made_by != self.instance:
            for directory in self._directories:
                await directory.refresh()
        known = self.known()
        if made_by in known and await self._ask([known.pop(made_by)], tenant, request_id):
            return True
        # A client's own id, which may look like one of ours.
        return await self._ask(known.values(), tenant, request_id)

    async def _ask(self, targets: Iterable[str], tenant: str, request_id: str) -> bool:
        room = asyncio.Semaphore(FAN_OUT)
        tasks = [asyncio.create_task(self._ask_one(target, tenant, request_id, room)) for target in targets]
        try:
            for answer in asyncio.as_completed(tasks):
                if await answer:
                    return True
            return False
        finally:
            await cancel_and_wait(*tasks)

    async def _ask_one(self, target: str, tenant: str, request_id: str, room: asyncio.Semaphore) -> bool:
        async with room:
            stub = gateway_peer_pb2_grpc.GatewayPeerStub(self._channel(target))
            request = gateway_peer_pb2.AbortLocalRequest(tenant=tenant, request_id=request_id)
            try:
                with raising():
                    reply: gateway_peer_pb2.AbortLocalResponse = await stub.AbortLocal(
                        request, timeout=LIMIT_S, metadata=tenant_metadata(tenant)
                    )
            except KvmeshError as exc:
                log.info("gateway %s was not asked to abort: %s", target, exc.message)
                return False
            return reply.found

    def _channel(self, target: str) -> MeshChannel:
        channel = self._channels.get(target)
        if channel is None:
            channel = self._channels[target] = self._open_channel(target)
        return channel

    async def tidy(self) -> None:
        """Close channels to those that are gone."""
        current = set(self.known().values())
        for target in [target for target in self._channels if target not in current]:
            await self._channels.pop(target).close()

    async def close(self) -> None:
        """Close all channels."""
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()
