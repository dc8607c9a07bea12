"""Rotary embedding of q and k and the append of K and V to their pages, from the split-K partials of the qkv GEMM."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-not-found]

from kvmesh.layers.cuda import pdl as launches
from kvmesh.layers.cuda.norm import LATENCY_ROWS

# Pairs of a block. Few rows: small blocks, so that a row's partials are read by many SMs. Many rows: large ones.
LATENCY_PAIRS, PAIRS = 256, 1024
PAIRS_PER_WARP = 256
# What e4m3 holds: whatever is larger is stored as this.
E4M3_MAX = tl.constexpr(448.0)


@triton.jit  # type: ignore[untyped-decorator]
def _to_e4m3(values, unit, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """values / unit, saturated; NaN stays NaN, so that a broken step is seen as one."""
    scaled = tl.div_rn(values.to(tl.float32), tl.broadcast_to(unit, values.shape))
    return tl.clamp(scaled, -E4M3_MAX, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL).to(TYPE)


# Columns of a step may lie anywhere: one compiled kernel for all of them.
@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])  # type: ignore[untyped-decorator]
def rope_append_kernel(  # type: ignore[no-untyped-def]
    qkv,  # (SPLITS, rows, (Q_HEADS + 2 KV_HEADS) DIM), any float dtype
    split_stride,
    bias,  # ((Q_HEADS + 2 KV_HEADS) DIM,)
    cos_sin,  # (positions, DIM) fp32: cos half, sin half
    positions,  # (rows,)
    slots,  # (rows,)
    kv_layer,  # (pages, KV_HEADS, 2, PAGE, DIM) bf16, or with scales e4m3
    q_out,  # (rows, Q_HEADS, DIM) bf16
    kv_out,  # (rows, 2 KV_HEADS, DIM) bf16, where COPY
    k_scale,  # of what the pages hold; None: K and V as they are
    v_scale,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,  # a block's
    PAIRS: tl.constexpr,  # DIM / 2, up to the next power of two
    SPLITS: tl.constexpr,
    BIAS: tl.constexpr,
    COPY: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    ALL: tl.constexpr = Q_HEADS + 2 * KV_HEADS
    HALF: tl.constexpr = DIM // 2
    BLOCKS: tl.constexpr = (ALL + HEADS - 1) // HEADS
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    head = (tl.program_id(0) % BLOCKS) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, PAIRS)
    mask = (head < ALL)[:, None] & (pair < HALF)[None, :]
    column = head[:, None] * DIM + pair[None, :]
    if BIAS:
        bias_a = tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
        bias_b = tl.load(bias + column + HALF, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    position = tl.load(positions + row).to(tl.int64)
    slot = tl.load(slots + row)
    # All loads before the first addition: one latency of L2, not SPLITS of them. The table's wait for the position.
    source = qkv + row * (ALL * DIM) + column
    parts_a = ()
    parts_b = ()
    for split in tl.static_range(SPLITS):
        parts_a = parts_a + (tl.load(source + split * split_stride, mask=mask, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
        parts_b = parts_b + (tl.load(source + split * split_stride + HALF, mask=mask, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    angle = cos_sin + position * DIM + tl.zeros((HEADS, 1), tl.int32) + pair[None, :]
    cos = tl.load(angle, mask=mask, other=0.0)
    sin = tl.load(angle + HALF, mask=mask, other=0.0)
    a = tl.zeros((HEADS, PAIRS), tl.float32)
    b = tl.zeros((HEADS, PAIRS), tl.float32)
    for split in tl.static_range(SPLITS):
        a += parts_a[split].to(tl.float32)
        b += parts_b[split].to(tl.float32)
    if BIAS:
        a += bias_a
        b += bias_b
    # The GEMM's output is bf16 on the CPU.
    a = a.to(tl.bfloat16).to(tl.float32)
    b = b.to(tl.bfloat16).to(tl.float32)
    turned = (head < Q_HEADS + KV_HEADS)[:, None]
    first = tl.where(turned, a * cos - b * sin, a).to(tl.bfloat16)
    second = tl.where(turned, b * cos + a * sin, b).to(tl.bfloat16)

    query = mask & (head < Q_HEADS)[:, None]
    target = q_out + row * (Q_HEADS * DIM) + column
    tl.store(target, first, mask=query)
    tl.store(target + HALF, second, mask=query)

    # Heads of K, then of V; in a page they lie side by side.
    other = head - Q_HEADS
    plane = (other % KV_HEADS) * 2 + other // KV_HEADS
    page = slot // PAGE
    start = kv_layer + page * (KV_HEADS * 2 * PAGE * DIM) + (slot - page * PAGE) * DIM
    target = start + plane[:, None] * (PAGE * DIM) + pair[None, :]
    append = mask & (head >= Q_HEADS)[:, None] & (slot >= 0)
    if k_scale is None:
        tl.store(target, first, mask=append)
        tl.store(target + HALF, second, mask=append)
    else:
        unit = tl.where(other < KV_HEADS, k_scale, v_scale)[:, None]
        tl.store(target, _to_e4m3(first, unit, kv_layer.dtype.element_ty), mask=append)
        tl.store(target + HALF, _to_e4m3(second, unit, kv_layer.dtype.element_ty), mask=append)
    if COPY:
        copied = mask & (head >= Q_HEADS)[:, None]
        target = kv_out + row * (2 * KV_HEADS * DIM) + other[:, None] * DIM + pair[None, :]
        tl.store(target, first, mask=copied)
        tl.store(target + HALF, second, mask=copied)


def rope_append(
    qkv: torch.Tensor,
    bias: torch.Tensor | None,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    kv_layer: torch.Tensor,
    q_out: torch.Tensor,
    m: int,
    *,
    kv_out: torch.Tensor | None = None,
    kv_scales: tuple[float, float] | None = None,
    pdl: bool = False,
) -> None:
    """Sum partials (+ bias), rotate q and k, write q, append K and V to their pages: the first `m` rows.

    qkv (S, R, (hq + 2 hk) d) or (R, …) of any float dtype; cos_sin fp32 (P, d), `layers.rotary`'s table; positions
    int32 (R,), each of the m in [0, P); slots int64 (R,) = page * page_size + offset, -1 appends nothing; kv_layer
    (pages, hk, 2, page_size, d) bf16, or float8_e4m3fn: then K / k_scale and V / v_scale (kv_scales; None: 1) are
    stored, saturated; q_out (R, hq, d) bf16. kv_out (R, 2, hk, d) bf16 gets rotated K and V side by side too, unscaled,
    for attention that wants them in one piece. All contiguous.
    """
    if m == 0:
        return
    _, kv_heads, _, page_size, dim = kv_layer.shape
    heads = q_out.shape[1]
    pairs = triton.next_power_of_2(dim // 2)
    every = heads + 2 * kv_heads
    block = max((LATENCY_PAIRS if m <= LATENCY_ROWS else PAIRS) // pairs, 1)
    block = min(block, triton.next_power_of_2(every))
    scales = (kv_scales or (1.0, 1.0)) if kv_layer.dtype == torch.float8_e4m3fn else (None, None)
    splits = qkv.shape[0] if qkv.dim() == 3 else 1
    rope_append_kernel[(m * triton.cdiv(every, block),)](
        qkv,
        qkv.stride(0) if splits > 1 else 0,
        qkv if bias is None else bias,
        cos_sin,
        positions,
        slots,
        kv_layer,
        q_out,
        q_out if kv_out is None else kv_out,
        *scales,
        Q_HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        PAGE=page_size,
        HEADS=block,
        PAIRS=pairs,
        SPLITS=splits,
        BIAS=bias is not None,
        COPY=kv_out is not None,
        num_warps=max(block * pairs // PAIRS_PER_WARP, 1),
        # A bound for the assembler: its own choice spares registers by loading in several rounds.
        maxnreg=168 if m <= LATENCY_ROWS else None,
        **launches.options(pdl),
    )
