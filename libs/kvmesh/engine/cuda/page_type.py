"""What a GPU's pages are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvmesh.errors import InvalidArgument
from kvmesh.kv.layout import SCALED_DTYPES

KV_DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class PageType:
    """dtype: the layout's name. scales: (k_scale, v_scale) where pages hold K / k_scale and V / v_scale, else None."""

    dtype: str
    scales: tuple[float, float] | None

    @classmethod
    def of(cls, kv_dtype: str, dtype: str, k_scale: float, v_scale: float) -> PageType:
        """kv_dtype as the setting: "auto" is the model's dtype. Raises InvalidArgument for what is not served."""
        name = dtype if kv_dtype == "auto" else kv_dtype
        if name not in KV_DTYPES:
            known = ", ".join(KV_DTYPES)
            raise InvalidArgument(f"no kv_dtype {name!r} on CUDA, only {known}", details={"field": "kv_dtype"})
        return cls(name, (float(k_scale), float(v_scale)) if name in SCALED_DTYPES else None)

    @property
    def element(self) -> torch.dtype:
        """Torch's type of an element."""
        return KV_DTYPES[self.dtype]
