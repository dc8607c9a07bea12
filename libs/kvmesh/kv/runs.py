"""Runs of bytes with an address on either side: neighbours merged, long ones split. Pure numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvmesh.errors import TooLarge

Column = npt.NDArray[np.int64]

# Of one plan: 40 bytes a row, so at most 160 MiB. A transfer is planned chunk by chunk; a million tokens of 8 heads in
# unequal pages of 16 tokens are 2^20 rows.
MAX_ROWS = 1 << 22


def check_rows(rows: int) -> None:
    """Raises TooLarge before that many rows are made."""
    if rows > MAX_ROWS:
        raise TooLarge(f"a transfer plan of {rows} rows, at most {MAX_ROWS}")


def merge_runs(src: Column, dst: Column, length: Column) -> tuple[Column, Column, Column]:
    """Neighbours in the list become one run where the second begins at the end of the first on both sides."""
    if len(length) < 2:
        return src, dst, length
    breaks = (src[1:] - src[:-1] != length[:-1]) | (dst[1:] - dst[:-1] != length[:-1])
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    if len(starts) == len(length):
        return src, dst, length
    return src[starts], dst[starts], np.add.reduceat(length, starts)


def split_runs(src: Column, dst: Column, length: Column, limit: int) -> tuple[Column, Column, Column, Column]:
    """(source run, src, dst, length) with no run longer than `limit` bytes: full pieces, then the rest.

    Raises TooLarge.
    """
    pieces = -(-length // limit)
    check_rows(int(pieces.sum()))
    row = np.repeat(np.arange(len(length)), pieces)
    ordinal = np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    skip = ordinal * limit
    return row, src[row] + skip, dst[row] + skip, np.minimum(length[row] - skip, limit)
