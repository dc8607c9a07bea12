"""Descriptors and layouts as protos: built by the destination, checked by the source before they size anything."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvmesh.errors import InvalidArgument, TooLarge
from kvmesh.kv.layout import MAX_GROUPS, MAX_LAYERS, KvGroup, KvLayout, compatible
from kvmesh.kv.planner import expected_bytes
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.immediate import GENERATIONS, MAX_SLOTS
from kvmesh.transfer.tail import (
    TailBuffer,
    region_sizes,
    rows_from_proto,
    rows_to_proto,
    tail_bytes,
    tails_from_proto,
)

DESCRIPTOR_VERSION = 1
MAX_ID_CHARS = 256
_ADDRESS = re.compile(r"(unix:.{1,200}|.{1,255}:\d{1,5})", re.DOTALL)


@dataclass(frozen=True, slots=True)
class DescriptorLimits:
    """Bounds on what a peer may ask."""

    max_bytes: int = 8 << 20
    max_pages: int = 1 << 20
    max_groups: int = MAX_GROUPS


class Sidecar(Protocol):
    """What a descriptor needs to know of the destination's sidecar (a `SidecarClient` fits)."""

    engine_id: str
    incarnation: int
    control_address: str
    sidecar_incarnation: int
    region_infos: list[pb.RegionInfo]
    layout: KvLayout
    tails: tuple[TailBuffer, ...]


class Slot(Protocol):
    """What a descriptor needs to know of the slot (a `SlotHandle` fits)."""

    slot: int
    generation: int
    expected_bytes: int
    request_id: str


def layout_to_proto(layout: KvLayout, tails: Sequence[TailBuffer] = ()) -> pb.Layout:
    """Layout with its fingerprint, and the tail buffers beside it."""
    return pb.Layout(
        version=layout.version,
        dtype=layout.dtype,
        page_size=layout.page_size,
        num_pages=layout.num_pages,
        tp=layout.tp,
        groups=[
            pb.LayerGroup(
                name=group.name, kind=group.kind, layers=group.layers, kv_heads=group.kv_heads, head_dim=group.head_dim
            )
            for group in layout.groups
        ],
        fingerprint=layout.fingerprint(),
        kv_scales=layout.kv_scales or (),
        tails=[pb.TailBuffer(name=tail.name, row_bytes=tail.row_bytes, rows=tail.rows) for tail in tails],
    )


def layout_from_proto(message: pb.Layout) -> KvLayout:
    """Checked layout; raises InvalidArgument, also where the fingerprint does not belong to the fields."""
    if len(message.groups) > MAX_GROUPS or any(len(group.layers) > MAX_LAYERS for group in message.groups):
        raise InvalidArgument("layout: too many groups or layers")
    if len(message.kv_scales) not in (0, 2):
        raise InvalidArgument(f"layout: 2 kv_scales or none, got {len(message.kv_scales)}")
    layout = KvLayout(
        version=message.version,
        dtype=message.dtype,
        page_size=message.page_size,
        num_pages=message.num_pages,
        tp=message.tp,
        groups=tuple(
            KvGroup(
                name=group.name,
                kind=group.kind,
                layers=tuple(group.layers),
                kv_heads=group.kv_heads,
                head_dim=group.head_dim,
            )
            for group in message.groups
        ),
        kv_scales=(message.kv_scales[0], message.kv_scales[1]) if message.kv_scales else None,
    )
    if message.fingerprint != layout.fingerprint():
        raise InvalidArgument("layout: the fingerprint does not belong to the fields")
    return layout


def check_layouts_match(source: KvLayout, destination: KvLayout) -> None:
    """Raises InvalidArgument where KV of one cannot be written into the other. tp, pools and page sizes may differ."""
    reason = compatible(source, destination)
    if reason is not None:
        raise InvalidArgument(f"kv layouts do not match: {reason}")


def slot_bytes(
    layout: KvLayout,
    groups: Mapping[str, Sequence[int]],
    source: KvLayout | None = None,
    num_tokens: int | None = None,
) -> int:
    """Bytes that the destination counts for these pages, all layers and ranks: `expected_bytes` of `open_slot`.

    `source`: the writer's layout, as far as it is known: tp does not matter. Where its pages have another size exactly
    `num_tokens` tokens arrive from the lists' first on (None: all that the lists hold), else whole pages.
    """
    source = source or layout
    tokens = num_tokens if source.page_size != layout.page_size else None
    return sum(
        int(expected_bytes(source, layout, pages, group=name, num_tokens=tokens).sum())
        for name, pages in groups.items()
    )


def source_pages(source: KvLayout, descriptor: pb.Descriptor) -> tuple[int, int]:
    """(first block, blocks) of the source's own that hold the descriptor's tokens."""
    first = descriptor.first_block * descriptor.layout.page_size // source.page_size
    return first, source.pages_for(descriptor.num_tokens) - first


def groups_to_proto(
    groups: Mapping[str, Sequence[int]], kept: Mapping[str, Sequence[int]] | None = None
) -> list[pb.GroupPages]:
    """Page lists, in the mapping's order."""
    kept = kept or {}
    return [pb.GroupPages(group=name, pages=pages, kept=kept.get(name, ())) for name, pages in groups.items()]


