"""Links over shared memory: memfds travel through a Unix socket, and who may write is known to the engine first."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from kvmesh.errors import FailedPrecondition, InvalidArgument
from kvmesh.kv.fds import MAX_FDS, close_fds
from kvmesh.kv.pidfd import check_pidfd, is_alive, open_pidfd
from kvmesh.kv.region import Region
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.transports.base import EngineMemory, Expected, Outbound
from kvmesh.transfer.transports.shm.inbound import ShmInbound
from kvmesh.transfer.transports.shm.mapping import host_id, prefault
from kvmesh.transfer.transports.shm.outbound import ShmOutbound
from kvmesh.transfer.transports.sockets.door import HELLO_TIMEOUT_S, SocketTransport
from kvmesh.transfer.transports.sockets.helpers import Helpers
from kvmesh.transfer.transports.sockets.listener import listen_unix
from kvmesh.transfer.wire import FrameSocket, open_unix


class ShmTransport(SocketTransport):
    """Listens on one Unix socket for writers on this host. threads: that copy, 0 = by the machine's size."""

    name = "shm"
    hello_fds = 1

    def __init__(self, socket_path: Path, threads: int = 0) -> None:
        super().__init__()
        self._path = socket_path
        self._host_id = ""
        self.helpers = Helpers(threads)

    def listen(self) -> tuple[socket.socket, str, str]:
        self._host_id = host_id()
        return listen_unix(self._path), str(self._path), f"memfd over {self._path}"

    def offer(self) -> pb.TransportOffer:
        return pb.TransportOffer(name=self.name, host_id=self._host_id)

    def judge(self, offer: pb.TransportOffer) -> tuple[bool, str]:
        if not offer.host_id or offer.host_id != self._host_id:
            return False, "another host"
        return True, "same host (boot id)"

    def fits(self, memory: EngineMemory) -> tuple[bool, str]:
        if len(memory.regions) > MAX_FDS:
            return False, f"passes at most {MAX_FDS} regions, the engine has {len(memory.regions)}"
        return super().fits(memory)

    async def connect(self, reply: pb.PeerHelloReply, sidecar_id: str, timeout_s: float) -> Outbound:
        if self.memory is None:
            raise FailedPrecondition("no engine is registered")
        source = self.memory.regions
        sock = await open_unix(reply.endpoint, timeout_s)
        hello = pb.DataHello(token=reply.token, link_id=reply.link_id, sidecar_id=sidecar_id)
        pidfd = open_pidfd()
        try:
            answer, fds = await self.greet(sock, hello, [pidfd], len(reply.regions), timeout_s)
        finally:
            os.close(pidfd)
        regions: list[Region] = []
        try:
            if len(fds) != len(reply.regions) or [r.key for r in answer.regions] != [r.key for r in reply.regions]:
                raise InvalidArgument("the destination sent other regions than it announced")
            for info in reply.regions:
                regions.append(Region.adopt(fds.pop(0), info.nbytes, f"peer-{info.group}"))
            await asyncio.to_thread(prefault, regions, write=True)
            return self.outbound(sock, source, regions)
        except BaseException:
            close_fds(fds)
            for region in regions:
                region.close()
            sock.close()
            raise

    def outbound(self, sock: socket.socket, source: Sequence[Region], target: Sequence[Region]) -> Outbound:
        """The link's writing end (the fake transport has another)."""
        return ShmOutbound(sock, source, target, self.helpers)

    def inbound(self, sock: socket.socket, pidfd: int, expected: Expected) -> ShmInbound:
        """The link's receiving end (nvlink has another)."""
        return ShmInbound(sock, pidfd, expected)

    def passed(self, inbound: ShmInbound, memory: EngineMemory) -> tuple[pb.DataHelloReply, list[int]]:
        """The answer that lets a writer in, and the descriptors that go with it."""
        return pb.DataHelloReply(ok=True, regions=memory.infos), [region.fd for region in memory.regions]

    async def close(self) -> None:
        if self.status[0]:
            self._path.unlink(missing_ok=True)
        await super().close()
        self.helpers.close()

    async def welcome(
        self, frames: FrameSocket, hello: pb.DataHello, fds: list[int], expected: Expected, memory: EngineMemory
    ) -> None:
        check_pidfd(fds[0])
        if not is_alive(fds[0]):
            raise InvalidArgument("the writer's process is gone already")
        self.forget(hello.link_id)
        # Its own once there is somebody to close it.
        inbound = self.inbound(frames.raw, fds[0], expected)
        pidfd = fds.pop()
        try:
            await expected.on_joined(inbound, os.dup(pidfd))
        except BaseException:
            inbound.abandon()
            raise
        try:
            frames.send(*self.passed(inbound, memory))
            await frames.flush(HELLO_TIMEOUT_S)
            frames.detach()
        except BaseException as error:
            # The memory may have left: only the writer's word or its exit ends this.
            inbound.begin_without_socket(f"the hello failed: {error}")
            raise
        inbound.begin()
