"""What the client sees of tokens: text, stop strings, choices, best_of, log-probabilities."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway_fakes import EOS, FakeWorker
from gateway_world import World, end_of, kinds, next_event, rest, text_of
from kvmesh.proto.v1 import engine_pb2
from kvmesh.proto.v1 import inference_pb2 as pb


def deltas(events: list[pb.GenerateEvent], choice: int = 0) -> list[pb.Delta]:
    return [event.delta for event in events if event.HasField("delta") and event.delta.choice == choice]


async def submitted(worker: FakeWorker, call: Any) -> engine_pb2.SubmitRequest:
    (request,) = await worker.submits.wait()
    return request


async def hold(request: Any) -> None:
    """Accept and send nothing."""


@pytest.fixture
def keep(world: World) -> Any:
    """A worker that the test drives, and the gateway."""

    async def start(**kwargs: Any) -> FakeWorker:
        worker = await world.worker(**kwargs)
        worker.on_submit = hold
        await world.start(static=True)
        return worker

    return start


async def test_a_stop_string_over_frame_borders_ends_the_choice_and_the_worker_is_told(world: World, keep: Any) -> None:
    worker = await keep()
    call = world.chat(sampling={"stop": ["END", "never"]})
    request = await submitted(worker, call)
    assert not request.sampling.stop
    for position, token in enumerate(b"ab E"):
        worker.tokens(request, [token], position)
    # The rest of the frame comes after the stop and is nobody's.
    worker.tokens(request, list(b"NDxyz"), 4)
    (abort,) = await worker.aborts.wait()
    assert list(abort.choices) == [0]
    worker.tokens(request, list(b"late"), 9)
    worker.end(request, completion_tokens=13, cached_tokens=3, transport="shm", transfer_bytes=99, prefill_worker="p")
    events = await rest(call)
    assert text_of(events) == "ab "
    last = deltas(events)[-1]
    assert (last.finish_reason, last.stop_reason) == (pb.FINISH_REASON_STOP, "END")
    ids = [token for delta in deltas(events) for token in delta.token_ids]
    assert bytes(ids) == b"ab END"
    finished = events[-1].finished
    assert finished.usage.completion_tokens == 6
    assert finished.usage.cached_tokens == 3
    assert (finished.served.transport, finished.served.transfer_bytes) == ("shm", 99)
    assert finished.served.prefill_worker == "p"


async def test_after_a_stop_string_the_client_does_not_wait_for_a_worker_that_is_gone(world: World, keep: Any) -> None:
    worker = await keep()
    call = world.chat(sampling={"stop": ["b"]})
    request = await submitted(worker, call)
    worker.tokens(request, list(b"ab"))
    await worker.aborts.wait()
    worker.break_stream()
    events = await rest(call)
    assert kinds(events) == ["accepted", "delta", "finished"]
    assert text_of(events) == "a"


async def test_no_stop_string_before_min_tokens(world: World, keep: Any) -> None:
    worker = await keep()
    call = world.chat(sampling={"stop": ["x"], "min_tokens": 3})
    request = await submitted(worker, call)
    worker.tokens(request, list(b"xaxbxc"))
    worker.end(request)
    assert text_of(await rest(call)) == "xaxb"


async def test_held_back_text_comes_when_the_output_ends_otherwise(world: World, keep: Any) -> None:
    worker = await keep()
    call = world.chat(sampling={"stop": ["abcd"], "max_tokens": 3})
    request = await submitted(worker, call)
    worker.tokens(request, list(b"abc"), finish_reason=pb.FINISH_REASON_LENGTH)
    worker.end(request)
    events = await rest(call)
    assert text_of(events) == "abc"
    assert deltas(events)[-1].finish_reason == pb.FINISH_REASON_LENGTH


@pytest.mark.parametrize(("token", "reason"), [(EOS, ""), (90, "90")])
async def test_a_stop_token_is_output_but_not_text(world: World, keep: Any, token: int, reason: str) -> None:
    worker = await keep()
    call = world.chat(sampling={"stop_token_ids": [90]})
    request = await submitted(worker, call)
    worker.tokens(request, [65, token], finish_reason=pb.FINISH_REASON_STOP, stop_token_id=token)
    worker.end(request)
    events = await rest(call)
    assert text_of(events) == "A"
    assert list(deltas(events)[-1].token_ids) == [65, token]
    assert deltas(events)[-1].stop_reason == reason


async def test_choices_are_apart(world: World, keep: Any) -> None:
    worker = await keep()
    call = world.chat(sampling={"n": 3, "stop": ["!"]})
    request = await submitted(worker, call)
    assert request.sampling.best_of == 3
    half = list("é".encode())
    worker.tokens(request, half[:1], choice=0)
    worker.tokens(request, list(b"x!"), choice=1)
    worker.tokens(request, half[1:], 1, choice=0)
    worker.tokens(request, [EOS], 2, choice=0, finish_reason=pb.FINISH_REASON_STOP, stop_token_id=EOS)
    worker.tokens(request, list(b"zz"), choice=2, finish_reason=pb.FINISH_REASON_LENGTH)
    worker.end(request)
    events = await rest(call)
    assert [text_of(events, choice) for choice in range(3)] == ["é", "x", "zz"]
    assert [list(abort.choices) for abort in await worker.aborts.wait()] == [[1]]
    assert all(len([d for d in deltas(events, c) if d.finish_reason]) == 1 for c in range(3))
    assert events[-1].finished.usage.completion_tokens == 3 + 2 + 2


async def test_best_of_returns_the_likeliest_choices_at_the_end(world: World, keep: Any) -> None:
    worker = await keep()
    call = world.chat(sampling={"n": 2, "best_of": 3, "stop": ["!"]})
    request = await submitted(worker, call)
    # Stop strings cut choices here, and choices may be healed, so the gateway weighs tokens itself; the client asked
    # for none.
    assert request.sampling.HasField("logprobs")

    def token(choice: int, position: int, value: int, logprob: float, **fields: Any) -> None:
        logprobs = [pb.TokenLogprob(token_id=value, logprob=logprob)]
        worker.tokens(request, [value], position, choice, logprobs=logprobs, **fields)

    token(0, 0, 65, -1.0)
    token(0, 1, 66, -5.0, finish_reason=pb.FINISH_REASON_LENGTH)
    token(1, 0, 67, -2.0, finish_reason=pb.FINISH_REASON_LENGTH)
    token(2, 0, 68, -0.5)
    token(2, 1, ord("!"), -1.5)
    worker.end(request)
    events = await rest(call)
    # Means: -3, -2, -1.
    assert [text_of(events, choice) for choice in range(2)] == ["D", "C"]
    assert len([event for event in events if event.HasField("delta")]) == 2
    assert not any(delta.logprobs for delta in deltas(events))
    assert events[-1].finished.usage.completion_tokens == 3


async def test_logprobs_name_their_tokens_and_are_cut_with_them(world: World, keep: Any) -> None:
    worker = await keep()
    call = world.chat(sampling={"logprobs": 1, "stop": ["B"]})
    request = await submitted(worker, call)
    entries = [
        pb.TokenLogprob(token_id=token, logprob=-1.0, rank=1, top=[pb.TopLogprob(token_id=256, logprob=-2.0)])
        for token in b"ABC"
    ]
    worker.tokens(request, list(b"ABC"), logprobs=entries)
    worker.end(request)
    (delta,) = deltas(await rest(call))
    assert [entry.token for entry in delta.logprobs] == [b"A", b"B"]
    assert delta.logprobs[0].top[0].token == b"<|im_start|>"


async def test_prompt_logprobs_come_first_and_need_a_unified_worker(world: World) -> None:
    worker = await world.worker()
    await world.start(static=True)
    error = await end_of(world.chat(sampling={"prompt_logprobs": 0}))
    assert error.code().name == "FAILED_PRECONDITION"
    assert not worker.submits.items


async def test_prompt_logprobs_on_a_unified_worker(world: World) -> None:
    worker = await world.worker(role=engine_pb2.WORKER_ROLE_UNIFIED)
    worker.on_submit = hold
    await world.start(static=True)
    call = world.chat(sampling={"prompt_logprobs": 0})
    request = await submitted(worker, call)
    scored = engine_pb2.PromptLogprobs(
        request_id=request.request_id, attempt=request.attempt, logprobs=[pb.TokenLogprob(token_id=65, logprob=-1)]
    )
    worker.frame(request, prompts=[scored])
    worker.answer(request, "x")
    events = await rest(call)
    assert kinds(events) == ["accepted", "prompt", "delta", "finished"]
    assert events[1].prompt.logprobs[0].token == b"A"


async def test_ttft_is_the_first_sampled_token(world: World, keep: Any) -> None:
    worker = await keep()
    call = world.chat()
    request = await submitted(worker, call)
    await asyncio.sleep(0.05)
    worker.tokens(request, [0xF0])  # the first byte of an emoji: a token, though no text yet
    while not (event := await next_event(call)).HasField("delta"):
        pass
    assert (event.delta.text, list(event.delta.token_ids)) == ("", [0xF0])
    await asyncio.sleep(0.05)
    worker.tokens(request, [0x9F, 0x8E, 0x89], 1, finish_reason=pb.FINISH_REASON_LENGTH)
    worker.end(request)
    events = await rest(call)
    served = events[-1].finished.served
    assert 45 <= served.ttft_ms < served.total_ms - 45
    assert served.queue_ms <= served.ttft_ms


async def test_the_worker_ends_without_a_finish_reason(world: World, keep: Any) -> None:
    worker = await keep()
    call = world.chat()
    request = await submitted(worker, call)
    worker.tokens(request, [65])
    worker.end(request)
    events = await rest(call)
    assert events[-1].error.reason == "INTERNAL"
    assert events[-1].error.usage.completion_tokens == 1


async def test_the_seed_is_told_and_sent(world: World, keep: Any) -> None:
    worker = await keep()
    call = world.chat()
    request = await submitted(worker, call)
    worker.answer(request, "x")
    events = await rest(call)
    assert events[0].accepted.seed == request.sampling.seed
