"""Answers of both kinds: choices, log-probabilities, echo, tools, reasoning; streamed equals whole."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import openai
import pytest

from gateway_fakes import EOS, MODEL, WAIT_S
from gateway_world import World
from http_world import CHAT, Reply, chat, events, post, start_http, text_of
from kvmesh.proto.v1 import engine_pb2
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.rpc.credentials import Principal
from services.gateway.front import Front
from services.gateway.http.chat import ChatBody, ChatChunks

COMPLETIONS = "/v1/completions"
ACCEPTED = pb.Accepted(request_id="r", model="m", revision="1", prompt_tokens=3)
END = pb.Finished(usage=pb.Usage(prompt_tokens=3, completion_tokens=5, cached_tokens=2))


def scored(ids: bytes | list[int]) -> list[pb.TokenLogprob]:
    return [
        pb.TokenLogprob(token_id=one, logprob=-0.5, rank=1, top=[pb.TopLogprob(token_id=one, logprob=-0.5)])
        for one in ids
    ]


def prompt(text: Any = "once", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": text} | fields


async def test_completions_in_one_body_and_streamed(world: World) -> None:
    worker = await world.worker(text="upon")
    url = await start_http(world)
    body = (await post(url, COMPLETIONS, prompt(), headers={"x-request-id": "mine"})).json()
    assert body["id"] == "cmpl-mine"
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"text": "upon", "index": 0, "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"]["prompt_tokens"] == 4
    assert worker.submits.items[0].sampling.max_tokens == 16
    reply = await post(url, COMPLETIONS, prompt(stream=True, stream_options={"include_usage": True}))
    chunks = events(reply.body)
    assert chunks.pop() == "[DONE]"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == body["usage"]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == "upon"
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"


async def test_several_prompts_are_choices_of_one_answer(world: World) -> None:
    worker = await world.worker()

    async def reverse(request: engine_pb2.SubmitRequest) -> None:
        text = bytes(reversed([token for token in request.token_ids[: request.prompt_len] if token < 256])).decode()
        worker.answer(request, text)

    worker.on_submit = reverse
    url = await start_http(world)
    given = prompt(["abc", "de", "f"], n=2)
    body = (await post(url, COMPLETIONS, given)).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert [choice["text"] for choice in body["choices"]] == ["cba", "cba", "ed", "ed", "f", "f"]
    assert body["usage"]["prompt_tokens"] == 6
    chunks = events((await post(url, COMPLETIONS, given | {"stream": True})).body)
    assert chunks.pop() == "[DONE]"
    texts = [""] * 6
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["cba", "cba", "ed", "ed", "f", "f"]
    body = (await post(url, COMPLETIONS, prompt([[97, 98], [99]]))).json()
    assert [choice["text"] for choice in body["choices"]] == ["ba", "c"]
    await world.until(world.idle)


async def test_one_of_several_prompts_fails_for_all(world: World) -> None:
    await world.worker(text="ok")
    url = await start_http(world)
    for stream in (False, True):
        reply = await post(url, COMPLETIONS, prompt(["fine", "x" * 2000], stream=stream, n=1))
        if reply.status == 400:
            assert reply.error["code"] == "context_length_exceeded"
        else:
            # The first prompt's answer was on its way already.
            assert stream
            assert b"context_length_exceeded" in reply.body
            assert b"[DONE]" not in reply.body
    await world.until(world.idle)


async def test_scores_of_chats_and_completions(world: World) -> None:
    worker = await world.worker()

    async def score(request: engine_pb2.SubmitRequest) -> None:
        ids = list("é!".encode())
        for position, token in enumerate(ids):
            worker.tokens(request, [token], position, logprobs=scored([token]))
        worker.tokens(request, [EOS], len(ids), finish_reason=pb.FINISH_REASON_STOP, stop_token_id=EOS)
        worker.end(request)

    worker.on_submit = score
    url = await start_http(world)
    body = (await post(url, CHAT, chat(logprobs=True, top_logprobs=1))).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9], [0x21]]
    assert content[2] == {
        "token": "!",
        "logprob": -0.5,
        "bytes": [0x21],
        "top_logprobs": [{"token": "!", "logprob": -0.5, "bytes": [0x21]}],
    }
    chunks = events((await post(url, CHAT, chat(logprobs=True, top_logprobs=1, stream=True))).body)[:-1]
    streamed = [
        entry
        for chunk in chunks
        for choice in chunk["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == content
    assert text_of(chunks) == body["choices"][0]["message"]["content"] == "é!"
    (choice,) = (await post(url, COMPLETIONS, prompt(logprobs=1))).json()["choices"]
    assert choice["logprobs"] == {
        "tokens": ["bytes:\\xc3", "bytes:\\xa9", "!"],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "top_logprobs": [{"bytes:\\xc3": -0.5}, {"bytes:\\xa9": -0.5}, {"!": -0.5}],
        "text_offset": [0, 0, 1],
    }


async def test_echo(world: World) -> None:
    worker = await world.worker(role=engine_pb2.WORKER_ROLE_UNIFIED)

    async def score(request: engine_pb2.SubmitRequest) -> None:
        if request.sampling.HasField("prompt_logprobs"):
            ids = request.token_ids[1 : request.prompt_len]
            worker.frame(
                request,
                prompts=[
                    engine_pb2.PromptLogprobs(
                        request_id=request.request_id, attempt=request.attempt, logprobs=scored(list(ids))
                    )
                ],
            )
        logprobs = scored(b"!") if request.sampling.HasField("logprobs") else []
        worker.tokens(request, [0x21], logprobs=logprobs, finish_reason=pb.FINISH_REASON_LENGTH)
        worker.end(request)

    worker.on_submit = score
    url = await start_http(world)
    for given in ("héy", list("héy".encode())):
        for stream in (False, True):
            reply = await post(url, COMPLETIONS, prompt(given, echo=True, stream=stream))
            assert whole_text(reply, stream) == "héy!", reply.body
    (choice,) = (await post(url, COMPLETIONS, prompt("hey", echo=True, logprobs=1, max_tokens=1))).json()["choices"]
    assert choice["text"] == "hey!"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["h", "e", "y", "!"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert choice["logprobs"]["top_logprobs"][:2] == [None, {"e": -0.5}]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
    (choice,) = (await post(url, COMPLETIONS, prompt("hey", echo=True, logprobs=1, max_tokens=0))).json()["choices"]
    assert choice["text"] == "hey"
    assert choice["logprobs"]["tokens"] == ["h", "e", "y"]
    assert choice["finish_reason"] == "length"


async def test_scores_of_a_prompt_need_a_unified_worker(world: World) -> None:
    await world.worker(text="ok")
    url = await start_http(world)
    reply = await post(url, COMPLETIONS, prompt("hey", echo=True, logprobs=1))
    assert reply.status == 400, reply.body
    assert (await post(url, COMPLETIONS, prompt("hey", echo=True))).status == 200


def whole_text(reply: Reply, stream: bool) -> str:
    if not stream:
        text: str = reply.json()["choices"][0]["text"]
        return text
    chunks = events(reply.body)
    assert chunks[-1] == "[DONE]"
    return "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1])


async def test_every_parameter_reaches_the_worker(world: World) -> None:
    worker = await world.worker(text="ok")
    url = await start_http(world)
    given = {
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "min_tokens": 2,
        "ignore_eos": False,
        "n": 2,
    }
    more = {
        "stop": "zzz",
        "seed": -1,
        "logit_bias": {"65": 1.5},
        "stop_token_ids": [66],
        "max_tokens": 5,
        "max_completion_tokens": 9,
        "user": "someone",
        "session_id": "s",
        # Known and of no consequence.
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "safety_identifier": "u",
        "verbosity": "low",
        "modalities": ["text"],
        "parallel_tool_calls": True,
    }
    absent = {"tools": None, "response_format": None, "logprobs": None, "stream_options": None, "audio": None}
    reply = await post(url, CHAT, chat(**given, **more, **absent))
    assert reply.status == 200, reply.body
    sampling = worker.submits.items[0].sampling
    assert {name: getattr(sampling, name) for name in given} == given
    assert sampling.max_tokens == 9
    assert sampling.seed == 2**64 - 1
    assert dict(sampling.logit_bias) == {65: 1.5}
    assert list(sampling.stop_token_ids) == [66]
    assert [choice["index"] for choice in reply.json()["choices"]] == [0, 1]
    chunks = events((await post(url, CHAT, chat(n=2, stream=True))).body)[:-1]
    for index in (0, 1):
        mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert text_of(chunks, index) == "ok"
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["stop"]
    assert (await post(url, CHAT, chat(top_k=-1))).status == 200
    assert worker.submits.items[-1].sampling.top_k == 0


async def test_messages_of_all_kinds(world: World) -> None:
    await world.worker(text="ok")
    url = await start_http(world)
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "x"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
        {"role": "assistant", "content": "so", "refusal": None, "annotations": [], "audio": None},
        {"role": "user", "content": ""},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    reply = await post(url, CHAT, chat(messages=messages, tools=tools, tool_choice="none"))
    assert reply.status == 200, reply.body


async def test_calls_of_tools_streamed_and_whole(world: World) -> None:
    said = 'Let me look.<tool_call>\n{"name": "look", "arguments": {"where": "Zürich"}}\n</tool_call>'
    await world.worker(text=said)
    url = await start_http(world)
    parameters = {"type": "object", "properties": {"where": {"type": "string"}}}
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": parameters}}]
    body = (await post(url, CHAT, chat(tools=tools))).json()
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "look")
    assert json.loads(call["function"]["arguments"]) == {"where": "Zürich"}
    assert choice["message"]["content"] == "Let me look."
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as http:
        messages: Any = chat()["messages"]
        async with http.chat.completions.stream(model=MODEL, messages=messages, tools=tools) as stream:
            final = await stream.get_final_completion()
    message = final.choices[0].message
    assert final.choices[0].finish_reason == "tool_calls"
    assert message.content == "Let me look."
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.arguments == call["function"]["arguments"]
    assert message.tool_calls[0].id


async def test_details_only_where_they_are_asked_for(world: World) -> None:
    await world.worker(text="ok")
    url = await start_http(world)
    asked = {"headers": {"x-kvmesh-details": "1"}}
    assert "kvmesh" not in (await post(url, CHAT, chat())).json()
    assert (await post(url, CHAT, chat(), **asked)).json()["kvmesh"]["decode_worker"] == "decode-0"
    chunks = events((await post(url, CHAT, chat(stream=True), **asked)).body)
    assert chunks[-2]["choices"] == []
    assert chunks[-2]["kvmesh"]["cache"] == "bypass"
    body = (await post(url, COMPLETIONS, prompt(["a", "b"]), **asked)).json()
    assert len(body["kvmesh"]["prompts"]) == 2


async def test_tokens_of_texts_and_chats(world: World) -> None:
    await world.worker()
    url = await start_http(world)
    found = (await post(url, "/tokenize", {"model": MODEL, "prompt": "hé", "return_token_strs": True})).json()
    assert found["tokens"] == list("hé".encode())
    assert found["count"] == 3
    assert found["max_model_len"] == 1024
    assert len(found["token_strs"]) == 3
    found = (await post(url, "/tokenize", {"model": MODEL, "messages": chat()["messages"]})).json()
    assert found["count"] == len(found["tokens"]) > 2
    assert (await post(url, "/tokenize", {"model": MODEL})).status == 400


async def test_vectors(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.worker()
    url = await start_http(world)
    asked: list[pb.EmbedRequest] = []

    async def embed(self: Front, principal: Principal, request: pb.EmbedRequest) -> pb.EmbedResponse:
        asked.append(request)
        vectors = [pb.Embedding(values=[0.5, -0.25]) for _ in request.input]
        return pb.EmbedResponse(model="e", embeddings=vectors, usage=pb.Usage(prompt_tokens=7))

    monkeypatch.setattr(Front, "embed", embed)
    body = (await post(url, "/v1/embeddings", {"model": "e", "input": ["a", "b"], "user": "u"})).json()
    assert list(asked[0].input) == ["a", "b"]
    assert body["data"][1] == {"object": "embedding", "index": 1, "embedding": [0.5, -0.25]}
    assert body["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    packed = {"model": "e", "input": "a", "encoding_format": "base64"}
    (one,) = (await post(url, "/v1/embeddings", packed)).json()["data"]
    assert struct.unpack("<2f", base64.b64decode(one["embedding"])) == (0.5, -0.25)


# --- rendering alone: what readers of tools and reasoning hand over
DELTAS = [
    pb.Delta(choice=0, reasoning="let me", token_ids=[1, 2]),
    pb.Delta(choice=0, reasoning=" see\u2028", text="a\u0085", token_ids=[3]),
    pb.Delta(choice=0, tool_calls=[pb.ToolCallDelta(index=0, id="c0", name="f")]),
    pb.Delta(choice=0, tool_calls=[pb.ToolCallDelta(index=0, arguments='{"x":')]),
    pb.Delta(
        choice=0,
        tool_calls=[
            pb.ToolCallDelta(index=0, arguments='"ü"}'),
            pb.ToolCallDelta(index=1, id="c1", name="g", arguments="{}"),
        ],
        finish_reason=pb.FINISH_REASON_TOOL_CALLS,
    ),
]


def test_tools_and_reasoning_in_one_body() -> None:
    whole = ChatBody("chatcmpl-r", 1, logprobs=False)
    whole.accepted(ACCEPTED)
    for delta in DELTAS:
        assert whole.delta(delta) == b""
    raw = whole.whole([END], details=False)
    assert len(raw.decode().splitlines()) == 1
    body = Reply(200, {}, raw).json()
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": "a\u0085",
        "refusal": None,
        "annotations": [],
        "reasoning_content": "let me see\u2028",
        "reasoning": "let me see\u2028",
        "tool_calls": [
            {"id": "c0", "type": "function", "function": {"name": "f", "arguments": '{"x":"ü"}'}},
            {"id": "c1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 2


def test_tools_and_reasoning_streamed() -> None:
    render = ChatChunks("chatcmpl-r", 1, with_usage=False)
    render.accepted(ACCEPTED)
    raw = b"".join(render.delta(delta) for delta in DELTAS) + render.last([END], details=False)
    chunks = events(raw)
    assert chunks.pop() == "[DONE]"
    assert all("usage" not in chunk for chunk in chunks)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [
        {"role": "assistant", "content": "", "refusal": None},
        {"reasoning_content": "let me", "reasoning": "let me"},
        {"reasoning_content": " see\u2028", "reasoning": " see\u2028"},
        {"content": "a\u0085"},
        {"tool_calls": [{"index": 0, "id": "c0", "type": "function", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"x":'}}]},
        {
            "tool_calls": [
                {"index": 0, "function": {"arguments": '"ü"}'}},
                {"index": 1, "id": "c1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
            ]
        },
        {},
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    # What tools alone say has no content.
    calls = ChatBody("x", 1, logprobs=False)
    calls.accepted(ACCEPTED)
    calls.delta(DELTAS[-1])
    assert json.loads(calls.whole([END], details=False))["choices"][0]["message"]["content"] is None
