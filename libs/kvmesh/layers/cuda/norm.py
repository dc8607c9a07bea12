"""Residual add and RMSNorm in one pass, which also sums the split-K partials of the GEMM before it and may ring."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-not-found]

from kvmesh.layers.cuda import pdl as launches
from kvmesh.layers.cuda.doorbell import NATIVE, DeviceBell, ring_bell, state_of

# Up to so many rows a launch is latency: 8 columns a thread. Beyond it is bandwidth: 16, so that blocks overlap more.
LATENCY_ROWS = 128


@triton.jit  # type: ignore[untyped-decorator]
def add_norm_kernel(  # type: ignore[no-untyped-def]
    partials,  # (SPLITS, rows, HIDDEN), any float dtype
    split_stride,
    bias,  # (HIDDEN,)
    residual,  # (rows, HIDDEN) bf16, in place
    weight,  # (HIDDEN,)
    out,  # (rows, HIDDEN) bf16
    bell,  # DeviceBell's state
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    BIAS: tl.constexpr,
    RING: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    if RING:
        # A block of its own: the fence to the host takes as long as a row and would delay one.
        if row == 0:
            if PDL:
                gdc_wait()
            ring_bell(bell, 1, NATIVE)
            return
        row -= 1
    columns = tl.arange(0, BLOCK)
    mask = columns < HIDDEN
    scale = tl.load(weight + columns, mask=mask, other=0.0)
    if BIAS:
        shift = tl.load(bias + columns, mask=mask, other=0.0)
    if PDL:
        gdc_wait()
    at = row * HIDDEN + columns
    x = tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    if SPLITS > 0 or BIAS:
        # All loads before the first addition: one latency of L2, not SPLITS of them.
        parts = ()
        for split in tl.static_range(SPLITS):
            parts = parts + (tl.load(partials + split * split_stride + at, mask=mask, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
        total = tl.zeros((BLOCK,), tl.float32)
        for split in tl.static_range(SPLITS):
            total += parts[split].to(tl.float32)
        if BIAS:
            total += shift.to(tl.float32)
        # Rounded where the CPU rounds: the layer's output, the residual, the normed row, its product with the weight.
        updated = (x + total.to(tl.bfloat16).to(tl.float32)).to(tl.bfloat16)
        tl.store(residual + at, updated, mask=mask)
        x = updated.to(tl.float32)
    rms = tl.rsqrt(tl.sum(x * x, axis=0) / HIDDEN + eps)
    normed = (x * rms).to(tl.bfloat16).to(tl.float32)
    tl.store(out + at, (normed * scale.to(tl.float32)).to(tl.bfloat16), mask=mask)


def registers(warps: int, rows: int) -> int | None:
    """A bound for the assembler, or None for its own choice, which spares registers by loading in several rounds."""
    return min(255, (1 << 16) // (32 * warps)) if rows <= LATENCY_ROWS else None


def add_norm(
    partials: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    m: int,
    *,
    ring: DeviceBell | None = None,
    pdl: bool = False,
) -> None:
    """residual += sum of partials (+ bias), then out = RMSNorm(residual) * weight, for the first `m` rows.

    partials (S, R, H) or (R, H) of any float dtype, or None; bias, weight (H,); residual (R, H) bf16, in place; out
    (R, H) bf16, no alias of residual. All contiguous. `ring` rings once, with all kernels before this one done.
    """
    hidden = residual.shape[1]
    block = triton.next_power_of_2(hidden)
    splits = 0 if partials is None else (partials.shape[0] if partials.dim() == 3 else 1)
    warps = min(max(block // (256 if m <= LATENCY_ROWS else 512), 1), 32)
    blocks = m + (ring is not None)
    if not blocks:
        return
    add_norm_kernel[(blocks,)](
        residual if partials is None else partials,
        partials.stride(0) if partials is not None and splits > 1 else 0,
        weight if bias is None else bias,
        residual,
        weight,
        out,
        state_of(ring, weight),
        eps,
        HIDDEN=hidden,
        BLOCK=block,
        SPLITS=splits,
        BIAS=bias is not None,
        RING=ring is not None,
        NATIVE=NATIVE,
        num_warps=warps,
        maxnreg=registers(warps, m),
        **launches.options(pdl),
    )
