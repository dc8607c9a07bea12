"""Workers on real gRPC servers in this process, and a gateway that follows their frames."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvmesh.config import WorkerSettings
from kvmesh.engine.worker.bootstrap import Worker
from kvmesh.engine.worker.context import Identity
from kvmesh.engine.worker.memory import KvMemory
from kvmesh.engine.worker.steps import StepHook, no_hook
from kvmesh.proto.v1 import engine_pb2 as pb
from kvmesh.proto.v1 import engine_pb2_grpc, inference_pb2
from kvmesh.rpc import BackgroundTasks, MeshAuth, MeshChannel, RpcServer, ServiceContext, open_channel
from worker_fakes import Fabric, FakeLink, FakeSidecar

WAIT_S = 90.0
Key = tuple[str, int]


class FabricWorker(Worker):
    """A worker whose sidecar is a fake one."""

    fabric: Fabric | None = None

    def _link(self, identity: Identity, memory: KvMemory) -> Any:
        if self.fabric is None:
            return super()._link(identity, memory)
        return FakeLink(self.fabric, identity, memory, lambda up: self.status.update(sidecar_up=up))


@dataclass
class Running:
    """A worker that serves."""

    worker: Worker
    server: RpcServer
    address: str
    channel: MeshChannel
    tasks: BackgroundTasks

    @property
    def sidecar(self) -> FakeSidecar:
        link: Any = self.worker.ctx.link  # type: ignore[union-attr]
        return link.sidecar  # type: ignore[no-any-return]

    @property
    def core(self) -> Any:
        return self.worker.ctx.core  # type: ignore[union-attr]

    def target(self) -> pb.PrefillTarget:
        return pb.PrefillTarget(worker_id=self.worker.ctx.identity.worker_id, address=self.address)  # type: ignore[union-attr]

    async def core_has_looked(self) -> None:
        """Everything that was asked of the core before has been done."""
        done = threading.Event()
        self.core._post(done.set)
        assert await asyncio.to_thread(done.wait, WAIT_S)

    async def pages_are_back(self) -> None:
        """Nothing holds a page but the prefix cache; raises what is wrong after a while."""

        def state() -> tuple[int, int, int]:
            counts = self.core.pool.counts()
            cached = len(self.core.cache) if self.core.cache is not None else 0
            return counts.free + cached, counts.exposed, counts.draining

        await until(lambda: state() == (self.core.pool.total, 0, 0), lambda: f"pages {state()}, {self.core.load()}")
        self.core.pool.check_integrity()


async def until(condition: Any, what: Any = "condition", timeout_s: float = WAIT_S) -> None:
    """Poll a condition of another thread's state; fails with `what()` after the timeout."""
    try:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(what() if callable(what) else what) from None


def settings(**values: Any) -> WorkerSettings:
    """Scripted and quick, unless told otherwise."""
    defaults: dict[str, Any] = {
        "role": "unified",
        "runner": "scripted",
        "scripted_step_ms": 0.0,
        "page_size": 16,
        "num_pages": 256,
        "max_model_len": 2048,
        "max_batch": 64,
        "max_queue": 64,
        "token_budget": 256,
        "chunk_size": 64,
        "drain_timeout_s": 5.0,
    }
    return WorkerSettings(**(defaults | values))


@asynccontextmanager
async def running(
    *, fabric: Fabric | None = None, at_step: StepHook = no_hook, **values: Any
) -> AsyncIterator[Running]:
    """A worker, started and ready; closed at the end."""
    if fabric is not None:
        values.setdefault("sidecar_socket", Path("/nowhere"))
    conf = settings(**values)
    auth = MeshAuth.from_settings(conf)
    server = RpcServer(conf, auth=auth)
    async with BackgroundTasks() as tasks:
        worker = FabricWorker(ServiceContext(conf, server, auth, tasks), at_step=at_step)
        worker.fabric = fabric
        address = await server.start()
        channel = open_channel(address)
        try:
            await worker.started()
            yield Running(worker, server, address, channel, tasks)
        finally:
            await channel.close(None)
            await server.close()
            await worker.close()


def sampling(max_tokens: int = 8, seed: int = 1, **values: Any) -> inference_pb2.SamplingParams:
    return inference_pb2.SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True, **values)


