"""kill -9 of a decode worker under streams: every client gets the text that it would have got anyway, and what has a
grammar still keeps to it."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from typing import Any

import jsonschema

from kvmesh.client import Client
from kvmesh.engine.runner import SamplingParams
from kvmesh.engine.scripted import scripted_output
from kvmesh.proto.v1 import inference_pb2 as pb
from mesh_kit import Mesh, mesh_up, settled

STREAMS = 100
ROUNDS = 3 if os.environ.get("KVMESH_SOAK") else 1
SETTINGS = {
    "decode.scripted_step_ms": "20",
    "decode.num_pages": "4096",
    "decode.max_batch": "64",
    "prefill.num_pages": "1024",
    # A worker that waits for a processor is no lost worker; a killed one is noticed by its connection.
    "gateway.heartbeats_missed": "30",
    "gateway.heal_wait_s": "60",
}
# What it lets through takes about as many tokens as the others get.
SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 3,
    "maxItems": 3,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z]{6,9}$"},
            "count": {"type": "integer", "minimum": 0, "maximum": 999},
        },
        "required": ["name", "count"],
        "additionalProperties": False,
    },
}


class Asked:
    """One stream: its prompt, what came, and what was to come."""

    def __init__(self, index: int) -> None:
        rng = random.Random(index)
        self.prompt = [rng.randrange(33, 127) for _ in range(rng.choice([3, 40, 90]))]
        self.choices = 1 + (index % 10 == 0)
        self.grammar = index % 5 == 3
        self.length = 300 if self.grammar else 80
        self.seed = index
        self.tokens: dict[int, list[int]] = {choice: [] for choice in range(self.choices)}
        self.text = dict.fromkeys(self.tokens, "")
        self.scored: list[int] = []
        self.kinds: Counter[str] = Counter()
        self.served = pb.Served()
        self.error = ""

    async def ask(self, client: Client, *begun: asyncio.Semaphore) -> None:
        in_middle = False
        async with client.generate(
            self.prompt,
            max_tokens=self.length,
            n=self.choices,
            seed=self.seed,
            temperature=1.0,
            ignore_eos=not self.grammar,
            json_schema=SCHEMA if self.grammar else None,
            logprobs=0 if self.seed % 2 else None,
        ) as stream:
            async for event in stream:
                self.kinds[str(event.WhichOneof("event"))] += 1
                if event.HasField("delta"):
                    self.tokens[event.delta.choice] += event.delta.token_ids
                    self.text[event.delta.choice] += event.delta.text
                    self.scored += [entry.token_id for entry in event.delta.logprobs]
                    if not in_middle and len(self.tokens[0]) > self.seed % 7:
                        in_middle = True
                        for each in begun:
                            each.release()
                elif event.HasField("error"):
                    self.error = event.error.message
                elif event.HasField("finished"):
                    self.served = event.finished.served
                    assert event.finished.usage.completion_tokens == sum(map(len, self.tokens.values()))

    def check(self) -> None:
        """Whole, once, and what the model says undisturbed."""
        assert not self.error
        assert self.kinds["accepted"] == self.kinds["finished"] == 1
        said = [token for tokens in self.tokens.values() for token in tokens]
        assert Counter(self.scored) == Counter(said if self.seed % 2 else [])
        if self.grammar:
            jsonschema.validate(json.loads(self.text[0]), SCHEMA)
            return
        params = SamplingParams(max_tokens=self.length, seed=self.seed, ignore_eos=True)
        for choice, tokens in self.tokens.items():
            assert tokens == scripted_output(self.prompt, params, choice)[0]
            assert self.text[choice].encode() == bytes(tokens)


async def test_every_stream_goes_on_when_decode_is_killed() -> None:
    async with mesh_up(cache=False, decode=2, settings=SETTINGS) as mesh:
        for index in range(ROUNDS):
            await one_round(mesh, f"decode-{index % 2}")


async def one_round(mesh: Mesh, victim: str) -> None:
    asked = [Asked(index) for index in range(STREAMS)]
    async with Client(mesh.gateway) as client, asyncio.TaskGroup() as group, asyncio.timeout(240):
        begun, grammars = asyncio.Semaphore(0), asyncio.Semaphore(0)
        for one in asked:
            group.create_task(one.ask(client, begun, *[grammars] * one.grammar))
        # Both workers have some of those that are in the middle; others are queued, or have their KV on its way.
        for _ in range(STREAMS // 2):
            await begun.acquire()
        # Those come later: theirs is compiled first.
        for _ in range(STREAMS // 8):
            await grammars.acquire()
        mesh.kill(victim)
    for one in asked:
        one.check()
    healed = [one for one in asked if one.grammar and one.served.heals]
    assert healed
    # A choice of them, asked again: nothing is different where nobody dies.
    async with Client(mesh.gateway) as client, asyncio.TaskGroup() as group:
        again = [Asked(one.seed) for one in healed[:4]]
        for one in again:
            group.create_task(one.ask(client))
    assert [one.text for one in again] == [one.text for one in healed[:4]]
    await settled(mesh, "decode-0", "decode-1", "prefill-0")
