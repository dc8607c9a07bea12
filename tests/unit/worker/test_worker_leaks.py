"""Nothing grows: cancelled streams leave tasks, registrations and memory as they were. And what the metrics say."""

from __future__ import annotations

import asyncio
import gc
import random
import tracemalloc

from kvmesh.engine.events import Counters, LoadSnapshot
from kvmesh.engine.worker.meters import Meters
from kvmesh.kv.pool import PoolCounts
from kvmesh.telemetry import metrics, names
from test_worker_remote import Mesh, mesh
from worker_harness import Gateway, prompt, running, sampling, until


async def cancelled(m: Mesh, count: int, rng: random.Random) -> None:
    """Requests that a gateway aborts at odd moments, remote and local ones."""

    async def one(i: int) -> None:
        targets = [m.prefill.target()] if i % 2 else []
        request = m.gateway.request(
            prompt(rng.randrange(4, 120), rng.randrange(4)), sampling=sampling(500), prefill=targets
        )
        answer = await m.gateway.submit(request)
        await asyncio.sleep(rng.random() * 0.01)
        await m.gateway.abort(request.request_id)
        await answer.wait()
        del m.gateway.answers[(request.request_id, 0)]

    for at in range(0, count, 20):
        await asyncio.gather(*[one(i) for i in range(at, at + 20)])


async def test_a_thousand_cancelled_streams_leave_tasks_and_memory_flat() -> None:
    rng = random.Random(5)
    ours = [tracemalloc.Filter(True, "*/kvmesh/*")]
    async with mesh(scripted_step_ms=0.5, prefill={"scripted_step_ms": 0.5}) as m:

        async def measure() -> tuple[int, int, tracemalloc.Snapshot]:
            await m.all_back()
            for worker in (m.decode, m.prefill):
                worker.sidecar.slots.clear()
                worker.sidecar.transfers.clear()
                worker.sidecar.traceparents.clear()
            m.steps.seen.clear()
            await until(lambda: not m.decode.worker.requests.all())
            gc.collect()
            sinks = len(m.decode.worker.ctx.pump._sinks) + len(m.prefill.worker.ctx.pump._sinks)
            return len(asyncio.all_tasks()), sinks, tracemalloc.take_snapshot().filter_traces(ours)

        await cancelled(m, 300, rng)
        tracemalloc.start()
        try:
            # What was allocated before is not seen; this much is in use at any time.
            await cancelled(m, 100, rng)
            tasks, sinks, before = await measure()
            await cancelled(m, 1000, rng)
            tasks_after, sinks_after, after = await measure()
        finally:
            tracemalloc.stop()
        assert sinks == sinks_after == 0
        assert tasks_after <= tasks + 1
        # Our own allocations: those of the process as a whole depend on what ran in it before.
        growth = sum(stat.size_diff for stat in after.compare_to(before, "filename"))
        assert growth < 500_000, after.compare_to(before, "lineno")[:5]
        assert m.decode.worker.decode.hub is not None
        assert len(m.decode.worker.requests._by_stream) == 0
        assert len(m.prefill.worker.prefill) == 0


async def test_gateways_that_come_and_go_leave_nothing() -> None:
    async with running(scripted_step_ms=1) as worker:
        for i in range(30):
            async with Gateway(worker, f"g{i}") as gateway:
                await gateway.submit(gateway.request(prompt(5), sampling=sampling(500)))
        hub = worker.worker.decode.hub
        assert hub is not None
        await until(lambda: len(hub) == 0 and len(worker.worker.requests) == 0)
        await worker.pages_are_back()


def test_meters_add_what_the_core_counted_once() -> None:
    counters = Counters(prompt_tokens=7, generation_tokens=3, steps=2, step_seconds=0.5)
    meters = Meters("metered", lambda: counters, lambda: PoolCounts(5, 3, 1, 1), clock=lambda: 0.0)
    load = LoadSnapshot(
        free_pages=5, total_pages=10, running=2, waiting=1, transferring=0, queued_tokens=0, inflight_tokens=0, step=2,
        stalled=True, accepting=True, free_slots=1,
    )  # fmt: skip
    for _ in range(3):
        meters.refresh(load)
    counters.prompt_tokens += 4
    meters.refresh(load)

    def value(metric: names.Metric, **labels: str) -> float:
        return metrics.value(metric, model_name="metered", **labels)

    assert value(names.PROMPT_TOKENS) == 11
    assert value(names.GENERATION_TOKENS) == 3
    assert value(names.NUM_REQUESTS_RUNNING) == 2
    assert value(names.NUM_REQUESTS_WAITING) == 1
    assert value(names.KV_CACHE_USAGE) == 0.5
    assert value(names.KV_PAGES, state="draining") == 1
    assert value(names.STALLED) == 1
    assert value(names.STEP_TIME, phase="mixed") == 1


async def test_a_served_request_shows_in_the_metrics() -> None:
    async with running(served_name="counted", scripted_step_ms=1) as worker, Gateway(worker) as gateway:

        def value(metric: names.Metric, **labels: str) -> float:
            return metrics.value(metric, model_name="counted", **labels)

        await gateway.ask(prompt(40), sampling=sampling(6))
        await gateway.ask(prompt(40), sampling=sampling(6))
        await until(lambda: value(names.GENERATION_TOKENS) == 12)
        assert value(names.REQUEST_SUCCESS, finished_reason="length") == 2
        assert value(names.PROMPT_TOKENS) > 0
        assert value(names.PREFIX_HITS) >= 32
        assert value(names.PREFIX_QUERIES) >= value(names.PREFIX_HITS)
        for histogram in (names.E2E, names.QUEUE_TIME, names.PREFILL_TIME, names.DECODE_TIME, names.TTFT):
            assert value(histogram) == 2, histogram.name
        assert value(names.INTER_TOKEN) >= 1
        failed = await gateway.ask(prompt(5), sampling=sampling(2000), total_ms=1000)
        assert failed.error is not None
        assert value(names.REQUEST_FAILURE, reason="DEADLINE_EXCEEDED") == 1
