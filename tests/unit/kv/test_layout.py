"""Layout formulas against numpy's own indexing, and refusal of layouts that cannot be."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.errors import InvalidArgument
from kvmesh.kv.layout import KvGroup, KvLayout, compatible, group_view


def make(dtype="bf16", page_size=16, num_pages=7, tp=1, heads=4, head_dim=8, layers=(0, 1, 2)):
    return KvLayout(1, dtype, page_size, (KvGroup("full", "full", tuple(layers), heads, head_dim),), num_pages, tp)


@given(
    st.sampled_from(["bf16", "fp16", "fp32"]),
    st.integers(1, 33),
    st.integers(1, 9),
    st.sampled_from([(4, 1), (4, 2), (4, 4), (2, 4), (1, 8), (3, 1)]),
    st.integers(1, 17),
    st.data(),
)
def test_offsets_are_those_of_an_array_of_that_shape(dtype, page_size, num_pages, heads_tp, head_dim, data):
    heads, tp = heads_tp
    layout = make(dtype, page_size, num_pages, tp, heads, head_dim)
    itemsize = {"bf16": 2, "fp16": 2, "fp32": 4}[dtype]
    region = np.zeros((3, num_pages, max(1, heads // tp), 2, page_size, head_dim), dtype=f"V{itemsize}")
    assert layout.region_shape("full") == region.shape
    assert layout.region_bytes("full") == region.nbytes
    assert layout.layer_stride("full") == region.strides[0]
    assert layout.page_bytes("full") == region.strides[1]
    layer, page = data.draw(st.integers(0, 2)), data.draw(st.integers(0, num_pages - 1))
    address = region[layer, page].__array_interface__["data"][0] - region.__array_interface__["data"][0]
    assert layout.page_offset("full", layer, page) == address


def test_group_view_aliases_the_buffer():
    layout = make(num_pages=3)
    buf = bytearray(layout.region_bytes("full") + 5)
    view = group_view(buf, layout, "full")
    assert view.shape == (3, 3, layout.page_bytes("full"))
    view[2, 1, 0] = 9
    assert buf[layout.page_offset("full", 2, 1)] == 9
    with pytest.raises(InvalidArgument, match="bytes"):
        group_view(bytearray(layout.region_bytes("full") - 1), layout, "full")


def test_several_groups_and_locate():
    layout = KvLayout(
        1, "fp32", 4, (KvGroup("full", "full", (0, 2, 5), 2, 8), KvGroup("draft", "full", (7,), 1, 4)), num_pages=2
    )
    assert layout.num_layers == 4
    assert layout.locate(5) == (layout.groups[0], 2)
    assert layout.locate(7) == (layout.groups[1], 0)
    assert layout.page_bytes("draft") == 1 * 2 * 4 * 4 * 4
    for bad in (lambda: layout.locate(1), lambda: layout.group("nope")):
        with pytest.raises(InvalidArgument):
            bad()


def test_fingerprint_covers_everything_but_num_pages_and_tp():
    base = make()
    assert len(base.fingerprint()) == 16
    assert dataclasses.replace(base, num_pages=99).fingerprint() == base.fingerprint()
    assert dataclasses.replace(base, tp=2).fingerprint() == base.fingerprint()
    group = base.groups[0]
    other = [
        make(dtype="fp16"),
        make(page_size=32),
        make(heads=8),
        make(head_dim=16),
        make(layers=(0, 1, 3)),
        dataclasses.replace(base, groups=(dataclasses.replace(group, name="fulI"),)),
        dataclasses.replace(base, groups=(group, KvGroup("draft", "full", (9,), 4, 8))),
    ]
    prints = {layout.fingerprint() for layout in other}
    assert len(prints) == len(other)
    assert base.fingerprint() not in prints


def test_fingerprint_golden_vector():
    # Engines of different releases compare these bytes: a change needs a new layout version.
    layout = KvLayout(1, "bf16", 16, (KvGroup("full", "full", tuple(range(30)), 3, 64),), num_pages=100)
    assert layout.fingerprint().hex() == "c1177a149861000dc2153ad9e193a0b4"


def fp8(scales=(1.0, 1.0), page_size=16):
    group = KvGroup("full", "full", (0, 1, 2), 4, 8)
    return KvLayout(1, "fp8_e4m3", page_size, (group,), num_pages=7, kv_scales=scales)


def test_fp8_pages_are_half_of_bf16_and_tell_their_scales():
    layout = fp8((0.5, 2.0))
    assert layout.itemsize == 1
    assert 2 * layout.page_bytes("full") == make().page_bytes("full")
    assert KvLayout.from_dict(layout.to_dict()) == layout
    # 0.1 has no short binary form: it must come back as it was.
    assert KvLayout.from_dict(fp8((0.1, 1 / 3)).to_dict()).fingerprint() == fp8((0.1, 1 / 3)).fingerprint()
    others = [make(), fp8(), fp8((2.0, 0.5)), fp8((0.5, np.nextafter(2.0, 3.0).item())), layout]
    assert len({other.fingerprint() for other in others}) == len(others)
    assert len({other.kv_fingerprint() for other in others}) == len(others)
    for other in others[:-1]:
        assert ("dtype" if other.kv_scales is None else "kv_scales") in compatible(other, layout)
    assert compatible(fp8((0.5, 2.0), page_size=64), layout) is None


def test_fp8_fingerprint_golden_vector():
    assert fp8((0.5, 2.0)).fingerprint().hex() == "f1645f39a18f8f6a79158ccb0b992633"


def test_scales_that_cannot_be():
    for scales in (None, (1.0,), (1.0, 0.0), (-1.0, 1.0), (float("nan"), 1.0), (1.0, float("inf")), (1, 1), "ab"):
        with pytest.raises(InvalidArgument, match="kv_scales"):
            fp8(scales)
    with pytest.raises(InvalidArgument, match="bf16 has no kv_scales"):
        dataclasses.replace(make(), kv_scales=(1.0, 1.0))
    data = fp8().to_dict()
    for scales in (None, 1.0, "ab", [1.0], [1.0, 1.0, 1.0], [1.0, "1"], [True, 1.0], [10**400, 1.0]):
        with pytest.raises(InvalidArgument, match="kv_scales"):
            KvLayout.from_dict({**data, "kv_scales": scales})


def test_dict_round_trip_and_hostile_dicts():
    layout = make(tp=2)
    data = layout.to_dict()
    assert KvLayout.from_dict(data) == layout
    for change in (
        {"page_size": "16"},
        {"page_size": True},
        {"page_size": 0},
        {"num_pages": 1 << 40},
        {"groups": "full"},
        {"groups": [{}]},
        {"groups": [7]},
        {"groups": [data["groups"][0]] * 65},
        {"dtype": "int3"},
        {"version": 2},
        {"tp": 3},
        {"groups": [{**data["groups"][0], "layers": [0, "1"]}]},
        {"groups": [{**data["groups"][0], "layers": []}]},
    ):
        with pytest.raises(InvalidArgument):
            KvLayout.from_dict({**data, **change})
    for key in data:
        with pytest.raises(InvalidArgument, match=key):
            KvLayout.from_dict({k: v for k, v in data.items() if k != key})


def test_refuses_what_cannot_be():
    full = ("full", "full", (0,), 2, 8)
    with pytest.raises(InvalidArgument, match="not implemented: kv group kind 'window'"):
        KvGroup("x", "window", (0,), 1, 8)
    for layers in ((), (1, 0), (0, 0), (-1, 0)):
        with pytest.raises(InvalidArgument):
            KvGroup("x", "full", layers, 1, 8)
    for groups in ((), (KvGroup(*full), KvGroup(*full)), (KvGroup(*full), KvGroup("b", "full", (0,), 2, 8))):
        with pytest.raises(InvalidArgument):
            KvLayout(1, "bf16", 16, groups, 1)
    with pytest.raises(InvalidArgument, match="page must be"):
        make().page_offset("full", 0, 7)
    with pytest.raises(InvalidArgument, match="layer_index"):
        make().page_offset("full", 3, 0)
