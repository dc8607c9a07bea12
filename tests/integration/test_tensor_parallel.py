"""Workers of several ranks, as processes, through real sidecars: equal answers, and the end of a rank."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from kvmesh.kv.pidfd import open_pidfd, wait_exit
from kvmesh.proto.v1 import engine_pb2 as pb
from tiny_model import write_tiny
from worker_kit import START_S, Client, Node, Reply, cluster, prompt, until

TORCH = ["--runner", "torch", "--dtype", "fp32", "--served-name", "scripted", "--local-prefill-threshold", "0"]
# How soon a step that hangs is seen, and what it may hold up at the end.
QUICK = ["--stall-timeout-s", "5", "--drain-timeout-s", "2"]
LENGTHS = (7, 70, 131)


async def answer(node: Node, client: Client, length: int, prefill: Node | None) -> list[int]:
    reply = await (await client.submit(prompt(length, length), [prefill.target()] if prefill else [], 12)).wait()
    assert bool(reply.finished.transfer_bytes) == (prefill is not None)
    await node.idle()
    return reply.tokens


async def ended(process: asyncio.subprocess.Process, pidfds: list[int]) -> int:
    """The exit status, once the process and all of its ranks are gone."""
    async with asyncio.timeout(START_S):
        status = await process.wait()
    try:
        for fd in pidfds:
            assert await asyncio.to_thread(wait_exit, fd, START_S), "a rank outlives its leader"
    finally:
        for fd in pidfds:
            os.close(fd)
    return status


# Twelve imports of torch: 20 s alone, minutes where others compute.
@pytest.mark.timeout(600)
async def test_ranks_answer_as_one_and_a_killed_rank_ends_its_worker(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny")
    flags = [*TORCH, "--model", str(model), "--no-prefix-cache"]
    roles = {"two": "prefill", "one": "decode", "four": "decode"}
    async with cluster(tmp_path, roles, workers=flags, two=["--tp", "2", *QUICK], four=["--tp", "4"]) as nodes:
        two, one, four = (nodes[name] for name in roles)
        async with Client(one, "g1") as at_one, Client(four, "g4") as at_four:
            for length in LENGTHS:
                alone = await answer(one, at_one, length, None)
                assert await answer(one, at_one, length, two) == alone
                assert await answer(four, at_four, length, two) == alone

            # A sidecar is killed: leader and ranks find its successor, each by itself.
            four.sidecar.kill()
            await four.sidecar.wait()
            await four.start_sidecar()

            async def back() -> bool:
                info = (await four.engine.Describe(pb.DescribeRequest(), timeout=60)).info
                return bool(info.kvtransfer_address) and info.state == pb.WORKER_STATE_SERVING

            await until(back, "the engine never joins its sidecar's successor", START_S)
            assert await answer(four, at_four, LENGTHS[0], two) == await answer(one, at_one, LENGTHS[0], None)

            # A rank of prefill is killed: its worker ends with the other rank, and a successor serves.
            fds = [open_pidfd(pid) for pid in two.info["ranks"]]
            os.kill(two.info["ranks"][0], signal.SIGKILL)
            assert await ended(two.worker, fds) == 1
            await two.start_worker()
            again = await answer(four, at_four, LENGTHS[1], two)
            assert again == await answer(one, at_one, LENGTHS[1], None)

            # A rank of decode is killed while it generates: one terminal each, and no process is left.
            replies: list[Reply] = [await at_four.submit(prompt(20, i), [two.target()], 1900) for i in range(3)]
            for reply in replies:
                async with asyncio.timeout(START_S):
                    await reply.first.wait()
            fds = [open_pidfd(pid) for pid in four.info["ranks"]]
            os.kill(four.info["ranks"][1], signal.SIGKILL)
            for reply in replies:
                await reply.wait()
                assert reply.end is not None
                assert reply.end.WhichOneof("end") == "error"
                assert "rank" in reply.end.error.message
            assert await ended(four.worker, fds) == 1
            assert [reply.ends for reply in replies] == [1, 1, 1]

        # The others are as they were.
        async def serving() -> bool:
            info = (await two.engine.Describe(pb.DescribeRequest(), timeout=60)).info
            return bool(info.state == pb.WORKER_STATE_SERVING)

        await until(serving, "prefill does not serve any more")
        await two.idle()

        # A rank stands still in the middle of a step when its worker is told to stop: it is not left behind.
        async with Client(one, "g2") as at_one:
            fds = [open_pidfd(pid) for pid in two.info["ranks"]]
            os.kill(two.info["ranks"][0], signal.SIGSTOP)
            reply = await at_one.submit(prompt(70, 1), [two.target()], 12)

            async def hanging() -> bool:
                info = (await two.engine.Describe(pb.DescribeRequest(), timeout=60)).info
                return bool(info.state == pb.WORKER_STATE_STALLED)

            await until(hanging, "the step does not hang")
            two.worker.terminate()
            assert await ended(two.worker, fds) == 0
            await reply.wait()
            assert reply.ends == 1
