"""Marks that prose may drop, and where they mean something after all: 7 - 3, 5!, f'(x), *p, a[:2], 5 Mb, 10⁵.

Texts that differ in nothing but dropped marks and capitals count as the same, so whatever is told apart by those alone
is kept here. In doubt a mark counts: a miss costs one generation.
"""

from __future__ import annotations

import re

_SUPERSCRIPT = re.compile("([⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱ]+)")
_FRACTION = re.compile("([½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞↉⅐⅑⅒])")
_EMPHASIS = re.compile(r"(?<![\w*])(\*{1,2})(?=[^\s*])([^*\n]{1,200})(?<=[^\s*])\1(?![\w*])")
_ALWAYS = frozenset("*~[]")
_REMARK = re.compile(r"[^\W\d_]{2}")
_NAMED = re.compile(r"[$%\\][^\W\d]\w*")
_DASHES = frozenset("-–—")

# Spellings of units that need no mention; any other one with a capital does.
_USUAL = {
    "mb": ("MB",), "gb": ("GB",), "kb": ("KB", "kB"), "tb": ("TB",), "pb": ("PB",), "mbps": ("Mbps",),
    "gbps": ("Gbps",), "kbps": ("Kbps",), "mw": (), "mm": (), "mg": (), "ml": ("mL",), "ms": (), "ma": ("mA",),
    "mv": ("mV",), "mj": (), "mhz": ("MHz",), "mpa": ("MPa",), "mah": ("mAh",), "kw": ("kW", "KW"),
}  # fmt: skip
_SPOKEN = frozenset(
    ["do", "does", "is", "are", "the", "a", "an", "of", "between", "using", "use", "with", "without", "and", "or", "by"]
)
"""Words after which a mark that stands alone is what is spoken of."""
_CALLED = re.compile(r"\s+(?:operator|sign|symbol|character|mean|means)\b", re.IGNORECASE)
_LOUD = frozenset(["who", "it", "aids", "or", "no", "us"])
"""Words that in capitals are others."""


def unfold(text: str) -> str:
    """To be done before compatibility forms are folded: 10⁵ as "10 ^5", 2½ as "2 ½"; emphasis is taken off."""
    text = _SUPERSCRIPT.sub(r" ^\1 ", text)
    text = _FRACTION.sub(r" \1 ", text)
    return _EMPHASIS.sub(r"\2", text)


def counts(text: str, at: int) -> bool:
    """Whether the mark at a place, one that prose may drop, means something there."""
    mark = text[at]
    before, after = text[at - 1 : at] or " ", text[at + 1 : at + 2] or " "
    if mark in _ALWAYS or (mark in ".,:;?!_" and lonely(text, at)):
        return True
    if mark == ";":
        return not (_word(before) or before in ")]}'\"`") or not (after.isspace() or after in "'\"`")
    if mark in "()":
        opening = at if mark == "(" else text.rfind("(", 0, at)
        closing = text.find(")", opening + 1) if mark == "(" else at
        inner = text[opening + 1 : closing if closing >= 0 else len(text)]
        # A remark in words is prose, unless something is called with them.
        return opening < 0 or _word(text[opening - 1 : opening]) or _REMARK.search(inner) is None
    if mark in _DASHES:
        if mark == "-" and after == "-" and _word(before) and not _word(text[at + 2 : at + 3]):
            return True
        if mark != "-" and before.isspace() and after.isdigit():
            return True
        return _operand(text[:at].rstrip(), last=True) and _operand(text[at + 1 : at + 40].lstrip(), last=False)
    if mark == "!":
        return _word(after) or after in "=([" or _operand(text[:at], last=True)
    if mark == "'":
        opened = any(text[i] == mark and not _word(text[i - 1 : i]) for i in range(at))
        return _operand(text[:at], last=True) and not _word(after) and not opened
    if mark == '"':
        return before.isdigit() and text.count(mark) % 2 == 1
    if mark == ":":
        if before in "[]" or after in "[]":
            return True
        return not (before.isspace() or after.isspace())
    if mark == "?":
        return (
            _word(after)
            or (after == "." and _word(text[at + 2 : at + 3]))
            or (before == " " and after == mark and bool(text[at:].strip(" ?!.\n")))
        )
    if mark == ".":
        return _word(after) or after in "/*"
    return False


def lonely(text: str, at: int) -> bool:
    """Whether the mark at a place is spoken of ("what does & mean") or stands at one side of a word only (&x)."""
    before, after = text[max(0, at - 40) : at], text[at + 1 : at + 40]
    said = before.rstrip().rsplit(None, 1)[-1].lower() if before.strip() else ""
    if text[at] != "&":
        return said in _SPOKEN and before[-1:].isspace() and (not after or not _word(after[0])) and bool(after.strip())
    if _word(before[-1:]) and _word(after[:1]):
        return False
    joins = before[-1:].isspace() and after[:1].isspace() and _word(before.rstrip()[-1:]) and _word(after.lstrip()[:1])
    return not joins or said in _SPOKEN or _CALLED.match(after) is not None


def cased(token: str, before: str) -> str:
    """A capital that stands alone after a mark of patterns, as in [A-Z]; else ""."""
    return before + token if before and before in "[^-|" and len(token) == 1 and token.isupper() else ""


def written(text: str, at: int) -> str:
    """The mark that counts at a place: of brackets and the like with what they stand at."""
    mark = text[at]
    if mark in _DASHES:
        return "-"
    return f"{mark}{text[at + 1 : at + 2].strip().lower()}" if mark in "*:([!" else mark


def sigil(text: str, at: int) -> str:
    """The word that a mark at a place makes a name of, as it is written: $HOME, %s, \\d; "" where it does not."""
    found = _NAMED.match(text, at)
    return found.group() if found else ""


def spelling(token: str, before: str, text: str) -> str:
    """The token where its capitals make it another word, "" where they do not matter. before: the word before it."""
    small = token.lower()
    if token == small or text.upper() == text:
        return ""
    if small in _USUAL:
        return "" if token in _USUAL[small] else token
    if small == "co":
        return token
    return token if small in _LOUD and token.isupper() and not (small == "us" and before == "the") else ""


def _word(char: str) -> bool:
    return char.isalnum() or char == "_"


def _operand(text: str, *, last: bool) -> bool:
    """Whether a text ends (or begins) with a number, a bracket or a single letter."""
    if not text:
        return False
    near, next_ = (text[-1], text[-2:-1]) if last else (text[0], text[1:2])
    if near.isdigit() or near in (")]" if last else "(["):
        return True
    return near.isalpha() and not (_word(next_) or next_ == "'")