@dataclass
class Answer:
    """What a gateway has seen of one (request, attempt)."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, int] = field(default_factory=dict)
    ends: list[pb.RequestEnd] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    first: asyncio.Event = field(default_factory=asyncio.Event)
    gaps: int = 0
    late: int = 0

    @property
    def error(self) -> pb.WorkerError | None:
        return self.ends[0].error if self.ends and self.ends[0].HasField("error") else None

    @property
    def finished(self) -> pb.WorkerFinished:
        assert self.ends, "no terminal yet"
        assert self.ends[0].HasField("finished"), self.ends
        return self.ends[0].finished

    async def wait(self, timeout_s: float = WAIT_S) -> Answer:
        async with asyncio.timeout(timeout_s):
            await self.ended.wait()
        return self


class Gateway:
    """One gateway process: Frames on one worker, and submissions."""

    def __init__(self, target: Running, gateway_id: str = "gw", channel: MeshChannel | None = None) -> None:
        self.worker = target
        self.gateway_id = gateway_id
        channel = channel or target.channel
        self.stub = engine_pb2_grpc.DecodeStub(channel)
        self.answers: dict[Key, Answer] = {}
        self.frames = 0
        self.sequence_errors = 0
        self.opened = asyncio.Event()
        self.last: pb.FramesResponse | None = None
        self.model = target.worker.ctx.identity.served_name  # type: ignore[union-attr]
        self._reader: asyncio.Task[None] | None = None
        self._serial = 0

    async def __aenter__(self) -> Gateway:
        self._reader = asyncio.create_task(self._read())
        async with asyncio.timeout(WAIT_S):
            await self.opened.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait({self._reader})

    async def _read(self) -> None:
        call = self.stub.Frames(pb.FramesRequest(gateway_id=self.gateway_id))
        try:
            async for frame in call:
                self._take(frame)
        finally:
            call.cancel()

    def _take(self, frame: pb.FramesResponse) -> None:
        self.frames += 1
        self.last = frame
        if frame.sequence != self.frames:
            self.sequence_errors += 1
        self.opened.set()
        for delta in frame.deltas:
            answer = self.answers.setdefault((delta.request_id, delta.attempt), Answer())
            if answer.ends:
                answer.late += 1
            tokens = answer.tokens.setdefault(delta.choice, [])
            if len(tokens) != delta.first_position:
                answer.gaps += 1
            tokens.extend(delta.token_ids)
            if delta.finish_reason:
                answer.reasons[delta.choice] = delta.finish_reason
            answer.first.set()
        for end in frame.ends:
            answer = self.answers.setdefault((end.request_id, end.attempt), Answer())
            answer.ends.append(end)
            answer.ended.set()

    def request(self, tokens: list[int], **values: Any) -> pb.SubmitRequest:
        self._serial += 1
        request = pb.SubmitRequest(
            gateway_id=self.gateway_id,
            request_id=f"{self.gateway_id}-{self._serial}",
            model=self.model,
            token_ids=tokens,
            prompt_len=len(tokens),
            sampling=sampling(),
            ttft_ms=60_000,
            total_ms=90_000,
        )
        for name, value in values.items():
            field_ = getattr(request, name)
            if hasattr(field_, "CopyFrom"):
                field_.CopyFrom(value)
            elif hasattr(field_, "extend"):
                del field_[:]
                field_.extend(value)
            else:
                setattr(request, name, value)
        return request

    async def submit(self, request: pb.SubmitRequest) -> Answer:
        answer = self.answers.setdefault((request.request_id, request.attempt), Answer())
        await self.stub.Submit(request, timeout=60)
        return answer

    async def ask(self, tokens: list[int], **values: Any) -> Answer:
        """Submit and wait for the terminal."""
        return await (await self.submit(self.request(tokens, **values))).wait()

    async def abort(self, request_id: str = "", attempt: int = 0, choices: tuple[int, ...] = ()) -> int:
        answer = await self.stub.Abort(
            pb.DecodeAbortRequest(gateway_id=self.gateway_id, request_id=request_id, attempt=attempt, choices=choices),
            timeout=60,
        )
        return int(answer.aborted)


def prompt(length: int, start: int = 0) -> list[int]:
    """Tokens of the scripted vocabulary, different for each `start`."""
    return [(start * 7 + i * 31 + i // 95) % 256 for i in range(length)]
