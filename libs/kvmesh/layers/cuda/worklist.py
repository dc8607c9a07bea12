"""Who reads which tokens in one step's decode attention: an even share for every worker, cut on the host.

A worker is one block per KV head of a fixed grid, so that a captured graph serves every step of its batch bucket. The
rows' tokens, in grains of 16, are laid end to end and cut into equal shares; a share may hold the end of one row, whole
rows and the start of another. Each piece of a row in one share is a segment. A row of several segments is merged on the
device by the block that ends last.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

GRAIN = 16  # tokens: no page is smaller, so a segment starts at a whole number of grains of a page
COLUMNS = 5  # row, first token, end token, split, splits of the row
# A share is at least so many tokens: below it a further split costs more in the merge than it saves in reading.
MIN_SHARE = 64
# What a row costs beside its tokens (filling the pipeline again), in grains.
ROW_GRAINS = 1

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class WorkPlan:
    """The shape of a bucket's work list: what the grid and the buffers are sized by.

    rows: of the bucket. workers: blocks per KV head. grain: segments start at multiples of so many tokens.

    The list is one int32 array of `words`: first the workers + 1 bounds of the workers' segments, then COLUMNS columns
    of `workers` entries, each worker's first segment once more, which saves a block a dependent read at its start, then
    COLUMNS columns of `segments` entries.
    """

    rows: int
    workers: int
    grain: int = GRAIN

    @property
    def segments(self) -> int:
        """The most that a step can have: each row is one, and each inner bound of the shares cuts one more."""
        return self.rows + self.workers - 1

    @property
    def words(self) -> int:
        return self.workers + 1 + COLUMNS * (self.workers + self.segments)

    def fill(self, lengths: Ints, out: Ints) -> int:
        """Writes the list for these rows' lengths (tokens, this step's included; 0: no work) into `out` (words,).

        Returns the number of segments. lengths may be shorter than `rows`. Entries behind the last segment are left as
        they are: no worker's bounds include them.
        """
        if len(lengths) > self.rows or out.shape != (self.words,):
            raise ValueError(
                f"{len(lengths)} rows, {out.shape} words: the plan has {self.rows} rows, {self.words} words"
            )
        grains = (lengths + (self.grain - 1)) // self.grain
        cost = np.where(grains > 0, grains + ROW_GRAINS, 0)
        ends = cost.cumsum(dtype=np.int64)
        total = int(ends[-1]) if len(ends) else 0
        bounds = out[: self.workers + 1]
        if total == 0:
            bounds[:] = 0
            return 0
        used = max(1, min(self.workers, total // max(1, MIN_SHARE // self.grain)))
        cuts = np.arange(used + 1) * total // used
        # A cut inside a row is at least one grain behind the row's own cost and one before its end.
        row = ends.searchsorted(cuts[1:-1], side="right")
        inside = cuts[1:-1] - (ends - cost)[row]
        grain = np.maximum(inside - ROW_GRAINS, 0)
        live = np.flatnonzero(cost)
        keep = grain > 0
        # Segments in order: (row, first grain); a worker's first is the first that is not before its cut.
        width = np.int64(1) << 32
        keys = np.concatenate((live * width, row[keep] * width + grain[keep]))
        keys.sort()
        count = len(keys)
        rows, first = keys >> 32, (keys & (width - 1)) * self.grain
        starts = keys.searchsorted(row * width + grain)
        bounds[0] = 0
        bounds[1:used] = starts
        bounds[used:] = count
        columns = out[1 + (1 + COLUMNS) * self.workers :].reshape(COLUMNS, self.segments)
        columns[0, :count] = rows
        columns[1, :count] = first
        # A segment ends where the next of its row starts, the last one with the row.
        columns[2, :count] = lengths[rows]
        same = rows[1:] == rows[:-1]
        columns[2, : count - 1][same] = first[1:][same]
        of_row = np.bincount(rows, minlength=len(lengths))
        columns[3, :count] = np.arange(count) - (of_row.cumsum() - of_row)[rows]
        columns[4, :count] = of_row[rows]
        leads = out[1 + self.workers : 1 + (1 + COLUMNS) * self.workers].reshape(COLUMNS, self.workers)
        columns.take(bounds[:-1], axis=1, out=leads, mode="clip")
        return count
