"""Prefill writes into decode's pages by itself, both as processes with real sidecars; their memory is on the host."""

from __future__ import annotations

from pathlib import Path

from kvmesh.engine.runner import SamplingParams
from kvmesh.engine.scripted import scripted_output
from worker_kit import Client, cluster, prompt

PAIR = {"prefill-0": "prefill", "decode-0": "decode"}


async def test_output_equals_unified_over_nvlink(tmp_path: Path) -> None:
    """The scripted runner checks every byte of every page that it reads, and counts what is foreign."""
    async with cluster(
        tmp_path, PAIR, workers=["--scripted-step-ms", "1"], sidecars=["--transports", "nvlink,shm"],
        prefill_0=["--nvlink", "host", "--chunk-size", "40"],
    ) as nodes:  # fmt: skip
        prefill, decode = nodes["prefill-0"], nodes["decode-0"]
        async with Client(decode) as client:
            long = prompt(700, 3)
            # The later ones find their beginnings in prefill's cache: those pages leave at once.
            prompts = [prompt(18, 1), prompt(161, 2), long, long[:520] + prompt(90, 4), prompt(1500, 5)]
            replies = [await client.submit(tokens, [prefill.target()]) for tokens in prompts]
            for tokens, reply in zip(prompts, replies, strict=True):
                await reply.wait()
                want = SamplingParams(max_tokens=16, seed=1, ignore_eos=True)
                assert reply.tokens == scripted_output(tokens, want)[0]
                assert reply.finished.transfer_bytes > 0
                assert reply.finished.transport == "nvlink"
                assert reply.finished.prefill_retries == 0
        for node in nodes.values():
            await node.idle()
