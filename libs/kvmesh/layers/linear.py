"""One interface for weight matrices, however they are stored."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

# Rows from which widening a bf16 weight to fp32 first is cheaper than multiplying in bf16, on a CPU without bf16
# arithmetic (2.4 times at 32 rows of a 3072 x 576 weight, 4 times at 512; slower at 8).
_WIDEN_ROWS = 16


class Linear(Protocol):
    """y = x W^T + b for x (tokens, in_features) → (tokens, out_features), same dtype."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class DenseLinear:
    """The weight as it is: (out_features, in_features)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


class WideningLinear:
    """A bf16 weight on a CPU without bf16 arithmetic: large batches multiply in fp32, small ones in bf16."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) < _WIDEN_ROWS:
            return functional.linear(x, self.weight, self.bias)
        bias = self.bias.float() if self.bias is not None else None
        return functional.linear(x.float(), self.weight.float(), bias).to(x.dtype)


def _bf16_is_native() -> bool:
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            return any(flag in file.read() for flag in ("avx512_bf16", "amx_bf16", " bf16"))
    except OSError:
        return False


_NATIVE_BF16 = _bf16_is_native()


def dense(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """The cheapest handler of an unquantized weight on this CPU."""
    if weight.dtype == torch.bfloat16 and not _NATIVE_BF16:
        return WideningLinear(weight, bias)
    return DenseLinear(weight, bias)
