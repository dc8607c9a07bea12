"""A model of which only the shape is real: a config.json, and weights drawn at random. Torch-free.

For measuring: no step's time depends on what the weights are.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from kvmesh.errors import DataLoss, InvalidArgument
from kvmesh.loading.checkpoint import RawTensor
from kvmesh.loading.config import ModelConfig, ModelDescription
from kvmesh.loading.fingerprint import fingerprint_files
from kvmesh.loading.hf_model import config_in

STD = 0.02


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Tensors of a dense GQA model by Hugging Face's names. InvalidArgument for other architectures."""
    c = config
    if c.mla is not None or c.moe is not None:
        raise InvalidArgument(f"random weights are there for dense GQA models, not for {c.architecture}")
    hidden, wide, q, kv = c.hidden_size, c.intermediate_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    matrices = {
        "self_attn.q_proj": (q, hidden, c.qkv_bias),
        "self_attn.k_proj": (kv, hidden, c.qkv_bias),
        "self_attn.v_proj": (kv, hidden, c.qkv_bias),
        "self_attn.o_proj": (hidden, q, c.o_bias),
        "mlp.gate_proj": (wide, hidden, c.mlp_bias),
        "mlp.up_proj": (wide, hidden, c.mlp_bias),
        "mlp.down_proj": (hidden, wide, c.mlp_bias),
    }
    table = (c.vocab_size, hidden)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": table, "model.norm.weight": (hidden,)}
    if not c.tie_embeddings:
        shapes["lm_head.weight"] = table
    for i in range(c.num_layers):
        prefix = f"model.layers.{i}."
        shapes[f"{prefix}input_layernorm.weight"] = shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
        for name, (rows, cols, bias) in matrices.items():
            shapes[f"{prefix}{name}.weight"] = (rows, cols)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
    return shapes


def is_norm(name: str) -> bool:
    """Whether a tensor is a norm's scale: those are ones."""
    return name.endswith("norm.weight")


def tensor_seed(name: str, seed: int) -> int:
    """A tensor's values depend on its name and the model's seed, not on the order of reading."""
    return zlib.crc32(f"{seed}:{name}".encode())


class RandomCheckpoint:
    """`Checkpoint` over a config.json alone. `read` draws on the host; `loading.random` draws on a device."""

    def __init__(self, path: Path, name: str | None = None, seed: int = 0) -> None:
        self.path = path
        self.config = config_in(path)
        self.name = name or path.stem
        self.seed = seed
        self._shapes = tensor_shapes(self.config)

    def names(self) -> Iterable[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        try:
            return self._shapes[name]
        except KeyError:
            raise DataLoss(f"{self.path}: a model of this config has no tensor {name}") from None

    def read(self, name: str) -> RawTensor:
        shape = self.shape(name)
        if is_norm(name):
            data = np.ones(shape, dtype=np.float32)
        else:
            generator = np.random.default_rng(tensor_seed(name, self.seed))
            data = generator.standard_normal(shape, dtype=np.float32) * np.float32(STD)
        return RawTensor(data, "fp32", 2 * data.size)

    def total_bytes(self) -> int:
        return 2 * sum(math.prod(shape) for shape in self._shapes.values())

    def describe(self) -> ModelDescription:
        c = self.config
        return ModelDescription(
            name=self.name,
            revision=fingerprint_files([self.path]),
            architecture=c.architecture,
            vocab_size=c.vocab_size,
            max_model_len=c.max_model_len,
            num_layers=c.num_layers,
            eos_token_ids=c.eos_token_ids,
            weight_bytes=self.total_bytes(),
        )

    def close(self) -> None:
        """Nothing is open."""
