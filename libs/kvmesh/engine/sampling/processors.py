"""From raw logits to the distribution that is sampled. numpy, one row at a time.

Order: logit bias, banned ids, repetition, frequency and presence penalties; a grammar's mask; then temperature, top-k,
top-p, min-p.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvmesh.engine.runner import SampleInput, SamplingParams
from kvmesh.grammar.match import without

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
_LARGEST = np.finfo(np.float32).max


def needs_processing(sample: SampleInput) -> bool:
    """Whether `adjust` would change a row."""
    p = sample.params
    return bool(
        p.logit_bias
        or sample.banned_token_ids
        or sample.grammar is not None
        or p.repetition_penalty != 1.0
        or p.frequency_penalty != 0.0
        or p.presence_penalty != 0.0
    )


def _ids(tokens: Sequence[int] | frozenset[int], vocab: int) -> Ids:
    ids = np.fromiter(tokens, dtype=np.int64, count=len(tokens))
    return ids[(ids >= 0) & (ids < vocab)]


def permitted(sample: SampleInput) -> npt.NDArray[np.uint32]:
    """The mask of a sample with a grammar: bans count as long as they leave anything."""
    assert sample.grammar is not None
    return without(sample.grammar.mask(), sample.banned_token_ids)


def permitted_ids(sample: SampleInput, vocab: int) -> Ids:
    """`permitted` as token ids, ascending."""
    words = permitted(sample).astype("<u4", copy=False)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little", count=vocab))


def adjust(logits: Floats, sample: SampleInput) -> Floats:
    """A new row (vocab,) with bias, bans and penalties applied; bans of a sample with a grammar are `permitted`'s."""
    p, vocab = sample.params, len(logits)
    row = logits.copy()
    for token, bias in p.logit_bias.items():
        if 0 <= token < vocab:
            row[token] += np.float32(bias)
    if sample.banned_token_ids and sample.grammar is None:
        row[_ids(sample.banned_token_ids, vocab)] = -np.inf
    if p.repetition_penalty != 1.0:
        seen = np.concatenate([_ids(sample.prompt_token_ids, vocab), _ids(sample.output_token_ids, vocab)])
        # Duplicates read before any is written, so each id is scaled once.
        value = row[seen]
        with np.errstate(over="ignore"):
            scaled = np.where(value > 0, value / p.repetition_penalty, value * p.repetition_penalty)
        # A tiny penalty overflows fp32, and an infinite logit makes NaN of every probability.
        row[seen] = np.minimum(scaled, _LARGEST)
    if (p.frequency_penalty or p.presence_penalty) and sample.output_token_ids:
        ids, counts = np.unique(_ids(sample.output_token_ids, vocab), return_counts=True)
        row[ids] -= (p.frequency_penalty * counts + p.presence_penalty).astype(np.float32)
    return row


def distribution(row: Floats, params: SamplingParams) -> tuple[Ids, npt.NDArray[np.float64]]:
    """(token ids, probabilities summing to 1) that survive temperature, top-k, top-p and min-p; temperature > 0.

    Ids ascend. Ties at the top-k edge are all kept; top-p keeps the smallest set of
    most likely tokens whose mass reaches `top_p` (the token that crosses it included), after top-k's renormalization.
    """
    vocab = len(row)
    if 0 < params.top_k < vocab:
        edge = np.partition(row, vocab - params.top_k)[vocab - params.top_k]
        ids = np.flatnonzero(row >= edge)
        scores = row[ids].astype(np.float64)
        peak = scores.max()
        probs = np.exp((scores - peak) / params.temperature)
    else:
        # fp32 exp is vectorized and four times cheaper; the sum and everything after it are fp64.
        ids = np.arange(vocab)
        with np.errstate(over="ignore"):  # to -inf, whose exp is 0
            scaled = (row - row.max()) / np.float32(params.temperature)
        probs = np.exp(scaled).astype(np.float64)
    probs /= probs.sum()
    if params.min_p > 0.0 or params.top_p < 1.0:
        # Both are thresholds on one distribution: min-p is relative to the largest, so that renormalizing between
        # them would change nothing.
        keep = probs >= params.min_p * probs.max()
        if params.top_p < 1.0:
            keep &= _nucleus(probs, params.top_p)
        ids, probs = ids[keep], probs[keep]
    return ids, probs / probs.sum()


def _nucleus(probs: npt.NDArray[np.float64], top_p: float) -> npt.NDArray[np.bool_]:
    """Mask of the smallest set whose mass reaches top_p. Of equals at the edge the lowest ids stay, on any machine."""
    # Tokens below (1 - top_p) / n together weigh less than the tail that is cut, so they need no sorting; and sorting
    # values is several times cheaper than sorting indices.
    ordered = np.sort(probs[probs >= (1.0 - top_p) / len(probs)])[::-1]
    before = np.cumsum(ordered) - ordered
    count = max(1, int(np.searchsorted(before, top_p, side="left")))
    edge = ordered[count - 1]
    keep: npt.NDArray[np.bool_] = probs > edge
    keep[np.flatnonzero(probs == edge)[: count - int(np.count_nonzero(keep))]] = True
    return keep


def draw(ids: Ids, probs: npt.NDArray[np.float64], noise: float) -> int:
    """Inverse CDF at `noise` in (0, 1)."""
    cumulative = np.cumsum(probs)
    at = int(np.searchsorted(cumulative, noise * cumulative[-1], side="right"))
    return int(ids[min(at, len(ids) - 1)])
