"""What a step's kernels read besides weights and KV: packed into one pinned buffer, sent with one copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvmesh.engine.runner import PENDING, Slice, StepBatch
from kvmesh.errors import Internal, InvalidArgument

Int32Array = npt.NDArray[np.int32]
# A step is queued while the one before it runs and the one before that is read: three may be under way.
TURNS = 3


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step's rows: one-token slices first (`decode` of them), then the tokens of chunks, those that begin their
    sequence first.

    order: the batch's slice at each place. first_row: where the slice at a place begins. chunks: (count, start, table)
    of the places behind the decode rows.
    """

    order: list[int]
    first_row: list[int]
    rows: int
    decode: int
    chunks: list[tuple[int, int, Int32Array]]

    def last_row(self, place: int) -> int:
        """Row of the last token of the slice at a place."""
        return (self.first_row[place + 1] if place + 1 < len(self.first_row) else self.rows) - 1


def shape_of(batch: StepBatch) -> StepShape:
    """Order a batch's slices into rows."""
    slices = batch.slices
    singles = [i for i, s in enumerate(slices) if len(s.token_ids) == 1 and s.prompt_logprobs is None]
    taken = set(singles)
    order = singles + sorted((i for i in range(len(slices)) if i not in taken), key=lambda i: slices[i].start > 0)
    first_row, chunks, rows = [], [], 0
    for i in order:
        first_row.append(rows)
        rows += len(slices[i].token_ids)
    for i in order[len(singles) :]:
        chunks.append((len(slices[i].token_ids), slices[i].start, slices[i].block_table))
    return StepShape(order, first_row, rows, len(singles), chunks)


@dataclass(frozen=True, slots=True)
class Columns:
    """A step's columns, on the device or (numpy) in a pinned buffer. int32, slots int64.

    tokens, positions, slots: (rows,). lengths, row_start: (decode,). work: see `layers.cuda.worklist`. pages: the rest.
    """

    slots: Any
    tokens: Any
    positions: Any
    lengths: Any
    row_start: Any
    work: Any
    pages: Any


class WorkLists(Protocol):
    """Who reads what in decode attention: see `engine.cuda.attention`."""

    def words(self, rows: int) -> int: ...

    def fill(self, lengths: Int32Array, out: Int32Array) -> None: ...


