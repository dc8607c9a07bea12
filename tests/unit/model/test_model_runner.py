"""The runner's contract beyond logits: doorbell, copies, sampling plumbing, prompt logprobs, errors."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from kvmesh.engine.failures import SequencesFailed
from kvmesh.engine.runner import SampleInput, SamplingParams, StepBatch
from kvmesh.engine.torch_runner import TorchRunner
from kvmesh.errors import Internal, InvalidArgument
from kvmesh.kv.ring import DOORBELL_BYTES, Doorbell
from model_harness import GREEDY, Bench, sample_of
from model_tiny import TINY, make_tiny

PROMPT = list(np.random.default_rng(3).integers(3, 190, 41))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_tiny(path, "plain")
    return path


@pytest.fixture(scope="module")
def tiny(directory: Path) -> TorchRunner:
    return TorchRunner.load(str(directory), "fp32")


def test_doorbell_rings_once_a_layer_after_the_kv_is_there(tiny: TorchRunner) -> None:
    bench = Bench(tiny, num_pages=8)
    layers = bench.layout.num_layers
    table = bench.table(len(PROMPT))
    seen: list[tuple[int, int, int]] = []

    def on_layer(layer: int) -> None:
        region = np.frombuffer(bench.region, dtype=np.uint8).reshape(layers, 8, -1)
        # How many layers hold anything but the initial garbage in the first page.
        written = int((region[:, table[0]] != 0x7F).any(axis=1).sum())
        seen.append((layer, bench.doorbell.value, written))

    tiny.execute(StepBatch(1, [bench.slice(PROMPT, 0, table, samples=())]), on_layer)
    assert seen == [(i, i + 1, i + 1) for i in range(layers)]
    tiny.execute(StepBatch(2, [bench.slice([5], len(PROMPT), table)]))
    assert bench.doorbell.value == 2 * layers


def test_copies_happen_before_the_step_and_in_every_layer(tiny: TorchRunner) -> None:
    bench = Bench(tiny)
    table = bench.table(48)
    bench.run(PROMPT, len(PROMPT), table)  # 41 tokens: the third page is partial
    fork = table.copy()
    fork[2] = bench.free.pop()
    parent = bench.slice([7], len(PROMPT), table)
    child = bench.slice([9], len(PROMPT), fork)
    both = bench.logits(parent, child, copies=[(int(table[2]), int(fork[2]))])
    for token, got in zip((7, 9), both, strict=True):
        fresh = Bench(tiny)
        torch.testing.assert_close(got, fresh.run([*PROMPT, token], 42)[0], rtol=1e-4, atol=1e-5)


def test_a_chain_of_copies_reads_all_sources_first(tiny: TorchRunner) -> None:
    bench = Bench(tiny)
    region = np.frombuffer(bench.region, dtype=np.uint8).reshape(bench.layout.num_layers, bench.num_pages, -1)
    region[:, 1], region[:, 2], region[:, 3] = 11, 22, 33
    bench.logits(bench.slice([4], 0, np.array([9], np.int32)), copies=[(1, 2), (2, 3)])
    assert (region[:, 2] == 11).all()
    assert (region[:, 3] == 22).all()


def test_forked_choices_sample_from_one_prompt(tiny: TorchRunner) -> None:
    bench = Bench(tiny)
    params = SamplingParams(temperature=1.0, seed=3)
    samples = [SampleInput(params, choice, len(PROMPT), PROMPT, []) for choice in range(24)]
    result = tiny.execute(StepBatch(1, [bench.slice(PROMPT, 0, bench.table(41), samples=samples)])).slices[0]
    assert len(result.token_ids) == 24
    assert len(set(result.token_ids)) > 1
    # A choice samples the same alone.
    again = bench.slice(PROMPT, 0, bench.table(41), samples=[samples[17]])
    assert tiny.execute(StepBatch(2, [again])).slices[0].token_ids == [result.token_ids[17]]


def test_prompt_logprobs_equal_log_softmax_over_the_whole_prompt(tiny: TorchRunner) -> None:
    bench = Bench(tiny)
    table = bench.table(41)
    whole = torch.log_softmax(bench.run(PROMPT, 1), dim=-1)
    scores = []
    for at in range(0, 41, 10):
        ids = PROMPT[at : at + 10]
        following = int(PROMPT[at + 10]) if at + 10 < 41 else None
        slice_ = bench.slice(ids, at, table, samples=(), prompt_logprobs=2, next_token=following)
        scores += tiny.execute(StepBatch(1, [slice_])).slices[0].prompt_logprobs
    assert [s.token_id for s in scores] == PROMPT[1:]
    for i, score in enumerate(scores):
        row = whole[i]
        assert score.logprob == pytest.approx(float(row[PROMPT[i + 1]]), abs=2e-4)
        assert score.rank == 1 + int((row > row[PROMPT[i + 1]]).sum())
        assert [t for t, _ in score.top] == row.topk(2).indices.tolist()


def test_logprobs_of_sampled_tokens(tiny: TorchRunner) -> None:
    bench = Bench(tiny)
    params = SamplingParams(temperature=0.0, want_logprobs=True, logprobs=5, logit_bias={3: 100.0})
    table = bench.table(41)
    row = torch.log_softmax(bench.run(PROMPT, 41)[0], dim=-1)
    result = tiny.execute(StepBatch(1, [bench.slice(PROMPT, 0, table, samples=[sample_of(params)])])).slices[0]
    assert result.token_ids == [3]
    score = result.logprobs[0]
    # Raw distribution: the bias that chose the token is not in its score.
    assert score.logprob == pytest.approx(float(row[3]), abs=2e-4)
    assert len(score.top) == 5
    assert math.isclose(score.top[0][1], float(row.max()), abs_tol=2e-4)


def test_progress_counts_every_stored_byte(directory: Path) -> None:
    calls: list[tuple[int, int]] = []
    TorchRunner.load(str(directory), "fp32", progress=lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls)
    assert calls[-1][0] == calls[-1][1] > 0


@pytest.mark.parametrize("tokens", [[TINY["vocab_size"]], [-1]])
def test_a_token_outside_the_vocabulary_is_refused(tiny: TorchRunner, tokens: list[int]) -> None:
    bench = Bench(tiny)
    with pytest.raises(InvalidArgument, match="token id"):
        bench.logits(bench.slice(tokens, 0, bench.table(1)))


def test_broken_plans_are_internal_errors(tiny: TorchRunner) -> None:
    bench = Bench(tiny)
    with pytest.raises(Internal, match="does not cover"):
        bench.logits(bench.slice(PROMPT, 0, bench.table(32)))
    with pytest.raises(Internal, match="page outside"):
        bench.logits(bench.slice([3], 0, np.array([64], np.int32)))
    with pytest.raises(Internal):
        tiny.execute(StepBatch(1, []))


def test_bind_checks_layout_and_buffer(directory: Path) -> None:
    runner = TorchRunner.load(str(directory), "fp32")
    bell = Doorbell(bytearray(DOORBELL_BYTES))
    layout = runner.layout(16, 4)
    with pytest.raises(InvalidArgument, match="bytes"):
        runner.bind(layout, {"full": memoryview(bytearray(10))}, bell)
    other = TorchRunner.load(str(directory), "bf16", backend="torch").layout(16, 4)
    with pytest.raises(InvalidArgument, match="layout"):
        runner.bind(other, {"full": memoryview(bytearray(other.region_bytes("full")))}, bell)
    with pytest.raises(Internal, match="before bind"):
        runner.execute(StepBatch(1, []))


def test_bad_dtype_and_backend_are_refused(directory: Path) -> None:
    with pytest.raises(InvalidArgument):
        TorchRunner.load(str(directory), "int3")
    with pytest.raises(InvalidArgument):
        TorchRunner.load(str(directory), "fp32", backend="native")


def test_greedy_constant(tiny: TorchRunner) -> None:
    bench = Bench(tiny)
    table = bench.table(41)
    best = int(bench.run(PROMPT, 41, table)[0].argmax())
    result = tiny.execute(StepBatch(1, [bench.slice(PROMPT, 0, table, samples=[sample_of(GREEDY)])]))
    assert result.slices[0].token_ids == [best]


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_a_sequence_whose_kv_is_nan_fails_alone(tmp_path: Path, backend: str) -> None:
    make_tiny(tmp_path, "plain", torch.bfloat16)
    try:
        bench = Bench(TorchRunner.load(str(tmp_path), "bf16", backend=backend))
    except InvalidArgument as error:
        pytest.skip(str(error))
    # All that nobody wrote is NaN: the rest of a last page, and page 0, with which short block tables are padded.
    bench.region[:] = b"\xff" * len(bench.region)
    bench.free.remove(0)
    sick, well, longer = bench.table(18), bench.table(6), bench.table(34)
    bench.run(PROMPT[:5], 5, well)
    bench.run(PROMPT[:33], 33, longer)
    alone = bench.logits(bench.slice([PROMPT[5]], 5, well))
    slices = [
        bench.slice([9], 17, sick, seq_id=1, samples=[sample_of()] * 2),
        bench.slice([PROMPT[5]], 5, well, seq_id=2),
        bench.slice([PROMPT[33]], 33, longer, seq_id=3),
    ]
    torch.testing.assert_close(bench.logits(*slices)[1:2], alone, rtol=1e-3, atol=1e-3)
    with pytest.raises(SequencesFailed, match="not finite") as caught:
        bench.runner.execute(StepBatch(1, slices))
    assert caught.value.seq_ids == {1}
    kept = caught.value.result.slices
    assert [part.seq_id for part in kept] == [2, 3]
    assert kept[0].token_ids == [int(alone[0].argmax())]
