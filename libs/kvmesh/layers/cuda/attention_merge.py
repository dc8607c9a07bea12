"""The end of decode attention's rows that several blocks have worked on."""

from __future__ import annotations

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]


@triton.jit  # type: ignore[untyped-decorator]
def merge(  # type: ignore[no-untyped-def]
    partial_ptr, lse_ptr, out_ptr, splits,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """out (GROUP, D) = the splits' outputs weighted by 2^lse.

    Of every STEP splits each has a lane, so that the loop only adds; the lanes are summed behind it.
    """
    head = tl.arange(0, ROWS)
    column = tl.arange(0, D)
    top = tl.full((STEP, ROWS), float("-inf"), tl.float32)
    total = tl.zeros((STEP, ROWS), tl.float32)
    acc = tl.zeros((STEP, ROWS, D), tl.float32)
    for first in tl.range(0, splits, STEP, num_stages=DEPTH):
        split = first + tl.arange(0, STEP)
        mask = (split < splits)[:, None] & (head < GROUP)[None, :]
        at = split[:, None] * (KV_HEADS * GROUP) + head[None, :]
        # Other blocks wrote them during this launch: past L1.
        lse = tl.load(lse_ptr + at, mask=mask, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            partial_ptr + at[:, :, None] * D + column[None, None, :],
            mask=mask[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        peak = tl.maximum(top, lse)
        base = tl.where(peak == float("-inf"), 0.0, peak)
        weight = tl.exp2(lse - base)
        fade = tl.exp2(top - base)
        top = peak
        total = total * fade + weight
        acc = acc * fade[:, :, None] + part * weight[:, :, None]
    # Lanes beyond the last split and heads beyond the group have no maximum.
    peak = tl.max(top, 0)
    weight = tl.exp2(top - tl.where(peak == float("-inf"), 0.0, peak)[None, :])
    total = tl.maximum(tl.sum(total * weight, 0), 1e-30)
    value = tl.sum(acc * weight[:, :, None], 0) / total[:, None]
    mask = (head < GROUP)[:, None]
    tl.store(out_ptr + head[:, None] * D + column[None, :], value.to(out_ptr.dtype.element_ty), mask=mask)
