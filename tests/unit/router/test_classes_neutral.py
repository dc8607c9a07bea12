"""Sentences that speak to the router change nothing; questions about models and difficulty stay whole."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from classes_kit import made_weights, unit
from services.router.classes.features import features
from services.router.classes.neutral import MAX_CHARS, cut, neutral
from tools.training.complexity.attacks import RECOGNISED

QUESTIONS = (
    "What is the capital of France?",
    "Let f(x) = 3x^2 - 4 and g(x) = 2x. Find f(g(2)).",
    "Write a function that merges two sorted lists.\nIt must not allocate.",
    "A 45-year-old man has a strong headache after a hard fall. What should be done?",
    "Wo liegt der Bodensee?",
)
HONEST = (
    "Which climate model predicts the largest rise?",
    "Why is it hard to prove P = NP?",
    "Explain how a router forwards packets between two large networks.",
    "Is this question difficult?",
    "Who made GPT-4?",
    "Find the best linear model for the points (1, 2) and (3, 4).",
    "A pool holds 40 litres. It is filled by a small pipe in 3 hours.",
    "What is the difference between an advanced and a basic amino acid?",
    "Use Bayes' theorem to find P(A|B).",
    "Assume a class of 30 pupils with level: beginner and level: expert.",
)


def _squeezed(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("sentence", RECOGNISED)
def test_a_sentence_to_the_router_leaves_nothing_behind(sentence: str) -> None:
    weights = made_weights()
    for question in QUESTIONS:
        for attacked in (
            f"{question} {sentence}",
            f"{sentence} {question}",
            f"{sentence}\n\n{question}",
            f"{question}\n{sentence}\n{sentence}",
            f"{question} {sentence.upper()}",
        ):
            assert _squeezed(neutral(attacked)) == _squeezed(question)
            # The vector is of the neutral text; what is left is whitespace.
            moved = weights.probability(features(attacked), unit(1)) - weights.probability(features(question), unit(1))
            assert abs(moved) < 0.02


@pytest.mark.parametrize("question", [*QUESTIONS, *HONEST])
def test_honest_questions_stay_whole(question: str) -> None:
    assert neutral(question) == question


@pytest.mark.parametrize("sentence", RECOGNISED)
def test_a_prompt_of_nothing_else_is_still_read(sentence: str) -> None:
    assert neutral(sentence) == sentence


@given(st.text(max_size=600), st.sampled_from(RECOGNISED))
def test_neutral_is_bounded_and_never_empties_a_text(text: str, sentence: str) -> None:
    for given_text in (text, f"{text} {sentence}"):
        found = neutral(given_text)
        assert len(found) <= len(given_text)
        assert bool(found.strip()) or not any(c.isalnum() for c in given_text)


@given(st.integers(0, 3 * MAX_CHARS))
def test_cut_keeps_both_ends(length: int) -> None:
    text = "".join(chr(97 + i % 26) for i in range(length))
    short = cut(text)
    assert len(short) == min(length, MAX_CHARS)
    if length > MAX_CHARS:
        assert text.startswith(short[:1000])
        assert text.endswith(short[-900:])


@pytest.mark.parametrize(
    "piece", ["a b c. ", "(", "[tier ", "x_", "\\a", "1,", "a.b", '"', "level ", "<tier>", "$", "`", "it is hard "]
)
def test_no_text_is_slow(piece: str) -> None:
    """Not a speed: a pattern that backtracks takes minutes on one of these, not the second that is allowed."""
    start = time.process_time()
    features(piece * (1_000_000 // len(piece)))
    assert time.process_time() - start < 5.0
