"""KV pages as torch views, and the per-step plan that every layer's attention shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvmesh.errors import Internal, InvalidArgument
from kvmesh.kv.layout import KvLayout

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
# Decode rows are attended together while the longest is at most this many times the shortest (padding is work).
_MAX_PADDING = 2.0
# … and while their gathered fp32 keys and values stay under this many elements (64 MiB).
_MAX_GATHERED = 1 << 24

Int32Array = npt.NDArray[np.int32]


class PagedKv:
    """One layer group's region: `layers[i]` is (num_pages, *page_shape) over the shared buffer.

    page_shape by the group's kind: full (kv_heads, 2, page_size, head_dim), mla (page_size, head_dim).
    """

    def __init__(self, layout: KvLayout, group: str, region: memoryview) -> None:
        need = layout.region_bytes(group)
        if region.readonly or region.nbytes < need:
            raise InvalidArgument(f"kv group {group} needs {need} writable bytes, the buffer has {region.nbytes}")
        shape = layout.region_shape(group)
        count = need // layout.itemsize
        flat = torch.frombuffer(region, dtype=_DTYPES[layout.dtype], count=count)
        self.region = flat.view(shape)
        self.layers = list(self.region.unbind(0))
        self.page_size = layout.page_size
        self.num_pages = layout.num_pages
        self.kv_heads, self.head_dim = layout.heads_per_rank(group), shape[-1]
        # Elements that one token takes in one layer.
        self.token_width = math.prod(shape[2:]) // layout.page_size

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy page src → dst in every layer. All sources are read before any destination is written."""
        if not pairs:
            return
        src, dst = (torch.tensor(side, dtype=torch.int64) for side in zip(*pairs, strict=True))
        self.region[:, dst] = self.region[:, src]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A slice's part of the flat batch: tokens rows[0]..rows[1]-1 sit at positions start.. of the sequence."""

    rows: tuple[int, int]
    start: int
    pages: torch.Tensor  # int64 (pages,)

    @property
    def length(self) -> int:
        """Tokens of history and chunk together."""
        return self.start + self.rows[1] - self.rows[0]


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows of one token each, attended in one batch.

    table: int64 (rows, pages), padded; masked: bool (rows, 1, 1, tokens), True past a sequence's end.
    """

    rows: tuple[int, int]
    table: torch.Tensor
    masked: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything that is the same in all layers of a step; built once.

    The flat batch holds one-token slices first, by ascending length, then chunks; `order[i]` is the batch's slice at
    place i. `pages` and `offsets` say where each token's KV goes.
    """

    order: list[int]
    first_row: list[int]
    token_ids: torch.Tensor  # int64 (tokens,)
    positions: torch.Tensor  # int64 (tokens,)
    pages: torch.Tensor  # int64 (tokens,)
    offsets: torch.Tensor  # int64 (tokens,)
    decode: list[DecodeGroup]
    chunks: list[Chunk]
    max_position: int
    num_decode: int
    tables: torch.Tensor  # int32 (num_decode, pages): the block tables of decode rows, padded with 0
    lengths: torch.Tensor  # int32 (num_decode,): tokens to attend, the new one included


def plan_step(
    slices: Sequence[tuple[Int32Array, int, Int32Array]], kv: PagedKv, vocab_size: int, groups: bool = True
) -> StepPlan:
    """Plan (token_ids, start, block_table) slices. Internal when a table does not cover its tokens.

    `groups` False leaves out the padded decode groups, which only the torch attention needs.
    """
    size = kv.page_size
    for tokens, start, table in slices:
        if not len(tokens) or start < 0:
            raise Internal(f"a slice has {len(tokens)} tokens from position {start}")
        if len(table) * size < start + len(tokens):
            raise Internal(f"a block table of {len(table)} pages does not cover {start + len(tokens)} tokens")
    singles = sorted((i for i, s in enumerate(slices) if len(s[0]) == 1), key=lambda i: slices[i][1])
    order = singles + [i for i, s in enumerate(slices) if len(s[0]) > 1]
    counts = np.array([len(slices[i][0]) for i in order], dtype=np.int64)
    ends = np.cumsum(counts)
    firsts = ends - counts
    token_ids = np.concatenate([slices[i][0] for i in order]).astype(np.int64)
    if token_ids.min() < 0 or token_ids.max() >= vocab_size:
        raise InvalidArgument(f"a token id lies outside 0..{vocab_size - 1}")
    starts = np.array([slices[i][1] for i in order], dtype=np.int64)
    positions = np.arange(len(token_ids)) - np.repeat(firsts - starts, counts)
    pages = np.empty(len(token_ids), dtype=np.int64)
    for place, i in enumerate(order):
        table = slices[i][2]
        pages[firsts[place] : ends[place]] = table[positions[firsts[place] : ends[place]] // size]
    used = [slices[i][2][: -(-(slices[i][1] + len(slices[i][0])) // size)] for i in order]
    for table in used:
        if table.min() < 0 or table.max() >= kv.num_pages:
            raise Internal(f"a block table names a page outside 0..{kv.num_pages - 1}")
    n = len(singles)
    lengths = starts[:n] + 1
    width = len(used[n - 1]) if n else 0
    tables = np.zeros((n, width), dtype=np.int32)
    for row in range(n):
        tables[row, : len(used[row])] = used[row]
    return StepPlan(
        order=order,
        first_row=firsts.tolist(),
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        pages=torch.from_numpy(pages),
        offsets=torch.from_numpy(positions % size),
        decode=_decode_groups(tables, lengths, kv) if groups else [],
        chunks=[
            Chunk((int(firsts[p]), int(ends[p])), int(starts[p]), torch.from_numpy(used[p].astype(np.int64)))
            for p in range(n, len(order))
        ],
        max_position=int(positions.max()),
        num_decode=n,
        tables=torch.from_numpy(tables),
        lengths=torch.from_numpy(lengths.astype(np.int32)),
    )


def _decode_groups(tables: Int32Array, lengths: npt.NDArray[np.int64], kv: PagedKv) -> list[DecodeGroup]:
    """Cut rows (ascending length) where padding or memory would get out of hand."""
    groups = []
    at, n = 0, len(lengths)
    while at < n:
        end = at + 1
        while end < n and lengths[end] <= _MAX_PADDING * max(int(lengths[at]), kv.page_size):
            if (end + 1 - at) * int(lengths[end]) * kv.token_width > _MAX_GATHERED:
                break
            end += 1
        pages = -(-int(lengths[end - 1]) // kv.page_size)
        table = torch.from_numpy(tables[at:end, :pages].astype(np.int64))
        masked = np.arange(pages * kv.page_size)[None] >= lengths[at:end, None]
        groups.append(DecodeGroup((at, end), table, torch.from_numpy(masked)[:, None, None, :]))
        at = end
    return groups
