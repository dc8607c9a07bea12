"""Guards: reasons why two texts that embed alike do not ask the same.

Embeddings are nearly blind to a negation, a swapped number, name or order. A guard that cannot tell refuses: a miss
costs one generation, a false hit is a wrong answer. The rules are English; in any other language texts must have the
same words in the same order.
"""

from __future__ import annotations

import re
from collections import Counter

from services.router.match.align import Alignment, align, compared, opposite, weight
from services.router.match.lexicon import lexicon
from services.router.match.reading import Reading, read
from services.router.match.sentences import crossed, other_question
from services.router.match.wordlists import DIRECTIONS, MODALS, PIVOTAL, UNITS, fold

GUARDS = (
    "language",
    "numbers",
    "units",
    "negation",
    "quotes",
    "code",
    "symbols",
    "names",
    "question",
    "tense",
    "antonyms",
    "comparative",
    "qualifier",
    "modal",
    "person",
    "direction",
    "order",
    "entities",
    "words",
)
ALL = frozenset(GUARDS)
# Weight of a word (see align.weight) from which on it is taken to matter.
TELLING = 0.16
# Content words beyond which one more cannot be seen in any share.
LONG = 24

_MEASURED = frozenset(unit for name, unit in UNITS.items() if len(name) > 2)

_ENDS_IN_ZERO = re.compile(r"\d+\.\d*[1-9]0+")
_MONEY = frozenset(fold(name) for name in ("dollar", "dollars", "euro", "euros", "sterling", "pounds", "yen"))

# Kinds of questions that may be another way to ask the same; the verifier sees that they differ.
_SOFT_KINDS = {
    frozenset(pair)
    for pair in (
        ("", "how"),
        ("", "what"),
        ("", "mean"),
        ("what", "mean"),
        ("how", "how?"),
        ("", "difference"),
        ("what", "how work"),
        ("", "how work"),
        ("", "how many"),
        ("", "how much"),
        ("", "how long"),
        ("", "who"),
        ("how work", "mean"),
        ("polar do", "polar will"),
        ("", "why"),
        ("", "where"),
        ("", "when"),
        ("", "cost"),
        ("can", "polar can"),
        ("should", "polar should"),
        ("must", "polar do"),
        ("must", "polar must"),
    )
}


def same_text(a: Reading, b: Reading) -> bool:
    """Nothing but capitals, punctuation and spaces differ."""
    return a.raw == b.raw and a.marks == b.marks and not _codes_differ(a, b) and not _quotes_differ(a, b)


def refusal(asked: str, remembered: str, guards: frozenset[str] = ALL) -> str:
    """The first of `guards` that refuses the pair; "" when none does."""
    a, b = read(asked), read(remembered)
    return "" if asked == remembered or same_text(a, b) else refuse(a, b, align(a, b), guards)


def refuse(a: Reading, b: Reading, pairs: Alignment, guards: frozenset[str] = ALL) -> str:
    """As `refusal`, of texts already read and aligned."""
    for name in GUARDS:
        if name in guards and _CHECKS[name](a, b, pairs):
            return name
    return ""


def soft_kinds(a: Reading, b: Reading) -> bool:
    """The kinds differ, but need not mean another question."""
    return a.kind != b.kind and frozenset((a.kind, b.kind)) in _SOFT_KINDS


def _language(a: Reading, b: Reading, pairs: Alignment) -> bool:
    return not (a.english and b.english)


def _numbers(a: Reading, b: Reading, pairs: Alignment) -> bool:
    if Counter(a.numbers) != Counter(b.numbers):
        return True
    # Version 3.10 is not 3.1; $2.50 is $2.5.
    money = not _MONEY.isdisjoint(a.all_words) and not _MONEY.isdisjoint(b.all_words)
    return not money and _ending_in_zero(a) != _ending_in_zero(b)


def _ending_in_zero(text: Reading) -> list[str]:
    return sorted(token for token in text.raw if _ENDS_IN_ZERO.fullmatch(token))


def _units(a: Reading, b: Reading, pairs: Alignment) -> bool:
    if Counter(a.units) != Counter(b.units):
        return True
    # Opening hours, opening days.
    return any(x in _MEASURED for x in pairs.only_a) and any(y in _MEASURED for y in pairs.only_b)


def _negation(a: Reading, b: Reading, pairs: Alignment) -> bool:
    if a.negations != b.negations:
        return True
    return len(a.sentences) == len(b.sentences) > 1 and crossed(a.sentences, b.sentences)


def _quotes_differ(a: Reading, b: Reading) -> bool:
    if a.quoted and b.quoted:
        return Counter(a.quoted) != Counter(b.quoted)
    for one, other in ((a, b), (b, a)):
        spoken = f" {' '.join(other.raw)} "
        # A number in quotes is another thing than the number.
        if any(text.isdecimal() or f" {' '.join(read(text).raw)} " not in spoken for text in one.quoted):
            return True
    return False


def _quotes(a: Reading, b: Reading, pairs: Alignment) -> bool:
    return _quotes_differ(a, b)


def _codes_differ(a: Reading, b: Reading) -> bool:
    """An identifier that the other text lacks; other capitals count when both texts have any."""
    for one, other in ((a, b), (b, a)):
        spelled = {code.lower(): code for code in other.codes}
        for code in one.codes:
            twin = spelled.get(code.lower())
            if twin is None:
                if code.lower() not in other.raw:
                    return True
            elif twin != code and code[0] == "-":
                # ls -l and ls -L
                return True
            elif twin != code and twin != twin.lower() and code != code.lower():
                return True
    return False


