"""Links over TCP: one port, and for each link one stream or several that share its token."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import dataclass, field

from kvmesh.config import split_host_port
from kvmesh.errors import FailedPrecondition, InvalidArgument, Unavailable
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.transports.base import EngineMemory, Expected, Outbound
from kvmesh.transfer.transports.sockets.door import HELLO_TIMEOUT_S, SocketTransport
from kvmesh.transfer.transports.sockets.helpers import Helpers
from kvmesh.transfer.transports.tcp.inbound import TcpInbound
from kvmesh.transfer.transports.tcp.outbound import TcpOutbound
from kvmesh.transfer.transports.tcp.wireformat import MAX_STREAMS
from kvmesh.transfer.wire import FrameSocket


def default_streams() -> int:
    """One for two cores, from two to eight: two also where cores are few, since one stream waits for a core at each end
    in turn where others use them too."""
    return max(2, min(8, len(os.sched_getaffinity(0)) // 2))


@dataclass(slots=True, eq=False)
class _Joining:
    """A link some of whose streams are open. left: numbers of those that are not."""

    inbound: TcpInbound
    left: set[int] = field(default_factory=set)


class TcpTransport(SocketTransport):
    """Listens on one TCP port for writers anywhere.

    streams: a link, as far as both ends agree (the lesser number counts), 0 = by cores. checksums: every write carries
    one where either end wants it. threads: that send, 0 = by cores.
    """

    name = "tcp"

    def __init__(
        self, host: str, advertise: str = "", *, streams: int = 0, checksums: bool = False, threads: int = 0
    ) -> None:
        super().__init__()
        self._host = host
        self._advertise = advertise
        self._streams = min(MAX_STREAMS, streams or default_streams())
        self._checksums = checksums
        self._joining: dict[int, _Joining] = {}
        self.helpers = Helpers(threads)

    def listen(self) -> tuple[socket.socket, str, str]:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        server = socket.create_server((self._host, 0), family=family, backlog=64)
        port = server.getsockname()[1]
        host = self._advertise or (socket.gethostname() if self._host in ("0.0.0.0", "::") else self._host)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return server, address, f"listening on {address}"

    def offer(self) -> pb.TransportOffer:
        return pb.TransportOffer(name=self.name)

    def judge(self, offer: pb.TransportOffer) -> tuple[bool, str]:
        return True, "reaches any host"

    def deregister(self) -> None:
        super().deregister()
        self._joining.clear()

    def forget(self, link_id: int) -> None:
        super().forget(link_id)
        self._joining.pop(link_id, None)

    async def connect(self, reply: pb.PeerHelloReply, sidecar_id: str, timeout_s: float) -> Outbound:
        if self.memory is None:
            raise FailedPrecondition("no engine is registered")
        source = self.memory.regions
        host, port = split_host_port(reply.endpoint)
        socks: list[socket.socket] = []

        async def one(stream: int) -> pb.DataHelloReply:
            sock = await _open_tcp(host.strip("[]"), port, timeout_s)
            hello = pb.DataHello(token=reply.token, link_id=reply.link_id, sidecar_id=sidecar_id)
            hello.stream, hello.streams = stream, self._streams
            answer, _ = await self.greet(sock, hello, [], 0, timeout_s)
            socks.append(sock)
            return answer

        try:
            async with asyncio.timeout(2 * timeout_s):
                first = await one(0)
                streams = max(1, first.streams)
                if streams > self._streams:
                    raise InvalidArgument(f"the destination wants {streams} streams, offered were {self._streams}")
                for stream in range(1, streams):
                    await one(stream)
        except BaseException as error:
            for sock in socks:
                sock.close()
            if isinstance(error, TimeoutError):
                raise Unavailable(f"the streams to {reply.endpoint} were not open in time") from None
            raise
        checksums = self._checksums or first.checksums
        return TcpOutbound(socks, source, checksums=checksums, helpers=self.helpers)

    async def close(self) -> None:
        await super().close()
        self.helpers.close()

    async def welcome(
        self, frames: FrameSocket, hello: pb.DataHello, fds: list[int], expected: Expected, memory: EngineMemory
    ) -> None:
        reply = pb.DataHelloReply(ok=True)
        joining = self._joining.get(hello.link_id)
        if joining is None:
            if hello.stream:
                raise FailedPrecondition("the first stream of a link comes first")
            reply.streams = max(1, min(self._streams, hello.streams))
            reply.checksums = self._checksums
            reply.regions.extend(memory.infos)
            joining = _Joining(TcpInbound(memory, expected), set(range(reply.streams)))
            self._joining[hello.link_id] = joining
        if hello.stream not in joining.left:
            raise FailedPrecondition(f"stream {hello.stream} of this link is open already, or was not asked for")
        joining.left.discard(hello.stream)
        try:
            if not hello.stream:
                await expected.on_joined(joining.inbound, None)
            frames.send(reply)
            await frames.flush(HELLO_TIMEOUT_S)
            sock = frames.detach()
            _tune(sock)
            joining.inbound.add(sock)
        except BaseException as error:
            self.forget(hello.link_id)
            if not hello.stream:
                joining.inbound.abandon()
            expected.on_end(f"the hello failed: {error}")
            raise
        if not joining.left:
            self.forget(hello.link_id)


def _tune(sock: socket.socket) -> None:
    """Buffers are left to the kernel: it grows them as they are needed, further than a size may be set; and larger ones
    than needed cost a fifth of the CPU time on loopback (the bytes fall out of the caches on their way)."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


async def _open_tcp(host: str, port: int, timeout_s: float) -> socket.socket:
    """A connected, tuned, non-blocking socket. Raises Unavailable."""
    loop = asyncio.get_running_loop()
    reason = "no address"
    try:
        async with asyncio.timeout(timeout_s):
            for family, kind, proto, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                sock = socket.socket(family, kind | socket.SOCK_CLOEXEC, proto)
                try:
                    sock.setblocking(False)
                    _tune(sock)
                    await loop.sock_connect(sock, address)
                except OSError as error:
                    sock.close()
                    reason = error.strerror or str(error)
                except BaseException:
                    sock.close()
                    raise
                else:
                    return sock
    except TimeoutError:
        reason = f"no connection within {timeout_s:g} s"
    except OSError as error:
        reason = error.strerror or str(error)
    raise Unavailable(f"cannot connect to {host}:{port}: {reason}")
