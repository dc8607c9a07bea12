"""Frames: merging while a write is outstanding, cutting, timeouts; and over real gRPC a reader that stops reading."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.engine.runner import SamplingParams
from kvmesh.engine.scripted import scripted_output
from kvmesh.engine.worker.frames import FrameLimits, FramesHub, GatewayStream, PendingFrame
from kvmesh.errors import Cancelled, FailedPrecondition, KvmeshError, Unavailable
from kvmesh.proto.v1 import engine_pb2 as pb
from kvmesh.proto.v1 import engine_pb2_grpc, inference_pb2
from worker_harness import Gateway, prompt, running, sampling, until


def delta(request: str, choice: int, first: int, tokens: list[int], **values: Any) -> pb.SequenceDelta:
    return pb.SequenceDelta(request_id=request, choice=choice, first_position=first, token_ids=tokens, **values)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["tokens", "tokens", "tokens", "end", "prompt", "take"]),
        st.integers(0, 3),
        st.integers(0, 1),
        st.integers(1, 40),
        st.booleans(),
        st.integers(1, 2000),
    ),
    max_size=80,
)


@given(EVENTS)
def test_whatever_is_merged_and_cut_every_token_arrives_once_and_before_its_end(events: list[Any]) -> None:
    pending = PendingFrame()
    sent: dict[tuple[str, int], list[int]] = defaultdict(list)
    prompts: set[str] = set()
    ended: set[str] = set()
    got: dict[tuple[str, int], list[int]] = defaultdict(list)
    got_ends: list[str] = []
    got_prompts: list[str] = []
    logprobs: dict[tuple[str, int], int] = defaultdict(int)

    def take(limit: int) -> None:
        frame = pending.take(limit)
        if len(frame.deltas) + len(frame.ends) + len(frame.prompts) > 1:
            assert frame.ByteSize() <= limit
        for d in frame.deltas:
            assert d.request_id not in got_ends
            key = (d.request_id, d.choice)
            assert d.first_position == len(got[key])
            assert len(d.logprobs) in (0, len(d.token_ids))
            logprobs[key] += len(d.logprobs)
            got[key].extend(d.token_ids)
        got_prompts.extend(p.request_id for p in frame.prompts)
        got_ends.extend(e.request_id for e in frame.ends)

    for kind, number, choice, count, scored, limit in events:
        request = f"r{number}"
        if kind == "take":
            take(limit)
        elif request in ended:
            continue
        elif kind == "tokens":
            have = sent[(request, choice)]
            tokens = list(range(len(have), len(have) + count))
            scores = [inference_pb2.TokenLogprob(token_id=t) for t in tokens] if scored else []
            pending.add_tokens(delta(request, choice, len(have), tokens, logprobs=scores))
            have.extend(tokens)
        elif kind == "end":
            ended.add(request)
            pending.add_end(pb.RequestEnd(request_id=request, finished=pb.WorkerFinished(prompt_tokens=count)))
        elif request not in prompts and not sent[(request, 0)] and not sent[(request, 1)]:
            prompts.add(request)
            pending.add_prompt(pb.PromptLogprobs(request_id=request))
    rounds = 0
    while pending:
        take(500)
        rounds += 1
        assert rounds < 1000
    assert {k: v for k, v in got.items() if v} == {k: v for k, v in sent.items() if v}
    assert sorted(got_ends) == sorted(ended)
    assert sorted(got_prompts) == sorted(prompts)


def test_steps_merge_into_one_delta_with_the_last_ones_end() -> None:
    pending = PendingFrame()
    for i in range(10):
        pending.add_tokens(delta("r", 0, i, [i]))
    pending.add_tokens(delta("r", 0, 10, [10, 11], finish_reason=inference_pb2.FINISH_REASON_STOP, stop_token_id=11))
    frame = pending.take(1 << 20)
    assert len(frame.deltas) == 1
    merged = frame.deltas[0]
    assert list(merged.token_ids) == list(range(12))
    assert (merged.first_position, merged.stop_token_id) == (0, 11)
    assert merged.finish_reason == inference_pb2.FINISH_REASON_STOP
    assert not pending
    assert pending.nbytes == 0


def test_an_end_waits_for_the_tokens_that_were_cut_off() -> None:
    pending = PendingFrame()
    pending.add_tokens(delta("a", 0, 0, [1] * 100))
    pending.add_tokens(delta("b", 0, 0, [1] * 100))
    pending.add_end(pb.RequestEnd(request_id="b"))
    first = pending.take(200)
    assert ([d.request_id for d in first.deltas], list(first.ends)) == (["a"], [])
    second = pending.take(200)
    assert ([d.request_id for d in second.deltas], [e.request_id for e in second.ends]) == (["b"], ["b"])


def test_tokens_that_do_not_follow_are_not_merged() -> None:
    pending = PendingFrame()
    pending.add_tokens(delta("a", 0, 0, [1]))
    pending.add_tokens(delta("a", 0, 5, [2]))
    assert [(d.first_position, list(d.token_ids)) for d in pending.take(1 << 20).deltas] == [(0, [1]), (5, [2])]


LIMITS = FrameLimits(heartbeat_s=0.05, write_timeout_s=0.3, max_frame_bytes=1 << 16)


def stream(limits: FrameLimits = LIMITS) -> GatewayStream:
    return GatewayStream("g", incarnation=3, limits=limits, load=lambda: pb.WorkerLoad(free_pages=9))


async def test_the_step_loop_never_waits_and_one_frame_holds_what_a_slow_write_missed() -> None:
    frames: list[pb.FramesResponse] = []
    gate = asyncio.Event()

    async def write(frame: pb.FramesResponse) -> None:
        frames.append(frame)
        await gate.wait()

    gateway = stream(FrameLimits(heartbeat_s=60, write_timeout_s=60))
    task = asyncio.create_task(gateway.run(write))
    gateway.tokens(delta("r", 0, 0, [0]))
    await until(lambda: len(frames) == 1)
    for i in range(1, 1000):
        gateway.tokens(delta("r", 0, i, [i]))
        if i % 100 == 0:
            await asyncio.sleep(0)
    assert len(frames) == 1
    gateway.close()
    gate.set()
    await task
    assert [f.sequence for f in frames] == [1, 2]
    assert len(frames[1].deltas) == 1
    assert list(frames[1].deltas[0].token_ids) == list(range(1, 1000))


async def test_a_write_that_stays_outstanding_ends_the_stream() -> None:
    ended: list[tuple[GatewayStream, KvmeshError]] = []
    hub = FramesHub(incarnation=1, limits=LIMITS, load=pb.WorkerLoad, on_end=lambda s, why: ended.append((s, why)))

    async def write(frame: pb.FramesResponse) -> None:
        await asyncio.Event().wait()

    with pytest.raises(Unavailable):
        await hub.serve("g", write)
    assert [(s.gateway_id, type(why)) for s, why in ended] == [("g", Unavailable)]
    with pytest.raises(FailedPrecondition):
        hub.get("g")
    assert len(hub) == 0


async def test_a_newer_stream_ends_the_older_even_while_its_write_hangs() -> None:
    ended: list[KvmeshError] = []
    hub = FramesHub(incarnation=1, limits=FrameLimits(write_timeout_s=60), load=pb.WorkerLoad,
                    on_end=lambda s, why: ended.append(why))  # fmt: skip

    async def hang(frame: pb.FramesResponse) -> None:
        await asyncio.Event().wait()

    frames: list[pb.FramesResponse] = []

    async def collect(frame: pb.FramesResponse) -> None:
        frames.append(frame)

    first = asyncio.create_task(hub.serve("g", hang))
    await until(lambda: len(hub) == 1)
    old = hub.get("g")
    second = asyncio.create_task(hub.serve("g", collect))
    with pytest.raises(Cancelled):
        await asyncio.wait_for(first, 60)
    assert hub.get("g") is not old
    assert len(ended) == 1
    old.tokens(delta("lost", 0, 0, [1]))
    hub.get("g").tokens(delta("kept", 0, 0, [1]))
    await until(lambda: any(f.deltas for f in frames))
    assert await hub.close(60)
    await second
    assert [d.request_id for f in frames for d in f.deltas] == ["kept"]


async def test_close_flushes_what_is_pending() -> None:
    frames: list[pb.FramesResponse] = []

    async def write(frame: pb.FramesResponse) -> None:
        await asyncio.sleep(0)
        frames.append(frame)

    limits = FrameLimits(heartbeat_s=0.05, write_timeout_s=60, max_frame_bytes=LIMITS.max_frame_bytes)
    hub = FramesHub(incarnation=1, limits=limits, load=pb.WorkerLoad, on_end=lambda s, why: None)
    task = asyncio.create_task(hub.serve("g", write))
    await until(lambda: len(hub) == 1)
    for i in range(500):
        hub.get("g").end(pb.RequestEnd(request_id=f"r{i}", error=pb.WorkerError(message="x" * 500)))
    assert await hub.close(60)
    await task
    assert sum(len(f.ends) for f in frames) == 500
    assert all(f.ByteSize() <= LIMITS.max_frame_bytes + 100 for f in frames)
    with pytest.raises(Unavailable):
        await hub.serve("late", write)


async def test_a_stalled_reader_does_not_disturb_another_gateway_and_loses_its_own() -> None:
    """A client that stops reading Frames, over real gRPC: HTTP/2 flow control makes the worker's write wait."""
    async with running(
        scripted_step_ms=1, write_timeout_s=3.0, max_batch=64, max_queue=64, max_model_len=8192, num_pages=4096
    ) as worker:
        # Without the bandwidth probe the window stays at its 64 KiB.
        async with grpc.aio.insecure_channel(worker.address, options=[("grpc.http2.bdp_probe", 0)]) as channel:
            stub = engine_pb2_grpc.DecodeStub(channel)
            call = stub.Frames(pb.FramesRequest(gateway_id="stalled"))
            await call.read()
            async with Gateway(worker, "well") as well:
                helper = Gateway(worker, "stalled", channel=channel)  # type: ignore[arg-type]
                for i in range(30):
                    request = helper.request(prompt(9, i), sampling=sampling(8000, logprobs=3))
                    await stub.Submit(request, timeout=10)
                stalled = worker.worker.decode.hub.get("stalled")  # type: ignore[union-attr]
                largest = 0
                answers = []
                for i in range(12):
                    answers.append(await well.submit(well.request(prompt(20, i), sampling=sampling(150))))
                for answer in answers:
                    await answer.wait()
                    largest = max(largest, stalled.pending.nbytes)
                await until(lambda: stalled.closed, "the stalled stream is never ended", timeout_s=60)
                await until(lambda: worker.core.load().running == 0, "its sequences go on")
                # The pending frame is bounded by what its sequences make until the timeout, and is then dropped.
                assert 0 < largest < 8 << 20
                for i, answer in enumerate(answers):
                    params = SamplingParams(max_tokens=150, seed=1, ignore_eos=True)
                    assert answer.tokens == {0: scripted_output(prompt(20, i), params)[0]}
                    assert answer.gaps == answer.late == 0
                assert well.sequence_errors == 0
                # The reader that comes back finds a broken stream, not a resumed one.
                async with asyncio.timeout(60):
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        while await call.read() is not grpc.aio.EOF:
                            pass
                    assert await call.code() is grpc.StatusCode.UNAVAILABLE
        await worker.pages_are_back()
