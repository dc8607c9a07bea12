"""The judge of shadowed hits: what it compares, how often it is right, and the rate that comes of it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.judge import HEAD_CHARS, head, judge
from services.router.judge.evidence import NAMES, Closeness, agree, closeness, evidence, names, polarity, quantities
from services.router.judge.rate import SKILL, Skill, corrected
from services.router.near.embedder import MiniLmEmbedder
from services.router.shadow import MAX_VERDICTS, Shadows

ALIKE = Closeness(0.9, 0.0, 0.0)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("100 °C", "212 °F", True),
        ("six minutes", "6 min", True),
        ("8 minutes", "480 seconds", True),
        ("twenty-three pairs", "23 pairs", True),
        ("1.43 billion", "1,430,000,000", True),
        ("384,400 km", "about 384,000 kilometres", True),
        ("1813", "1815", False),
        ("5 GB", "5 MB", False),
        ("$12", "12 dollars", True),
        ("$12", "12 euros", False),
        ("60–100", "60", True),
        ("-5 degrees", "5 degrees", False),
        ("42.195 km", "26.2 miles", True),
    ],
)
def test_quantities(a: str, b: str, same: bool) -> None:
    assert agree(quantities(a)[0], quantities(b)[0]) is same
    assert agree(quantities(b)[0], quantities(a)[0]) is same


@given(st.text(max_size=200), st.text(max_size=200))
@settings(max_examples=100, deadline=None)
def test_any_text_can_be_read(served: str, fresh: str) -> None:
    found = evidence("Is it 5?", served, fresh, ALIKE)
    assert found.shape == (len(NAMES),)
    assert np.isfinite(found).all()
    assert np.array_equal(found, evidence("Is it 5?", fresh, served, ALIKE)), "neither answer is favoured"


def test_strange_numbers() -> None:
    assert math.isfinite(quantities("9" * 5000)[0].value)
    assert [each.value for each in quantities("1.2.3, ٣ and SIX MILLION or 3 mıllion sıx")] == [123.0, 3.0, 6e6, 3.0]


def test_names_of_the_question_tell_nothing() -> None:
    assert names("In Norway the capital is Oslo. It lies on a fjord.", "Norway's capital?") == {"oslo"}
    assert names("`Foo` is a class.\n```\nBar\n```", "?") == frozenset()


@pytest.mark.parametrize(
    ("asked", "answer", "sign"),
    [
        ("Is Pluto a planet?", "**No**, since 2006.", -1),
        ("Is Pluto a planet?", "It isn't, officially.", -1),
        ("Is Pluto a planet?", "Yes.", 1),
        ("Is Pluto a planet?", "That depends.", 0),
        ("Is it hot or cold?", "No idea.", 0),
        ("What is Pluto?", "No planet.", 0),
    ],
)
def test_polarity(asked: str, answer: str, sign: int) -> None:
    assert polarity(asked, answer) == sign


def test_lean_is_seen_where_answers_differ_as_the_questions_do() -> None:
    x, y = np.eye(2, dtype=np.float32)
    assert closeness(x, y, y, x) == Closeness(0.0, pytest.approx(2.0), pytest.approx(1.0))
    assert closeness(x, y, x, y) == Closeness(0.0, pytest.approx(-2.0), pytest.approx(-1.0))
    assert closeness(x, x, y, y) == Closeness(1.0, 0.0, 0.0)
    assert closeness(x, y, None, x) is None


@pytest.mark.parametrize(
    ("asked", "served", "fresh", "close", "right", "reason"),
    [
        ("Capital of France?", "It is Paris.", "it is  Paris", None, True, "same text"),
        ("How hot?", "It boils at 100 °C.", "At sea level, at 212 degrees Fahrenheit.", ALIKE, True, "evidence"),
        ("How long?", "It takes 12 minutes.", "About 25 minutes.", Closeness(0.5, 0.1, 0.2), False, "evidence"),
        ("Use a lock?", "Use a lock.", "Bake the bread for an hour.", Closeness(0.1, 0.0, 0.0), False, "subject"),
        ("Use a lock?", "Use a lock.", "Take a mutex.", None, None, "no vector"),
        ("Which stock?", "Buy an index fund.", "I'm sorry, but I can't help with that.", ALIKE, None, "refusal"),
    ],
)
def test_verdicts(
    asked: str, served: str, fresh: str, close: Closeness | None, right: bool | None, reason: str
) -> None:
    verdict = judge(asked, asked, served, fresh, close)
    assert (verdict.right, verdict.reason) == (right, reason)


def test_of_a_long_answer_the_beginning_is_embedded() -> None:
    assert head("short") == "short"
    assert 0.9 * HEAD_CHARS < len(head("word " * 1000)) <= HEAD_CHARS
    assert len(head("x" * 5000)) == HEAD_CHARS


def test_the_labelled_pairs_of_other_topics_give_the_skill_that_is_shipped() -> None:
    lines = (Path(__file__).parent / "judge_pairs.jsonl").read_text(encoding="utf-8").splitlines()
    groups = [json.loads(line) for line in lines]
    assert len(groups) >= 100
    held = [group for group in groups if group["half"] == "held"]
    assert {group["topic"] for group in held}.isdisjoint(group["topic"] for group in groups if group["half"] == "tune")
    embedder = MiniLmEmbedder()
    found, kept, told_wrong, told_right = 0, 0, 0, 0
    for group in held:
        texts = [head(group[key]) for key in ("asked", "fresh", "twin", "right", "near", "wrong")]
        asked, fresh, twin, right, near, wrong = embedder.embed_batch(texts)
        good = judge(
            group["asked"], group["twin"], group["right"], group["fresh"], closeness(asked, twin, right, fresh)
        )
        bad = judge(group["asked"], group["near"], group["wrong"], group["fresh"], closeness(asked, near, wrong, fresh))
        kept, told_right = kept + (good.right is True), told_right + (good.right is not None)
        found, told_wrong = found + (bad.right is False), told_wrong + (bad.right is not None)
    # Another build of the runtime may round a pair at the threshold to its other side.
    assert (told_wrong, told_right) == (SKILL.wrong, SKILL.right)
    assert abs(found - SKILL.found) <= 1
    assert abs(kept - SKILL.kept) <= 1


@pytest.mark.parametrize("sensitivity", [0.7, 0.88, 0.95])
@pytest.mark.parametrize("specificity", [0.9, 0.96, 0.99])
@pytest.mark.parametrize("judged", [50, 1000])
def test_the_interval_holds_what_it_promises(sensitivity: float, specificity: float, judged: int) -> None:
    rng = np.random.default_rng(3)
    tries, inside = 300, 0
    rates = (0.0, 0.01, 0.03, 0.1, 0.3)
    for rate in rates:
        seen = rng.binomial(judged, rate * sensitivity + (1 - rate) * (1 - specificity), tries)
        tests = zip(rng.binomial(50, sensitivity, tries), rng.binomial(50, specificity, tries), seen, strict=True)
        for found, kept, wrong in tests:
            _, low, high = corrected(int(wrong), judged, Skill(int(found), 50, int(kept), 50))
            inside += low <= rate <= high
    assert inside / (tries * len(rates)) >= 0.93


@given(st.integers(0, 2000), st.data())
@settings(max_examples=200, deadline=None)
def test_an_estimate_is_a_rate_within_its_interval(judged: int, data: st.DataObject) -> None:
    wrong = data.draw(st.integers(0, judged))
    found, kept = data.draw(st.integers(0, 50)), data.draw(st.integers(0, 50))
    estimate = corrected(wrong, judged, Skill(found, 50, kept, 50))
    assert 0.0 <= estimate.low <= estimate.rate <= estimate.high <= 1.0
    if judged and found + kept <= 50:
        assert (estimate.low, estimate.high) == (0.0, 1.0), "a judge that knows nothing tells nothing"


def test_what_cannot_be_told_counts_apart() -> None:
    shadows = Shadows(0.01, 60.0)
    assert shadows.estimate() == shadows.raw() == (0.0, 0.0, 1.0)
    for right in [True] * 90 + [False] * 10 + [None] * 5:
        shadows.count(right)
    assert (shadows.judged, shadows.wrong, shadows.untold) == (100, 10, 5)
    assert shadows.raw().rate == 0.1
    expected = (0.1 + SKILL.specificity - 1) / (SKILL.sensitivity + SKILL.specificity - 1)
    assert shadows.estimate().rate == pytest.approx(expected)
    widths = [each.high - each.low for each in (shadows.estimate(), shadows.raw())]
    assert widths[0] > widths[1], "the judge's own doubt is in it"


def test_what_was_mended_is_forgotten_in_time() -> None:
    shadows = Shadows(0.01, 60.0)
    for right in [False] * 1000 + [True] * (MAX_VERDICTS - 1000):
        shadows.count(right)
    assert shadows.estimate().low > 0.1
    for _ in range(1000):
        shadows.count(True)
    assert shadows.raw().rate == 0.0
    assert shadows.estimate().low == 0.0
    assert (shadows.judged, shadows.wrong) == (MAX_VERDICTS + 1000, 1000), "totals are of all"
