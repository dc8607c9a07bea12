"""Every sharding against every sharding and page size, on real bytes: each wanted byte once, nothing else.

By default each triple (heads, source tp, destination tp) meets a few of the page sizes, offsets and ends, all of them
being met by some triple; KVMESH_SOAK=1 runs the product of triples, page sizes and start offsets.
"""

import functools
import itertools
import os

import numpy as np
import pytest

from kvmesh.kv.planner import expected_bytes, plan
from planner_oracle import JUNK, carry_out, check, elements, heads_of, kv_layout, lay, valid_tps

SOAK = bool(os.environ.get("KVMESH_SOAK"))
SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 16]
TOKENS = 48
LIMITS = [None, None, 3, 8, 50, 10**6]
STARTS = {pair: list(range(max(pair) + 1)) for pair in itertools.product(SIZES, SIZES)}
CASES_A_TRIPLE = 12


def page_list(page_size, seed):
    """(pages, pool): runs and jumps, in a pool with pages that are in no list."""
    count = -(-TOKENS // page_size)
    rng = np.random.default_rng((page_size, seed))
    pages = np.arange(count) + 1
    cut = int(rng.integers(0, count + 1))
    pages = np.concatenate([pages[cut:], rng.permutation(pages[:cut])])
    return pages, count + 3


@functools.cache
def memory(kind, heads, tp, page_size, end):
    """One end's layout, page list, image and token numbers."""
    pages, pool = page_list(page_size, end)
    layout = kv_layout(heads, tp, page_size, pool, kind=kind)
    planes = layout.groups[0].planes
    # A token's elements are the same at both ends, however many tokens the page lists can hold.
    kv = elements(heads, 64, planes=planes)[:, :, : len(pages) * page_size]
    return layout, pages, *lay(kv, layout, pages)


def run(kind, heads, src_tp, dst_tp, src_size, dst_size, first, number):
    src, src_pages, source, _ = memory(kind, heads, src_tp, src_size, 0)
    dst, dst_pages, image, token = memory(kind, heads, dst_tp, dst_size, 1)
    # Ends: inside a page, at its end, and the same page as the start.
    last = min(first + 1 + (number * 7) % (TOKENS - 1), TOKENS)
    whole, limit = number % 3 != 0, LIMITS[number % len(LIMITS)]
    where = {"group": "g", "first_token": first, "num_tokens": last - first, "whole_pages": whole}
    rows = plan(src, dst, src_pages, dst_pages, **where, replica_draw=number, max_message=limit)
    target = np.full_like(image, JUNK)
    written = carry_out(rows, src, dst, source, target)
    end = -(-last // dst_size) * dst_size if whole and src_size == dst_size else last
    check(written, target, image, token, first, end)
    assert limit is None or rows.length.max() <= limit
    assert expected_bytes(src, dst, dst_pages, **where).tolist() == written.sum(axis=(1, 2)).tolist()

    # One replica for each shard of heads, and a pair's rows together.
    pairs = [(s, d) for s, d, _ in rows.pairs()]
    assert len(set(pairs)) == len(pairs)
    for rank in range(dst_tp):
        shards = {head * src_tp // heads // max(1, src_tp // heads) for head in heads_of(heads, dst_tp, rank)}
        assert len([s for s, d in pairs if d == rank]) == len(shards)
    assert sum(cut.stop - cut.start for _, _, cut in rows.pairs()) == len(rows)


def grid(kind, heads):
    """Cases for `run`: all of them, or an evenly chosen part that differs from triple to triple."""
    tps = valid_tps(heads)
    offsets = [(pair, first) for pair, starts in STARTS.items() for first in starts]
    number = heads
    for src_tp, dst_tp in itertools.product(tps, tps):
        if SOAK:
            chosen = offsets
        else:
            # A stride prime to the number of offsets: the triples together meet them all.
            chosen = [offsets[(number + i) * 211 % len(offsets)] for i in range(CASES_A_TRIPLE)]
        for (src_size, dst_size), first in chosen:
            yield kind, heads, src_tp, dst_tp, src_size, dst_size, first, number
            number += 1


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("heads", range(1, 17))
def test_every_sharding(heads):
    cases = 0
    for case in grid("full", heads):
        run(*case)
        cases += 1
    assert cases >= CASES_A_TRIPLE * len(valid_tps(heads)) ** 2
    memory.cache_clear()


@pytest.mark.timeout(3600)
def test_every_sharding_of_mla():
    for case in grid("mla", 1):
        run(*case)
    memory.cache_clear()


@pytest.mark.parametrize("kind", ["full", "mla"])
def test_the_small_grid_meets_every_page_size_pair_and_start(kind):
    met = {case[4:7] for heads in (range(1, 17) if kind == "full" else [1]) for case in grid(kind, heads)}
    wanted = {(*pair, first) for pair, starts in STARTS.items() for first in starts}
    assert met == wanted if kind == "full" else len(met) > len(wanted) // 2
