"""Coverage-guided fuzzing of everything that reads a public request before it costs anything.

A program, run by test_atheris.py: `python atheris_public.py [libFuzzer options] CORPUS`. The first byte of an input
chooses the reader, the rest is what a client sent. Whatever that is, the reader answers or raises a KvmeshError that
every face can tell, within a bound of time on a processor.

`python atheris_public.py --write-corpus FOLDER` writes valid inputs to begin with.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import random
import re
import resource
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import atheris
from google.protobuf.message import DecodeError, Message

with atheris.instrument_imports(
    include=["services.gateway", "kvmesh.grammar", "kvmesh.rpc.status", "kvmesh.client"],
    enable_loader_override=False,
):
    from kvmesh.errors import KvmeshError
    from kvmesh.grammar.source import GrammarSource
    from kvmesh.grammar.vocabulary import Vocabulary
    from kvmesh.proto.inference import grpc_predict_v2_pb2 as kserve
    from kvmesh.proto.v1 import engine_pb2
    from kvmesh.proto.v1 import inference_pb2 as pb
    from kvmesh.rpc import status
    from kvmesh.rpc.credentials import Policy, Principal
    from services.gateway import embed, validate
    from services.gateway.fleet import Fleet
    from services.gateway.http import body as http_body
    from services.gateway.http import errors as http_errors
    from services.gateway.http import requests, translate
    from services.gateway.http.fields import check
    from services.gateway.kserve import translate as kserve_translate
    from services.gateway.prepare import Preparer, Rules, request_limits
    from services.gateway.tokenizers import ModelTokenizer, TokenizerStore

MODEL = "scripted"
MAX_LEN = 2048
# Of a processor, for one input of at most MAX_INPUT bytes; the machine's other work does not count.
MAX_CPU_S = 10.0
MAX_SENTENCE_BYTES = 512
# Of this process, at its peak; what asks for far more at once is refused by the kernel.
MAX_MIB = 2048
MAX_DATA_BYTES = 8 << 30
# Of one body, how many of its requests are looked at.
MAX_PROMPTS = 3


class OneModel:
    """A fleet of one worker that is never asked anything."""

    info = engine_pb2.WorkerInfo(worker_id="d", model=MODEL, max_model_len=MAX_LEN)

    def example(self, model: str) -> engine_pb2.WorkerInfo:
        """Whatever the name: an unknown one is a dictionary's miss and teaches a fuzzer nothing."""
        return self.info

    def context(self, model: str) -> int:
        return MAX_LEN


class Compiled:
    """Grammars are compiled here and now, within the library's own limits."""

    def __init__(self) -> None:
        self._vocabulary: Vocabulary | None = None

    async def check(self, grammar: pb.Grammar, tokenizer: ModelTokenizer) -> None:
        source = GrammarSource.of(grammar)
        if self._vocabulary is None:
            bundle = tokenizer.bundle
            self._vocabulary = Vocabulary(bundle.tokenizer.to_str(), bundle.vocab_size, bundle.eos_token_ids)
        self._vocabulary.compile(source)


RULES = Rules(max_prompt_bytes=16 << 10)
PREPARER = Preparer(cast(Fleet, OneModel()), TokenizerStore(MODEL), RULES, Compiled())
PRINCIPAL = Principal("fuzz", Policy())


def parsed(kind: type[Message], data: bytes) -> Any:
    message = kind()
    message.ParseFromString(data)
    return message


async def generation(request: pb.GenerateRequest | pb.ChatRequest) -> None:
    """Up to the job; what passes is effective and in range."""
    PREPARER.check(request, PRINCIPAL)
    job = await PREPARER.job(request, PRINCIPAL, "r", request_limits(request.limits, RULES, None))
    await PREPARER.check_grammar(job)
    sampling = job.sampling
    assert 0.0 <= sampling.temperature <= 100.0
    assert 0.0 < sampling.top_p <= 1.0
    assert 0.0 <= sampling.min_p <= 1.0
    assert 1 <= sampling.n <= sampling.best_of <= validate.MAX_CHOICES
    assert 1 <= sampling.max_tokens <= MAX_LEN - len(job.token_ids)
    assert 0 <= sampling.min_tokens <= sampling.max_tokens
    assert all(0 <= token < job.tokenizer.vocab_size for token in job.token_ids)
    if job.reader is not None:
        job.reader()


