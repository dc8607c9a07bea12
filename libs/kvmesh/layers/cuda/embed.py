"""Token embedding, where a token may still be on the device: what the step before sampled."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-not-found]

from kvmesh.layers.cuda import pdl as launches

_BLOCK = 1024


# Columns of a step may lie anywhere: one compiled kernel for all of them.
@triton.jit(do_not_specialize_on_alignment=["tokens", "last"])  # type: ignore[untyped-decorator]
def embed_kernel(  # type: ignore[no-untyped-def]
    tokens,  # (rows,) int32
    last,  # (rows of the step before,) int32
    table,  # (vocab, HIDDEN)
    out,  # (rows, HIDDEN)
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    BLOCKS: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    column = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    mask = column < HIDDEN
    token = tl.load(tokens + row)
    if token < 0:
        token = tl.maximum(tl.load(last - 1 - token), 0)
    values = tl.load(table + token.to(tl.int64) * HIDDEN + column, mask=mask, other=0.0)
    tl.store(out + row * HIDDEN + column, values, mask=mask)


def embed(
    tokens: torch.Tensor,
    last: torch.Tensor,
    table: torch.Tensor,
    residual_out: torch.Tensor,
    m: int,
    *,
    pdl: bool = False,
) -> None:
    """residual_out[i] = table[token i], rows i < m: (R, H) of table's dtype; table (V, H), both contiguous.

    tokens int32 (R,): an id where >= 0; -1 - j stands for last[j], last int32 (B,), where -1 (no token) counts as id 0.
    """
    if m == 0:
        return
    hidden = table.shape[1]
    embed_kernel[(m * triton.cdiv(hidden, _BLOCK),)](
        tokens, last, table, residual_out, HIDDEN=hidden, BLOCK=_BLOCK, num_warps=4, **launches.options(pdl)
    )
