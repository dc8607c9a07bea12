"""Token ranges over page lists: what is wanted, which pages it needs, and where a page of either side cuts it.

Tokens are numbered in the sequence (of a group with kept pages: in what is kept). A list that starts at token s has
tokens [s + i * page_size, s + (i + 1) * page_size) in its page i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvmesh.errors import InvalidArgument

Pages = Sequence[int] | npt.NDArray[np.integer]
Column = npt.NDArray[np.int64]


class Span(NamedTuple):
    """Tokens [first, end)."""

    first: int
    end: int


class PageList(NamedTuple):
    """One side's pages. name: for errors. start: the token at which the list starts. num_pages: of its pool."""

    name: str
    pages: Pages
    start: int
    page_size: int
    num_pages: int


def wanted_span(
    source_page_size: int, target: PageList, first_token: int | None, num_tokens: int | None, whole_pages: bool
) -> Span:
    """The tokens that move. None: from the start of the destination's list, to its end. Raises InvalidArgument."""
    size = target.page_size
    first = target.start if first_token is None else first_token
    if first < 0 or (num_tokens is not None and num_tokens < 0):
        raise InvalidArgument(f"tokens [{first}, +{num_tokens}) are not a range")
    if num_tokens is None:
        end = max(first, target.start + len(target.pages) * size)
    else:
        end = first + num_tokens
    if whole_pages and source_page_size == size and end > first:
        # One run a page and not one per head, K and V: cheaper than the bytes that it saves.
        end = -(-end // size) * size
    return Span(first, end)


def pages_of(side: PageList, span: Span) -> Column:
    """The pages that hold the span, checked. Raises InvalidArgument."""
    size = side.page_size
    if side.start < 0 or side.start % size:
        raise InvalidArgument(f"{side.name} list starts at token {side.start}, inside a page of {size}")
    if span.first < side.start:
        raise InvalidArgument(f"{side.name} list starts at token {side.start}, token {span.first} is wanted")
    first = (span.first - side.start) // size
    end = -(-(span.end - side.start) // size) if span.end > span.first else first
    if len(side.pages) < end:
        raise InvalidArgument(f"{side.name} list has {len(side.pages)} pages, {end} are needed")
    column = np.asarray(side.pages)
    if column.size and (column.ndim != 1 or column.dtype.kind not in "iu"):
        raise InvalidArgument(f"{side.name} pages must be a flat list of integers")
    column = column[first:end]
    if end > first and (int(column.min()) < 0 or int(column.max()) >= side.num_pages):
        bad = column[(column < 0) | (column >= side.num_pages)][0]
        raise InvalidArgument(f"{side.name} page {bad} is not in a pool of {side.num_pages}")
    return column.astype(np.int64, copy=False)


def check_distinct(name: str, pages: Column) -> None:
    """Raises InvalidArgument where a page is in the list twice."""
    if not np.diff(np.sort(pages)).all():
        raise InvalidArgument(f"a {name} page is named twice")


def keep_pages(side: PageList, kept: Pages) -> PageList:
    """The list reduced to the kept positions, compacted. Raises InvalidArgument."""
    positions = np.asarray(kept)
    if positions.size == 0:
        return side._replace(pages=np.zeros(0, dtype=np.int64))
    if positions.ndim != 1 or positions.dtype.kind not in "iu":
        raise InvalidArgument("kept pages must be a flat list of integers")
    positions = positions.astype(np.int64)
    if int(positions[0]) < 0 or not (np.diff(positions) > 0).all():
        raise InvalidArgument("kept pages must be ascending and distinct positions")
    if int(positions[-1]) >= len(side.pages):
        raise InvalidArgument(f"{side.name} list has {len(side.pages)} pages, position {positions[-1]} is kept")
    return side._replace(pages=np.asarray(side.pages)[positions])


def cut_at_pages(span: Span, one: int, other: int) -> tuple[Column, Column]:
    """(first token, tokens) of the pieces into which the ends of pages of either size cut the span."""
    if span.end <= span.first:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    step, coarse = min(one, other), max(one, other)
    starts = np.arange(span.first // step * step, span.end, step, dtype=np.int64)
    if coarse % step:
        starts = np.union1d(starts, np.arange(span.first // coarse * coarse, span.end, coarse, dtype=np.int64))
        starts = starts[max(0, int(np.searchsorted(starts, span.first, side="right")) - 1) :]
    starts[0] = span.first
    return starts, np.diff(starts, append=span.end)
