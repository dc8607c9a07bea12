"""What the scheduler costs a step at batch 256. Printed; the bound is loose because the machine is shared."""

from __future__ import annotations

import time

from kvmesh.engine.core import EngineConfig, EngineCore, EngineRequest, RequestKey
from kvmesh.engine.runner import SamplingParams, SliceResult, StepBatch, StepResult
from kvmesh.engine.scripted import ScriptedModel, ScriptedRunner

BATCH = 256


class InstantRunner(ScriptedRunner):
    spent = 0.0

    def execute(self, batch: StepBatch, on_layer=None) -> StepResult:
        started = time.process_time()
        result = StepResult([SliceResult(part.seq_id, [65] * len(part.samples)) for part in batch.slices])
        self.spent = time.process_time() - started
        return result


def test_scheduler_overhead_at_batch_256() -> None:
    runner = InstantRunner(ScriptedModel())
    config = EngineConfig(max_model_len=4096, max_batch=BATCH, token_budget=BATCH * 40, chunk_size=4096)
    core = EngineCore(runner, runner.layout(16, 16384), config, lambda events: None)
    for index in range(BATCH):
        prompt = [(index * 31 + i) % 250 for i in range(32)]
        core.submit(EngineRequest(RequestKey(f"r{index}"), prompt, 32, SamplingParams(max_tokens=2000)))
    while core.load().queued_tokens or not core.counters.steps:
        core.step_once()
    samples = []
    for _ in range(200):
        started = time.process_time()
        core.step_once()
        samples.append(time.process_time() - started - runner.spent)
    assert core.load().running == BATCH
    samples.sort()
    print(f"scheduler overhead, batch {BATCH}: p50 {1e3 * samples[100]:.2f} ms, p90 {1e3 * samples[180]:.2f} ms a step")
    assert samples[100] < 0.01
