"""A grammar as its user wrote it, bounded before anything is compiled."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any, Final

from kvmesh.errors import InvalidArgument
from kvmesh.proto.v1 import inference_pb2 as pb

# Bytes by kind. The library's own limits bound what a text may become, but not the depth of its recursion (a chain of
# rules) nor what some texts cost before the first of these limits is looked at: both grow with the text.
MAX_TEXT_BYTES: Final = 64 << 10
# Of a Lark grammar, the JSON schemas in it not counted.
MAX_BYTES: Final = {"regex": 8 << 10, "lark": 16 << 10}
# All regular expressions of the schemas of one grammar together.
MAX_PATTERN_BYTES: Final = 8 << 10
_JSON: Final = re.compile(r"%json\s*")
_MAX_SENTENCE: Final = 300
_ANY_OBJECT: Final = '{"type":"object"}'


def refuse(why: str) -> InvalidArgument:
    """The error for a grammar."""
    return InvalidArgument(f"grammar: {why}", details={"field": "grammar"})


def sentence(text: str) -> str:
    """What of the library's words is for the user: no dumps of its state, on one line."""
    if text.startswith("NoExtensionBias"):
        return "nothing can match it"
    return " ".join(text.partition("<non-verbose/>")[0].partition("\n<state>")[0].split())[:_MAX_SENTENCE]


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """`kind` is a field's name in kvmesh.v1.Grammar. Equal digests compile equally."""

    kind: str
    text: str
    digest: bytes

    @classmethod
    def of(cls, grammar: pb.Grammar) -> GrammarSource:
        """Raises InvalidArgument for one that says nothing, is too large, or is no JSON where it should be."""
        kind = grammar.WhichOneof("kind")
        if kind is None or (kind == "json_object" and not grammar.json_object):
            raise refuse("names none")
        text = _ANY_OBJECT if kind == "json_object" else str(getattr(grammar, kind))
        size = len(text.encode())
        if size > MAX_TEXT_BYTES:
            raise refuse(f"is larger than {MAX_TEXT_BYTES} bytes")
        if "\0" in text:
            raise refuse("holds a zero byte")
        schemas = []
        if kind == "json_schema":
            schemas.append(_schema(text))
            # The same, in the form that takes our options.
            text = "{}" if schemas[0] is True else text
        elif kind == "lark":
            rules, schemas = _inner_schemas(text)
            size = len(rules.encode())
        if kind in MAX_BYTES and size > MAX_BYTES[kind]:
            raise refuse(f"is larger than the {MAX_BYTES[kind]} bytes that a {kind} may have")
        if sum(map(_pattern_bytes, schemas)) > MAX_PATTERN_BYTES:
            raise refuse(f"the schema's patterns are larger than {MAX_PATTERN_BYTES} bytes together")
        return cls(kind, text, hashlib.sha256(f"{kind}\0{text}".encode()).digest())


def _schema(text: str) -> Any:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refuse(f"the schema is no JSON ({str(error)[:100]})") from None
    if not isinstance(schema, dict | bool):
        raise refuse("a schema is a JSON object")
    return schema


def _inner_schemas(lark: str) -> tuple[str, list[Any]]:
    """The text without what follows `%json`, and that."""
    rules, schemas, at = [], [], 0
    for found in _JSON.finditer(lark):
        if found.start() < at:
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(lark, found.end())
        except (ValueError, RecursionError):
            continue  # the compiler says what is wrong with it
        rules.append(lark[at : found.end()])
        schemas.append(schema)
        at = end
    return "".join([*rules, lark[at:]]), schemas


def _pattern_bytes(schema: Any) -> int:
    """Size of all that may be a regular expression; without recursion, since the depth is the user's."""
    total, todo = 0, [schema]
    while todo:
        at = todo.pop()
        if isinstance(at, list):
            todo.extend(at)
        elif isinstance(at, dict):
            pattern, named = at.get("pattern"), at.get("patternProperties")
            total += len(pattern.encode()) if isinstance(pattern, str) else 0
            total += sum(len(name.encode()) for name in named) if isinstance(named, dict) else 0
            todo.extend(at.values())
    return total
