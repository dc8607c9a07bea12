"""Grammars of what a request makes a model write: calls of tools, a form of answer, reasoning before either.

In the Lark dialect of llguidance. A mark that is one token of the vocabulary may be written as that token or as text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvmesh.proto.v1 import inference_pb2 as pb
from services.gateway.speech.check import Function
from services.gateway.speech.formats import Args, Mark, Piece
from services.gateway.speech.profile import Marks, Profile

# Without a bound, a small model that must call goes on calling until its tokens are used up.
MAX_CALLS = 16

_COMBINED = frozenset({"allOf", "anyOf", "oneOf", "$ref", "patternProperties", "if", "unevaluatedProperties"})
_SPACING = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}


def _schema(function: Function, *, exact: bool) -> str:
    """The arguments' schema, written in one way only: a model that may add white space may add it for ever."""
    schema: dict[str, Any] = {"type": "object"} | (function.parameters if exact else {})
    if exact and "additionalProperties" not in schema and not _COMBINED & schema.keys():
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

    def _pieces(self, pieces: Iterable[Piece], rule: str = "") -> str:
        out = []
        for piece in pieces:
            if isinstance(piece, Mark):
                out.append(self._mark(piece.text))
            else:
                out.append(rule if isinstance(piece, Args) else json.dumps(piece))
        return " ".join(out)

    def _functions(self, functions: Sequence[Function], *, exact: Mapping[str, bool], skip: int) -> str:
        """A rule for one call, without its first `skip` pieces."""
        for index, function in enumerate(functions):
            self._rules[f"args_{index}"] = "%json " + _schema(function, exact=exact[function.name])
            pieces = self._form.call(function.name)[skip:]
            self._rules[f"call_{index}"] = self._pieces(pieces, f"args_{index}")
        self._rules["call"] = " | ".join(f"call_{index}" for index in range(len(functions)))
        return "call"

    def _sequence(self, before: Sequence[Piece], *, many: bool) -> str:
        form = self._form
        between = f"{self._pieces(form.between)} call" if form.between else "call"
        more = f"({between}){{0,{MAX_CALLS - 1}}}" if many else ""
        return " ".join(part for part in (self._pieces(before), "call", more, self._pieces(form.after)) if part)

    def calls(self, functions: Sequence[Function], *, many: bool, exact: Mapping[str, bool]) -> str:
        """A rule for one call or, with `many`, one to MAX_CALLS. `exact`: whose arguments follow their schema."""
        self._functions(functions, exact=exact, skip=0)
        self._rules["calls"] = self._sequence(self._form.before, many=many)
        return "calls"

    def free(self, functions: Sequence[Function], *, many: bool, exact: Mapping[str, bool]) -> str:
        """A rule for text with calls in it, as the model likes, but for what stands inside a call."""
        form = self._form
        if form.bare:
            self._rules["PLAIN"] = "/[^{](.|\\n)*/"
            return f"{self.calls(functions, many=many, exact=exact)} | PLAIN?"
        pieces = form.before or form.call(functions[0].name)
        mark = pieces[0]
        assert isinstance(mark, Mark)
        call = self._functions(functions, exact=exact, skip=0 if form.before else 1)
        self._rules["inner"] = self._sequence(form.before[1:], many=many) if form.before else call
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
                self._rules["answer"] = "%json " + json.dumps(schema)
            case "json_object":
                self._rules["answer"] = '%json {"type": "object"}'
            case "regex":
                self._rules["answer"] = "ANSWER"
                self._rules["ANSWER"] = "/" + given.regex.replace("\\/", "/").replace("/", "\\/") + "/"
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


def _regex(text: str) -> str:
    return "".join(f"\\{character}" if character in "\\/.^$*+?()[]{}|" else character for character in text)
