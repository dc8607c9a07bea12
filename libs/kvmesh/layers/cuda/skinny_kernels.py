"""Kernels of matrix products with few rows (1 to 128): their time is that of reading the weights once.

The weight tile (BLOCK_N, BLOCK_K) is the tall side of the tensor cores' product and x^T (BLOCK_K, ROWS) the flat one,
so that few rows waste nothing. Every block is resident at once and reads the same number of bytes. Before `gdc_wait` a
block asks for its first weights into L2: no kernel writes them, so they travel while the kernel before still runs.
"""

from __future__ import annotations

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-not-found]

from kvmesh.layers.cuda import pdl as launches

# Triton's interpreter multiplies bf16 as the integers that it keeps it in.
_WIDEN = tl.constexpr(launches.INTERPRETED)
# Blocks that can be resident beside the kernel before, two an SM; those that start later have nothing to wait for.
_FIRST_WAVE = tl.constexpr(264)


@triton.jit  # type: ignore[untyped-decorator]
def _prefetch(  # type: ignore[no-untyped-def]
    w_ptr,
    first,
    end,
    k_begin,
    k_end,
    K,
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Asks for COLUMNS columns from k_begin on of BLOCK_N rows of the weight into L2, a row in PIECES bulks."""
    lane = tl.arange(0, BLOCK_N * PIECES)
    row = first + lane // PIECES
    column = k_begin + (lane % PIECES) * (COLUMNS // PIECES)
    nbytes = tl.minimum(COLUMNS // PIECES, k_end - column) * 2
    nbytes = tl.where(row < end, nbytes, 0)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [w_ptr + row.to(tl.int64) * K + column, nbytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _load_x(  # type: ignore[no-untyped-def]
    x_ptr, x_desc, k, m, K, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, TMA: tl.constexpr
):
    """x^T (BLOCK_K, ROWS) from column k on; rows from m on are zeros and cost no bytes."""
    if TMA:
        x = x_desc.load([0, k]).T
    else:
        rows = tl.arange(0, ROWS)[None, :]
        columns = k + tl.arange(0, BLOCK_K)[:, None]
        mask = rows < m
        if not EVEN_K:
            mask = mask & (columns < K)
        x = tl.load(x_ptr + rows * K + columns, mask=mask, other=0.0, eviction_policy="evict_last")
    return x


@triton.jit  # type: ignore[untyped-decorator]
def _load_w(  # type: ignore[no-untyped-def]
    w_ptr,
    w_desc,
    first,
    end,
    k,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    TMA: tl.constexpr,
):
    """Weights (BLOCK_N, BLOCK_K) of rows from `first` and columns from k on; zeros where there are none."""
    if TMA:
        w = w_desc.load([first, k])
    else:
        rows = tl.arange(0, BLOCK_N)[:, None]
        columns = k + tl.arange(0, BLOCK_K)[None, :]
        # A vocabulary's matrix can have more than 2^31 elements.
        at = w_ptr + first.to(tl.int64) * K + rows * K + columns
        if EVEN_N and EVEN_K:
            w = tl.load(at, eviction_policy="evict_first")
        elif EVEN_N:
            w = tl.load(at, mask=columns < K, other=0.0, eviction_policy="evict_first")
        elif EVEN_K:
            w = tl.load(at, mask=first + rows < end, other=0.0, eviction_policy="evict_first")
        else:
            w = tl.load(at, mask=(first + rows < end) & (columns < K), other=0.0, eviction_policy="evict_first")
    return w


@triton.jit
def _turned(k, shift, end, columns):  # type: ignore[no-untyped-def]
    """Where a block that starts `shift` columns late is when one that starts at the first is at k."""
    at = k + shift
    return tl.where(at >= end, at - columns, at)


@triton.jit  # type: ignore[untyped-decorator]
def _shift(tile, k_begin, k_end, BLOCK_K: tl.constexpr, TURN: tl.constexpr):  # type: ignore[no-untyped-def]
    """(columns that this tile starts late, columns of its loop): neighbours do not ask for the same ones at once."""
    blocks = tl.cdiv(k_end - k_begin, BLOCK_K)
    shift = 0
    if TURN > 0:
        shift = (tile * TURN) % blocks * BLOCK_K
    return shift, blocks * BLOCK_K


@triton.jit
def _dot(w, x, acc):  # type: ignore[no-untyped-def]
    if _WIDEN:
        acc = tl.dot(w.to(tl.float32), x.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(w, x, acc)
    return acc


@triton.jit(do_not_specialize=["m"])  # type: ignore[untyped-decorator]
def linear(  # type: ignore[no-untyped-def]
    x_ptr,  # (ROWS, K) bf16
    x_desc,  # its tensor map where TMA
    w_ptr,  # (N, K) bf16
    w_desc,  # its tensor map where TMA
    out_ptr,  # (splits, ROWS, N) fp32
    m,
    N,
    K,
    k_split,  # columns of a split, a multiple of BLOCK_K
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    TMA: tl.constexpr,
    COLUMNS: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    TURN: tl.constexpr,
    LATE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL and not LATE:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    first = tile * STEP
    end = tl.minimum(first + STEP, N)
    split = tl.program_id(1)
    k_begin = split * k_split
    k_end = tl.minimum(k_begin + k_split, K)
    shift, columns = _shift(tile, k_begin, k_end, BLOCK_K, TURN)
    if PDL:
        if COLUMNS > 0:
            _prefetch(w_ptr, first, end, k_begin + shift, k_end, K, BLOCK_N, COLUMNS, PIECES)
        gdc_wait()
    acc = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for k in tl.range(k_begin, k_end, BLOCK_K, num_stages=STAGES):
        at = _turned(k, shift, k_begin + columns, columns) if TURN > 0 else k
        w = _load_w(w_ptr, w_desc, first, end, at, K, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K, TMA)
        x = _load_x(x_ptr, x_desc, at, m, K, ROWS, BLOCK_K, EVEN_K, TMA)
        acc = _dot(w, x, acc)
    if PDL and LATE:
        gdc_launch_dependents()
    n = first + tl.arange(0, BLOCK_N)[:, None]
    rows = tl.arange(0, ROWS)[None, :]
    mask = rows < m
    if not EVEN_N:
        mask = mask & (n < end)
    tl.store(out_ptr + (split * ROWS + rows) * N + n, acc, mask=mask)


@triton.jit(do_not_specialize=["m"])  # type: ignore[untyped-decorator]
def gate_up(  # type: ignore[no-untyped-def]
    x_ptr,  # (ROWS, K) bf16
    x_desc,
    w_ptr,  # (2 N, K) bf16: the gates' rows, then the ups'
    w_desc,
    out_ptr,  # (ROWS, N) bf16
    m,
    N,
    K,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    TMA: tl.constexpr,
    COLUMNS: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    TURN: tl.constexpr,
    LATE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL and not LATE:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    first = tile * STEP
    end = tl.minimum(first + STEP, N)
    shift, columns = _shift(tile, 0, K, BLOCK_K, TURN)
    if PDL:
        if COLUMNS > 0:
            _prefetch(w_ptr, first, end, shift, K, K, BLOCK_N, COLUMNS, PIECES)
            _prefetch(w_ptr, N + first, N + end, shift, K, K, BLOCK_N, COLUMNS, PIECES)
        gdc_wait()
    gate = tl.zeros((BLOCK_N, ROWS), tl.float32)
    up = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        at = _turned(k, shift, columns, columns) if TURN > 0 else k
        w_gate = _load_w(w_ptr, w_desc, first, end, at, K, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K, TMA)
        w_up = _load_w(w_ptr, w_desc, N + first, N + end, at, K, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K, TMA)
        x = _load_x(x_ptr, x_desc, at, m, K, ROWS, BLOCK_K, EVEN_K, TMA)
        gate = _dot(w_gate, x, gate)
        up = _dot(w_up, x, up)
    if PDL and LATE:
        gdc_launch_dependents()
    product = gate / (1.0 + tl.exp(-gate)) * up
    n = first + tl.arange(0, BLOCK_N)[:, None]
    rows = tl.arange(0, ROWS)[None, :]
    mask = rows < m
    if not EVEN_N:
        mask = mask & (n < end)
    tl.store(out_ptr + rows * N + n, product.to(tl.bfloat16), mask=mask)


@triton.jit(do_not_specialize=["m"])  # type: ignore[untyped-decorator]
def head(  # type: ignore[no-untyped-def]
    x_ptr,  # (ROWS, K) bf16
    x_desc,
    w_ptr,  # (N, K) bf16
    w_desc,
    logits_ptr,  # (ROWS, N) fp32
    value_ptr,  # (ROWS, tiles) fp32: a tile's highest logit, +inf where one is NaN
    index_ptr,  # (ROWS, tiles) int32: the lowest id that has it
    m,
    N,
    K,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    TMA: tl.constexpr,
    COLUMNS: tl.constexpr,
    PIECES: tl.constexpr,
    STEP: tl.constexpr,
    TURN: tl.constexpr,
    LATE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL and not LATE:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    first = tile * STEP
    shift, columns = _shift(tile, 0, K, BLOCK_K, TURN)
    if PDL:
        if COLUMNS > 0 and tile < _FIRST_WAVE:
            _prefetch(w_ptr, first, N, shift, K, K, BLOCK_N, COLUMNS, PIECES)
        gdc_wait()
    acc = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        at = _turned(k, shift, columns, columns) if TURN > 0 else k
        w = _load_w(w_ptr, w_desc, first, N, at, K, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K, TMA)
        x = _load_x(x_ptr, x_desc, at, m, K, ROWS, BLOCK_K, EVEN_K, TMA)
        acc = _dot(w, x, acc)
    if PDL and LATE:
        gdc_launch_dependents()
    n = first + tl.arange(0, BLOCK_N)[:, None]
    rows = tl.arange(0, ROWS)[None, :]
    mask = rows < m
    if not EVEN_N:
        mask = mask & (n < N)
    tl.store(logits_ptr + rows.to(tl.int64) * N + n, acc, mask=mask)
    # A comparison with NaN is false: it would be passed over.
    seen = tl.where(acc == acc, acc, float("inf"))
    if not EVEN_N:
        seen = tl.where(n < N, seen, float("-inf"))
    best, at = tl.max(seen, axis=0, return_indices=True, return_indices_tie_break_left=True)
    row = tl.arange(0, ROWS)
    where = row * tl.num_programs(0) + tile
    tl.store(value_ptr + where, best, mask=row < m)
    tl.store(index_ptr + where, first + at, mask=row < m)


@triton.jit  # type: ignore[untyped-decorator]
def argmax(  # type: ignore[no-untyped-def]
    value_ptr,  # (rows, tiles) fp32
    index_ptr,  # (rows, tiles) int32
    token_ptr,  # (rows,) int32
    tiles,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < tiles
    value = tl.load(value_ptr + row * tiles + columns, mask=mask, other=float("-inf"))
    index = tl.load(index_ptr + row * tiles + columns, mask=mask, other=0x7FFFFFFF)
    value = tl.where(value == value, value, float("inf"))
    best = tl.max(value, axis=0)
    # Tiles are in the order of their ids, but the lowest id is what is promised.
    token = tl.min(tl.where(mask & (value == best), index, 0x7FFFFFFF), axis=0)
    finite = (best < float("inf")) & (best > float("-inf"))
    tl.store(token_ptr + row, tl.where(finite, token, -1))
