"""Remote prefill between two workers over real gRPC; the sidecars are fakes that copy pages and fail on command."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from kvmesh.engine.events import RequestKey
from kvmesh.engine.runner import SamplingParams
from kvmesh.engine.scripted import scripted_output
from kvmesh.engine.worker.steps import RequestStep
from kvmesh.proto.v1 import engine_pb2 as pb
from kvmesh.proto.v1 import engine_pb2_grpc
from kvmesh.telemetry import metrics, names
from kvmesh.transfer.descriptor import build_descriptor, slot_bytes
from worker_fakes import Fabric
from worker_harness import Gateway, Running, prompt, running, sampling, until

PAGE = 16


def expected(tokens: list[int], max_tokens: int, seed: int = 1) -> list[int]:
    return scripted_output(tokens, SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True))[0]


class Steps:
    """A hook that reports steps and may do something at one of them, once."""

    def __init__(self) -> None:
        self.seen: list[RequestStep] = []
        self.at: RequestStep | None = None
        self.action: Any = None
        self.acted = asyncio.Event()

    async def __call__(self, step: RequestStep, key: RequestKey) -> None:
        self.seen.append(step)
        if step is self.at and not self.acted.is_set():
            self.acted.set()
            await self.action(key)


class Mesh:
    def __init__(self, decode: Running, prefills: list[Running], gateway: Gateway, steps: Steps) -> None:
        self.decode, self.prefills, self.gateway, self.steps = decode, prefills, gateway, steps

    @property
    def prefill(self) -> Running:
        return self.prefills[0]

    async def submit(self, tokens: list[int], **values: Any) -> Any:
        values.setdefault("prefill", [p.target() for p in self.prefills])
        return await self.gateway.submit(self.gateway.request(tokens, **values))

    async def ask(self, tokens: list[int], **values: Any) -> Any:
        return await (await self.submit(tokens, **values)).wait()

    async def all_back(self) -> None:
        for worker in (self.decode, *self.prefills):
            await until(lambda w=worker: not w.worker.ctx.cleanups, "a cleanup never ends")
            await worker.pages_are_back()

            def left(w: Running = worker) -> int:
                load = w.core.load()
                return load.running + load.waiting + load.transferring  # type: ignore[no-any-return]

            await until(lambda w=worker: left(w) == 0, f"work is left: {worker.core.load()}")


@asynccontextmanager
async def mesh(prefills: int = 1, *, prefill: dict[str, Any] | None = None, **values: Any) -> AsyncIterator[Mesh]:
    fabric, steps = Fabric(), Steps()
    async with running(fabric=fabric, role="decode", instance="decode-0", at_step=steps, **values) as decode:
        started: list[Any] = []
        try:
            for i in range(prefills):
                context = running(
                    fabric=fabric, role="prefill", instance=f"prefill-{i}", at_step=steps, **(prefill or {})
                )
                started.append((context, await context.__aenter__()))
            async with Gateway(decode) as gateway:
                yield Mesh(decode, [worker for _, worker in started], gateway, steps)
        finally:
            for context, _ in started:
                await context.__aexit__(None, None, None)


@pytest.mark.parametrize("length", [18, 32, 33, 34, 100, 161, 700])
async def test_output_equals_the_models_and_bytes_moved(length: int) -> None:
    async with mesh() as m:
        tokens = prompt(length)
        answer = await m.ask(tokens, sampling=sampling(20))
        assert answer.tokens == {0: expected(tokens, 20)}
        finished = answer.finished
        layout = m.decode.worker.ctx.identity.layout
        pages = layout.pages_for(length - 1)
        assert finished.transfer_bytes == pages * layout.page_bytes("kv") * 4
        assert finished.prefill_worker == "prefill-0"
        assert finished.transport == "fake"
        assert finished.prefill_retries == 0
        await m.all_back()


async def test_prefix_caches_of_both_sides_are_used() -> None:
    async with mesh(2) as m:
        tokens = prompt(100)
        await m.ask(tokens, prefill=[m.prefill.target()])
        # decode holds 6 blocks of the prompt (96 tokens): what is left is under a page and is computed there.
        again = await m.ask([*tokens[:99], 5, 6])
        assert again.finished.cached_tokens == 96
        assert again.finished.transfer_bytes == 0
        # Another salt: nothing is shared on decode, nor on prefill.
        salted = await m.ask(tokens, cache_salt="s", prefill=[m.prefill.target()])
        assert salted.finished.cached_tokens == 0
        assert salted.finished.transfer_bytes > 0
        # Longer than what decode has: only the missing blocks travel, prefill's own hit leaves at once.
        longer = tokens[:96] + prompt(104, 9)
        result = await m.ask(longer, sampling=sampling(11), prefill=[m.prefill.target()])
        layout = m.decode.worker.ctx.identity.layout
        assert result.finished.transfer_bytes == (layout.pages_for(199) - 6) * layout.page_bytes("kv") * 4
        assert result.tokens == {0: expected(longer, 11)}
        await m.all_back()


async def test_a_cached_prompt_leaves_prefill_without_computation() -> None:
    async with mesh() as m:
        tokens = prompt(97)
        await m.ask(tokens, sampling=sampling(2))
        steps = m.prefill.core.counters.prefill_tokens
        m.decode.core.cache.clear()
        answer = await m.ask(tokens, sampling=sampling(7))
        assert answer.tokens == {0: expected(tokens, 7)}
        assert answer.finished.cached_tokens == 96
        assert m.prefill.core.counters.prefill_tokens == steps
        await m.all_back()


async def test_short_prompts_and_no_targets_stay_here() -> None:
    async with mesh() as m:
        short = await m.ask(prompt(PAGE + 1), sampling=sampling(3))
        assert short.finished.transfer_bytes == 0
        alone = await m.ask(prompt(80), prefill=[], sampling=sampling(3))
        assert alone.finished.transfer_bytes == 0
        assert m.prefill.core.counters.steps == 0
        longer = await m.ask(prompt(PAGE + 2, 5), sampling=sampling(3))
        assert longer.finished.transfer_bytes > 0


async def test_unreachable_then_overloaded_then_served() -> None:
    async with mesh(2, prefill={"max_queue": 0, "max_batch": 1, "scripted_step_ms": 1}) as m:
        nobody = pb.PrefillTarget(worker_id="nobody", address="127.0.0.1:1")
        answer = await m.ask(prompt(80), prefill=[nobody, m.prefills[1].target()], sampling=sampling(5))
        assert answer.tokens == {0: expected(prompt(80), 5)}
        assert answer.finished.prefill_retries == 1
        assert answer.finished.prefill_worker == "prefill-1"
        await m.all_back()


async def test_every_target_refuses_then_local() -> None:
    async with mesh(2) as m:
        for worker in m.prefills:
            worker.sidecar.refuse_start = "no common transport"
        answer = await m.ask(prompt(120), sampling=sampling(6))
        assert answer.tokens == {0: expected(prompt(120), 6)}
        assert answer.finished.prefill_retries == 2
        assert answer.finished.prefill_worker == ""
        await m.all_back()


async def test_a_sidecar_lost_in_the_middle_ends_in_local_prefill() -> None:
    async with mesh() as m:
        m.prefill.sidecar.hold_writes = True
        answer = await m.submit(prompt(300), sampling=sampling(6))
        await until(lambda: m.prefill.sidecar.waiting)
        link: Any = m.decode.worker.ctx.link
        await link.lose()
        await answer.wait()
        assert answer.tokens == {0: expected(prompt(300), 6)}
        # Without a sidecar decode goes on serving.
        more = await m.ask(prompt(90, 4), sampling=sampling(6))
        assert more.tokens == {0: expected(prompt(90, 4), 6)}
        assert m.decode.server.ready
        await m.all_back()


async def test_prefill_tells_routers_of_the_prompts_it_took() -> None:
    """Else their credit for it would last until its time is over, and show a load that has long been computed."""
    async with mesh() as m:
        seen: list[str] = []
        m.prefill.worker.routers.on_seen = seen.append  # type: ignore[union-attr, method-assign]
        answer = await m.submit(prompt(90), sampling=sampling(6), request_id="mine")
        await answer.wait()
        assert seen == ["mine"]
        await m.all_back()


async def test_prefill_without_its_sidecar_is_not_serving_and_refuses() -> None:
    async with mesh() as m:
        link: Any = m.prefill.worker.ctx.link
        await link.lose()
        assert not m.prefill.server.ready
        assert m.prefill.worker.status.state == pb.WORKER_STATE_STALLED
        answer = await m.ask(prompt(90), sampling=sampling(6))
        assert answer.finished.prefill_retries == 1
        assert answer.tokens == {0: expected(prompt(90), 6)}
        await m.all_back()


async def test_drain_that_does_not_come_leaves_the_pages_behind_and_goes_on() -> None:
    async with mesh() as m:
        m.decode.worker.ctx.drain_wait_s = 0.1
        m.decode.sidecar.hold_drains = True
        m.prefill.sidecar.hold_writes = True
        m.decode.worker.ctx.settings.__dict__["prefill_timeout_s"] = 0.3
        answer = await m.ask(prompt(200), sampling=sampling(6))
        assert answer.tokens == {0: expected(prompt(200), 6)}
        assert m.decode.core.pool.counts().draining == 13
        m.decode.sidecar.let_drain()
        await m.all_back()


async def test_prefill_that_finishes_without_all_bytes_is_a_failure_not_a_success() -> None:
    async with mesh() as m:
        m.decode.worker.ctx.lease_s = 0.3
        fake = m.prefill.sidecar

        original = fake._write

        def lie(transfer: Any, first: int, count: int) -> None:
            original(transfer, first, max(0, count - 1))
            if not transfer.handle.done.done():
                transfer.handle.done.set_result(transfer.sent)

        fake._write = lie  # type: ignore[method-assign]
        answer = await m.ask(prompt(60), sampling=sampling(6))
        assert answer.tokens == {0: expected(prompt(60), 6)}
        assert answer.finished.prefill_retries == 1
        assert answer.finished.transfer_bytes == 0
        await m.all_back()


async def test_deadline_holds_while_waiting_for_kv() -> None:
    async with mesh() as m:
        m.prefill.sidecar.hold_writes = True
        answer = await m.ask(prompt(200), ttft_ms=1000)
        assert answer.error.reason == "DEADLINE_EXCEEDED"
        assert len(answer.ends) == 1
        m.prefill.sidecar.let_write()
        await m.all_back()


async def test_cancelled_prefill_stops_at_the_next_chunk() -> None:
    async with mesh(prefill={"scripted_step_ms": 100, "chunk_size": 16}) as m:
        request = m.gateway.request(prompt(1600), prefill=[m.prefill.target()])
        answer = await m.gateway.submit(request)
        await until(lambda: m.prefill.core.counters.prefill_tokens > 0)
        await m.gateway.abort(request.request_id)
        await answer.wait()
        await m.all_back()
        assert m.prefill.core.counters.prefill_tokens < 800


async def test_a_slot_whose_opening_was_cancelled_is_closed_when_it_comes() -> None:
    async with mesh() as m:
        m.decode.sidecar.open_gate.clear()
        request = m.gateway.request(prompt(200), prefill=[m.prefill.target()])
        answer = await m.gateway.submit(request)
        await until(lambda: RequestStep.OPENING_SLOT in m.steps.seen)
        await m.gateway.abort(request.request_id)
        await answer.wait()
        assert not m.decode.sidecar.slots
        m.decode.sidecar.open_gate.set()
        await until(lambda: [slot.closed for slot in m.decode.sidecar.slots.values()] == [True], "the slot stays open")
        await m.all_back()


async def test_a_sidecar_that_never_answers_costs_a_lease_not_the_request() -> None:
    async with mesh() as m:
        m.decode.worker.ctx.lease_s = 0.2
        m.decode.sidecar.open_gate.clear()
        answer = await m.ask(prompt(200), sampling=sampling(5))
        assert answer.tokens == {0: expected(prompt(200), 5)}
        m.decode.sidecar.open_gate.set()
        await until(lambda: [slot.closed for slot in m.decode.sidecar.slots.values()] == [True], "the slot stays open")
        await m.all_back()


async def run_alone(m: Mesh, length: int) -> Any:
    """A Run into a slot of decode that no request of decode's own watches."""
    destination, layout = m.decode.sidecar, m.decode.worker.ctx.identity.layout
    groups = {"kv": list(range(layout.pages_for(length)))}
    slot = await destination.open_slot(
        expected_bytes=slot_bytes(layout, groups), groups=groups, request_id="r", ttl_s=5
    )
    descriptor = build_descriptor(destination, slot, groups=groups, first_block=0, num_tokens=length)
    run = pb.RunRequest(
        request_id="r", model="scripted", token_ids=prompt(length), descriptor=descriptor.SerializeToString()
    )
    return engine_pb2_grpc.PrefillStub(m.prefill.channel).Run(run, timeout=20)


