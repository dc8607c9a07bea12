"""The sampling kernel: one program a row goes over its logits a few times, which stay in L2 between the passes.

Probability mass is counted in fixed point, 2^44 for the most likely token of a row: sums of integers do not depend on
their order, so that neither atomics nor the batch around a row can change what it samples. A token below 2^-44 of the
most likely one weighs nothing (at 128k tokens all of these together are less than 1e-8).

The edges of top-k and top-p are exact values of logits, found digit by digit in the order-preserving integer image of
fp32: 11, 11 and 10 bits, a histogram each, of counts for top-k and of mass for top-p.
"""

from __future__ import annotations

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

BINS = tl.constexpr(2048)
ONE = tl.constexpr(float(2**44))
# 2^-58 weighs nothing.
LOWEST = tl.constexpr(-58.0)
NOTHING = tl.constexpr(-float("inf"))
FAR = tl.constexpr(2**31 - 1)
# Rounds of bisection for top-k's lower bound: the upper half of the image.
ROUNDS = tl.constexpr(16)


@triton.jit
def ordered(x):  # type: ignore[no-untyped-def]
    """fp32 → uint32 in the same order; -0 counts as 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def unordered(key):  # type: ignore[no-untyped-def]
    """The inverse of `ordered`."""
    bits = key.to(tl.int32, bitcast=True)
    return (bits ^ ((~bits >> 31) | -2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def mass(x, peak, rate):  # type: ignore[no-untyped-def]
    """exp((x - peak) / temperature) in units of 2^-44, int64, where rate is log2(e) / temperature.

    The product's rounding moves a token's probability by 1e-6 of itself at most where it still has a share.
    """
    return (tl.exp2(tl.maximum((x - peak) * rate, LOWEST)) * ONE).to(tl.int64)


@triton.jit
def lower_bound(best, count):  # type: ignore[no-untyped-def]
    """A key that at least `count` values of `best` reach: its image's upper half as high as possible."""
    keys = ordered(best)
    low = tl.zeros((), tl.uint32)
    for step in range(ROUNDS):
        tried = low | (tl.full((), 1, tl.uint32) << (31 - step))
        enough = tl.sum((keys >= tried).to(tl.int32)) >= count
        low = tl.where(enough, tried, low)
    return low


