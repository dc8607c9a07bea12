"""Descriptors and layouts as protos: built by the destination, checked by the source before anything is sized by them.

STUB with the final signatures; the body follows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvmesh.kv.layout import KvLayout
from kvmesh.proto.v1 import kvtransfer_pb2 as pb

DESCRIPTOR_VERSION = 1


@dataclass(frozen=True, slots=True)
class DescriptorLimits:
    """Bounds on what a peer may ask."""

    max_bytes: int = 8 << 20
    max_pages: int = 1 << 20
    max_groups: int = 64


class Sidecar(Protocol):
    """What a descriptor needs to know of the destination's sidecar (a `SidecarClient` fits)."""

    engine_id: str
    incarnation: int
    control_address: str
    sidecar_incarnation: int
    region_infos: list[pb.RegionInfo]
    layout: KvLayout


class Slot(Protocol):
    """What a descriptor needs to know of the slot (a `SlotHandle` fits)."""

    slot: int
    generation: int
    expected_bytes: int
    request_id: str


def layout_to_proto(layout: KvLayout) -> pb.Layout:
    """Layout with its fingerprint."""
    raise NotImplementedError


def layout_from_proto(message: pb.Layout) -> KvLayout:
    """Checked layout; raises InvalidArgument, also where the fingerprint does not belong to the fields."""
    raise NotImplementedError


def slot_bytes(layout: KvLayout, groups: Mapping[str, Sequence[int]]) -> int:
    """Bytes that the destination counts for these pages, all layers and ranks: `expected_bytes` of `open_slot`."""
    raise NotImplementedError


def build_descriptor(
    sidecar: Sidecar,
    slot: Slot,
    *,
    groups: Mapping[str, Sequence[int]],
    first_block: int,
    num_tokens: int,
    traceparent: str = "",
) -> pb.Descriptor:
    """The descriptor that goes into Prefill.Run. `groups`: the destination's pages from block `first_block` on;
    `num_tokens`: KV is wanted for tokens [first_block * page_size, num_tokens)."""
    raise NotImplementedError


def check_descriptor(message: pb.Descriptor, limits: DescriptorLimits) -> None:
    """Raises InvalidArgument naming the field that is wrong. Does not know the source: `SidecarClient.start_transfer`
    compares layouts."""
    raise NotImplementedError