class StepMetadata:
    """Device-resident columns and the pinned buffers that fill them, with one copy a step.

    tokens are ids, or -1 - j for the j-th token of the step before. slots are page * page_size + offset, -1 = none.
    lengths count the new token. row_start: where a row's page ids begin in `pages`. The places depend on a step's rows
    alone, so that a graph may hold the addresses.
    """

    def __init__(
        self, max_rows: int, max_decode: int, max_pages: int, page_size: int, num_pages: int, vocab_size: int,
        work: WorkLists, device: torch.device,
    ) -> None:  # fmt: skip
        """max_pages: that the decode rows of a step name together, each an equal part at most."""
        self.page_size, self.num_pages, self.vocab_size = page_size, num_pages, vocab_size
        self.max_rows, self.max_decode, self.max_pages = max_rows, max_decode, max_pages
        self._work = work
        words = self._places(max_rows, max_decode)[-1] + max_pages
        self._device = torch.zeros(words, dtype=torch.int32, device=device)
        self._pinned = [torch.zeros(words, dtype=torch.int32, pin_memory=device.type == "cuda") for _ in range(TURNS)]
        self._turn = 0

    def _places(self, rows: int, decode: int) -> list[int]:
        """Where each column begins. slots are 64 bits wide and come first; all begin at 16 bytes."""
        places, at = [], 0
        for size in (2 * rows, rows, rows, decode, decode, self._work.words(decode)):
            places.append(at)
            at += -(-size // 4) * 4
        return [*places, at]

    def _columns(self, words: Any, rows: int, decode: int) -> Columns:
        sizes = (2 * rows, rows, rows, decode, decode, self._work.words(decode))
        places = self._places(rows, decode)
        parts = [words[at : at + size] for at, size in zip(places, sizes, strict=False)]
        wide = torch.int64 if isinstance(words, torch.Tensor) else np.int64
        slots, tokens, positions, lengths, row_start, work = parts
        return Columns(slots.view(wide), tokens, positions, lengths, row_start, work, words[places[-1] :])

    def columns(self, rows: int, decode: int) -> Columns:
        """The device's columns of a step of so many rows."""
        return self._columns(self._device, rows, decode)

    def check(self, batch: StepBatch) -> None:
        """Raises Internal and InvalidArgument for a batch that cannot run."""
        if not batch.slices:
            raise Internal("a step without slices")
        tables: list[Int32Array] = []
        singles: list[Int32Array] = []
        prompts: list[Int32Array] = []
        for s in batch.slices:
            count = len(s.token_ids)
            if not count or s.start < 0:
                raise Internal(f"a slice has {count} tokens from position {s.start}")
            used = -(-(s.start + count) // self.page_size)
            if used > self.max_pages // self.max_decode:
                raise Internal(f"a slice ends at {s.start + count} tokens, more than a sequence may have")
            if len(s.block_table) < used:
                raise Internal(f"a block table of {len(s.block_table)} pages does not cover {s.start + count} tokens")
            tables.append(s.block_table[:used])
            (prompts if count > 1 else singles).append(s.token_ids)
        # At once: with a row each, reductions would take longer than all the rest of a step's columns.
        pages = np.concatenate(tables)
        if pages.min() < 0 or pages.max() >= self.num_pages:
            raise Internal(f"a block table names a page outside 0..{self.num_pages - 1}")
        for low, ids in ((PENDING, singles), (0, prompts)):
            if ids and (np.min(every := np.concatenate(ids)) < low or np.max(every) >= self.vocab_size):
                raise InvalidArgument(f"a token id lies outside 0..{self.vocab_size - 1}")
        if any(not 0 <= page < self.num_pages for pair in batch.copies for page in pair):
            raise Internal(f"a copy names a page outside 0..{self.num_pages - 1}")

    def fill(self, batch: StepBatch, shape: StepShape, last: Mapping[int, int], bucket: int = 0) -> None:
        """Pack a checked batch and queue its copy on the current stream.

        last: place of each sequence's token among those of the step before. bucket: rows of the graph that runs it
        (those beyond the batch's write nothing); 0: the step as it is. Raises Internal where it does not fit, before
        anything is queued.
        """
        rows, decode = (bucket, bucket) if bucket else (shape.rows, shape.decode)
        if rows > self.max_rows or decode > self.max_decode:
            raise Internal(f"a step of {rows} rows, {decode} of decode, is larger than planned for")
        turn = (self._turn + 1) % TURNS
        pinned = self._pinned[turn]
        host = self._columns(pinned.numpy(), rows, decode)
        size, n = self.page_size, shape.decode
        total = self._decode_rows([batch.slices[i] for i in shape.order[:n]], host, last)
        for place in range(n, len(shape.order)):
            s, at = batch.slices[shape.order[place]], shape.first_row[place]
            end = at + len(s.token_ids)
            positions = np.arange(s.start, s.start + len(s.token_ids), dtype=np.int32)
            host.tokens[at:end] = s.token_ids
            host.positions[at:end] = positions
            host.slots[at:end] = s.block_table[positions // size].astype(np.int64) * size + positions % size
        host.tokens[shape.rows :] = host.positions[shape.rows :] = 0
        host.slots[shape.rows :] = -1
        host.lengths[n:] = host.row_start[n:] = 0
        if decode:
            self._work.fill(host.lengths, host.work)
        self._turn = turn
        words = self._places(rows, decode)[-1] + total
        self._device[:words].copy_(pinned[:words], non_blocking=True)

    def _decode_rows(self, slices: Sequence[Slice], host: Columns, last: Mapping[int, int]) -> int:
        """Columns of the one-token rows; returns how many pages they name."""
        n, size = len(slices), self.page_size
        if not n:
            return 0
        starts = np.fromiter((s.start for s in slices), np.int32, n)
        tokens = np.fromiter((s.token_ids[0] for s in slices), np.int32, n)
        for row in np.flatnonzero(tokens == PENDING).tolist():
            place = last.get(slices[row].seq_id)
            if place is None:
                raise Internal(f"sequence {slices[row].seq_id} awaits a token that the step before does not sample")
            tokens[row] = -1 - place
        counts = starts // size + 1
        ends = np.cumsum(counts)
        total = int(ends[-1])
        if total > self.max_pages:
            raise Internal(f"a step's block tables name {total} pages, {self.max_pages} fit")
        np.concatenate([s.block_table[:c] for s, c in zip(slices, counts, strict=True)], out=host.pages[:total])
        host.tokens[:n] = tokens
        host.positions[:n] = starts
        host.lengths[:n] = starts + 1
        host.row_start[:n] = ends - counts
        host.slots[:n] = host.pages[ends - 1].astype(np.int64) * size + starts % size
        return total
