"""`verbs` in a sidecar: RDMA over reliable connections. The destination's queue pairs wait in INIT until the writer's
data hello names their other ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvmesh.errors import InvalidArgument
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.transports.base import Endpoint, Expected
from kvmesh.transfer.transports.verbs.credits import CREDIT_WORDS
from kvmesh.transfer.transports.verbs.device import GID_BYTES, Device, Memory, device_names
from kvmesh.transfer.transports.verbs.endpoint import RdmaTransport
from kvmesh.transfer.transports.verbs.inbound import VerbsInbound, make_pairs
from kvmesh.transfer.transports.verbs.mailbox import ENTRY_BYTES, Mailbox
from kvmesh.transfer.transports.verbs.nics import NicOptions, Rail
from kvmesh.transfer.transports.verbs.options import MAX_DEPTH, MAX_QPS, VerbsOptions
from kvmesh.transfer.transports.verbs.outbound import Target, VerbsOutbound
from kvmesh.transfer.transports.verbs.qp import QueuePair, Remote
from kvmesh.transfer.transports.verbs.shim import Api, load
from kvmesh.transfer.transports.verbs.sides import check_remote, remote_regions

_BITS_24 = 1 << 24


class VerbsTransport(RdmaTransport[Device, VerbsInbound]):
    """RDMA over reliable connections. api: pyverbs, or a fake of it."""

    name = "verbs"

    def __init__(self, options: VerbsOptions | None = None, api: Api | None = None) -> None:
        self._options = options or VerbsOptions()
        self._api = api
        options = self._options
        nics = NicOptions.of(options.device, options.devices, options.near, options.sysfs)
        super().__init__(nics, spins=options.spins, polling=options.polling, port=options.port)

    def offer(self) -> pb.TransportOffer:
        offer = super().offer()
        offer.link_layer = self._open_device().port.link_layer
        return offer

    def judge(self, offer: pb.TransportOffer) -> tuple[bool, str]:
        device = self._open_device()
        if offer.link_layer != device.port.link_layer:
            return False, f"link layer {offer.link_layer} there, {device.port.link_layer} here"
        names = ", ".join(rail.device.name for rail in self._nics.up()) or device.name
        return True, f"RDMA by {names}"

    def _names(self) -> Sequence[str]:
        self._api = self._api or load()
        return device_names(self._api)

    def _open(self, name: str) -> Device:
        return Device(self._api or load(), self._options, name)

    def _unfit(self, driver: str) -> str:
        return "an EFA device: for transport efa" if driver == "efa" else ""

    def _is_used(self, side: Any) -> bool:
        return bool(side.qp_numbers)

    def _make_inbound(self, device: Device, link: Expected) -> VerbsInbound:
        return VerbsInbound(device, link)

    def _endpoint(self, rail: Rail[Device], inbound: VerbsInbound, token: bytes) -> Endpoint:
        assert inbound.mail is not None
        device = rail.device
        verbs = _endpoint(device, inbound.pairs)
        verbs.receives = self._options.receives
        for region in rail.memory:
            verbs.regions.add(address=region.address, nbytes=region.nbytes, rkey=region.rkey)
        size = self._options.receives * ENTRY_BYTES
        for place in range(len(inbound.pairs)):
            verbs.mailboxes.add(address=inbound.mailbox.ring_address(place), nbytes=size, rkey=inbound.mail.rkey)
        return Endpoint(device.name, token, verbs)

    def _accept(self, inbound: VerbsInbound, hello: pb.DataHello) -> Callable[[], None]:
        remotes = _remotes(hello.verbs, len(inbound.pairs))
        return lambda: inbound.connect(remotes)

    def _make_outbound(self, rail: Rail[Device], reply: pb.PeerHelloReply, hello: pb.DataHello) -> VerbsOutbound:
        device = rail.device
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
            outbound = VerbsOutbound(device, queue, pairs, mailbox, mail, list(rail.memory), target)
            for pair, remote in zip(pairs, remotes, strict=True):
                pair.connect(remote)
        except BaseException:
            if outbound is not None:
                outbound.close()
            else:
                if mail is not None:
                    device.release(mail)
                mailbox.close()
            raise
        hello.verbs.CopyFrom(_endpoint(device, pairs))
        return outbound


def _endpoint(device: Device, pairs: Sequence[QueuePair]) -> pb.VerbsEndpoint:
    port = device.port
    return pb.VerbsEndpoint(
        gid=port.gid,
        lid=port.lid,
        mtu=port.mtu,
        qp_numbers=[pair.number for pair in pairs],
        psns=[pair.psn for pair in pairs],
        device=device.name,
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
    regions = remote_regions(verbs.regions, reply)
    if len(verbs.mailboxes) != count:
        raise InvalidArgument("a mailbox is needed for each queue pair")
    for memory in verbs.mailboxes:
        check_remote(memory)
        if memory.nbytes != verbs.receives * ENTRY_BYTES:
            raise InvalidArgument("a mailbox has 8 bytes for each receive")
    rings = [(memory.address, memory.rkey) for memory in verbs.mailboxes]
    return Target(regions, rings, verbs.receives), remotes
