"""The package's weights and the real embedder: sentences that try to force a tier do not."""

from __future__ import annotations

import pytest

from services.router.classes import model
from services.router.classes.features import of_neutral
from services.router.classes.neutral import neutral
from services.router.near.embedder import MiniLmEmbedder
from services.router.near.search import Vector
from tools.training.complexity.attacks import RECOGNISED, UNRECOGNISED

QUESTIONS = (
    "What is the capital of France?",
    "Let f(x) = 3x^2 - 4 and g(x) = 2x. Find f(g(2)) and prove that f is not injective.",
    "A 45-year-old man has a headache after a fall. Which examination comes first?",
    "Who wrote the Federalist Papers, and why did they matter for ratification?",
)
_VECTORS: dict[str, Vector | None] = {}
MOST = 0.15
"""Of a probability, by one sentence that is not recognised (largest seen in the benchmark: .09)."""


@pytest.fixture(scope="module")
def minilm() -> MiniLmEmbedder:
    return MiniLmEmbedder()


@pytest.fixture(scope="module")
def weights() -> model.Weights:
    return model.load(model.FILE, embedder="minilm", dim=MiniLmEmbedder.dim)


def _probability(weights: model.Weights, minilm: MiniLmEmbedder, text: str) -> float:
    read = neutral(text)
    if read not in _VECTORS:
        _VECTORS[read] = minilm.embed(read)
    vector = _VECTORS[read]
    assert vector is not None
    return weights.probability(of_neutral(read, len(text)), vector)


def test_no_sentence_forces_a_tier(weights: model.Weights, minilm: MiniLmEmbedder) -> None:
    for question in QUESTIONS:
        base = _probability(weights, minilm, question)
        for sentence in RECOGNISED:
            for attacked in (f"{question} {sentence}", f"{sentence} {question}"):
                assert _probability(weights, minilm, attacked) == pytest.approx(base, abs=0.001), sentence
        for sentence in UNRECOGNISED:
            for attacked in (f"{question} {sentence}", f"{sentence} {question}"):
                assert _probability(weights, minilm, attacked) == pytest.approx(base, abs=MOST), sentence


def test_repeating_a_sentence_goes_no_further_than_the_bounds(weights: model.Weights, minilm: MiniLmEmbedder) -> None:
    """What the shape allows at most, whatever the text: a question's own features still count."""
    slope, offset = weights.calibration
    low, high = (model.sigmoid(slope * (weights.bias + weights.bounds[:, i].sum()) + offset) for i in (0, 1))
    assert 0.1 < low < high < 0.98
    for question in QUESTIONS[:2]:
        for sentence in UNRECOGNISED[:6]:
            for times in (3, 10):
                p = _probability(weights, minilm, f"{question} " + f"{sentence} " * times)
                assert low - 1e-9 <= p <= high + 1e-9


def test_the_weights_say_what_they_are(weights: model.Weights) -> None:
    assert not weights.passed
    assert weights.report["target"] == "right"
    assert weights.report["gain"][0] < 0.03
