"""One engine whose ranks are on two hosts (here: two addresses of the loopback device), as processes: equal answers,
and how each process's end is the end of all."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvmesh.cli.ports import free_port
from kvmesh.kv.pidfd import open_pidfd, wait_exit
from kvmesh.rpc import open_channel
from kvmesh.rpc.auth import MeshToken
from tiny_model import write_tiny
from worker_kit import START_S, Client, Node, Reply, process, prompt, ready

FLAGS = ["--runner", "torch", "--dtype", "fp32", "--served-name", "scripted", "--role", "unified", "--num-pages", "512"]
LENGTHS = (7, 70, 131)


@dataclass
class Group:
    """A leader, as a node that clients can ask, and the process of the other host."""

    leader: Node
    agent: Any
    agent_info: dict[str, Any]

    def pidfds(self) -> list[int]:
        """Of all ranks but the leader."""
        return [open_pidfd(pid) for pid in self.leader.info["ranks"]]

    async def ended(self, pidfds: list[int]) -> tuple[int, int]:
        """Exit statuses of leader and agent, once they and all ranks are gone."""
        async with asyncio.timeout(START_S):
            statuses = await self.leader.worker.wait(), await self.agent.wait()
        for fd in pidfds:
            assert await asyncio.to_thread(wait_exit, fd, START_S), "a rank outlives its group"
            os.close(fd)
        return statuses


async def node(root: Path, name: str, stack: AsyncExitStack, flags: list[str], token: MeshToken | None = None) -> Node:
    made = Node(name, "decode", root, stack, flags, [])
    path = root / f"{name}.json"
    made.worker = await stack.enter_async_context(
        process("services.decode", "--ready-file", str(path), "--instance", name, *flags)
    )
    made.info = await ready(path, made.worker)
    made.channel = await stack.enter_async_context(open_channel(made.info["address"], token=token))
    return made


@asynccontextmanager
async def group(root: Path, model: Path, name: str, tp: int) -> AsyncIterator[Group]:
    root = root / name
    root.mkdir()
    (root / "token").write_text("a token of the whole mesh\n")
    flags = [
        *FLAGS, "--model", str(model), "--tp", str(tp), "--tp-hosts", "2", "--mesh-token-file", str(root / "token"),
        "--tp-leader", f"127.0.0.1:{free_port()}", "--drain-timeout-s", "60",
    ]  # fmt: skip
    async with AsyncExitStack() as stack:
        path = root / "agent.json"
        # It may come first: it waits for its leader.
        agent = await stack.enter_async_context(
            process(
                "services.decode", "--ready-file", str(path), "--instance", "agent", *flags, "--tp-host-rank", "1",
                "--tp-address", "127.0.0.2",
            )
        )  # fmt: skip
        leader = await node(root, "leader", stack, flags, MeshToken(root / "token"))
        info = await ready(path, agent)
        assert leader.info["ranks"][tp // 2 - 1 :] == info["ranks"]
        async with open_channel(info["address"]) as channel:
            await asyncio.wait_for(serving(channel), START_S)
        yield Group(leader, agent, info)


async def serving(channel: Any) -> None:
    """The other host is ready: by the name that the leader has too."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="kvmesh.v1.Engine"))
    async for answer in watch:
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            watch.cancel()
            return


async def answers(client: Client) -> list[list[int]]:
    return [(await (await client.submit(prompt(n, n), [], 12)).wait()).tokens for n in LENGTHS]


async def begun(client: Client, tokens: int, count: int = 2) -> list[Reply]:
    """Requests that have begun to answer."""
    replies = [await client.submit(prompt(20, i), [], tokens) for i in range(count)]
    for reply in replies:
        async with asyncio.timeout(START_S):
            await reply.first.wait()
    return replies


async def failed(replies: list[Reply], why: str) -> None:
    """Each ended once, with an error that says why."""
    for reply in replies:
        await reply.wait()
        assert reply.end is not None
        assert reply.end.WhichOneof("end") == "error"
        assert why in reply.end.error.message
        assert reply.ends == 1


# Seven imports of torch: 12 s alone, minutes where others compute.
@pytest.mark.timeout(600)
async def test_ranks_on_two_hosts_answer_as_one_and_end_together(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny")
    async with AsyncExitStack() as stack:
        one = await node(tmp_path, "one", stack, [*FLAGS, "--model", str(model)])
        async with Client(one, "one") as client:
            alone = await answers(client)

    # A rank of the other host is killed while it generates: one terminal each, and no process is left.
    async with group(tmp_path, model, "four", 4) as four, Client(four.leader, "four") as client:
        assert await answers(client) == alone
        replies, fds = await begun(client, 1900), four.pidfds()
        os.kill(four.agent_info["ranks"][1], signal.SIGKILL)
        await failed(replies, "rank 3")
        assert await four.ended(fds) == (1, 1)

    # A new group, of one rank a host. Both hosts are told to stop at the same time, as a cluster does: what has begun
    # is finished, by all ranks, and all end in good order.
    async with group(tmp_path, model, "new", 2) as new, Client(new.leader, "new") as client:
        assert await answers(client) == alone
        replies, fds = await begun(client, 300), new.pidfds()
        new.agent.terminate()
        new.leader.worker.terminate()
        for reply in replies:
            assert len((await reply.wait()).tokens) == 300
            assert reply.finished
        assert await new.ended(fds) == (0, 0)