@triton.jit  # type: ignore[untyped-decorator]
def find_edge(  # type: ignore[no-untyped-def]
    row,
    bins,  # int64 (BINS,), this program's own
    target,  # int64 > 0
    lowest,  # keys below take no part
    least,  # masses below take no part
    peak,
    rate,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """(the highest key such that the keys from it on reach `target` in count or in mass; what those above it have; what
    those at it have)."""
    lanes = tl.arange(0, BLOCK)
    numbers = tl.arange(0, BINS)
    edge = tl.zeros((), tl.uint32)
    above = tl.zeros((), tl.int64)
    among = tl.zeros((), tl.int64)
    for digit in range(3):
        shift = tl.maximum(21 - 11 * digit, 0)
        width = tl.minimum(11, 10 + (2 - digit))
        tl.store(bins + numbers, tl.zeros((BINS,), tl.int64))
        tl.debug_barrier()
        for start in range(0, VOCAB, BLOCK):
            ids = start + lanes
            x = tl.load(row + ids, mask=ids < VOCAB, other=NOTHING)
            key = ordered(x)
            # Two shifts: of one by all 32 bits nothing is promised.
            live = (ids < VOCAB) & (key >= lowest) & (((key >> shift) >> width) == edge)
            if WEIGHTED:
                amount = mass(x, peak, rate)
                live &= amount >= least
            else:
                amount = tl.full((BLOCK,), 1, tl.int64)
            at = (key >> shift).to(tl.int32, bitcast=True) & ((1 << width) - 1)
            tl.atomic_add(bins + (-at + (BINS - 1)), amount, mask=live, sem="relaxed")
        tl.debug_barrier()
        # The atomics went by the first-level cache. The highest digit comes first.
        held = tl.load(bins + numbers, cache_modifier=".cg")
        reached = above + tl.cumsum(held)
        chosen = tl.minimum(tl.sum((reached < target).to(tl.int32)), BINS - 1)
        above += tl.sum(tl.where(numbers < chosen, held, 0))
        among = tl.sum(tl.where(numbers == chosen, held, 0))
        edge = (edge << width) | (-chosen + (BINS - 1)).to(tl.uint32)
        tl.debug_barrier()
    return edge, above, among


@triton.jit  # type: ignore[untyped-decorator]
def mass_from(  # type: ignore[no-untyped-def]
    row, edge, peak, rate, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    """Mass of the tokens from `edge` on."""
    lanes = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, VOCAB, BLOCK):
        ids = start + lanes
        x = tl.load(row + ids, mask=ids < VOCAB, other=NOTHING)
        amount = mass(x, peak, rate)
        sums += tl.where((ids < VOCAB) & (ordered(x) >= edge), amount, 0)
    return tl.sum(sums)


@triton.jit  # type: ignore[untyped-decorator]
def block_sums(  # type: ignore[no-untyped-def]
    row,
    edge,
    equals,  # how many of the tokens at the edge stay: those of the lowest ids; FAR: all
    least,
    peak,
    rate,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """(mass that is kept, tokens at the edge in the blocks before if not all stay), both (BLOCKS,)."""
    lanes = tl.arange(0, BLOCK)
    numbers = tl.arange(0, BLOCKS)
    sums = tl.zeros((BLOCKS,), tl.int64)
    befores = tl.zeros((BLOCKS,), tl.int32)
    before = tl.zeros((), tl.int32)
    each = mass(unordered(edge), peak, rate)
    each = tl.where(each >= least, each, 0)
    for number in range((VOCAB + BLOCK - 1) // BLOCK):
        ids = number * BLOCK + lanes
        x = tl.load(row + ids, mask=ids < VOCAB, other=NOTHING)
        key = ordered(x)
        amount = mass(x, peak, rate)
        stays = (key > edge) | ((key == edge) & (equals == FAR))
        total = tl.sum(tl.where((ids < VOCAB) & (amount >= least) & stays, amount, 0))
        if equals < FAR:
            count = tl.sum(((ids < VOCAB) & (key == edge)).to(tl.int32))
            some = tl.minimum(tl.maximum(equals - before, 0), count)
            total += some.to(tl.int64) * each
            befores = tl.where(numbers == number, before, befores)
            before += count
        sums = tl.where(numbers == number, total, sums)
    return sums, befores


@triton.jit  # type: ignore[untyped-decorator]
def lane_peaks(row, VOCAB: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each lane's largest logit and the lowest id that has it, (BLOCK,) both; whether any is NaN."""
    lanes = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), NOTHING, tl.float32)
    where = lanes
    odd = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, VOCAB, BLOCK):
        ids = start + lanes
        x = tl.load(row + ids, mask=ids < VOCAB, other=NOTHING)
        odd |= (x != x).to(tl.int32)
        better = x > best
        best = tl.where(better, x, best)
        where = tl.where(better, ids, where)
    return best, where, tl.max(odd)


@triton.jit  # type: ignore[untyped-decorator]
def draw(  # type: ignore[no-untyped-def]
    row,
    noise,
    edge,
    equals,
    least,
    peak,
    rate,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The first id up to which more than `noise` of the kept mass lies."""
    sums, befores = block_sums(row, edge, equals, least, peak, rate, VOCAB, BLOCK, BLOCKS)
    total = tl.sum(sums)
    goal = tl.minimum((noise * total.to(tl.float64)).to(tl.int64), total - 1)
    numbers = tl.arange(0, BLOCKS)
    number = tl.sum((tl.cumsum(sums) <= goal).to(tl.int32))
    goal -= tl.sum(tl.where(numbers < number, sums, 0))
    before = tl.sum(tl.where(numbers == number, befores, 0))
    ids = number * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(row + ids, mask=ids < VOCAB, other=NOTHING)
    key = ordered(x)
    amount = mass(x, peak, rate)
    equal = (ids < VOCAB) & (key == edge)
    stays = equal & (before + tl.cumsum(equal.to(tl.int32)) <= equals)
    kept = (ids < VOCAB) & (amount >= least) & ((key > edge) | stays)
    reached = tl.cumsum(tl.where(kept, amount, 0))
    return number * BLOCK + tl.sum((reached <= goal).to(tl.int32))


@triton.jit  # type: ignore[untyped-decorator]
def sample_kernel(  # type: ignore[no-untyped-def]
    logits,  # fp32 (R, VOCAB), contiguous
    noise_ptr,  # fp64 (N,) in (0, 1)
    top_p_ptr,  # fp64 (N,); 1: off
    least_ptr,  # int64 (N,): mass that min_p asks of a token; 0: off
    adjusted_ptr,  # int64 (N,): where the row after penalties is, in floats from `logits`; 0: the raw row is sampled
    rate_ptr,  # fp32 (N,): log2(e) / temperature; 0: greedy
    row_ptr,  # int32 (N,): row of logits
    top_k_ptr,  # int32 (N,), below VOCAB; 0: off
    slot_ptr,  # int32 (N,): row of `state` that counts this sequence's tokens; -1: none
    state,  # int32 (slots, VOCAB): 2 * times sampled + (in the prompt)
    scratch,  # int64 (N, BINS)
    tokens,  # int32 (N,) out
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # a power of two >= VOCAB / BLOCK
    ALIGN: tl.constexpr,  # floats that the start of a row is a multiple of
):
    at = tl.program_id(0)
    raw = tl.load(row_ptr + at).to(tl.int64) * VOCAB
    offset = raw
    best, where, odd = lane_peaks(logits + tl.multiple_of(raw, ALIGN), VOCAB, BLOCK)
    peak = tl.max(best)
    finite = (odd == 0) & (peak > NOTHING) & (peak < -NOTHING)
    token = tl.full((), -1, tl.int32)
    if finite:
        adjusted = tl.load(adjusted_ptr + at)
        if adjusted != 0:
            best_after, where_after, _ = lane_peaks(logits + tl.multiple_of(adjusted, ALIGN), VOCAB, BLOCK)
            # Where every token is banned the row stays as it was.
            if tl.max(best_after) > NOTHING:
                best = best_after
                where = where_after
                peak = tl.max(best_after)
                offset = adjusted
        token = tl.min(tl.where(best == peak, where, FAR))
        row = logits + tl.multiple_of(offset, ALIGN)
        rate = tl.load(rate_ptr + at)
        if rate > 0.0:
            top_k = tl.load(top_k_ptr + at)
            top_p = tl.load(top_p_ptr + at)
            edge = ordered(tl.full((), NOTHING, tl.float32))
            equals = tl.full((), FAR, tl.int32)
            if top_k > 0:
                lowest = tl.zeros((), tl.uint32)
                # So many lanes have a logit of at least this, so only the few from it on are counted.
                if top_k <= BLOCK:
                    lowest = lower_bound(best, top_k)
                edge, _, _ = find_edge(
                    row,
                    scratch + at * BINS,
                    top_k.to(tl.int64),
                    lowest,
                    0,
                    peak,
                    rate,
                    VOCAB,
                    BLOCK,
                    False,
                )
            if top_p < 1.0:
                total = mass_from(row, edge, peak, rate, VOCAB, BLOCK).to(tl.float64)
                target = tl.maximum(tl.ceil(top_p * total).to(tl.int64), 1)
                # Tokens below weigh less together than the tail that is cut.
                least = tl.maximum(((1.0 - top_p) * total * (0.999 / VOCAB)).to(tl.int64), 1)
                edge, above, among = find_edge(
                    row, scratch + at * BINS, target, edge, least, peak, rate, VOCAB, BLOCK, True
                )
                each = tl.maximum(mass(unordered(edge), peak, rate), 1)
                # Of equals at the edge only as many as the target needs.
                if above + among - each >= target:
                    equals = tl.maximum((target - above + each - 1) // each, 1).to(tl.int32)
            least = tl.load(least_ptr + at)
            token = draw(row, tl.load(noise_ptr + at), edge, equals, least, peak, rate, VOCAB, BLOCK, BLOCKS)
        slot = tl.load(slot_ptr + at)
        if slot >= 0:
            tl.atomic_add(state + slot.to(tl.int64) * VOCAB + token, 2, sem="relaxed")
    tl.store(tokens + at, token)
