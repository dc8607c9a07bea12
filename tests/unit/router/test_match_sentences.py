"""What stands before or after a question must not hide what it asks; names, code and exclusions as written."""

from __future__ import annotations

import pytest

from services.router.match import judge
from services.router.match.frames import courtesy

BEFORE = (
    "It is raining today. ",
    "It is raining today\n",
    "It is raining today, ",
    "My roommate and I were arguing about this yesterday. ",
    "I've searched for an hour and found nothing useful! ",
    "I read about Dr. Smith. ",
)
OTHER_QUESTIONS = (
    ("When was basketball invented?", "Why was basketball invented?"),
    ("Where was basketball invented?", "When was basketball invented?"),
    ("Who do I tell about my pregnancy at work?", "When do I tell about my pregnancy at work?"),
    ("How much does the ferry carry?", "How many does the ferry carry?"),
    ("Should I call a plumber?", "Can I call a plumber?"),
    ("Is skiing legal here?", "Is skiing not legal here?"),
)


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize(("asked", "remembered"), OTHER_QUESTIONS)
def test_a_statement_before_the_question_hides_nothing(before: str, asked: str, remembered: str) -> None:
    for a, b in ((asked, remembered), (remembered, asked)):
        assert not judge(before + a, before + b, 0.95).same
        assert not judge(before + a, b, 0.95).same
        assert not judge(f"{a} {before}", f"{b} {before}", 0.95).same


@pytest.mark.parametrize(
    ("asked", "remembered"),
    [
        ("I do not like rain. Is skiing fun?", "I like rain. Is skiing not fun?"),
        ("I like rain. Is snow fun?", "I like snow. Is rain fun?"),
        ("I have a nut allergy. What can I eat?", "What can I eat?"),
        ("Is it safe? Is it legal to ski?", "Is it legal to ski?"),
        ("How do I tell when a melon is ripe?", "How do I tell where a melon is ripe?"),
        ("Who directed Aliens?", "Who directed Alien?"),
        ("who directed alien", "Who directed Aliens?"),
        ("How can I redirect HTTP to HTTPS?", "How can I redirect HTTPS to HTTP?"),
        ("how do i redirect http to https", "how do i redirect https to http"),
        (r"What is the regex \d+ good for?", r"What is the regex \D+ good for?"),
        ("What does [A-Z] match?", "What does [a-z] match?"),
        ("What does & mean in bash?", "What does ; mean in bash?"),
        ("What does & mean in bash?", "What does mean in bash?"),
        ("What does ; mean in bash?", "What does : mean in bash?"),
        ("What does &x mean in C?", "What does x mean in C?"),
        ("What can I cook with only rice and eggs?", "What can I cook with everything but rice and eggs?"),
        ("Where were you made?", "Where were I made?"),
    ],
)
def test_other_questions(asked: str, remembered: str) -> None:
    for a, b in ((asked, remembered), (remembered, asked)):
        assert not judge(a, b, 0.97).same


@pytest.mark.parametrize(
    ("asked", "remembered"),
    [
        ("It is raining today. When was basketball invented?", "It's raining today. When was basketball invented?"),
        ("I have a dog. How can I train it?", "I have a dog. How do I train it?"),
        ("Hello! Good morning. How do I boil an egg? Thank you so much!", "how do i boil an egg"),
        ("How do I boil an egg? Any help appreciated.", "How do I boil an egg?"),
        ("How do I merge PDFs?", "How do I merge a PDF?"),
        ("What is salt & pepper chicken?", "What is salt and pepper chicken?"),
        ("What does AT&T sell?", "What does AT & T sell?"),
        ("How do I make my resume stand out?", "How do I make my résumé stand out?"),
        ("Where can I find cheap flights?", "Where do you find cheap flights?"),
        ("What did Dr. Smith invent?", "what did dr Smith invent"),
    ],
)
def test_the_same(asked: str, remembered: str) -> None:
    for a, b in ((asked, remembered), (remembered, asked)):
        assert judge(a, b, 0.97).same


@pytest.mark.parametrize(
    ("spoken", "alone"),
    [("thanks .", True), ("thank you so much .", True), ("any help appreciated", True), ("it rains .", False)],
)
def test_courtesy(spoken: str, alone: bool) -> None:
    assert courtesy(spoken) is alone
