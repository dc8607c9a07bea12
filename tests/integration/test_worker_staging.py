"""KV through host memory between two worker processes with real sidecars; their own memory plays the GPU's."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvmesh.engine.runner import SamplingParams
from kvmesh.engine.scripted import scripted_output
from worker_kit import Client, cluster, prompt

PAIR = {"prefill-0": "prefill", "decode-0": "decode"}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_output_equals_unified_through_staging(tmp_path: Path, transport: str) -> None:
    """The scripted runner checks every byte of every page that it reads, and counts what is foreign. One end has
    staging of another size than the other, and more prompts than it holds."""
    async with cluster(
        tmp_path, PAIR, workers=["--scripted-step-ms", "1", "--staging", "on"], sidecars=["--transports", transport],
        prefill_0=["--chunk-size", "40", "--staging-pages", "110"], decode_0=["--staging-pages", "130"],
    ) as nodes:  # fmt: skip
        prefill, decode = nodes["prefill-0"], nodes["decode-0"]
        async with Client(decode) as client:
            long = prompt(700, 3)
            # The later ones find their beginnings in prefill's cache.
            prompts = [prompt(18, 1), prompt(161, 2), long, long[:520] + prompt(90, 4), prompt(1500, 5)]
            replies = [await client.submit(tokens, [prefill.target()]) for tokens in prompts]
            for tokens, reply in zip(prompts, replies, strict=True):
                await reply.wait()
                want = SamplingParams(max_tokens=16, seed=1, ignore_eos=True)
                assert reply.tokens == scripted_output(tokens, want)[0]
                assert reply.finished.transfer_bytes > 0
                assert reply.finished.transport == transport
                assert reply.finished.prefill_retries == 0
        for node in nodes.values():
            await node.idle()


async def test_one_end_through_staging_and_the_other_not(tmp_path: Path) -> None:
    """A GPU's engine and one on CPU exchange KV: neither sees where the other's pages are."""
    async with cluster(
        tmp_path, PAIR | {"decode-1": "decode"}, sidecars=["--transports", "shm"],
        prefill_0=["--staging", "on", "--chunk-size", "64"], decode_1=["--staging", "on", "--staging-pages", "200"],
    ) as nodes:  # fmt: skip
        prefill = nodes["prefill-0"]
        for name in ("decode-0", "decode-1"):
            async with Client(nodes[name]) as client:
                tokens = prompt(900, 7)
                reply = await (await client.submit(tokens, [prefill.target()])).wait()
                want = SamplingParams(max_tokens=16, seed=1, ignore_eos=True)
                assert reply.tokens == scripted_output(tokens, want)[0]
                assert reply.finished.transport == "shm"
        for node in nodes.values():
            await node.idle()
