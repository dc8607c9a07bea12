"""Launches of the sampling kernels. Nothing is allocated or waited for; all go to the current stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-not-found]

from kvmesh.layers.cuda.sampling_kernels import BINS, sample_kernel
from kvmesh.layers.cuda.sampling_masks import mask_kernel
from kvmesh.layers.cuda.sampling_penalties import adjust_kernel, bias_kernel, count_kernel
from kvmesh.layers.cuda.sampling_scores import HEADER, score_kernel

SCRATCH_WORDS = int(BINS.value)
SCORE_HEADER = int(HEADER.value)
# Mass of the most likely token of a row at temperature 1, in which sums are given.
UNIT = 2.0**44
_BLOCK = 8192
_WARPS = 16
_DENSE_BLOCK = 4096
_SPARSE_BLOCK = 256
_COUNT_BLOCK = 4096
# 2^44 a token must not overflow int64.
MAX_VOCAB = 1 << 18


@dataclass(frozen=True, slots=True)
class Columns:
    """Per-sample parameters on the device, (N,) each; see `sample_kernel` for units."""

    noise: torch.Tensor  # fp64
    top_p: torch.Tensor  # fp64
    frequency: torch.Tensor  # fp64
    presence: torch.Tensor  # fp64
    least: torch.Tensor  # int64
    adjusted: torch.Tensor  # int64
    rate: torch.Tensor  # fp32
    repetition: torch.Tensor  # fp32
    row: torch.Tensor  # int32
    top_k: torch.Tensor  # int32
    slot: torch.Tensor  # int32
    alternatives: torch.Tensor  # int32


def _blocks(vocab: int) -> tuple[int, int]:
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    return block, triton.next_power_of_2(triton.cdiv(vocab, block))


def _align(vocab: int) -> int:
    """Floats that the start of every row is a multiple of: with 4 a thread loads 16 bytes at a time."""
    return 4 if vocab % 4 == 0 else 1


def sample(
    logits: torch.Tensor, columns: Columns, count: int, state: torch.Tensor, scratch: torch.Tensor, tokens: torch.Tensor
) -> None:
    """logits fp32 (R, vocab) → tokens int32 (count,), -1 where a row is not finite; counts them in `state`."""
    vocab = logits.shape[1]
    block, blocks = _blocks(vocab)
    sample_kernel[(count,)](
        logits,
        columns.noise,
        columns.top_p,
        columns.least,
        columns.adjusted,
        columns.rate,
        columns.row,
        columns.top_k,
        columns.slot,
        state,
        scratch,
        tokens,
        VOCAB=vocab,
        BLOCK=block,
        BLOCKS=blocks,
        ALIGN=_align(vocab),
        num_warps=_WARPS,
    )


def count_tokens(
    slots: torch.Tensor,
    first: torch.Tensor,
    prompt: torch.Tensor,
    output: torch.Tensor,
    ids: torch.Tensor,
    state: torch.Tensor,
) -> None:
    """Rows `slots` (N,) of state int32 (slots, vocab) anew, from ids[first:]: `prompt` of them, then `output`."""
    count_kernel[(len(slots),)](
        slots, first, prompt, output, ids, state, VOCAB=state.shape[1], BLOCK=_COUNT_BLOCK, num_warps=8
    )


def adjust(
    logits: torch.Tensor, numbers: torch.Tensor, columns: Columns, state: torch.Tensor, adjusted: torch.Tensor
) -> None:
    """Row p of adjusted fp32 (>= P, vocab) = sample numbers[p]'s logits with its penalties; numbers int32 (P,)."""
    vocab = logits.shape[1]
    adjust_kernel[(triton.cdiv(vocab, _DENSE_BLOCK), len(numbers))](
        logits,
        numbers,
        columns.row,
        columns.slot,
        columns.repetition,
        columns.frequency,
        columns.presence,
        state,
        adjusted,
        VOCAB=vocab,
        BLOCK=_DENSE_BLOCK,
        num_warps=8,
    )


def bias(
    logits: torch.Tensor,
    places: torch.Tensor,
    tokens: torch.Tensor,
    biases: torch.Tensor,
    numbers: torch.Tensor,
    columns: Columns,
    state: torch.Tensor,
    adjusted: torch.Tensor,
) -> None:
    """Behind `adjust`: entry e is token tokens[e] of row places[e] with biases[e] fp32, -inf a ban; all (E,)."""
    bias_kernel[(triton.cdiv(len(places), _SPARSE_BLOCK),)](
        logits,
        places,
        tokens,
        biases,
        len(places),
        numbers,
        columns.row,
        columns.slot,
        columns.repetition,
        columns.frequency,
        columns.presence,
        state,
        adjusted,
        VOCAB=logits.shape[1],
        BLOCK=_SPARSE_BLOCK,
        num_warps=4,
    )


def mask(places: torch.Tensor, words: torch.Tensor, adjusted: torch.Tensor) -> None:
    """Behind `bias`: rows places (M,) of adjusted keep only what words int32 (M * W,) allow, W words a row."""
    count, vocab = len(places), adjusted.shape[1]
    mask_kernel[(triton.cdiv(vocab, _DENSE_BLOCK), count)](
        places, words, len(words) // count, adjusted, VOCAB=vocab, BLOCK=_DENSE_BLOCK, num_warps=8
    )


def score(
    logits: torch.Tensor,
    numbers: torch.Tensor,
    alternatives: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    scores: torch.Tensor,
) -> None:
    """scores int32 (>= S, SCORE_HEADER + 2 * alternatives at most) of samples numbers (S,): see `score_kernel`.

    alternatives, rows, tokens: int32 (N,), by number of sample.
    """
    vocab = logits.shape[1]
    block, blocks = _blocks(vocab)
    score_kernel[(len(numbers),)](
        logits,
        numbers,
        alternatives,
        rows,
        tokens,
        scores,
        scores.shape[1],
        VOCAB=vocab,
        BLOCK=block,
        BLOCKS=blocks,
        ALIGN=_align(vocab),
        num_warps=_WARPS,
    )
