"""The mesh on the real chat model: `make run ONCE=1` and what it promises."""

from __future__ import annotations

import asyncio

import pytest

from kvmesh.cli.plan import MeshOptions
from mesh_kit import PATIENT, answer, mesh_up, until

REAL = MeshOptions(gateway_port=0, threads=1, settings=PATIENT)
pytestmark = pytest.mark.model


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


async def test_disaggregated_equals_unified_in_fp32() -> None:
    """Greedy texts of a short answer; the logits themselves are compared in the unit tests."""
    question = "Name three colours of the rainbow, please, in one short sentence."
    async with mesh_up(REAL, dtype="fp32", cache=False) as mesh:
        apart, finished = await answer(mesh, question, max_tokens=24)
        assert finished.served.transfer_bytes > 0
    async with mesh_up(REAL, dtype="fp32", cache=False, prefill=0, decode=0, unified=1) as mesh:
        together, finished = await answer(mesh, question, max_tokens=24)
        assert finished.served.transfer_bytes == 0
    assert apart == together


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
