"""Where other gateways are reached: instance → gRPC target."""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path
from typing import Protocol

from kvmesh.rpc.auth import MeshToken
from kvmesh.store.peers import PeerStore

log = logging.getLogger(__name__)

RENEW_S = 5.0
UNSIGNED = "-"
SOCKET_SUFFIX = ".sock"
MAX_SOCKETS = 256
_MEMBER = re.compile(r"([0-9a-z]{1,32}) ([A-Za-z0-9._:\[\]-]{1,256}:\d{1,5}) ([0-9a-f]{64}|-)")


class Directory(Protocol):
    """One way of knowing the others."""

    def addresses(self) -> dict[str, str]:
        """Instance → target, ourselves included, as far as it is known now."""

    async def refresh(self) -> None:
        """Look again, where looking takes time."""


class SocketDirectory:
    """Processes of one instance: a folder with a socket of each, which nobody else can enter."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, instance: str) -> Path:
        """Socket of one process."""
        return self._folder / f"{instance}{SOCKET_SUFFIX}"

    def addresses(self) -> dict[str, str]:
        """See Directory."""
        try:
            found = sorted(self._folder.glob(f"*{SOCKET_SUFFIX}"))[:MAX_SOCKETS]
        except OSError:
            return {}
        return {path.name.removesuffix(SOCKET_SUFFIX): f"unix:{path}" for path in found}

    async def refresh(self) -> None:
        """See Directory. A folder is always up to date."""


class RedisDirectory:
    """Replicas that announce themselves in Redis.

    What Redis says decides to whom the mesh token is shown, so a member carries a proof that one who has the token
    wrote it.
    """

    def __init__(self, store: PeerStore, instance: str, address: str, token: MeshToken | None) -> None:
        """`address`: where others reach us; "" = nowhere, we only look."""
        self._store = store
        self._instance = instance
        self._address = address
        self._token = token
        self._known: dict[str, str] = {}

    def addresses(self) -> dict[str, str]:
        """See Directory."""
        return self._known

    def _member(self) -> str:
        if not self._address:
            return ""
        text = f"{self._instance} {self._address}"
        return f"{text} {self._token.sign(text.encode()) if self._token is not None else UNSIGNED}"

    async def refresh(self) -> None:
        """See Directory. What was known stands while Redis is away."""
        members = await self._store.announce(self._member())
        if members is not None:
            self._known = dict(filter(None, map(self._read, members)))

    def _read(self, member: str) -> tuple[str, str] | None:
        found = _MEMBER.fullmatch(member)
        if found is None:
            return None
        instance, address, proof = found.groups()
        if self._token is None:
            return (instance, address) if proof == UNSIGNED else None
        return (instance, address) if self._token.signed(f"{instance} {address}".encode(), proof) else None

    async def run(self) -> None:
        """Renew until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(RENEW_S)

    async def leave(self) -> None:
        """We are going."""
        if self._address:
            await self._store.leave(self._member())
