"""A text sentence by sentence: what each one asks, and whether two texts ask the same in the same order.

A statement before the question hides the question's frame from a reading of the whole text, so kinds of questions,
question words and negations are compared for every sentence by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MOST = 16
"""Sentences told apart; what comes after them counts as one."""

_ASKING = {
    word: word.replace("whom", "who").replace("which", "what")
    for word in ("why", "when", "where", "who", "whom", "whose", "what", "which", "how")
}
_SHARP = frozenset(["why", "when", "where", "who", "whose"])
_HOW = frozenset(
    [
        "many",
        "much",
        "long",
        "often",
        "far",
        "old",
        "tall",
        "big",
        "large",
        "deep",
        "fast",
        "high",
        "hot",
        "cold",
        "heavy",
    ]
)
_ABBREVIATED = frozenset(
    [
        "mr",
        "mrs",
        "ms",
        "dr",
        "prof",
        "st",
        "vs",
        "etc",
        "e.g",
        "i.e",
        "no",
        "jr",
        "sr",
        "inc",
        "ltd",
        "co",
        "approx",
        "u.s",
    ]
)


@dataclass(frozen=True, slots=True)
class Sentence:
    """Its kind of question ("" for a statement), the question words left beside the kind, negations and words."""

    kind: str
    asks: tuple[str, ...]
    negations: int
    words: frozenset[str]


def split(tokens: Sequence[str], breaks: Iterable[int]) -> list[list[str]]:
    """The tokens of each sentence, no empty ones. breaks: places in `tokens` before which a sentence may have ended."""
    parts: list[list[str]] = [[]]
    ends = set(breaks)
    for i, token in enumerate(tokens):
        if i in ends and parts[-1] and len(parts) < MOST and not _abbreviated(parts[-1]):
            parts.append([])
        if token != "." or parts[-1]:
            parts[-1].append(token)
    return [part for part in parts if any(token not in ",." for token in part)]


def _abbreviated(part: list[str]) -> bool:
    """Whether the full stop at the end is an abbreviation's."""
    words = [token for token in part[-4:] if token != "."]
    return (
        part[-1] == "." and bool(words) and (words[-1] in _ABBREVIATED or (len(words[-1]) == 1 and words[-1].isalpha()))
    )


def asks(tokens: Sequence[str]) -> tuple[str, ...]:
    """The question words of a text without its frame, in order; "how many" is one."""
    found = []
    for i, token in enumerate(tokens):
        if token in _ASKING:
            after = tokens[i + 1] if i + 1 < len(tokens) else ""
            found.append(f"how {after}" if token == "how" and after in _HOW else _ASKING[token])
    return tuple(found)


def other_question(a: Sentence, b: Sentence) -> bool:
    """Whether the question words of two sentences, whose kinds go together, ask for different things."""
    if not a.kind and not b.kind:
        return sorted(a.asks) != sorted(b.asks)
    sharp_a, sharp_b = ({*text.asks, text.kind} & _SHARP for text in (a, b))
    for text, other in ((a, b), (b, a)):
        if not text.kind and text.asks:
            # The frame was not understood there: its question words must be those of the other.
            return sharp_a != sharp_b or (bool(text.asks) and other.kind in _SHARP and other.kind not in text.asks)
    return bool(_SHARP.intersection(a.asks)) and bool(_SHARP.intersection(b.asks)) and sharp_a != sharp_b


def crossed(a: Sequence[Sentence], b: Sequence[Sentence]) -> bool:
    """Of two texts with as many sentences: a word or a negation that stands in another sentence here than there."""
    all_a, all_b = (frozenset().union(*(one.words for one in text)) for text in (a, b))
    return any(
        one.negations != two.negations or bool((one.words & all_b) - two.words) or bool((two.words & all_a) - one.words)
        for one, two in zip(a, b, strict=True)
    )
