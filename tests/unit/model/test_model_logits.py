"""fp32 logits against transformers on the same weights, and against ourselves however a sequence is cut or batched."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from disagg_kit import disaggregated
from kvmesh.engine.runner import StepBatch
from kvmesh.engine.torch_runner import TorchRunner
from model_harness import Bench, assert_close
from model_tiny import TINY, VARIANTS, make_tiny

PROMPT = list(np.random.default_rng(1).integers(3, 190, 83))


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> TorchRunner:
    return TorchRunner.load("smollm2", "fp32")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TorchRunner:
    directory = tmp_path_factory.mktemp("tiny")
    make_tiny(directory, "plain")
    return TorchRunner.load(str(directory), "fp32")


def test_smollm2_equals_transformers(smollm2: TorchRunner, smollm2_reference: torch.nn.Module) -> None:
    ids = np.random.default_rng(2).integers(0, 49152, 70).tolist()
    with torch.inference_mode():
        theirs = smollm2_reference(torch.tensor([ids])).logits[0]
    bench = Bench(smollm2)
    hidden_rows = bench.runner.forward_logits(StepBatch(1, [bench.slice(ids, 0, bench.table(len(ids)))]))
    assert_close(smollm2.model.logits(hidden_rows.hidden_of(0)), theirs)
    # … and token by token through decode attention.
    assert_close(bench.run(ids, 1)[-20:], theirs[-20:])


def test_smollm2_greedy_text_equals_transformers(smollm2: TorchRunner, smollm2_reference: torch.nn.Module) -> None:
    ids = [1, 9690, 198, 2683, 359, 253, 5356, 2]
    theirs = smollm2_reference.generate(
        torch.tensor([ids]), do_sample=False, max_new_tokens=24, min_new_tokens=24, repetition_penalty=1.0
    )[0, len(ids) :].tolist()
    bench = Bench(smollm2)
    table = bench.table(64)
    ours: list[int] = []
    fed, start = ids, 0
    for step in range(len(theirs)):
        result = smollm2.execute(StepBatch(step, [bench.slice(fed, start, table)]))
        start += len(fed)
        fed = list(result.slices[0].token_ids)
        # min_new_tokens bans eos in the reference; stop comparing where it would have ended.
        if fed[0] in smollm2.info.eos_token_ids:
            break
        ours += fed
    assert len(ours) >= 8
    assert ours == theirs[: len(ours)]


def test_smollm2_apart_equals_alone_and_transformers(
    smollm2: TorchRunner, smollm2_path: Path, smollm2_reference: torch.nn.Module
) -> None:
    """Here and not in test_model_disaggregated.py: transformers needs long to read the model."""
    page = 16
    pair = Bench(smollm2, page, num_pages=64), Bench(TorchRunner.load(str(smollm2_path), "fp32"), page, num_pages=64)
    prompt = np.random.default_rng(4).integers(0, 49152, 3 * page + 2).tolist()
    with torch.inference_mode():
        theirs = smollm2_reference(torch.tensor([prompt])).logits[0, -1:]
    apart = disaggregated(pair, prompt, page + 1, 1, 0)
    assert_close(apart, theirs)
    assert_close(apart, pair[1].run(prompt, len(prompt))[-1:])


@pytest.mark.parametrize("variant", VARIANTS)
def test_random_models_equal_transformers(tmp_path: Path, variant: str) -> None:
    model = make_tiny(tmp_path, variant)
    with torch.inference_mode():
        theirs = model(torch.tensor([PROMPT])).logits[0]
    bench = Bench(TorchRunner.load(str(tmp_path), "fp32"))
    assert_close(bench.run(PROMPT, 1), theirs)
    assert_close(bench.run(PROMPT, len(PROMPT)), theirs[-1:])


def test_sharded_bf16_checkpoint_equals_one_file(tmp_path: Path) -> None:
    make_tiny(tmp_path / "one", "plain", torch.bfloat16)
    make_tiny(tmp_path / "many", "plain", torch.bfloat16, max_shard_size="50KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = (Bench(TorchRunner.load(str(tmp_path / name), "fp32")) for name in ("one", "many"))
    assert torch.equal(one.run(PROMPT, 83), many.run(PROMPT, 83))


@pytest.mark.parametrize("page_size", [4, 16])
def test_chunked_equals_whole(tiny: TorchRunner, page_size: int) -> None:
    whole = Bench(tiny, page_size).run(PROMPT, len(PROMPT))
    for chunk in (1, 2, 3, page_size - 1, page_size, page_size + 1):
        assert_close(Bench(tiny, page_size).run(PROMPT, chunk)[-1:], whole)


def test_batched_equals_alone(tiny: TorchRunner) -> None:
    prompts = [PROMPT[:n] for n in (1, 5, 16, 17, 40, 83)]
    alone = torch.cat([Bench(tiny).run(p, len(p)) for p in prompts])
    bench = Bench(tiny)
    assert_close(bench.logits(*(bench.slice(p, 0, bench.table(len(p))) for p in prompts)), alone)


def test_mixed_step_equals_separate_steps(tiny: TorchRunner) -> None:
    # Decode rows of very different lengths between chunks with and without history, in an order the plan must undo.
    cuts = [(20, 83), (82, 83), (0, 7), (4, 5), (0, 1), (33, 34), (15, 31)]
    expected, bench = [], Bench(tiny, num_pages=96)
    slices = []
    for start, end in cuts:
        expected.append(bench.run(PROMPT[:end], end))
        table = bench.table(end)
        if start:
            bench.run(PROMPT[:start], start, table)
        slices.append(bench.slice(PROMPT[start:end], start, table))
    assert_close(bench.logits(*slices), torch.cat(expected))


def test_slices_without_samples_get_no_logits(tiny: TorchRunner) -> None:
    bench = Bench(tiny)
    slices = [bench.slice(PROMPT[:9], 0, bench.table(9), samples=()), bench.slice(PROMPT[:4], 0, bench.table(4))]
    step = tiny.forward_logits(StepBatch(1, slices))
    assert step.rows == [None, 0]
    assert step.logits.shape == (1, TINY["vocab_size"])
    only_prefill = tiny.forward_logits(StepBatch(2, [bench.slice(PROMPT[:9], 0, bench.table(9), samples=())]))
    assert only_prefill.logits.shape[0] == 0
