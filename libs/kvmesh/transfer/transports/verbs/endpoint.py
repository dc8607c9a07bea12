"""What every RDMA transport has in a sidecar: the device, the engine's registrations, and links in and out.

The destination makes its queue pairs when it answers a writer's hello; the writer makes its own, and sends what the
destination must know of them in a data hello over the same control stream; then it is let in.
"""

from __future__ import annotations

import hmac
import logging
import secrets
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from kvmesh.errors import FailedPrecondition, InvalidArgument, KvmeshError, Unauthenticated, Unavailable
from kvmesh.kv.region import MAX_REGION_BYTES, Region
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.transports.base import Ask, Endpoint, EngineMemory, Expected, Outbound, Transport
from kvmesh.transfer.transports.verbs.device import Memory, RdmaDevice
from kvmesh.transfer.transports.verbs.poller import InboundPoller
from kvmesh.transfer.transports.verbs.receiver import RdmaInbound
from kvmesh.transfer.wire import PROTOCOL

log = logging.getLogger(__name__)
DeviceT = TypeVar("DeviceT", bound=RdmaDevice)
InboundT = TypeVar("InboundT", bound=RdmaInbound)


class RdmaTransport(Transport, Generic[DeviceT, InboundT]):
    """spins: whether a thread polls for all links in."""

    def __init__(self, *, spins: bool) -> None:
        self._spins = spins
        self._usable = (False, "not started")
        self._device: DeviceT | None = None
        self._memory: EngineMemory | None = None
        self._registered: list[Memory] = []
        self._doors: dict[int, tuple[bytes, InboundT]] = {}
        self._inbounds: set[InboundT] = set()
        self._poller: InboundPoller | None = None

    # --- what a transport adds -----------------------------------------------------------------------------------

    @abstractmethod
    def _open(self) -> DeviceT:
        """Raises KvmeshError with the reason why not."""

    @abstractmethod
    def _make_inbound(self, device: DeviceT, link: Expected) -> InboundT:
        """A destination's end that waits for its writer. Raises KvmeshError."""

    @abstractmethod
    def _endpoint(self, device: DeviceT, inbound: InboundT, token: bytes) -> Endpoint:
        """What that writer is told."""

    @abstractmethod
    def _accept(self, inbound: InboundT, hello: pb.DataHello) -> Callable[[], None]:
        """Check what a writer says; returns what lets it in. Both raise KvmeshError."""

    @abstractmethod
    def _make_outbound(self, device: DeviceT, reply: pb.PeerHelloReply, hello: pb.DataHello) -> Outbound:
        """A writer's end, from what the destination has told; adds its own side to `hello`. Raises KvmeshError, and
        leaves nothing behind then."""

    # --- the interface -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        try:
            self._device = self._open()
        except KvmeshError as error:
            self._usable = (False, error.message)
            raise
        self._usable = (True, self._description())
        if self._spins:
            self._poller = InboundPoller()
            self._poller.start()

    @property
    def status(self) -> tuple[bool, str]:
        return self._usable

    def register(self, memory: EngineMemory) -> None:
        """The engine is not refused where its memory cannot be pinned: it goes by another transport then."""
        device = self._open_device()
        self._memory = memory
        try:
            for region in memory.regions:
                self._registered.append(device.register(_address(region), region.nbytes))
        except Unavailable as error:
            log.warning("%s: %s", self.name, error.message)
            self._release()
            self._usable = (False, error.message)
            return
        self._usable = (True, self._description())

    def deregister(self) -> None:
        # A writer whose link could not be fenced in time loses its queue pairs now, before the memory goes.
        for inbound in list(self._inbounds):
            self._drop(inbound)
        self._doors.clear()
        self._release()
        self._memory = None

    def expect(self, link: Expected) -> Endpoint:
        device = self._open_device()
        self._check_registered()
        inbound = self._make_inbound(device, link)
        self._inbounds = {item for item in self._inbounds if not item.destroyed} | {inbound}
        token = secrets.token_bytes(32)
        self._doors[link.link_id] = (token, inbound)
        return self._endpoint(device, inbound, token)

    def forget(self, link_id: int) -> None:
        door = self._doors.pop(link_id, None)
        if door is not None:
            self._drop(door[1])

    async def join(self, hello: pb.DataHello) -> pb.DataHelloReply:
        """A writer's data hello, over the control stream of its link."""
        try:
            inbound = self._welcome(hello)
        except KvmeshError as error:
            log.warning("%s: a writer was refused: %s", self.name, error.message)
            return pb.DataHelloReply(ok=False, reason=error.message[:500])
        try:
            let_in = self._accept(inbound, hello)
            await inbound.expected.on_joined(inbound, None)
            let_in()
        except KvmeshError as error:
            log.warning("%s: a writer was refused: %s", self.name, error.message)
            self._drop(inbound)
            inbound.expected.on_end(f"the hello failed: {error.message}")
            return pb.DataHelloReply(ok=False, reason=error.message[:500])
        except BaseException:
            self._drop(inbound)
            raise
        if self._poller is not None:
            self._poller.add(inbound)
        else:
            inbound.begin()
        return pb.DataHelloReply(ok=True)

    async def connect(self, reply: pb.PeerHelloReply, sidecar_id: str, timeout_s: float) -> Outbound:
        raise FailedPrecondition(f"{self.name} is connected over the control stream")

    async def connect_over(self, ask: Ask, reply: pb.PeerHelloReply, sidecar_id: str, timeout_s: float) -> Outbound:
        device = self._open_device()
        self._check_registered()
        hello = pb.DataHello(protocol=PROTOCOL, token=reply.token, link_id=reply.link_id, sidecar_id=sidecar_id)
        outbound = self._make_outbound(device, reply, hello)
        try:
            answer = await ask(hello)
            if not answer.ok:
                raise Unavailable(f"refused by the destination: {answer.reason[:500]}")
            return outbound
        except BaseException:
            outbound.close()
            raise

    async def close(self) -> None:
        self._usable = (False, "closed")
        if self._poller is not None:
            self._poller.stop()
            self._poller = None
        for inbound in list(self._inbounds):
            self._drop(inbound)
        self._doors.clear()
        self._release()
        if self._device is not None:
            self._device.close()
            self._device = None

    # --- within --------------------------------------------------------------------------------------------------

    def _description(self) -> str:
        device = self._open_device()
        waits = "a polling thread" if self._spins else "completion channels"
        return f"{device.name} port {device.port.number} gid {device.port.gid_index}, {waits}"

    def _open_device(self) -> DeviceT:
        if self._device is None:
            raise Unavailable(f"{self.name} cannot be used: {self._usable[1]}")
        return self._device

    def _check_registered(self) -> None:
        if self._memory is None or not self._registered:
            raise FailedPrecondition(f"no engine's memory is registered for {self.name}")

    def _release(self) -> None:
        if self._device is not None:
            for memory in self._registered:
                self._device.release(memory)
        self._registered = []

    def _drop(self, inbound: InboundT) -> None:
        inbound.destroy()
        self._inbounds.discard(inbound)

    def _welcome(self, hello: pb.DataHello) -> InboundT:
        if hello.protocol != PROTOCOL:
            raise FailedPrecondition(f"data protocol {hello.protocol} is not spoken here (this is {PROTOCOL})")
        token, inbound = self._doors.get(hello.link_id, (b"", None))
        if inbound is None or not hmac.compare_digest(token, hello.token):
            raise Unauthenticated("no such link, or a wrong token")
        del self._doors[hello.link_id]
        return inbound


def _address(region: Region) -> int:
    return int(region.view().__array_interface__["data"][0])


def check_remote(memory: pb.RemoteMemory) -> None:
    """Raises InvalidArgument."""
    if memory.nbytes > MAX_REGION_BYTES or memory.address + memory.nbytes > 1 << 64:
        raise InvalidArgument("memory beyond the address space")


def remote_regions(keys: Sequence[pb.RemoteMemory], reply: pb.PeerHelloReply) -> list[Memory]:
    """Where the destination of a reply lets us write, by region. Raises InvalidArgument."""
    if len(keys) != len(reply.regions):
        raise InvalidArgument(f"{len(keys)} keys for {len(reply.regions)} regions")
    for memory, info in zip(keys, reply.regions, strict=True):
        check_remote(memory)
        if memory.nbytes < info.nbytes:
            raise InvalidArgument(f"region {info.group!r} is registered with {memory.nbytes} of {info.nbytes} bytes")
    # Writes are bounded by what was announced, should more be registered.
    return [
        Memory(memory.address, info.nbytes, 0, memory.rkey) for memory, info in zip(keys, reply.regions, strict=True)
    ]
