# ruff: noqa: E501 (tables of patterns and words)
"""Which word of one question stands for which of the other."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from services.router.match.lexicon import RARE, forms, lexicon
from services.router.match.reading import Reading, slips
from services.router.match.synonyms import near
from services.router.match.wordlists import ANTONYMS, APART, DIRECTIONS, GRADED, PLURALS_APART, SOFT, UNITS, fold

_SUFFIXES = (
    "ization", "isation", "ification", "ation", "ition", "tion", "sion", "ion", "ment", "ance", "ence", "ing", "al",
    "ure", "age", "ery", "ly", "ed", "er", "or", "ize", "ise", "ify", "ate", "y", "e",
)  # fmt: skip
_AGENTS = ("er", "or", "ee", "est", "ful", "less", "able", "ible", "ist", "ian")
_NEGATIVE_PREFIXES = ("un", "in", "im", "il", "ir", "dis", "non", "mis", "anti", "de", "counter", "under", "over", "re", "pre", "post", "sub", "super", "inter", "intra", "en", "em", "out", "up", "down")  # fmt: skip


_MEASURED = frozenset(unit for name, unit in UNITS.items() if len(name) > 2)
MAX_COMPARED = 400
"""Pairs of words without an equal that are looked at."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """Pairs of words that are the same (`exact`) or stand for each other, and the rest of either side.

    `ordered`: what is paired comes in one order, or in the same phrases. `turned`: a pair stands after two different
    directions ("from" there, "to" here). `replaced`: but for words in the places of others the texts are one.
    """

    exact: tuple[str, ...]
    synonyms: tuple[tuple[str, str], ...]
    derived: tuple[tuple[str, str], ...]
    typos: tuple[tuple[str, str], ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    ordered: bool
    turned: bool
    moved: int
    replaced: bool


def align(a: Reading, b: Reading) -> Alignment:
    """Pair the words of two readings."""
    left, right = list(a.words), list(b.words)
    exact: list[str] = []
    for word in list(left):
        if word in right and not _apart(a.lowered.get(word, word), b.lowered.get(word, word)):
            left.remove(word)
            right.remove(word)
            exact.append(word)
    found: dict[str, list[tuple[str, str]]] = {"synonym": [], "derived": [], "typo": []}
    stands: dict[str, str] = {}
    # Long texts with so little in common are not the same, and comparing all with all would take seconds.
    pairable = len(left) * len(right) <= MAX_COMPARED
    for how in ("synonym", "derived", "typo") if pairable else ():
        for word in list(left):
            for other in right:
                if _relation(a, word, b, other) == how:
                    found[how].append((word, other))
                    stands[other] = word
                    left.remove(word)
                    right.remove(other)
                    break
    missing_a, missing_b = set(left) - set(exact), set(right) - set(exact)
    phrases_a = _phrases(a, missing_a, {})
    phrases_b = _phrases(b, missing_b, stands)
    heads_a, heads_b = _heads(a, {}), _heads(b, stands)
    both = [word for word in heads_a if word in heads_b]
    turned = any(heads_a[word] and heads_b[word] and heads_a[word] != heads_b[word] for word in both)
    moved = sum(heads_a[word] != heads_b[word] for word in both)
    flat_a = [word for _, words in phrases_a for word in words]
    flat_b = [word for _, words in phrases_b for word in words]
    return Alignment(
        tuple(exact),
        tuple(found["synonym"]),
        tuple(found["derived"]),
        tuple(found["typo"]),
        tuple(left),
        tuple(right),
        flat_a == flat_b or _same_phrases(phrases_a, phrases_b),
        turned,
        moved,
        _holes(a, missing_a, {}) == _holes(b, missing_b, stands),
    )


def _phrases(text: Reading, missing: set[str], stands: dict[str, str]) -> list[tuple[str, tuple[str, ...]]]:
    rows = []
    for chunk in text.chunks:
        words = tuple(stands.get(word, word) for word in chunk.words if word not in missing)
        if words:
            rows.append((chunk.head, words))
    return rows


def _holes(text: Reading, missing: set[str], stands: dict[str, str]) -> list[str]:
    """The words in order, one "" for each run of words that have no partner."""
    found: list[str] = []
    for word in text.words:
        if word not in missing:
            found.append(stands.get(word, word))
        elif not found or found[-1]:
            found.append("")
    return found


def _same_phrases(a: list[tuple[str, tuple[str, ...]]], b: list[tuple[str, tuple[str, ...]]]) -> bool:
    """The same phrases in any order, if no two of them could stand for each other."""
    heads = [head for head, _ in a]
    return sorted(a) == sorted(b) and len(heads) == len(set(heads))


def _heads(text: Reading, stands: dict[str, str]) -> dict[str, str]:
    return {
        stands.get(word, word): chunk.head if chunk.head in DIRECTIONS else ""
        for chunk in text.chunks
        for word in chunk.words
    }


def _relation(a: Reading, word: str, b: Reading, other: str) -> str:
    """ "synonym", "derived", "typo" or "". Names, code and numbers stand for nothing but themselves."""
    for text, own in ((a, word), (b, other)):
        spelled = text.lowered.get(own, own)
        if own in text.names or spelled in text.codes or not spelled.isalpha():
            return ""
    if word in _MEASURED and other in _MEASURED:
        # A minute is a second in "wait a second" only.
        return ""
    return relation(a.lowered.get(word, word), b.lowered.get(other, other))


@lru_cache(maxsize=16384)
def relation(x: str, y: str) -> str:
    """How two lower-case words are related: "synonym", "derived", "typo", "opposite", "sister" or ""."""
    if x > y:
        x, y = y, x
    words = lexicon()
    if opposite(x, y):
        return "opposite"
    if _apart(x, y) or frozenset((fold(x), fold(y))) in APART:
        return "sister"
    if words.same(x, y) or near(forms(x), forms(y)):
        return "synonym"
    if _root(x) == _root(y) and len(_root(x)) >= 4 and x.endswith(_AGENTS) == y.endswith(_AGENTS):
        return "derived"
    if _is_typo(x, y):
        return "typo"
    return "sister" if words.sisters(x, y) else ""


def _apart(x: str, y: str) -> bool:
    """Two words that folding makes one: plan and plane, cars and cares, custom and customs."""
    if x == y:
        return False
    if frozenset((x, y)) in PLURALS_APART:
        return True
    short, long = sorted((x.removesuffix("s"), y.removesuffix("s")), key=len)
    return long == short + "e" and len(short) >= 3 and lexicon().knows(short) and lexicon().knows(long)


def opposite(x: str, y: str) -> bool:
    """Antonyms of either list, or one is the other with a prefix that turns its meaning."""
    if fold(y) in ANTONYMS.get(fold(x), ()) or lexicon().opposite(x, y):
        return True
    bases_x, bases_y = compared(x), compared(y)
    if (
        bases_x
        and bases_y
        and any(fold(b) in ANTONYMS.get(fold(a), ()) or lexicon().opposite(a, b) for a in bases_x for b in bases_y)
    ):
        return True
    long, short = (x, y) if len(x) > len(y) else (y, x)
    if len(short) < 3:
        return False
    if any(long == prefix + short for prefix in _NEGATIVE_PREFIXES):
        return True
    # encrypt and decrypt, internal and external, overweight and underweight
    for prefix in _NEGATIVE_PREFIXES:
        if x.startswith(prefix):
            stem = x[len(prefix) :]
            if len(stem) >= 4 and any(y == p + stem for p in (*_NEGATIVE_PREFIXES, "ex", "a")):
                return True
    return False


def compared(word: str) -> tuple[str, ...]:
    """What a comparative or superlative may be of: "richer" → rich; () for other words."""
    if word in ("better", "best", "worse", "worst", "more", "less", "most", "least", "fewer"):
        return (word,)
    for ending in ("er", "est"):
        if word.endswith(ending) and len(word) > len(ending) + 2:
            stem = word[: -len(ending)]
            bases = [
                stem,
                stem + "e",
                *([stem[:-1] + "y"] if stem[-1] == "i" else []),
                *([stem[:-1]] if stem[-1] == stem[-2] else []),
            ]
            return tuple(base for base in bases if base in GRADED)
    return ()


@lru_cache(maxsize=16384)
def weight(word: str) -> float:
    """How much a word tells: about 0.2 for the emptiest, 1 for a rare one, 1.2 for one no list has."""
    if word in SOFT:
        return 0.15
    rank = lexicon().rank(word)
    if rank >= RARE:
        return 1.2
    return 0.2 + 0.8 * min(1.0, math.log1p(max(0, rank - 1900) / 400) / math.log1p(28000 / 400))


def _root(word: str) -> str:
    if word.endswith("s") and not word.endswith("ss"):
        word = word[:-1]
    for suffix in _SUFFIXES:
        if word.endswith(suffix) and len(word) - len(suffix) >= 4:
            word = word[: -len(suffix)]
            break
    return word[:-1] if len(word) > 4 and word[-1] == word[-2] else word


def _is_typo(x: str, y: str) -> bool:
    """One is no word and one slip of the hand away from the other, which is a common one."""
    words = lexicon()
    if abs(len(x) - len(y)) > 1 or min(len(x), len(y)) < 4 or x[0] != y[0]:
        return False
    known_x, known_y = words.knows(x), words.knows(y)
    if known_x == known_y or (words.rank(x if known_x else y) > 25000 and min(len(x), len(y)) < 6):
        return False
    if x.endswith(_AGENTS) != y.endswith(_AGENTS):
        return False
    distance = slips(x, y)
    return distance == 1 or (distance == 2 and min(len(x), len(y)) >= 8)
