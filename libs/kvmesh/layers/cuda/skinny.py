"""Matrix products of 1 to 128 rows at the rate of memory: x (R, K) W (N, K)^T in bf16, sums in fp32.

R = `row_bucket(m)` is what buffers have; rows from m on are neither read nor written. Nothing is allocated, nothing
waits for the device: everything can be captured in a graph. Tensors are contiguous; K is a multiple of 16.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found]
from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-not-found]

from kvmesh.layers.cuda import pdl as launches
from kvmesh.layers.cuda import skinny_gemv as gemv
from kvmesh.layers.cuda import skinny_kernels as kernels
from kvmesh.layers.cuda.skinny_config import (
    GEMV_ROWS,
    MAX_ROWS,
    Config,
    Kind,
    config_for,
    head_tiles,
    row_bucket,
    splits_for,
)

__all__ = [
    "MAX_ROWS",
    "argmax_reduce",
    "head_tiles",
    "row_bucket",
    "skinny_gate_up",
    "skinny_head",
    "skinny_linear",
    "splits_for",
]


def skinny_linear(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, m: int, *, pdl: bool, config: Config | None = None
) -> None:
    """Partial sums of x (R, K) bf16 times weight (N, K) bf16 → out (S, R, N) fp32, S = `splits_for(m, N, K)`.

    Their sum over S is the product: whoever reads them adds them up.
    """
    n, k = weight.shape
    config = config or config_for("linear", m, n, k)
    splits = config.num_splits(k)
    _check(x, weight, m, k)
    if out.shape != (splits, x.shape[0], n):
        raise ValueError(f"out has shape {tuple(out.shape)}, not {(splits, x.shape[0], n)}")
    if config.gemv and m <= GEMV_ROWS:
        gemv.linear[(triton.cdiv(n, config.block_n), splits)](
            x,
            weight,
            out,
            m,
            n,
            k,
            config.split_columns(k),
            out.stride(0),
            **_gemv_options(config, m, n, k),
            **launches.options(pdl),
        )
        return
    kernels.linear[(triton.cdiv(n, config.tile_rows), splits)](
        *_operands(x, weight, m, config),
        out,
        m,
        n,
        k,
        config.split_columns(k),
        **_options("linear", config, x.shape[0], n, k),
        **launches.options(pdl),
    )


def skinny_gate_up(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, m: int, *, pdl: bool, config: Config | None = None
) -> None:
    """silu(x gate^T) * (x up^T) of x (R, K) bf16 → out (R, F) bf16; weight (2 F, K) bf16: gate's rows, then up's."""
    n, k = weight.shape
    config = config or config_for("gate_up", m, n, k)
    _check(x, weight, m, k)
    if out.shape != (x.shape[0], n // 2):
        raise ValueError(f"out has shape {tuple(out.shape)}, not {(x.shape[0], n // 2)}")
    if config.gemv and m <= GEMV_ROWS:
        gemv.gate_up[(triton.cdiv(n // 2, config.block_n),)](
            x, weight, out, m, n // 2, k, **_gemv_options(config, m, n // 2, k), **launches.options(pdl)
        )
        return
    kernels.gate_up[(triton.cdiv(n // 2, config.tile_rows),)](
        *_operands(x, weight, m, config),
        out,
        m,
        n // 2,
        k,
        **_options("gate_up", config, x.shape[0], n // 2, k),
        **launches.options(pdl),
    )


def skinny_head(
    x: torch.Tensor,
    weight: torch.Tensor,
    logits: torch.Tensor,
    best_value: torch.Tensor,
    best_index: torch.Tensor,
    m: int,
    *,
    pdl: bool,
    config: Config | None = None,
) -> None:
    """Logits (R, V) fp32 of x (R, K) and weight (V, K), both bf16, and the best of each of T tiles of the vocabulary.

    best_value (R, T) fp32 is +inf where a logit of the tile is NaN; best_index (R, T) int32 is the lowest id that has
    the value. T = `head_tiles(m, V)`.
    """
    n, k = weight.shape
    config = config or config_for("head", m, n, 0)
    tiles = triton.cdiv(n, config.block_n)
    _check(x, weight, m, k)
    if (
        logits.shape != (x.shape[0], n)
        or best_value.shape != (x.shape[0], tiles)
        or best_index.shape != best_value.shape
    ):
        raise ValueError(f"outputs are not {(x.shape[0], n)} and {(x.shape[0], tiles)}")
    kernels.head[(tiles,)](
        *_operands(x, weight, m, config),
        logits,
        best_value,
        best_index,
        m,
        n,
        k,
        **_options("head", config, x.shape[0], n, k),
        **launches.options(pdl),
    )


def argmax_reduce(
    best_value: torch.Tensor, best_index: torch.Tensor, tokens: torch.Tensor, m: int, *, pdl: bool
) -> None:
    """tokens (R,) int32: each row's id with the highest logit, the lowest of equals; -1 where that is NaN or inf."""
    tiles = best_value.shape[1]
    block = max(32, triton.next_power_of_2(tiles))
    kernels.argmax[(m,)](best_value, best_index, tokens, tiles, BLOCK=block, num_warps=4, **launches.options(pdl))


def _check(x: torch.Tensor, weight: torch.Tensor, m: int, k: int) -> None:
    if x.shape != (row_bucket(m), k):
        raise ValueError(f"x has shape {tuple(x.shape)}, not {(row_bucket(m), k)}")
    if k % 16 or not (x.is_contiguous() and weight.is_contiguous()):
        raise ValueError("x and weight are contiguous, and K is a multiple of 16")


def _operands(x: torch.Tensor, weight: torch.Tensor, m: int, config: Config) -> tuple[Any, ...]:
    """x and weight, each with its tensor map where there is one. The map of x ends at row m: the rest is not read."""
    x_map: Any = x
    w_map: Any = weight
    if config.tma:
        w_map = TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k])
        x_map = TensorDescriptor(x, [m, x.shape[1]], [x.shape[1], 1], [x.shape[0], config.block_k])
    return x, x_map, weight, w_map


def _options(kind: Kind, config: Config, rows: int, n: int, k: int) -> dict[str, Any]:
    """Keyword arguments of a launch but for PDL."""
    return {
        "ROWS": rows,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "STAGES": config.stages,
        "EVEN_N": not config.step and n % config.block_n == 0,
        "EVEN_K": k % config.block_k == 0,
        "TMA": config.tma,
        "COLUMNS": config.prefetch,
        "PIECES": max(1, 32 * config.warps // config.block_n),
        "STEP": config.tile_rows,
        "TURN": config.turn,
        "LATE": config.late,
        "num_warps": config.warps,
        "num_stages": config.stages,
    }


def _gemv_options(config: Config, m: int, n: int, k: int) -> dict[str, Any]:
    return {
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "EVEN_N": n % config.block_n == 0,
        "EVEN_K": k % config.block_k == 0,
        "M": 1 << (m - 1).bit_length(),
        "num_warps": config.warps,
        "num_stages": config.stages,
    }
