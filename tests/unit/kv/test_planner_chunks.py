"""Random shardings, page lists, kept lists, chunk boundaries and message limits, carried out chunk by chunk: what makes
counting bytes enough."""

import itertools
from dataclasses import dataclass

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvmesh.kv.layout import KvLayout
from kvmesh.kv.planner import expected_bytes, plan
from planner_oracle import JUNK, carry_out, check, elements, kv_layout, lay, valid_tps


@dataclass
class Case:
    src: KvLayout
    dst: KvLayout
    kv: np.ndarray
    tokens: int
    src_pages: list[int]
    dst_pages: list[int]
    draw: int
    limit: int | None


@st.composite
def page_lists(draw, count, pool):
    if draw(st.booleans()):
        start = draw(st.integers(0, pool - count))
        return list(range(start, start + count))
    return draw(st.permutations(range(pool)))[:count]


@st.composite
def cases(draw, equal_sizes=None):
    kind = draw(st.sampled_from(["full", "full", "mla"]))
    heads = 1 if kind == "mla" else draw(st.integers(1, 12))
    dim, layers = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    sizes = st.sampled_from([1, 2, 3, 4, 6, 8, 16])
    src_size = draw(sizes)
    dst_size = src_size if equal_sizes or (equal_sizes is None and draw(st.booleans())) else draw(sizes)
    tokens = draw(st.integers(1, 40))
    layouts, lists = [], []
    for size in (src_size, dst_size):
        count = -(-tokens // size)
        pool = count + draw(st.integers(0, 3))
        tp = draw(st.sampled_from(valid_tps(heads, 12)))
        layouts.append(kv_layout(heads, tp, size, pool, kind=kind, dim=dim, layers=layers))
        lists.append(draw(page_lists(count, pool)))
    # What lies behind the last token in a source's page is sent along with it: garbage to the reader, not to the count.
    room = max(len(lists[0]) * src_size, len(lists[1]) * dst_size)
    kv = elements(heads, room, planes=layouts[0].groups[0].planes, dim=dim)
    limit = draw(st.none() | st.sampled_from([1, 7, 64, 200, 10**6]))
    return Case(*layouts, kv, tokens, *lists, draw(st.integers(0, 10**9)), limit)


def image(case, layout, pages):
    return lay(case.kv[:, :, : len(pages) * layout.page_size], layout, pages)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.data())
def test_chunks_land_every_byte_once_in_any_order(case, data):
    """The whole lists with the chunk's tokens, or only the chunk's pages: the same bytes, however cut and split."""
    src, dst = case.src, case.dst
    first = data.draw(st.integers(0, case.tokens - 1), "first")
    end = data.draw(st.integers(first + 1, case.tokens), "end")
    equal = src.page_size == dst.page_size
    whole = data.draw(st.booleans(), "whole") if equal else True
    inner = [t for t in range(first + 1, end) if not (equal and whole) or t % src.page_size == 0]
    cuts = sorted(data.draw(st.sets(st.sampled_from(inner), max_size=5))) if inner else []
    chunks = data.draw(st.permutations(list(itertools.pairwise([first, *cuts, end]))))

    source, _ = image(case, src, case.src_pages)
    right, token = image(case, dst, case.dst_pages)
    target, written, total = np.full_like(right, JUNK), None, 0
    for a, b in chunks:
        skip, drop = a // src.page_size, a // dst.page_size
        if not data.draw(st.booleans(), "trimmed"):
            skip = drop = 0
        rows = plan(
            src,
            dst,
            case.src_pages[skip:],
            case.dst_pages[drop:],
            group="g",
            first_token=a,
            num_tokens=b - a,
            src_start=skip * src.page_size,
            dst_start=drop * dst.page_size,
            replica_draw=case.draw,
            max_message=case.limit,
            whole_pages=whole,
        )
        written = carry_out(rows, src, dst, source, target, written)
        total += rows.nbytes * src.num_layers
    last = -(-end // dst.page_size) * dst.page_size if equal and whole else end
    check(written, target, right, token, first, last)
    expectation = expected_bytes(
        src, dst, case.dst_pages, group="g", first_token=first, num_tokens=end - first, whole_pages=whole
    )
    assert expectation.tolist() == written.sum(axis=(1, 2)).tolist()
    assert total == expectation.sum()
    # The destination may name only what it lacks.
    held = first // dst.page_size
    only = expected_bytes(
        src,
        dst,
        case.dst_pages[held:],
        group="g",
        first_token=first,
        num_tokens=end - first,
        dst_start=held * dst.page_size,
        whole_pages=whole,
    )
    assert only.tolist() == expectation.tolist()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.data())
def test_kept_pages_arrive_compacted(case, data):
    src, dst = case.src, case.dst
    kept = sorted(data.draw(st.sets(st.integers(0, len(case.src_pages) - 1)), "kept"))
    # The tokens that a kept list holds, in order, are the sequence that moves.
    tokens = [page * src.page_size + slot for page in kept for slot in range(src.page_size)]
    room = min(len(tokens), len(case.dst_pages) * dst.page_size)
    first = data.draw(st.integers(0, room), "first")
    end = data.draw(st.integers(first, room), "end")
    source, _ = image(case, src, case.src_pages)
    dst_pages = case.dst_pages[: dst.pages_for(len(tokens))]
    sparse = np.zeros_like(case.kv, shape=(*case.kv.shape[:2], len(dst_pages) * dst.page_size, case.kv.shape[3]))
    sparse[:, :, : len(tokens)] = case.kv[:, :, tokens][:, :, : sparse.shape[2]]
    right, token = lay(sparse, dst, dst_pages)
    target = np.full_like(right, JUNK)
    where = {"group": "g", "first_token": first, "num_tokens": end - first, "kept_pages": kept}
    rows = plan(src, dst, case.src_pages, dst_pages, **where, max_message=case.limit, replica_draw=case.draw)
    written = carry_out(rows, src, dst, source, target)
    equal = src.page_size == dst.page_size
    last = -(-end // dst.page_size) * dst.page_size if equal and end > first else end
    check(written, target, right, token, first, last)
    assert expected_bytes(src, dst, dst_pages, **where).tolist() == written.sum(axis=(1, 2)).tolist()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.data())
def test_the_views_of_all_ranks_make_the_whole(case, data):
    first = data.draw(st.integers(0, case.tokens - 1))
    where = {"group": "g", "first_token": first, "num_tokens": case.tokens - first}
    where |= {"replica_draw": case.draw, "max_message": case.limit}

    def rows(**filters):
        one = plan(case.src, case.dst, case.src_pages, case.dst_pages, **where, **filters)
        columns = (one.dst_rank, one.src_rank, one.src_offset, one.dst_offset, one.length)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    whole = rows()
    assert [row[:2] for row in whole] == sorted(row[:2] for row in whole)
    by_dst = [row for rank in range(case.dst.tp) for row in rows(dst_rank=rank)]
    by_src = [row for rank in range(case.src.tp) for row in rows(src_rank=rank)]
    assert by_dst == whole
    assert sorted(by_src) == sorted(whole)
    assert all(row[1] == rank for rank in range(case.src.tp) for row in rows(src_rank=rank))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(equal_sizes=True))
def test_whole_pages_never_cost_more_than_a_run_per_page_and_pair(case):
    rows = plan(case.src, case.dst, case.src_pages, case.dst_pages, group="g", replica_draw=case.draw)
    for _, _, cut in rows.pairs():
        assert cut.stop - cut.start <= len(case.dst_pages)
