"""Kernels of products with one to four rows: no tensor cores, weights go from memory to registers.

Many small blocks, each a few rows of the weight: what is in flight is what all the threads' registers hold. With more
rows than one a thread adds up its neighbouring columns at once, so that its sums leave registers to the weights.
"""

from __future__ import annotations

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-not-found]

# Columns that a thread reads at once: 16 bytes.
_TOGETHER = tl.constexpr(8)


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
def _x(x_ptr, row, m, k, K, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, M: tl.constexpr):  # type: ignore[no-untyped-def]
    """A row of x (1, BLOCK_K) in fp32, zeros where there is none."""
    columns = k + tl.arange(0, BLOCK_K)
    at = x_ptr + row * K + columns
    if EVEN_K and M == 1:
        x = tl.load(at, eviction_policy="evict_last")
    else:
        x = tl.load(at, mask=(columns < K) & (row < m), other=0.0, eviction_policy="evict_last")
    return x.to(tl.float32)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _products(w, x, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, M: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a row adds to its sums: (BLOCK_N, BLOCK_K), or with several rows (BLOCK_N, BLOCK_K / 8)."""
    product = w * x
    if M > 1:
        product = tl.sum(tl.reshape(product, (BLOCK_N, BLOCK_K // _TOGETHER, _TOGETHER)), axis=2)
    return product


@triton.jit  # type: ignore[untyped-decorator]
def _add(  # type: ignore[no-untyped-def]
    sums, w, x_ptr, m, k, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, M: tl.constexpr
):
    """The rows' sums (a tuple of M) with the columns from k on."""
    new = ()
    for row in tl.static_range(M):
        x = _x(x_ptr, row, m, k, K, BLOCK_K, EVEN_K, M)
        total = sums[row] + _products(w, x, BLOCK_N, BLOCK_K, M)
        new = new + (total,)  # type: ignore[assignment]  # noqa: RUF005
    return new


@triton.jit  # type: ignore[untyped-decorator]
def _zeros(BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, M: tl.constexpr):  # type: ignore[no-untyped-def]
    zeros = tl.zeros((BLOCK_N, BLOCK_K if M == 1 else BLOCK_K // _TOGETHER), tl.float32)
    new = ()
    for _ in tl.static_range(M):
        new = new + (zeros,)  # type: ignore[assignment]  # noqa: RUF005
    return new


@triton.jit(do_not_specialize=["m"])  # type: ignore[untyped-decorator]
def linear(  # type: ignore[no-untyped-def]
    x_ptr,  # (rows, K) bf16, of which the first m
    w_ptr,  # (N, K) bf16
    out_ptr,  # (splits, rows, N) fp32, of which each split's first m rows
    m,  # at most M
    N,
    K,
    k_split,  # columns of a split, a multiple of BLOCK_K
    split_stride,  # elements from split to split of out
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    M: tl.constexpr,
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
    sums = _add(_zeros(BLOCK_N, BLOCK_K, M), w, x_ptr, m, k_begin, K, BLOCK_N, BLOCK_K, EVEN_K, M)
    for k in tl.range(k_begin + BLOCK_K, k_end, BLOCK_K):
        w = _tile(w_ptr, first, N, k, K, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K)
        sums = _add(sums, w, x_ptr, m, k, K, BLOCK_N, BLOCK_K, EVEN_K, M)
    n = first + tl.arange(0, BLOCK_N)
    for row in tl.static_range(M):
        at = out_ptr + split * split_stride + row * N + n
        tl.store(at, tl.sum(sums[row], axis=1), mask=(n < N) & (row < m))


@triton.jit(do_not_specialize=["m"])  # type: ignore[untyped-decorator]
def gate_up(  # type: ignore[no-untyped-def]
    x_ptr,  # (rows, K) bf16, of which the first m
    w_ptr,  # (2 N, K) bf16: the gates' rows, then the ups'
    out_ptr,  # (rows, N) bf16, of which the first m
    m,  # at most M
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    M: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    first = tl.program_id(0) * BLOCK_N
    w_gate = _tile(w_ptr, first, N, 0, K, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K)
    w_up = _tile(w_ptr, N + first, 2 * N, 0, K, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K)
    if PDL:
        gdc_wait()
    gate = _add(_zeros(BLOCK_N, BLOCK_K, M), w_gate, x_ptr, m, 0, K, BLOCK_N, BLOCK_K, EVEN_K, M)
    up = _add(_zeros(BLOCK_N, BLOCK_K, M), w_up, x_ptr, m, 0, K, BLOCK_N, BLOCK_K, EVEN_K, M)
    for k in tl.range(BLOCK_K, K, BLOCK_K):
        w_gate = _tile(w_ptr, first, N, k, K, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K)
        w_up = _tile(w_ptr, N + first, 2 * N, k, K, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K)
        gate = _add(gate, w_gate, x_ptr, m, k, K, BLOCK_N, BLOCK_K, EVEN_K, M)
        up = _add(up, w_up, x_ptr, m, k, K, BLOCK_N, BLOCK_K, EVEN_K, M)
    n = first + tl.arange(0, BLOCK_N)
    for row in tl.static_range(M):
        total = tl.sum(gate[row], axis=1)
        product = total / (1.0 + tl.exp(-total)) * tl.sum(up[row], axis=1)
        tl.store(out_ptr + row * N + n, product.to(tl.bfloat16), mask=(n < N) & (row < m))
