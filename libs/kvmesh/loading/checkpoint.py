"""One face for every weights file: a config, tensor names in Hugging Face's spelling, raw arrays. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy.typing as npt

from kvmesh.loading.config import ModelConfig, ModelDescription


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A weight as stored or dequantized. bf16 comes as uint16 bit patterns, since numpy has no such type.

    `stored_bytes` is what it takes in the file, for progress.
    """

    data: npt.NDArray[Any]
    dtype: Literal["fp32", "fp16", "bf16"]
    stored_bytes: int


class Checkpoint(Protocol):
    """An open model. Tensors are read one by one, so peak memory is the model plus one tensor."""

    config: ModelConfig

    def names(self) -> Iterable[str]:
        """Tensor names, Hugging Face spelling (`model.layers.0.self_attn.q_proj.weight`)."""

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, from the header alone. DataLoss when it is missing."""

    def read(self, name: str) -> RawTensor:
        """One tensor. DataLoss when it is missing or its bytes are not all there."""

    def total_bytes(self) -> int:
        """Stored bytes of all tensors."""

    def describe(self) -> ModelDescription:
        """Name, revision and sizes."""

    def close(self) -> None:
        """Release files."""
