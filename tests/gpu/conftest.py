"""Where kernels run: on a GPU, or (TRITON_INTERPRET=1) in Triton's interpreter on CPU, with small sizes."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def kernel_device() -> str:
    """A device for Triton kernels; skips where there is none."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "cpu"
    if not torch.cuda.is_available() or torch.version.cuda is None:
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1")
    return "cuda:0"
