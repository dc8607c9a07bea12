"""Whether a remembered answer was the right one, seen from a fresh answer to the question that was asked.

Two right answers differ in words and in detail, so only contradiction counts: other numbers, other names, or another
subject altogether. Where neither says anything that could be compared, there is no verdict.
"""

from __future__ import annotations

import re
import unicodedata

LEAST_COSINE = 0.5
"""Below this, two answers are not about one thing."""

SURE_COSINE = 0.8
MAX_CHARS = 4096

_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:[.,]\d+)*")
_NAME = re.compile(r"(?<![.!?:]\s)(?<!^)\b[A-Z][\w'-]+", re.MULTILINE)
_COMMON = frozenset({"I", "The", "A", "An", "It", "This", "That", "These", "Yes", "No", "However", "In", "If"})


def judge_answers(served: str, fresh: str, cosine: float | None) -> bool | None:
    """True: the served answer says what the fresh one says. False: it does not. None: it cannot be told.

    cosine: of the answers' embeddings, None where one has none.
    """
    if len(served) > MAX_CHARS or len(fresh) > MAX_CHARS:
        return None
    if _plain(served) == _plain(fresh):
        return True
    if _apart(_numbers(served), _numbers(fresh)):
        return False
    if cosine is None:
        return None
    if cosine < SURE_COSINE and _apart(_names(served), _names(fresh)):
        return False
    return cosine >= LEAST_COSINE


def _apart(a: frozenset[str], b: frozenset[str]) -> bool:
    """Both say something, and nothing of it is common."""
    return bool(a) and bool(b) and a.isdisjoint(b)


def _numbers(text: str) -> frozenset[str]:
    found = (match.group().replace(",", "") for match in _NUMBER.finditer(text))
    return frozenset(number.rstrip("0").rstrip(".") if "." in number else number for number in found)


def _names(text: str) -> frozenset[str]:
    return frozenset(match.group().lower() for match in _NAME.finditer(text)) - {word.lower() for word in _COMMON}


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).strip(" .!")
