"""Which rank holds which KV heads, and which source rank feeds which destination rank. Integers only.

With tp <= kv_heads rank r holds kv_heads / tp heads from r * kv_heads / tp on. With tp > kv_heads a head has
tp / kv_heads replicas: rank r holds head r // (tp / kv_heads) alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvmesh.errors import InvalidArgument

Column = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Feeds:
    """Who sends which heads to whom: one row per (src_rank, dst_rank) pair that exchanges any; equal lengths, int64.

    The pair moves `heads` heads, from head src_head of the source rank's own on to head dst_head of the destination
    rank's. Ordered by (dst_rank, src_rank). Every head of every destination rank is in exactly one row.
    """

    src_rank: Column
    dst_rank: Column
    src_head: Column
    dst_head: Column
    heads: Column

    def __len__(self) -> int:
        return len(self.heads)

    def only(self, src_rank: int | None, dst_rank: int | None) -> Feeds:
        """The rows of one source rank, of one destination rank, or of both."""
        if src_rank is None and dst_rank is None:
            return self
        chosen = np.ones(len(self), dtype=bool)
        if src_rank is not None:
            chosen &= self.src_rank == src_rank
        if dst_rank is not None:
            chosen &= self.dst_rank == dst_rank
        return Feeds(
            self.src_rank[chosen],
            self.dst_rank[chosen],
            self.src_head[chosen],
            self.dst_head[chosen],
            self.heads[chosen],
        )


def check_sharding(name: str, kv_heads: int, tp: int) -> None:
    """Raises InvalidArgument, beginning with `name`, unless one of kv_heads and tp divides the other."""
    if kv_heads < 1 or tp < 1 or (kv_heads % tp and tp % kv_heads):
        raise InvalidArgument(f"{name}: tp {tp} neither divides kv_heads {kv_heads} nor is a multiple")


def feeds_between(kv_heads: int, src_tp: int, dst_tp: int, replica_draw: int = 0) -> Feeds:
    """Feeds from src_tp ranks to dst_tp ranks of a group with kv_heads heads; its columns are read-only.

    A head with several source replicas is spread over them: no replica feeds more than one destination rank more than
    another does. Where that leaves a choice, replica_draw makes it, and as many successive draws as there are replicas
    load each the same. Where it leaves none (as many destinations as replicas, or a multiple) the draw has no effect,
    so that with equal tp rank r feeds rank r: in a rail network, each NIC its own rail.
    Raises InvalidArgument: a sharding that cannot be.
    """
    check_sharding("source", kv_heads, src_tp)
    check_sharding("destination", kv_heads, dst_tp)
    return _feeds(kv_heads, src_tp, dst_tp, replica_draw % max(1, src_tp // kv_heads))


@lru_cache(maxsize=256)
def _feeds(kv_heads: int, src_tp: int, dst_tp: int, draw: int) -> Feeds:
    src_replicas, src_heads = max(1, src_tp // kv_heads), max(1, kv_heads // src_tp)
    dst_replicas, dst_heads = max(1, dst_tp // kv_heads), max(1, kv_heads // dst_tp)
    # Between two neighbouring edges lies a range of heads that one shard of either side holds.
    starts = np.union1d(np.arange(0, kv_heads, src_heads), np.arange(0, kv_heads, dst_heads)).astype(np.int64)
    heads = np.diff(starts, append=kv_heads)
    src_shard, src_head = np.divmod(starts, src_heads)
    dst_shard, dst_head = np.divmod(starts, dst_heads)
    # Evenly over the replicas, then turned.
    turn = draw if dst_replicas % src_replicas else 0
    replica = (np.arange(dst_replicas) * src_replicas // dst_replicas + turn) % src_replicas
    feeds = Feeds(
        src_rank=(src_shard[:, None] * src_replicas + replica).ravel(),
        dst_rank=(dst_shard[:, None] * dst_replicas + np.arange(dst_replicas)).ravel(),
        src_head=np.repeat(src_head, dst_replicas),
        dst_head=np.repeat(dst_head, dst_replicas),
        heads=np.repeat(heads, dst_replicas),
    )
    for column in (feeds.src_rank, feeds.dst_rank, feeds.src_head, feeds.dst_head, feeds.heads):
        column.setflags(write=False)
    return feeds
