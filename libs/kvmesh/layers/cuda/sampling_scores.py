"""Log probabilities of sampled tokens under the raw distribution: what the host needs to name them."""

from __future__ import annotations

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

from kvmesh.layers.cuda.sampling_kernels import FAR, NOTHING, lane_peaks, mass

# Words of a score before its alternatives: token, rank, logit, peak, then the sum's low and high half.
HEADER = tl.constexpr(6)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["width"])  # type: ignore[untyped-decorator]
def score_kernel(  # type: ignore[no-untyped-def]
    logits,  # fp32 (R, VOCAB), contiguous
    number_ptr,  # int32 (S,): which of the step's samples
    count_ptr,  # int32 (N,): alternatives
    row_ptr,  # int32 (N,): row of logits
    tokens,  # int32 (N,); -1: only the token is written
    scores,  # int32 (S, width) out; floats by their bits; alternatives: (id, logit) each, most likely first
    width,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    at = tl.load(number_ptr + tl.program_id(0))
    out = scores + tl.program_id(0).to(tl.int64) * width
    row = logits + tl.multiple_of(tl.load(row_ptr + at).to(tl.int64) * VOCAB, ALIGN)
    token = tl.load(tokens + at)
    tl.store(out, token)
    if token >= 0:
        lanes = tl.arange(0, BLOCK)
        best, where, _ = lane_peaks(row, VOCAB, BLOCK)
        peak = tl.max(best)
        chosen = tl.load(row + token)
        sums = tl.zeros((BLOCK,), tl.int64)
        higher = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, VOCAB, BLOCK):
            ids = start + lanes
            x = tl.load(row + ids, mask=ids < VOCAB, other=NOTHING)
            sums += tl.where(ids < VOCAB, mass(x, peak, LOG2E), 0)
            higher += (x > chosen).to(tl.int32)
        total = tl.sum(sums)
        tl.store(out + 1, 1 + tl.sum(higher))
        tl.store(out + 2, chosen.to(tl.int32, bitcast=True))
        tl.store(out + 3, peak.to(tl.int32, bitcast=True))
        tl.store(out + 4, total.to(tl.int32))
        tl.store(out + 5, (total >> 32).to(tl.int32))
        blocks = tl.arange(0, BLOCKS)
        count = tl.load(count_ptr + at)
        number = 0
        while number < count:
            value = tl.max(best)
            found = tl.min(tl.where(best == value, where, FAR))
            tl.store(out + HEADER + 2 * number, found)
            tl.store(out + HEADER + 2 * number + 1, value.to(tl.int32, bitcast=True))
            # What comes next in the lane that it was taken from.
            lane = found % BLOCK
            ids = blocks * BLOCK + lane
            x = tl.load(row + ids, mask=ids < VOCAB, other=NOTHING)
            later = (ids < VOCAB) & ((x < value) | ((x == value) & (ids > found)))
            x = tl.where(later, x, NOTHING)
            value = tl.max(x)
            found = tl.min(tl.where(later & (x == value), ids, FAR))
            best = tl.where(lanes == lane, value, best)
            where = tl.where(lanes == lane, found, where)
            number += 1
