"""Which numbers of ranks a model's layers divide among. Torch-free: asked before anything is loaded."""

from __future__ import annotations

from kvmesh.errors import InvalidArgument
from kvmesh.loading.config import ModelConfig

MAX_RANKS = 64


def check_parallel(config: ModelConfig, tp: int) -> None:
    """Raises InvalidArgument, saying why and which numbers go, where `tp` ranks cannot share this model.

    tp must divide the heads and the MLP's columns, and divide the kv heads or be a multiple of them (each is then held
    by several ranks). The vocabulary need not divide. An MLA latent is held by every rank.
    """
    if not (why := _obstacle(config, tp)):
        return
    valid = ", ".join(str(size) for size in range(1, MAX_RANKS + 1) if not _obstacle(config, size))
    raise InvalidArgument(f"tp {tp} does not fit this model: {why}; set tp to one of {valid}", details={"field": "tp"})


def _obstacle(config: ModelConfig, tp: int) -> str:
    kv_heads = config.num_kv_heads
    if config.mla is None and kv_heads % tp and tp % kv_heads:
        return f"it neither divides the {kv_heads} kv heads nor is a multiple of them"
    divided = {"heads": config.num_heads}
    moe = config.moe
    if moe is None or moe.first_layer > 0:
        divided["intermediate columns"] = config.intermediate_size
    if moe is not None and moe.first_layer < config.num_layers:
        divided["columns of an expert"] = moe.intermediate_size
    for what, count in divided.items():
        if count % tp:
            return f"it does not divide the {count} {what}"
    return ""
