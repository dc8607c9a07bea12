"""Streamed = whole, over both faces: whatever a client asks by, it reads the same text, calls and end.

Text of every script, with the tokens of SmolLM2 and one token a byte, in frames cut anywhere, and a stop string at
every split of it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from gateway_fakes import FakeWorker
from gateway_world import World
from http_world import CHAT, client, events
from kvmesh.loading.tokenizer import load_tokenizer
from kvmesh.proto.v1 import engine_pb2
from kvmesh.proto.v1 import inference_pb2 as pb
from services.gateway.tokenizers import ModelTokenizer

CORPUS = {
    "emoji": "👨‍👩‍👧‍👦 🏴‍☠️🇨🇭 👍🏽 1️⃣!",
    "cjk": "日本語。中文，한국어 𠮷野家",
    "combining": "e\u0301a\u0308\u0323 Z\u0351\u036b\u0343algo ﬁ",
    "rtl": "שלום مرحبا \u200fABC\u200e",
    "code": "def f(x):\n\treturn {'a': \"\\n\"}  # <b>\r\n\n",
    "spaces": "  two \u00a0 and\u3000wide \u2028 ",
    "indic": "नमस्ते क्षत्रिय தமிழ்",
    "broken": "a\ufffdb\ufffd\ufffd",
}
# A call whose arguments hold the text, and words around it.
CALL = 'Hm.\n<tool_call>\n{{"name": "f", "arguments": {{"x": {}}}}}\n</tool_call>\n'
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "string"}}}}}
# All of it with both tokenizers; else each place of the text with one of them.
FULL = bool(os.environ.get("KVMESH_SOAK"))
TOKENIZERS = ("smollm2", "scripted")
BY_FIELD = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length", pb.FINISH_REASON_TOOL_CALLS: "tool_calls"}


@dataclass
class Read:
    """What a client read of one answer."""

    text: str = ""
    finish: str = ""
    tokens: int = 0
    calls: list[list[str]] = field(default_factory=list)

    def call(self, index: int, call_id: str | None, name: str | None, arguments: str) -> None:
        if index == len(self.calls):
            self.calls.append([call_id or "", name or "", ""])
        self.calls[index][2] += arguments


class Script:
    """What the worker says next, and where its frames are cut."""

    def __init__(self, tokenizer: ModelTokenizer, eos: int) -> None:
        self.tokenizer, self.eos = tokenizer, eos
        self.ids: list[int] = []
        self.cuts: list[int] = []
        self.ends = True
        self.worker: FakeWorker

    def cut(self, draw: random.Random) -> None:
        """A frame a token, all in one, or in between."""
        places = range(len(self.ids))
        self.cuts = draw.sample(places, min(draw.choice((0, 1, 3, 6, len(places))), len(places)))

    async def play(self, request: engine_pb2.SubmitRequest) -> None:
        edges = sorted({0, len(self.ids), *self.cuts})
        for start, stop in itertools.pairwise(edges):
            self.worker.tokens(request, self.ids[start:stop], start)
        if self.ends:
            last: dict[str, Any] = {"finish_reason": pb.FINISH_REASON_STOP, "stop_token_id": self.eos}
            self.worker.tokens(request, [self.eos], len(self.ids), **last)
        else:
            self.worker.tokens(request, [], len(self.ids), finish_reason=pb.FINISH_REASON_LENGTH)
        self.worker.end(request, completion_tokens=len(self.ids) + self.ends)


@asynccontextmanager
async def serving(world: World, name: str) -> AsyncIterator[tuple[Script, httpx.AsyncClient]]:
    """A gateway with both faces before a worker that plays the script."""
    bundle = load_tokenizer(name)
    eos = min(bundle.eos_token_ids)
    script = Script(ModelTokenizer(bundle), eos)
    script.worker = worker = await world.worker(model=name)
    worker.on_submit = script.play
    worker.info.tokenizer_fingerprint = bundle.fingerprint
    worker.info.eos_token_ids[:] = [eos]
    await world.start(static=True, model=name, http_listen="127.0.0.1:0")
    assert world.gateway.http is not None
    async with client(world.gateway.http.address) as http:
        yield script, http


async def by_grpc(world: World, name: str, stops: list[str], *, tools: bool) -> Read:
    read = Read()
    given = [pb.Tool(name="f", parameters=json.dumps(TOOL["function"]["parameters"]))] if tools else []  # type: ignore[index]
    for event in await world.ask(model=name, sampling={"stop": stops, "seed": 1}, tools=given):
        read.text += event.delta.text
        for part in event.delta.tool_calls:
            read.call(part.index, part.id, part.name, part.arguments)
        read.finish = BY_FIELD.get(event.delta.finish_reason, read.finish)
        read.tokens = event.finished.usage.completion_tokens
    return read


async def by_http(http: httpx.AsyncClient, name: str, stops: list[str], *, stream: bool, tools: bool) -> Read:
    body: dict[str, Any] = {"model": name, "messages": [{"role": "user", "content": "hi"}], "seed": 1, "stop": stops}
    if tools:
        body["tools"] = [TOOL]
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    reply = await http.post(CHAT, json=body)
    assert reply.status_code == 200, reply.text
    read = Read()
    if not stream:
        answer = reply.json()
        (choice,) = answer["choices"]
        read.text, read.finish = choice["message"]["content"] or "", choice["finish_reason"]
        read.tokens = answer["usage"]["completion_tokens"]
        for index, call in enumerate(choice["message"].get("tool_calls", ())):
            read.call(index, call["id"], call["function"]["name"], call["function"]["arguments"])
        return read
    *chunks, done = events(reply.content)
    assert done == "[DONE]"
    for chunk in chunks:
        for choice in chunk["choices"]:
            read.text += choice["delta"].get("content") or ""
            read.finish = choice["finish_reason"] or read.finish
            for call in choice["delta"].get("tool_calls", ()):
                function = call["function"]
                read.call(call["index"], call.get("id"), function.get("name"), function["arguments"])
        read.tokens = (chunk["usage"] or {}).get("completion_tokens", read.tokens)
    return read


def expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text up to the stop string that is complete first, and whether there was one."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            return text[: end - len(max(met, key=len))], True
    return text, False


async def all_ways(world: World, http: httpx.AsyncClient, name: str, stops: list[str], *, tools: bool = False) -> Read:
    """Asked by each face, streamed and whole; what all of them read."""
    async with asyncio.timeout(60):
        reads = [
            await by_grpc(world, name, stops, tools=tools),
            await by_http(http, name, stops, stream=True, tools=tools),
            await by_http(http, name, stops, stream=False, tools=tools),
        ]
    assert reads[0] == reads[1] == reads[2], (stops, reads)
    return reads[0]


def stops_at(text: str, draw: random.Random) -> list[list[str]]:
    """For every place of the text a stop string that begins there, some with one beside it that nearly matches."""
    found: list[list[str]] = []
    for start in range(len(text)):
        stops = [text[start : start + draw.randint(1, 4)]]
        if draw.random() < 0.5:
            near = text[max(0, start - 1) : start + 1] + draw.choice("x\u0301👧\n")
            stops.append(near)
        found.append(list(dict.fromkeys(stops)))
    return found


@pytest.mark.parametrize("name", TOKENIZERS)
async def test_text_with_a_stop_string_at_every_split(world: World, name: str) -> None:
    draw = random.Random(1)
    async with serving(world, name) as (script, http):
        for text in CORPUS.values():
            script.ids = list(script.tokenizer._tokenizer.encode(text, add_special_tokens=False).ids)
            assert script.tokenizer.decode(script.ids) == text
            places = stops_at(text, draw)
            for stops in [[], *(places if FULL else places[TOKENIZERS.index(name) :: len(TOKENIZERS)])]:
                script.cut(draw)
                script.ends = draw.random() < 0.5
                shown, stopped = expected(text, stops)
                read = await all_ways(world, http, name, stops)
                assert read.text == shown, (stops, script.cuts)
                assert read.finish == ("stop" if stopped or script.ends else "length")
                assert stopped or read.tokens == len(script.ids) + script.ends


@pytest.mark.parametrize("name", TOKENIZERS)
async def test_calls_with_the_text_in_their_arguments(world: World, name: str) -> None:
    draw = random.Random(2)
    async with serving(world, name) as (script, http):
        for text in CORPUS.values():
            arguments = json.dumps(text, ensure_ascii=draw.random() < 0.3)
            said = CALL.format(arguments)
            script.ids = list(script.tokenizer._tokenizer.encode(said, add_special_tokens=False).ids)
            for _ in range(2):
                script.cut(draw)
                read = await all_ways(world, http, name, [], tools=True)
                assert (read.text, read.finish) == ("Hm.", "tool_calls")
                ((_, function, given),) = read.calls
                assert (function, json.loads(given)) == ("f", {"x": text})
            for stops in stops_at(said, draw) if FULL else draw.sample(stops_at(said, draw), 3):
                read = await all_ways(world, http, name, stops, tools=True)
                shown, _ = expected(said, stops)
                assert ("Hm." + CALL[3:]).startswith(read.text[:3])
                assert len(read.calls) == ('"arguments": {' in shown)
                assert read.finish == ("tool_calls" if f'{{"x": {arguments}}}' in shown else "stop")
