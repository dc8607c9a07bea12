"""Endpoints in the messages of peers: one for each pair of NICs of a link, checked before they reach a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvmesh.errors import InvalidArgument
from kvmesh.kv.region import MAX_REGION_BYTES
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.transports.verbs.registrations import Memory

MAX_NAME_CHARS = 64


def sides_of(message: Any, field: str) -> list[Any]:
    """The endpoints of all pairs of NICs. Raises InvalidArgument for names of devices that are none: they are kept, in
    status and as faults."""
    first = getattr(message, field)
    sides = [first, *first.rails]
    if any(len(side.device) > MAX_NAME_CHARS for side in sides):
        raise InvalidArgument(f"a device's name has at most {MAX_NAME_CHARS} characters")
    return sides


def reply_of(reply: pb.PeerHelloReply, field: str, side: Any) -> pb.PeerHelloReply:
    """The reply as it would be for that pair alone."""
    part = pb.PeerHelloReply(regions=reply.regions)
    getattr(part, field).CopyFrom(side)
    return part


def hello_of(hello: pb.DataHello, field: str, side: Any) -> pb.DataHello:
    part = pb.DataHello(link_id=hello.link_id)
    getattr(part, field).CopyFrom(side)
    return part


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