async def test_a_transfer_whose_start_was_cancelled_is_cancelled_when_it_comes() -> None:
    async with mesh() as m:
        m.prefill.sidecar.start_gate.clear()
        call = await run_alone(m, 100)
        await until(lambda: RequestStep.RUN_ADMITTED in m.steps.seen)
        call.cancel()
        await until(lambda: m.prefill.worker.ctx.cleanups)
        await m.prefill.core_has_looked()
        # Its sidecar is asked to answer soon.
        await until(lambda: len(m.prefill.sidecar.given_up) == 1)
        # Its pages must not go to anyone else before it is known whether they are being read.
        assert m.prefill.core.pool.counts().free == m.prefill.core.pool.total - 7
        m.prefill.sidecar.start_gate.set()
        await m.prefill.pages_are_back()
        assert [transfer.asked for transfer in m.prefill.sidecar.transfers.values()] == [1]


async def test_a_call_that_is_cancelled_stops_its_transfer_though_nobody_closes_the_slot() -> None:
    async with mesh() as m:
        m.prefill.sidecar.hold_writes = True
        call = await run_alone(m, 100)
        await until(lambda: RequestStep.COMPUTED in m.steps.seen)
        call.cancel()
        await until(lambda: [transfer.asked for transfer in m.prefill.sidecar.transfers.values()] == [1])
        await m.prefill.pages_are_back()


