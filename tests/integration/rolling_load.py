"""Clients of a mesh whose services are being replaced: over gRPC and over HTTP, each with one connect retry, no more.

What each is to get is known beforehand: the scripted engine's output is a function of prompt, seed and position.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import jsonschema

from kvmesh.client import Client, Retry, Stream
from kvmesh.engine.runner import SamplingParams
from kvmesh.engine.scripted import scripted_output
from kvmesh.errors import KvmeshError
from rolling_kit import Balanced, Endpoints

EOS_AFTER = 60
LIMIT_S = 240.0
LENGTHS = {"short": 8, "long": 150, "same": 2 * EOS_AFTER, "grammar": 300, "endless": 600, "greedy": 32}
URL = "http://gateway/v1"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[a-z]{6,9}$"}, "count": {"type": "integer", "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
KINDS = ("short", "long", "short", "same", "grammar", "short", "same")


@functools.lru_cache(maxsize=4096)
def expected(prompt: tuple[int, ...], seed: int, length: int, ignore_eos: bool, temperature: float) -> str:
    params = SamplingParams(max_tokens=length, seed=seed, ignore_eos=ignore_eos, temperature=temperature)
    tokens, _ = scripted_output(prompt, params, eos_after=EOS_AFTER)
    return bytes(token for token in tokens if token < 256).decode()


@dataclass(frozen=True)
class Question:
    """One request of a kind; those of kind `same` come again and again, also at the same time."""

    kind: str
    prompt: tuple[int, ...]
    seed: int
    length: int

    @classmethod
    def draw(cls, kind: str, number: int) -> Question:
        # A twin shares its number with those that are asked at about the same time.
        rng = random.Random(f"{kind} {number // 12 if kind == 'same' else number}")
        prompt = tuple(rng.randrange(33, 127) for _ in range(rng.choice([5, 40, 70, 90])))
        return cls(kind, prompt, 7 if kind == "same" else rng.randrange(1 << 20), LENGTHS[kind])

    @property
    def sampling(self) -> dict[str, Any]:
        return {
            "max_tokens": self.length,
            "seed": self.seed,
            "temperature": 0.0 if self.kind in ("same", "greedy") else 1.0,
        }

    @property
    def ignore_eos(self) -> bool:
        return self.kind in ("short", "long", "endless", "greedy")

    def check(self, text: str) -> str:
        """What is wrong with an answer, "" when nothing is."""
        if self.kind == "grammar":
            try:
                jsonschema.validate(json.loads(text), SCHEMA)
            except (ValueError, jsonschema.ValidationError) as error:
                return f"not of the grammar: {error}"
            return ""
        right = expected(self.prompt, self.seed, self.length, self.ignore_eos, self.sampling["temperature"])
        return "" if text == right else f"wrong text: {text!r} instead of {right!r}"


class Refused(Exception):
    """Nobody had accepted the request."""


@dataclass
class Load:
    """`failures`: what was accepted and is no whole and right answer. `refused`: what nobody accepted. `seen`: names of
    the gateways that accepted. `known`: of a model that is not scripted, what it said to each question in peace; these
    are asked then."""

    gateways: list[str]
    endpoints: Endpoints
    model: str
    done: Counter[str] = field(default_factory=Counter)
    caches: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    heals: int = 0
    retries: int = 0
    degraded: int = 0
    moved: int = 0
    known: dict[Question, str] = field(default_factory=dict)
    running: int = 0
    speaking: Counter[str] = field(default_factory=Counter)
    """Streams by kind that have given their first tokens, ever."""
    stopping: bool = False
    number: int = 0

    async def run(self, grpc_clients: int, http_clients: int) -> None:
        """Until `stopping`; what runs then ends."""
        transport = Balanced(self.endpoints)
        # One attempt: what is left is the connect retry of the client itself.
        async with (
            Client(self.gateways, retry=Retry(attempts=1)) as client,
            httpx.AsyncClient(transport=transport, timeout=LIMIT_S, trust_env=False) as http,
            asyncio.TaskGroup() as group,
        ):
            for index in range(grpc_clients):
                group.create_task(self._loop("grpc", client, index))
            for index in range(http_clients):
                group.create_task(self._loop("http", http, index + 3))

    async def learn(self, texts: Sequence[str]) -> None:
        """Ask these questions, one after the other, and take the answers for right."""
        async with Client(self.gateways) as client:
            for text in texts:
                prompt = tuple((await client.tokenize(text, model=self.model)).token_ids)
                question = Question("greedy", prompt, 0, LENGTHS["greedy"])
                self.known[question] = await self._grpc(client, question)

    def _draw(self, kind: str) -> Question:
        self.number += 1
        if self.known:
            return list(self.known)[self.number % len(self.known)]
        return Question.draw(kind, self.number)

    def _wrong(self, question: Question, text: str) -> str:
        if not self.known:
            return question.check(text)
        right = self.known[question]
        return "" if text == right else f"wrong text: {text!r} instead of {right!r}"

    async def _loop(self, face: str, client: Any, at: int) -> None:
        while not self.stopping:
            at += 1
            await self.ask(face, client, self._draw(KINDS[at % len(KINDS)]))

    async def ask(self, face: str, client: Any, question: Question) -> None:
        """One request, to its end."""
        self.running += 1
        try:
            text = await (self._grpc(client, question) if face == "grpc" else self._http(client, question))
            why = self._wrong(question, text)
        except Refused as error:
            self.refused.append(f"{face} {question.kind}: {error}")
            await asyncio.sleep(0.05)
            return
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        finally:
            self.running -= 1
        if why:
            self.failures.append(f"{face} {question.kind}: {why}")
        else:
            self.done[f"{face} {question.kind}"] += 1

    async def _grpc(self, client: Client, question: Question) -> str:
        stream = client.generate(
            question.prompt,
            model=self.model,
            ignore_eos=question.ignore_eos,
            json_schema=SCHEMA if question.kind == "grammar" else None,
            cache="exact" if question.kind == "same" else "off",
            timeout_s=LIMIT_S,
            **question.sampling,
        )
        try:
            return await self._read(stream, question)
        except KvmeshError as error:
            if stream.accepted is None:
                raise Refused(f"{error.reason}: {error.message}") from None
            raise

    async def _read(self, stream: Stream, question: Question) -> str:
        text, spoke, terminal = "", False, 0
        async with stream:
            async for event in stream:
                assert not terminal, "an event after the end"
                if event.HasField("accepted"):
                    self.seen[event.accepted.request_id.partition("-")[0]] += 1
                elif event.HasField("delta"):
                    self.speaking[question.kind] += not spoke
                    spoke = True
                    text += event.delta.text
                elif event.HasField("error"):
                    raise AssertionError(f"error event {event.error.reason}: {event.error.message}")
                elif event.HasField("finished"):
                    terminal += 1
                    served = event.finished.served
                    self.heals += served.heals
                    self.retries += served.retries
                    self.degraded += served.degraded
                    self.moved += served.transfer_bytes > 0
                    self.caches[served.cache] += 1
        assert terminal == 1, "no terminal event"
        return text

    async def _http(self, client: httpx.AsyncClient, question: Question) -> str:
        try:
            return await self._post(client, question)
        except httpx.ConnectError as error:
            raise Refused(repr(error)) from None

    async def _post(self, client: httpx.AsyncClient, question: Question) -> str:
        fields = question.sampling | {"model": self.model, "ignore_eos": question.ignore_eos}
        if question.kind == "grammar":
            return await self._http_call(client, question, fields)
        fields["prompt"] = list(question.prompt)
        if question.kind == "short":
            reply = await client.post(f"{URL}/completions", json=fields)
            if reply.status_code != 200:
                raise Refused(f"{reply.status_code} {reply.text}")
            whole: str = reply.json()["choices"][0]["text"]
            return whole
        return "".join([choice["text"] async for choice in _choices(client, "completions", fields)])

    async def _http_call(self, client: httpx.AsyncClient, question: Question, fields: dict[str, Any]) -> str:
        """The arguments of a tool that must be called."""
        function = {"name": "note", "parameters": SCHEMA, "strict": True}
        text = "".join(map(chr, question.prompt))
        fields |= {
            "messages": [{"role": "user", "content": text}],
            "tools": [{"type": "function", "function": function}],
            "tool_choice": "required",
        }
        arguments = ""
        async for choice in _choices(client, "chat/completions", fields):
            for call in choice["delta"].get("tool_calls") or ():
                arguments += call["function"].get("arguments") or ""
        return arguments


async def _choices(client: httpx.AsyncClient, path: str, fields: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Of a stream of one choice, which must come to its end."""
    done = False
    async with client.stream("POST", f"{URL}/{path}", json=fields | {"stream": True}) as reply:
        if reply.status_code != 200:
            raise Refused(f"{reply.status_code} {await reply.aread()!r}")
        async for line in reply.aiter_lines():
            if not line.startswith("data: "):
                continue
            assert not done, "an event after the end"
            if line == "data: [DONE]":
                done = True
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                yield choice
    assert done, "no end"
