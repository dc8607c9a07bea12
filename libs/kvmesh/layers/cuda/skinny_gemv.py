"""Kernels of products with one row: no tensor cores, weights go from memory to registers.

Many small blocks, each a few rows of the weight: what is in flight is what all the threads' registers hold.
"""

from __future__ import annotations

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-not-found]


@triton.jit  # type: ignore[untyped-decorator]
def _tile(  # type: ignore[no-untyped-def]
    w_ptr, first, end, k, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr
):
    """Weights (BLOCK_N, BLOCK_K) in fp32 of rows from `first` and columns from k on; zeros where there are none."""
    rows = tl.arange(0, BLOCK_N)[:, None]
    columns = k + tl.arange(0, BLOCK_K)[None, :]
    at = w_ptr + first.to(tl.int64) * K + rows * K + columns
    if EVEN_N and EVEN_K:
        w = tl.load(at, eviction_policy="evict_first")
    else:
        w = tl.load(at, mask=(first + rows < end) & (columns < K), other=0.0, eviction_policy="evict_first")
    return w.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _x(x_ptr, k, K, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):  # type: ignore[no-untyped-def]
    columns = k + tl.arange(0, BLOCK_K)
    if EVEN_K:
        x = tl.load(x_ptr + columns, eviction_policy="evict_last")
    else:
        x = tl.load(x_ptr + columns, mask=columns < K, other=0.0, eviction_policy="evict_last")
    return x.to(tl.float32)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def linear(  # type: ignore[no-untyped-def]
    x_ptr,  # (rows, K) bf16, of which the first
    w_ptr,  # (N, K) bf16
    out_ptr,  # (splits, rows, N) fp32, of which each split's first row
    N,
    K,
    k_split,  # columns of a split, a multiple of BLOCK_K
    split_stride,  # elements from split to split of out
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    first = tl.program_id(0) * BLOCK_N
    split = tl.program_id(1)
    k_begin = split * k_split
    k_end = tl.minimum(k_begin + k_split, K)
    # The first weights come from registers' own loads: no kernel writes them.
    w = _tile(w_ptr, first, N, k_begin, K, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K)
    if PDL:
        gdc_wait()
    acc = w * _x(x_ptr, k_begin, K, BLOCK_K, EVEN_K)
    for k in tl.range(k_begin + BLOCK_K, k_end, BLOCK_K):
        w = _tile(w_ptr, first, N, k, K, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K)
        acc += w * _x(x_ptr, k, K, BLOCK_K, EVEN_K)
    n = first + tl.arange(0, BLOCK_N)
    tl.store(out_ptr + split * split_stride + n, tl.sum(acc, axis=1), mask=n < N)


@triton.jit  # type: ignore[untyped-decorator]
def gate_up(  # type: ignore[no-untyped-def]
    x_ptr,  # (rows, K) bf16, of which the first
    w_ptr,  # (2 N, K) bf16: the gates' rows, then the ups'
    out_ptr,  # (rows, N) bf16, of which the first
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    first = tl.program_id(0) * BLOCK_N
    w_gate = _tile(w_ptr, first, N, 0, K, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K)
    w_up = _tile(w_ptr, N + first, 2 * N, 0, K, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K)
    if PDL:
        gdc_wait()
    x = _x(x_ptr, 0, K, BLOCK_K, EVEN_K)
    gate = w_gate * x
    up = w_up * x
    for k in tl.range(BLOCK_K, K, BLOCK_K):
        w_gate = _tile(w_ptr, first, N, k, K, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K)
        w_up = _tile(w_ptr, N + first, 2 * N, k, K, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K)
        x = _x(x_ptr, k, K, BLOCK_K, EVEN_K)
        gate += w_gate * x
        up += w_up * x
    total = tl.sum(gate, axis=1)
    product = total / (1.0 + tl.exp(-total)) * tl.sum(up, axis=1)
    n = first + tl.arange(0, BLOCK_N)
    tl.store(out_ptr + n, product.to(tl.bfloat16), mask=n < N)