@pytest.mark.parametrize("fault", [None, OSError("programmed")], ids=["told", "not told"])
async def test_source_pages_stay_until_the_last_write_has_completed(fault: Exception | None) -> None:
    async with mesh() as m:
        source = m.prefill.sidecar
        source.hold_writes = source.hold_stops = True
        cancel = source.cancel_transfer

        async def cancel_transfer(*args: Any) -> None:
            await cancel(*args)
            if fault is not None:
                raise fault

        source.cancel_transfer = cancel_transfer
        request = m.gateway.request(prompt(200), prefill=[m.prefill.target()])
        answer = await m.gateway.submit(request)
        await until(lambda: RequestStep.COMPUTED in m.steps.seen)
        await m.gateway.abort(request.request_id)
        await answer.wait()
        # Decode closes its slot, prefill cancels its transfer: both are asked for, neither has drained.
        await until(lambda: [transfer.asked for transfer in source.transfers.values()] == [2])
        await m.prefill.core_has_looked()
        # Draining as long as the sidecar may still read them.
        assert sum(m.prefill.core.pool.counts()[2:]) == 13
        assert len(m.prefill.worker.prefill) == 1
        source.let_write()
        await m.all_back()


async def test_destination_pages_stay_until_drained_though_the_request_has_ended() -> None:
    async with mesh() as m:
        m.prefill.sidecar.hold_writes = True
        m.decode.sidecar.hold_drains = True
        request = m.gateway.request(prompt(200), prefill=[m.prefill.target()])
        answer = await m.gateway.submit(request)
        await until(lambda: m.prefill.sidecar.waiting)
        await m.gateway.abort(request.request_id)
        await answer.wait()
        await until(lambda: m.decode.core.pool.counts().draining == 13)
        m.decode.sidecar.let_drain()
        await m.all_back()


