"""Marks and capitals that tell questions apart, and those of prose that do not."""

from __future__ import annotations

import time

import pytest

from services.router.match import judge


@pytest.mark.parametrize(
    ("asked", "remembered"),
    [
        ("What is 7 - 3?", "What is 7 * 3?"),
        ("What is 12-4?", "What is 12 4?"),
        ("What is (2 + 3) * 4?", "What is 2 + (3 * 4)?"),
        ("Simplify x - y", "Simplify x * y"),
        ("What is 5! in maths?", "What is 5 in maths?"),
        ("What is n! here?", "What is n here?"),
        ("What is .5 squared?", "What is 5 squared?"),
        ("What is f'(x) here?", "What is f(x) here?"),
        ("How long is 5' in metres?", 'How long is 5" in metres?'),
        ("What is 10⁵ as a number?", "What is 105 as a number?"),
        ("Is 2½ cups enough?", "Is 21/2 cups enough?"),
        ("Is 2 inside [1, 2)?", "Is 2 inside (1, 2]?"),
        ("What does a[:2] return?", "What does a[2:] return?"),
        ("What does *p mean in C?", "What does p mean in C?"),
        ("What does **kwargs mean?", "What does *kwargs mean?"),
        ("What does x-- do in C?", "What does x do in C?"),
        ("What does !x mean in Python?", "What does x mean in Python?"),
        ("What does x != 3 mean?", "What does x = 3 mean?"),
        ("What does a && b mean?", "What does a & b mean?"),
        ("What does colou?r match?", "What does colou r match?"),
        ("What does ~x do?", "What does x do?"),
        ("How do I convert 5 MB to Mb?", "How do I convert 5 Mb to MB?"),
        ("How bright is a 5 mW laser?", "How bright is a 5 MW laser?"),
        ("How far is 20 Mm?", "How far is 20 mm?"),
        ("How far is 20Mm?", "How far is 20mm?"),
        ("What does WHO recommend?", "What does who recommend?"),
        ("Can IT reset my password?", "Can it reset my password?"),
        ("What is CO?", "What is Co?"),
        ("What is new in Python 3.1?", "What is new in Python 3.10?"),
        ("What does \\d match?", "What does \\D match?"),
        ("What does echo $HOME do?", "What does echo $home do?"),
        ("What is –3 + 2?", "What is 3 + 2?"),
        ("What does ls -l do?", "What does ls -L do?"),
        ("What is the type of '1'?", "What is the type of 1?"),
        ("2 hours in seconds", "2 hours in minutes"),
        ("कमल कि किताब", "कमलि क किताब"),
    ],
)
def test_what_only_marks_or_capitals_tell_apart(asked: str, remembered: str) -> None:
    for a, b in ((asked, remembered), (remembered, asked)):
        assert not judge(a, b, 1.0).same


@pytest.mark.parametrize(
    ("asked", "remembered"),
    [
        ("How do I boil an egg?", "how do i boil an egg"),
        ("How do I boil an egg?!", "How do I boil an egg"),
        ("HOW DO I CONVERT 5 MB TO KB?", "How do I convert 5 MB to KB?"),
        ("How many kb are in 5 mb?", "How many KB are in 5 MB?"),
        ("What is **recursion**?", "What is recursion?"),
        ("What is *recursion*?", "What is recursion?"),
        ("What is a well-known author?", "What is a well known author?"),
        ("What is COVID-19?", "What is COVID 19?"),
        ("Plan a 5-day trip", "Plan a 5 day trip"),
        ("Python - how do I sort a list?", "Python: how do I sort a list?"),
        ("What is the dogs' food?", "What is the dogs food?"),
        ("What is the GDP of the US?", "what is the gdp of the us"),
        ("Is $2.50 enough for a coffee?", "Is $2.5 enough for a coffee?"),
        ("What are hours of 9–5 jobs?", "What are hours of 9-5 jobs?"),
        ("Thanks... what is DNA?", "thanks, what is dna"),
        ("How many days are in 2024!?", "How many days are in 2024!?"),
        ("What is H₂O?", "What is H2O?"),
        ("What is H2O ??", "What is H2O"),
        ("How do I bake a cake?", "How do I bake cakes?"),
        ("How do I create a file?", "How do I go about creating a file?"),
        ("What does f(x) mean?", "Please tell me what f(x) means"),
        ("What does NASA (the agency) do?", "What does NASA, the agency, do?"),
        ("How do I boil an egg (please)?", "How do I boil an egg, please?"),
    ],
)
def test_what_prose_may_drop(asked: str, remembered: str) -> None:
    for a, b in ((asked, remembered), (remembered, asked)):
        assert judge(a, b, 1.0).same


@pytest.mark.parametrize(
    ("asked", "remembered"),
    [
        ("What is weather?", "What is climate?"),
        ("What is the mass of the Moon?", "What is the weight of the Moon?"),
        ("Can babies eat honey?", "Can children eat honey?"),
        ("How do I sort an array in Java?", "How do I sort a list in Java?"),
        ("What does apt update do?", "What does apt upgrade do?"),
        ("What should puppies eat?", "What should dogs eat?"),
        ("What is a tort?", "What is a torte?"),
        ("What is a rat?", "What is a rate?"),
        ("How much is car insurance?", "How much is care insurance?"),
        ("Which plans are cheapest?", "Which planes are cheapest?"),
        ("What is custom?", "What is customs?"),
        ("How do I install a window?", "How do I install Windows?"),
    ],
)
def test_words_that_only_talk_takes_for_each_other(asked: str, remembered: str) -> None:
    for a, b in ((asked, remembered), (remembered, asked)):
        assert not judge(a, b, 0.95).same


def test_texts_without_a_word_in_common_cost_little() -> None:
    """All words with all words took seconds for what fits into the embedder's window."""
    letters = "bcdfghjklm"
    words = [f"{a}{b}a{c}" for a in letters for b in letters for c in "nrst"]
    asked, remembered = "what is the " + " ".join(words[:200]), "what is the " + " ".join(words[200:])
    began = time.process_time()
    assert not judge(asked, remembered, 1.0).same
    assert time.process_time() - began < 1.0
