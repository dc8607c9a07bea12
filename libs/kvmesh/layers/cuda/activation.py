"""SwiGLU's product, for steps whose GEMM has no epilogue of ours."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-not-found]

from kvmesh.layers.cuda import pdl as launches

_BLOCKS = (2048, 1024, 512)
_COLUMNS_PER_WARP = 512


@triton.jit  # type: ignore[untyped-decorator]
def silu_mul_kernel(gate_up, out, WIDE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    BLOCKS: tl.constexpr = (WIDE + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    column = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDE
    source = gate_up + row * (2 * WIDE) + column
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + WIDE, mask=mask, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(tl.bfloat16).to(tl.float32)
    tl.store(out + row * WIDE + column, (silu * up).to(tl.bfloat16), mask=mask)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor, *, pdl: bool = False) -> None:
    """gate_up (M, 2F) [gate columns, then up] → out (M, F) bf16 = silu(gate) * up. Both contiguous."""
    rows, wide = out.shape
    if rows == 0:
        return
    block = next((size for size in _BLOCKS if wide % size == 0), _BLOCKS[1])
    silu_mul_kernel[(rows * triton.cdiv(wide, block),)](
        gate_up, out, WIDE=wide, BLOCK=block, num_warps=block // _COLUMNS_PER_WARP, **launches.options(pdl)
    )
