"""`verbs` in a sidecar: the device, the engine's registrations, and links in and out.

The destination makes its queue pairs when it answers a writer's hello; the writer makes its own, connects them, and
sends their numbers in a data hello over the same control stream; the destination connects and lets it in.
"""

from __future__ import annotations

import hmac
import logging
import secrets
from collections.abc import Sequence

from kvmesh.errors import FailedPrecondition, InvalidArgument, KvmeshError, Unauthenticated, Unavailable
from kvmesh.kv.region import MAX_REGION_BYTES, Region
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.transports.base import Ask, Endpoint, EngineMemory, Expected, Outbound, Transport
from kvmesh.transfer.transports.verbs.credits import CREDIT_WORDS
from kvmesh.transfer.transports.verbs.device import GID_BYTES, Device, Memory
from kvmesh.transfer.transports.verbs.inbound import VerbsInbound, make_pairs
from kvmesh.transfer.transports.verbs.mailbox import ENTRY_BYTES, Mailbox
from kvmesh.transfer.transports.verbs.options import MAX_DEPTH, MAX_QPS, VerbsOptions
from kvmesh.transfer.transports.verbs.outbound import Target, VerbsOutbound
from kvmesh.transfer.transports.verbs.poller import InboundPoller
from kvmesh.transfer.transports.verbs.qp import QueuePair, Remote
from kvmesh.transfer.transports.verbs.shim import Api, load
from kvmesh.transfer.wire import PROTOCOL

log = logging.getLogger(__name__)
_BITS_24 = 1 << 24
_BITS_64 = 1 << 64


class VerbsTransport(Transport):
    """RDMA over reliable connections. api: pyverbs, or a fake of it."""

    name = "verbs"

    def __init__(self, options: VerbsOptions | None = None, api: Api | None = None) -> None:
        self._options = options or VerbsOptions()
        self._api = api
        self._usable = (False, "not started")
        self._device: Device | None = None
        self._memory: EngineMemory | None = None
        self._registered: list[Memory] = []
        self._doors: dict[int, tuple[bytes, VerbsInbound]] = {}
        self._inbounds: set[VerbsInbound] = set()
        self._poller: InboundPoller | None = None

    async def start(self) -> None:
        try:
            api = self._api or load()
            self._device = Device(api, self._options)
        except KvmeshError as error:
            self._usable = (False, error.message)
            raise
        port = self._device.port
        waits = "a polling thread" if self._options.spins else "completion channels"
        self._usable = (True, f"{self._device.name} port {port.number} gid {port.gid_index}, {waits}")
        if self._options.spins:
            self._poller = InboundPoller()
            self._poller.start()

    @property
    def status(self) -> tuple[bool, str]:
        return self._usable

    def offer(self) -> pb.TransportOffer:
        return pb.TransportOffer(name=self.name, link_layer=self._open_device().port.link_layer)

    def judge(self, offer: pb.TransportOffer) -> tuple[bool, str]:
        device = self._open_device()
        if offer.link_layer != device.port.link_layer:
            return False, f"link layer {offer.link_layer} there, {device.port.link_layer} here"
        return True, f"RDMA by {device.name}"

    def register(self, memory: EngineMemory) -> None:
        """The engine is not refused where its memory cannot be pinned: it goes by another transport then."""
        device = self._open_device()
        self._memory = memory
        usable = self._usable[0]
        try:
            for region in memory.regions:
                self._registered.append(device.register(_address(region), region.nbytes))
        except Unavailable as error:
            log.warning("verbs: %s", error.message)
            self._release()
            self._usable = (False, error.message)
            return
        if not usable:
            self._usable = (True, f"{device.name} port {device.port.number} gid {device.port.gid_index}")

    def deregister(self) -> None:
        # A writer whose link could not be fenced in time loses its queue pairs now, before the memory goes.
        for inbound in list(self._inbounds):
            self._drop(inbound)
        self._doors.clear()
        self._release()
        self._memory = None

    def expect(self, link: Expected) -> Endpoint:
        device = self._open_device()
        if self._memory is None or not self._registered:
            raise FailedPrecondition("no engine's memory is registered for verbs")
        inbound = VerbsInbound(device, link)
        assert inbound.mail is not None
        self._inbounds = {item for item in self._inbounds if not item.destroyed} | {inbound}
        token = secrets.token_bytes(32)
        self._doors[link.link_id] = (token, inbound)
        verbs = _endpoint(device, inbound.pairs)
        verbs.receives = self._options.receives
        for region in self._registered:
            verbs.regions.add(address=region.address, nbytes=region.nbytes, rkey=region.rkey)
        size = self._options.receives * ENTRY_BYTES
        for place in range(len(inbound.pairs)):
            verbs.mailboxes.add(address=inbound.mailbox.ring_address(place), nbytes=size, rkey=inbound.mail.rkey)
        return Endpoint(f"{device.name}", token, verbs)

    def forget(self, link_id: int) -> None:
        door = self._doors.pop(link_id, None)
        if door is not None:
            self._drop(door[1])

    async def join(self, hello: pb.DataHello) -> pb.DataHelloReply:
        """A writer's data hello, over the control stream of its link."""
        try:
            inbound = self._welcome(hello)
        except KvmeshError as error:
            log.warning("verbs: a writer was refused: %s", error.message)
            return pb.DataHelloReply(ok=False, reason=error.message[:500])
        try:
            remotes = _remotes(hello.verbs, len(inbound.pairs))
            await inbound.expected.on_joined(inbound, None)
            inbound.connect(remotes)
        except KvmeshError as error:
            log.warning("verbs: a writer was refused: %s", error.message)
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
        raise FailedPrecondition("verbs is connected over the control stream")

    async def connect_over(self, ask: Ask, reply: pb.PeerHelloReply, sidecar_id: str, timeout_s: float) -> Outbound:
        device = self._open_device()
        if self._memory is None or not self._registered:
            raise FailedPrecondition("no engine's memory is registered for verbs")
        target, remotes = _target(reply)
        mailbox = Mailbox(len(remotes), target.receives)
        outbound: VerbsOutbound | None = None
        mail: Memory | None = None
        try:
            mail = device.register(mailbox.address, mailbox.nbytes)
            queue, pairs = make_pairs(
                device,
                mailbox,
                mail,
                len(remotes),
                send_depth=self._options.send_depth,
                receive_depth=CREDIT_WORDS,
            )
            outbound = VerbsOutbound(device, queue, pairs, mailbox, mail, list(self._registered), target)
            for pair, remote in zip(pairs, remotes, strict=True):
                pair.connect(remote)
            hello = pb.DataHello(
                protocol=PROTOCOL,
                token=reply.token,
                link_id=reply.link_id,
                sidecar_id=sidecar_id,
                verbs=_endpoint(device, pairs),
            )
            answer = await ask(hello)
            if not answer.ok:
                raise Unavailable(f"refused by the destination: {answer.reason[:500]}")
            return outbound
        except BaseException:
            if outbound is not None:
                outbound.close()
            else:
                if mail is not None:
                    device.release(mail)
                mailbox.close()
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

    def _open_device(self) -> Device:
        if self._device is None:
            raise Unavailable(f"verbs cannot be used: {self._usable[1]}")
        return self._device

    def _release(self) -> None:
        if self._device is not None:
            for memory in self._registered:
                self._device.release(memory)
        self._registered = []

    def _drop(self, inbound: VerbsInbound) -> None:
        inbound.destroy()
        self._inbounds.discard(inbound)

    def _welcome(self, hello: pb.DataHello) -> VerbsInbound:
        if hello.protocol != PROTOCOL:
            raise FailedPrecondition(f"data protocol {hello.protocol} is not spoken here (this is {PROTOCOL})")
        token, inbound = self._doors.get(hello.link_id, (b"", None))
        if inbound is None or not hmac.compare_digest(token, hello.token):
            raise Unauthenticated("no such link, or a wrong token")
        del self._doors[hello.link_id]
        return inbound


