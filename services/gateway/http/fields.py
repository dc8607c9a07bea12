"""What the bodies of this face are made of: strict types, and OpenAI's words for what is wrong with them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from kvmesh.errors import InvalidArgument

# Bounds of the protocol behind here; the narrower ones are the front's.
Uint32 = Annotated[int, Field(ge=0, le=2**32 - 1)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**64 - 1)]
Name = Annotated[str, Field(max_length=256)]

UNRECOGNIZED = "Unrecognized request argument supplied"

M = TypeVar("M", bound=BaseModel)


def _text_or_list(value: Any) -> str:
    return "<string>" if isinstance(value, str) else "<array>"


def _name_or_object(value: Any) -> str:
    return "<string>" if isinstance(value, str) else "<object>"


# Which of two types was meant is decided by the value itself, so that an error speaks of one of them alone.
TEXT_OR_LIST = Discriminator(_text_or_list)
NAME_OR_OBJECT = Discriminator(_name_or_object)
TEXT, LIST, OBJECT = Tag("<string>"), Tag("<array>"), Tag("<object>")

Stop = Annotated[Annotated[str, TEXT] | Annotated[list[str], Field(max_length=16, fail_fast=True), LIST], TEXT_OR_LIST]


class Part(BaseModel):
    """Of a body: no field but those named, and no type but those named."""

    # An error for each unknown name could be a million errors: `check` looks for the first one instead.
    model_config = ConfigDict(
        strict=True,
        extra="ignore",
        hide_input_in_errors=True,
        json_schema_extra={"additionalProperties": False},
    )


def check(model: type[M], value: Any) -> M:
    """A body's model; InvalidArgument with the first thing that is wrong, `param` naming it.

    Lists stop at their first error: what a stranger sends must not become a million of them.
    """
    if isinstance(value, dict):
        # Before all else: an unknown name may be what makes others look missing.
        _only_known(value, model, "")
    try:
        made = model.model_validate(value)
    except ValidationError as exc:
        raise _told(exc.errors(include_url=False, include_context=True)[0]) from None
    _only_known_within(made, value, "")
    return made


def _only_known(value: Mapping[str, Any], model: type[BaseModel], path: str) -> None:
    known = _names(model)
    for name in value:
        if name not in known:
            field = f"{path}.{name}" if path else name
            text = f"Unknown parameter: '{field[:120]}'." if path else f"{UNRECOGNIZED}: {field[:120]}"
            raise _bad(field, text, "unknown_parameter")


def _only_known_within(made: BaseModel, value: Mapping[str, Any], path: str) -> None:
    for name, field in type(made).model_fields.items():
        inner = getattr(made, name)
        alias = field.alias or name
        here = f"{path}.{alias}" if path else alias
        if isinstance(inner, BaseModel):
            _only_known(value[alias], type(inner), here)
            _only_known_within(inner, value[alias], here)
        elif isinstance(inner, list) and inner and isinstance(inner[0], BaseModel):
            for index, (one, raw) in enumerate(zip(inner, value[alias], strict=True)):
                _only_known(raw, type(one), f"{here}[{index}]")
                _only_known_within(one, raw, f"{here}[{index}]")


@functools.cache
def _names(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in model.model_fields.items())


def _told(error: Any) -> InvalidArgument:
    path = _path(error["loc"])
    kind, context, value = error["type"], error.get("ctx", {}), error.get("input")
    shown = path[:120]
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
