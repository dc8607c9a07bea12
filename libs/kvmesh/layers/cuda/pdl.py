"""Programmatic dependent launch: a kernel's blocks may start while the one before it still runs.

The rule that all kernels of this package keep: call `gdc_launch_dependents()` first, fetch ahead only what no kernel
writes (weights), then `gdc_wait()`, and only behind it read what an earlier kernel wrote, or write anything. Then every
kernel has seen the end of all kernels before it, those that are no neighbours included.
"""

from __future__ import annotations

import os
from typing import Any

import torch

# Triton's interpreter runs kernels on CPU for tests; it has no such launches.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_HOPPER = (9, 0)


def available(device: torch.device) -> bool:
    """Whether kernels on this device may be launched so."""
    return not INTERPRETED and device.type == "cuda" and torch.cuda.get_device_capability(device) >= _HOPPER


def options(pdl: bool) -> dict[str, Any]:
    """Keyword arguments of a launch: the kernel's constexpr PDL, and Triton's own option where it is on."""
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
