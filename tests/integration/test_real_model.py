"""The mesh on the real chat model: `make run ONCE=1` and what it promises."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kvmesh.cli.plan import MeshOptions
from kvmesh.client import Client
from kvmesh.proto.v1 import inference_pb2 as pb
from mesh_kit import PATIENT, Mesh, answer, mesh_up, until

REAL = MeshOptions(gateway_port=0, threads=1, settings=PATIENT)
pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]
QUESTION = "Name three colours of the rainbow, please, in one short sentence."


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def apart() -> str:
    """What prefill and decode answer in fp32; they are gone again, and their memory with them."""
    async with mesh_up(REAL, dtype="fp32", cache=False) as mesh:
        text, finished = await answer(mesh, QUESTION, max_tokens=24)
        assert finished.served.transfer_bytes > 0
    return text


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def unified() -> AsyncIterator[Mesh]:
    """Two unified workers in fp32. One that was killed may still be starting."""
    async with mesh_up(REAL, dtype="fp32", cache=False, prefill=0, decode=0, unified=2) as mesh:
        yield mesh


async def test_it_knows_the_capital_of_france() -> None:
    async with mesh_up(REAL) as mesh:
        text, finished = await answer(mesh, "What is the capital of France?", max_tokens=64)
        assert "Paris" in text
        assert finished.served.transfer_bytes > 0
        assert finished.served.transport == "shm"
        assert finished.served.prefill_worker
        assert finished.served.ttft_ms > 0

        async def exact() -> bool:
            again, done = await answer(mesh, "What is the capital of France?", max_tokens=64)
            assert again == text
            return bool(done.served.cache == "exact")

        await until(exact, "the second answer from the exact cache", timeout_s=120)


async def test_prefill_killed_while_the_real_model_prefills() -> None:
    text = "Tell me about rivers. " * 60
    async with mesh_up(REAL, cache=False, settings={"prefill.chunk_size": "32"}) as mesh:
        asked = asyncio.create_task(answer(mesh, text, max_tokens=8))

        async def moving() -> bool:
            reply = (await mesh.status()).sidecars["decode-0"]
            return bool(reply and reply.counters.bytes_received > 0)

        await until(moving, "the transfer to begin", every_s=0.005)
        mesh.kill("prefill-0")
        _, finished = await asyncio.wait_for(asked, 120)
        assert finished.usage.completion_tokens > 0


async def test_disaggregated_equals_unified_in_fp32(apart: str, unified: Mesh) -> None:
    """Greedy texts of a short answer; the logits themselves are compared in the unit tests."""
    together, finished = await answer(unified, QUESTION, max_tokens=24)
    assert finished.served.transfer_bytes == 0
    assert apart == together


FREQUENCY, PRESENCE = 0.3, 0.2
CLOSE = 1e-3


class Spoken:
    """One greedy answer with penalties, and what else was likely at each position."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.scored: list[int] = []
        self.top: list[dict[int, float]] = []
        self.finished = pb.Finished()

    async def ask(self, client: Client, model: str, begun: asyncio.Event | None = None) -> Spoken:
        """With everything that a worker has to replay. `begun` is set in the middle."""
        async with client.chat(
            [{"role": "user", "content": "Tell me a story about a lighthouse."}],
            model=model,
            max_tokens=24,
            min_tokens=24,
            temperature=0.0,
            frequency_penalty=FREQUENCY,
            presence_penalty=PRESENCE,
            logprobs=20,
            seed=3,
        ) as stream:
            async for event in stream:
                assert not event.HasField("error"), event.error
                self.tokens += event.delta.token_ids
                for entry in event.delta.logprobs:
                    self.scored.append(entry.token_id)
                    self.top.append({top.token_id: top.logprob for top in entry.top})
                if begun is not None and len(self.tokens) >= 4:
                    begun.set()
                if event.HasField("finished"):
                    self.finished = event.finished
        return self

    def margin(self, position: int) -> float:
        """By how much its token was the best, by what had been said; below 0 when it was not."""
        before = Counter(self.tokens[:position])
        top = self.top[position]
        score = {t: p - FREQUENCY * before[t] - PRESENCE * (before[t] > 0) for t, p in top.items()}
        mine = score.pop(self.tokens[position])
        return mine - max(score.values())


async def test_decode_killed_while_the_real_model_speaks_in_fp32(unified: Mesh) -> None:
    """The other worker replays what was said, penalties included, and goes on where it stopped."""
    async with unified.client() as client:
        whole = await Spoken().ask(client, unified.model)
        victim = ""
        # It may have said everything before it is known who says it.
        for _ in range(5):
            begun = asyncio.Event()
            asked = asyncio.create_task(Spoken().ask(client, unified.model, begun))
            await asyncio.wait_for(begun.wait(), 120)
            for name in ("unified-0", "unified-1"):
                if (await unified.load(name)).running:
                    victim = name
                    unified.kill(name)
                    break
            healed = await asyncio.wait_for(asked, 120)
            if healed.finished.served.heals:
                break
    assert healed.finished.served.heals == 1
    assert healed.finished.served.decode_worker != victim
    assert len(healed.tokens) == healed.finished.usage.completion_tokens == 24
    assert healed.scored == healed.tokens
    # Each token is the best one by all that was said before it, on either worker.
    assert all(spoken.margin(position) > -CLOSE for spoken in (whole, healed) for position in range(24))
    for position, (mine, theirs) in enumerate(zip(healed.tokens, whole.tokens, strict=True)):
        if mine != theirs:
            # The sums of another batch may round otherwise.
            assert min(whole.margin(position), healed.margin(position)) < CLOSE
            break
