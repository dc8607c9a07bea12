"""From an infer request to a request of the mesh, and from its events to infer responses.

Inputs: `text_input` (the prompt), `stream`, `sampling_parameters`, `exclude_input_in_output`, and `return_…` for more
outputs. The names are those of Triton's vLLM backend. `exclude_input_in_output` is true unless it is said otherwise,
streamed or not: both give the same text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvmesh.errors import KvmeshError
from kvmesh.proto.inference import grpc_predict_v2_pb2 as kserve
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.rpc.status import grpc_code, sentence
from services.gateway import validate
from services.gateway.kserve import sampling, tensors
from services.gateway.registry import new_id

TEXT = "text_output"
REASON = "finish_reason"
NUM_INPUT = "num_input_tokens"
NUM_OUTPUT = "num_output_tokens"
OUTPUTS = {TEXT: "BYTES", REASON: "BYTES", NUM_INPUT: "UINT32", NUM_OUTPUT: "UINT32"}
_RETURN = {f"return_{name}": name for name in (REASON, NUM_INPUT, NUM_OUTPUT)}
INPUTS = {
    "text_input": "BYTES",
    "stream": "BOOL",
    "sampling_parameters": "BYTES",
    "exclude_input_in_output": "BOOL",
    **dict.fromkeys(_RETURN, "BOOL"),
}

FINAL = "triton_final_response"
EMPTY_FINAL = "triton_enable_empty_final_response"
# What tritonclient sends of its own accord; a tenant's priority is its policy's matter.
_IGNORED = frozenset(("priority",))
_FINISH = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
MICROSECONDS_PER_MS = 1000


@dataclass(frozen=True, slots=True)
class Infer:
    """A checked infer request."""

    request: pb.GenerateRequest
    version: str
    stream: bool
    prompt: str
    echo: bool
    outputs: tuple[str, ...]
    raw: bool
    empty_final: bool

    @property
    def id(self) -> str:
        """The client's or a fresh one."""
        return self.request.request_id


def to_infer(given: kserve.ModelInferRequest, *, streams: bool) -> Infer:
    """Check and translate. `streams`: whether the call has room for more than one response.

    Raises InvalidArgument with the field; what all faces check (model, id, prompt, ranges) is left to the front.
    """
    values = tensors.read(given, INPUTS)
    if "text_input" not in values:
        raise validate.bad("text_input", "is required")
    prompt = tensors.text("text_input", values["text_input"])
    request = pb.GenerateRequest(model=given.model_name, text=prompt, request_id=given.id or new_id())
    stream, empty_final = bool(values.get("stream", False)), False
    if len(given.parameters) > sampling.MAX_PARAMETERS:
        raise validate.bad("parameters", f"at most {sampling.MAX_PARAMETERS} are allowed")
    for name, parameter in sorted(given.parameters.items()):
        value = sampling.plain(name, parameter)
        if name in sampling.NAMES:
            sampling.put(request.sampling, name, value, "parameters")
        elif name == "stream":
            stream = sampling.boolean("parameters.stream", value)
        elif name == EMPTY_FINAL:
            empty_final = sampling.boolean(f"parameters.{name}", value)
        elif name == "timeout":
            request.limits.total_ms = _timeout_ms(value)
        elif name not in _IGNORED:
            raise validate.bad(f"parameters.{name[: tensors.MAX_NAME_BYTES]}", "is not known")
    if "sampling_parameters" in values:
        text = tensors.text("sampling_parameters", values["sampling_parameters"])
        for name, value in sampling.from_json(text).items():
            if name not in sampling.NAMES:
                raise validate.bad(f"sampling_parameters.{name[: tensors.MAX_NAME_BYTES]}", "is not known")
            sampling.put(request.sampling, name, value, "sampling_parameters")
    if stream and not streams:
        raise validate.bad("stream", "ModelInfer gives one response; use ModelStreamInfer")
    echo = not values.get("exclude_input_in_output", True)
    if echo and stream:
        raise validate.bad("exclude_input_in_output", "cannot be false where the answer is streamed")
    return Infer(
        request=request,
        version=given.model_version,
        stream=stream,
        prompt=prompt,
        echo=echo,
        outputs=_outputs(given, values),
        raw=bool(given.raw_input_contents),
        empty_final=empty_final,
    )


