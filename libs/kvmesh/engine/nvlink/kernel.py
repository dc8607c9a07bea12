"""The scatter kernel: copies a step's rows of one or more layers into peers' memory, then stores their byte counters.

A persistent grid walks (layer, row, chunk) items. The last block to end stores the counters with release at system
scope: whoever reads a counter on the host afterwards may have the destination's kernels read the bytes.
"""

from __future__ import annotations

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

# One compiled kernel for every step: nothing is specialized by its value or its alignment.
NUMBERS = ("rows", "chunks", "first_layer", "layers", "counters")
POINTERS = (
    "src_ptr",
    "dst_ptr",
    "length_ptr",
    "dst_stride_ptr",
    "src_stride_ptr",
    "counter_ptr",
    "value_ptr",
    "ticket_ptr",
)


@triton.jit(do_not_specialize=[*NUMBERS, *POINTERS])  # type: ignore[untyped-decorator]
def scatter(  # type: ignore[no-untyped-def]
    src_ptr,  # (rows,) addresses in layer 0 of the group
    dst_ptr,  # (rows,)
    length_ptr,  # (rows,) bytes
    dst_stride_ptr,  # (rows,) bytes from layer to layer at the destination
    src_stride_ptr,  # (rows,) the same here
    counter_ptr,  # (counters,) addresses in mapped host memory
    value_ptr,  # (counters,) what they are set to
    ticket_ptr,  # one int32, 0 between launches
    rows,
    chunks,  # of BLOCK words that the longest row has
    first_layer,
    layers,
    counters,
    BLOCK: tl.constexpr,
    COUNTERS: tl.constexpr,
    WORD: tl.constexpr,  # bytes: 8 where every address and length is a multiple of 16, else 1
):
    grid = tl.num_programs(0)
    offsets = tl.arange(0, BLOCK)
    for item in range(tl.program_id(0), layers * rows * chunks, grid):
        chunk = item % chunks
        row = (item // chunks) % rows
        layer = (first_layer + item // (chunks * rows)).to(tl.int64)
        at = chunk.to(tl.int64) * (BLOCK * WORD)
        left = tl.load(length_ptr + row) - at
        src = tl.load(src_ptr + row) + layer * tl.load(src_stride_ptr + row) + at
        dst = tl.load(dst_ptr + row) + layer * tl.load(dst_stride_ptr + row) + at
        if WORD == 8:
            source = tl.multiple_of(src.to(tl.pointer_type(tl.int64)), 16)
            target = tl.multiple_of(dst.to(tl.pointer_type(tl.int64)), 16)
        else:
            source = src.to(tl.pointer_type(tl.int8))
            target = dst.to(tl.pointer_type(tl.int8))
        if left >= BLOCK * WORD:
            tl.store(target + offsets, tl.load(source + offsets))
        elif left > 0:
            words = left // WORD
            if WORD == 8:
                words = tl.multiple_of(words, 2)
            mask = offsets < words
            tl.store(target + offsets, tl.load(source + offsets, mask=mask), mask=mask)
    # All of this block's stores before its ticket.
    tl.debug_barrier()
    ticket = tl.atomic_add(ticket_ptr, 1, sem="acq_rel", scope="sys")
    if ticket == grid - 1:
        tl.store(ticket_ptr, 0)
        for first in range(0, counters, COUNTERS):
            numbers = first + tl.arange(0, COUNTERS)
            mask = numbers < counters
            addresses = tl.load(counter_ptr + numbers, mask=mask, other=0).to(tl.pointer_type(tl.int64))
            values = tl.load(value_ptr + numbers, mask=mask, other=0)
            tl.atomic_xchg(addresses, values, mask=mask, sem="release", scope="sys")