FAILING = {RequestStep.PLACEMENT_FAILED, RequestStep.DRAINED, RequestStep.LOCAL_PREFILL}


@pytest.mark.parametrize("step", list(RequestStep), ids=lambda step: step.value)
async def test_cancel_at_every_named_step_returns_all_pages(step: RequestStep) -> None:
    async with mesh() as m:
        if step in FAILING:
            m.prefill.sidecar.refuse_start = "no common transport"
        request = m.gateway.request(prompt(300), prefill=[m.prefill.target()], sampling=sampling(400))

        async def abort(key: RequestKey) -> None:
            await m.gateway.abort(request.request_id)
            await m.gateway.answers[(request.request_id, 0)].ended.wait()

        m.steps.at, m.steps.action = step, abort
        answer = await m.gateway.submit(request)
        await answer.wait()
        assert m.steps.acted.is_set(), f"{step} was never reached"
        assert answer.error is not None
        assert answer.error.reason == "CANCELLED"
        assert len(answer.ends) == 1
        await m.all_back()
        for worker in (m.decode, m.prefill):
            worker.core.cache.clear()
            assert worker.core.pool.counts().free == worker.core.pool.total
        # And the mesh serves on.
        m.prefill.sidecar.refuse_start = ""
        after = await m.ask(prompt(90, 8), sampling=sampling(5))
        assert after.tokens == {0: expected(prompt(90, 8), 5)}


