"""One interface for weight matrices, however they are stored."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional


class Linear(Protocol):
    """y = x W^T + b for x (tokens, in_features)."""

    out_features: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, in_features) → (tokens, out_features), same dtype."""


class DenseLinear:
    """The weight as it is: (out_features, in_features)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.out_features = weight.shape[0]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)
