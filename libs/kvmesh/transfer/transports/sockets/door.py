"""The destination's door for writers that come over a socket: one framed hello with the link's token, then the data.

What is wrong with a hello costs that connection alone. Hellos under way are bounded in number, size and time.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
from abc import abstractmethod

from google.protobuf.message import DecodeError

from kvmesh.errors import FailedPrecondition, InvalidArgument, KvmeshError, Unauthenticated, Unavailable
from kvmesh.kv.fds import close_fds
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.rpc import BackgroundTasks
from kvmesh.transfer.native import moves
from kvmesh.transfer.transports.base import Endpoint, EngineMemory, Expected, Transport
from kvmesh.transfer.transports.sockets.listener import Listener
from kvmesh.transfer.wire import MAX_HELLO_BYTES, PROTOCOL, FrameSocket, exchange

log = logging.getLogger(__name__)
HELLO_TIMEOUT_S = 5.0
MAX_PENDING_HELLOS = 64


class SocketTransport(Transport):
    """Listens on one socket. Left to do: how to listen, how to welcome a writer, how to become one.

    hello_fds: descriptors that come along with a hello.
    """

    hello_fds = 0

    def __init__(self) -> None:
        self._usable = (False, "not started")
        self.memory: EngineMemory | None = None
        self._tasks = BackgroundTasks()
        self._address = ""
        self._listener: Listener | None = None
        self._doors: dict[int, tuple[bytes, Expected]] = {}
        self._pending = 0

    @abstractmethod
    def listen(self) -> tuple[socket.socket, str, str]:
        """(server socket, address for writers, what to say about it). Raises OSError, KvmeshError."""

    @abstractmethod
    async def welcome(
        self, frames: FrameSocket, hello: pb.DataHello, fds: list[int], expected: Expected, memory: EngineMemory
    ) -> None:
        """Admit the writer whose hello and token are right: answer it, detach the socket, begin. What stays in `fds` is
        closed. Raises KvmeshError, which the writer is told."""

    async def start(self) -> None:
        # Compiled here, where nobody waits for the loop yet.
        await asyncio.to_thread(moves.library)
        try:
            server, self._address, why = self.listen()
        except (OSError, KvmeshError) as error:
            text = error.strerror or str(error) if isinstance(error, OSError) else error.message
            self._usable = (False, f"cannot listen: {text}")
            raise Unavailable(f"{self.name} {self._usable[1]}") from None
        self._listener = Listener(server, self._came)
        self._usable = (True, why)

    @property
    def status(self) -> tuple[bool, str]:
        return self._usable

    def register(self, memory: EngineMemory) -> None:
        self.memory = memory

    def deregister(self) -> None:
        self.memory = None
        self._doors.clear()

    def expect(self, link: Expected) -> Endpoint:
        token = secrets.token_bytes(32)
        self._doors[link.link_id] = (token, link)
        return Endpoint(self._address, token)

    def forget(self, link_id: int) -> None:
        self._doors.pop(link_id, None)

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._usable = (False, "closed")
        await self._tasks.close()

    async def greet(
        self, sock: socket.socket, hello: pb.DataHello, fds: list[int], max_fds: int, timeout_s: float
    ) -> tuple[pb.DataHelloReply, list[int]]:
        """Writer: say hello, return the answer and the descriptors that came with it. The socket is closed where this
        raises (KvmeshError: also for a refusal)."""
        hello.protocol = PROTOCOL
        body, received = await exchange(sock, hello, fds, max_fds=max_fds, timeout_s=timeout_s)
        try:
            answer = pb.DataHelloReply.FromString(body)
            if not answer.ok:
                raise Unavailable(f"refused by the destination: {answer.reason}")
        except BaseException as error:
            close_fds(received)
            sock.close()
            if isinstance(error, DecodeError):
                raise InvalidArgument("the answer to the hello is none") from None
            raise
        return answer, received

    def _came(self, sock: socket.socket) -> None:
        if self._pending >= MAX_PENDING_HELLOS:
            sock.close()
            return
        self._pending += 1
        self._tasks.spawn(self._admit(sock), name=f"{self.name}-admit", essential=False)

    async def _admit(self, sock: socket.socket) -> None:
        hello: asyncio.Future[tuple[pb.DataHello, list[int]]] = asyncio.get_running_loop().create_future()

        def on_frame(body: bytes) -> None:
            message = pb.DataHello.FromString(body)
            if hello.done():
                raise InvalidArgument("more than a hello before its answer")
            hello.set_result((message, frames.take_fds(self.hello_fds)))

        def on_closed(error: KvmeshError | None) -> None:
            if not hello.done():
                hello.set_exception(error or Unavailable("closed before its hello"))

        frames = FrameSocket(
            sock, on_frame=on_frame, on_closed=on_closed, max_frame=MAX_HELLO_BYTES, max_fds=self.hello_fds
        )
        fds: list[int] = []
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                message, fds = await hello
                memory, expected = self._known(message)
                await self.welcome(frames, message, fds, expected, memory)
        except (KvmeshError, TimeoutError) as error:
            text = error.message if isinstance(error, KvmeshError) else f"no hello within {HELLO_TIMEOUT_S:g} s"
            log.warning("%s: a writer was refused: %s", self.name, text)
            frames.send(pb.DataHelloReply(ok=False, reason=text))
        finally:
            self._pending -= 1
            close_fds(fds)
            frames.close()

    def _known(self, hello: pb.DataHello) -> tuple[EngineMemory, Expected]:
        if hello.protocol != PROTOCOL:
            raise FailedPrecondition(f"data protocol {hello.protocol} is not spoken here (this is {PROTOCOL})")
        token, expected = self._doors.get(hello.link_id, (b"", None))
        if expected is None or not hmac.compare_digest(token, hello.token):
            raise Unauthenticated("no such link, or a wrong token")
        if self.memory is None:
            raise FailedPrecondition("no engine is registered")
        return self.memory, expected
