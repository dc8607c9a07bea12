"""Takes a question apart: what kind of question it is, and its words, numbers, names and code in order.

The frame of a question ("could you tell me how to …", "what is the best way to …") is taken off and becomes its kind.
What is left is written one way: "France's capital" and "the capital of France" are read alike, a clause in front
("in Python, how …") moves to the end. The rules are English; texts of other languages are compared word by word.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache

from services.router.match import frames, sentences, symbols
from services.router.match.lexicon import lexicon
from services.router.match.wordlists import (
    FILLERS,
    MONTHS,
    NEGATIONS,
    NUMBER_WORDS,
    PIVOTAL,
    PREPOSITIONS,
    UNITS,
    fold,
)

_TOKEN = re.compile(
    r"`[^`]+`"  # code
    r"|(?<![\w-])--?[A-Za-z][\w-]*(?=\W|$)"  # a flag
    r"|(?<![^\s(=])-\d+(?:[.,:]\d+)*|\d+(?:[.,:/]\d+)*(?:st|nd|rd|th)?(?![\w])"  # a number
    r"|[A-Za-z]\+\+|[A-Za-z]#|\.[A-Za-z]+\b"  # C++, C#, .env
    r"|\w+(?:(?:[._/\\@]|::)\w+)+(?:\(\))?"  # a path, a dotted name
    r"|[^\W_]+(?:'[^\W_]+)*|[^\w\s]|_\w*",
    re.UNICODE,
)
_QUOTED = re.compile(r"`([^`]+)`|\"([^\"]+)\"|“([^”]+)”|«([^»]+)»|(?<!\w)'([^']+)'(?!\w)")
_GLUED = re.compile(r"^(-?\d+(?:[.,]\d+)*)([a-z%°]+)$", re.I)
_IGNORED_MARKS = frozenset(".,!?;:'\"()[]…“”«»`-–—_¿¡*~")
_CURRENCIES = {"$": "dollar", "€": "euro", "£": "sterling", "¥": "yen", "%": "percent", "°": "degree"}
_SENTENCE_ENDS = frozenset(".!?:;\n")
_NO_GENITIVE = frozenset(
    [
        "what",
        "that",
        "who",
        "how",
        "where",
        "when",
        "why",
        "it",
        "he",
        "she",
        "there",
        "here",
        "let",
        "this",
        "everyone",
        "everything",
        "name",
    ]
)
_PERSONS = ("i me my mine myself", "you your yours", "we us our ours", "he him his", "she her", "they them their")
PERSONS = {word: str(number) for number, words in enumerate(_PERSONS, 1) for word in words.split()}
_ADDRESSED = re.compile(r"\b(?:am|are|was|were|did|have|had) (i|you|we|he|she|they)\b")
_ALL = frozenset(["all", "any", "anything", "anyone", "anybody", "everything", "everyone", "everybody", "everywhere"])
_DETERMINERS = frozenset(
    ["the", "a", "an", "my", "your", "our", "their", "his", "her", "its", "this", "that", "these", "those"]
)
_SKIPPED = frozenset([",", ".", "'s", "and"])
_NOT_NAMES = frozenset(["I", "I'm", "I'd", "I've", "I'll", "OK", "PLEASE", "ASAP", "FAQ"])
_CONTRACTIONS = {
    "résumé": ["resume"], "resumé": ["resume"], "café": ["cafe"], "cafés": ["cafes"], "naïve": ["naive"],
    "jalapeño": ["jalapeno"], "façade": ["facade"], "cliché": ["cliche"],
    "can't": ["can", "not"], "cant": ["can", "not"], "won't": ["will", "not"], "wont": ["will", "not"],
    "shan't": ["shall", "not"], "cannot": ["can", "not"], "dont": ["do", "not"], "doesnt": ["does", "not"],
    "didnt": ["did", "not"], "isnt": ["is", "not"], "arent": ["are", "not"], "wasnt": ["was", "not"],
    "ain't": ["is", "not"], "shouldnt": ["should", "not"], "couldnt": ["could", "not"], "wouldnt": ["would", "not"],
    "im": ["i", "am"], "ive": ["i", "have"], "whats": ["what", "is"], "hows": ["how", "is"], "wheres": ["where", "is"],
    "whos": ["who", "is"], "let's": ["let", "us"], "gonna": ["going", "to"], "wanna": ["want", "to"],
    "gotta": ["got", "to"], "pls": ["please"], "plz": ["please"], "thx": ["thanks"], "u": ["you"], "ur": ["your"],
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chunk:
    """A preposition ("" for the first) and the words under it, folded."""

    head: str
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """One text. `raw` are all its words as written, lower-case; `words` the folded content of `chunks`, in order.

    `sentences`: one for each sentence that is more than a courtesy. `addressed`: who was, did or has, of frames too.
    `spelled`: the forms of each folded word, in order.
    """

    raw: tuple[str, ...]
    kind: str
    chunks: tuple[Chunk, ...]
    words: tuple[str, ...]
    all_words: frozenset[str]
    lowered: dict[str, str]
    numbers: tuple[str, ...]
    units: tuple[str, ...]
    negations: int
    names: frozenset[str]
    codes: frozenset[str]
    marks: tuple[str, ...]
    quoted: tuple[str, ...]
    english: bool
    tense: str
    persons: str
    sentences: tuple[sentences.Sentence, ...]
    addressed: str
    spelled: dict[str, tuple[str, ...]]


@lru_cache(maxsize=4096)
def read(text: str) -> Reading:
    """Take a text apart."""
    text = unicodedata.normalize("NFKC", symbols.unfold(text)).replace("’", "'").replace("‘", "'").replace("⁄", "/")
    quoted = tuple("".join(parts).strip() for parts in _QUOTED.findall(text))
    tokens: list[str] = []
    names: set[str] = set()
    codes: set[str] = set()
    marks: list[str] = []
    breaks: list[int] = []
    plurals: set[str] = set()
    starts = True
    ended_at = 0
    for match in _TOKEN.finditer(text):
        token = match.group()
        if "\n" in text[ended_at : match.start()]:
            breaks.append(len(tokens))
        ended_at = match.end()
        ended, starts = starts, False
        if not any(char.isalnum() for char in token):
            starts = token in _SENTENCE_ENDS or ended
            if token in _IGNORED_MARKS and symbols.counts(text, match.start()):
                marks.append(symbols.written(text, match.start()))
            if named := symbols.sigil(text, match.start()):
                marks.append(named)
            if token in _CURRENCIES:
                tokens.append(_CURRENCIES[token])
            elif token in (",", ";", ":") or (token in "-–—" and text[match.start() - 1 : match.start()] == " "):
                tokens.append(",")
            elif token in ".!?":
                tokens.append(".")
                breaks.append(len(tokens))
            elif token == "&":
                tokens.append("and")
                if symbols.lonely(text, match.start()):
                    marks.append("&")
                if text[match.end() : match.end() + 1] == "&":
                    marks.append("&&")
            elif unicodedata.category(token[0])[0] == "M":
                # A vowel sign belongs to the letter before it.
                marks.append(f"{len(tokens)}{token}")
            elif token not in _IGNORED_MARKS:
                marks.append(token)
            continue
        glued = _GLUED.match(token)
        if spelled := symbols.spelling(glued[2] if glued else token, tokens[-1] if tokens else "", text):
            marks.append(f"{len(tokens)}{spelled}")
        if cased := symbols.cased(token, text[match.start() - 1 : match.start()]):
            marks.append(cased)
        if token[0] == "`" or _is_code(token):
            code = token.strip("`").removesuffix("()")
            codes.add(code)
            tokens.append(code.lower())
            continue
        if glued and glued[2].lower() in UNITS:
            tokens += [glued[1], glued[2].lower()]
            continue
        if token[0].isdigit() or token[0] == "-":
            tokens.append(token.lower())
            continue
        parts = _split(token.lower())
        if _is_name(token, ended):
            names.add(fold(parts[0]))
            if token[-1] == "s" and token[:-1].isupper() and len(token) > 2:
                plurals.add(parts[0])
        tokens += parts
    return _read_tokens(tokens, names, codes, marks, quoted, breaks, plurals)


def _read_tokens(
    tokens: list[str],
    names: set[str],
    codes: set[str],
    marks: list[str],
    quoted: tuple[str, ...],
    breaks: list[int],
    plurals: set[str],
) -> Reading:
    tokens = _currency_last(tokens)
    raw = tuple(token for token in tokens if token not in ",.")
    english = _is_english(raw)
    numbers: list[str] = []
    units: list[str] = []
    for i, token in enumerate(raw):
        if (value := number(token)) is not None:
            numbers.append(value)
        if token in UNITS and i and number(raw[i - 1]) is not None:
            units.append(UNITS[token])
    corrected = [_corrected(token) for token in tokens]
    spoken = " ".join(corrected)
    kind, body, peeled = frames.strip(spoken) if english else ("", spoken, spoken)
    left = body.split()
    chunks, lowered = _chunks(left, codes)
    negations = _negations(left)
    words = tuple(word for chunk in chunks for word in chunk.words)
    return Reading(
        raw,
        kind,
        chunks,
        words,
        frozenset(fold(token) for token in raw),
        lowered,
        tuple(numbers),
        tuple(units),
        negations,
        frozenset(names),
        frozenset(codes),
        tuple(marks),
        quoted,
        english,
        frames.tense(peeled.split()),
        "".join(PERSONS[token] for token in left if token in PERSONS),
        _sentences(sentences.split(corrected, breaks), codes) if english else (),
        "".join(PERSONS[who] for who in _ADDRESSED.findall(peeled)),
        _forms(raw, plurals),
    )


def _sentences(parts: list[list[str]], codes: set[str]) -> tuple[sentences.Sentence, ...]:
    found = []
    for part in parts:
        spoken = " ".join(part)
        if frames.courtesy(spoken):
            continue
        kind, body, _ = frames.strip(spoken)
        left = body.split()
        asked = sentences.asks(left)
        words = frozenset(word for chunk in _chunks(left, codes)[0] for word in chunk.words)
        negations = _negations(left)
        if kind or asked or words or negations:
            found.append(sentences.Sentence(kind, asked, negations, words))
    return tuple(found)


def _negations(tokens: list[str]) -> int:
    """ "Everything but" excludes as "except" does."""
    but = sum(one in _ALL and other == "but" for one, other in itertools.pairwise(tokens))
    return but + sum(token in NEGATIONS for token in tokens)


def _forms(raw: tuple[str, ...], plurals: set[str]) -> dict[str, tuple[str, ...]]:
    """The forms in which each folded word stands in a text, in order; plurals of acronyms as PDFs."""
    forms: dict[str, list[str]] = {}
    for token in raw:
        forms.setdefault(fold(token), []).append(f"{token[:-1].upper()}s" if token in plurals else token)
    return {word: tuple(own) for word, own in forms.items()}


def _chunks(tokens: list[str], codes: set[str]) -> tuple[tuple[Chunk, ...], dict[str, str]]:
    """The body's content words by preposition; "Y of X" as "X Y". Also each folded word's spelling."""
    lowered: dict[str, str] = {}
    chunks: list[_Open] = [_Open("", [])]
    for i, token in enumerate(tokens):
        at = chunks[-1]
        if token in _DETERMINERS:
            at.noun = len(at.words)
        unit = UNITS.get(token) if len(token) > 2 or (i and number(tokens[i - 1]) is not None) else None
        folded = number(token) or unit or MONTHS.get(token) or fold(token)
        if folded in PREPOSITIONS and token not in codes:
            chunks.append(_Open(folded, []))
        elif folded in PIVOTAL or (folded not in FILLERS and token not in NEGATIONS and token not in _SKIPPED):
            lowered[folded] = token
            at.words.append(folded)
    merged: list[_Open] = []
    for chunk in reversed(chunks):
        if merged and merged[-1].head == "of":
            owner = merged.pop()
            place = chunk.noun if chunk.noun is not None else max(0, len(chunk.words) - 1)
            chunk.words[place:place] = owner.words
        merged.append(chunk)
    found = tuple(Chunk(chunk.head, tuple(chunk.words)) for chunk in reversed(merged) if chunk.words)
    return found, lowered


@dataclass(slots=True)
class _Open:
    """A chunk being filled; `noun`: where its last noun phrase begins."""

    head: str
    words: list[str]
    noun: int | None = None


def _currency_last(tokens: list[str]) -> list[str]:
    """ "$ 5" as "5 dollar"."""
    found = list(tokens)
    for i in range(len(found) - 1):
        if found[i] in ("dollar", "euro", "sterling", "yen") and number(found[i + 1]) is not None:
            found[i], found[i + 1] = found[i + 1], found[i]
    return found


@lru_cache(maxsize=8192)
def _corrected(token: str) -> str:
    """A word that none is, one slip away from a function word: that word."""
    if len(token) < 4 or not token.isascii() or not token.isalpha() or lexicon().knows(token):
        return token
    near = [word for word in frames.CORRECTED if word[0] == token[0] and abs(len(word) - len(token)) < 2]
    near = [word for word in near if slips(word, token) == 1]
    return near[0] if len(near) == 1 else token


def slips(x: str, y: str) -> int:
    """Insertions, deletions, substitutions and swaps of neighbours between two words."""
    rows = [list(range(len(y) + 1))]
    for i, cx in enumerate(x, 1):
        row = [i]
        for j, cy in enumerate(y, 1):
            best = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (cx != cy))
            if i > 1 and j > 1 and cx == y[j - 2] and x[i - 2] == cy:
                best = min(best, rows[-2][j - 2] + 1)
            row.append(best)
        rows.append(row)
    return rows[-1][-1]


def _is_english(raw: tuple[str, ...]) -> bool:
    """Most words are English ones and the letters are Latin. One or two unknown words are names or typos."""
    words = [token for token in raw if token.isalpha()]
    known = sum(token.isascii() and (token in frames.COMMON or lexicon().knows(token)) for token in words)
    return (
        known >= 1
        and known >= 0.6 * len(words)
        and (len(words) <= 4 or known >= 0.8 * len(words) or any(w in frames.COMMON for w in words))
    )


def _is_code(token: str) -> bool:
    if token[0] == "-" and len(token) > 1 and not token[1].isdigit():
        return True
    if any(char in token for char in "_/\\@+#") or "::" in token or token.endswith("()"):
        return not token.replace("/", "").isdigit()
    if "." in token and not token.replace(".", "").replace(",", "").isdigit():
        return True
    letters = any(char.isalpha() for char in token)
    if letters and any(char.isdigit() for char in token):
        glued = _GLUED.match(token)
        return not (glued and glued[2].lower() in UNITS) and not re.fullmatch(r"\d+(st|nd|rd|th)", token.lower())
    return letters and any(a.islower() and b.isupper() for a, b in itertools.pairwise(token))


def _is_name(token: str, starts: bool) -> bool:
    """Capitals inside a sentence, or several in one word anywhere."""
    capitals = sum(char.isupper() for char in token)
    return token not in _NOT_NAMES and (capitals > 1 or (capitals == 1 and not starts))


def _split(word: str) -> list[str]:
    if word in _CONTRACTIONS:
        return _CONTRACTIONS[word]
    stem, mark, tail = word.partition("'")
    if not mark:
        return [word]
    if tail == "t" and stem.endswith("n"):
        return [stem[:-1], "not"]
    if tail == "s":
        return [stem, "is"] if stem in _NO_GENITIVE else [stem, "'s"]
    return [stem, {"re": "are", "ll": "will", "ve": "have", "d": "would", "m": "am"}.get(tail, tail)]


def number(token: str) -> str | None:
    """One spelling a number: separators and trailing zeros gone ("1,000.50" → "1000.5"), words as digits."""
    if token in NUMBER_WORDS:
        return NUMBER_WORDS[token]
    if not token or not (token[0].isdigit() or (token[0] == "-" and len(token) > 1)) or not token[-1].isalnum():
        return None
    token = re.sub(r"(?<=\d)(st|nd|rd|th)$", "", token)
    if not token[-1].isdigit() or any(char.isalpha() for char in token):
        return None
    if re.fullmatch(r"-?\d{1,3}(,\d{3})+(\.\d+)?", token):
        token = token.replace(",", "")
    if re.fullmatch(r"-?\d+\.\d+", token):
        token = token.rstrip("0").rstrip(".")
    sign = "-" if token[0] == "-" else ""
    return sign + (token.lstrip("-0") or "0")
