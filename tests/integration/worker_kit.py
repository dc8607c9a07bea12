"""Worker and sidecar processes for integration tests, without gateway and router."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvmesh.cli.ports import free_port
from kvmesh.proto.v1 import engine_pb2 as pb
from kvmesh.proto.v1 import engine_pb2_grpc, inference_pb2
from kvmesh.rpc import MeshChannel, open_channel

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 90.0
# A worker with several ranks imports torch in each, on whatever cores are left.
START_S = 240.0


@asynccontextmanager
async def process(module: str, *flags: str, env: dict[str, str] | None = None) -> AsyncIterator[Any]:
    """A service process with its stderr collected; killed at the end if it still lives."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'libs'}:{ROOT}", "OMP_NUM_THREADS": "1"} | (env or {})
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *flags, env=environment, stderr=asyncio.subprocess.PIPE, cwd=ROOT
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def ready(path: Path, child: Any) -> dict[str, Any]:
    async with asyncio.timeout(START_S):
        while not path.exists():  # noqa: ASYNC240
            if child.returncode is not None:
                raise AssertionError((await child.stderr.read()).decode())
            await asyncio.sleep(0.02)
    return json.loads(path.read_text())  # noqa: ASYNC240  # type: ignore[no-any-return]


async def until(condition: Any, what: str, timeout_s: float = WAIT_S) -> Any:
    """Poll an async or plain condition until it is true."""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                value = condition()
                if asyncio.iscoroutine(value):
                    value = await value
                if value:
                    return value
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(what) from None


@dataclass
class Node:
    """A worker process and the sidecar beside it."""

    name: str
    role: str
    root: Path
    stack: AsyncExitStack
    flags: list[str]
    sidecar_flags: list[str]
    worker: Any = None
    sidecar: Any = None
    info: dict[str, Any] = field(default_factory=dict)
    sidecar_info: dict[str, Any] = field(default_factory=dict)
    channel: MeshChannel | None = None
    starts: int = 0

    async def start_sidecar(self) -> None:
        """Start (or start again, on the same port: its peers look for the successor there) the sidecar."""
        self.starts += 1
        listen = ["--listen", self.sidecar_info["address"] if self.sidecar_info else f"127.0.0.1:{free_port()}"]
        path = self.root / f"{self.name}-sidecar-{self.starts}.json"
        self.sidecar = await self.stack.enter_async_context(
            process(
                "services.kvtransfer", "--engine-socket", str(self.root / f"{self.name}.sock"), "--ready-file",
                str(path), "--instance", f"{self.name}-kv", *self.sidecar_flags, *listen,
            )
        )  # fmt: skip
        self.sidecar_info = await ready(path, self.sidecar)

    async def start_worker(self) -> None:
        """Start (or start again) the worker; ready when its sidecar has it."""
        self.starts += 1
        path = self.root / f"{self.name}-{self.starts}.json"
        self.worker = await self.stack.enter_async_context(
            process(
                f"services.{self.role}", "--sidecar-socket", str(self.root / f"{self.name}.sock"), "--ready-file",
                str(path), "--instance", self.name, *self.flags,
            )
        )  # fmt: skip
        self.info = await ready(path, self.worker)
        self.channel = await self.stack.enter_async_context(open_channel(self.info["address"]))

        async def registered() -> bool:
            info = (await self.engine.Describe(pb.DescribeRequest(), timeout=60)).info
            return bool(info.kvtransfer_address) and info.state == pb.WORKER_STATE_SERVING

        await until(registered, f"{self.name} never registers with its sidecar", START_S)

    @property
    def engine(self) -> Any:
        return engine_pb2_grpc.EngineStub(self.channel)

    def target(self) -> pb.PrefillTarget:
        return pb.PrefillTarget(worker_id=self.name, address=self.info["address"], incarnation=self.info["incarnation"])

    async def load(self) -> pb.WorkerLoad:
        return (await self.engine.GetLoad(pb.GetLoadRequest(), timeout=60)).load

    async def idle(self) -> None:
        """Nothing runs and every page is free or the prefix cache's alone."""

        async def free() -> bool:
            load = await self.load()
            return load.running + load.waiting + load.transferring == 0 and load.free_pages == load.total_pages

        await until(free, f"pages of {self.name} are missing")


@asynccontextmanager
async def cluster(root: Path, names: dict[str, str], **flags: list[str]) -> AsyncIterator[dict[str, Node]]:
    """Nodes by name → role. `flags`: more flags of one node (name), of all workers (`workers`), of all sidecars."""
    async with AsyncExitStack() as stack:
        nodes = {}
        for name, role in names.items():
            common = ["--runner", "scripted", "--num-pages", "512", *flags.get("workers", [])]
            node = Node(
                name, role, root, stack, [*common, *flags.get(name.replace("-", "_"), [])], flags.get("sidecars", [])
            )
            nodes[name] = node
        await asyncio.gather(*[node.start_sidecar() for node in nodes.values()])
        await asyncio.gather(*[node.start_worker() for node in nodes.values()])
        yield nodes


@dataclass
class Reply:
    """What came for one request."""

    tokens: list[int] = field(default_factory=list)
    end: pb.RequestEnd | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    first: asyncio.Event = field(default_factory=asyncio.Event)
    ends: int = 0

    async def wait(self) -> Reply:
        async with asyncio.timeout(WAIT_S):
            await self.ended.wait()
        return self

    @property
    def finished(self) -> pb.WorkerFinished:
        assert self.end is not None
        assert self.end.HasField("finished"), self.end
        return self.end.finished


class Client:
    """Frames and submissions on one decode node."""

    def __init__(self, node: Node, gateway_id: str = "g") -> None:
        self.stub = engine_pb2_grpc.DecodeStub(node.channel)
        self.gateway_id = gateway_id
        self.replies: dict[str, Reply] = {}
        self.opened = asyncio.Event()
        self.serial = 0

    async def __aenter__(self) -> Client:
        self.task = asyncio.create_task(self._read())
        async with asyncio.timeout(WAIT_S):
            await self.opened.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})

    async def _read(self) -> None:
        async for frame in self.stub.Frames(pb.FramesRequest(gateway_id=self.gateway_id)):
            self.opened.set()
            for delta in frame.deltas:
                reply = self.replies[delta.request_id]
                assert delta.first_position == len(reply.tokens)
                reply.tokens.extend(delta.token_ids)
                reply.first.set()
            for end in frame.ends:
                reply = self.replies[end.request_id]
                reply.end = end
                reply.ends += 1
                reply.ended.set()

    async def submit(self, tokens: list[int], targets: list[pb.PrefillTarget], max_tokens: int = 16) -> Reply:
        self.serial += 1
        name = f"{self.gateway_id}-{self.serial}"
        self.replies[name] = reply = Reply()
        await self.stub.Submit(
            pb.SubmitRequest(
                gateway_id=self.gateway_id, request_id=name, model="scripted", token_ids=tokens,
                prompt_len=len(tokens), ttft_ms=25_000, total_ms=30_000, prefill=targets,
                sampling=inference_pb2.SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True),
            ),
            timeout=10,
        )  # fmt: skip
        return reply

    async def abort(self, request_id: str = "") -> None:
        await self.stub.Abort(pb.DecodeAbortRequest(gateway_id=self.gateway_id, request_id=request_id), timeout=10)


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start * 7 + i * 31 + i // 95) % 256 for i in range(length)]
