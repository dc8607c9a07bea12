"""Descriptors: what is built passes, and no change of a field passes unnoticed."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.errors import InvalidArgument, TooLarge
from kvmesh.kv.layout import KvGroup, KvLayout
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.descriptor import (
    DescriptorLimits,
    build_descriptor,
    check_descriptor,
    check_layouts_match,
    groups_from_proto,
    groups_to_proto,
    layout_from_proto,
    layout_to_proto,
    slot_bytes,
    source_pages,
)
from kvmesh.transfer.tail import TailBuffer, rows_from_proto, tail_bytes, tails_from_proto

LAYOUT = KvLayout(
    version=1,
    dtype="bf16",
    page_size=16,
    groups=(KvGroup("a", "full", (0, 1), kv_heads=2, head_dim=8), KvGroup("b", "full", (2,), kv_heads=4, head_dim=8)),
    num_pages=32,
    tp=2,
)
GROUPS = {"a": [1, 2, 9], "b": [4, 5, 6]}
TAIL = TailBuffer("hidden", 48, 8)
ROWS = {"hidden": 5}


def good() -> pb.Descriptor:
    sidecar: Any = SimpleNamespace(
        engine_id="d",
        incarnation=7,
        control_address="10.0.0.1:50051",
        sidecar_incarnation=8,
        region_infos=[
            pb.RegionInfo(group=group.name, rank=rank, nbytes=LAYOUT.region_bytes(group), key=3)
            for group in LAYOUT.groups
            for rank in range(2)
        ]
        + [pb.RegionInfo(group="hidden", rank=rank, nbytes=TAIL.nbytes, key=4) for rank in range(2)],
        layout=LAYOUT,
        tails=(TAIL,),
    )
    expected = slot_bytes(LAYOUT, GROUPS) + tail_bytes(LAYOUT, [TAIL], ROWS)
    slot: Any = SimpleNamespace(slot=1, generation=2, expected_bytes=expected, request_id="r")
    return build_descriptor(sidecar, slot, groups=GROUPS, first_block=1, num_tokens=60, traceparent="t", tails=ROWS)


def test_round_trip() -> None:
    descriptor = pb.Descriptor.FromString(good().SerializeToString())
    check_descriptor(descriptor)
    assert layout_from_proto(descriptor.layout) == LAYOUT
    assert groups_from_proto(descriptor.groups, LAYOUT, 100) == GROUPS
    per_page = sum(LAYOUT.page_bytes(group) * group.num_layers for group in LAYOUT.groups)
    assert descriptor.expected_bytes == 3 * per_page * 2 + 48 * 2
    assert tails_from_proto(descriptor.layout, LAYOUT) == (TAIL,)
    assert rows_from_proto(descriptor.tails, [TAIL]) == ROWS


CHANGES: dict[str, Any] = {
    "version": lambda d: setattr(d, "version", 2),
    "engine_id": lambda d: setattr(d, "engine_id", ""),
    "long request_id": lambda d: setattr(d, "request_id", "x" * 300),
    "incarnation": lambda d: setattr(d, "incarnation", 0),
    "sidecar_incarnation": lambda d: setattr(d, "sidecar_incarnation", 0),
    "control_address": lambda d: setattr(d, "control_address", "host"),
    "slot": lambda d: setattr(d, "slot", 4096),
    "generation": lambda d: setattr(d, "generation", 1 << 20),
    "expected_bytes": lambda d: setattr(d, "expected_bytes", d.expected_bytes + 1),
    "num_tokens": lambda d: setattr(d, "num_tokens", 65),
    "first_block": lambda d: setattr(d, "first_block", 2),
    "page": lambda d: d.groups[0].pages.__setitem__(0, 32),
    "page twice": lambda d: d.groups[0].pages.__setitem__(0, 2),
    "page missing": lambda d: d.groups[0].pages.pop(),
    "group": lambda d: setattr(d.groups[0], "group", "c"),
    "group twice": lambda d: setattr(d.groups[0], "group", "b"),
    "group missing": lambda d: d.groups.pop(),
    "region missing": lambda d: d.regions.pop(),
    "region twice": lambda d: setattr(d.regions[0], "rank", 1),
    "region small": lambda d: setattr(d.regions[0], "nbytes", 5),
    "fingerprint": lambda d: setattr(d.layout, "fingerprint", b"?"),
    "dtype": lambda d: setattr(d.layout, "dtype", "fp32"),
    "layout page_size": lambda d: setattr(d.layout, "page_size", 0),
    "layout version": lambda d: setattr(d.layout, "version", 9),
    "layout heads": lambda d: setattr(d.layout.groups[0], "kv_heads", 4),
    "tail row": lambda d: setattr(d.tails[0], "row", 8),
    "tail name": lambda d: setattr(d.tails[0], "name", "a"),
    "tail twice": lambda d: d.tails.append(d.tails[0]),
    "tail missing": lambda d: d.tails.pop(),
    "tail buffer like a group": lambda d: setattr(d.layout.tails[0], "name", "a"),
    "tail buffer twice": lambda d: d.layout.tails.append(d.layout.tails[0]),
    "tail buffer empty": lambda d: setattr(d.layout.tails[0], "rows", 0),
    "tail buffer huge": lambda d: setattr(d.layout.tails[0], "row_bytes", 1 << 40),
    "tail region missing": lambda d: setattr(d.regions[-1], "group", "other"),
    "tail region small": lambda d: setattr(d.regions[-1], "nbytes", 5),
    "all lists short": lambda d: [group.pages.pop() for group in d.groups],
    "layout layers": lambda d: d.layout.groups[0].layers.append(0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_wrong_field_is_refused(change: str) -> None:
    descriptor = good()
    CHANGES[change](descriptor)
    with pytest.raises(InvalidArgument):
        check_descriptor(descriptor)


def test_limits() -> None:
    with pytest.raises(TooLarge):
        check_descriptor(good(), DescriptorLimits(max_bytes=100))
    with pytest.raises(InvalidArgument, match="at most 2"):
        check_descriptor(good(), DescriptorLimits(max_pages=2))
    with pytest.raises(InvalidArgument, match="too many groups"):
        check_descriptor(good(), DescriptorLimits(max_groups=1))


@given(at=st.integers(0, 300), bit=st.integers(0, 7))
def test_flipped_bits_never_do_harm(at: int, bit: int) -> None:
    raw = bytearray(good().SerializeToString())
    raw[at % len(raw)] ^= 1 << bit
    with contextlib.suppress(InvalidArgument, DecodeError):
        check_descriptor(pb.Descriptor.FromString(bytes(raw)))


def test_a_group_of_which_some_pages_are_kept_has_a_shorter_list() -> None:
    descriptor = good()
    descriptor.groups[1].pages.pop()
    descriptor.expected_bytes -= 2 * LAYOUT.page_bytes("b")
    check_descriptor(descriptor)


def test_bytes_of_a_slot_depend_on_the_page_size_of_the_writer_alone() -> None:
    whole = slot_bytes(LAYOUT, GROUPS)
    for tp in (1, 2):
        assert slot_bytes(LAYOUT, GROUPS, replace(LAYOUT, tp=tp, num_pages=7), 44) == whole
        exact = slot_bytes(LAYOUT, GROUPS, replace(LAYOUT, tp=tp, page_size=64), 44)
        assert exact * 48 == whole * 44
    assert slot_bytes(LAYOUT, GROUPS, replace(LAYOUT, page_size=64)) == whole


@pytest.mark.parametrize(
    ("page_size", "blocks"), [(16, (1, 3)), (8, (2, 6)), (64, (0, 1)), (12, (1, 4)), (5, (3, 9)), (32, (0, 2))]
)
def test_pages_of_the_source(page_size: int, blocks: tuple[int, int]) -> None:
    """Tokens 16 to 59."""
    assert source_pages(replace(LAYOUT, page_size=page_size), good()) == blocks


def test_which_layouts_can_be_exchanged() -> None:
    for other in (replace(LAYOUT, tp=1), replace(LAYOUT, page_size=64, num_pages=3)):
        check_layouts_match(LAYOUT, other)
        assert other.kv_fingerprint() == LAYOUT.kv_fingerprint()
    a, b = LAYOUT.groups
    for other in (
        replace(LAYOUT, dtype="fp16"),
        replace(LAYOUT, groups=(a,)),
        replace(LAYOUT, groups=(a, replace(b, head_dim=4))),
    ):
        with pytest.raises(InvalidArgument, match="kv layouts do not match"):
            check_layouts_match(LAYOUT, other)
        assert other.kv_fingerprint() != LAYOUT.kv_fingerprint()


def test_scales_travel_with_the_layout() -> None:
    layout = replace(LAYOUT, dtype="fp8_e4m3", kv_scales=(0.1, 3.0))
    message = layout_to_proto(layout)
    assert layout_from_proto(pb.Layout.FromString(message.SerializeToString())) == layout
    with pytest.raises(InvalidArgument, match="kv_scales"):
        check_layouts_match(replace(layout, kv_scales=(0.1, 3.5)), layout)
    for scales in ([], [0.1], [0.1, 3.0, 1.0], [0.1, 3.5], [0.1, -3.0]):
        message.kv_scales[:] = scales
        with pytest.raises(InvalidArgument):
            layout_from_proto(message)


def test_layout_of_a_peer_is_checked() -> None:
    message = layout_to_proto(LAYOUT)
    message.groups.extend([message.groups[0]] * 100)
    with pytest.raises(InvalidArgument):
        layout_from_proto(message)
    with pytest.raises(InvalidArgument, match="no kv group"):
        groups_from_proto(groups_to_proto({"zzz": [1]}), LAYOUT, 10)
