"""The planner where page sizes and tp are equal, its shortcuts and its refusals.

Other shardings and page sizes: test_planner_grid.py and test_planner_chunks.py."""

import dataclasses
import itertools
import logging
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvmesh.errors import InvalidArgument, TooLarge
from kvmesh.kv import planner
from kvmesh.kv.layout import KvGroup, KvLayout, compatible, group_view
from kvmesh.kv.planner import expected_bytes, plan


def layout(num_pages=12, tp=1, heads=2, page_size=4, layers=3, dtype="fp16"):
    groups = (
        KvGroup("full", "full", tuple(range(layers)), heads, 2),
        KvGroup("draft", "full", (layers,), 4, 3),
    )
    return KvLayout(1, dtype, page_size, groups, num_pages, tp)


@st.composite
def cases(draw):
    tp, heads = draw(st.sampled_from([(1, 2), (2, 4), (4, 4), (4, 2), (8, 1)]))
    src = layout(draw(st.integers(1, 24)), tp, heads)
    dst = layout(draw(st.integers(1, 24)), tp, heads)
    count = draw(st.integers(0, min(src.num_pages, dst.num_pages)))

    def pages(total):
        kind = draw(st.sampled_from(["runs", "random"]))
        if kind == "runs":
            start = draw(st.integers(0, total - count))
            return list(range(start, start + count))
        return draw(st.permutations(range(total)))[:count]

    first = draw(st.integers(0, count))
    tokens = draw(st.none() | st.integers(0, (count - first) * src.page_size))
    limit = draw(st.none() | st.sampled_from([1, 7, 64, 200, 10**6]))
    return src, dst, pages(src.num_pages), pages(dst.num_pages), first, tokens, limit


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.sampled_from(["full", "draft"]), st.randoms(use_true_random=False))
def test_carried_out_it_moves_exactly_the_pages(case, group, random):
    src, dst, src_pages, dst_pages, first, tokens, limit = case
    rng = np.random.default_rng(random.randrange(2**32))
    sources = [rng.integers(0, 256, src.region_bytes(group), dtype=np.uint8) for _ in range(src.tp)]
    targets = [rng.integers(0, 256, dst.region_bytes(group), dtype=np.uint8) for _ in range(dst.tp)]
    expected = [target.copy() for target in targets]
    count = (len(dst_pages) - first) if tokens is None else -(-tokens // src.page_size)
    for rank in range(dst.tp):
        for i in range(first, first + count):
            view, wanted = group_view(sources[rank], src, group), group_view(expected[rank], dst, group)
            wanted[:, dst_pages[i]] = view[:, src_pages[i]]

    rows = plan(
        src, dst, src_pages, dst_pages, group=group, first_token=first * 4, num_tokens=tokens, max_message=limit
    )
    written = [np.zeros(dst.region_bytes(group), dtype=np.uint8) for _ in range(dst.tp)]
    for layer in range(src.group(group).num_layers):
        src_at, dst_at = layer * src.layer_stride(group), layer * dst.layer_stride(group)
        for s_rank, s, d_rank, d, n in zip(
            rows.src_rank, rows.src_offset, rows.dst_rank, rows.dst_offset, rows.length, strict=True
        ):
            assert 0 < n <= (limit or n)
            # Inside this layer on both sides: an offset past it would silently be another layer's page.
            assert 0 <= s <= s + n <= src.layer_stride(group)
            assert 0 <= d <= d + n <= dst.layer_stride(group)
            targets[d_rank][dst_at + d : dst_at + d + n] = sources[s_rank][src_at + s : src_at + s + n]
            written[d_rank][dst_at + d : dst_at + d + n] += 1
    assert all((a == b).all() for a, b in zip(targets, expected, strict=True))
    assert max(int(w.max(initial=0)) for w in written) <= 1
    expectation = expected_bytes(src, dst, dst_pages, group=group, first_token=first * 4, num_tokens=tokens)
    assert expectation.tolist() == [int(w.sum()) for w in written]
    assert rows.nbytes * src.group(group).num_layers == expectation.sum()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.data())
def test_chunks_add_up_to_the_whole(case, data):
    """Page ranges as they leave step by step give the same bytes as one plan: what makes byte counting work."""
    src, dst, src_pages, dst_pages, _, _, limit = case
    cuts = sorted(data.draw(st.lists(st.integers(0, len(dst_pages)), max_size=4)))
    edges = [0, *cuts, len(dst_pages)]

    def cells(rows):
        return {
            (int(s_rank), int(s) + k, int(d_rank), int(d) + k)
            for s_rank, s, d_rank, d, n in zip(
                rows.src_rank, rows.src_offset, rows.dst_rank, rows.dst_offset, rows.length, strict=True
            )
            for k in range(n)
        }

    parts, total = set(), 0
    for a, b in itertools.pairwise(edges):
        rows = plan(src, dst, src_pages[a:b], dst_pages[a:b], group="full", max_message=limit)
        total += rows.nbytes
        parts |= cells(rows)
    whole = plan(src, dst, src_pages, dst_pages, group="full")
    assert parts == cells(whole)
    assert total == whole.nbytes == len(parts)


