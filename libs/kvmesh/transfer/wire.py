"""Frames of protobuf with descriptors over a socket, on an asyncio loop: u32 little-endian length, then the message.

Everything is bounded: the length of a frame, the descriptors that may wait for their message, and the bytes that wait
for a peer which does not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence

from google.protobuf.message import DecodeError, Message

from kvmesh.errors import DataLoss, DeadlineExceeded, InvalidArgument, KvmeshError, TooLarge, Unavailable
from kvmesh.kv.fds import close_fds, recv_with_fds

PROTOCOL = 1
MAX_FRAME_BYTES = 4 << 20
MAX_HELLO_BYTES = 1 << 20
MAX_BACKLOG_BYTES = 64 << 20
LINGER_S = 1.0
# Of a peer that closed its reading side: more than any socket's buffer holds.
MAX_LAST_READS = 64
_LENGTH = struct.Struct("<I")
# More would be fetched from the system and given back at every read.
_READ_BYTES = 64 << 10


def pack_frame(message: Message) -> bytes:
    """The message with its length. Raises TooLarge."""
    body: bytes = message.SerializeToString()
    if len(body) > MAX_FRAME_BYTES:
        raise TooLarge(f"a frame of {len(body)} bytes, at most {MAX_FRAME_BYTES} are allowed")
    return _LENGTH.pack(len(body)) + body


class FrameSocket:
    """A connected, non-blocking stream socket that speaks frames. Lives on the loop it was made on.

    on_frame(body) is called for each frame; what it raises ends the connection. on_closed(error) is called once, when
    the peer is gone (None: it closed the connection) or what it sent cannot be served, but not after `close()`. In the
    latter case nothing more is read, and a last message can still be sent until the owner closes, or LINGER_S later.
    Descriptors that came along are taken with `take_fds` while handling the frame they belong to.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        on_frame: Callable[[bytes], None],
        on_closed: Callable[[KvmeshError | None], None],
        max_frame: int = MAX_FRAME_BYTES,
        max_fds: int = 0,
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._max_frame = max_frame
        self._max_fds = max_fds
        self._unix = sock.family == socket.AF_UNIX
        self._in = bytearray()
        self._fds: deque[int] = deque()
        self._out: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._backlog = 0
        self._flushed = asyncio.Event()
        self._flushed.set()
        self._paused = False
        self._ended = False
        self._refusing = False
        self._loop.add_reader(sock.fileno(), self._readable)

    @property
    def closed(self) -> bool:
        return self._ended

    @property
    def raw(self) -> socket.socket:
        """The socket itself, for who takes it over after `detach`."""
        return self._sock

    @property
    def backlog(self) -> int:
        """Bytes that wait for the peer to read."""
        return self._backlog

    def restrict(self, max_fds: int, max_frame: int = MAX_FRAME_BYTES) -> None:
        """Change the bounds, for what comes after a hello."""
        self._max_fds = max_fds
        self._max_frame = max_frame

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send at once as far as the socket takes it, queue the rest. Descriptors stay the caller's. Does nothing on a
        closed connection. A peer that lets more than MAX_BACKLOG_BYTES wait is cut off."""
        if self._ended:
            return
        data = pack_frame(message)
        kept = tuple(os.dup(fd) for fd in fds)
        self._out.append((memoryview(data), kept))
        self._backlog += len(data)
        if len(self._out) == 1:
            self._writable()
        if self._backlog > MAX_BACKLOG_BYTES:
            self._end(TooLarge("the peer does not read its messages"))

    async def flush(self, timeout_s: float) -> None:
        """Wait until everything is in the kernel's hands. Raises DeadlineExceeded, Unavailable (closed meanwhile)."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._flushed.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"the peer did not read for {timeout_s:g} s") from None
        if self._backlog:
            raise Unavailable("the connection was closed")

    def take_fds(self, count: int) -> list[int]:
        """The next `count` descriptors, now the caller's. Raises InvalidArgument where fewer have come."""
        if len(self._fds) < count:
            raise InvalidArgument(f"{count} descriptors belong to this message, {len(self._fds)} came along")
        return [self._fds.popleft() for _ in range(count)]

    def detach(self) -> socket.socket:
        """Give the socket away (non-blocking); this object is then closed. DataLoss where bytes were left over."""
        leftover = bool(self._in)
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._release()
        if leftover:
            self._sock.close()
            raise DataLoss("the peer sent more than its hello")
        return self._sock

    def close(self) -> None:
        """Close without calling `on_closed`. Idempotent."""
        if self._ended:
            return
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._release()
        self._sock.close()

    def _release(self) -> None:
        self._ended = True
        close_fds(self._fds)
        self._fds.clear()
        for _, fds in self._out:
            close_fds(fds)
        self._out.clear()
        self._flushed.set()

    def _end(self, error: KvmeshError | None, *, linger: bool = False) -> None:
        if self._ended or self._refusing:
            return
        if linger:
            self._refusing = True
            self._loop.remove_reader(self._sock.fileno())
            self._loop.call_later(LINGER_S, self.close)
        else:
            self.close()
        self._on_closed(error)

    def _lost(self, error: KvmeshError) -> None:
        """Writing failed. What the peer said before its end still counts: a word that it gave memory away above all."""
        for _ in range(MAX_LAST_READS):
            if self._ended or self._refusing or not self._readable():
                break
        self._end(error)

    def _readable(self) -> bool:
        """Read once; True where bytes came."""
        try:
            if self._unix:
                data, fds = recv_with_fds(self._sock, _READ_BYTES, self._max_fds)
                self._fds.extend(fds)
            else:
                data = self._sock.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        except KvmeshError as error:
            self._end(error, linger=True)
            return False
        except OSError as error:
            self._end(Unavailable(f"connection lost: {error.strerror}"))
            return False
        if not data:
            self._end(DataLoss("the peer closed the connection inside a frame") if self._in else None)
            return False
        try:
            self._in += data
            self._parse()
            if len(self._fds) > self._max_fds:
                raise TooLarge(f"{len(self._fds)} descriptors came that belong to no message")
        except DecodeError:
            self._end(InvalidArgument("a frame does not hold the message that is spoken here"), linger=True)
        except KvmeshError as error:
            self._end(error, linger=True)
        return True

    def _parse(self) -> None:
        at = 0
        try:
            while not (self._ended or self._refusing) and len(self._in) - at >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._in, at)
                if length > self._max_frame:
                    raise TooLarge(f"a frame of {length} bytes, at most {self._max_frame} are allowed here")
                if len(self._in) - at - _LENGTH.size < length:
                    break
                body = bytes(self._in[at + _LENGTH.size : at + _LENGTH.size + length])
                at += _LENGTH.size + length
                self._on_frame(body)
        finally:
            del self._in[:at]

    def _writable(self) -> None:
        try:
            while self._out:
                data, fds = self._out[0]
                ancillary = []
                if fds:
                    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))]
                sent = self._sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
                # Descriptors leave with the first byte.
                close_fds(fds)
                self._backlog -= sent
                if sent < len(data):
                    self._out[0] = (data[sent:], ())
                else:
                    self._out.popleft()
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            # Not from inside the caller's send(): it would see its own state change under its feet.
            self._loop.call_soon(self._lost, Unavailable(f"connection lost: {error.strerror}"))
            self._loop.remove_writer(self._sock.fileno())
            self._paused = False
            return
        if self._out:
            self._flushed.clear()
            if not self._paused:
                self._loop.add_writer(self._sock.fileno(), self._writable)
        else:
            self._flushed.set()
            if self._paused:
                self._loop.remove_writer(self._sock.fileno())
        self._paused = bool(self._out)


