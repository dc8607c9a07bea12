"""`SidecarLink`: keeps an engine registered with whichever sidecar listens on its socket, or in its folder."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvmesh.errors import KvmeshError, Unavailable
from kvmesh.kv.layout import KvLayout
from kvmesh.kv.region import Region
from kvmesh.rpc import cancel_and_wait
from kvmesh.transfer.client import SidecarClient
from kvmesh.transfer.folder import Sockets
from kvmesh.transfer.orphans import Writers
from kvmesh.transfer.posting import Poster
from kvmesh.transfer.tail import TailBuffer

log = logging.getLogger(__name__)
BACKOFF_S = (0.05, 2.0)


class SidecarLink:
    """Connects, and connects again with backoff to a successor. Lives on one asyncio loop.

    Slots of a dead sidecar fail at once (`completed` raises TransferFailed); their `drained` resolves when every
    process that could write into this engine's memory has unmapped it (told through the successor) or exited.
    on_connected(client) and on_lost() are called on the loop. join_timeout_s: instead of connect_timeout_s where the
    layout has several ranks, which the sidecar waits for; longer than it waits, so that it tells who is missing.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        engine_id: str,
        incarnation: int,
        layout: KvLayout,
        regions: Mapping[str, Region],
        doorbell: Region,
        ring: Region,
        tails: Sequence[TailBuffer] = (),
        connect_timeout_s: float = 5.0,
        join_timeout_s: float = 35.0,
        poster: Poster | None = None,
        on_connected: Callable[[SidecarClient], None] | None = None,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        self.client: SidecarClient | None = None
        self.error = ""
        self._sockets = Sockets(path)
        self._engine_id = engine_id
        self._incarnation = incarnation
        self._layout = layout
        self._regions = regions
        self._doorbell = doorbell
        self._ring = ring
        self._tails = tuple(tails)
        self._timeout_s = connect_timeout_s if layout.tp == 1 else max(connect_timeout_s, join_timeout_s)
        self._poster = poster
        self._on_connected = on_connected
        self._on_lost = on_lost
        self._writers = Writers()
        self._connected = asyncio.Event()
        self._lost = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = self._leaving = False

    def start(self) -> None:
        """Begin connecting in the background. Idempotent."""
        if self._task is None and not self._closed:
            self._task = asyncio.create_task(self._run(), name="sidecar-link")

    async def wait_connected(self, timeout_s: float) -> SidecarClient:
        """The client, once there is one. Raises Unavailable after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.client is None:
                    await self._connected.wait()
                return self.client
        except TimeoutError:
            why = f": {self.error}" if self.error else ""
            raise Unavailable(f"no sidecar on {self._sockets.path} within {timeout_s:g} s{why}") from None

    def notify_ring(self) -> None:
        """`SidecarClient.notify_ring` of the present client, or nothing (any thread)."""
        client = self.client
        if client is not None:
            client.notify_ring()

    def leaving(self) -> None:
        """`SidecarClient.leaving` of the present client and of those to come."""
        self._leaving = True
        if self.client is not None:
            self.client.leaving()

    async def close(self) -> None:
        """Stop and disconnect. Idempotent."""
        self._closed = True
        await cancel_and_wait(self._task)
        client, self.client = self.client, None
        self._connected.clear()
        if client is not None:
            await client.close()
        self._writers.close()

    async def _run(self) -> None:
        delay = BACKOFF_S[0]
        while True:
            try:
                client = await self._sockets.claim(self._register)
            except (KvmeshError, OSError) as error:
                # OSError: no descriptor is left, or the sidecar died in the middle of it. Neither lasts for ever.
                reason = error.message if isinstance(error, KvmeshError) else str(error)
                if reason != self.error:
                    log.warning("no sidecar yet: %s", reason)
                self.error = reason
                await asyncio.sleep(delay)
                delay = min(delay * 2, BACKOFF_S[1])
                continue
            delay = BACKOFF_S[0]
            self.error = ""
            self._lost.clear()
            self.client = client
            if not client.connected:
                # Lost between its hello and this line.
                self._on_client_lost()
                continue
            log.info("registered with sidecar %s (%s)", client.sidecar_id, ", ".join(client.transports))
            self._connected.set()
            if self._leaving:
                client.leaving()
            if self._on_connected is not None:
                self._on_connected(client)
            await self._lost.wait()

    async def _register(self, path: Path) -> SidecarClient:
        return await SidecarClient.connect(
            path,
            engine_id=self._engine_id,
            incarnation=self._incarnation,
            layout=self._layout,
            regions=self._regions,
            doorbell=self._doorbell,
            ring=self._ring,
            tails=self._tails,
            timeout_s=self._timeout_s,
            on_lost=self._on_client_lost,
            writers=self._writers,
            poster=self._poster,
        )

    def _on_client_lost(self) -> None:
        if self.client is None:
            return
        self.client = None
        self._connected.clear()
        self._lost.set()
        log.warning("the sidecar is lost")
        if self._on_lost is not None:
            self._on_lost()
