"""Attention of one new token a row over paged KV: every block reads its share of the batch's tokens (worklist.py).

A block holds the group's queries of one KV head, padded to 16 rows, and runs through its segments with a softmax kept
in fp32. A segment that is a whole row writes the output; of a row in several segments each leaves its normalized output
and log2-sum-exp2 in the workspace, and the block that ends last adds them up in the order of the splits, so that the
same work list always gives the same bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from triton.language.extra.cuda import (  # type: ignore[import-not-found]
    gdc_launch_dependents,
    gdc_wait,
)

from kvmesh.layers.cuda import pdl as pdl_rule
from kvmesh.layers.cuda.attention_merge import merge
from kvmesh.layers.cuda.paired_attention import paired
from kvmesh.layers.cuda.worklist import WorkPlan

QUERIES = 16  # rows of a tensor core's tile: the largest group
# One compiled kernel for every bucket of a config: nothing is specialized by these arguments' value or alignment.
ANY_VALUE = (
    "table_ptr",
    "start_ptr",
    "work_ptr",
    "ticket_ptr",
    "scale",
    "v_scale",
    "table_stride",
    "segments",
    "workers",
    "ahead",
)
PAGE_SIZES = (16, 32, 64, 128)
HEAD_DIMS = (64, 128)
# Partial outputs that one step of the merge holds in registers.
_MERGE_ELEMENTS = 2048
_MERGE_DEPTH = 5


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """How a bucket is run. None of it changes what is computed, only rounding.

    blocks: per SM, all resident. tile: tokens a step of the loop. paired: computed by `paired`, for e4m3 pages and no
    others; else by `_swapped`.
    ahead: tokens per block whose KV is brought into L2 before the kernels before this one have ended; 0: none. Needs
    tables and work list to be complete before the first kernel of the chain of dependent launches starts.
    """

    blocks: int = 2
    tile: int = 64
    warps: int = 4
    stages: int = 4
    paired: bool = False
    ahead: int = 0

    def plan(self, rows: int, kv_heads: int, sms: int) -> WorkPlan:
        """A bucket's work list, for a GPU of so many SMs."""
        workers = max(1, self.blocks * sms // kv_heads)
        return WorkPlan(rows, workers)


def config_for(rows: int, quantized: bool = False) -> AttentionConfig:
    """What a bucket of so many rows is best run with, measured on an H200 at 4,250 tokens a row: few rows have a block
    an SM, with large tiles; many rows two, so that one reads while the other merges or begins. quantized: pages are of
    e4m3."""
    if quantized:
        # Not measured yet. A tile is half as many bytes and needs more instructions: more of it under way.
        if rows <= 32:
            return AttentionConfig(blocks=1, tile=128, warps=4, stages=4, paired=True, ahead=128)
        return AttentionConfig(blocks=2, tile=64, warps=4, stages=4, paired=True, ahead=128)
    if rows <= 32:
        return AttentionConfig(blocks=1, tile=128, warps=4, stages=3, ahead=64)
    return AttentionConfig(blocks=2, tile=64, warps=4, stages=3, ahead=64)


@dataclass(frozen=True, slots=True)
class Workspace:
    """Scratch of one launch at a time; any content will do but for the tickets, which every launch leaves at 0."""

    partial: torch.Tensor  # fp32 (segments, kv_heads, group, head_dim)
    lse: torch.Tensor  # fp32 (segments, kv_heads, group)
    tickets: torch.Tensor  # int32 (rows, kv_heads)

    @classmethod
    def allocate(
        cls, segments: int, rows: int, kv_heads: int, group: int, head_dim: int, device: torch.device | str
    ) -> Workspace:
        """For the largest of the plans that share it."""
        return cls(
            torch.empty((segments, kv_heads, group, head_dim), dtype=torch.float32, device=device),
            torch.empty((segments, kv_heads, group), dtype=torch.float32, device=device),
            torch.zeros((rows, kv_heads), dtype=torch.int32, device=device),
        )


@triton.jit  # type: ignore[untyped-decorator]
def _prefetch(  # type: ignore[no-untyped-def]
    kv_ptr, table_ptr, begin, end, PAGE: tl.constexpr, PAGE_STRIDE: tl.constexpr, D: tl.constexpr, N: tl.constexpr
):
    """Asks for the KV of tokens [begin, end) in L2: up to N pages, two contiguous ranges each."""
    page = begin // PAGE + tl.arange(0, N)
    low = tl.maximum(begin, page * PAGE)
    count = tl.maximum(tl.minimum(end, page * PAGE + PAGE) - low, 0)
    ids = tl.load(table_ptr + page, mask=count > 0, other=0).to(tl.int64)
    keys = kv_ptr + ids * PAGE_STRIDE + (low & (PAGE - 1)) * D
    for plane in tl.static_range(2):
        tl.inline_asm_elementwise(
            """{ .reg .pred p; setp.gt.s32 p, $2, 0;
            @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }""",
            "=r,l,r",
            [(keys + plane * (PAGE * D)).to(tl.int64), count * (2 * D)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _queries(q_ptr, GROUP: tl.constexpr, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """(16, D): the group's, then zeros."""
    row = tl.arange(0, 16)
    return tl.load(q_ptr + row[:, None] * D + tl.arange(0, D)[None, :], mask=(row < GROUP)[:, None], other=0.0)


@triton.jit
def _advance(q, k, v, s, m, l, acc):  # type: ignore[no-untyped-def]  # noqa: E741
    """One tile of the transposed form: s (TILE, 16) scores, l (TILE, 16) sums yet to be added up, acc (D, 16)."""
    top = tl.maximum(m, tl.max(s, 0))
    p = tl.exp2(s - top[None, :])
    fade = tl.exp2(m - top)
    acc = tl.dot(tl.trans(v), p.to(q.dtype), acc * fade[None, :])
    return top, l * fade[None, :] + p, acc


@triton.jit  # type: ignore[untyped-decorator]
def _swapped(  # type: ignore[no-untyped-def]
    q_ptr, kv_ptr, table_ptr, begin, end, scale,
    GROUP: tl.constexpr, PAGE: tl.constexpr, SHIFT: tl.constexpr, PAGE_STRIDE: tl.constexpr, D: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """acc (16, D), sums (16,), maxima (16,) in log2 of one segment's tokens.

    Transposed inside: K and V^T are the 64 rows of a warpgroup's product straight from shared memory.
    """
    m = tl.full((16,), float("-inf"), tl.float32)
    l = tl.zeros((TILE, 16), tl.float32)  # noqa: E741
    acc = tl.zeros((D, 16), tl.float32)
    column = tl.arange(0, D)
    token = begin + tl.arange(0, TILE)
    ids = tl.load(table_ptr + (token >> SHIFT), mask=token < end, other=0)
    q = _queries(q_ptr, GROUP, D)
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        token = start + tl.arange(0, TILE)
        valid = token < end
        at = ids.to(tl.int64) * PAGE_STRIDE + (token & (PAGE - 1)) * D
        keys = kv_ptr + at[:, None] + column[None, :]
        k = tl.load(keys, mask=valid[:, None], other=0.0)
        v = tl.load(keys + PAGE * D, mask=valid[:, None], other=0.0)
        ids = tl.load(table_ptr + ((token + TILE) >> SHIFT), mask=token + TILE < end, other=0)
        s = tl.where(valid[:, None], tl.dot(k, tl.trans(q)) * scale, float("-inf"))
        m, l, acc = _advance(q, k, v, s, m, l, acc)  # noqa: E741
    return tl.trans(acc), tl.sum(l, 0), m


@triton.jit(do_not_specialize=ANY_VALUE)  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    q_ptr,  # (rows, KV_HEADS * GROUP, D)
    kv_ptr,  # (pages, KV_HEADS, 2, PAGE, D), of e4m3 two at a time: (…, D / 2) int16
    table_ptr,  # int32 page numbers: (rows, table_stride), or all rows' one behind the other
    start_ptr,  # int32 (rows,) where a row's page numbers begin, where STARTS
    work_ptr,  # int32, WorkPlan
    out_ptr,  # as q
    partial_ptr,  # fp32 (segments, KV_HEADS, GROUP, D)
    lse_ptr,  # fp32 (segments, KV_HEADS, GROUP)
    ticket_ptr,  # int32 (rows, KV_HEADS), 0 between launches
    scale,  # of the scores, times log2(e); of stored K too
    v_scale,  # of stored V; None: 1
    table_stride,
    segments,  # that the list has room for
    workers,
    ahead,  # tokens
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,  # the group rounded up to a power of two
    PAGE: tl.constexpr,
    SHIFT: tl.constexpr,  # log2 of PAGE
    D: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    WARPS: tl.constexpr,
    PAIRED: tl.constexpr,  # pages are of e4m3
    STEP: tl.constexpr,
    DEPTH: tl.constexpr,
    AHEAD: tl.constexpr,
    STARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    # int16 or bf16 that a token has in a plane.
    LINE: tl.constexpr = D // 2 if PAIRED else D
    PAGE_STRIDE: tl.constexpr = KV_HEADS * 2 * PAGE * LINE
    worker = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    kv_ptr += head * (2 * PAGE * LINE)
    lead_ptr = work_ptr + workers + 1 + worker
    list_ptr = work_ptr + 6 * workers + 1
    if PDL:
        gdc_launch_dependents()
        if not AHEAD:
            gdc_wait()
    first = tl.load(work_ptr + worker)
    last = tl.load(work_ptr + worker + 1)
    row = tl.load(lead_ptr)
    begin = tl.load(lead_ptr + workers)
    end = tl.load(lead_ptr + 2 * workers)
    split = tl.load(lead_ptr + 3 * workers)
    splits = tl.load(lead_ptr + 4 * workers)
    if PDL and AHEAD:
        if first < last:
            stop = tl.minimum(end, begin + ahead)
            early = table_ptr + (tl.load(start_ptr + row) if STARTS else row * table_stride)
            _prefetch(kv_ptr, early, begin, stop, PAGE, PAGE_STRIDE, LINE, 32 * WARPS)
        gdc_wait()
    query = tl.arange(0, 16)
    column = tl.arange(0, D)
    for seg in range(first, last):
        q = q_ptr + (row * KV_HEADS + head) * (GROUP * D)
        table = table_ptr + (tl.load(start_ptr + row) if STARTS else row * table_stride)
        begin = tl.multiple_of(begin, 16)
        if PAIRED:
            acc, l, m = paired(  # noqa: E741
                q, kv_ptr, table, begin, end, scale, GROUP, PAGE, SHIFT, PAGE_STRIDE, D, TILE, STAGES
            )
        else:
            acc, l, m = _swapped(  # noqa: E741
                q, kv_ptr, table, begin, end, scale, GROUP, PAGE, SHIFT, PAGE_STRIDE, D, TILE, STAGES
            )
        out = out_ptr + (row * KV_HEADS + head) * (GROUP * D)
        value = acc / l[:, None]
        if v_scale is not None:
            # Before the splits are merged, whose weights add up to 1.
            value *= v_scale
        mask = query < GROUP
        if splits == 1:
            tl.store(out + query[:, None] * D + column[None, :], value.to(out_ptr.dtype.element_ty), mask=mask[:, None])
        else:
            to = (seg * KV_HEADS + head) * GROUP + query
            tl.store(partial_ptr + to[:, None] * D + column[None, :], value, mask=mask[:, None])
            tl.store(lse_ptr + to, m + tl.log2(l), mask=mask)
            # All of this block's stores before its ticket.
            tl.debug_barrier()
            ticket_at = ticket_ptr + row * KV_HEADS + head
            if tl.atomic_add(ticket_at, 1, sem="acq_rel", scope="gpu") == splits - 1:
                tl.store(ticket_at, 0)
                base = ((seg - split) * KV_HEADS + head) * GROUP
                merge(partial_ptr + base * D, lse_ptr + base, out, splits, KV_HEADS, GROUP, ROWS, D, STEP, DEPTH)
        # The next segment; behind the last one, whatever the list holds there.
        following = list_ptr + tl.minimum(seg + 1, segments - 1)
        row = tl.load(following)
        begin = tl.load(following + segments)
        end = tl.load(following + 2 * segments)
        split = tl.load(following + 3 * segments)
        splits = tl.load(following + 4 * segments)


def constants(kv_heads: int, group: int, page_size: int, head_dim: int, config: AttentionConfig) -> dict[str, Any]:
    """The kernel's constexprs but PDL."""
    rows = triton.next_power_of_2(group)
    return {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "ROWS": rows,
        "PAGE": page_size,
        "SHIFT": page_size.bit_length() - 1,
        "D": head_dim,
        "TILE": config.tile,
        "STAGES": config.stages,
        "WARPS": config.warps,
        "PAIRED": config.paired,
        "STEP": max(1, min(32, _MERGE_ELEMENTS // (rows * head_dim))),
        "DEPTH": _MERGE_DEPTH,
        "AHEAD": config.ahead > 0,
    }


def decode_attention(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    tables: torch.Tensor,
    work: torch.Tensor,
    out: torch.Tensor,
    workspace: Workspace,
    scale: float,
    plan: WorkPlan,
    config: AttentionConfig,
    *,
    pdl: bool,
    starts: torch.Tensor | None = None,
    kv_scales: tuple[float, float] | None = None,
) -> None:
    """out (R, hq * d) of q (R, hq, d) over the tokens that `work` (plan.words,) int32 names; other rows are left alone.

    kv_layer (pages, hk, 2, page_size, d) contiguous; tables (R, W) int32, stride of a row free; or,
    with starts int32 (R,), all rows' page numbers one behind the other, row r's from starts[r] on. q, KV and out are of
    one 16-bit type, but that KV may be float8_e4m3fn: K and V are then what is stored times kv_scales (k_scale,
    v_scale). `scale` as in softmax(scale * q k). hq / hk is at most 16.
    """
    _, heads, head_dim = q.shape
    pages, kv_heads, _, page_size, _ = kv_layer.shape
    group = heads // kv_heads
    if group * kv_heads != heads or group > QUERIES or page_size not in PAGE_SIZES or head_dim not in HEAD_DIMS:
        raise ValueError(f"decode attention: {heads}/{kv_heads} heads of {head_dim}, pages of {page_size} tokens")
    if kv_layer.shape != (pages, kv_heads, 2, page_size, head_dim) or not kv_layer.is_contiguous():
        raise ValueError(f"decode attention: KV {tuple(kv_layer.shape)} is not laid (pages, kv_heads, 2, page, d)")
    if work.numel() != plan.words or workspace.lse.shape[0] < plan.segments:
        raise ValueError(f"decode attention: the plan has {plan.words} words, {plan.segments} segments")
    quantized = kv_layer.dtype == torch.float8_e4m3fn
    if quantized != config.paired:
        raise ValueError(f"decode attention: paired {config.paired} over pages of {kv_layer.dtype}")
    k_scale, v_scale = kv_scales if quantized and kv_scales is not None else (1.0, 1.0)
    _attend[(plan.workers * kv_heads,)](
        q,
        kv_layer.view(torch.int16) if quantized else kv_layer,
        tables,
        tables if starts is None else starts,
        work,
        out,
        workspace.partial,
        workspace.lse,
        workspace.tickets,
        scale * math.log2(math.e) * k_scale,
        v_scale if quantized else None,
        0 if starts is not None else tables.stride(0),
        plan.segments,
        plan.workers,
        config.ahead,
        STARTS=starts is not None,
        **constants(kv_heads, group, page_size, head_dim, config),
        num_warps=config.warps,
        num_stages=config.stages,
        **pdl_rule.options(pdl),
    )
