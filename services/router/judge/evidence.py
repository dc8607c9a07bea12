"""What two answers say that can be compared: quantities, names, yes or no; and how their meanings lie to each other.

What stands in the question that was asked tells nothing: any answer may repeat it. Examples of code are left out, two
right ones seldom have much in common. English only, as the guards are.
"""

from __future__ import annotations

import math
import re
import unicodedata
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.router.match.lexicon import lexicon
from services.router.match.wordlists import NEGATIONS, NUMBER_WORDS, UNITS

NAMES = (
    "cosine",
    "lean",
    "turn",
    "numbers apart",
    "numbers shared",
    "first numbers agree",
    "names apart",
    "yes against no",
)
Evidence = npt.NDArray[np.float64]
Vector = npt.NDArray[np.float32]

LEAST_LENGTH = 1e-4

CLOSE = 0.01
"""Two measured quantities are equal up to this share: 384,400 km and 384,000 km."""

LEAST_ROUNDED = 3000
"""A bare whole number below is a count or a year, and exact."""

_BASE = {
    "km": ("m", 1000.0), "mile": ("m", 1609.344), "m": ("m", 1.0), "cm": ("m", 0.01), "mm": ("m", 0.001),
    "ft": ("m", 0.3048), "inch": ("m", 0.0254), "yard": ("m", 0.9144),
    "kg": ("g", 1000.0), "g": ("g", 1.0), "mg": ("g", 0.001), "lb": ("g", 453.592), "oz": ("g", 28.3495),
    "ton": ("g", 1e6), "tonne": ("g", 1e6),
    "liter": ("l", 1.0), "ml": ("l", 0.001), "gallon": ("l", 3.78541), "pint": ("l", 0.473176),
    "ms": ("s", 0.001), "second": ("s", 1.0), "minute": ("s", 60.0), "hour": ("s", 3600.0), "day": ("s", 86400.0),
    "week": ("s", 604800.0), "month": ("s", 2629746.0), "year": ("s", 31556952.0),
    "kb": ("byte", 1e3), "mb": ("byte", 1e6), "gb": ("byte", 1e9), "tb": ("byte", 1e12),
    "watt": ("watt", 1.0), "kw": ("watt", 1000.0), "celsius": ("celsius", 1.0),
}  # fmt: skip
_SCALES = {"hundred": 1e2, "thousand": 1e3, "million": 1e6, "billion": 1e9}
_COUNTS = {
    word: int(digits)
    for word, digits in NUMBER_WORDS.items()
    if digits.isdigit() and word not in _SCALES and word not in ("one", "dozen")
}
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w.)\]\-])-|[$€£])?(?<![\w.])(?P<digits>\d+(?:[.,]\d+)*)"
    r"|\b(?P<word>" + "|".join(sorted(_COUNTS, key=len, reverse=True)) + r")\b(?:-(?P<ones>[a-z]+))?"
)
_UNIT = re.compile(r"[ -]?(?:(million|billion|thousand|hundred)\b ?)?(?:°|degrees? ?)?([a-z]+\b|%|€|\$)?")
_WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")
_NAME = re.compile(r"\b[A-Z][\w'’]*")
_STARTS = re.compile(r"(?:[.!?:;]\s+|\n\s*(?:[-*]|\d+\.)?\s*|[(\"“*])$")
_FENCE = re.compile(r"```\w*\n(.*?)```", re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
_YES = re.compile(r"(?:yes|yeah|yep|sure|absolutely|of course|certainly|correct|true)\b", re.IGNORECASE)
_NO = re.compile(r"(?:no|nope|never|not|false|unfortunately|it (?:is|does) not|do not|don't)\b", re.IGNORECASE)
_POLAR = re.compile(
    r"(?:is|are|was|were|do|does|did|can|could|should|will|would|has|have|may|must)\b(?!.*\bor\b.*\?)", re.IGNORECASE
)


class Closeness(NamedTuple):
    """What the embeddings of both questions and both answers tell.

    cosine: of the answers. lean: (remembered − asked) · (served − fresh); where the answers differ as the questions do,
    they answer different questions. turn: its cosine.
    """

    cosine: float
    lean: float
    turn: float


class Quantity(NamedTuple):
    """`value` as written; `kind` and `base`: the dimension, and the value in its base unit; "" for a bare number."""

    value: float
    kind: str
    base: float


def closeness(
    asked: Vector | None, remembered: Vector | None, served: Vector | None, fresh: Vector | None
) -> Closeness | None:
    """Of float32 (dim,) vectors of length 1; None where one is missing."""
    if asked is None or remembered is None or served is None or fresh is None:
        return None
    between, apart = remembered - asked, served - fresh
    lean = float(between @ apart)
    lengths = float(np.linalg.norm(between) * np.linalg.norm(apart))
    return Closeness(float(served @ fresh), lean, lean / lengths if lengths > LEAST_LENGTH else 0.0)


def evidence(asked: str, served: str, fresh: str, close: Closeness) -> Evidence:
    """float64 (len(NAMES),)."""
    said = quantities(asked)
    ours, theirs = (
        [q for q in quantities(text) if not any(agree(q, each) for each in said)] for text in (served, fresh)
    )
    shared = max(
        sum(any(agree(a, b) for b in theirs) for a in ours),
        sum(any(agree(a, b) for a in ours) for b in theirs),
    )
    first = 0.0
    if ours and theirs:
        heads = any(agree(ours[0], b) for b in theirs[:2]) or any(agree(a, theirs[0]) for a in ours[:2])
        first = 1.0 if heads else -1.0
    names_served, names_fresh = names(served, asked), names(fresh, asked)
    return np.array(
        [
            *close,
            bool(ours and theirs and not shared),
            min(1.0, shared / max(1, min(len(ours), len(theirs)))),
            first,
            bool(names_served and names_fresh and names_served.isdisjoint(names_fresh)),
            polarity(asked, served) * polarity(asked, fresh) < 0,
        ],
        dtype=np.float64,
    )


@lru_cache(maxsize=256)
def quantities(text: str) -> tuple[Quantity, ...]:
    """The numbers of a text in order, in figures or words, with their units."""
    # Small letters, as a search that ignores case takes letters for ours that are not: "sıx".
    text = unicodedata.normalize("NFKC", _without_code(text)).lower()
    found = []
    for match in _NUMBER.finditer(text):
        value = _value(match)
        rest = _UNIT.match(text, match.end())
        scale, name = (rest[1], rest[2] or "") if rest else (None, "")
        value *= _SCALES[scale] if scale else 1.0
        kind, base = "", value
        if match["sign"] in ("$", "€", "£"):
            kind = {"$": "dollar", "€": "euro", "£": "sterling"}[match["sign"]]
        elif unit := {"€": "euro", "$": "dollar"}.get(name) or UNITS.get(name):
            if unit == "fahrenheit":
                kind, base = "celsius", (value - 32) / 1.8
            else:
                kind, factor = _BASE.get(unit, (unit, 1.0))
                base = value * factor
        found.append(Quantity(value, kind, base))
    return tuple(found)


def _value(match: re.Match[str]) -> float:
    if match["word"]:
        tens, ones = _COUNTS[match["word"]], _COUNTS.get(match["ones"] or "", 0)
        return float(tens + ones if tens >= 20 and ones < 10 else tens)
    digits = match["digits"]
    if re.fullmatch(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?", digits):
        digits = digits.replace(",", "")
    digits = digits.replace(",", ".")
    if digits.count(".") > 1:
        digits = digits.replace(".", "")
    value = float(digits[:32])
    return -value if match["sign"] == "-" else value


def agree(a: Quantity, b: Quantity) -> bool:
    """Both say the same, up to rounding where they are measured."""
    if a.kind and b.kind:
        return a.kind == b.kind and math.isclose(a.base, b.base, rel_tol=CLOSE)
    whole = a.value.is_integer() and b.value.is_integer() and max(abs(a.value), abs(b.value)) < LEAST_ROUNDED
    return a.value == b.value if whole else math.isclose(a.value, b.value, rel_tol=CLOSE)


def names(text: str, asked: str) -> frozenset[str]:
    """Capitalized words that no sentence begins with or no dictionary has, lower-case, beside those of the question."""
    text = _without_code(text)
    known = {_plain(word) for word in _WORD.findall(asked)}
    found = set()
    for match in _NAME.finditer(text):
        word = _plain(match.group())
        starts = _STARTS.search(text[max(0, match.start() - 8) : match.start()]) is not None or not match.start()
        if len(word) > 1 and word not in known and not (starts and lexicon().knows(word)):
            found.add(word)
    return frozenset(found)


def polarity(asked: str, answer: str) -> int:
    """Of the answer to a question that asks for yes or no: 1, -1, or 0 where it cannot be told."""
    if not _POLAR.match(asked):
        return 0
    start = answer.lstrip("*_> ")
    if _YES.match(start):
        return 1
    if _NO.match(start):
        return -1
    sentence = re.split(r"[.!?;:](?:\s|$)|\n", start, maxsplit=1)[0].lower().replace("n't", " not")
    return -1 if not NEGATIONS.isdisjoint(re.findall(r"\w+", sentence)) else 0


def _without_code(text: str) -> str:
    return _SPAN.sub(" ", _FENCE.sub(" ", text))


def _plain(word: str) -> str:
    word = re.sub(r"['’]s?$", "", word.lower())
    return word[:-1] if word.endswith("s") and not word.endswith("ss") and len(word) > 3 else word
