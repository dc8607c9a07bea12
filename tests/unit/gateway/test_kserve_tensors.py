"""Infer requests become requests of the mesh, or one clear sentence that names the field."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from kvmesh.errors import InvalidArgument
from kvmesh.proto.inference import grpc_predict_v2_pb2 as kserve
from services.gateway.kserve import translate

Infer = kserve.ModelInferRequest
Tensor = Infer.InferInputTensor
Contents = kserve.InferTensorContents
Parameter = kserve.InferParameter


def tensor(name: str, datatype: str, shape: tuple[int, ...] = (1,), **contents: Any) -> Tensor:
    return Tensor(name=name, datatype=datatype, shape=shape, contents=Contents(**contents) if contents else None)


def prompt(text: bytes = b"hi") -> Tensor:
    return tensor("text_input", "BYTES", bytes_contents=[text])


def parameters(**values: Any) -> dict[str, Parameter]:
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    return {name: Parameter(**{kinds[type(value)]: value}) for name, value in values.items()}


def to_infer(*inputs: Tensor, streams: bool = True, **fields: Any) -> translate.Infer:
    return translate.to_infer(Infer(model_name="m", inputs=inputs, **fields), streams=streams)


def test_a_prompt_is_enough() -> None:
    infer = to_infer(prompt("né 東".encode()), id="r1")
    assert infer.request.text == "né 東"
    assert (infer.request.model, infer.id, infer.request.request_id) == ("m", "r1", "r1")
    assert (infer.stream, infer.echo, infer.raw, infer.outputs) == (False, False, False, ("text_output",))
    assert not infer.request.sampling.ListFields()
    assert to_infer(prompt()).id != to_infer(prompt()).id


def test_raw_and_typed_contents_mean_the_same() -> None:
    settings = json.dumps({"temperature": 0.5, "max_tokens": 7, "stop": ["a", "b"]})
    typed = to_infer(
        prompt(),
        tensor("stream", "BOOL", bool_contents=[True]),
        tensor("sampling_parameters", "BYTES", (1, 1), bytes_contents=[settings.encode()]),
        id="x",
    )
    raw = to_infer(
        Tensor(name="text_input", datatype="BYTES", shape=[1]),
        Tensor(name="stream", datatype="BOOL", shape=[1]),
        Tensor(name="sampling_parameters", datatype="BYTES", shape=[1, 1]),
        raw_input_contents=[
            struct.pack("<I", 2) + b"hi",
            b"\x01",
            struct.pack("<I", len(settings)) + settings.encode(),
        ],
        id="x",
    )
    assert raw.raw
    assert not typed.raw
    assert raw.stream
    assert typed.stream
    assert raw.request == typed.request
    assert list(raw.request.sampling.stop) == ["a", "b"]
    assert raw.request.sampling.max_tokens == 7


def test_parameters_reach_the_sampling() -> None:
    infer = to_infer(
        prompt(),
        parameters=parameters(
            max_tokens=5,
            temperature="0.25",
            top_p=0.5,
            top_k=3,
            seed=2**62,
            stop="end",
            ignore_eos=True,
            min_tokens="2",
            n=1,
            priority=3,
            timeout=2_500_000,
            stream="true",
            triton_enable_empty_final_response=True,
        ),
    )
    sampling = infer.request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (5, 0.25, 0.5, 3)
    assert (sampling.seed, list(sampling.stop), sampling.ignore_eos, sampling.min_tokens) == (2**62, ["end"], True, 2)
    assert infer.request.limits.total_ms == 2500
    assert infer.stream
    assert infer.empty_final


def test_outputs_are_those_asked_for() -> None:
    names = ["finish_reason", "text_output"]
    asked = [Infer.InferRequestedOutputTensor(name=name) for name in names]
    assert to_infer(prompt(), outputs=asked).outputs == tuple(names)
    more = to_infer(prompt(), tensor("return_num_output_tokens", "BOOL", bool_contents=[True]))
    assert more.outputs == ("text_output", "num_output_tokens")


NAN = float("nan")
BYTES = struct.pack("<I", 2) + b"hi"
RAW = Tensor(name="text_input", datatype="BYTES", shape=[1])
PARAMETER = {"classification": Parameter(int64_param=3)}
REQUESTED = Infer.InferRequestedOutputTensor


@pytest.mark.parametrize(
    ("field", "inputs", "fields"),
    [
        ("text_input", [], {}),
        ("text_input", [tensor("text_input", "FP32", fp32_contents=[1.0])], {}),
        ("text_input", [tensor("text_input", "BYTES", (2,), bytes_contents=[b"a", b"b"])], {}),
        ("text_input", [tensor("text_input", "BYTES", (), bytes_contents=[b"a"])], {}),
        ("text_input", [tensor("text_input", "BYTES", (-1,), bytes_contents=[b"a"])], {}),
        ("text_input", [tensor("text_input", "BYTES", (0,))], {}),
        ("text_input", [tensor("text_input", "BYTES", (1,) * 9, bytes_contents=[b"a"])], {}),
        ("text_input", [tensor("text_input", "BYTES", (2**62, 4), bytes_contents=[b"a"])], {}),
        ("text_input", [tensor("text_input", "BYTES", bytes_contents=[b"a", b"b"])], {}),
        ("text_input", [tensor("text_input", "BYTES")], {}),
        ("text_input", [tensor("text_input", "BYTES", uint_contents=[1])], {}),
        ("text_input", [tensor("text_input", "BYTES", bytes_contents=[b"a"], uint_contents=[1])], {}),
        ("text_input", [prompt(b"\xff\xfe")], {}),
        ("text_input", [prompt(), prompt()], {}),
        ("text_input", [Tensor(name="text_input", datatype="BYTES", shape=[1], parameters=parameters(x=1))], {}),
        ("inputs[0].name", [tensor("image", "BYTES", bytes_contents=[b"a"])], {}),
        ("inputs", [prompt()] * 17, {}),
        ("raw_input_contents", [RAW], {"raw_input_contents": [BYTES, BYTES]}),
        ("text_input", [prompt()], {"raw_input_contents": [BYTES]}),
        ("text_input", [RAW], {"raw_input_contents": [b"hi"]}),
        ("text_input", [RAW], {"raw_input_contents": [b""]}),
        ("text_input", [RAW], {"raw_input_contents": [BYTES + b"!"]}),
        ("text_input", [RAW], {"raw_input_contents": [struct.pack("<I", 2**32 - 1) + b"hi"]}),
        ("stream", [prompt(), tensor("stream", "BOOL", int_contents=[1])], {}),
        (
            "stream",
            [RAW, Tensor(name="stream", datatype="BOOL", shape=[1])],
            {"raw_input_contents": [BYTES, b"\x01\x01"]},
        ),
        ("sampling_parameters", [prompt(), tensor("sampling_parameters", "BYTES", bytes_contents=[b"{"])], {}),
        ("sampling_parameters", [prompt(), tensor("sampling_parameters", "BYTES", bytes_contents=[b"[1]"])], {}),
        ("sampling_parameters", [prompt(), tensor("sampling_parameters", "BYTES", bytes_contents=[b"[" * 60000])], {}),
        (
            "sampling_parameters",
            [prompt(), tensor("sampling_parameters", "BYTES", bytes_contents=[b'"' + b"x" * 70000 + b'"'])],
            {},
        ),
        ("exclude_input_in_output", [prompt(), tensor("exclude_input_in_output", "BOOL", bool_contents=[False]),
                                     tensor("stream", "BOOL", bool_contents=[True])], {}),
        ("outputs[0].name", [prompt()], {"outputs": [REQUESTED(name="logits")]}),
        ("text_output", [prompt()], {"outputs": [REQUESTED(name="text_output")] * 2}),
        ("text_output", [prompt()], {"outputs": [REQUESTED(name="text_output", parameters=PARAMETER)]}),
        ("outputs", [prompt()], {"outputs": [REQUESTED(name="text_output")] * 9}),
        ("parameters.frobnicate", [prompt()], {"parameters": parameters(frobnicate=1)}),
        ("parameters.sequence_id", [prompt()], {"parameters": parameters(sequence_id=1)}),
        ("parameters.temperature", [prompt()], {"parameters": {"temperature": Parameter()}}),
        ("parameters", [prompt()], {"parameters": parameters(**{f"p{i}": 1 for i in range(65)})}),
    ],
)  # fmt: skip
def test_malformed_requests(field: str, inputs: list[Tensor], fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        to_infer(*inputs, **fields)
    assert caught.value.details["field"] == field
    assert caught.value.message.startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", "many"),
        ("max_tokens", 2**40),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", None),
        ("max_tokens", "9" * 33),
        ("temperature", NAN),
        ("temperature", float("inf")),
        ("temperature", 1e300),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", [1]),
        ("temperature", 10**400),
        ("seed", -1),
        ("seed", 2**64),
        ("n", 2),
        ("best_of", 3),
        ("ignore_eos", "maybe"),
        ("ignore_eos", 1),
        ("stop", 5),
        ("stop", [5]),
        ("stop", ["\ud800"]),
        ("stop", ["x"] * 65),
        ("stop_token_ids", ["x"]),
        ("stop_token_ids", [-1]),
        ("frobnicate", 1),
    ],
)
def test_bad_sampling_parameters(name: str, value: Any) -> None:
    data = json.dumps({name: value}).encode()
    with pytest.raises(InvalidArgument) as caught:
        to_infer(prompt(), tensor("sampling_parameters", "BYTES", bytes_contents=[data]))
    assert caught.value.details["field"] == f"sampling_parameters.{name}"


def test_a_single_response_cannot_stream() -> None:
    with pytest.raises(InvalidArgument, match="ModelStreamInfer"):
        to_infer(prompt(), parameters=parameters(stream=True), streams=False)
