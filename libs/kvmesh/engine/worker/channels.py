"""Channels to prefill workers: one an address, kept while used, the longest idle ones closed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from kvmesh.rpc.channel import MeshChannel
from kvmesh.rpc.tasks import BackgroundTasks

MAX_IDLE = 64


class PrefillChannels:
    """Acquire and release by address; a channel in use is never closed."""

    def __init__(self, open_channel: Callable[[str], MeshChannel], tasks: BackgroundTasks) -> None:
        self._open = open_channel
        self._tasks = tasks
        self._channels: OrderedDict[str, MeshChannel] = OrderedDict()
        self._users: dict[str, int] = {}

    def acquire(self, address: str) -> MeshChannel:
        """The channel to an address; give it back with `release`."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._open(address)
        self._channels.move_to_end(address)
        self._users[address] = self._users.get(address, 0) + 1
        return channel

    def release(self, address: str) -> None:
        """One user less; channels over the limit are closed, longest idle first."""
        left = self._users.get(address, 0) - 1
        if left > 0:
            self._users[address] = left
        else:
            self._users.pop(address, None)
        if len(self._channels) <= MAX_IDLE:
            return
        for idle in [name for name in self._channels if name not in self._users][: len(self._channels) - MAX_IDLE]:
            self._tasks.spawn(self._channels.pop(idle).close(), name="close-channel", essential=False)

    async def close(self) -> None:
        """Close all."""
        channels = list(self._channels.values())
        self._channels.clear()
        for channel in channels:
            await channel.close(None)
