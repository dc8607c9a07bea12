"""What the destination's end of every RDMA link has: its completion queue, its life, and who is told of what."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from abc import abstractmethod
from collections.abc import Callable

from kvmesh.errors import KvmeshError
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.transports.base import Arrival, Expected, GrantedPages, Inbound
from kvmesh.transfer.transports.verbs.cq import CompletionQueue
from kvmesh.transfer.transports.verbs.device import RdmaDevice

POLL_BATCH = 64


class RdmaInbound(Inbound):
    """Methods of the interface are the loop's; `progress` may be another thread's.

    A subclass makes its queue pairs in its constructor, and calls `destroy` where that fails.
    """

    def __init__(self, device: RdmaDevice, expected: Expected) -> None:
        self.expected = expected
        self.queue: CompletionQueue | None = None
        self._device = device
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._arrivals: list[Arrival] = []
        self._ended = ""
        self._open = True
        self._reading = False
        self._ready_told = False
        # The pair of NICs, for status.
        self.pair_of_nics: pb.NicStatus | None = None

    def nics(self) -> list[pb.NicStatus]:
        return [self.pair_of_nics] if self.pair_of_nics is not None else []

    def begin(self) -> None:
        """Take completions by the loop, whenever the channel has an event."""
        assert self.queue is not None
        self._reading = True
        self._loop.add_reader(self.queue.fd, self._readable)
        # What came before the reader.
        self._readable()

    @abstractmethod
    def _take(self) -> bool:
        """Take completions, adding to `_arrivals`; True where there were any. Raises KvmeshError or
        pyverbs' own error where the link is over. The lock is held."""

    @abstractmethod
    def _free(self) -> None:
        """Destroy the queue pairs first, then what they could reach. The lock is held."""

    # --- the interface -------------------------------------------------------------------------------------------

    def grant(self, immediate: int, pages: GrantedPages) -> None:
        """The writer's device stores by itself: what it may reach is what is registered."""

    def revoke(self, immediate: int) -> None:
        """See `grant`."""

    def poll(self) -> list[Arrival]:
        # No need to be told of what is taken here.
        self._ready_told = True
        self.progress()
        with self._lock:
            self._ready_told = False
            arrivals, self._arrivals = self._arrivals, []
        return arrivals

    def unmapped(self) -> None:
        """Nothing of ours is ever mapped there."""

    # --- work ----------------------------------------------------------------------------------------------------

    def progress(self) -> bool:
        """Take what has completed. True where there was something. On any thread."""
        told = ""
        with self._lock:
            if not self._open or self._ended:
                return False
            try:
                found = self._take()
            except (KvmeshError, self._device.api.error) as error:
                told = self._ended = str(error)
                found = True
            tell_ready = bool(self._arrivals) and not self._ready_told
            self._ready_told |= tell_ready
        if tell_ready:
            self._on_loop(self.expected.on_ready)
        if told:
            self._on_loop(self._broke)
        return found

    @property
    def destroyed(self) -> bool:
        """Nothing of it is left at the device."""
        return not self._open

    @property
    def usable(self) -> bool:
        """Not yet broken, fenced or destroyed."""
        return self._open and not self._ended

    def destroy(self) -> None:
        """When it returns, nothing lands through this link any more. Idempotent."""
        self._stop_reading()
        with self._lock:
            if self._open:
                self._free()
                self._open = False

    def _readable(self) -> None:
        self.progress()

    def _broke(self) -> None:
        self._stop_reading()
        self.expected.on_end(self._ended)

    def _stop_reading(self) -> None:
        if self._reading and self.queue is not None:
            self._reading = False
            self._loop.remove_reader(self.queue.fd)

    def _on_loop(self, call: Callable[[], None]) -> None:
        # The loop is closed at interpreter exit only.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)
