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
    if rope.kind == "yarn":
        low, high = (_turning(rope, head_dim, turns) for turns in (rope.beta_fast, rope.beta_slow))
        low, high = max(math.floor(low), 0), min(math.ceil(high), head_dim - 1)
        # From `low` frequencies kept to `high` stretched; where both are one, a step.
        ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)
        ramp = ramp.clamp(0.0, 1.0)
        return freq / rope.factor * ramp + freq * (1 - ramp)
    return freq


def _turning(rope: RopeConfig, head_dim: int, turns: float) -> float:
    """The dimension (a pair's number) that turns so often within the original context."""
    return head_dim * math.log(rope.original_max_len / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


class RotaryTable:
    """cos and sin per position, fp32 (positions, head_dim), grown on demand so that a short chat costs little memory.

    Row p is [cos(p f), sin(p f)], each head_dim / 2 wide, times the rule's attention_factor.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, factors: torch.Tensor | None = None) -> None:
        self._freq = inverse_frequencies(rope, head_dim, factors)
        self._factor = rope.attention_factor
        self.table = torch.empty((0, head_dim), dtype=torch.float32)

    def ensure(self, positions: int) -> torch.Tensor:
        """The table with at least `positions` rows."""
        if positions > len(self.table):
            rows = -(-positions // _GROW) * _GROW
            angle = torch.outer(torch.arange(rows, dtype=torch.float32), self._freq)
            self.table = torch.cat([angle.cos(), angle.sin()], dim=1).mul_(self._factor)
        return self.table


def apply_rotary(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate x (tokens, heads, head_dim) by rows cos_sin (tokens, head_dim). fp32 inside, returns x's dtype."""
    half = x.shape[-1] // 2
    cos, sin = cos_sin[:, None, :half], cos_sin[:, None, half:]
    a, b = x[..., :half].float(), x[..., half:].float()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def unpair(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """The last `dim` rows of each head of (heads, rows, …) from neighbouring-pair order to half-split order, in place.

    Queries and keys permuted alike have the same products.
    """
    tail = rows[:, rows.shape[1] - dim :]
    tail.copy_(torch.cat([tail[:, 0::2], tail[:, 1::2]], dim=1))
    return rows
