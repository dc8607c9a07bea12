"""Latent attention and experts: fp32 logits against transformers on the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kvmesh.engine.torch_runner import TorchRunner
from kvmesh.layers.mla import LatentUp, prefill_latent
from kvmesh.layers.paged import Chunk
from mla_tiny import MLA_VARIANTS, make_mla
from model_harness import Bench, assert_close

PROMPT = np.random.default_rng(1).integers(3, 190, 83).tolist()


@pytest.mark.parametrize("variant", MLA_VARIANTS)
def test_random_models_equal_transformers(tmp_path: Path, variant: str) -> None:
    model = make_mla(tmp_path, variant)
    with torch.inference_mode():
        theirs = model(torch.tensor([PROMPT])).logits[0]
    bench = Bench(TorchRunner.load(str(tmp_path), "fp32"))
    # Token by token through the absorbed form, and all at once.
    assert_close(bench.run(PROMPT, 1), theirs)
    assert_close(bench.run(PROMPT, len(PROMPT)), theirs[-1:])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TorchRunner:
    directory = tmp_path_factory.mktemp("mla")
    make_mla(directory)
    return TorchRunner.load(str(directory), "fp32")


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


@pytest.mark.parametrize("v_dim", [7, 16, 20])
@pytest.mark.parametrize("start", [0, 1, 15, 40])
def test_both_forms_of_prefill_are_one(start: int, v_dim: int) -> None:
    heads, nope, rope, rank, page = 3, 10, 6, 24, 4
    generator = torch.Generator().manual_seed(start)
    weight = torch.randn((heads * (nope + v_dim), rank), generator=generator)
    layer = torch.randn((20, page, rank + rope), generator=generator)
    q = torch.randn((9, heads, nope + rope), generator=generator)
    pages = torch.randperm(20, generator=generator)[: -(-(start + 9) // page)]
    up = LatentUp(weight, heads, nope, v_dim, rope, scale=0.4)
    absorbed, expanded = (prefill_latent(layer, q, Chunk((0, 9), start, pages), up, form) for form in (True, False))
    torch.testing.assert_close(absorbed, expanded, rtol=1e-4, atol=1e-5)


def test_the_cheaper_form_is_taken() -> None:
    # DeepSeek-V3's sizes: latents are worth expanding for many queries, not for a few over a long history.
    up = LatentUp(torch.zeros((2 * 256, 512)), 2, 128, 128, 64, scale=1.0)
    assert up.absorbs(1, 4096)
    assert up.absorbs(64, 4096)
    assert not up.absorbs(512, 4096)
    assert not up.absorbs(512, 512)


def test_bf16_runs_near_fp32(tmp_path: Path) -> None:
    make_mla(tmp_path, dtype=torch.bfloat16)
    exact, rounded = (Bench(TorchRunner.load(str(tmp_path), dtype)) for dtype in ("fp32", "bf16"))
    assert rounded.layout.dtype == "bf16"
    expected, got = exact.run(PROMPT[:40], 17), rounded.run(PROMPT[:40], 17)
    assert (got - expected).abs().max() / expected.abs().max() < 0.1
