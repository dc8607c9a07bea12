"""A gateway's side of the worker API, with every frame stamped: Submit to one worker of several, tokens from Frames."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio

from gpu.workload import Stamps
from kvmesh.proto.v1 import engine_pb2 as pb
from kvmesh.proto.v1 import engine_pb2_grpc, inference_pb2

LIMIT_MS = 600_000
OPTIONS = [("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20)]


@dataclass
class Asked:
    """One request: submitted (time.perf_counter), what came and when, and how it ended."""

    request_id: str
    submitted: float
    done: asyncio.Future[None]
    stamps: Stamps = field(default_factory=list)
    finished: pb.WorkerFinished | None = None

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.stamps)


class WorkerClient:
    """One decode or unified worker. To be used inside `async with`."""

    def __init__(self, address: str, token: str, model: str, prefill: Sequence[pb.PrefillTarget] = ()) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        self._metadata = (("x-kvmesh-mesh-token", token),)
        self._stub = engine_pb2_grpc.DecodeStub(self._channel)  # type: ignore[no-untyped-call]
        self._gateway = f"bench-{secrets.token_hex(4)}"
        self._model = model
        self._prefill = list(prefill)
        self._asked: dict[str, Asked] = {}
        self._reader: asyncio.Task[None] | None = None

    async def __aenter__(self) -> WorkerClient:
        call = self._stub.Frames(pb.FramesRequest(gateway_id=self._gateway), metadata=self._metadata)
        # The stream is open once its first frame, a heartbeat, is here.
        first = await asyncio.wait_for(call.read(), 30)
        assert first is not grpc.aio.EOF
        self._reader = asyncio.create_task(self._read(call))
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                await self._reader
        await self._channel.close()

    async def _read(self, call: grpc.aio.UnaryStreamCall) -> None:
        try:
            while (frame := await call.read()) is not grpc.aio.EOF:
                self._take(frame, time.perf_counter())
            raise RuntimeError("the worker ended its frames")
        except Exception as error:
            for asked in self._asked.values():
                if not asked.done.done():
                    asked.done.set_exception(RuntimeError(f"frames are gone: {error}"))
            raise

    def _take(self, frame: pb.FramesResponse, now: float) -> None:
        for delta in frame.deltas:
            asked = self._asked.get(delta.request_id)
            if asked is not None and delta.token_ids:
                asked.stamps.append((now, len(delta.token_ids)))
        for end in frame.ends:
            asked = self._asked.pop(end.request_id, None)
            if asked is None or asked.done.done():
                continue
            if end.HasField("error"):
                asked.done.set_exception(RuntimeError(f"{end.request_id}: {end.error.reason}: {end.error.message}"))
            else:
                asked.finished = end.finished
                asked.done.set_result(None)

    async def submit(self, request_id: str, prompt: Sequence[int], out: int) -> Asked:
        """Returns once it is accepted; await `done` for its end. Raises grpc.aio.AioRpcError where it is refused."""
        sampling = inference_pb2.SamplingParams(
            temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, frequency_penalty=0.0,
            presence_penalty=0.0, max_tokens=out, min_tokens=0, n=1, best_of=1, ignore_eos=True, seed=1,
        )  # fmt: skip
        request = pb.SubmitRequest(
            gateway_id=self._gateway, request_id=request_id, model=self._model, token_ids=prompt,
            prompt_len=len(prompt), sampling=sampling, prefill=self._prefill, ttft_ms=LIMIT_MS, total_ms=LIMIT_MS,
        )  # fmt: skip
        if self._reader is None or self._reader.done():
            raise RuntimeError("the worker's frames are gone")
        asked = Asked(request_id, time.perf_counter(), asyncio.get_running_loop().create_future())
        self._asked[request_id] = asked
        try:
            await self._stub.Submit(request, metadata=self._metadata, timeout=60)
        except BaseException:
            self._asked.pop(request_id, None)
            raise
        return asked


_ids = itertools.count()


async def load(
    workers: Sequence[WorkerClient],
    prompts: Sequence[Sequence[int]],
    arrivals: Sequence[float],
    out: int,
    timeout_s: float,
) -> list[Asked]:
    """Each prompt at its time (seconds from now), to the workers in turn; returns once all have ended.

    Raises what ended one of them, RuntimeError where one got another number of tokens than `out`.
    """
    begun = time.perf_counter()

    async def one(number: int) -> Asked:
        await asyncio.sleep(max(0.0, begun + arrivals[number] - time.perf_counter()))
        asked = await workers[number % len(workers)].submit(f"b{next(_ids)}", prompts[number], out)
        await asked.done
        if asked.tokens != out:
            raise RuntimeError(f"{asked.request_id} got {asked.tokens} tokens of {out}")
        return asked

    tasks = [asyncio.create_task(one(number)) for number in range(len(prompts))]
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
