"""What is done to logits before they are sampled: bias, bans, penalties; and the counts that penalties are made of.

Counts live on the device, because a step is queued before the host knows the token of the step before it. A word a
token: 2 * (times sampled) + (1 if the prompt has it).
"""

from __future__ import annotations

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit  # type: ignore[untyped-decorator]
def count_kernel(  # type: ignore[no-untyped-def]
    slot_ptr,  # int32 (N,): row of `state`
    first_ptr,  # int32 (N,): of this sequence's ids
    prompt_ptr,  # int32 (N,): ids of the prompt
    output_ptr,  # int32 (N,): sampled ids, behind them
    ids,  # int32 (...): those outside the vocabulary are ignored
    state,  # int32 (slots, VOCAB)
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Counts a sequence's tokens anew; one program a sequence."""
    at = tl.program_id(0)
    counts = state + tl.load(slot_ptr + at).to(tl.int64) * VOCAB
    first = tl.load(first_ptr + at)
    middle = first + tl.load(prompt_ptr + at)
    last = middle + tl.load(output_ptr + at)
    lanes = tl.arange(0, BLOCK)
    for start in range(0, VOCAB, BLOCK):
        tl.store(counts + start + lanes, tl.zeros((BLOCK,), tl.int32), mask=start + lanes < VOCAB)
    tl.debug_barrier()
    # `while`, because the interpreter knows no range up to a loaded value.
    start = first
    while start < middle:
        mask = start + lanes < middle
        token = tl.load(ids + start + lanes, mask=mask, other=-1)
        tl.atomic_or(counts + token, 1, mask=mask & (token >= 0) & (token < VOCAB), sem="relaxed")
        start += BLOCK
    start = middle
    while start < last:
        mask = start + lanes < last
        token = tl.load(ids + start + lanes, mask=mask, other=-1)
        tl.atomic_add(counts + token, 2, mask=mask & (token >= 0) & (token < VOCAB), sem="relaxed")
        start += BLOCK


@triton.jit
def penalize(x, seen, repetition, frequency, presence):  # type: ignore[no-untyped-def]
    """Repetition over prompt and output, then frequency and presence over the output, rounded as on the CPU."""
    scaled = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    # A tiny penalty overflows fp32, and an infinite logit makes NaN of every probability.
    x = tl.where(seen != 0, tl.minimum(scaled, LARGEST), x)
    sampled = seen >> 1
    return tl.where(sampled > 0, x - (frequency * sampled + presence).to(tl.float32), x)


@triton.jit  # type: ignore[untyped-decorator]
def adjust_kernel(  # type: ignore[no-untyped-def]
    logits,  # fp32 (R, VOCAB)
    number_ptr,  # int32 (P,): which of the step's samples
    row_ptr,  # int32 (N,): row of logits
    slot_ptr,  # int32 (N,): row of `state`, -1: no penalties
    repetition_ptr,  # fp32 (N,)
    frequency_ptr,  # fp64 (N,)
    presence_ptr,  # fp64 (N,)
    state,  # int32 (slots, VOCAB)
    adjusted,  # fp32 (>= P, VOCAB) out
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row p of `adjusted` = sample p's logits with its penalties."""
    place = tl.program_id(1)
    at = tl.load(number_ptr + place)
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = ids < VOCAB
    x = tl.load(logits + tl.load(row_ptr + at).to(tl.int64) * VOCAB + ids, mask=mask)
    slot = tl.load(slot_ptr + at)
    if slot >= 0:
        seen = tl.load(state + slot.to(tl.int64) * VOCAB + ids, mask=mask, other=0)
        x = penalize(x, seen, tl.load(repetition_ptr + at), tl.load(frequency_ptr + at), tl.load(presence_ptr + at))
    tl.store(adjusted + place.to(tl.int64) * VOCAB + ids, x, mask=mask)


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def bias_kernel(  # type: ignore[no-untyped-def]
    logits,
    place_ptr,  # int32 (E,): row of `adjusted`
    token_ptr,  # int32 (E,)
    bias_ptr,  # fp32 (E,); -inf: banned
    count,
    number_ptr,
    row_ptr,
    slot_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    state,
    adjusted,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Single tokens once more, with a bias: it comes before the penalties. The (row, token) are distinct."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = entry < count
    place = tl.load(place_ptr + entry, mask=mask, other=0)
    token = tl.load(token_ptr + entry, mask=mask, other=0)
    at = tl.load(number_ptr + place, mask=mask, other=0)
    x = tl.load(logits + tl.load(row_ptr + at, mask=mask, other=0).to(tl.int64) * VOCAB + token, mask=mask, other=0.0)
    x += tl.load(bias_ptr + entry, mask=mask, other=0.0)
    slot = tl.load(slot_ptr + at, mask=mask, other=-1)
    seen = tl.load(state + slot.to(tl.int64) * VOCAB + token, mask=mask & (slot >= 0), other=0)
    repetition = tl.load(repetition_ptr + at, mask=mask, other=1.0)
    frequency = tl.load(frequency_ptr + at, mask=mask, other=0.0)
    presence = tl.load(presence_ptr + at, mask=mask, other=0.0)
    x = penalize(x, seen, repetition, frequency, presence)
    tl.store(adjusted + place.to(tl.int64) * VOCAB + token, x, mask=mask)