@pytest.mark.parametrize("step", [s for s in RequestStep if s.name in (
    "RUN_RECEIVED", "RUN_SUBMITTED", "RUN_ADMITTED", "TRANSFER_STARTED", "COMPUTING", "COMPUTED", "SENT")],
    ids=lambda step: step.value)  # fmt: skip
async def test_prefill_failing_at_every_step_of_its_own(step: RequestStep) -> None:
    async with mesh(2) as m:

        async def fail(key: RequestKey) -> None:
            raise RuntimeError("programmed")

        m.steps.at, m.steps.action = step, fail
        answer = await m.ask(prompt(300), sampling=sampling(9))
        assert answer.tokens == {0: expected(prompt(300), 9)}
        assert m.steps.acted.is_set()
        await m.all_back()


@pytest.mark.parametrize("step", [s for s in RequestStep if s.name in (
    "ADMITTED", "OPENING_SLOT", "SLOT_OPEN", "EXPOSED", "CALLING_PREFILL", "PREFILL_ACCEPTED", "KV_COMPLETE",
    "JOINED")], ids=lambda step: step.value)  # fmt: skip
async def test_a_fault_of_our_own_at_any_step_costs_a_local_prefill_not_the_request(step: RequestStep) -> None:
    async with mesh() as m:

        async def fail(key: RequestKey) -> None:
            raise RuntimeError("programmed")

        m.steps.at, m.steps.action = step, fail
        answer = await m.ask(prompt(300), sampling=sampling(9))
        assert answer.tokens == {0: expected(prompt(300), 9)}
        assert answer.error is None
        assert m.steps.acted.is_set()
        await m.all_back()


async def test_pages_come_back_though_the_sidecar_could_not_be_told() -> None:
    async with mesh() as m:
        close = m.decode.sidecar.close_slot

        async def fail(*args: Any) -> None:
            await close(*args)
            raise OSError("programmed")

        m.decode.sidecar.close_slot = fail
        m.prefill.sidecar.refuse_start = "no common transport"
        answer = await m.ask(prompt(300), sampling=sampling(9))
        assert answer.tokens == {0: expected(prompt(300), 9)}
        await m.all_back()


async def test_storm_of_aborts_and_timeouts_gives_exactly_one_terminal_each() -> None:
    rng = random.Random(7)
    async with mesh(2, scripted_step_ms=1, max_queue=256, prefill={"scripted_step_ms": 1, "max_queue": 8}) as m:
        requests: list[tuple[pb.SubmitRequest, Any]] = []

        async def one(i: int) -> None:
            request = m.gateway.request(
                prompt(rng.randrange(2, 400), rng.randrange(6)),
                request_id=f"r{i}",
                prefill=rng.sample([p.target() for p in m.prefills], rng.randrange(3)),
                sampling=sampling(rng.randrange(1, 40), n=rng.choice([1, 1, 2])),
                ttft_ms=rng.choice([20, 200, 20_000]),
                total_ms=rng.choice([60, 30_000]),
            )
            try:
                answer = await m.gateway.submit(request)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
                return
            requests.append((request, answer))
            if rng.random() < 0.4:
                await asyncio.sleep(rng.random() * 0.05)
                await m.gateway.abort(request.request_id)

        async def faults() -> None:
            while True:
                await asyncio.sleep(rng.random() * 0.05)
                fake = rng.choice(m.prefills).sidecar
                fake.hold_writes = True
                await asyncio.sleep(rng.random() * 0.03)
                fake.let_write()
                for transfer in rng.sample(list(fake.transfers.values()), min(1, len(fake.transfers))):
                    if not transfer.handle.done.done():
                        transfer.stop("programmed")

        chaos = asyncio.create_task(faults())
        for batch in range(6):
            await asyncio.gather(*[one(batch * 25 + i) for i in range(25)])
        for _, answer in requests:
            await answer.wait()
        chaos.cancel()
        for worker in m.prefills:
            worker.sidecar.let_write()
        await m.all_back()
        assert len(requests) > 60
        assert m.gateway.sequence_errors == 0
        for request, answer in requests:
            assert len(answer.ends) == 1, request.request_id
            assert answer.late == answer.gaps == 0
            if answer.error is None:
                for choice, tokens in answer.tokens.items():
                    params = SamplingParams(max_tokens=request.sampling.max_tokens, seed=1, ignore_eos=True)
                    assert tokens == scripted_output(list(request.token_ids), params, choice)[0]
            else:
                assert answer.error.reason in ("CANCELLED", "DEADLINE_EXCEEDED", "OVERLOADED"), answer.error
        for worker in (m.decode, *m.prefills):
            runner: Any = worker.worker._runner
            assert runner.foreign == 0


