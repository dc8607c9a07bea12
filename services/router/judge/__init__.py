"""Whether a remembered answer was the right one, seen from a fresh answer to the question that was asked.

Two right answers differ in words, in detail and in length, so a share of common words tells little. What tells is
contradiction (other numbers, other names, yes against no), and whether the answers differ in the way the two questions
do. A logistic model weighs these. That the questions are close is no evidence: the semantic cache has seen to it.
"""

from __future__ import annotations

import math
import unicodedata
from typing import NamedTuple

from services.router.cache.stored import refusal
from services.router.judge.evidence import Closeness, evidence

MAX_CHARS = 4096
"""Of longer answers only the beginning is read."""

HEAD_CHARS = 700
"""What is embedded of an answer; what comes later is mostly detail, and the embedder's window is short."""

LEAST_COSINE = 0.2
"""Answers further apart are not about one thing. No right one of the tuning pairs comes near it."""

# `python benchmarks/router.py judge --fit` prints these, from the labelled pairs for tuning.
BIAS = 0.16
WEIGHTS = (1.53, -3.43, -2.71, -1.09, 0.98, 0.57, -0.55, -0.98)
THRESHOLD = 0.35
"""Least probability of a right answer. One in twenty right pairs for tuning lies below: hits are mostly right, so that
calling many of those wrong would drown the wrong ones."""


class Verdict(NamedTuple):
    """`right`: None where it cannot be told. `reason`: "same text", "subject", "evidence", "refusal", "no vector"."""

    right: bool | None
    reason: str
    probability: float = math.nan


def judge(asked: str, remembered: str, served: str, fresh: str, close: Closeness | None) -> Verdict:
    """Is `served`, an answer to `remembered`, right for `asked`, which was answered by `fresh`?

    close: of the embeddings of the four, None where one has none.
    """
    if _plain(served) == _plain(fresh):
        return Verdict(True, "same text", 1.0)
    if refusal(served) or refusal(fresh):
        return Verdict(None, "refusal")
    if close is None:
        return Verdict(None, "no vector")
    if close.cosine < LEAST_COSINE:
        return Verdict(False, "subject", 0.0)
    found = evidence(asked, served[:MAX_CHARS], fresh[:MAX_CHARS], close)
    logit = BIAS + sum(weight * float(value) for weight, value in zip(WEIGHTS, found, strict=True))
    probability = 1.0 / (1.0 + math.exp(-max(-60.0, min(60.0, logit))))
    return Verdict(probability >= THRESHOLD, "evidence", probability)


def head(text: str) -> str:
    """What is embedded of an answer: its beginning, cut between words."""
    return text if len(text) <= HEAD_CHARS else text[:HEAD_CHARS].rsplit(None, 1)[0]


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).strip(" .!?")
