"""The rows of test_bad_input_table.py: malformed requests, and what is to be said to them."""

from __future__ import annotations

import json
import struct
from typing import Any

from bad_input_kit import request_bytes
from kvmesh.proto.inference import grpc_predict_v2_pb2 as kserve
from kvmesh.proto.v1 import inference_pb2 as pb

MIB = 1 << 20
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MODEL = "scripted"
HI = [{"role": "user", "content": "hi"}]
REGEX_BOMB = "(" * 4000 + "a" + ")" * 4000
# Whether these are refused hangs on how long they take: only nobody else may notice.
HEAVY = ["(a|aa)+" * 900 + "b", "((a{1,300}){1,300}){1,300}", "(.*a){64}.*", "(x+x+)+y" * 100]
LARK_BOMB = "start: " + "(" * 7000 + '"a"' + ")" * 7000


def body(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": HI, "max_tokens": 4} | fields).encode()


def prompt(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 4} | fields).encode()


def function(name: Any = "look", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def schema(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}


def deep(levels: int) -> bytes:
    return b'{"a":' * levels + b"1" + b"}" * levels


# name: (bytes of the request, status, OpenAI's code or None for any, a part of the sentence)
Row = tuple[bytes, int, str | None, str]


def chats(table: dict[str, tuple[bytes, int, str | None, str]]) -> dict[str, Row]:
    return {name: (request_bytes(CHAT, row[0]), *row[1:]) for name, row in table.items()}


def http_table() -> dict[str, Row]:
    calls = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{"}}
    rows = chats(
        {
            # sizes
            "10 MB": (body(user="x" * (10 * MIB)), 413, "too_large", "larger than"),
            "10^6 stop strings": (body(stop=["x"] * 1_000_000), 400, "array_above_max_length", "16"),
            "10^6 tags": (body(metadata={f"{index}": "x" for index in range(300_000)}), 400, None, "names"),
            "10^6 messages": (body(messages=HI * 100_000), 400, None, "more than"),
            "a text of 5 MB": (
                body(messages=[{"role": "user", "content": "x" * 5 * MIB}]),
                413,
                "too_large",
                "messages",
            ),
            "long": (body(messages=[{"role": "user", "content": "x" * 10_000}]), 400, "context_length_exceeded", "512"),
            "10^5 digits": (b'{"n": ' + b"9" * 100_000 + b"}", 400, "invalid_json", "number"),
            "10^300": (body(max_tokens=10**300), 400, None, "max_tokens"),
            "1e400 as float": (b'{"model":"m","messages":[],"temperature":1e400}', 400, None, ""),
            "deep": (deep(200_000), 400, "invalid_json", "nested too deeply"),
            "deep in a field": (body(chat_template_kwargs=json.loads(deep(400))), 400, None, "nested"),
            "deep schema": (body(response_format=schema(json.loads(deep(400)))), 400, None, "nested"),
            # text
            "latin-1": (body(user="x").replace(b'"x"', b'"\xe9"'), 400, "invalid_json", "UTF-8"),
            "utf-16": (body().decode().encode("utf-16"), 400, "invalid_json", "UTF-8"),
            "byte order mark": (b"\xef\xbb\xbf" + body(), 400, "invalid_json", "JSON"),
            "half a pair in a schema": (
                body(response_format=schema({"type": "string"})).replace(b'"string"', b'"\\ud800"'),
                *(400, "invalid_json", "surrogate"),
            ),
            "truncated": (body()[:-10], 400, "invalid_json", "JSON"),
            "two values": (body() + body(), 400, "invalid_json", "JSON"),
            "duplicate inside": (body().replace(b'"role":', b'"role": "user", "role":'), 400, "invalid_json", "twice"),
            "names of control characters": (body(**{"\r\nx\0": 1}), 400, "unknown_parameter", ""),
            "a long unknown name": (body(**{"\U0010ffff" * 100_000: 1}), 400, "unknown_parameter", ""),
            # fields
            "unknown role": (
                body(messages=[{"role": "\r\n\0🎉" * 1000, "content": "x"}]),
                400,
                "invalid_value",
                "role",
            ),
            "an image": (
                body(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]),
                *(400, "unsupported_parameter", "text only"),
            ),
            "a sound": (
                body(messages=[{"role": "user", "content": [{"type": "input_audio"}]}]),
                400,
                None,
                "text only",
            ),
            "model": (body(model="\U0010ffff" * 64), 404, "model_not_found", ""),
            "a list as model": (body(model=["x"]), 400, "invalid_type", "model"),
            "bias": (body(logit_bias={"100000": 1}), 400, None, "vocabulary"),
            "bias of text": (body(logit_bias={"-1": 1}), 400, None, "logit_bias"),
            "best_of of a chat": (body(best_of=2), 400, "unknown_parameter", "best_of"),
            "request id": (body(request_id="a\r\nset-cookie: b"), 400, "invalid_value", "request_id"),
            # grammars
            "no schema": (body(response_format=schema({"type": "nonsense"})), 400, None, "response_format"),
            "an endless schema": (body(response_format=schema({"$ref": "#/nowhere"})), 400, None, "response_format"),
            "a schema of nothing": (body(response_format=schema({"enum": []})), 400, None, "response_format"),
            "a regex": (body(regex="("), 400, None, "regex"),
            "a regex bomb": (body(regex=REGEX_BOMB), 400, None, "regex"),
            "lark": (body(grammar="start: nobody"), 400, None, "grammar"),
            "a lark bomb": (body(grammar=LARK_BOMB), 400, None, "grammar"),
            "a grammar of 1 MB": (body(regex="a" * MIB), 400, None, "regex"),
            "choices of 1 MB": (body(guided_choice=["a" * 1024] * 1024), 400, None, "guided_choice"),
            # tools
            "a tool's name": (body(tools=[function("a b")]), 400, None, "tools[0]"),
            "the same tool twice": (body(tools=[function(), function()]), 400, None, "tools[1]"),
            "129 tools": (body(tools=[function(f"f{n}") for n in range(129)]), 400, None, "128"),
            "a tool's schema": (body(tools=[function(parameters={"type": "array"})]), 400, None, "tools[0]"),
            "a tool's wrong schema": (
                body(
                    tools=[function(parameters={"properties": {"a": {"type": "x"}}}, strict=True)],
                    tool_choice="required",
                ),
                *(400, None, ""),
            ),
            "a choice of nobody": (
                body(tools=[function()], tool_choice=function("other")),
                *(400, None, "tool_choice"),
            ),
            "a choice without tools": (body(tool_choice=function()), 400, None, "tool_choice"),
            "half a call": (
                body(messages=[{"role": "assistant", "tool_calls": [calls]}, *HI]),
                *(400, None, "arguments"),
            ),
            "a scheme of a template": (body(chat_template_kwargs={"messages": []}), 400, None, "chat_template_kwargs"),
        }
    )
    for name, one, code, part in (
        ("ids", prompt(prompt=[1 << 31]), None, "vocabulary"),
        ("negative ids", prompt(prompt=[-1]), None, "prompt"),
        ("10^6 ids", prompt(prompt=[1] * 1_000_000), "context_length_exceeded", "512"),
        ("too many prompts", prompt(prompt=["x"] * 100_000), None, "128"),
        ("empty", prompt(prompt=""), None, "prompt"),
        ("best_of below n", prompt(n=3, best_of=2), None, "best_of"),
        ("n times best_of", prompt(n=16, best_of=17), None, "best_of"),
        ("scores", prompt(logprobs=21), None, "logprobs"),
        ("below zero", prompt(max_tokens=-1), None, "max_tokens"),
        ("long", prompt(prompt="x" * 5000), "context_length_exceeded", "512"),
        ("echo of a long one", prompt(prompt="x" * 5000, echo=True), "context_length_exceeded", "512"),
    ):
        rows[f"completion: {name}"] = (request_bytes(COMPLETIONS, one), 400, code, part)
    good = body()
    rows |= {
        # heads
        "huge header": (request_bytes(CHAT, good, "x-big: " + "x" * 100_000), 431, None, "head"),
        "many headers": (request_bytes(CHAT, good, *(f"x-{n}: 1" for n in range(1000))), 431, None, "headers"),
        "long path": (request_bytes("/v1/" + "x" * 20_000, good), 414, None, "URL"),
        "a bare CR in a header": (request_bytes(CHAT, good, "x-request-id: a\rset-cookie: b"), 400, None, "HTTP"),
        "two lengths": (request_bytes(CHAT, good, "Content-Length: 3"), 400, None, "HTTP"),
        "length and chunks": (request_bytes(CHAT, good, "Transfer-Encoding: chunked"), 400, None, "HTTP"),
        "no length": (f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n".encode(), 400, None, "HTTP"),
        "a chunk of no size": (
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n".encode(),
            *(400, None, "HTTP"),
        ),
        "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01" * 8 + b"\r\n\r\n", 400, None, "HTTP"),
        "unknown method": (request_bytes(CHAT, good, method="EAT"), 400, None, "HTTP"),
        "wrong method": (request_bytes(CHAT, b"", method="DELETE"), 405, "method_not_supported", "DELETE"),
        "wrong path": (request_bytes("/v2/chat?%00=%ff", good), 404, "unknown_url", ""),
        "a path of bytes": (request_bytes("/v2/\xff", good), 400, None, "HTTP"),
        "a path of control characters": (request_bytes("/%0d%0ax%00%ff", good), 404, "unknown_url", ""),
        "a long model": (request_bytes("/v1/models/%ff" + "%F0%9F%8E%89" * 200, method="GET"), 400, None, "model"),
        "a model of control characters": (request_bytes("/v1/models/%0b%1b[31m", method="GET"), 404, None, ""),
        "a form": (request_bytes(CHAT, b"a=b", kind="application/x-www-form-urlencoded"), 415, None, "content type"),
        "packed": (request_bytes(CHAT, good, "Content-Encoding: br"), 415, None, "encoding"),
    }
    return rows


def grpc_table() -> dict[str, tuple[str, bytes, str, str]]:
    """name: (method, message, status, a part of the sentence)."""
    rows: dict[str, tuple[str, bytes, str, str]] = {}

    def chat(name: str, status: str, part: str, **fields: Any) -> None:
        given: dict[str, Any] = {"model": MODEL, "messages": [pb.ChatMessage(role="user", content="hi")]} | fields
        sampling = given.pop("sampling", None) or {}
        request = pb.ChatRequest(sampling=pb.SamplingParams(**({"max_tokens": 4} | sampling)), **given)
        rows[f"chat: {name}"] = ("kvmesh.v1.Inference/Chat", request.SerializeToString(), status, part)

    bad = "INVALID_ARGUMENT"
    inf = float("inf")
    for field, value in (
        *(("temperature", inf), ("top_p", float("nan")), ("min_p", -1.0), ("frequency_penalty", inf)),
        *(("presence_penalty", -3.0), ("repetition_penalty", 0.0), ("top_k", 2**32 - 1), ("max_tokens", 0)),
        *(("n", 17), ("best_of", 0), ("logprobs", 21), ("prompt_logprobs", 2**31), ("min_tokens", 5)),
        *(
            ("stop", ["x"] * 1_000_000),
            ("stop", ["é" * 200]),
            ("stop_token_ids", [2**31]),
            ("stop_token_ids", [1] * 65),
        ),
        *(("logit_bias", {2**31: 1.0}), ("logit_bias", {1: inf}), ("logit_bias", dict.fromkeys(range(100_000), 0.0))),
    ):
        shown = str(value)
        chat(f"{field}={shown[:12]} ({len(shown)})", bad, field, sampling={field: value})
    chat("n times best_of", bad, "best_of", sampling={"n": 4, "best_of": 3})
    for name, given in (
        ("a schema", pb.Grammar(json_schema='{"type": "nonsense"}')),
        ("no JSON", pb.Grammar(json_schema="{")),
        ("deep", pb.Grammar(json_schema=deep(10_000).decode())),
        ("a lark bomb", pb.Grammar(lark=LARK_BOMB)),
        ("none", pb.Grammar(json_object=False)),
        ("1 MB", pb.Grammar(regex="a" * MIB)),
        ("a regex bomb", pb.Grammar(regex=REGEX_BOMB)),
    ):
        chat(f"grammar, {name}", bad, "grammar", sampling={"grammar": given})
    message = pb.ChatMessage
    call = pb.ToolCall(id="c", name="look", arguments="{")
    for name, part, messages in (
        ("no role", "role", [message(content="x")]),
        ("a long role", "role", [message(role="x" * 100, content="x")]),
        ("half a call", "arguments", [message(role="assistant", tool_calls=[call]), message(role="user", content="x")]),
        ("long", "maximum context length", [message(role="user", content="x" * 10_000)]),
        ("many", "at most 1024", [message(role="user", content="x")] * 100_000),
    ):
        chat(f"messages, {name}", bad, part, messages=messages)
    chat("a text of 5 MB", "RESOURCE_EXHAUSTED", "", messages=[message(role="user", content="x" * 5 * MIB)])
    look = pb.Tool(name="look")
    named = pb.ToolChoice(mode=pb.ToolChoice.MODE_NAMED, name="\r\n")
    chat("a tool's name", bad, "tools[0].name", tools=[pb.Tool(name="a\r\nb")])
    chat("129 tools", bad, "128", tools=[pb.Tool(name=f"f{n}") for n in range(129)])
    chat("a tool's schema", bad, "tools[0]", tools=[pb.Tool(name="look", parameters=deep(5000).decode())])
    chat("a choice of nobody", bad, "tool_choice", tools=[look], tool_choice=named)
    chat("variables", bad, "template_variables", template_variables='{"a": NaN}')
    chat("variables of 1 MB", bad, "template_variables", template_variables=json.dumps({"a": "x" * MIB}))
    chat("request id", bad, "request_id", request_id="a\r\nb")
    chat("user", bad, "user", user="🎉" * 100)
    chat("salt", bad, "cache_salt", cache_salt="x" * 129)
    chat("tau", bad, "tau", cache_control=pb.CacheControl(tau=float("nan")))
    chat("cache", bad, "cache", cache=77)
    chat("limits", bad, "limits.total_ms", limits=pb.Limits(total_ms=2**32 - 1))
    chat("20 MB", "RESOURCE_EXHAUSTED", "", messages=[message(role="user", content="x" * 20 * MIB)])
    generate = "kvmesh.v1.Inference/Generate"
    tokens = pb.GenerateRequest(model=MODEL)
    tokens.tokens.ids.extend([2**31])
    many = pb.GenerateRequest(model=MODEL)
    many.tokens.ids.extend([1] * 1_000_000)
    rows |= {
        "ids": (generate, tokens.SerializeToString(), bad, "vocabulary"),
        "10^6 ids": (generate, many.SerializeToString(), bad, "maximum context length"),
        "no prompt": (generate, pb.GenerateRequest(model=MODEL).SerializeToString(), bad, "prompt"),
        "truncated": (generate, pb.GenerateRequest(model=MODEL, text="x" * 100).SerializeToString()[:-9], bad, ""),
        "no protobuf": (generate, b"\xff" * 100, bad, ""),
        "a group without end": (generate, b"\x0b" * 1000, bad, ""),
        "no UTF-8": (generate, b"\x0a\x02\xff\xfe", bad, ""),
        "embed nothing": ("kvmesh.v1.Inference/Embed", pb.EmbedRequest(model="m").SerializeToString(), bad, "input"),
        "tokenize nothing": (
            "kvmesh.v1.Inference/Tokenize",
            pb.TokenizeRequest(model=MODEL).SerializeToString(),
            *(bad, "prompt"),
        ),
        "unknown method": ("kvmesh.v1.Inference/Nothing", b"", "UNIMPLEMENTED", ""),
        "unknown service": ("no.Such/Thing", b"x", "UNIMPLEMENTED", ""),
    }
    return rows | kserve_rows()


def kserve_rows() -> dict[str, tuple[str, bytes, str, str]]:
    tensor = kserve.ModelInferRequest.InferInputTensor
    rows: dict[str, tuple[str, bytes, str, str]] = {}

    def infer(name: str, part: str, *inputs: Any, raw: tuple[bytes, ...] = (), **parameters: Any) -> None:
        request = kserve.ModelInferRequest(model_name=MODEL, inputs=inputs, raw_input_contents=raw)
        for key, value in parameters.items():
            request.parameters[key].CopyFrom(value)
        method = "inference.GRPCInferenceService/ModelInfer"
        rows[f"kserve: {name}"] = (method, request.SerializeToString(), "INVALID_ARGUMENT", part)

    def text(shape: tuple[int, ...] = (1,), datatype: str = "BYTES", name: str = "text_input", **contents: Any) -> Any:
        given = kserve.InferTensorContents(**contents) if contents else None
        return tensor(name=name, shape=shape, datatype=datatype, contents=given)

    good = {"bytes_contents": [b"hi"]}
    number = kserve.InferParameter
    infer("nothing", "text_input")
    infer("a huge shape", "text_input", text((2**62, 2**62), **good))
    infer("a negative shape", "text_input", text((-1,), **good))
    infer("no shape", "text_input", text((), **good))
    infer("10^6 dimensions", "text_input", text((1,) * 1_000_000, **good))
    infer("datatype", "text_input", text(datatype="FP8\r\n", **good))
    infer("contents of another type", "text_input", text(fp32_contents=[1.0]))
    infer("10^6 elements", "text_input", text(bytes_contents=[b"x"] * 200_000))
    infer("both contents", "text_input", text(**good), raw=(struct.pack("<I", 2) + b"hi",))
    infer("raw without length", "text_input", text(), raw=(b"hi",))
    infer("raw that claims 4 GB", "text_input", text(), raw=(b"\xff\xff\xff\xffhi",))
    infer("raw of nobody", "raw_input_contents", text(), raw=(b"", b"", b""))
    infer("no UTF-8", "UTF-8", text(bytes_contents=[b"\xff\xfe"]))
    infer("twice", "twice", text(**good), text(**good))
    infer("unknown input", "inputs[1].name", text(**good), text(name="x" * 100_000, **good))
    infer("10^5 inputs", "inputs", *[text(**good)] * 100_000)
    infer("nan", "temperature", text(**good), temperature=number(double_param=float("nan")))
    infer("a count below zero", "max_tokens", text(**good), max_tokens=number(int64_param=-1))
    infer("unknown parameter", "not known", text(**good), **{"\r\n" + "🎉" * 5000: number(bool_param=True)})
    settings = b'{"\\ud800": 1, "temperature": 1}'
    infer("half a pair", "not known", text(**good), text(name="sampling_parameters", bytes_contents=[settings]))
    infer("deep", "JSON", text(**good), text(name="sampling_parameters", bytes_contents=[deep(10_000)]))
    return rows
