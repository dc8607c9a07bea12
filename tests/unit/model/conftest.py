"""The real model for the tests of the torch side."""

from __future__ import annotations

import os
from pathlib import Path

# The reference must not look for a hub.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvmesh.errors import NotFound
from kvmesh.loading.source import resolve

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    try:
        path = resolve("smollm2").path
    except NotFound as error:
        pytest.skip(str(error))
    assert path is not None
    return path


@pytest.fixture(scope="session")
def smollm2_reference(smollm2_path: Path) -> torch.nn.Module:
    """SmolLM2 as transformers itself reads and dequantizes the GGUF: code that nobody here wrote."""
    return AutoModelForCausalLM.from_pretrained(
        str(smollm2_path.parent), gguf_file=smollm2_path.name, dtype=torch.float32
    ).eval()