def groups_from_proto(message: Sequence[pb.GroupPages], layout: KvLayout, max_pages: int) -> dict[str, list[int]]:
    """Checked page lists: known groups, named once, pages inside the pool and named once. Raises InvalidArgument."""
    if len(message) > len(layout.groups):
        raise InvalidArgument(f"groups: {len(message)} page lists for {len(layout.groups)} groups")
    groups: dict[str, list[int]] = {}
    for entry in message:
        group = layout.group(entry.group)
        if group.name in groups:
            raise InvalidArgument(f"groups: {group.name!r} is named twice")
        if len(entry.pages) > max_pages:
            raise InvalidArgument(f"groups: {len(entry.pages)} pages of {group.name!r}, at most {max_pages}")
        pages = list(entry.pages)
        if pages and max(pages) >= layout.num_pages:
            raise InvalidArgument(f"groups: page {max(pages)} of {group.name!r} is not in a pool of {layout.num_pages}")
        if len(set(pages)) != len(pages):
            raise InvalidArgument(f"groups: a page of {group.name!r} is named twice")
        groups[group.name] = pages
    return groups


def build_descriptor(
    sidecar: Sidecar,
    slot: Slot,
    *,
    groups: Mapping[str, Sequence[int]],
    first_block: int,
    num_tokens: int,
    traceparent: str = "",
    tails: Mapping[str, int] | None = None,
) -> pb.Descriptor:
    """The descriptor that goes into Prefill.Run. `groups`: the destination's pages from block `first_block` on;
    `num_tokens`: KV is wanted for tokens [first_block * page_size, num_tokens); `tails`: rows of tail buffers, as taken
    with the slot."""
    return pb.Descriptor(
        version=DESCRIPTOR_VERSION,
        engine_id=sidecar.engine_id,
        incarnation=sidecar.incarnation,
        control_address=sidecar.control_address,
        layout=layout_to_proto(sidecar.layout, sidecar.tails),
        regions=sidecar.region_infos,
        groups=groups_to_proto(groups),
        first_block=first_block,
        num_tokens=num_tokens,
        slot=slot.slot,
        generation=slot.generation,
        expected_bytes=slot.expected_bytes,
        traceparent=traceparent,
        request_id=slot.request_id,
        sidecar_incarnation=sidecar.sidecar_incarnation,
        tails=rows_to_proto(tails or {}),
    )


def check_address(what: str, address: str) -> None:
    """A control address. Raises InvalidArgument."""
    if not _ADDRESS.fullmatch(address):
        raise InvalidArgument(f"{what}: control_address is not host:port")


def check_descriptor(message: pb.Descriptor, limits: DescriptorLimits | None = None) -> None:
    """Raises InvalidArgument (TooLarge for its size) naming the field that is wrong.

    Does not know the source: `SidecarClient.start_transfer` compares layouts.
    """
    limits = limits or DescriptorLimits()
    if message.ByteSize() > limits.max_bytes:
        raise TooLarge(f"descriptor of {message.ByteSize()} bytes, at most {limits.max_bytes}")
    if message.version != DESCRIPTOR_VERSION:
        raise InvalidArgument(f"descriptor: version {message.version} is not known (this is {DESCRIPTOR_VERSION})")
    for name in ("engine_id", "request_id"):
        if len(getattr(message, name)) > MAX_ID_CHARS:
            raise InvalidArgument(f"descriptor: {name} is longer than {MAX_ID_CHARS} characters")
    if not message.engine_id:
        raise InvalidArgument("descriptor: engine_id is empty")
    for name in ("incarnation", "sidecar_incarnation"):
        if not getattr(message, name):
            raise InvalidArgument(f"descriptor: {name} is missing")
    check_address("descriptor", message.control_address)
    if message.slot >= MAX_SLOTS:
        raise InvalidArgument(f"descriptor: slot {message.slot} does not have 12 bits")
    if message.generation >= GENERATIONS:
        raise InvalidArgument(f"descriptor: generation {message.generation} does not have 20 bits")
    if len(message.groups) > limits.max_groups or len(message.regions) > limits.max_groups * 4096:
        raise InvalidArgument("descriptor: too many groups or regions")
    layout = layout_from_proto(message.layout)
    tails = tails_from_proto(message.layout, layout)
    groups = groups_from_proto(message.groups, layout, limits.max_pages)
    if set(groups) != {group.name for group in layout.groups}:
        raise InvalidArgument("descriptor: groups must name every group of the layout")
    check_region_infos("descriptor", message.regions, layout, tails)
    blocks = layout.pages_for(message.num_tokens) - message.first_block
    if blocks < 1:
        raise InvalidArgument(
            f"descriptor: first_block {message.first_block} leaves nothing of {message.num_tokens} tokens"
        )
    most = max(len(pages) for pages in groups.values())
    for name, pages in groups.items():
        # Fewer than others: of this group the source keeps some pages only.
        if most != blocks or not 1 <= len(pages) <= blocks:
            raise InvalidArgument(
                f"descriptor: {len(pages)} pages of {name!r}, num_tokens and first_block need {blocks}"
            )
    need = slot_bytes(layout, groups) + tail_bytes(layout, tails, rows_from_proto(message.tails, tails))
    if message.expected_bytes != need:
        raise InvalidArgument(f"descriptor: expected_bytes {message.expected_bytes}, the page lists give {need}")


def check_region_infos(
    what: str, regions: Sequence[pb.RegionInfo], layout: KvLayout, tails: Sequence[TailBuffer]
) -> None:
    """One region per group or tail buffer and rank, none smaller than it must be. Raises InvalidArgument."""
    sizes = region_sizes(layout, tails)
    found = {(region.group, region.rank) for region in regions}
    if len(found) != len(regions) or found != {(name, rank) for name in sizes for rank in range(layout.tp)}:
        raise InvalidArgument(f"{what}: regions must be one per group and rank")
    for region in regions:
        if region.nbytes < sizes[region.group]:
            raise InvalidArgument(f"{what}: region {region.group!r} has {region.nbytes} bytes, its layout needs more")
