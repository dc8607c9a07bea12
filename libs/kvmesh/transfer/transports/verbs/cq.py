"""A completion queue with its channel. One per link and end."""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import Any

from kvmesh.errors import Unavailable
from kvmesh.transfer.transports.verbs.device import RdmaDevice
from kvmesh.transfer.transports.verbs.native.rings import NativeQueue


class CompletionQueue:
    """It holds everything that its queue pairs may ever have outstanding."""

    def __init__(self, device: RdmaDevice, entries: int) -> None:
        self._api = device.api
        self._closed = False
        try:
            self._channel, self.fd = self._api.make_channel(device.context)
        except self._api.error as error:
            raise Unavailable(f"no completion channel: {error}") from None
        try:
            self._cq = self._api.CQ(device.context, entries, None, self._channel, 0)
        except self._api.error as error:
            self._channel.close()
            raise Unavailable(f"no completion queue of {entries} entries: {error}") from None
        self.native = NativeQueue.of(self._api.native, self._cq, self.fd, self._api.error)
        self._poll: Callable[[int], tuple[int, list[Any]]] = self.native.poll if self.native else self._cq.poll
        self._ready = select.poll()
        self._ready.register(self.fd, select.POLLIN)
        self._cq.req_notify()

    @property
    def raw(self) -> Any:
        """For making queue pairs."""
        return self._cq

    def take(self, limit: int = 64) -> list[Any]:
        """Up to `limit` completions with pyverbs' fields; never blocks. `fd` becomes readable when more come after an
        empty answer."""
        count, found = self._poll(limit)
        if not count and self._rearm():
            # What came before the arming makes no event.
            count, found = self._poll(limit)
        return found

    def wait(self, seconds: float) -> None:
        """Sleep until there may be completions; only where `take` has just returned none."""
        self._ready.poll(max(0, int(seconds * 1000)))

    def close(self) -> None:
        """After its queue pairs. Idempotent."""
        if not self._closed:
            self._closed = True
            self._poll = _none
            self._cq.close()
            self._channel.close()

    def _rearm(self) -> bool:
        if not self._ready.poll(0):
            return False
        # It holds the GIL, but there is an event.
        self._channel.get_cq_event(self._cq)
        self._cq.ack_events(1)
        self._cq.req_notify()
        return True


def _none(limit: int) -> tuple[int, list[Any]]:
    """Of a queue that is closed."""
    return 0, []
