"""Prefill and decode as processes with two real sidecars between them: bytes really move, and any of them may die."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from kvmesh.engine.runner import SamplingParams
from kvmesh.engine.scripted import scripted_output
from kvmesh.proto.v1 import engine_pb2 as pb
from worker_kit import Client, cluster, prompt, until

PAIR = {"prefill-0": "prefill", "decode-0": "decode"}


def expected(tokens: list[int], max_tokens: int = 16) -> list[int]:
    return scripted_output(tokens, SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True))[0]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_output_equals_unified_and_bytes_move(transport: str, tmp_path: Path) -> None:
    async with cluster(
        tmp_path, PAIR, workers=["--scripted-step-ms", "1"], sidecars=["--transports", transport]
    ) as nodes:
        prefill, decode = nodes["prefill-0"], nodes["decode-0"]
        async with Client(decode) as client:
            prompts = [prompt(length, length) for length in (18, 33, 100, 161, 700, 1500)]
            replies = [await client.submit(p, [prefill.target()]) for p in prompts]
            for tokens, reply in zip(prompts, replies, strict=True):
                await reply.wait()
                assert reply.tokens == expected(tokens)
                assert reply.finished.transfer_bytes > 0
                assert reply.finished.transport == transport
                assert reply.finished.prefill_worker == "prefill-0"
                assert reply.finished.prefill_retries == 0
        for node in nodes.values():
            await node.idle()


@pytest.mark.parametrize(("prefill_page", "decode_page"), [("16", "64"), ("64", "16")])
async def test_pages_of_unequal_size(prefill_page: str, decode_page: str, tmp_path: Path) -> None:
    """Chunks cut pages of either side, and either prefix cache holds another part of the prompt."""
    async with cluster(
        tmp_path, PAIR, workers=["--scripted-step-ms", "1"],
        prefill_0=["--page-size", prefill_page, "--chunk-size", "40"], decode_0=["--page-size", decode_page],
    ) as nodes:  # fmt: skip
        prefill, decode = nodes["prefill-0"], nodes["decode-0"]
        async with Client(decode) as client:
            long = prompt(700, 3)
            for tokens in (prompt(129, 1), prompt(161, 2), long[:300], long, long[:520] + prompt(90, 4)):
                reply = await client.submit(tokens, [prefill.target()])
                await reply.wait()
                assert reply.tokens == expected(tokens)
                assert reply.finished.transfer_bytes > 0
                assert reply.finished.prefill_retries == 0
        for node in nodes.values():
            await node.idle()


async def test_kill_prefill_in_the_middle_of_a_transfer_ends_in_local_prefill(tmp_path: Path) -> None:
    async with cluster(
        tmp_path, PAIR,
        prefill_0=["--scripted-step-ms", "100", "--chunk-size", "32"], decode_0=["--scripted-step-ms", "1"],
        sidecars=["--heartbeat-s", "0.2", "--lease-s", "3"],
    ) as nodes:  # fmt: skip
        prefill, decode = nodes["prefill-0"], nodes["decode-0"]
        async with Client(decode) as client:
            tokens = prompt(1500)
            reply = await client.submit(tokens, [prefill.target()])

            async def under_way() -> bool:
                return (await prefill.load()).queued_tokens not in (0, 1499)

            await until(under_way, "prefill never computes a chunk")
            assert (await decode.load()).transferring == 1
            prefill.worker.kill()
            await reply.wait()
            assert reply.tokens == expected(tokens)
            assert reply.ends == 1
            assert reply.finished.transfer_bytes == 0
            assert reply.finished.prefill_retries == 1
            await decode.idle()
            # A successor of the dead worker is accepted with no manual act.
            await prefill.start_worker()
            again = await client.submit(prompt(300, 5), [prefill.target()])
            await again.wait()
            assert again.tokens == expected(prompt(300, 5))
            assert again.finished.transfer_bytes > 0
        for node in nodes.values():
            await node.idle()


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
async def test_kill_a_sidecar_in_the_middle_of_a_transfer(victim: str, tmp_path: Path) -> None:
    async with cluster(
        tmp_path, PAIR,
        prefill_0=["--scripted-step-ms", "100", "--chunk-size", "32"], decode_0=["--scripted-step-ms", "1"],
        sidecars=["--heartbeat-s", "0.2", "--lease-s", "3"],
    ) as nodes:  # fmt: skip
        prefill, decode = nodes["prefill-0"], nodes["decode-0"]
        async with Client(decode) as client:
            tokens = prompt(1500)
            reply = await client.submit(tokens, [prefill.target()])

            async def under_way() -> bool:
                return (await prefill.load()).queued_tokens not in (0, 1499)

            await until(under_way, "prefill never computes a chunk")
            nodes[victim].sidecar.kill()
            await reply.wait()
            assert reply.tokens == expected(tokens)
            assert reply.finished.transfer_bytes == 0
            # Decode serves without its sidecar, and prefill without its own says that it does not.
            alone = await client.submit(prompt(90, 4), [prefill.target()])
            await alone.wait()
            assert alone.tokens == expected(prompt(90, 4))
            await nodes[victim].sidecar.wait()
            await nodes[victim].start_sidecar()

            async def registered() -> bool:
                info = (await nodes[victim].engine.Describe(pb.DescribeRequest(), timeout=60)).info
                return bool(info.kvtransfer_address) and info.state == pb.WORKER_STATE_SERVING

            await until(registered, "the worker does not register with the successor")
            again = await client.submit(prompt(300, 5), [prefill.target()])
            await again.wait()
            assert again.tokens == expected(prompt(300, 5))
            assert again.finished.transfer_bytes > 0
        for node in nodes.values():
            await node.idle()


async def test_second_placement_when_the_first_prefill_dies(tmp_path: Path) -> None:
    names = {"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode"}
    async with cluster(
        tmp_path, names,
        prefill_0=["--scripted-step-ms", "100", "--chunk-size", "32"], prefill_1=["--scripted-step-ms", "1"],
        decode_0=["--scripted-step-ms", "1"], sidecars=["--heartbeat-s", "0.2", "--lease-s", "3"],
    ) as nodes:  # fmt: skip
        decode = nodes["decode-0"]
        targets = [nodes["prefill-0"].target(), nodes["prefill-1"].target()]
        async with Client(decode) as client:
            reply = await client.submit(prompt(1500), targets)

            async def under_way() -> bool:
                return (await nodes["prefill-0"].load()).queued_tokens not in (0, 1499)

            await until(under_way, "prefill never computes a chunk")
            nodes["prefill-0"].worker.kill()
            await reply.wait()
            assert reply.tokens == expected(prompt(1500))
            assert reply.finished.prefill_worker == "prefill-1"
            assert reply.finished.transfer_bytes > 0
            assert reply.finished.prefill_retries == 1
        await decode.idle()
        await nodes["prefill-1"].idle()


async def test_aborts_at_random_moments_leave_no_page_behind(tmp_path: Path) -> None:
    rng = random.Random(11)
    async with cluster(
        tmp_path, PAIR, workers=["--scripted-step-ms", "2", "--max-queue", "64"], prefill_0=["--chunk-size", "32"]
    ) as nodes:  # fmt: skip
        prefill, decode = nodes["prefill-0"], nodes["decode-0"]
        async with Client(decode) as client:

            async def one(i: int) -> None:
                tokens = prompt(rng.randrange(20, 600), i)
                reply = await client.submit(tokens, [prefill.target()], max_tokens=rng.randrange(1, 30))
                name = f"g-{client.serial}"
                if rng.random() < 0.5:
                    await asyncio.sleep(rng.random() * 0.1)
                    await client.abort(name)
                await reply.wait()
                assert reply.ends == 1
                if reply.end is not None and reply.end.HasField("finished"):
                    assert reply.tokens == expected(tokens, len(reply.tokens))
                else:
                    assert reply.end is not None
                    assert reply.end.error.reason == "CANCELLED", reply.end

            for batch in range(4):
                await asyncio.gather(*[one(batch * 12 + i) for i in range(12)])
        for node in nodes.values():
            await node.idle()
