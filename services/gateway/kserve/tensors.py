"""Tensors of the open inference protocol, both as raw bytes and in typed fields. All of ours hold one element."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvmesh.proto.inference import grpc_predict_v2_pb2 as kserve
from services.gateway import validate

MAX_INPUTS = 16
MAX_DIMENSIONS = 8
MAX_NAME_BYTES = 64

Value = bytes | bool | int | float


def _fixed(code: str) -> Callable[[bytes], Value]:
    layout = struct.Struct(f"<{code}")

    def parse(data: bytes) -> Value:
        if len(data) != layout.size:
            raise ValueError
        value: Value = layout.unpack(data)[0]
        return value

    return parse


def _bytes(data: bytes) -> bytes:
    if len(data) < 4 or int.from_bytes(data[:4], "little") != len(data) - 4:
        raise ValueError
    return data[4:]


@dataclass(frozen=True, slots=True)
class _Datatype:
    field: str
    parse: Callable[[bytes], Value]


_DATATYPES = {
    "BYTES": _Datatype("bytes_contents", _bytes),
    "BOOL": _Datatype("bool_contents", _fixed("?")),
    "INT8": _Datatype("int_contents", _fixed("b")),
    "INT16": _Datatype("int_contents", _fixed("h")),
    "INT32": _Datatype("int_contents", _fixed("i")),
    "INT64": _Datatype("int64_contents", _fixed("q")),
    "UINT8": _Datatype("uint_contents", _fixed("B")),
    "UINT16": _Datatype("uint_contents", _fixed("H")),
    "UINT32": _Datatype("uint_contents", _fixed("I")),
    "UINT64": _Datatype("uint64_contents", _fixed("Q")),
    "FP32": _Datatype("fp32_contents", _fixed("f")),
    "FP64": _Datatype("fp64_contents", _fixed("d")),
}


def read(request: kserve.ModelInferRequest, datatypes: dict[str, str]) -> dict[str, Value]:
    """The inputs by name. `datatypes`: which inputs there are, and of which type.

    Raises InvalidArgument: an unknown or repeated input, another type, not exactly one element, contents of another
    size than the type's, or both forms at once.
    """
    if len(request.inputs) > MAX_INPUTS:
        raise validate.bad("inputs", f"{len(request.inputs)} inputs; at most {MAX_INPUTS} are allowed")
    raw = list(request.raw_input_contents)
    if raw and len(raw) != len(request.inputs):
        raise validate.bad("raw_input_contents", f"has {len(raw)} entries for {len(request.inputs)} inputs")
    values: dict[str, Value] = {}
    for index, tensor in enumerate(request.inputs):
        name = tensor.name
        wanted = datatypes.get(name)
        if wanted is None:
            raise validate.bad(f"inputs[{index}].name", f"unknown; the inputs are {', '.join(datatypes)}")
        if name in values:
            raise validate.bad(name, "is given twice")
        if tensor.datatype != wanted:
            raise validate.bad(name, f"its datatype must be {wanted}")
        if not _single(list(tensor.shape)):
            raise validate.bad(name, "must hold exactly one element (shape [1])")
        if tensor.parameters:
            raise validate.bad(name, "takes no parameters (shared memory is not served)")
        values[name] = _element(name, tensor, _DATATYPES[wanted], raw[index] if raw else None)
    return values


def _single(shape: list[int]) -> bool:
    return 1 <= len(shape) <= MAX_DIMENSIONS and all(size == 1 for size in shape)


def _element(name: str, tensor: Any, kind: _Datatype, raw: bytes | None) -> Value:
    if raw is not None:
        if tensor.HasField("contents"):
            raise validate.bad(name, "has both contents and raw_input_contents")
        try:
            return kind.parse(raw)
        except ValueError:
            raise validate.bad(name, "its raw contents do not match shape and datatype") from None
    given = [(field.name, values) for field, values in tensor.contents.ListFields()]
    if len(given) != 1 or given[0][0] != kind.field or len(given[0][1]) != 1:
        raise validate.bad(name, f"must hold one element in {kind.field}")
    value: Value = given[0][1][0]
    return value


def text(name: str, value: Value) -> str:
    """A BYTES element as text. InvalidArgument when it is not UTF-8."""
    assert isinstance(value, bytes)
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise validate.bad(name, "is not UTF-8") from None


def write(response: kserve.ModelInferResponse, name: str, value: str | int, *, raw: bool) -> None:
    """Append an output of one element: text as BYTES, a number as UINT32."""
    output = response.outputs.add(name=name, datatype="BYTES" if isinstance(value, str) else "UINT32", shape=[1])
    if isinstance(value, str):
        data = value.encode()
        if raw:
            response.raw_output_contents.append(len(data).to_bytes(4, "little") + data)
        else:
            output.contents.bytes_contents.append(data)
    elif raw:
        response.raw_output_contents.append(struct.pack("<I", value))
    else:
        output.contents.uint_contents.append(value)
