"""The destination's end of a tcp link: a reader thread per stream that lands what has been granted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from kvmesh.errors import DataLoss, FailedPrecondition, InvalidArgument, KvmeshError
from kvmesh.transfer.native.moves import receive
from kvmesh.transfer.transports.base import Arrival, EngineMemory, Expected, GrantedPages, Inbound
from kvmesh.transfer.transports.tcp.landing import Landing
from kvmesh.transfer.transports.tcp.lane import checksum
from kvmesh.transfer.transports.tcp.wireformat import (
    ACK,
    CORRUPT,
    FLAG_CHECKSUM,
    HEAD,
    MAX_RUNS,
    MAX_WRITE_BYTES,
    REFUSED,
    RUN_BYTES,
    TRAILER,
)

log = logging.getLogger(__name__)
JOIN_TIMEOUT_S = 10.0
_SCRATCH_BYTES = 256 << 10


class TcpInbound(Inbound):
    """Streams are added while the writer connects; the first that ends is the end of all."""

    def __init__(self, memory: EngineMemory, expected: Expected) -> None:
        self._expected = expected
        self._loop = asyncio.get_running_loop()
        self._landing = Landing(memory)
        self._streams: list[_Stream] = []
        self._fenced = False
        self._told = False

    def add(self, sock: socket.socket) -> None:
        """Receive from one more stream. Takes the socket over. Raises FailedPrecondition: the link is over."""
        if self._fenced or self._told:
            sock.close()
            raise FailedPrecondition("the link is over")
        stream = _Stream(sock, self._landing, self._expected, self._loop, self._ended)
        self._streams.append(stream)
        stream.thread.start()

    def grant(self, immediate: int, pages: GrantedPages) -> None:
        self._landing.grant(immediate, pages)

    def revoke(self, immediate: int) -> None:
        self._landing.revoke(immediate)

    def poll(self) -> list[Arrival]:
        return self._landing.taken()

    async def fence(self) -> None:
        self._fenced = True
        for stream in self._streams:
            stream.shut()
        for stream in self._streams:
            while stream.thread.is_alive():
                await asyncio.to_thread(stream.thread.join, JOIN_TIMEOUT_S)
            stream.sock.close()
        self._landing.release()

    def abandon(self) -> None:
        """No stream was opened: let go of the memory."""
        if not self._streams:
            self._fenced = True
            self._landing.release()

    def unmapped(self) -> None:
        """Nothing of ours is ever mapped there."""

    def _ended(self, reason: str, corrupt: bool) -> None:
        if self._told:
            return
        self._told = True
        if corrupt and not self._fenced:
            log.warning("tcp: %s is cut off: %s", self._expected.peer, reason)
        self._expected.on_end(reason)


class _Stream:
    """One connection and the thread that reads it."""

    def __init__(
        self,
        sock: socket.socket,
        landing: Landing,
        expected: Expected,
        loop: asyncio.AbstractEventLoop,
        ended: Callable[[str, bool], None],
    ) -> None:
        # Blocking without a timeout: the link's lease bounds the silence, and `shut` wakes the thread.
        sock.settimeout(None)
        self.sock = sock
        self._landing = landing
        self._expected = expected
        self._loop = loop
        self._ended = ended
        self._scratch = memoryview(b"")
        self.thread = threading.Thread(target=self._run, name=f"kvmesh-tcp-{expected.link_id:x}", daemon=True)

    def shut(self) -> None:
        """Make the thread end."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        reason, corrupt = "the writer closed the data connection", False
        try:
            while self._one_write():
                pass
        except OSError as error:
            reason = f"the data connection broke: {error.strerror}"
        except KvmeshError as error:
            reason, corrupt = error.message, True
        except Exception as error:
            log.exception("tcp: a reader failed")
            reason = f"the reader failed: {type(error).__name__}"
        finally:
            self.shut()
            self._on_loop(self._ended, reason, corrupt)

    def _on_loop(self, function: Any, *args: object) -> None:
        # The loop is closed at interpreter exit only.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)

    def _one_write(self) -> bool:
        """False at the end of the stream between two writes."""
        head = self._exactly(HEAD.size, optional=True)
        if not head:
            return False
        immediate, region, runs, flags, nbytes, number = HEAD.unpack(head)
        landing = self._landing
        if not 1 <= runs <= MAX_RUNS or not 1 <= nbytes <= MAX_WRITE_BYTES or region >= len(landing.views):
            raise InvalidArgument(f"a write of {nbytes} bytes in {runs} runs to region {region}")
        if flags & ~FLAG_CHECKSUM:
            raise InvalidArgument(f"a write with unknown flags {flags:#x}")
        table = np.frombuffer(self._exactly(runs * RUN_BYTES), dtype="<u8").reshape(runs, 2)
        offset, length = table[:, 0], table[:, 1]
        if int(length.max()) > MAX_WRITE_BYTES or int(length.astype(np.float64).sum()) != nbytes:
            raise InvalidArgument("the runs of a write do not add up")
        grant = landing.granted(immediate)
        landed: int = nbytes
        if grant is None:
            self._drop(nbytes)
            landed = REFUSED
        else:
            landing.check(grant, region, offset, length)
            where, sizes = offset.tolist(), length.tolist()
            receive(self.sock, landing.targets[region], landing.views[region], where, sizes)
        if flags & FLAG_CHECKSUM:
            (told,) = TRAILER.unpack(self._exactly(TRAILER.size))
            if grant is not None and told != checksum(landing.views[region], where, sizes):
                log.error("tcp: %d bytes by %s arrived changed", nbytes, self._expected.peer)
                landed = CORRUPT
        if landed != CORRUPT:
            # What was dropped is told as nothing: its slot may be bound by the time that this is read.
            landing.landed(immediate, nbytes if grant is not None else 0)
            self._on_loop(self._expected.on_ready)
        self.sock.sendall(ACK.pack(number, landed), socket.MSG_NOSIGNAL)
        return True

    def _drop(self, nbytes: int) -> None:
        if not self._scratch:
            self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        while nbytes:
            received = self.sock.recv_into(self._scratch, min(nbytes, _SCRATCH_BYTES))
            if received == 0:
                raise DataLoss("the data connection ended inside a write")
            nbytes -= received

    def _exactly(self, count: int, *, optional: bool = False) -> bytes:
        data = bytearray(count)
        view = memoryview(data)
        got = 0
        while got < count:
            received = self.sock.recv_into(view[got:])
            if received == 0:
                if optional and got == 0:
                    return b""
                raise DataLoss("the data connection ended inside a write's head")
            got += received
        return bytes(data)
