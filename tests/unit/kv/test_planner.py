"""The planner, by carrying its plans out on real bytes: every byte of every page once, nothing else touched."""

import dataclasses
import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvmesh.errors import InvalidArgument
from kvmesh.kv.layout import KvGroup, KvLayout, group_view
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


@settings(max_examples=300, deadline=None)
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


@settings(max_examples=100, deadline=None)
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
        ({"dst_layout": layout(dtype="bf16")}, "do not match"),
        ({"dst_layout": layout(heads=4)}, "do not match"),
        ({"dst_layout": layout(layers=4)}, "do not match"),
        ({"kept_pages": [0]}, "^not implemented: kept pages"),
        ({"first_token": 2}, "^not implemented: start inside a page"),
        ({"dst_layout": layout(page_size=8)}, "^not implemented: unequal page size"),
        ({"dst_layout": layout(tp=2)}, "^not implemented: unequal tp"),
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


def test_an_empty_plan_has_no_rows():
    for pages, first in (([], 0), ([3], 4)):
        rows = plan(layout(), layout(), pages, pages, group="full", first_token=first)
        assert len(rows) == 0
        assert rows.nbytes == 0


def test_4096_pages_take_less_than_two_milliseconds():
    """CPU time, best of many, scattered and split: the bound of the transfer path, with room for a slow machine."""
    big = dataclasses.replace(layout(heads=8, tp=8), num_pages=1 << 16)
    rng = np.random.default_rng(0)
    src, dst = (rng.permutation(1 << 16)[:4096].tolist() for _ in range(2))
    best = 1.0
    for _ in range(20):
        start = time.process_time()
        rows = plan(big, big, src, dst, group="full", dst_rank=3, max_message=24)
        best = min(best, time.process_time() - start)
    assert len(rows) > 4096
    assert best < 2e-3, f"{best * 1e3:.2f} ms"
