"""The transfer planner: which bytes of a source's regions go where in a destination's, as plain numpy columns.

Pure, and the only place that knows: the sender posts its rows, the receiver counts its bytes from the same code.
A page holds lines of `page_size` tokens, one per head and plane (`KvGroup.planes`). So a whole page's range of heads is
one run, while a part of its tokens is one run per line; a page of a single line (mla) is a run either way.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvmesh.errors import InvalidArgument
from kvmesh.kv.layout import KvGroup, KvLayout, group_mismatch
from kvmesh.kv.runs import check_rows, merge_runs, split_runs
from kvmesh.kv.sharding import Feeds, feeds_between
from kvmesh.kv.spans import PageList, Pages, Span, check_distinct, cut_at_pages, keep_pages, pages_of, wanted_span

log = logging.getLogger(__name__)

Column = npt.NDArray[np.int64]

# Offsets are int64; a peer's layout may claim more.
_MAX_REGION_BYTES = 1 << 62


@dataclass(frozen=True, slots=True, eq=False)
class TransferPlan:
    """Copies for ONE layer of a group, one row each; equal lengths, int64.

    src_offset and dst_offset are bytes from the start of the rank's region of that group, for layer_index 0; layer i
    adds i * layer_stride of the respective layout. Rows are ordered by (dst_rank, src_rank) and,
    but for pages of which a part is written, by position in the page list.
    """

    src_rank: Column
    src_offset: Column
    dst_rank: Column
    dst_offset: Column
    length: Column

    def __len__(self) -> int:
        return len(self.length)

    @property
    def nbytes(self) -> int:
        """Bytes of one layer over all ranks of the plan."""
        return int(self.length.sum())

    def pairs(self) -> Iterator[tuple[int, int, slice]]:
        """(src_rank, dst_rank, its rows) of each pair of ranks, in row order."""
        if not len(self):
            return
        cuts = np.flatnonzero(np.diff(self.src_rank) | np.diff(self.dst_rank)) + 1
        for start, end in zip([0, *cuts.tolist()], [*cuts.tolist(), len(self)], strict=True):
            yield int(self.src_rank[start]), int(self.dst_rank[start]), slice(start, end)


def plan(
    src_layout: KvLayout,
    dst_layout: KvLayout,
    src_pages: Pages,
    dst_pages: Pages,
    *,
    group: KvGroup | str,
    first_token: int | None = None,
    num_tokens: int | None = None,
    src_start: int = 0,
    dst_start: int = 0,
    src_rank: int | None = None,
    dst_rank: int | None = None,
    kept_pages: Pages | None = None,
    replica_draw: int = 0,
    max_message: int | None = None,
    whole_pages: bool = True,
) -> TransferPlan:
    """Plan the copy of tokens [first_token, first_token + num_tokens) of a group.

    src_start, dst_start: the token at which that page list starts, at a page's start. Tokens are numbered in the
    sequence, so first_token may lie inside a page of either side. first_token None: from dst_start; num_tokens None: to
    the end of `dst_pages`. What the lists have beyond the tokens is ignored.
    whole_pages: where page sizes are equal the last page is written whole, so chunks of one transfer are to be cut at
    page ends. False, or unequal page sizes: exactly the tokens. A page is always written from first_token on only.

    src_rank, dst_rank: only that rank's rows. kept_pages: ascending positions in `src_pages`; the list is compacted to
    them first, and tokens are numbered in what is kept (sparse groups). replica_draw: see `feeds_between`; all writers
    of a transfer must use the same (its slot and generation will do). max_message: no row is longer (bytes).

    Neighbours on both sides are merged into one row before the split. About 0.2 ms for 4096 pages on one pair of ranks;
    unequal page sizes cost a row per head, plane and piece of a page, in the plan and on the wire.
    Raises InvalidArgument: lists too short, a page out of range, a destination page named twice, layouts that do not
    match; TooLarge: more than `MAX_ROWS` rows.
    """
    source, target = _pair(src_layout, dst_layout, group)
    if replica_draw < 0:
        raise InvalidArgument(f"replica_draw must not be negative, got {replica_draw}")
    if max_message is not None and max_message < 1:
        raise InvalidArgument(f"max_message must be at least 1 byte, got {max_message}")
    for name, rank, layout in (("src_rank", src_rank, src_layout), ("dst_rank", dst_rank, dst_layout)):
        if rank is not None and not 0 <= rank < layout.tp:
            raise InvalidArgument(f"{name} {rank} is not one of {layout.tp} ranks")

    sending = PageList("source", src_pages, src_start, src_layout.page_size, src_layout.num_pages)
    receiving = PageList("destination", dst_pages, dst_start, dst_layout.page_size, dst_layout.num_pages)
    if kept_pages is not None:
        sending = keep_pages(sending, kept_pages)
    span = wanted_span(sending.page_size, receiving, first_token, num_tokens, whole_pages)
    src, dst = pages_of(sending, span), pages_of(receiving, span)
    check_distinct("destination", dst)
    feeds = feeds_between(target.kv_heads, src_layout.tp, dst_layout.tp, replica_draw).only(src_rank, dst_rank)
    starts, tokens = cut_at_pages(span, sending.page_size, receiving.page_size)
    if not len(starts) or not len(feeds):
        empty = np.zeros(0, dtype=np.int64)
        return TransferPlan(empty, empty, empty, empty, empty)
    if sending.page_size != receiving.page_size:
        _warn_slow(sending.page_size, receiving.page_size)

    token_bytes = target.head_dim * dst_layout.itemsize
    here = _Side(src_layout, source, token_bytes)
    there = _Side(dst_layout, target, token_bytes)
    rows = _rows(here, there, feeds, here.addresses(src, span, starts), there.addresses(dst, span, starts), tokens)
    feed, src_offset, dst_offset, length = rows
    if max_message is not None and int(length.max()) > max_message:
        row, src_offset, dst_offset, length = split_runs(src_offset, dst_offset, length, max_message)
        feed = feed[row]
    return TransferPlan(feeds.src_rank[feed], src_offset, feeds.dst_rank[feed], dst_offset, length)


def expected_bytes(
    src_layout: KvLayout,
    dst_layout: KvLayout,
    dst_pages: Pages,
    *,
    group: KvGroup | str,
    first_token: int | None = None,
    num_tokens: int | None = None,
    dst_start: int = 0,
    kept_pages: Pages | None = None,
    whole_pages: bool = True,
) -> Column:
    """Bytes that each destination rank will receive for the group, ALL its layers: int64 (dst tp,).

    From the span and the feeds that the plan is made of, over any source pages: where they lie does not change how many
    bytes arrive. Where page sizes are equal nothing else of the source does either. Raises InvalidArgument as `plan`.
    """
    _, target = _pair(src_layout, dst_layout, group)
    receiving = PageList("destination", dst_pages, dst_start, dst_layout.page_size, dst_layout.num_pages)
    span = wanted_span(src_layout.page_size, receiving, first_token, num_tokens, whole_pages)
    check_distinct("destination", pages_of(receiving, span))
    if kept_pages is not None and span.end > len(kept_pages) * src_layout.page_size:
        raise InvalidArgument(f"{len(kept_pages)} pages are kept, {src_layout.pages_for(span.end)} are needed")
    feeds = feeds_between(target.kv_heads, src_layout.tp, dst_layout.tp)
    heads: Column = np.zeros(dst_layout.tp, dtype=np.int64)
    np.add.at(heads, feeds.dst_rank, feeds.heads)
    line_bytes = (span.end - span.first) * target.head_dim * dst_layout.itemsize
    return heads * (target.planes * line_bytes * target.num_layers)


class _Side(NamedTuple):
    layout: KvLayout
    group: KvGroup
    token_bytes: int

    @property
    def heads(self) -> int:
        return self.layout.heads_per_rank(self.group)

    @property
    def line_bytes(self) -> int:
        return self.layout.page_size * self.token_bytes

    @property
    def page_bytes(self) -> int:
        return self.layout.page_bytes(self.group)

    def addresses(self, pages: Column, span: Span, starts: Column) -> Column:
        """Where each piece begins in its page's first line. pages: those of the span."""
        size = self.layout.page_size
        index = starts // size
        return pages[index - span.first // size] * self.page_bytes + (starts - index * size) * self.token_bytes


class _Rows(NamedTuple):
    """feed: index into the feeds."""

    feed: Column
    src: Column
    dst: Column
    length: Column


def _rows(here: _Side, there: _Side, feeds: Feeds, src: Column, dst: Column, tokens: Column) -> _Rows:
    """The runs of every feed, in the order of the feeds. In one, whole pages come after parts of pages."""
    planes = there.group.planes
    if planes * here.heads == planes * there.heads == 1:
        return _spread(feeds, *merge_runs(src, dst, tokens * there.token_bytes))
    size = there.layout.page_size
    whole = tokens == size if here.layout.page_size == size else np.zeros(len(tokens), dtype=bool)
    if whole.all():
        return _whole_pages(here, there, feeds, src, dst)
    blocks = [_part_pages(here, there, feeds, src[~whole], dst[~whole], tokens[~whole])]
    if whole.any():
        blocks.append(_whole_pages(here, there, feeds, src[whole], dst[whole]))
    return _in_order(blocks)


def _spread(feeds: Feeds, src: Column, dst: Column, length: Column) -> _Rows:
    """The same runs for each feed: its ranks hold the same heads."""
    check_rows(len(feeds) * len(length))
    count = len(feeds)
    feed = np.repeat(np.arange(count), len(length))
    return _Rows(feed, np.tile(src, count), np.tile(dst, count), np.tile(length, count))


def _whole_pages(here: _Side, there: _Side, feeds: Feeds, src: Column, dst: Column) -> _Rows:
    if here.heads == there.heads:
        return _spread(feeds, *merge_runs(src, dst, np.full(len(src), there.page_bytes)))
    check_rows(len(feeds) * len(src))
    head_bytes = there.group.planes * there.line_bytes
    return _Rows(
        np.repeat(np.arange(len(feeds)), len(src)),
        (feeds.src_head[:, None] * head_bytes + src).ravel(),
        (feeds.dst_head[:, None] * head_bytes + dst).ravel(),
        np.repeat(feeds.heads * head_bytes, len(src)),
    )


def _part_pages(here: _Side, there: _Side, feeds: Feeds, src: Column, dst: Column, tokens: Column) -> _Rows:
    """Pieces of pages: a run per line of the feed."""
    planes = there.group.planes
    check_rows(int(feeds.heads.sum()) * planes * len(tokens))
    blocks = []
    for heads in np.unique(feeds.heads):
        chosen = np.flatnonzero(feeds.heads == heads)
        lines = np.arange(int(heads) * planes)
        src_line = (feeds.src_head[chosen, None] * planes + lines) * here.line_bytes
        dst_line = (feeds.dst_head[chosen, None] * planes + lines) * there.line_bytes
        blocks.append(
            _Rows(
                np.repeat(chosen, len(tokens) * len(lines)),
                (src_line[:, None] + src[:, None]).ravel(),
                (dst_line[:, None] + dst[:, None]).ravel(),
                np.tile(np.repeat(tokens * there.token_bytes, len(lines)), len(chosen)),
            )
        )
    return _in_order(blocks)


def _in_order(blocks: list[_Rows]) -> _Rows:
    """All blocks, the rows of a feed together."""
    if len(blocks) == 1:
        return blocks[0]
    columns = [np.concatenate([getattr(block, name) for block in blocks]) for name in _Rows._fields]
    order = np.argsort(columns[0], kind="stable")
    return _Rows(*(column[order] for column in columns))


def _pair(src_layout: KvLayout, dst_layout: KvLayout, group: KvGroup | str) -> tuple[KvGroup, KvGroup]:
    """The group at either side. Raises InvalidArgument where they do not match."""
    name = group if isinstance(group, str) else group.name
    source, target = src_layout.group(name), dst_layout.group(name)
    reason = group_mismatch(source, target)
    if (src_layout.version, src_layout.dtype) != (dst_layout.version, dst_layout.dtype):
        reason = (
            f"version {src_layout.version}, {src_layout.dtype} against version {dst_layout.version}, {dst_layout.dtype}"
        )
    if src_layout.kv_scales != dst_layout.kv_scales:
        reason = f"kv_scales {src_layout.kv_scales} against {dst_layout.kv_scales}"
    if reason is not None:
        raise InvalidArgument(f"kv layouts do not match: {reason}")
    for side, layout in (("source", src_layout), ("destination", dst_layout)):
        if layout.region_bytes(name) > _MAX_REGION_BYTES:
            raise InvalidArgument(f"{side} layout: a region of {layout.region_bytes(name)} bytes of group {name!r}")
    return source, target


@lru_cache(maxsize=64)
def _warn_slow(src_page_size: int, dst_page_size: int) -> None:
    """Once for each pair of sizes, and not for ever more of them."""
    log.warning(
        "kv pages of %d tokens go into pages of %d: a write per head and piece of a page instead of one per page, "
        "which is slow; give both engines one page size",
        src_page_size,
        dst_page_size,
    )
