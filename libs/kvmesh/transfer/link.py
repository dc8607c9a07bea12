"""`SidecarLink`: keeps an engine registered with whichever sidecar listens on its socket.

STUB with the final signatures; the body follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from kvmesh.kv.layout import KvLayout
from kvmesh.kv.region import Region
from kvmesh.transfer.client import SidecarClient


class SidecarLink:
    """Connects, and connects again with backoff to a successor. Lives on one asyncio loop.

    Slots of a dead sidecar fail at once (`completed` raises TransferFailed); their `drained` resolves when every
    process that could write into this engine's memory has unmapped it (told through the successor) or exited.
    """

    client: SidecarClient | None

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
        connect_timeout_s: float = 5.0,
        on_connected: Callable[[SidecarClient], None] | None = None,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        raise NotImplementedError

    def start(self) -> None:
        """Begin connecting in the background."""
        raise NotImplementedError

    async def wait_connected(self, timeout_s: float) -> SidecarClient:
        """The client, once there is one. Raises Unavailable after `timeout_s`."""
        raise NotImplementedError

    def notify_ring(self) -> None:
        """`SidecarClient.notify_ring` of the present client, or nothing (any thread)."""
        raise NotImplementedError

    async def close(self) -> None:
        """Stop and disconnect. Idempotent."""
        raise NotImplementedError
