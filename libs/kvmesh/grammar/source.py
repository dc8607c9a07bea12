"""A grammar as its user wrote it, bounded before anything is compiled."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
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
# Entries of all objects and lists of its schemas, and how many of them `patternProperties` may be: the library's time
# grows faster than they do.
MAX_ENTRIES: Final = 10_000
MAX_PATTERN_PROPERTIES: Final = 128
# The least number that all `multipleOf` of a grammar divide, without its factors of ten: the library walks through as
# many remainders, and counts no fuel for it.
MAX_MULTIPLE: Final = 1 << 16
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
        parts = [found for schema in schemas for found in _parts(schema)]
        if sum(map(len, parts)) > MAX_ENTRIES:
            raise refuse(f"the schema has more than {MAX_ENTRIES} entries")
        objects = [found for found in parts if isinstance(found, dict)]
        named = [found["patternProperties"] for found in objects if isinstance(found.get("patternProperties"), dict)]
        if sum(map(len, named)) > MAX_PATTERN_PROPERTIES:
            raise refuse(f"the schema has more than {MAX_PATTERN_PROPERTIES} patternProperties")
        if sum(map(_pattern_bytes, objects)) > MAX_PATTERN_BYTES:
            raise refuse(f"the schema's patterns are larger than {MAX_PATTERN_BYTES} bytes together")
        if _multiple(found.get("multipleOf") for found in objects) > MAX_MULTIPLE:
            raise refuse("the schema's multipleOf have too large a common multiple")
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


def _parts(schema: Any) -> Iterator[dict[str, Any] | list[Any]]:
    """Every object and list in it; without recursion, since the depth is the user's."""
    todo = [schema]
    while todo:
        at = todo.pop()
        if isinstance(at, dict | list):
            yield at
            todo.extend(at.values() if isinstance(at, dict) else at)


def _pattern_bytes(schema: dict[str, Any]) -> int:
    """Size of all in an object, but not further in, that may be a regular expression."""
    named, options = schema.get("patternProperties"), schema.get("x-guidance")
    patterns: list[Any] = [schema.get("pattern")]
    patterns += named if isinstance(named, dict) else ()
    patterns += options.values() if isinstance(options, dict) else ()
    # Half a surrogate pair is valid JSON; the library says what it thinks of it.
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in patterns if isinstance(text, str))


def _multiple(divisors: Iterable[Any]) -> int:
    """At least the common multiple's part that is no power of ten; one more than the limit stands for all above."""
    multiple = 1
    for divisor in divisors:
        if isinstance(divisor, int | float) and not isinstance(divisor, bool):
            digits = "".join(map(str, Decimal(repr(divisor)).as_tuple().digits)).rstrip("0")
            multiple = math.lcm(multiple, int(digits or 1)) if len(digits) < 10 else MAX_MULTIPLE + 1
            if multiple > MAX_MULTIPLE:
                return MAX_MULTIPLE + 1
    return multiple
