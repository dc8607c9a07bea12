"""The scripted worker asked directly, without gateway and router: what their added time is measured against."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import grpc.aio

from kvmesh.proto.v1 import engine_pb2, engine_pb2_grpc
from kvmesh.proto.v1 import inference_pb2 as pb


class Direct:
    """Submits to one worker and takes its frames."""

    def __init__(self, stub: engine_pb2_grpc.DecodeStub, metadata: tuple[tuple[str, str], ...]) -> None:
        self._stub = stub
        self._metadata = metadata
        self._firsts: dict[str, asyncio.Future[float]] = {}
        self._count = 0

    async def ttft(self, tokens: int, prompt_tokens: int) -> float:
        """Seconds from the submission to the first token."""
        self._count += 1
        name = f"direct-{self._count}"
        self._firsts[name] = asyncio.get_running_loop().create_future()
        sampling = pb.SamplingParams(
            temperature=1.0,
            top_p=1.0,
            repetition_penalty=1.0,
            max_tokens=tokens,
            n=1,
            best_of=1,
            ignore_eos=True,
            seed=1,
        )
        begun = time.monotonic()
        await self._stub.Submit(
            engine_pb2.SubmitRequest(
                gateway_id="direct",
                request_id=name,
                model="scripted",
                token_ids=[1 + (self._count * 7 + index * 13) % 200 for index in range(prompt_tokens)],
                prompt_len=prompt_tokens,
                sampling=sampling,
                ttft_ms=60_000,
                total_ms=60_000,
            ),
            timeout=10,
            metadata=self._metadata,
        )
        async with asyncio.timeout(60):
            first = await self._firsts[name]
        del self._firsts[name]
        return first - begun

    async def follow(self) -> None:
        """Read frames until cancelled."""
        call = self._stub.Frames(engine_pb2.FramesRequest(gateway_id="direct"), metadata=self._metadata)
        try:
            async for frame in call:
                now = time.monotonic()
                for delta in frame.deltas:
                    first = self._firsts.get(delta.request_id)
                    if first is not None and not first.done() and delta.token_ids:
                        first.set_result(now)
        finally:
            call.cancel()


@contextlib.asynccontextmanager
async def direct(address: str, token: str) -> AsyncIterator[Direct]:
    """Connected to the worker at `address`."""
    async with grpc.aio.insecure_channel(address) as channel:
        found = Direct(engine_pb2_grpc.DecodeStub(channel), (("x-kvmesh-mesh-token", token),))
        task = asyncio.create_task(found.follow())
        await asyncio.sleep(0.5)  # Submit needs the open stream.
        try:
            yield found
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
