"""A prefill engine that stands still: its sockets live, the sidecar beside it too, and it answers nothing."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path

import pytest

from kvmesh.engine.runner import SamplingParams
from kvmesh.engine.scripted import scripted_output
from worker_kit import Client, cluster, prompt, until

PAIR = {"prefill-0": "prefill", "decode-0": "decode"}


def expected(tokens: list[int]) -> list[int]:
    return scripted_output(tokens, SamplingParams(max_tokens=16, seed=1, ignore_eos=True))[0]


async def test_a_frozen_prefill_is_given_up_long_before_its_time_is_up(tmp_path: Path) -> None:
    """What it may take is more than a request has: without a look for signs of life each would end for want of time."""
    async with cluster(
        tmp_path, PAIR,
        prefill_0=["--scripted-step-ms", "100", "--chunk-size", "32"],
        decode_0=["--scripted-step-ms", "1", "--prefill-timeout-s", "600", "--prefill-silence-s", "4"],
        sidecars=["--heartbeat-s", "0.2", "--lease-s", "3"],
    ) as nodes:  # fmt: skip
        prefill, decode = nodes["prefill-0"], nodes["decode-0"]
        async with Client(decode) as client:
            tokens = prompt(1500)
            reply = await client.submit(tokens, [prefill.target()])

            async def under_way() -> bool:
                return (await prefill.load()).queued_tokens not in (0, 1499)

            await until(under_way, "prefill never computes a chunk")
            prefill.worker.send_signal(signal.SIGSTOP)
            try:
                await reply.wait()
                assert reply.tokens == expected(tokens)
                assert reply.finished.prefill_retries == 1
                assert reply.finished.transfer_bytes == 0
                # Nor does a connection that is made now wait for it.
                later = await client.submit(prompt(300, 5), [prefill.target()])
                await later.wait()
                assert later.tokens == expected(prompt(300, 5))
                assert later.finished.prefill_retries == 1
            finally:
                prefill.worker.send_signal(signal.SIGCONT)
            # Awake again it serves as before, without what was given up.
            await prefill.idle()

            starts = itertools.count(10)

            async def served() -> bool:
                again = await client.submit(prompt(90, next(starts)), [prefill.target()])
                return (await again.wait()).finished.transfer_bytes > 0

            await until(served, "the worker that woke up is not asked any more")
        for node in nodes.values():
            await node.idle()


@pytest.mark.skipif(not os.environ.get("KVMESH_SOAK"), reason="stands still for seven seconds: `make soak`")
async def test_a_prefill_that_computes_long_is_not_taken_for_frozen(tmp_path: Path) -> None:
    """Nothing comes from it for longer than its silence may last, but its pings are answered."""
    async with cluster(
        tmp_path, PAIR,
        prefill_0=["--scripted-step-ms", "6000", "--chunk-size", "512"],
        decode_0=["--scripted-step-ms", "1", "--prefill-silence-s", "4"],
    ) as nodes:  # fmt: skip
        async with Client(nodes["decode-0"]) as client:
            reply = await (await client.submit(prompt(200), [nodes["prefill-0"].target()])).wait()
            assert reply.tokens == expected(prompt(200))
            assert reply.finished.prefill_retries == 0
            assert reply.finished.prefill_worker == "prefill-0"
