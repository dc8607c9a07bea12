"""Guards: reasons why two texts that embed alike do not ask the same.

Embeddings are nearly blind to a negation, a swapped number, name or order. A guard that cannot tell refuses: a miss
costs one generation, a false hit is a wrong answer. The lists are English; in any other language the word rules see
unknown words only and so refuse everything but texts of the same words in the same order.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from services.router.match.wordlists import (
    ANTONYMS,
    AUXILIARIES,
    FILLERS,
    FRAMES,
    INTERROGATIVES,
    MODALS,
    NEGATIONS,
    NUMBER_WORDS,
    PIVOTAL,
    PLACED,
    PREPOSITIONS,
    fold,
)

_TOKEN = re.compile(r"(?<![^\s(=])-\d+(?:[.,:]\d+)*|\d+(?:[.,:]\d+)*|[^\W\d_]+(?:[''][^\W\d_]+)*|[^\w\s]|_", re.UNICODE)
_QUOTED = re.compile(r"`([^`]+)`|\"([^\"]+)\"|“([^”]+)”|«([^»]+)»")
_SENTENCE_ENDS = frozenset(".!?:;\n")
_IGNORED_MARKS = frozenset(".,!?;:'\"()[]…“”«»`-–—_¿¡")
# "What is the best way to …" asks "how to …".
_WAY = re.compile(
    r"\bwhat(?:'s| is| are) (?:the |a )?(?:best |good |right |proper |easiest )?(?:way|method)s? (?:to|for|of)\b", re.I
)
_CONTRACTIONS = {
    "can't": ["can", "not"],
    "won't": ["will", "not"],
    "shan't": ["shall", "not"],
    "cannot": ["can", "not"],
}


@dataclass(frozen=True, slots=True)
class Reading:
    """What the guards look at in one text."""

    words: list[str]
    numbers: list[str]
    negations: int
    names: frozenset[str]
    marks: list[str]
    quoted: list[str]


def refusal(asked: str, remembered: str) -> str:
    """Why the remembered text is not the asked one: "numbers", "negation", …; "" when nothing speaks against it."""
    if asked == remembered:
        return ""
    a, b = read(asked), read(remembered)
    if a.numbers != b.numbers:
        return "numbers"
    if a.negations != b.negations:
        return "negation"
    if a.quoted != b.quoted:
        return "quotes"
    if a.marks != b.marks:
        return "symbols"
    # A name in one text may be written small in the other: then it is among the other's words.
    if (a.names - set(b.words)) or (b.names - set(a.words)):
        return "names"
    return _words_differ(a.words, b.words, anchored=bool(a.numbers or a.quoted))


def _words_differ(a: list[str], b: list[str], *, anchored: bool) -> str:
    """`anchored`: the texts share something besides words that the question is about."""
    only_a, only_b = set(a) - set(b), set(b) - set(a)
    for word in only_a:
        if not ANTONYMS.get(word, frozenset()).isdisjoint(only_b):
            return "antonyms"
    if (only_a | only_b) & PIVOTAL:
        return "qualifier"
    if not _same_kind(a, b):
        return "question"
    for kind in (PREPOSITIONS, MODALS):
        if (only_a & kind) and (only_b & kind):
            return "grammar"
    if (only_a | only_b) - FILLERS:
        return "words"
    common = set(a) & set(b)
    if not common - FILLERS and not anchored and set(a) != set(b):
        return "nothing shared"
    ordered = common - (FILLERS - PLACED)
    if _order(a, ordered) != _order(b, ordered):
        return "order"
    return ""


def _same_kind(a: list[str], b: list[str]) -> bool:
    """Both ask what, who, how, …; or one does and the other says "tell me …" or just names the thing."""
    asks_a, asks_b = INTERROGATIVES.intersection(a), INTERROGATIVES.intersection(b)
    if asks_a == asks_b:
        return bool(asks_a) or _is_polar(a) == _is_polar(b)
    if asks_a and asks_b:
        return False
    return not _is_polar(b if asks_a else a)


def _is_polar(words: list[str]) -> bool:
    """A question that yes or no answers."""
    return bool(words) and words[0] in AUXILIARIES and FRAMES.isdisjoint(words)


def _order(words: list[str], shared: set[str]) -> list[str]:
    """The shared words in the order of their first occurrence."""
    return list(dict.fromkeys(word for word in words if word in shared))


def read(text: str) -> Reading:
    """Take a text apart."""
    text = unicodedata.normalize("NFKC", text).replace("’", "'")
    text = _WAY.sub("How to", text)
    words: list[str] = []
    numbers: list[str] = []
    names: set[str] = set()
    marks: list[str] = []
    negations = 0
    starts = True
    for match in _TOKEN.finditer(text):
        token = match.group()
        if token[-1].isdigit():
            numbers.append(_number(token))
            starts = False
            continue
        if not token[0].isalpha():
            if token not in _IGNORED_MARKS:
                marks.append(token)
            starts = token in _SENTENCE_ENDS or starts
            continue
        for word in _split(token.lower()):
            if word in NUMBER_WORDS:
                numbers.append(NUMBER_WORDS[word])
            elif word in NEGATIONS:
                negations += 1
            else:
                words.append(fold(word))
        if _is_name(token, starts):
            names.add(fold(_split(token.lower())[0]))
        starts = False
    quoted = ["".join(parts) for parts in _QUOTED.findall(text)]
    return Reading(words, numbers, negations, frozenset(names), marks, quoted)


def _is_name(token: str, starts: bool) -> bool:
    """Capitals inside a sentence, or several in one word anywhere."""
    capitals = sum(char.isupper() for char in token)
    return token not in ("I", "I'm", "I'd", "I've", "I'll") and (capitals > 1 or (capitals == 1 and not starts))


def _split(word: str) -> list[str]:
    if word in _CONTRACTIONS:
        return _CONTRACTIONS[word]
    stem, mark, tail = word.partition("'")
    if not mark:
        return [word]
    if tail == "t" and stem.endswith("n"):
        return [stem[:-1], "not"]
    # 's, 're, 'll, 've, 'd, 'm
    return [stem]


def _number(token: str) -> str:
    """One spelling a number: thousands separators and trailing zeros gone ("1,000.50" → "1000.5")."""
    if re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d+)?", token):
        token = token.replace(",", "")
    if re.fullmatch(r"\d+\.\d+", token):
        token = token.rstrip("0").rstrip(".")
    sign = "-" if token[0] == "-" else ""
    return sign + (token.lstrip("-0") or "0")