async def test_a_preempted_request_is_fetched_again_like_a_new_one() -> None:
    async with mesh(num_pages=48, look_ahead=0, prefix_cache=False) as m:
        prompts = [prompt(100 + i, i) for i in range(5)]
        answers = await asyncio.gather(*[m.ask(p, sampling=sampling(100)) for p in prompts])
        for tokens, answer in zip(prompts, answers, strict=True):
            assert answer.tokens == {0: expected(tokens, 100)}
            assert answer.finished.prefill_worker == "prefill-0"
            assert answer.gaps == 0
        preempted = sum(answer.finished.preemptions for answer in answers)
        assert preempted > 0
        # Each admission fetched: the first ones and those after a preemption.
        assert m.decode.sidecar.opened == 5 + preempted
        await m.all_back()


async def test_drain_of_prefill_lets_its_runs_finish_and_refuses_new_ones() -> None:
    async with mesh(prefill={"scripted_step_ms": 150, "chunk_size": 32}) as m:
        answer = await m.submit(prompt(300), sampling=sampling(5))
        await until(lambda: RequestStep.COMPUTING in m.steps.seen)
        stub = engine_pb2_grpc.EngineStub(m.prefill.channel)
        seen = [progress async for progress in stub.Drain(pb.DrainRequest(timeout_ms=60_000), timeout=90)]
        assert seen[0].running == 1
        assert (seen[-1].running, seen[-1].drained) == (0, True)
        await answer.wait()
        assert answer.finished.prefill_worker == "prefill-0"
        refused = await m.ask(prompt(300, 2), sampling=sampling(5))
        assert refused.finished.prefill_retries == 1
        assert refused.tokens == {0: expected(prompt(300, 2), 5)}
        await m.all_back()


async def test_drain_of_prefill_cuts_what_takes_too_long() -> None:
    async with mesh(prefill={"scripted_step_ms": 60, "chunk_size": 16}) as m:
        answer = await m.submit(prompt(1600), sampling=sampling(5))
        await until(lambda: RequestStep.COMPUTING in m.steps.seen)
        stub = engine_pb2_grpc.EngineStub(m.prefill.channel)
        async for progress in stub.Drain(pb.DrainRequest(timeout_ms=100), timeout=90):
            last = progress
        assert last.drained
        await answer.wait()
        assert answer.finished.prefill_retries == 1
        assert answer.tokens == {0: expected(prompt(1600), 5)}
        await m.all_back()


async def test_metrics_tell_where_prompts_were_computed() -> None:
    async with mesh() as m:
        before = metrics.value(names.REMOTE_PREFILLS, model_name="scripted", outcome="ok")
        short = metrics.value(names.LOCAL_PREFILLS, model_name="scripted", cause="short")
        await m.ask(prompt(80))
        await m.ask(prompt(5))
        assert metrics.value(names.REMOTE_PREFILLS, model_name="scripted", outcome="ok") == before + 1
        assert metrics.value(names.LOCAL_PREFILLS, model_name="scripted", cause="short") == short + 1


async def test_prefill_run_refuses_what_does_not_fit() -> None:
    async with mesh() as m:
        stub = engine_pb2_grpc.PrefillStub(m.prefill.channel)

        async def code(request: pb.RunRequest) -> str:
            call = stub.Run(request, timeout=60)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call:
                    pass
            return caught.value.code().name

        good = pb.RunRequest(request_id="r", model="scripted", token_ids=prompt(20), descriptor=b"")
        assert await code(good) == "INVALID_ARGUMENT"
        good.descriptor = b"\xff\xff"
        assert await code(good) == "INVALID_ARGUMENT"
        good.model = "other"
        assert await code(good) == "NOT_FOUND"
        assert await code(pb.RunRequest(request_id="r", model="scripted")) == "INVALID_ARGUMENT"
        await m.all_back()
