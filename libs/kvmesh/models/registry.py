"""From a checkpoint to a model on the best backend that this machine has."""

from __future__ import annotations

import logging
from typing import Literal

import torch

from kvmesh.errors import InvalidArgument
from kvmesh.layers.native.build import NativeUnavailable, load_library
from kvmesh.layers.parallel import SINGLE, TensorParallel
from kvmesh.loading.config import ModelConfig
from kvmesh.loading.weights import WeightReader
from kvmesh.models.deepseek import TorchDeepseek
from kvmesh.models.llama import LlamaWeights, Model, TorchLlama
from kvmesh.models.llama_native import NativeLlama, supports

BACKENDS = ("auto", "native", "torch")
_log = logging.getLogger(__name__)


def choose_backend(config: ModelConfig, dtype: torch.dtype, backend: str = "auto") -> Literal["native", "torch"]:
    """What `build_model` takes. InvalidArgument for `native` where the kernels cannot serve; `auto` takes torch there.

    Several ranks must be given the answer of one: their collectives fit only where all take the same.
    """
    if backend not in BACKENDS:
        raise InvalidArgument(f"backend {backend!r} is not one of {', '.join(BACKENDS)}")
    if backend == "torch":
        _log.info("torch backend: asked for")
        return "torch"
    reason = None if supports(config, dtype) else "the kernels do not cover this model or dtype"
    if reason is None:
        try:
            load_library()
        except NativeUnavailable as error:
            reason = str(error)
    if reason is None:
        return "native"
    if backend == "native":
        raise InvalidArgument(f"no native backend: {reason}")
    _log.info("torch backend: %s", reason)
    return "torch"


def build_model(config: ModelConfig, reader: WeightReader, backend: str = "auto", tp: TensorParallel = SINGLE) -> Model:
    """Load into a model what rank `tp.rank` computes. Raises as `choose_backend` and the loaders."""
    chosen = choose_backend(config, reader.dtype, backend)
    if config.mla is not None:
        return TorchDeepseek(config, reader, tp)
    weights = LlamaWeights(config, reader, tp)
    return NativeLlama(weights) if chosen == "native" else TorchLlama(weights)
