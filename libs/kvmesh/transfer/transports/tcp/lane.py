"""One stream of a tcp link at the writer: writes in order (a head, a table of runs, the bytes), acknowledgements."""

from __future__ import annotations

import contextlib
import socket
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvmesh.errors import DataLoss
from kvmesh.transfer.native.moves import Memory, Sending
from kvmesh.transfer.transports.base import Write
from kvmesh.transfer.transports.tcp.wireformat import ACK, CORRUPT, FLAG_CHECKSUM, HEAD, RUN_BYTES, TRAILER

_READ_BYTES = 256 * ACK.size


@dataclass(slots=True, eq=False)
class Whole:
    """A write as it was posted; parts: those that are not over yet."""

    write: Write
    parts: int
    error: str = ""


@dataclass(slots=True, eq=False)
class Part:
    """Runs of a write that go over one stream, and complete together."""

    whole: Whole
    src: Sequence[int]
    dst: Sequence[int]
    length: Sequence[int]
    nbytes: int


@dataclass(slots=True, eq=False)
class Source:
    """A region to send from: where it is mapped, and a view that keeps it so."""

    memory: Memory
    view: memoryview


@dataclass(slots=True, eq=False)
class _Current:
    """The part being sent: what of its head, its bytes and its trailer has not gone."""

    head: memoryview
    body: Sending
    trailer: memoryview = field(default_factory=lambda: memoryview(b""))


class Lane:
    """`receive` and everything else are the mover's; `send` may run on a helper while the mover waits for it."""

    def __init__(self, sock: socket.socket, sources: Sequence[Source], *, checksums: bool) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.waiting: deque[Part] = deque()
        self.begun: dict[int, Part] = {}
        self.backlog = 0
        self.blocked = False
        self._sources = sources
        self._checksums = checksums
        self._current: _Current | None = None
        self._number = 0
        self._acks = bytearray()

    @property
    def pending(self) -> bool:
        """Something is left to be sent."""
        return self._current is not None or bool(self.waiting)

    def add(self, part: Part) -> None:
        """Queue a part."""
        self.waiting.append(part)
        self.backlog += part.nbytes

    def send(self, budget: int) -> None:
        """Send about `budget` bytes or until the socket takes no more (`blocked`). Raises OSError."""
        self.blocked = False
        try:
            while budget > 0 and self.pending:
                budget -= self._send_some(budget)
        except (BlockingIOError, InterruptedError):
            self.blocked = True

    def receive(self) -> list[tuple[Part, str]]:
        """Parts that have been acknowledged, and what was wrong with each. DataLoss, OSError: the link is over."""
        try:
            data = self.sock.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return []
        if not data:
            raise DataLoss("the destination closed the data connection")
        self._acks += data
        whole = len(self._acks) // ACK.size * ACK.size
        over: list[tuple[Part, str]] = []
        for number, nbytes in ACK.iter_unpack(self._acks[:whole]):
            part = self.begun.pop(number, None)
            if part is None:
                raise DataLoss("the destination acknowledged what was not sent")
            self.backlog -= part.nbytes
            if nbytes == part.nbytes:
                over.append((part, ""))
            elif nbytes == CORRUPT:
                over.append((part, f"checksum mismatch: {part.nbytes} bytes arrived changed"))
            else:
                over.append((part, "the destination dropped it: its generation is over there"))
        del self._acks[:whole]
        return over

    def flush(self, immediate: int) -> list[Part]:
        """Take out what has not begun of a generation."""
        out = [part for part in self.waiting if part.whole.write.immediate == immediate]
        if out:
            self.waiting = deque(part for part in self.waiting if part.whole.write.immediate != immediate)
            self.backlog -= sum(part.nbytes for part in out)
        return out

    def give_up(self) -> list[Part]:
        """Everything that is not over; the connection is shut."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        out = [*self.begun.values(), *self.waiting]
        self.begun.clear()
        self.waiting.clear()
        self._current = None
        self.backlog = 0
        return out

    def _begin(self) -> _Current:
        part = self.waiting.popleft()
        self._number += 1
        self.begun[self._number] = part
        write = part.whole.write
        source = self._sources[write.src_region]
        flags = FLAG_CHECKSUM if self._checksums else 0
        head = HEAD.pack(write.immediate, write.dst_region, len(part.length), flags, part.nbytes, self._number)
        table = np.empty((len(part.length), RUN_BYTES // 8), dtype="<u8")
        table[:, 0], table[:, 1] = part.dst, part.length
        current = _Current(
            memoryview(head + table.tobytes()), Sending(source.memory, source.view, part.src, part.length)
        )
        if self._checksums:
            current.trailer = memoryview(TRAILER.pack(checksum(source.view, part.src, part.length)))
        return current

    def _send_some(self, budget: int) -> int:
        if self._current is None:
            self._current = self._begin()
        current = self._current
        if current.head:
            # The bytes follow at once: a packet for the head alone would only wake the receiver early.
            current.head = current.head[self.sock.send(current.head, socket.MSG_NOSIGNAL | socket.MSG_MORE) :]
            return 0
        sent = 0
        if not current.body.done:
            sent = current.body.send(self.sock, budget)
        elif current.trailer:
            current.trailer = current.trailer[self.sock.send(current.trailer, socket.MSG_NOSIGNAL) :]
        if current.body.done and not current.trailer:
            self._current = None
        return sent


def checksum(view: memoryview, offset: Sequence[int], length: Sequence[int]) -> int:
    """crc32 over runs, in their order. Releases the GIL."""
    value = 0
    for at, count in zip(offset, length, strict=True):
        with view[at : at + count] as piece:
            value = zlib.crc32(piece, value)
    return value
