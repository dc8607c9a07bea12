"""Latent attention and experts: fp32 logits against transformers on the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kvmesh.engine.torch_runner import TorchRunner
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
