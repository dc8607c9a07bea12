"""What bounds a prompt: rates of cuBLAS for an 8B model's products at many rows, and of attention over 4,000 tokens.

    python benchmarks/gpu_kernels/prefill.py

The first lines come from a cool chip, the later ones from one at its power limit: that order is what is to be seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "libs"))

import numpy as np
import torch

from kvmesh.layers.cuda.prefill_attention import PrefillAttention

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
ROWS = (4000, 4096, 8000, 8064, 8192, 16384)
TOKENS, HEADS, KV_HEADS, DIM, PAGE = 4000, 32, 8, 128, 64


def milliseconds(run: Callable[[], object], times: int = 12, warm_up: int = 3) -> float:
    """Mean time of a call on the device."""
    for _ in range(warm_up):
        run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(times):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / times


def products() -> None:
    """TFLOP/s by product and of all four."""
    weights = {name: torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02 for name, shape in SHAPES.items()}
    for library in ("cublas", "cublaslt"):
        torch.backends.cuda.preferred_blas_library(library)
        for rows in ROWS:
            told, total, flops = [], 0.0, 0
            for name, (n, k) in SHAPES.items():
                x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
                weight = weights[name].t()
                time = milliseconds(partial(torch.mm, x, weight))
                told.append(f"{name} {2 * rows * n * k / time / 1e9:.0f}")
                total, flops = total + time, flops + 2 * rows * n * k
            print(library, rows, *told, "all", round(flops / total / 1e9), "TFLOP/s")
    torch.backends.cuda.preferred_blas_library("cublas")


def attention() -> None:
    """Prompts that begin (K and V in one piece) beside prompts whose first token was there (pages)."""
    device = torch.device("cuda")
    kv_layer = torch.randn(400, KV_HEADS, 2, PAGE, DIM, device=device, dtype=torch.bfloat16)
    for prompts in (1, 2):
        planned = PrefillAttention(HEADS, KV_HEADS, DIM, PAGE, device, 8, 4096)
        tables = [np.random.default_rng(i).permutation(400)[:64].astype(np.int32) for i in range(prompts)]
        for name, start in (("ragged", 0), ("paged", 1)):
            rows = prompts * (TOKENS - start)
            planned.plan([TOKENS - start] * prompts, [start] * prompts, tables)
            q = torch.randn(rows, HEADS, DIM, device=device, dtype=torch.bfloat16)
            kv = torch.randn(rows, 2, KV_HEADS, DIM, device=device, dtype=torch.bfloat16)
            out = torch.empty_like(q)
            time = milliseconds(partial(planned.run, q, kv, kv_layer, out))
            flops = prompts * 2 * TOKENS * TOKENS * DIM * HEADS
            print(planned.backend, name, prompts, round(time, 3), "ms", round(flops / time / 1e9), "TFLOP/s")


if __name__ == "__main__":
    products()
    attention()
