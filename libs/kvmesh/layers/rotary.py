"""Rotary position embedding in the half-split convention (Su et al. 2021, arXiv:2104.09864; Hugging Face's order)."""

from __future__ import annotations

import math

import torch

from kvmesh.loading.config import RopeConfig

_GROW = 1024


def inverse_frequencies(rope: RopeConfig, head_dim: int, factors: torch.Tensor | None = None) -> torch.Tensor:
    """fp32 (head_dim / 2,). `factors` are per-frequency divisors that some GGUF files carry instead of a rule."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    freq = 1.0 / (rope.theta**exponent)
    if factors is not None:
        return freq / factors.to(torch.float32)
    if rope.kind == "linear":
        return freq / rope.factor
    if rope.kind == "llama3":
        # Long wavelengths are stretched by `factor`, short ones kept, those between interpolated.
        wavelength = 2 * math.pi / freq
        cycles = rope.original_max_len / wavelength
        span = rope.high_freq_factor - rope.low_freq_factor
        smooth = ((cycles - rope.low_freq_factor) / span).clamp(0.0, 1.0)
        return (1 - smooth) * freq / rope.factor + smooth * freq
    return freq


class RotaryTable:
    """cos and sin per position, fp32 (positions, head_dim), grown on demand so that a short chat costs little memory.

    Row p is [cos(p f), sin(p f)], each head_dim / 2 wide.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, factors: torch.Tensor | None = None) -> None:
        self._freq = inverse_frequencies(rope, head_dim, factors)
        self.table = torch.empty((0, head_dim), dtype=torch.float32)

    def ensure(self, positions: int) -> torch.Tensor:
        """The table with at least `positions` rows."""
        if positions > len(self.table):
            rows = -(-positions // _GROW) * _GROW
            angle = torch.outer(torch.arange(rows, dtype=torch.float32), self._freq)
            self.table = torch.cat([angle.cos(), angle.sin()], dim=1).contiguous()
        return self.table


def apply_rotary(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate x (tokens, heads, head_dim) by rows cos_sin (tokens, head_dim). fp32 inside, returns x's dtype."""
    half = x.shape[-1] // 2
    cos, sin = cos_sin[:, None, :half], cos_sin[:, None, half:]
    a, b = x[..., :half].float(), x[..., half:].float()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
