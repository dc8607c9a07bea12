"""From a checkpoint to a model on the best backend that this machine has."""

from __future__ import annotations

import logging

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


def build_model(config: ModelConfig, reader: WeightReader, backend: str = "auto", tp: TensorParallel = SINGLE) -> Model:
    """Load into a model what rank `tp.rank` computes.

    `native` raises InvalidArgument where the kernels cannot serve; `auto` takes torch there.
    """
    if backend not in BACKENDS:
        raise InvalidArgument(f"backend {backend!r} is not one of {', '.join(BACKENDS)}")
    reason = None if supports(config, reader.dtype) else "the kernels do not cover this model or dtype"
    if tp.size > 1:
        reason = "the kernels fuse what several ranks must add up in between"
    if backend != "torch" and reason is None:
        try:
            load_library()
        except NativeUnavailable as error:
            reason = str(error)
    if backend == "native" and reason:
        raise InvalidArgument(f"no native backend: {reason}")
    if config.mla is not None:
        _log.info("torch backend: %s", reason or "asked for")
        return TorchDeepseek(config, reader, tp)
    weights = LlamaWeights(config, reader, tp)
    if backend == "torch" or reason:
        _log.info("torch backend: %s", reason or "asked for")
        return TorchLlama(weights)
    return NativeLlama(weights)
