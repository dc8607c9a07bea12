"""Parameters of a generation, as `parameters` of the request or as the JSON of `sampling_parameters`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from kvmesh.proto.inference import grpc_predict_v2_pb2 as kserve
from kvmesh.proto.v1 import inference_pb2 as pb
from services.gateway import validate

MAX_PARAMETERS = 64
MAX_JSON_BYTES = 64 * 1024
MAX_STOPS = 64

_FLOATS = frozenset(
    ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
)
_COUNTS = {"max_tokens": 2**32, "min_tokens": 2**32, "top_k": 2**32, "seed": 2**64}
_SINGLE = frozenset(("n", "best_of"))
_LISTS = frozenset(("stop", "stop_token_ids"))
NAMES = _FLOATS | _COUNTS.keys() | _SINGLE | _LISTS | {"ignore_eos"}


def plain(name: str, parameter: kserve.InferParameter) -> Any:
    """The value of a parameter as Python's. InvalidArgument when it holds none."""
    chosen = parameter.WhichOneof("parameter_choice")
    if chosen is None:
        raise validate.bad(f"parameters.{name}", "holds no value")
    return getattr(parameter, chosen)


def from_json(value: str) -> Mapping[str, Any]:
    """The object of a `sampling_parameters` input."""
    field = "sampling_parameters"
    if len(value) > MAX_JSON_BYTES:
        raise validate.bad(field, f"is longer than {MAX_JSON_BYTES} characters")
    try:
        given = json.loads(value)
    except (ValueError, RecursionError):
        raise validate.bad(field, "is not JSON") from None
    if not isinstance(given, dict):
        raise validate.bad(field, "must be a JSON object")
    if len(given) > MAX_PARAMETERS:
        raise validate.bad(field, f"has more than {MAX_PARAMETERS} entries")
    return given


def put(sampling: pb.SamplingParams, name: str, value: Any, path: str) -> None:
    """Set one of NAMES; its range is checked later, with all others. `path`: where it came from, for the error."""
    field = f"{path}.{name}"
    if name in _FLOATS:
        setattr(sampling, name, _number(field, value))
    elif name in _COUNTS:
        setattr(sampling, name, _count(field, value, _COUNTS[name]))
    elif name in _SINGLE:
        if _count(field, value, 2**32) != 1:
            raise validate.bad(field, "one text comes back for one prompt: must be 1")
    elif name == "ignore_eos":
        sampling.ignore_eos = boolean(field, value)
    elif name == "stop":
        sampling.stop[:] = [_string(field, item) for item in _list(field, value)]
    else:
        sampling.stop_token_ids[:] = [_count(field, item, 2**32) for item in _list(field, value)]


def boolean(field: str, value: Any) -> bool:
    """A truth value; "true" and "false" count too, as some clients have nothing but strings."""
    named = {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(named, bool):
        raise validate.bad(field, "must be true or false")
    return named


def _number(field: str, value: Any) -> float:
    if isinstance(value, str):
        try:
            value = float(value) if len(value) <= 64 else None
        except ValueError:
            value = None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise validate.bad(field, "must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or abs(number) > 1e30:
        raise validate.bad(field, "must be a finite number")
    return number


def _count(field: str, value: Any, limit: int) -> int:
    if isinstance(value, str) and len(value) <= 32:
        try:
            value = int(value)
        except ValueError:
            value = None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise validate.bad(field, "must be a whole number")
    if not 0 <= value < limit:
        raise validate.bad(field, f"must be in [0, {limit - 1}]")
    return value


def _string(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise validate.bad(field, "must be text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise validate.bad(field, "is not Unicode text") from None
    return value


def _list(field: str, value: Any) -> list[Any]:
    items = value if isinstance(value, list) else [value]
    if len(items) > MAX_STOPS:
        raise validate.bad(field, f"has {len(items)} entries; at most {MAX_STOPS} are allowed")
    return items