async def generate(data: bytes) -> None:
    await generation(parsed(pb.GenerateRequest, data))


async def chat(data: bytes) -> None:
    await generation(parsed(pb.ChatRequest, data))


async def embeds(data: bytes) -> None:
    embed.check(parsed(pb.EmbedRequest, data), RULES.max_prompt_bytes)


async def tokenize(data: bytes) -> None:
    await PREPARER.tokens(parsed(pb.TokenizeRequest, data), PRINCIPAL)


async def infer(data: bytes) -> None:
    request = parsed(kserve.ModelInferRequest, data)
    try:
        await generation(kserve_translate.to_infer(request, streams=True).request)
    except KvmeshError as error:
        kserve_translate.failed(request, request.id, error).SerializeToString()
        raise


async def http_chat(data: bytes) -> None:
    request, renamed = translate.chat_request(check(requests.Chat, await http_body.parse_body(data)))
    await http_run(request, renamed)


async def http_completion(data: bytes) -> None:
    asked, renamed = translate.completion_requests(check(requests.Completion, await http_body.parse_body(data)))
    for request in asked[:MAX_PROMPTS]:
        await http_run(request, renamed)


async def http_run(request: pb.ChatRequest | pb.GenerateRequest, renamed: http_errors.Renamed) -> None:
    try:
        await generation(request)
    except KvmeshError as error:
        http_errors.error_body(error, renamed)
        raise


async def http_small(data: bytes) -> None:
    value = await http_body.parse_body(data)
    if "request_id" in value:
        check(requests.Abort, value)
    elif "input" in value:
        embed.check(translate.embed_request(check(requests.Embeddings, value)), RULES.max_prompt_bytes)
    else:
        await PREPARER.tokens(translate.tokenize_request(check(requests.Tokenize, value)), PRINCIPAL)


READERS: list[Callable[[bytes], Any]] = [
    generate,
    chat,
    embeds,
    tokenize,
    infer,
    http_chat,
    http_completion,
    http_small,
]
LOOP = asyncio.new_event_loop()


def told(error: KvmeshError) -> None:
    """Every face can say it, in one sentence."""
    found = status.to_status_details(error)
    found.SerializeToString()
    assert found.message, error.reason
    told = json.loads(http_errors.error_body(error))["error"]
    assert told["message"]
    assert len(told["message"].encode()) <= MAX_SENTENCE_BYTES, told
    assert http_errors.http_status(error) not in (500, 502), told
    for name, value in http_errors.error_headers(error):
        assert b"\n" not in name + value
        assert b"\r" not in name + value


def peak_mib() -> int:
    """The most memory that was resident since this program was started."""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) >> 10


def one_input(data: bytes) -> None:
    """One input, as libFuzzer gives it."""
    if not data:
        return
    read = READERS[data[0] % len(READERS)]
    begin = time.process_time()
    try:
        try:
            LOOP.run_until_complete(read(data[1:]))
        except KvmeshError as error:
            told(error)
        except DecodeError:
            pass
        took = time.process_time() - begin
        assert took < MAX_CPU_S, f"{took:.1f} s for {len(data)} bytes"
        assert peak_mib() < MAX_MIB, f"{peak_mib()} MiB"
    except BaseException:
        print(f"\n{read.__name__} failed with {data[1:]!r}\ninput: {base64.b64encode(data).decode()}", file=sys.stderr)
        raise


# --- changes of JSON that leave it JSON
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 16, 17, 2**31, 2**32, 2**63, 2**64, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308),
    *("", "a", "\0", "\r\n", "é🎉", "\ud800", "x" * 300, "auto", "none", "assistant", "tool", "text", "function"),
    *([], [[]], [1], ["a"] * 17, [None], {}, {"": {}}, {"type": "string"}, {"$ref": "#"}, {"pattern": "(a|b)*{9}"}),
    *({"anyOf": [{"enum": [1, "a"]}, {"type": "null"}]}, {"type": "array", "items": {"$ref": "#/x"}}, "[a-z]{1,999}"),
]


