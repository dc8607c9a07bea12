"""Log probabilities of the raw distribution, with ranks and alternatives."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvmesh.engine.runner import TokenLogprobs


def token_logprobs(logits: npt.NDArray[np.float32], token: int, alternatives: int) -> TokenLogprobs:
    """Score `token` on raw logits (vocab,). rank 1 is the most likely; `top` is sorted, most likely first."""
    peak = float(logits.max())
    total = peak + float(np.log(np.exp(logits - np.float32(peak)).sum(dtype=np.float64)))
    rank = 1 + int(np.count_nonzero(logits > logits[token]))
    top: list[tuple[int, float]] = []
    count = min(alternatives, len(logits))
    if count > 0:
        best = np.argpartition(logits, len(logits) - count)[len(logits) - count :]
        best = best[np.lexsort((best, -logits[best]))]
        top = [(int(i), float(logits[i]) - total) for i in best]
    return TokenLogprobs(token_id=int(token), logprob=float(logits[token]) - total, rank=rank, top=top)
