"""Head ownership: each head of each destination rank has one feeder, and replicas share the work."""

import numpy as np
import pytest

from kvmesh.errors import InvalidArgument
from kvmesh.kv.layout import KvGroup, KvLayout
from kvmesh.kv.sharding import feeds_between
from planner_oracle import heads_of, kv_layout, valid_tps

PAIRS = [(h, s, d) for h in range(1, 17) for s in valid_tps(h) for d in valid_tps(h)]


def test_each_head_of_each_destination_rank_has_one_feeder():
    for heads, src_tp, dst_tp in PAIRS:
        for draw in range(max(1, src_tp // heads)):
            feeds = feeds_between(heads, src_tp, dst_tp, draw)
            fed = []
            for src, dst, src_head, dst_head, count in zip(
                feeds.src_rank, feeds.dst_rank, feeds.src_head, feeds.dst_head, feeds.heads, strict=True
            ):
                mine, theirs = heads_of(heads, src_tp, src), heads_of(heads, dst_tp, dst)
                assert list(mine[src_head : src_head + count]) == list(theirs[dst_head : dst_head + count])
                fed += [(int(dst), int(head)) for head in theirs[dst_head : dst_head + count]]
            assert sorted(fed) == [(dst, head) for dst in range(dst_tp) for head in heads_of(heads, dst_tp, dst)]
            # One row a pair, in order: what a sender's queue pairs are made of.
            pairs = list(zip(feeds.dst_rank.tolist(), feeds.src_rank.tolist(), strict=True))
            assert pairs == sorted(set(pairs))


def test_replicas_share_the_load():
    for heads, src_tp, dst_tp in PAIRS:
        replicas = src_tp // heads
        if replicas <= 1:
            continue
        total = np.zeros(src_tp, dtype=int)
        for draw in range(replicas):
            feeds = feeds_between(heads, src_tp, dst_tp, draw)
            load = np.bincount(feeds.src_rank, weights=feeds.heads, minlength=src_tp).astype(int)
            total += load
            for head in range(heads):
                mine = load[head * replicas : (head + 1) * replicas]
                assert mine.max() - mine.min() <= 1
            # As few idle ranks as there can be.
            assert (load > 0).sum() == heads * min(replicas, max(1, dst_tp // heads))
        assert total.min() == total.max() > 0
        assert (
            feeds_between(heads, src_tp, dst_tp, replicas + 1).src_rank
            == feeds_between(heads, src_tp, dst_tp, 1).src_rank
        ).all()


def test_equal_tp_keeps_each_rank_to_itself_whatever_the_draw():
    for heads, tp in {(h, s) for h, s, _ in PAIRS}:
        for draw in (0, 1, 5):
            feeds = feeds_between(heads, tp, tp, draw)
            assert feeds.src_rank.tolist() == feeds.dst_rank.tolist() == list(range(tp))
            assert not feeds.src_head.any()
            assert not feeds.dst_head.any()


def test_destinations_of_a_replicated_head_draw_different_replicas():
    assert feeds_between(1, 8, 2).src_rank.tolist() == [0, 4]
    assert feeds_between(1, 8, 2, 3).src_rank.tolist() == [3, 7]
    assert feeds_between(2, 4, 2, 1).src_rank.tolist() == [1, 3]
    assert feeds_between(1, 2, 3, 0).src_rank.tolist() == [0, 0, 1]
    assert feeds_between(1, 2, 3, 1).src_rank.tolist() == [1, 1, 0]
    assert feeds_between(2, 2, 8).src_rank.tolist() == [0] * 4 + [1] * 4


def test_shardings_that_do_not_nest_meet_at_every_edge():
    feeds = feeds_between(12, 3, 2)
    assert feeds.src_rank.tolist() == [0, 1, 1, 2]
    assert feeds.dst_rank.tolist() == [0, 0, 1, 1]
    assert feeds.src_head.tolist() == [0, 0, 2, 0]
    assert feeds.dst_head.tolist() == [0, 4, 0, 2]
    assert feeds.heads.tolist() == [4, 2, 2, 4]


def test_shardings_that_cannot_be_are_refused_on_either_side():
    refused = 0
    for heads in range(1, 17):
        for tp in set(range(1, 17)) - set(valid_tps(heads)):
            refused += 1
            words = f"tp {tp} neither divides kv_heads {heads} nor is a multiple"
            with pytest.raises(InvalidArgument, match=f"^source: {words}"):
                feeds_between(heads, tp, 1)
            with pytest.raises(InvalidArgument, match=f"^destination: {words}"):
                feeds_between(heads, 1, tp)
            with pytest.raises(InvalidArgument, match=f"^kv group 'g': {words}"):
                kv_layout(heads, tp, 4, 1)
    assert refused == 256 - len({(h, s) for h, s, _ in PAIRS})
    with pytest.raises(InvalidArgument):
        feeds_between(4, 0, 1)


def test_mla_is_on_every_rank():
    for tp in range(1, 17):
        layout = kv_layout(1, tp, 8, 3, kind="mla", dim=5)
        assert layout.page_shape("g") == (8, 5)
        assert layout.page_bytes("g") == 8 * 5 * 2
        assert layout.region_bytes("g") == 3 * 8 * 5 * 2
        assert KvLayout.from_dict(layout.to_dict()) == layout
    assert KvGroup("g", "mla", (0,), 1, 5).planes == 1
    assert KvGroup("g", "full", (0,), 1, 5).planes == 2
    assert kv_layout(1, 1, 8, 3, kind="mla", dim=5).fingerprint() != kv_layout(1, 1, 8, 3, dim=5).fingerprint()
    with pytest.raises(InvalidArgument, match="'g': kind mla has one kv head, got 2"):
        kv_layout(2, 1, 8, 3, kind="mla")


def test_cached_feeds_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        feeds_between(4, 2, 2).src_rank[0] = 1
