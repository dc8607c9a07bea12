"""Text as the classifier reads it: bounded in length, without the sentences that speak to a router.

A sentence such as "use the strong model" or "this is easy" says nothing about the question and everything about what
its author wants. Those that are recognised are left out, of the features and of the text that is embedded. The list
knows English, German, French and Spanish; what it does not know still counts as text.
"""

from __future__ import annotations

import re

MAX_CHARS = 4096
"""Characters that are read of a prompt: three quarters from its start, the rest from its end."""

_HEAD = MAX_CHARS * 3 // 4
_MAX_WORDS = 30
_MAX_CLAIM_WORDS = 14


def _words(*lines: str) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{'|'.join(lines)})\b", re.IGNORECASE)


# Whom such a sentence speaks to.
_WHOM = _words(
    r"models?|llms?|tiers?|pools?|rout(?:er|ing|es?)|classif\w*|dispatch\w*|(?:neural )?networks?",
    r"engine|assistant|ai|ki|ia|modelle?n?|modell|modèles?|modelos?",
)
_PRODUCT = _words(r"gpt[-\d]\S*|gpt|claude\S*|gemini\S*|llama\S*|mi[sx]tral\S*|qwen\S*|deepseek\S*|opus|sonnet|haiku")
# How it should be.
_HOW = _words(
    r"small\w*|larg\w+|big\w*|strong\w*|weak\w*|cheap\w*|expensive|best|better|smart\w*|power\w*|capable|fast\w*",
    r"advanced|premium|flagship|lite|mini|nano|pro|max|top|highest|lowest|frontier|low[- ]cost|high[- ]end|budget|tiny",
    r"heavy\w*|light\w*|klein\w*|groß\w*|gross\w*|stark\w*|stärk\w*|schwach\w*|billig\w*|teuer\w*|beste\w*",
    r"petite?s?|grande?s?|fort\w*|faible\w*|puissant\w*|meilleure?s?|fuerte\w*|débil\w*|peque\w+|potente\w*|mejor\w*",
)
# What it claims.
_CLAIM = _words(
    r"eas(?:y|ily|ier|iest)|trivial\w*|simpl(?:e|er|est|y)|hard|harder|hardest|difficult\w*|complex|complexity|challeng\w*",
    r"tricky|basic|elementary|advanced|expert|reasoning|thinking|thought|effort|straightforward|demanding|sophisticated",
    r"leicht\w*|einfach\w*|schwer\w*|schwierig\w*|kompliziert\w*|facil\w*|fácil\w*|difícil\w*|difficile\w*|sencill\w*",
    r"compliqué\w*|complej\w*",
)
# What the claim is about: the sentence's own question.
_SELF = _words(
    r"this|it|that|question|prompt|task|problem|request|query|message|exercise|level|rating|difficulty|complexity",
    r"das|dies\w*|frage|aufgabe|c[’']est|cette|esto|esta|es|pregunta|tarea|problème|tâche",
)
# What makes it an order.
_ORDER = _words(
    r"us(?:e|ing)|rout\w+|send|pick|choos\w+|select|switch|assign\w*|escalat\w*|forward|delegat\w*|answer\w*|class\w*",
    r"treat|rat(?:e|ed)|mark\w*|label\w*|consider|needs?|requires?|deserves?|handle[ds]?|goes|please|must|should|can",
    r"nimm|nutze|verwende|benutze|bitte|utilise[rz]?|utilisez|emploie|usa|utiliza",
)
_SETTING = re.compile(r"[=:\[\]<>{}#]")
# A setting in brackets or tags, or a bare one, wherever it stands.
_KEY = r"(?:model|tier|pool|rout(?:e|er|ing)|complexity|difficulty|class|effort|reasoning|level)"
_DIRECTIVE = re.compile(
    rf"<{_KEY}>[^<\n]{{0,40}}</{_KEY}>"
    rf"|[\[<{{(]{{1,2}}\W{{0,3}}[\w -]{{0,24}}\b{_KEY}\b[^\]>}})\n]{{0,60}}[\]>}})]{{1,2}}"
    r"|(?m:^|(?<=\s))[\"'#/-]{0,3}(?:model|tier|pool|route|complexity|difficulty)[\"']?\s{0,2}[:=]\s{0,2}[\"']?[\w.-]{1,32}"
    r"[\"']?",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"[^.!?\n。！？]*(?:[.!?。！？]+(?=\s|$|[^\s\w])|[.!?。！？]|\n|$)")
_WORD = re.compile(r"\w+")


def cut(text: str) -> str:
    """At most MAX_CHARS of a text: its start and its end, on lines of their own."""
    if len(text) <= MAX_CHARS:
        return text
    return f"{text[:_HEAD]}\n{text[len(text) - (MAX_CHARS - _HEAD - 1) :]}"


def speaks_to_router(sentence: str) -> bool:
    """A short sentence about models and tiers, or about its own difficulty."""
    words = len(_WORD.findall(sentence))
    if not 0 < words <= _MAX_WORDS or sentence.rstrip().endswith("?"):
        return False
    if _ORDER.search(sentence) or _SETTING.search(sentence):
        if _PRODUCT.search(sentence) and words <= _MAX_CLAIM_WORDS:
            return True
        if _WHOM.search(sentence) and (_HOW.search(sentence) or _CLAIM.search(sentence)):
            return True
    return words <= _MAX_CLAIM_WORDS and _CLAIM.search(sentence) is not None and _SELF.search(sentence) is not None


def _directs(setting: str) -> bool:
    return any(words.search(setting) for words in (_HOW, _CLAIM, _PRODUCT))


def neutral(text: str) -> str:
    """`text`, cut, without sentences that speak to the router; as it is (but cut) where nothing else would be left."""
    text = cut(text)
    bare = _DIRECTIVE.sub(lambda m: "" if _directs(m[0]) else m[0], text)
    left = "".join(s for s in _SENTENCE.findall(bare) if not speaks_to_router(s)).strip()
    return left if _WORD.search(left) else text
