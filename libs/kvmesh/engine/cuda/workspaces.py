"""Device memory that a runner takes beside weights and KV, and what is said where there is not enough."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from kvmesh.errors import Unavailable
from kvmesh.layers.cuda.skinny_config import MAX_ROWS

if TYPE_CHECKING:
    from kvmesh.models.llama_cuda import CudaLlama

# FlashInfer's buffers (160 MiB), activations of few rows, cuBLAS and NCCL, the kernels' code, the graphs themselves.
FIXED_BYTES = 1 << 30
# The smallest page: block tables are then the longest.
_SMALLEST_PAGE = 16
# Of each sample's search for the edges of top-k and top-p.
_SAMPLE_BYTES = 16 << 10
# Of errors that mean it.
_SIGNS = ("out of memory", "ALLOC_FAILED")


def workspace_bytes(model: CudaLlama, max_batch: int, token_budget: int, max_model_len: int) -> int:
    """What `CudaRunner.bind_cuda` and the largest step take, from above."""
    c = model.config
    # Of each row of a prompt, or of a decode step of more rows than skinny products have: residual, normed, two
    # products of that width; q, k, v twice; q and its attention; gate and up, their product.
    row = 2 * (4 * c.hidden_size + 2 * model.qkv_width + 2 * model.q_width + 4 * model.wide)
    heads = -(-max_batch // MAX_ROWS) * MAX_ROWS
    # Logits, what the penalties made of them, counts; of several ranks this one's logits and everybody's, gathered.
    copies = 3 if model.tp.size == 1 else 5
    sampled = heads * (4 * copies * c.vocab_size + _SAMPLE_BYTES)
    tables = 2 * 4 * max_batch * -(-max_model_len // _SMALLEST_PAGE)
    rotary = 4 * max_model_len * c.head_dim
    return int((token_budget + max_batch) * row + sampled + tables + rotary + FIXED_BYTES)


@contextmanager
def told_what_to_lower(what: str) -> Iterator[None]:
    """Turns out of memory into Unavailable with the settings that help, whoever says it: torch's allocator, a library,
    or the driver that loads a kernel or makes a graph."""
    try:
        yield
    except RuntimeError as error:
        if not any(sign in str(error) for sign in _SIGNS):
            raise
        free, total = torch.cuda.mem_get_info()
        raise Unavailable(
            f"no device memory for {what} ({free >> 20} MiB of {total >> 20} are free): lower kv_memory_bytes or "
            f"gpu_memory_utilization, max_batch, token_budget or max_model_len, or raise tp ({error})"
        ) from error
