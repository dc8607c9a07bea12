"""Sampling: logits of a step → tokens. What is sampled for a row never depends on the other rows.

Rows go through numpy one by one: at a vocabulary of 50k its argmax takes 10 microseconds a row where torch's batched
one takes 90, and the filters of a sampled row (0.1 to 1.4 ms) rarely agree with its neighbours'.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvmesh.engine.runner import SampleInput, TokenLogprobs
from kvmesh.engine.sampling.logprobs import token_logprobs
from kvmesh.engine.sampling.noise import uniform
from kvmesh.engine.sampling.processors import adjust, distribution, draw, needs_processing, permitted_ids

Row = npt.NDArray[np.float32]
# In place of a token, where the model's logits are no numbers.
NO_TOKEN = -1


def sample_row(logits: Row, sample: SampleInput) -> int:
    """One token from raw logits fp32 (vocab,), or NO_TOKEN where they hold NaN or inf: any choice would be made up."""
    params = sample.params
    row = logits
    if not np.isfinite(logits.max()):
        return NO_TOKEN
    if sample.grammar is not None:
        return _within(permitted_ids(sample, len(logits)), logits, sample)
    if needs_processing(sample):
        row = adjust(logits, sample)
        if not row.max() > -np.inf:
            # Every token was banned: a request must not take the whole step down with it.
            row = logits
    if np.float32(params.temperature) <= 0.0:
        return int(row.argmax())
    ids, probs = distribution(row, params)
    return draw(ids, probs, uniform(params.seed, sample.choice, sample.position))


def _within(allowed: npt.NDArray[np.int64], logits: Row, sample: SampleInput) -> int:
    """One of the tokens that a grammar allows; they are few as a rule, so the rest is not looked at any more."""
    params = sample.params
    if not len(allowed):
        return NO_TOKEN  # a tokenizer may have tokens that the model has not
    row = adjust(logits, sample)[allowed]
    if not row.max() > -np.inf:
        row = np.zeros_like(row)
    if np.float32(params.temperature) <= 0.0:
        return int(allowed[row.argmax()])
    places, probs = distribution(row, params)
    return int(allowed[draw(places, probs, uniform(params.seed, sample.choice, sample.position))])


def sample_rows(
    logits: torch.Tensor, rows: Sequence[int], samples: Sequence[SampleInput]
) -> tuple[list[int], list[TokenLogprobs | None]]:
    """Sample `samples[i]` from `logits[rows[i]]`, fp32 (rows, vocab) on CPU; several samples may share a row.

    NO_TOKEN without a score where a row is not finite: the others are not concerned.
    """
    table: npt.NDArray[np.float32] = logits.numpy()
    tokens: list[int] = []
    scores: list[TokenLogprobs | None] = []
    for row, sample in zip(rows, samples, strict=True):
        token = sample_row(table[row], sample)
        tokens.append(token)
        wanted = sample.params.want_logprobs and token != NO_TOKEN
        scores.append(token_logprobs(table[row], token, sample.params.logprobs) if wanted else None)
    return tokens, scores
