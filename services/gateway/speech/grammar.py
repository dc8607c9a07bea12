"""Grammars of what a request makes a model write: calls of tools, a form of answer, reasoning before either.

In the Lark dialect of llguidance. A mark that is one token of the vocabulary may be written as that token or as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence, Set
from typing import Any

from kvmesh.proto.v1 import inference_pb2 as pb
from services.gateway.speech.check import Function
from services.gateway.speech.formats import Mark, Piece
from services.gateway.speech.profile import Marks, Profile

# Without a bound, a small model that must call goes on calling until its tokens are used up.
MAX_CALLS = 16

# A slash, escaped or not, and the escaped pairs before it: of two backslashes the second escapes nothing.
_SLASH = re.compile(r"((?:\\[^/])*)\\?/", re.DOTALL)
_COMBINED = frozenset({"allOf", "anyOf", "oneOf", "$ref", "patternProperties", "if", "unevaluatedProperties"})
# Arguments are written in one way only, answers with little space: who may add white space may add it for ever.
_SPACING = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
_ANSWER_SPACING = {"whitespace_pattern": " ?", "coerce_one_of": False, "lenient": False}


def _schema(function: Function, *, exact: bool) -> str:
    schema: dict[str, Any] = {"type": "object"} | (function.parameters if exact else {})
    if schema.get("properties") and "additionalProperties" not in schema and not _COMBINED & schema.keys():
        schema["additionalProperties"] = False
    return json.dumps(schema | {"x-guidance": _SPACING})


class Grammar:
    """Rules of one grammar, collected."""

    def __init__(self, profile: Profile) -> None:
        self._form = profile.tools
        self._tokens = profile.tokens
        self._rules: dict[str, str] = {}

    def build(self, start: str) -> pb.Grammar:
        """The grammar that begins with `start`."""
        rules = {"start": start} | self._rules
        return pb.Grammar(lark="".join(f"{name}: {body}\n" for name, body in rules.items()))

    def _mark(self, text: str) -> str:
        token = self._tokens.get(text)
        return json.dumps(text) if token is None else f"(<[{token}]> | {json.dumps(text)})"

    def _pieces(self, pieces: Iterable[Piece]) -> str:
        return " ".join(self._mark(piece.text) if isinstance(piece, Mark) else json.dumps(piece) for piece in pieces)

    def _call(self, functions: Sequence[Function], exact: Set[str], begin: Sequence[Piece]) -> None:
        """Rule `call`: one call, that begins with `begin`. What all calls share is written once: there may be many."""
        form = self._form
        for index, function in enumerate(functions):
            schema = _schema(function, exact=function.name in exact)
            self._rules[f"f{index}"] = f"{json.dumps(function.name)} middle %json {schema}"
        self._rules["middle"] = self._pieces(form.middle)
        names = " | ".join(f"f{index}" for index in range(len(functions)))
        self._rules["call"] = _joined(self._pieces(begin), f"({names})", self._pieces(form.end))

    def _sequence(self, before: Sequence[Piece], *, many: bool) -> str:
        form = self._form
        more = f"({_joined(self._pieces(form.between), 'call')}){{0,{MAX_CALLS - 1}}}" if many else ""
        return _joined(self._pieces(before), "call", more, self._pieces(form.after))

    def calls(self, functions: Sequence[Function], *, many: bool, exact: Set[str], marked: bool = False) -> str:
        """A rule for one call or, with `many`, one to MAX_CALLS. `exact`: whose arguments follow their schema.
        `marked`: never without a mark, so that they can stand beside an answer in JSON."""
        form = self._form
        self._call(functions, exact, form.begin)
        before = (Mark(form.opens[0]),) if marked and form.bare else form.before
        self._rules["calls"] = self._sequence(before, many=many)
        return "calls"

    def free(self, functions: Sequence[Function], *, many: bool, exact: Set[str]) -> str:
        """A rule for text with calls in it, as the model likes, but for what stands inside a call."""
        form = self._form
        if form.bare:
            self._rules["PLAIN"] = "/[^{](.|\\n)*/"
            return f"{self.calls(functions, many=many, exact=exact)} | PLAIN?"
        mark = (form.before or form.begin)[0]
        assert isinstance(mark, Mark)
        if form.before:
            self._call(functions, exact, form.begin)
            self._rules["inner"] = self._sequence(form.before[1:], many=many)
        else:
            self._call(functions, exact, form.begin[1:])
            self._rules["inner"] = "call"
        token = self._tokens.get(mark.text)
        if token is None:
            self._rules["until[lazy]"] = f"/(.|\\n)*{_regex(mark.text)}/"
            begun = "until"
        else:
            begun = f"TEXT? <[{token}]>"
        self._rules["TEXT"] = "/(.|\\n)+/"
        return f"({begun} inner)* TEXT?" if many else f"{begun} inner | TEXT?"

    def answer(self, given: pb.Grammar) -> str | None:
        """A rule for a form of answer; None for one that cannot be part of another grammar."""
        match given.WhichOneof("kind"):
            case "json_schema":
                try:
                    schema = json.loads(given.json_schema)
                except (ValueError, RecursionError):
                    return None
                self._rules["answer"] = f"%json {_spaced(schema)}"
            case "json_object":
                self._rules["answer"] = f"%json {_spaced({'type': 'object'})}"
            case "regex":
                self._rules["answer"] = "ANSWER"
                self._rules["ANSWER"] = "/" + _SLASH.sub(r"\1\\/", given.regex) + "/"
            case _:
                return None
        return "answer"

    def thought(self, marks: Marks, *, opened: bool) -> str:
        """A rule for reasoning before what follows; it may be left out where the prompt has not begun it."""
        token = self._tokens.get(marks.end)
        if token is None:
            self._rules["thought[lazy]"] = f"/(.|\\n)*{_regex(marks.end)}/"
            thought = "thought"
        else:
            self._rules["THOUGHT"] = "/(.|\\n)*/"
            thought = f"THOUGHT <[{token}]>"
        self._rules["GAP"] = "/\\n{0,2}/"
        return f"{thought} GAP" if opened else f"({self._mark(marks.start)} {thought} GAP)?"


def _spaced(schema: Any) -> str:
    return json.dumps({"x-guidance": _ANSWER_SPACING} | schema if isinstance(schema, dict) else schema)


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _regex(text: str) -> str:
    return "".join(f"\\{character}" if character in "\\/.^$*+?()[]{}|" else character for character in text)
