"""Grammars' masks on logits."""

from __future__ import annotations

import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]


@triton.jit(do_not_specialize=["words_each"])  # type: ignore[untyped-decorator]
def mask_kernel(  # type: ignore[no-untyped-def]
    place_ptr,  # int32 (M,): row of `adjusted`
    words,  # int32 (M, words_each): bit t % 32 of word t // 32 allows token t
    words_each,
    adjusted,  # fp32 (rows, VOCAB)
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What is not allowed becomes -inf; the rest stays as it is."""
    which = tl.program_id(1)
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < VOCAB
    word = tl.load(words + which * words_each + (ids >> 5), mask=inside, other=0)
    banned = ((word >> (ids & 31)) & 1) == 0
    row = adjusted + tl.load(place_ptr + which).to(tl.int64) * VOCAB
    tl.store(row + ids, tl.full((BLOCK,), -float("inf"), tl.float32), mask=inside & banned)
