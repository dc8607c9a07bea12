"""Decode without prefill workers: Submit, frames, aborts, refusals, drain. Real gRPC, scripted runner."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh.engine.runner import SamplingParams
from kvmesh.engine.scripted import scripted_output
from kvmesh.proto.v1 import engine_pb2 as pb
from kvmesh.proto.v1 import engine_pb2_grpc, inference_pb2
from kvmesh.rpc.limits import Deadline
from kvmesh.rpc.status import from_rpc_error
from worker_harness import Answer, Gateway, prompt, running, sampling, until


def expected(tokens: list[int], max_tokens: int, seed: int = 1, choice: int = 0) -> list[int]:
    return scripted_output(tokens, SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True), choice)[0]


async def test_streams_end_whole_and_output_is_the_models() -> None:
    async with running() as worker, Gateway(worker) as gateway:
        prompts = [prompt(5 + 13 * i, i) for i in range(12)]
        answers = await asyncio.gather(*[gateway.ask(p, sampling=sampling(20)) for p in prompts])
        for tokens, answer in zip(prompts, answers, strict=True):
            assert answer.tokens == {0: expected(tokens, 20)}
            assert answer.reasons == {0: inference_pb2.FINISH_REASON_LENGTH}
            assert answer.gaps == 0
            assert len(answer.ends) == 1
            assert answer.finished.completion_tokens == 20
            assert answer.finished.prompt_tokens == len(tokens)
        assert gateway.sequence_errors == 0
        await worker.pages_are_back()


async def test_choices_stream_side_by_side() -> None:
    async with running() as worker, Gateway(worker) as gateway:
        tokens = prompt(40)
        answer = await gateway.ask(tokens, sampling=sampling(9, n=2, best_of=3))
        assert answer.tokens == {choice: expected(tokens, 9, choice=choice) for choice in range(3)}
        assert len(answer.reasons) == 3
        assert answer.finished.completion_tokens == 27


async def test_a_healed_request_goes_on_where_it_was() -> None:
    async with running() as worker, Gateway(worker) as gateway:
        tokens = prompt(40)
        whole = expected(tokens, 12)
        request = gateway.request(tokens + whole[:5], prompt_len=40, sampling=sampling(12), attempt=1)
        answer = gateway.answers[request.request_id, 1] = Answer(tokens={0: whole[:5]})
        await (await gateway.submit(request)).wait()
        assert answer.tokens == {0: whole}
        assert answer.gaps == 0


async def test_a_healed_choice_keeps_its_number() -> None:
    async with running() as worker, Gateway(worker) as gateway:
        tokens = prompt(40)
        for output in ([], expected(tokens, 12, choice=2)[:5]):
            request = gateway.request(tokens + output, prompt_len=40, sampling=sampling(12), attempt=3, first_choice=2)
            answer = gateway.answers[request.request_id, 3] = Answer(tokens={2: list(output)})
            await (await gateway.submit(request)).wait()
            assert answer.tokens == {2: expected(tokens, 12, choice=2)}
            assert answer.gaps == 0
            assert answer.finished.completion_tokens == 12 - len(output)


@pytest.mark.parametrize(
    ("values", "code", "field"),
    [
        ({"token_ids": []}, "INVALID_ARGUMENT", "token_ids"),
        ({"token_ids": [1, 512]}, "INVALID_ARGUMENT", "token_ids"),
        ({"token_ids": [1] * 2049}, "INVALID_ARGUMENT", "token_ids"),
        ({"prompt_len": 0}, "INVALID_ARGUMENT", "prompt_len"),
        ({"prompt_len": 4}, "INVALID_ARGUMENT", "prompt_len"),
        ({"request_id": ""}, "INVALID_ARGUMENT", "request_id"),
        ({"request_id": "x" * 129}, "INVALID_ARGUMENT", "request_id"),
        ({"model": "other"}, "NOT_FOUND", "model"),
        ({"gateway_id": "unheard-of"}, "FAILED_PRECONDITION", "gateway_id"),
        ({"ttft_ms": 0}, "INVALID_ARGUMENT", "ttft_ms"),
        ({"cache_salt": "x" * 1025}, "INVALID_ARGUMENT", "cache_salt"),
        ({"sampling": sampling(2046)}, "INVALID_ARGUMENT", "sampling.max_tokens"),
        ({"sampling": sampling(0)}, "INVALID_ARGUMENT", "sampling.max_tokens"),
        ({"sampling": inference_pb2.SamplingParams(seed=1)}, "INVALID_ARGUMENT", "sampling.max_tokens"),
        ({"sampling": inference_pb2.SamplingParams(max_tokens=1)}, "INVALID_ARGUMENT", "sampling.seed"),
        ({"sampling": sampling(temperature=float("nan"))}, "INVALID_ARGUMENT", "sampling.temperature"),
        ({"sampling": sampling(temperature=-1)}, "INVALID_ARGUMENT", "sampling.temperature"),
        ({"sampling": sampling(top_p=0)}, "INVALID_ARGUMENT", "sampling.top_p"),
        ({"sampling": sampling(top_k=513)}, "INVALID_ARGUMENT", "sampling.top_k"),
        ({"sampling": sampling(n=17)}, "INVALID_ARGUMENT", "sampling.n"),
        ({"sampling": sampling(n=3, best_of=2)}, "INVALID_ARGUMENT", "sampling.best_of"),
        ({"sampling": sampling(logprobs=21)}, "INVALID_ARGUMENT", "sampling.logprobs"),
        ({"sampling": sampling(logit_bias={600: 1.0})}, "INVALID_ARGUMENT", "sampling.logit_bias"),
        ({"sampling": sampling(stop_token_ids=[600])}, "INVALID_ARGUMENT", "sampling.stop_token_ids"),
        ({"first_choice": 16}, "INVALID_ARGUMENT", "first_choice"),
        ({"first_choice": 14, "sampling": sampling(n=3)}, "INVALID_ARGUMENT", "first_choice"),
        ({"sampling": sampling(min_tokens=9)}, "INVALID_ARGUMENT", "sampling.min_tokens"),
    ],
)
async def test_refusals_name_the_field(values: dict[str, object], code: str, field: str) -> None:
    async with running() as worker, Gateway(worker) as gateway:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway.submit(gateway.request([1, 2, 3], **values))
        assert caught.value.code().name == code
        assert from_rpc_error(caught.value).details["field"] == field
        assert worker.core.load().waiting + worker.core.load().running == 0


async def test_more_than_all_pages_is_too_large_not_overload() -> None:
    async with running(num_pages=4) as worker, Gateway(worker) as gateway:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway.submit(gateway.request(prompt(60), sampling=sampling(30)))
        assert from_rpc_error(caught.value).reason == "TOO_LARGE"


async def test_the_same_attempt_twice_already_exists_another_attempt_does_not() -> None:
    async with running(scripted_step_ms=5) as worker, Gateway(worker) as gateway:
        request = gateway.request(prompt(5), sampling=sampling(1900))
        first = await gateway.submit(request)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway.submit(request)
        assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
        request.attempt = 1
        second = await gateway.submit(request)
        assert await gateway.abort() == 2
        for answer in (first, second):
            await answer.wait()
            assert answer.error is not None
            assert answer.error.reason == "CANCELLED"


async def test_a_full_queue_refuses_with_retry_info() -> None:
    async with running(max_batch=1, max_queue=1, scripted_step_ms=20) as worker, Gateway(worker) as gateway:
        running_one = await gateway.submit(gateway.request(prompt(5), sampling=sampling(500)))
        await asyncio.wait_for(running_one.first.wait(), 60)
        waiting = await gateway.submit(gateway.request(prompt(6), sampling=sampling(500)))
        # Measured by the core, not only posted to it: between the two a refusal comes as a terminal.
        await until(lambda: worker.core._load.waiting == 1)
        for i in range(3):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await gateway.submit(gateway.request(prompt(7, i)))
            error = from_rpc_error(caught.value)
            assert error.reason == "OVERLOADED"
            assert error.retry_after is not None
        assert await gateway.abort() == 2
        await running_one.wait()
        await waiting.wait()
        await worker.pages_are_back()


async def test_a_burst_over_the_queue_is_refused_by_status_or_by_terminal() -> None:
    async with running(max_batch=1, max_queue=2, scripted_step_ms=1) as worker, Gateway(worker) as gateway:
        requests = [gateway.request(prompt(5, i), sampling=sampling(200)) for i in range(20)]
        outcomes = await asyncio.gather(*[gateway.submit(r) for r in requests], return_exceptions=True)
        accepted = [o for o in outcomes if not isinstance(o, BaseException)]
        for answer in accepted:
            await answer.wait()
            assert len(answer.ends) == 1
        good = [answer for answer in accepted if answer.error is None]
        assert 1 <= len(good) < 20
        assert all(answer.error is None or answer.error.reason == "OVERLOADED" for answer in accepted)
        assert all(from_rpc_error(o).reason == "OVERLOADED" for o in outcomes if isinstance(o, grpc.RpcError))
        await worker.pages_are_back()


async def test_abort_of_single_choices_is_silent_until_all_have_ended() -> None:
    async with running(scripted_step_ms=2) as worker, Gateway(worker) as gateway:
        request = gateway.request(prompt(5), sampling=sampling(1900, n=2))
        answer = await gateway.submit(request)
        await asyncio.wait_for(answer.first.wait(), 60)
        assert await gateway.abort(request.request_id, choices=(0,)) == 1
        await until(lambda: worker.core.load().running == 1)
        assert not answer.ended.is_set()
        assert await gateway.abort(request.request_id, choices=(1,)) == 1
        await answer.wait()
        assert answer.error is None
        assert answer.reasons == {}
        # Idempotent, and nothing is found any more.
        assert await gateway.abort(request.request_id) == 0


async def test_another_gateways_requests_cannot_be_aborted() -> None:
    async with running(scripted_step_ms=2) as worker, Gateway(worker, "a") as mine, Gateway(worker, "b") as other:
        request = mine.request(prompt(5), sampling=sampling(30))
        answer = await mine.submit(request)
        assert await other.abort(request.request_id) == 0
        assert await other.abort() == 0
        await answer.wait()
        assert answer.error is None


async def test_time_limits_end_in_one_terminal() -> None:
    async with running(scripted_step_ms=20) as worker, Gateway(worker) as gateway:
        late = await gateway.ask(prompt(5), sampling=sampling(1000), total_ms=1500)
        assert late.error is not None
        assert late.error.reason == "DEADLINE_EXCEEDED"
        assert late.tokens[0]
        slow = await gateway.ask(prompt(1500, 3), sampling=sampling(3), ttft_ms=250)
        assert slow.error is not None
        assert slow.error.reason == "DEADLINE_EXCEEDED"
        assert not slow.tokens
        await worker.pages_are_back()


async def test_the_end_of_frames_aborts_that_gateway_alone() -> None:
    async with running(scripted_step_ms=2) as worker, Gateway(worker, "stays") as stays:
        async with Gateway(worker, "leaves") as leaves:
            await leaves.submit(leaves.request(prompt(5), sampling=sampling(1900)))
            answer = await stays.submit(stays.request(prompt(7), sampling=sampling(100)))
        await until(lambda: worker.core.load().running <= 1, "the gateway's sequence goes on without it")
        await answer.wait()
        assert answer.tokens == {0: expected(prompt(7), 100)}
        await worker.pages_are_back()


async def test_a_second_frames_of_the_same_gateway_ends_the_first() -> None:
    async with running(scripted_step_ms=5) as worker:
        async with Gateway(worker, "g") as first:
            old = await first.submit(first.request(prompt(5), sampling=sampling(1900)))
            async with Gateway(worker, "g") as second:
                await asyncio.wait({first._reader}, timeout=60)
                assert isinstance(first._reader.exception(), grpc.aio.AioRpcError)  # type: ignore[union-attr]
                new = await second.ask(prompt(6), sampling=sampling(5), request_id="new")
                assert new.tokens == {0: expected(prompt(6), 5)}
                await until(lambda: worker.core.load().running == 0)
                # What belonged to the first stream never shows on the second.
                assert set(second.answers) == {("new", 0)}
            assert not old.ended.is_set()


async def test_heartbeats_carry_the_load_and_count_without_gaps() -> None:
    async with running(heartbeat_s=0.05) as worker, Gateway(worker) as gateway:
        await until(lambda: gateway.frames >= 4)
        assert gateway.sequence_errors == 0
        assert gateway.last is not None
        assert gateway.last.load.total_pages == 256
        assert gateway.last.incarnation == worker.worker.incarnation


async def test_describe_and_load() -> None:
    async with running() as worker:
        stub = engine_pb2_grpc.EngineStub(worker.channel)
        answer = await stub.Describe(pb.DescribeRequest(), timeout=60)
        assert answer.info.role == pb.WORKER_ROLE_UNIFIED
        assert answer.info.state == pb.WORKER_STATE_SERVING
        assert answer.info.address == worker.address
        assert len(answer.info.base_seed) == 16
        assert len(answer.info.layout_fingerprint) == 16
        load = await stub.GetLoad(pb.GetLoadRequest(), timeout=60)
        assert load.load.free_pages == load.load.total_pages == 256


async def test_drain_lets_work_finish_and_refuses_new() -> None:
    async with running(scripted_step_ms=5) as worker, Gateway(worker) as gateway:
        answer = await gateway.submit(gateway.request(prompt(5), sampling=sampling(60)))
        stub = engine_pb2_grpc.EngineStub(worker.channel)
        seen = [progress async for progress in stub.Drain(pb.DrainRequest(timeout_ms=60_000), timeout=90)]
        assert [p.drained for p in seen] == [False] * (len(seen) - 1) + [True]
        assert answer.tokens == {0: expected(prompt(5), 60)}
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway.submit(gateway.request(prompt(5)))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        health = health_pb2_grpc.HealthStub(worker.channel)
        for service in ("kvmesh.v1.Engine", "kvmesh.v1.Decode"):
            status = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=60)
            assert status.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_shutdown_ends_what_does_not_finish_with_one_terminal_each_and_flushes() -> None:
    async with running(scripted_step_ms=5) as worker, Gateway(worker) as gateway:
        answers = [await gateway.submit(gateway.request(prompt(5, i), sampling=sampling(2000))) for i in range(5)]
        await asyncio.wait_for(answers[-1].first.wait(), 60)
        await worker.worker.drain(Deadline.after(0.2))
        await asyncio.wait({gateway._reader}, timeout=60)  # type: ignore[arg-type]
        for answer in answers:
            assert len(answer.ends) == 1
            assert answer.error is not None
            assert (answer.error.reason, answer.error.retryable) == ("UNAVAILABLE", True)
        await worker.pages_are_back()


async def test_a_stall_turns_readiness_off_and_back_on(tmp_path: Path) -> None:
    faults = tmp_path / "faults.json"
    faults.write_text('{"hang_step": 3, "hang_s": 4}')
    async with running(stall_timeout_s=0.3, scripted_faults=faults) as worker, Gateway(worker) as gateway:
        answer = await gateway.submit(gateway.request(prompt(5), sampling=sampling(10)))
        await until(lambda: not worker.server.ready, "a hanging step does not turn readiness off")
        assert worker.worker.status.state == pb.WORKER_STATE_STALLED
        await answer.wait()
        await until(lambda: worker.server.ready, "readiness does not come back")


async def test_drain_tells_the_end_of_a_request_though_its_step_hangs(tmp_path: Path) -> None:
    """However short the drain timeout is: ending takes a part of it."""
    faults = tmp_path / "faults.json"
    faults.write_text('{"hang_step": 3, "hang_s": 4}')
    async with running(stall_timeout_s=0.3, scripted_faults=faults) as worker, Gateway(worker) as gateway:
        answer = await gateway.submit(gateway.request(prompt(5), sampling=sampling(10)))
        await until(lambda: not worker.server.ready, "a hanging step does not turn readiness off")
        # As the server does it: what is not done by the deadline is cut off.
        async with asyncio.timeout(1.5):
            await worker.worker.drain(Deadline.after(1.5))
        await answer.wait()
        assert answer.error is not None
        assert answer.error.reason == "UNAVAILABLE"
        assert len(answer.ends) == 1


async def test_a_step_that_hangs_past_the_deadline_does_not_hold_the_terminal_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmesh.engine.worker.requests.OVERDUE_S", 0.1)
    monkeypatch.setattr("kvmesh.engine.worker.bootstrap.HOUSEKEEPING_S", 0.05)
    faults = tmp_path / "faults.json"
    faults.write_text('{"hang_step": 3, "hang_s": 6}')
    async with running(scripted_faults=faults) as worker, Gateway(worker) as gateway:
        answer = await gateway.submit(gateway.request(prompt(5), sampling=sampling(10), total_ms=1000))
        await answer.wait(5.0)
        assert answer.error is not None
        assert answer.error.reason == "DEADLINE_EXCEEDED"
        again = await gateway.ask(prompt(6), sampling=sampling(5))
        assert again.tokens == {0: expected(prompt(6), 5)}
        assert len(answer.ends) == 1
        assert answer.late == 0
        await worker.pages_are_back()


async def test_failed_step_is_one_error_terminal_each(tmp_path: Path) -> None:
    faults = tmp_path / "faults.json"
    faults.write_text('{"fail_steps": [4]}')
    async with running(scripted_faults=faults, scripted_step_ms=2) as worker, Gateway(worker) as gateway:
        answers = await asyncio.gather(*[gateway.ask(prompt(5, i), sampling=sampling(50)) for i in range(3)])
        assert all(len(answer.ends) == 1 for answer in answers)
        assert any(answer.error is not None for answer in answers)
        again = await gateway.ask(prompt(9), sampling=sampling(5))
        assert again.tokens == {0: expected(prompt(9), 5)}
