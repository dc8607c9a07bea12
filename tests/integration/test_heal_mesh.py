"""kill -9 of a decode worker under streams: every client gets the text that it would have got anyway."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter

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


class Asked:
    """One stream: its prompt, what came, and what was to come."""

    def __init__(self, index: int) -> None:
        rng = random.Random(index)
        self.prompt = [rng.randrange(33, 127) for _ in range(rng.choice([3, 40, 90]))]
        self.choices = 1 + (index % 10 == 0)
        self.length = 80
        self.seed = index
        self.tokens: dict[int, list[int]] = {choice: [] for choice in range(self.choices)}
        self.text = dict.fromkeys(self.tokens, "")
        self.kinds: Counter[str] = Counter()
        self.served = pb.Served()
        self.error = ""

    async def ask(self, client: Client, begun: asyncio.Semaphore) -> None:
        in_middle = False
        async with client.generate(
            self.prompt, max_tokens=self.length, n=self.choices, seed=self.seed, temperature=1.0, ignore_eos=True
        ) as stream:
            async for event in stream:
                self.kinds[str(event.WhichOneof("event"))] += 1
                if event.HasField("delta"):
                    self.tokens[event.delta.choice] += event.delta.token_ids
                    self.text[event.delta.choice] += event.delta.text
                    if not in_middle and len(self.tokens[0]) > self.seed % 7:
                        in_middle = True
                        begun.release()
                elif event.HasField("error"):
                    self.error = event.error.message
                elif event.HasField("finished"):
                    self.served = event.finished.served
                    tokens = event.finished.usage.completion_tokens
                    assert tokens == self.length * self.choices

    def check(self) -> None:
        """Whole, once, and what the model says undisturbed."""
        assert not self.error
        params = SamplingParams(max_tokens=self.length, seed=self.seed, ignore_eos=True)
        for choice, tokens in self.tokens.items():
            assert tokens == scripted_output(self.prompt, params, choice)[0]
            assert self.text[choice].encode() == bytes(tokens)
        assert self.kinds["accepted"] == self.kinds["finished"] == 1


async def test_every_stream_goes_on_when_decode_is_killed() -> None:
    async with mesh_up(cache=False, decode=2, settings=SETTINGS) as mesh:
        for index in range(ROUNDS):
            await one_round(mesh, f"decode-{index % 2}")


async def one_round(mesh: Mesh, victim: str) -> None:
    asked = [Asked(index) for index in range(STREAMS)]
    async with Client(mesh.gateway) as client, asyncio.TaskGroup() as group, asyncio.timeout(240):
        begun = asyncio.Semaphore(0)
        for one in asked:
            group.create_task(one.ask(client, begun))
        # Both workers have some of those that are in the middle; others are queued, or have their KV on its way.
        for _ in range(STREAMS // 2):
            await begun.acquire()
        mesh.kill(victim)
    for one in asked:
        one.check()
    assert any(one.served.heals for one in asked)
    await settled(mesh, "decode-0", "decode-1", "prefill-0")