def _code(a: Reading, b: Reading, pairs: Alignment) -> bool:
    return _codes_differ(a, b)


def _symbols(a: Reading, b: Reading, pairs: Alignment) -> bool:
    return a.marks != b.marks


def _names(a: Reading, b: Reading, pairs: Alignment) -> bool:
    if _forms_differ(a, b):
        return True
    # A name in one text may be written small in the other: then it is among the other's words.
    words_a, words_b = set(a.words), set(b.words)
    return bool(((a.names & words_a) - (b.all_words | words_b)) or ((b.names & words_b) - (a.all_words | words_a)))


def _forms_differ(a: Reading, b: Reading) -> bool:
    """Aliens is not Alien, and http to https is not https to http, though these fold to one word."""
    for word in a.spelled.keys() & b.spelled.keys():
        one, other = a.spelled[word], b.spelled[word]
        twofold = len(set(one)) > 1 or len(set(other)) > 1
        if one == other or not (twofold or word in a.names or word in b.names):
            continue
        if (twofold or set(one).isdisjoint(other)) and any(_inflected(x, y) for x in one for y in other):
            return True
    return False


def _inflected(x: str, y: str) -> bool:
    """One is the other with an ending, not a synonym that folds to the same. PDFs are PDF files; HTTPS is not HTTP."""
    if any(word[:-1].isupper() and word[-1] == "s" for word in (x, y)):
        return False
    return x != y and (x.startswith(y) or y.startswith(x))


def _question(a: Reading, b: Reading, pairs: Alignment) -> bool:
    if a.kind != b.kind and not soft_kinds(a, b):
        return True
    if len(a.sentences) != len(b.sentences):
        return True
    return any(
        (x.kind != y.kind and frozenset((x.kind, y.kind)) not in _SOFT_KINDS) or other_question(x, y)
        for x, y in zip(a.sentences, b.sentences, strict=True)
    )


def _tense(a: Reading, b: Reading, pairs: Alignment) -> bool:
    return a.tense != b.tense and "past" in (a.tense, b.tense)


def _antonyms(a: Reading, b: Reading, pairs: Alignment) -> bool:
    return any(
        opposite(a.lowered.get(x, x), b.lowered.get(y, y))
        for x in {*pairs.only_a, *(x for x, _ in pairs.synonyms)}
        for y in {*pairs.only_b, *(y for _, y in pairs.synonyms)}
    )


def _comparative(a: Reading, b: Reading, pairs: Alignment) -> bool:
    """Cheaper, fastest: a comparative that the other text lacks."""
    return any(
        compared(text.lowered.get(word, word)) for text, rest in ((a, pairs.only_a), (b, pairs.only_b)) for word in rest
    )


_ALONE = frozenset(fold(word) for word in ("solely", "exclusively", "merely", "alone", "just", "purely"))


def _qualifier(a: Reading, b: Reading, pairs: Alignment) -> bool:
    if any(("only" in pair) and not _ALONE.intersection(pair) for pair in pairs.synonyms):
        return True
    return not PIVOTAL.isdisjoint(pairs.only_a) or not PIVOTAL.isdisjoint(pairs.only_b)


def _modal(a: Reading, b: Reading, pairs: Alignment) -> bool:
    only_a, only_b = a.all_words - b.all_words, b.all_words - a.all_words
    return a.kind not in ("how", "cost", "how long") and bool(only_a & MODALS) and bool(only_b & MODALS)


_STRICT = frozenset(["from", "without", "against", "between", "under", "over", "within"])


def _person(a: Reading, b: Reading, pairs: Alignment) -> bool:
    """My name, your name; may I call you, may you call me. Where only one of them is named they may be the same."""
    return any(one and other and one != other for one, other in ((a.persons, b.persons), (a.addressed, b.addressed)))


def _direction(a: Reading, b: Reading, pairs: Alignment) -> bool:
    heads_a, heads_b = (Counter(c.head for c in t.chunks if c.head in DIRECTIONS) for t in (a, b))
    only_a, only_b = heads_a - heads_b, heads_b - heads_a
    return pairs.turned or bool(only_a and only_b) or not _STRICT.isdisjoint([*only_a, *only_b])


def _order(a: Reading, b: Reading, pairs: Alignment) -> bool:
    return not pairs.ordered


def _entities(a: Reading, b: Reading, pairs: Alignment) -> bool:
    """A word that no dictionary has is a name, a product, a term: nothing can stand for it."""
    words = lexicon()
    for text, rest in ((a, pairs.only_a), (b, pairs.only_b)):
        if any(not words.knows(text.lowered.get(word, word)) for word in rest):
            return True
    return False


def _telling(text: Reading, rest: tuple[str, ...]) -> list[bool]:
    """Which of the words without a partner matter."""
    return [weight(text.lowered.get(word, word)) >= TELLING for word in rest]


def _words(a: Reading, b: Reading, pairs: Alignment) -> bool:
    """A telling word in the place of another telling one; any word more or less in a long text."""
    told_a, told_b = any(_telling(a, pairs.only_a)), any(_telling(b, pairs.only_b))
    if max(len(a.words), len(b.words)) > LONG:
        return told_a or told_b
    return told_a and told_b and pairs.replaced


_CHECKS = {name: globals()[f"_{name}"] for name in GUARDS}
