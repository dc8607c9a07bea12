"""KV through host memory between two worker processes with real sidecars; their own memory plays the GPU's."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvmesh.config import WorkerSettings
from kvmesh.engine.runner import SamplingParams
from kvmesh.engine.scripted import ScriptedRunner, scripted_output
from kvmesh.engine.worker.posting import Route, choose_route
from worker_kit import WAIT_S, Client, Node, cluster, prompt

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


@pytest.mark.parametrize(("transports", "route"), [("nvlink,shm", Route.NVLINK), ("shm,tcp", Route.STAGING)])
async def test_an_engine_on_a_gpu_asks_its_sidecar_first(tmp_path: Path, transports: str, route: Route) -> None:
    """And the sidecar takes the engine itself afterwards."""
    async with AsyncExitStack() as stack:
        flags = ["--runner", "scripted", "--num-pages", "64"]
        node = Node("decode-0", "decode", tmp_path, stack, flags, ["--transports", transports])
        await node.start_sidecar()
        settings = WorkerSettings(device="cuda", sidecar_socket=tmp_path / "decode-0.sock")
        assert await choose_route(settings, ScriptedRunner().layout(64, 1)) is route
        await node.start_worker()


async def test_a_lost_device_ends_the_process(tmp_path: Path) -> None:
    """One terminal for each request, then exit status 1."""
    faults = tmp_path / "faults.json"
    faults.write_text(json.dumps({"lost_step": 4}))
    async with cluster(tmp_path, {"decode-0": "decode"}, workers=["--scripted-faults", str(faults)]) as nodes:
        node = nodes["decode-0"]
        async with Client(node) as client:
            replies = [await client.submit(prompt(20, n), []) for n in range(3)]
            for reply in replies:
                await reply.wait()
                assert reply.end is not None
                assert reply.end.error.reason == "UNAVAILABLE"
            async with asyncio.timeout(WAIT_S):
                assert await node.worker.wait() == 1
            assert [reply.ends for reply in replies] == [1, 1, 1]
