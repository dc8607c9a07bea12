"""Prompts and arrivals that are the same for everybody who is measured, and quantiles. Imports nothing of kvmesh."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np


def prompts(count: int, tokens: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """`count` lists of random token ids, none of them the first hundred (ends of sequences live there)."""
    low = min(100, vocab // 4)
    # Special tokens are at the end of most vocabularies.
    high = max(low + 1, min(vocab, vocab * 63 // 64))
    generator = np.random.default_rng([seed, count, tokens])
    return [row.tolist() for row in generator.integers(low, high, (count, tokens))]


def poisson(rate: float, seconds: float, seed: int = 0) -> list[float]:
    """Arrival times within `seconds` at `rate` a second."""
    generator = np.random.default_rng([seed, round(rate * 1000)])
    times: list[float] = []
    at = 0.0
    while True:
        at += float(generator.exponential(1 / rate))
        if at >= seconds:
            return times
        times.append(at)


def quantile(values: Sequence[float], q: float) -> float:
    """0 where there are none."""
    return float(np.quantile(np.asarray(values, dtype=np.float64), q)) if len(values) else 0.0


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """p50, p99 and maximum."""
    return {
        "p50": round(quantile(values, 0.5), digits),
        "p99": round(quantile(values, 0.99), digits),
        "max": round(max(values, default=0.0), digits),
    }


Stamps = list[tuple[float, int]]


def window(tokens: Sequence[Stamps]) -> tuple[float, float]:
    """From when every request has its first token until one of them has its last: all decode, none prefills."""
    return max(stamps[0][0] for stamps in tokens), min(stamps[-1][0] for stamps in tokens)


def row_of(begun: float, tokens: Sequence[Stamps], steps: Sequence[float], prompt: int) -> dict[str, float]:
    """Figures of requests that were all submitted at `begun`.

    tokens: of each request, (when, how many) of what came. steps: when each step's tokens came. prompt: tokens of each.
    Rates in tokens a second; a step's time is the median over the window in which all decode.
    """
    count = len(tokens)
    low, high = window(tokens)
    inside = [at for at in steps if low <= at <= high]
    gaps = [(b - a) * 1e3 for a, b in itertools.pairwise(inside)]
    made = sum(n for stamps in tokens for at, n in stamps if low < at <= high)
    total = sum(n for stamps in tokens for _, n in stamps)
    end = max(stamps[-1][0] for stamps in tokens)
    ttft = [(stamps[0][0] - begun) * 1e3 for stamps in tokens]
    return {
        "concurrency": count,
        "prefill_tok_s": round(count * prompt / (low - begun)),
        "step_ms": round(quantile(gaps, 0.5), 4),
        "step_p99_ms": round(quantile(gaps, 0.99), 4),
        "steps": len(gaps),
        "decode_tok_s": round(made / (high - low)) if high > low else 0,
        "out_tok_s": round(total / (end - begun)),
        "ttft_p50_ms": round(quantile(ttft, 0.5), 2),
        "ttft_p99_ms": round(quantile(ttft, 0.99), 2),
    }


def trace_of(submitted: Sequence[float], tokens: Sequence[Stamps]) -> dict[str, object]:
    """Figures of requests that arrived one by one. Times in ms; inter-token times of a frame of several tokens are its
    gap, once, and zeros."""
    ttft, inter, per_request = [], [], []
    for at, stamps in zip(submitted, tokens, strict=True):
        ttft.append((stamps[0][0] - at) * 1e3)
        for (a, _), (b, n) in itertools.pairwise(stamps):
            inter += [(b - a) * 1e3, *[0.0] * (n - 1)]
        made = sum(n for _, n in stamps) - 1
        if made > 0:
            per_request.append((stamps[-1][0] - stamps[0][0]) * 1e3 / made)
    total = sum(n for stamps in tokens for _, n in stamps)
    span = max(stamps[-1][0] for stamps in tokens) - min(submitted)
    return {
        "requests": len(tokens),
        "ttft_ms": spread(ttft),
        "inter_token_ms": spread(inter),
        "tpot_ms": spread(per_request),
        "out_tok_s": round(total / span),
        "span_s": round(span, 2),
    }