def test_adjacent_pages_merge_and_long_rows_split():
    src = dst = layout(64)
    size = src.page_bytes("full")
    rows = plan(src, dst, [5, 6, 7, 9, 10, 2], [20, 21, 22, 23, 40, 41], group="full")
    assert (rows.src_offset // size).tolist() == [5, 9, 10, 2]
    assert (rows.dst_offset // size).tolist() == [20, 23, 40, 41]
    assert (rows.length // size).tolist() == [3, 1, 1, 1]
    rows = plan(src, dst, [5, 6, 7], [20, 21, 22], group="full", max_message=2 * size)
    assert (rows.length // size).tolist() == [2, 1]
    assert (rows.dst_offset // size).tolist() == [20, 22]
    # Descending neighbours are not one run.
    assert len(plan(src, dst, [3, 2, 1], [3, 2, 1], group="full")) == 3


def test_rank_filters_take_rows_of_that_rank_alone():
    src = dst = layout(tp=4, heads=4)
    whole = plan(src, dst, [1, 3], [2, 5], group="full")
    assert whole.dst_rank.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    for rank in range(4):
        for rows in (
            plan(src, dst, [1, 3], [2, 5], group="full", src_rank=rank),
            plan(src, dst, [1, 3], [2, 5], group="full", dst_rank=rank),
        ):
            assert rows.src_rank.tolist() == rows.dst_rank.tolist() == [rank, rank]
            assert rows.dst_offset.tolist() == whole.dst_offset[:2].tolist()
    assert len(plan(src, dst, [1], [2], group="full", src_rank=0, dst_rank=1)) == 0


def test_bytes_only_depend_on_the_destination_where_page_sizes_are_equal():
    src = layout(4)
    pages = list(range(40))
    assert expected_bytes(src, layout(64), pages, group="full").tolist() == [40 * 3 * src.page_bytes("full")]


ok = {"group": "full"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dst_pages": [1, 1]}, "destination page is named twice"),
        ({"dst_pages": [1, 12]}, "destination page 12 is not in a pool of 12"),
        ({"src_pages": [1, -1]}, "source page -1"),
        ({"src_pages": [1]}, "source list has 1 pages, 2 are needed"),
        ({"num_tokens": 9}, "source list has 2 pages, 3 are needed"),
        ({"src_pages": [1, 2, 3], "num_tokens": 9}, "destination list has 2 pages, 3 are needed"),
        ({"first_token": 12}, "source list has 2 pages, 3 are needed"),
        ({"first_token": -4}, "not a range"),
        ({"num_tokens": -1}, "not a range"),
        ({"max_message": 0}, "max_message"),
        ({"src_rank": 1}, "src_rank 1"),
        ({"dst_rank": -1}, "dst_rank -1"),
        ({"replica_draw": -1}, "replica_draw"),
        ({"group": "window"}, "no kv group 'window'"),
        ({"src_pages": [0.5, 1]}, "integers"),
        ({"src_pages": [[1, 2], [3, 4]]}, "flat list"),
        ({"dst_layout": layout(dtype="bf16")}, "do not match: version 1, fp16 against version 1, bf16"),
        ({"dst_layout": layout(heads=4)}, "do not match: kv group 'full': kv_heads 2 at the source, 4 at the"),
        ({"dst_layout": layout(layers=4)}, "do not match: kv group 'full': layers 3 from 0 on at the source, 4 from 0"),
        ({"kept_pages": [0]}, "source list has 1 pages, 2 are needed"),
        ({"kept_pages": [0, 2]}, "source list has 2 pages, position 2 is kept"),
        ({"kept_pages": [1, 0]}, "kept pages must be ascending"),
        ({"kept_pages": [-1, 0]}, "kept pages must be ascending"),
        ({"kept_pages": [0, 0]}, "kept pages must be ascending"),
        ({"kept_pages": [[0], [1]]}, "kept pages must be a flat list"),
        ({"kept_pages": [0.0, 1.0]}, "kept pages must be a flat list"),
        ({"src_start": 2}, "source list starts at token 2, inside a page of 4"),
        ({"dst_start": -4}, "not a range|destination list starts at token -4"),
        ({"dst_start": 4, "first_token": 0, "num_tokens": 4}, "destination list starts at token 4, token 0 is wanted"),
        ({"src_start": 4}, "source list starts at token 4, token 0 is wanted"),
        ({"dst_start": 4}, "source list has 2 pages, 3 are needed"),
        # 8 tokens a page: the destination's two pages hold 16 tokens, the source's 8.
        ({"dst_layout": layout(page_size=8)}, "source list has 2 pages, 4 are needed"),
        ({"src_layout": layout(page_size=3), "num_tokens": 7}, "source list has 2 pages, 3 are needed"),
    ],
)
def test_refused_by_name(change, words):
    arguments = {
        "src_layout": layout(),
        "dst_layout": layout(),
        "src_pages": [1, 2],
        "dst_pages": [1, 2],
        **ok,
        **change,
    }
    with pytest.raises(InvalidArgument, match=words):
        plan(**arguments)


def test_an_expectation_that_no_plan_can_meet_is_refused():
    here = layout()
    for pages, more, words in (
        ([1, 1], {}, "destination page is named twice"),
        ([1, 12], {}, "destination page 12 is not in a pool of 12"),
        ([1], {"num_tokens": 5}, "destination list has 1 pages, 2 are needed"),
        ([1], {"dst_start": 2}, "destination list starts at token 2, inside a page"),
        ([1, 2], {"kept_pages": [3]}, "1 pages are kept, 2 are needed"),
        ([1], {"group": "window"}, "no kv group 'window'"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            expected_bytes(here, here, pages, **(ok | more))
    with pytest.raises(InvalidArgument, match="do not match"):
        expected_bytes(layout(heads=4), here, [1], **ok)


def test_layouts_too_large_for_an_offset_are_refused():
    """A peer's claim: int64 would wrap into some other page."""
    huge = KvLayout(1, "fp32", 1 << 16, (KvGroup("full", "full", (0, 1, 2), 2, 1 << 16),), 1 << 31)
    small = KvLayout(1, "fp32", 4, huge.groups, 4)
    for src, dst, name in ((huge, small, "source"), (small, huge, "destination")):
        with pytest.raises(InvalidArgument, match=f"^{name} layout: a region of"):
            plan(src, dst, [0], [0], group="full", num_tokens=1)
    with pytest.raises(InvalidArgument, match="a region of"):
        expected_bytes(small, huge, [0], group="full")


def test_a_plan_of_too_many_rows_is_refused_before_it_is_made():
    wide = layout(1 << 10, heads=1 << 16, page_size=2)
    narrow = dataclasses.replace(wide, page_size=3)
    pages = np.arange(1 << 10)
    with pytest.raises(TooLarge, match="rows"):
        plan(wide, narrow, pages, pages, group="full", num_tokens=1 << 10)
    with pytest.raises(TooLarge, match="rows"):
        plan(wide, wide, pages, pages, group="full", max_message=1)
    shards = layout(1 << 12, heads=1 << 11, tp=1 << 11)
    with pytest.raises(TooLarge, match="rows"):
        plan(shards, dataclasses.replace(shards, tp=1), range(1 << 12), range(1 << 12), group="full")
    with pytest.raises(TooLarge, match="rows"):
        plan(shards, shards, range(1 << 12)[::-1], range(1 << 12), group="full")
    # One merged row a rank.
    assert len(plan(shards, shards, range(1 << 12), range(1 << 12), group="full")) == 1 << 11
    # Counting needs no rows.
    assert expected_bytes(wide, narrow, pages, group="full").sum() == 3 * (1 << 10) * narrow.page_bytes("full")


def test_a_page_entered_in_the_middle_keeps_what_it_has():
    src, dst = layout(heads=2), layout(heads=2)
    size, line = src.page_bytes("full"), 4 * 2 * 2
    rows = plan(src, dst, [5, 6, 7], [1, 2, 3], group="full", first_token=3)
    # K and V of two heads, one token each; then the two whole pages.
    assert rows.length.tolist() == [line // 4] * 4 + [2 * size]
    assert rows.src_offset.tolist() == [5 * size + i * line + 3 * line // 4 for i in range(4)] + [6 * size]
    assert rows.dst_offset.tolist() == [1 * size + i * line + 3 * line // 4 for i in range(4)] + [2 * size]


def test_mla_merges_whatever_the_page_sizes():
    def mla(page_size, tp=1):
        return KvLayout(1, "bf16", page_size, (KvGroup("full", "mla", (0, 1), 1, 6),), 64, tp)

    rows = plan(mla(4), mla(16), range(8, 20), range(2, 5), group="full", first_token=5, num_tokens=40)
    assert (rows.src_offset.tolist(), rows.dst_offset.tolist(), rows.length.tolist()) == (
        [(8 * 4 + 5) * 12],
        [(2 * 16 + 5) * 12],
        [40 * 12],
    )
    # Every destination rank gets the full page, each of four from a source rank of its own.
    rows = plan(mla(4, 8), mla(4, 4), [3], [2], group="full", replica_draw=1)
    assert rows.src_rank.tolist() == [1, 3, 5, 7]
    assert rows.dst_rank.tolist() == [0, 1, 2, 3]
    assert rows.length.tolist() == [4 * 12] * 4


def test_unequal_page_sizes_are_logged_as_slow_once(caplog):
    planner._warn_slow.cache_clear()

    def told():
        return [record.args for record in caplog.records if record.name == "kvmesh.kv.planner"]

    with caplog.at_level(logging.WARNING, "kvmesh.kv.planner"):
        plan(layout(), layout(), [1], [1], group="full")
        assert not told()
        for _ in range(3):
            plan(layout(page_size=2), layout(), [1, 2], [1], group="full")
        assert told() == [(2, 4)]
        plan(layout(), layout(page_size=2), [1], [1, 2], group="full")
        assert len(told()) == 2


def test_compatible_leaves_tp_pages_and_page_size_free():
    here = layout()
    assert compatible(here, layout(num_pages=3, tp=2, page_size=16)) is None
    assert compatible(here, dataclasses.replace(here, groups=here.groups[::-1])) is None
    draft = here.groups[1]
    for there, words in (
        (layout(dtype="bf16"), "dtype is fp16 at the source, bf16 at the destination"),
        (layout(heads=4), "'full': kv_heads 2 at the source, 4"),
        (layout(layers=2), "'full': layers 3 from 0 on at the source, 2 from 0 on"),
        (dataclasses.replace(here, groups=here.groups[:1]), "'draft' is not at the destination"),
        (dataclasses.replace(here, groups=(here.groups[0], dataclasses.replace(draft, head_dim=9))), "head_dim 3"),
        (dataclasses.replace(here, groups=(here.groups[0], KvGroup("draft", "full", (4,), 4, 3))), "1 from 4 on"),
        (dataclasses.replace(here, groups=(here.groups[0], KvGroup("draft", "mla", (3,), 1, 3))), "kind full at"),
    ):
        assert words in compatible(here, there)
        assert compatible(there, here) is not None
    assert "'draft' is not at the source" in compatible(dataclasses.replace(here, groups=here.groups[:1]), here)
    # Equal fingerprints are compatible, and compatible layouts of one page size have equal fingerprints.
    assert here.fingerprint() != layout(page_size=16).fingerprint()


def test_an_empty_plan_has_no_rows():
    for pages, first in (([], 0), ([3], 4)):
        rows = plan(layout(), layout(), pages, pages, group="full", first_token=first)
        assert len(rows) == 0
        assert rows.nbytes == 0


@pytest.mark.parametrize(
    ("src", "dst", "more"),
    [
        pytest.param({"tp": 8}, {"tp": 8}, {"dst_rank": 3, "max_message": 24}, id="one rank, split"),
        pytest.param({"tp": 8}, {"tp": 8}, {}, id="equal tp"),
        pytest.param({"tp": 8}, {"tp": 1}, {}, id="finer source"),
        pytest.param({"tp": 1}, {"tp": 8}, {}, id="coarser source"),
        pytest.param({"tp": 16}, {"tp": 8}, {}, id="replicated source"),
        pytest.param({"tp": 4}, {"tp": 2}, {"first_token": 5}, id="start inside a page"),
        pytest.param({"tp": 8, "page_size": 2}, {"tp": 8}, {"dst_rank": 3, "num_tokens": 8192}, id="page sizes"),
    ],
)
def test_4096_pages_take_less_than_two_milliseconds(src, dst, more):
    """CPU time, best of many, scattered: the bound of the transfer path, with room for a slow machine."""
    here, there = (dataclasses.replace(layout(heads=8, **one), num_pages=1 << 16) for one in (src, dst))
    rng = np.random.default_rng(0)
    src_pages, dst_pages = (rng.permutation(1 << 16)[:4096].tolist() for _ in range(2))
    best = 1.0
    for _ in range(20):
        start = time.process_time()
        rows = plan(here, there, src_pages, dst_pages, group="full", **more)
        best = min(best, time.process_time() - start)
    assert len(rows) > 4000
    assert best < 2e-3, f"{best * 1e3:.2f} ms"
