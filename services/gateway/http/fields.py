"""What the bodies of this face are made of: strict types, and OpenAI's words for what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from kvmesh.errors import InvalidArgument

# Bounds of the protocol behind here; the narrower ones are the front's.
Uint32 = Annotated[int, Field(ge=0, le=2**32 - 1)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**64 - 1)]
Name = Annotated[str, Field(max_length=256)]

M = TypeVar("M", bound=BaseModel)


def _text_or_list(value: Any) -> str:
    return "<string>" if isinstance(value, str) else "<array>"


def _name_or_object(value: Any) -> str:
    return "<string>" if isinstance(value, str) else "<object>"


# Which of two types was meant is decided by the value itself, so that an error speaks of one of them alone.
TEXT_OR_LIST = Discriminator(_text_or_list)
NAME_OR_OBJECT = Discriminator(_name_or_object)
TEXT, LIST, OBJECT = Tag("<string>"), Tag("<array>"), Tag("<object>")

Stop = Annotated[Annotated[str, TEXT] | Annotated[list[str], Field(max_length=16), LIST], TEXT_OR_LIST]


class Part(BaseModel):
    """Of a body: no field but those named, and no type but those named."""

    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)


def check(model: type[M], value: Any) -> M:
    """A body's model; InvalidArgument with the first thing that is wrong, `param` naming it."""
    try:
        return model.model_validate(value)
    except ValidationError as exc:
        found = exc.errors(include_url=False, include_context=True)
        # An unknown field may be what makes others look wrong or missing; the client should hear of it first.
        first = next((error for error in found if error["type"] == "extra_forbidden"), found[0])
        raise _told(first) from None


def _told(error: Any) -> InvalidArgument:
    path = _path(error["loc"])
    kind, context, value = error["type"], error.get("ctx", {}), error.get("input")
    shown = path[:120]
    if kind == "extra_forbidden":
        text = f"Unrecognized request argument supplied: {shown}"
        if "." in path or "[" in path:
            text = f"Unknown parameter: '{shown}'."
        return _bad(path, text, "unknown_parameter")
    if kind == "missing":
        return _bad(path, f"Missing required parameter: '{shown}'.", "missing_required_parameter")
    if kind == "literal_error":
        given = repr(value[:64]) if isinstance(value, str) else f"of type {_type(value)}"
        return _bad(path, f"Invalid value for '{shown}': {given}. Supported: {context['expected']}.", "invalid_value")
    if kind in _EXPECTED:
        text = f"Invalid type for '{shown}': expected {_EXPECTED[kind]}, but got {_type(value)} instead."
        return _bad(path, text, "invalid_type")
    if kind == "value_error":
        return _bad(path, f"Invalid '{shown}': {context['error']}.", "invalid_value")
    # Pydantic's own sentences for bounds, of which none quotes the value.
    return _bad(
        path, f"Invalid '{shown}': {error['msg'][:1].lower()}{error['msg'][1:]}.", _CODES.get(kind, "invalid_value")
    )


_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "a boolean",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "finite_number": "a finite number",
}
_CODES = {
    "greater_than": "below_min_value",
    "greater_than_equal": "below_min_value",
    "less_than_equal": "above_max_value",
    "string_too_long": "string_above_max_length",
    "too_long": "array_above_max_length",
    "too_short": "array_below_min_length",
}
_TYPES: dict[type, str] = {
    bool: "a boolean",
    int: "an integer",
    float: "a decimal",
    str: "a string",
    list: "an array",
    dict: "an object",
    type(None): "null",
}


def _type(value: Any) -> str:
    return _TYPES.get(type(value), "another type")


def _path(loc: Sequence[int | str]) -> str:
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith("<"):
            path += f".{part}" if path else part
    return path


def _bad(field: str, message: str, code: str) -> InvalidArgument:
    return InvalidArgument(message, details={"field": field[:256], "code": code})


def refuse(field: str, message: str, code: str = "unsupported_parameter") -> InvalidArgument:
    """The error for what is understood and not served."""
    return _bad(field, message, code)