def _address(region: Region) -> int:
    return int(region.view().__array_interface__["data"][0])


def _endpoint(device: Device, pairs: Sequence[QueuePair]) -> pb.VerbsEndpoint:
    port = device.port
    return pb.VerbsEndpoint(
        gid=port.gid,
        lid=port.lid,
        mtu=port.mtu,
        qp_numbers=[pair.number for pair in pairs],
        psns=[pair.psn for pair in pairs],
    )


def _remotes(verbs: pb.VerbsEndpoint, count: int) -> list[Remote]:
    """The other end's queue pairs, one for each of ours. Raises InvalidArgument."""
    if len(verbs.qp_numbers) != count or len(verbs.psns) != count:
        raise InvalidArgument(f"{len(verbs.qp_numbers)} queue pairs and {len(verbs.psns)} psns, {count} are needed")
    if len(verbs.gid) != GID_BYTES or not 1 <= verbs.mtu <= 5 or verbs.lid >= 1 << 16:
        raise InvalidArgument("a gid of 16 bytes, an mtu of 1..5 and a lid of 16 bits are needed")
    if any(not 0 < number < _BITS_24 for number in verbs.qp_numbers) or any(psn >= _BITS_24 for psn in verbs.psns):
        raise InvalidArgument("queue pair numbers and psns have 24 bits")
    return [
        Remote(verbs.gid, verbs.lid, verbs.mtu, number, psn)
        for number, psn in zip(verbs.qp_numbers, verbs.psns, strict=True)
    ]


def _target(reply: pb.PeerHelloReply) -> tuple[Target, list[Remote]]:
    """What the destination lets us write to, checked. Raises InvalidArgument."""
    verbs = reply.verbs
    count = len(verbs.qp_numbers)
    if not 1 <= count <= MAX_QPS:
        raise InvalidArgument(f"{count} queue pairs, 1..{MAX_QPS} are possible")
    remotes = _remotes(verbs, count)
    if not 2 <= verbs.receives <= MAX_DEPTH:
        raise InvalidArgument(f"receives must be in 2..{MAX_DEPTH}, got {verbs.receives}")
    if len(verbs.regions) != len(reply.regions) or len(verbs.mailboxes) != count:
        raise InvalidArgument("a key is needed for each region, and a mailbox for each queue pair")
    for memory in (*verbs.regions, *verbs.mailboxes):
        if memory.nbytes > MAX_REGION_BYTES or memory.address + memory.nbytes > _BITS_64 or memory.rkey >= 1 << 32:
            raise InvalidArgument("memory beyond the address space")
    for memory, info in zip(verbs.regions, reply.regions, strict=True):
        if memory.nbytes < info.nbytes:
            raise InvalidArgument(f"region {info.group!r} is registered with {memory.nbytes} of {info.nbytes} bytes")
    for memory in verbs.mailboxes:
        if memory.nbytes != verbs.receives * ENTRY_BYTES:
            raise InvalidArgument("a mailbox has 8 bytes for each receive")
    # Writes are bounded by what was announced, should more be registered.
    regions = [
        Memory(memory.address, info.nbytes, 0, memory.rkey)
        for memory, info in zip(verbs.regions, reply.regions, strict=True)
    ]
    rings = [(memory.address, memory.rkey) for memory in verbs.mailboxes]
    return Target(regions, rings, verbs.receives), remotes
