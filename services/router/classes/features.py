"""What a prompt looks like, in numbers: length, words, mathematics, code, structure, script. No meaning, no topics.

Everything is counted on the cut and neutral text (`neutral.py`) but the length, so a prompt of 1 MB costs what one of
4 KB does. Counts are log(1 + n): twice as much is one step, wherever it starts.
"""

from __future__ import annotations

import math
import re

import numpy as np
import numpy.typing as npt

from services.router.classes.neutral import MAX_CHARS, neutral

VERSION = 1
Features = npt.NDArray[np.float64]

_WORD = re.compile(r"[^\W\d_]+")
_TOKEN = re.compile(r"\w+|[^\w\s]")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_OPERATOR = re.compile(r"[=+*/^<>±×÷·∙≤≥≠≈∑∏∫√∂∇∞∈∉⊂⊆∪∩∀∃→⇒⇔↔∧∨¬⊃≡•~|]|(?<=\s)-(?=\s)")
_LATEX = re.compile(r"\\[A-Za-z]+|\$[^$\n]{1,200}\$|[_^]\{")
_UNIT = re.compile(r"\d\s?(?:%|°|[µμ]?[A-Za-zΩ]{1,3}(?:[/^]\S{1,4})?\b)|[$€£¥₹]\s?\d")
_VARIABLE = re.compile(r"\b(?:[B-HJ-Zb-z])\b(?!['’])")
_BRACKET = re.compile(r"[()\[\]{}]")
_FENCE = re.compile(r"```|~~~|`[^`\n]{1,200}`")
_IDENTIFIER = re.compile(
    r"\b[A-Za-z]\w*(?:_\w+)+\b|\b[a-z]+[A-Z]\w*\b|\b\w+\([^)\n]{0,80}\)|\b\w+(?:\.\w+){1,6}\b(?=\()"
)
_QUESTION = re.compile(r"[?？؟]")
_SENTENCE = re.compile(r"[.!?。！？]+(?:\s|$)")
_LIST = re.compile(r"(?m)^\s{0,8}(?:[-*•]|\(?\d{1,3}[.)]|\(?[a-zA-Z][.)])\s")
_CLAUSE = re.compile(r"[,;:，；：、]")
_QUOTE = re.compile(r"[\"“”«»„]")
_BLANK = re.compile(r"_{2,}|\.{3,}|…")
_CAPITAL = re.compile(r"\b[^\W\d_a-z]{2,}\b")
_STEP = re.compile(
    r"\b(?:then|next|after|before|first|second|third|finally|step|dann|danach|zuerst|schritt|ensuite|puis|étape|luego|después|paso)\b",
    re.IGNORECASE,
)
_CONSTRAINT = re.compile(
    r"\b(?:must|only|exactly|except|without|unless|each|every|least|most|not|no|if|suppose|given|assum\w+|nur|genau|ohne|mindestens"
    r"|höchstens|jede\w*|nicht|wenn|seulement|exactement|sans|moins|chaque|pas|si|solo|sin|menos|cada)\b",
    re.IGNORECASE,
)

NAMES = (
    "chars",
    "words",
    "tokens",
    "word_length",
    "long_words",
    "distinct_words",
    "digits",
    "numbers",
    "operators",
    "latex",
    "units",
    "variables",
    "brackets",
    "fences",
    "identifiers",
    "questions",
    "sentences",
    "list_items",
    "lines",
    "clauses",
    "quotes",
    "blanks",
    "capitals",
    "steps",
    "constraints",
    "other_script",
    "accented",
)
COUNT = len(NAMES)
LENGTH = ("chars", "words")
"""Features of the length-only baseline."""


def features(text: str) -> Features:
    """float64 (COUNT,), finite, in the order of NAMES."""
    return of_neutral(neutral(text), len(text))


def of_neutral(text: str, chars: int) -> Features:
    """Features of a text that is cut and neutral already; `chars` is the length of the prompt it comes from."""
    words = _WORD.findall(text)
    letters = sum(map(len, words))
    count = max(1, len(words))
    seen = words[:200]

    def logs(pattern: re.Pattern[str]) -> float:
        return math.log1p(sum(1 for _ in pattern.finditer(text)))

    latin = sum(1 for c in text if c.isalpha() and c < "ɐ")
    ascii_letters = sum(1 for c in text if c.isalpha() and c.isascii())
    alphabetic = max(1, sum(1 for c in text if c.isalpha()))
    # A long prompt counts as long by what was cut off, not by what was left out.
    length = len(text) if chars <= MAX_CHARS else chars
    values = (
        math.log1p(length),
        math.log1p(len(words)),
        logs(_TOKEN),
        letters / count,
        sum(1 for w in words if len(w) >= 9) / count,
        len({w.lower() for w in seen}) / max(1, len(seen)),
        sum(1 for c in text if c.isdigit()) / max(1, len(text)),
        logs(_NUMBER),
        logs(_OPERATOR),
        logs(_LATEX),
        logs(_UNIT),
        logs(_VARIABLE),
        logs(_BRACKET),
        logs(_FENCE),
        logs(_IDENTIFIER),
        logs(_QUESTION),
        logs(_SENTENCE),
        logs(_LIST),
        math.log1p(text.strip().count("\n")),
        logs(_CLAUSE),
        logs(_QUOTE),
        logs(_BLANK),
        sum(1 for _ in _CAPITAL.finditer(text)) / count,
        logs(_STEP),
        logs(_CONSTRAINT),
        1.0 - latin / alphabetic,
        1.0 - ascii_letters / alphabetic,
    )
    return np.array(values, dtype=np.float64)
