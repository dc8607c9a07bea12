"""Where kernels run: on a GPU, or (TRITON_INTERPRET=1) in Triton's interpreter on CPU, with small sizes."""

from __future__ import annotations

import os
from typing import Any

import pytest


def _mend_interpreter() -> None:
    """Triton's interpreter makes an index of a tensor by int(array of one element), which newer numpy refuses."""
    from triton.runtime import interpreter  # type: ignore[import-not-found]

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if os.environ.get("TRITON_INTERPRET") == "1":
    _mend_interpreter()


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
