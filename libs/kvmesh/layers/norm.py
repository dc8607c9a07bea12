"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x (tokens, hidden) scaled to unit mean square, times weight. fp32 inside, returns x's dtype."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True).add_(eps))
    return (wide * scale).to(x.dtype) * weight
