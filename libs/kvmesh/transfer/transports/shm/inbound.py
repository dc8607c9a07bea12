"""The destination's end of a shm link: reads counts, and knows when the writer can no longer write."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

from kvmesh.transfer.transports.base import Arrival, Expected, GrantedPages, Inbound
from kvmesh.transfer.transports.shm.records import KIND_BYTES, KIND_UNMAPPED, RECORD

READ_BYTES = 256 * RECORD.size


class ShmInbound(Inbound):
    """The destination's end: reads counts, and knows when the writer can no longer write."""

    def __init__(self, sock: socket.socket, pidfd: int, expected: Expected) -> None:
        self._sock = sock
        self._pidfd = pidfd
        self._expected = expected
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._arrivals: list[Arrival] = []
        self._gone = asyncio.Event()
        self._open = True

    def begin(self) -> None:
        """Read counts from now on."""
        self._loop.add_reader(self._sock.fileno(), self._readable)
        self._loop.add_reader(self._pidfd, self._exited)

    def begin_without_socket(self, reason: str) -> None:
        """The data connection failed before it began: wait for the writer's end alone."""
        self._open = False
        self._loop.add_reader(self._pidfd, self._exited)
        self._expected.on_end(reason)

    def grant(self, immediate: int, pages: GrantedPages) -> None:
        """The writer stores by itself: there is nothing to check here."""

    def revoke(self, immediate: int) -> None:
        """See `grant`."""

    def poll(self) -> list[Arrival]:
        arrivals, self._arrivals = self._arrivals, []
        return arrivals

    async def fence(self) -> None:
        # The writer sees the end of the stream, stops, unmaps and says so; reading goes on until then.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
        await self._gone.wait()
        self._close_socket("fenced")

    def unmapped(self) -> None:
        self._set_gone()

    def abandon(self) -> None:
        """The memory never left."""
        self._open = False
        self._set_gone()

    def _exited(self) -> None:
        self._readable()
        self._set_gone()
        self._close_socket("the writer's process is gone")

    def _set_gone(self) -> None:
        """No write can land any more."""
        if not self._gone.is_set():
            self._gone.set()
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)

    def _readable(self) -> None:
        if not self._open:
            return
        try:
            data = self._sock.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._close_socket(f"data connection lost: {error.strerror}")
            return
        if not data:
            self._close_socket("the writer closed the data connection")
            return
        self._buffer += data
        whole = len(self._buffer) // RECORD.size * RECORD.size
        for immediate, kind, nbytes in RECORD.iter_unpack(self._buffer[:whole]):
            if kind == KIND_UNMAPPED:
                self._set_gone()
            elif kind == KIND_BYTES:
                self._arrivals.append(Arrival(immediate, nbytes))
            else:
                self._close_socket(f"a record of unknown kind {kind}")
                return
        del self._buffer[:whole]
        if self._arrivals:
            self._expected.on_ready()

    def _close_socket(self, reason: str) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()
            self._expected.on_end(reason)
