"""A segment of decode attention over e4m3 pages: tiles of pairs of elements, unpacked in registers.

Tensor cores multiply 16-bit types here, and what feeds them moves 16-bit elements. So a tile is loaded as (tokens,
D / 2) of two neighbours each, takes the same way as bf16's, and is unpacked into even and odd columns in the very
registers that the product reads. A score is the sum of two products of D / 2; output columns are two accumulators,
interleaved at the end. Products are in fp16, in which e4m3 is exact and which is one instruction
away from it, where bf16 is three.
"""

from __future__ import annotations

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

# The interpreter has no assembler.
ASSEMBLED = tl.constexpr(not triton.knobs.runtime.interpret)
FP16_MAX = tl.constexpr(65504.0)


@triton.jit
def _unpack(pairs):  # type: ignore[no-untyped-def]
    """(even, odd) fp16 of pairs of e4m3 in int16."""
    if ASSEMBLED:
        # Two pairs a register: bytes 0 and 2 are the even ones.
        return tl.inline_asm_elementwise(
            """{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $2, 0, 0x3120; mov.b32 {a, b}, t;
            cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    even = (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    odd = ((pairs >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return even.to(tl.float16), odd.to(tl.float16)


@triton.jit  # type: ignore[untyped-decorator]
def _queries(q_ptr, GROUP: tl.constexpr, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """(16, D / 2) fp16: the group's, then zeros; every other column from q_ptr on."""
    row = tl.arange(0, 16)
    columns = 2 * tl.arange(0, D // 2)
    q = tl.load(q_ptr + row[:, None] * D + columns[None, :], mask=(row < GROUP)[:, None], other=0.0)
    return tl.clamp(q.to(tl.float32), -FP16_MAX, FP16_MAX, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)


@triton.jit  # type: ignore[untyped-decorator]
def paired(  # type: ignore[no-untyped-def]
    q_ptr, kv_ptr, table_ptr, begin, end, scale,
    GROUP: tl.constexpr, PAGE: tl.constexpr, SHIFT: tl.constexpr, PAGE_STRIDE: tl.constexpr, D: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """acc (16, D), sums (16,), maxima (16,) in log2 of one segment's tokens; kv_ptr: int16, PAGE_STRIDE in it."""
    LINE: tl.constexpr = D // 2
    m = tl.full((16,), float("-inf"), tl.float32)
    l = tl.zeros((16, TILE), tl.float32)  # noqa: E741
    acc_even = tl.zeros((16, LINE), tl.float32)
    acc_odd = tl.zeros((16, LINE), tl.float32)
    column = tl.arange(0, LINE)
    token = begin + tl.arange(0, TILE)
    ids = tl.load(table_ptr + (token >> SHIFT), mask=token < end, other=0)
    q_even = _queries(q_ptr, GROUP, D)
    q_odd = _queries(q_ptr + 1, GROUP, D)
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        token = start + tl.arange(0, TILE)
        valid = token < end
        at = ids.to(tl.int64) * PAGE_STRIDE + (token & (PAGE - 1)) * LINE
        keys = kv_ptr + at[:, None] + column[None, :]
        k = tl.load(keys, mask=valid[:, None], other=0)
        v = tl.load(keys + PAGE * LINE, mask=valid[:, None], other=0)
        ids = tl.load(table_ptr + ((token + TILE) >> SHIFT), mask=token + TILE < end, other=0)
        k_even, k_odd = _unpack(tl.trans(k))
        s = tl.dot(q_odd, k_odd, tl.dot(q_even, k_even))
        s = tl.where(valid[None, :], s * scale, float("-inf"))
        top = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - top[:, None])
        fade = tl.exp2(m - top)
        m = top
        l = l * fade[:, None] + p  # noqa: E741
        v_even, v_odd = _unpack(v)
        weights = p.to(tl.float16)
        acc_even = tl.dot(weights, v_even, acc_even * fade[:, None])
        acc_odd = tl.dot(weights, v_odd, acc_odd * fade[:, None])
    return tl.reshape(tl.join(acc_even, acc_odd), (16, D)), tl.sum(l, 1), m