def changed(value: Any, rng: random.Random, names: list[str]) -> Any:
    """A copy with one change at a place somewhere in it."""
    if isinstance(value, dict | list) and value and rng.random() < 0.75:
        out = copy.copy(value)
        keys: list[Any] = list(out) if isinstance(out, dict) else list(range(len(out)))
        key = rng.choice(keys)
        kind = rng.random()
        if kind < 0.1:
            del out[key]
        elif kind < 0.3 and isinstance(out, dict):
            out[rng.choice(names)] = rng.choice(ODD)
        elif kind < 0.2:
            out.append(out[key])
        else:
            out[key] = changed(out[key], rng, names)
        return out
    if isinstance(value, str) and value and rng.random() < 0.5:
        at = rng.randrange(len(value))
        return (
            value[:at] + rng.choice(["", '"', "\\", "{", "(", "|", "\x7f", "é", value]) + value[at + rng.randrange(2) :]
        )
    return rng.choice(ODD)


FIELDS = sorted(
    {name for model in (requests.Chat, requests.Completion, requests.Tokenize) for name in model.model_fields}
    | {"type", "function", "name", "parameters", "strict", "content", "role", "schema", "json_schema", "$defs"}
)


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """What libFuzzer goes on with: of JSON mostly JSON again."""
    rng = random.Random(seed)
    if data and READERS[data[0] % len(READERS)] in (http_chat, http_completion, http_small) and rng.random() < 0.7:
        try:
            value = json.loads(data[1:])
            for _ in range(rng.randint(1, 3)):
                value = changed(value, rng, FIELDS)
            out = data[:1] + json.dumps(value).encode()
        except (ValueError, RecursionError):
            out = b""
        if 0 < len(out) <= max_size:
            return out
    return cast(bytes, atheris.Mutate(data, max_size))


# --- what to begin with
SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'
TOOL = {"type": "function", "function": {"name": "look", "parameters": json.loads(SCHEMA), "strict": True}}
HTTP_CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}