async def open_unix(path: str | os.PathLike[str], timeout_s: float) -> socket.socket:
    """A connected non-blocking Unix socket. Raises Unavailable (nobody listens), DeadlineExceeded."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    sock.setblocking(False)
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.get_running_loop().sock_connect(sock, os.fspath(path))
    except TimeoutError:
        sock.close()
        raise DeadlineExceeded(f"no connection to {os.fspath(path)} within {timeout_s:g} s") from None
    except OSError as error:
        sock.close()
        raise Unavailable(f"cannot connect to {os.fspath(path)}: {error.strerror}") from error
    except BaseException:
        sock.close()
        raise
    return sock


async def exchange(
    sock: socket.socket, hello: Message, fds: Sequence[int], *, max_fds: int, timeout_s: float
) -> tuple[bytes, list[int]]:
    """Send a hello and wait for the one frame that answers it: (body, descriptors, now the caller's).

    The socket stays open and non-blocking on success and is closed otherwise. Raises DeadlineExceeded, Unavailable, or
    what is wrong with the answer.
    """
    answer: asyncio.Future[tuple[bytes, list[int]]] = asyncio.get_running_loop().create_future()

    def on_frame(body: bytes) -> None:
        if not answer.done():
            answer.set_result((body, frames.take_fds(len(frames._fds))))

    def on_closed(error: KvmeshError | None) -> None:
        if not answer.done():
            answer.set_exception(error or Unavailable("the peer closed the connection"))

    frames = FrameSocket(sock, on_frame=on_frame, on_closed=on_closed, max_frame=MAX_HELLO_BYTES, max_fds=max_fds)
    try:
        frames.send(hello, fds)
        async with asyncio.timeout(timeout_s):
            body, received = await answer
    except TimeoutError:
        frames.close()
        raise DeadlineExceeded(f"no answer to the hello within {timeout_s:g} s") from None
    except BaseException:
        frames.close()
        if answer.done() and not answer.cancelled():
            with contextlib.suppress(KvmeshError):
                close_fds(answer.result()[1])
        raise
    try:
        frames.detach()
    except DataLoss:
        close_fds(received)
        raise
    return body, received
