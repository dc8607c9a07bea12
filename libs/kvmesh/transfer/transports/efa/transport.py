"""`efa` in a sidecar: one SRD queue pair per link at each end, RDMA writes, no order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvmesh.errors import InvalidArgument, Unavailable
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.transports.base import Endpoint, Expected
from kvmesh.transfer.transports.efa.device import EfaDevice, check_gid
from kvmesh.transfer.transports.efa.inbound import EfaInbound
from kvmesh.transfer.transports.efa.options import EfaOptions
from kvmesh.transfer.transports.efa.outbound import EfaOutbound, Target
from kvmesh.transfer.transports.efa.qp import QKEY_BITS, QPN_BITS, SrdPair
from kvmesh.transfer.transports.efa.scratch import WORD_BYTES, Scratch
from kvmesh.transfer.transports.efa.shim import EfaApi, load_efa
from kvmesh.transfer.transports.efa.window import WORD_RECEIVES
from kvmesh.transfer.transports.verbs.cq import CompletionQueue
from kvmesh.transfer.transports.verbs.device import Memory, device_names
from kvmesh.transfer.transports.verbs.endpoint import RdmaTransport
from kvmesh.transfer.transports.verbs.nics import NicOptions, Rail
from kvmesh.transfer.transports.verbs.options import MAX_DEPTH
from kvmesh.transfer.transports.verbs.sides import check_remote, remote_regions


class EfaTransport(RdmaTransport[EfaDevice, EfaInbound]):
    """RDMA writes by SRD. api: pyverbs, or a fake of it."""

    name = "efa"

    def __init__(self, options: EfaOptions | None = None, api: EfaApi | None = None) -> None:
        self._options = options or EfaOptions()
        self._api = api
        options = self._options
        nics = NicOptions.of(options.device, options.devices, options.near, options.sysfs)
        super().__init__(nics, spins=options.spins, polling=options.polling, port=options.port)

    def judge(self, offer: pb.TransportOffer) -> tuple[bool, str]:
        names = ", ".join(rail.device.name for rail in self._nics.up()) or self._open_device().name
        return True, f"RDMA by {names}"

    def _names(self) -> Sequence[str]:
        self._api = self._api or load_efa()
        return device_names(self._api.verbs)

    def _is_used(self, side: Any) -> bool:
        return bool(side.qp_number)

    def _open(self, name: str) -> EfaDevice:
        device = EfaDevice(self._api or load_efa(), self._options, name)
        try:
            _probe(device)
        except BaseException:
            device.close()
            raise
        return device

    def _make_inbound(self, device: EfaDevice, link: Expected) -> EfaInbound:
        return EfaInbound(device, link)

    def _endpoint(self, rail: Rail[EfaDevice], inbound: EfaInbound, token: bytes) -> Endpoint:
        assert inbound.pair is not None
        device = rail.device
        efa = _side(device, inbound.pair)
        efa.receives = self._options.receives
        for region in rail.memory:
            efa.regions.add(address=region.address, nbytes=region.nbytes, rkey=region.rkey)
        return Endpoint(device.name, token, efa=efa)

    def _accept(self, inbound: EfaInbound, hello: pb.DataHello) -> Callable[[], None]:
        efa = hello.efa
        _check_side(efa)
        check_remote(efa.words)
        if efa.words.nbytes != WORD_BYTES:
            raise InvalidArgument(f"words take {WORD_BYTES} bytes")
        words = Memory(efa.words.address, efa.words.nbytes, 0, efa.words.rkey)
        gid, qpn, qkey = efa.gid, efa.qp_number, efa.qkey
        return lambda: inbound.connect(gid, qpn, qkey, words)

    def _make_outbound(self, rail: Rail[EfaDevice], reply: pb.PeerHelloReply, hello: pb.DataHello) -> EfaOutbound:
        device = rail.device
        efa = reply.efa
        _check_side(efa)
        if not 2 <= efa.receives <= MAX_DEPTH:
            raise InvalidArgument(f"receives must be in 2..{MAX_DEPTH}, got {efa.receives}")
        target = Target(efa.qp_number, efa.qkey, efa.receives, remote_regions(efa.regions, reply))
        peer = device.peer(efa.gid)
        scratch: Scratch | None = None
        queue: CompletionQueue | None = None
        pair: SrdPair | None = None
        try:
            scratch = Scratch(device)
            queue = CompletionQueue(device, self._options.send_depth + WORD_RECEIVES)
            pair = _make_pair(device, queue, scratch, self._options.send_depth, WORD_RECEIVES)
            pair.post_receives(WORD_RECEIVES)
        except BaseException as error:
            for part in (pair, queue, scratch):
                if part is not None:
                    part.close()
            device.release_peer(peer)
            if isinstance(error, device.api.error):
                raise Unavailable(f"{device.name} takes no receives: {error}") from None
            raise
        hello.efa.CopyFrom(_side(device, pair))
        words = scratch.target
        hello.efa.words.CopyFrom(pb.RemoteMemory(address=words.address, nbytes=words.nbytes, rkey=words.rkey))
        return EfaOutbound(device, queue, pair, scratch, peer, list(rail.memory), target)


def _make_pair(device: EfaDevice, queue: CompletionQueue, scratch: Scratch, sends: int, receives: int) -> SrdPair:
    return SrdPair(device, queue, send_depth=sends, receive_depth=receives, sink=scratch.sink, sink_lkey=scratch.lkey)


def _probe(device: EfaDevice) -> None:
    """What only fails when it is asked for: completion channels, SRD queue pairs. Raises Unavailable."""
    scratch = Scratch(device)
    try:
        queue = CompletionQueue(device, 2)
        try:
            _make_pair(device, queue, scratch, 1, 1).close()
        finally:
            queue.close()
    finally:
        scratch.close()


def _side(device: EfaDevice, pair: SrdPair) -> pb.EfaEndpoint:
    return pb.EfaEndpoint(gid=device.port.gid, qp_number=pair.number, qkey=pair.qkey, device=device.name)


def _check_side(efa: pb.EfaEndpoint) -> None:
    """What the other end says of its queue pair. Raises InvalidArgument."""
    check_gid(efa.gid)
    # 0 is EFA's own, and the device would take more bits off.
    if not 0 < efa.qp_number < 1 << QPN_BITS or not 0 < efa.qkey < 1 << QKEY_BITS:
        raise InvalidArgument(f"a queue pair number has {QPN_BITS} bits and a key {QKEY_BITS}; neither is 0")