def _timeout_ms(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise validate.bad("parameters.timeout", "must be a positive number of microseconds")
    return min(max(1, value // MICROSECONDS_PER_MS), validate.MAX_TOTAL_MS)


def _outputs(given: kserve.ModelInferRequest, values: dict[str, tensors.Value]) -> tuple[str, ...]:
    if len(given.outputs) > len(OUTPUTS):
        raise validate.bad("outputs", f"{len(given.outputs)} outputs; there are {len(OUTPUTS)}")
    wanted = []
    for index, output in enumerate(given.outputs):
        if output.name not in OUTPUTS:
            raise validate.bad(f"outputs[{index}].name", f"unknown; the outputs are {', '.join(OUTPUTS)}")
        if output.name in wanted:
            raise validate.bad(output.name, "is given twice")
        if output.parameters:
            raise validate.bad(output.name, "takes no parameters (neither classes nor shared memory are served)")
        wanted.append(output.name)
    more = [output for name, output in _RETURN.items() if values.get(name) and output not in wanted]
    return (*(wanted or [TEXT]), *more)


class Answer:
    """What has come of one request; it gives the responses."""

    def __init__(self, infer: Infer) -> None:
        self.infer = infer
        self.model = infer.request.model
        self.version = ""
        self.reason = ""
        self.error: pb.StreamError | None = None
        self._usage = pb.Usage()
        self._texts: list[str] = []

    def take(self, event: pb.GenerateEvent) -> kserve.ModelInferResponse | None:
        """Note an event; the response that a stream sends for it, if any."""
        kind = event.WhichOneof("event")
        if kind == "accepted":
            self.version = event.accepted.revision
            self._usage.prompt_tokens = event.accepted.prompt_tokens
        elif kind == "delta":
            self.reason = _FINISH.get(event.delta.finish_reason, self.reason)
            if self.infer.stream and event.delta.text:
                return self._response(event.delta.text, final=False)
            self._texts.append(event.delta.text)
        elif kind == "finished":
            self._usage = event.finished.usage
        elif kind == "error":
            self.error = event.error
        return None

    def last(self) -> kserve.ModelInferResponse:
        """The whole answer, or of a stream its end. Usage is told as parameters too."""
        text = "".join(([self.infer.prompt] if self.infer.echo else []) + self._texts)
        response = self._response(text, final=True)
        response.parameters["prompt_tokens"].int64_param = self._usage.prompt_tokens
        response.parameters["completion_tokens"].int64_param = self._usage.completion_tokens
        if self.infer.stream and self.infer.empty_final:
            del response.outputs[:]
            del response.raw_output_contents[:]
        return response

    def _response(self, text: str, *, final: bool) -> kserve.ModelInferResponse:
        response = kserve.ModelInferResponse(
            model_name=self.infer.request.model, model_version=self.version, id=self.infer.id
        )
        values: dict[str, str | int] = {
            TEXT: text,
            REASON: self.reason if final else "",
            NUM_INPUT: self._usage.prompt_tokens,
            NUM_OUTPUT: self._usage.completion_tokens,
        }
        for name in self.infer.outputs:
            tensors.write(response, name, values[name], raw=self.infer.raw)
        response.parameters[FINAL].bool_param = final
        return response


def failed(given: kserve.ModelInferRequest, request_id: str, error: KvmeshError) -> kserve.ModelStreamInferResponse:
    """How a request of a stream fails: the stream itself goes on."""
    response = kserve.ModelInferResponse(
        model_name=given.model_name[: validate.MAX_MODEL_BYTES], id=request_id[: validate.MAX_ID_BYTES]
    )
    code = grpc_code(error).name
    response.parameters[FINAL].bool_param = True
    response.parameters["error_code"].string_param = code
    response.parameters["error_reason"].string_param = error.reason
    return kserve.ModelStreamInferResponse(
        error_message=f"[{code}] {sentence(error.message) or error.reason}", infer_response=response
    )