def http_chats() -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    calls = [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a":1}'}}]
    talk = [
        {"role": "developer", "content": "be brief", "name": "x"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": json.loads(SCHEMA), "strict": True}}
    choice = {"type": "function", "function": {"name": "look"}}
    more: list[dict[str, Any]] = [
        {"temperature": 0.5, "top_p": 0.9, "seed": -1, "stop": ["a", "b"], "n": 2, "logit_bias": {"5": 1.5}},
        {"logprobs": True, "top_logprobs": 3, "stream": True, "stream_options": {"include_usage": True}},
        {"messages": talk, "tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": False},
        {"tools": [TOOL], "tool_choice": choice, "user": "u", "session_id": "s", "cache": "exact"},
        {"tools": [TOOL], "tool_choice": "required", "cache_control": {"no_store": True, "tau": 0.5, "max_age_s": 3}},
        {"response_format": form},
        {"response_format": {"type": "json_object"}, "max_completion_tokens": 4},
        {"regex": "[a-z]{1,4}(x|y)+"},
        {"grammar": 'start: "a" b\nb: /[0-9]+/ | %json {"type":"string"}'},
        {"guided_choice": ["a", "b.c"], "limits": {"ttft_ms": 5, "total_ms": 10}, "request_id": "mine"},
        {"guided_json": SCHEMA, "chat_template_kwargs": {"enable": True}, "reasoning_effort": "low"},
        {"messages": [*HTTP_CHAT["messages"], {"role": "assistant", "content": "I"}], "continue_final_message": True},
    ]
    return [HTTP_CHAT, *(HTTP_CHAT | one for one in more)]


def samples() -> list[bytes]:
    """Valid inputs of every reader."""
    sampling = pb.SamplingParams(
        temperature=0.5, top_p=0.9, n=2, stop=["a", "b"], logit_bias={5: 1.0}, max_tokens=8, logprobs=2, seed=3
    )
    sampling.grammar.json_schema = SCHEMA
    regex = pb.SamplingParams(max_tokens=4)
    regex.grammar.regex = "[ab]+c"
    tokens = pb.GenerateRequest(model=MODEL, sampling=regex)
    tokens.tokens.ids.extend([1, 2, 3])
    messages = [
        pb.ChatMessage(role="system", content="s", name="n"),
        pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(id="c", name="look", arguments='{"a":1}')]),
        pb.ChatMessage(role="tool", tool_call_id="c", content="é"),
    ]
    talk = pb.ChatRequest(
        model=MODEL,
        messages=messages,
        sampling=pb.SamplingParams(max_tokens=4),
        tools=[pb.Tool(name="look", description="d", parameters=SCHEMA, strict=True)],
        template_variables='{"a":[1,{}]}',
        request_id="r",
        user="u",
        cache_salt="s",
    )
    talk.tool_choice.mode = pb.ToolChoice.MODE_AUTO
    tensor = kserve.ModelInferRequest.InferInputTensor
    text = tensor(name="text_input", datatype="BYTES", shape=[1])
    text.contents.bytes_contents.append(b"hi")
    settings = tensor(name="sampling_parameters", datatype="BYTES", shape=[1])
    settings.contents.bytes_contents.append(b'{"temperature": 0.5, "stop": ["a"], "max_tokens": 3}')
    typed = kserve.ModelInferRequest(model_name=MODEL, id="i", inputs=[text, settings])
    typed.parameters["seed"].int64_param = 4
    typed.parameters["top_p"].double_param = 0.5
    typed.outputs.add(name="finish_reason")
    raw = kserve.ModelInferRequest(
        model_name=MODEL,
        inputs=[
            tensor(name="text_input", datatype="BYTES", shape=[1]),
            tensor(name="stream", datatype="BOOL", shape=[1]),
        ],
        raw_input_contents=[struct.pack("<I", 2) + b"hi", b"\1"],
    )
    plain = pb.ChatRequest(
        model=MODEL, messages=[pb.ChatMessage(role="user", content="hello there")], sampling=sampling
    )
    protos: list[tuple[Callable[[bytes], Any], Message]] = [
        (generate, pb.GenerateRequest(model=MODEL, text="once", sampling=sampling)),
        (generate, tokens),
        (chat, plain),
        (chat, talk),
        (embeds, pb.EmbedRequest(model=MODEL, input=["a", "b"], user="u")),
        (tokenize, pb.TokenizeRequest(model=MODEL, text="abc")),
        (tokenize, pb.TokenizeRequest(model=MODEL, chat=talk)),
        (infer, typed),
        (infer, raw),
    ]
    completion = {"model": MODEL, "max_tokens": 4}
    bodies: list[tuple[Callable[[bytes], Any], dict[str, Any]]] = [
        *((http_chat, one) for one in http_chats()),
        (http_completion, completion | {"prompt": "once", "echo": True, "logprobs": 2, "best_of": 2}),
        (http_completion, completion | {"prompt": ["a", "b"], "stop": "x", "stream": True}),
        (http_completion, completion | {"prompt": [1, 2, 3], "stop_token_ids": [3], "min_tokens": 1}),
        (http_completion, completion | {"prompt": [[1], [2, 3]], "ignore_eos": True, "top_k": 4, "min_p": 0.1}),
        (http_small, {"model": MODEL, "input": ["a", "b"], "encoding_format": "base64"}),
        (http_small, {"model": MODEL, "prompt": "abc", "return_token_strs": True}),
        (http_small, {"model": MODEL, "messages": HTTP_CHAT["messages"], "tools": [TOOL]}),
        (http_small, {"request_id": "r"}),
    ]
    out = [bytes([READERS.index(read)]) + message.SerializeToString() for read, message in protos]
    out += [bytes([READERS.index(read)]) + json.dumps(value).encode() for read, value in bodies]
    return out


def words() -> str:
    """libFuzzer's dictionary: names and values that a random change would hardly ever make."""
    values = ["1e999", "NaN", "-1", "18446744073709551616", "null", "true", "[]", "{}", "\\ud800", "\\u0000", "%json"]
    schema = ["$ref", "enum", "anyOf", "pattern", "format", "additionalProperties", "minItems", "{1,9999}", "(a*)*"]
    lines = FIELDS + values + schema
    quoted = [line.replace("\\", "\\\\").replace('"', '\\"') for line in lines]
    return "".join(f'"{line}"\n' for line in quoted)


def write_corpus(folder: Path) -> None:
    """Valid inputs, all of which are accepted, and `../words.txt`."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, sample in enumerate(samples()):
        LOOP.run_until_complete(READERS[sample[0]](sample[1:]))
        (folder / f"sample-{index:02}").write_bytes(sample)
    (folder.parent / "words.txt").write_text(words())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write-corpus"]:
        write_corpus(Path(sys.argv[2]))
    else:
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA_BYTES, MAX_DATA_BYTES))
        atheris.Setup(sys.argv, one_input, custom_mutator=mutate)
        atheris.Fuzz()
