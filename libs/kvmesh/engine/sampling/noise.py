"""Noise as a pure function of (seed, choice, position), so that a healed or rebatched sequence samples the same."""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(x: int) -> int:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014): a bijection that passes avalanche tests."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def uniform(seed: int, choice: int, position: int) -> float:
    """A double in the open interval (0, 1)."""
    state = _mix((seed + _GOLDEN) & _MASK)
    state = _mix((state ^ (choice & _MASK)) + _GOLDEN & _MASK)
    state = _mix((state ^ (position & _MASK)) + _GOLDEN & _MASK)
    return float(((state >> 12) + 0.5) * 2.0**-52)
