"""A GGUF file as a `Checkpoint`: metadata → config, tensor names → Hugging Face's, q and k rows un-permuted."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmesh.errors import DataLoss, InvalidArgument
from kvmesh.loading.checkpoint import RawTensor
from kvmesh.loading.config import ModelConfig, ModelDescription, RopeConfig
from kvmesh.loading.fingerprint import fingerprint_files
from kvmesh.loading.gguf import GgufFile, GgufTensor
from kvmesh.loading.quants import dequantize

# llama.cpp rotates neighbouring pairs for these, so their converter interleaves the rows of q and k.
_PERMUTED = frozenset({"llama"})
_SUPPORTED = frozenset({"llama", "qwen2"})
FREQ_FACTORS = "model.rope_freq_factors"

_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    FREQ_FACTORS: "rope_freqs.weight",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def unpermute(rows: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Rows (heads * head_dim, …) in neighbouring-pair order → half-split order, per head."""
    half = rows.shape[0] // heads // 2
    split = rows.reshape(heads, half, 2, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows.shape)


def _eos_ids(file: GgufFile) -> frozenset[int]:
    ids = {
        file.metadata[k] for k in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if k in file.metadata
    }
    return frozenset(int(i) for i in ids if isinstance(i, int))


def config_of(file: GgufFile) -> ModelConfig:
    """The model's shape from GGUF metadata. InvalidArgument for an architecture that is not supported."""
    arch = file.get("general.architecture", str)
    if arch not in _SUPPORTED:
        raise InvalidArgument(f"{file.path}: architecture {arch!r} is not one of {', '.join(sorted(_SUPPORTED))}")

    def key(name: str) -> str:
        return f"{arch}.{name}"

    hidden, heads = file.get(key("embedding_length"), int), file.get(key("attention.head_count"), int)
    if heads <= 0:
        raise DataLoss(f"{file.path}: {heads} attention heads")
    layers = file.get(key("block_count"), int)
    if layers > len(file.tensors):
        # Before anything is made a layer at a time: a corrupt count would take all memory.
        raise DataLoss(f"{file.path}: {layers} layers in a file of {len(file.tensors)} tensors (corrupt)")
    scaling = file.get(key("rope.scaling.type"), str, "none")
    if scaling not in ("none", "linear"):
        raise InvalidArgument(f"{file.path}: rope scaling {scaling!r} is not supported")
    context = file.get(key("context_length"), int)
    embedding = file.tensors.get("token_embd.weight")
    vocab = embedding.shape[0] if embedding and len(embedding.shape) == 2 else file.get(key("vocab_size"), int)
    return ModelConfig(
        architecture=arch,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=file.get(key("feed_forward_length"), int),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=file.get(key("attention.head_count_kv"), int, heads),
        head_dim=file.get(key("attention.key_length"), int, hidden // heads),
        max_model_len=context,
        rms_eps=file.get(key("attention.layer_norm_rms_epsilon"), float),
        rope=RopeConfig(
            theta=file.get(key("rope.freq_base"), float, 10000.0),
            kind="linear" if scaling == "linear" else "default",
            factor=file.get(key("rope.scaling.factor"), float, 1.0),
        ),
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        eos_token_ids=_eos_ids(file),
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
    ).validate(str(file.path))


class GgufCheckpoint:
    """`Checkpoint` over one GGUF file; quantized tensors come dequantized to fp32."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.file = GgufFile(path)
        try:
            self.config = config_of(self.file)
        except BaseException:
            self.file.close()
            raise
        self.name = name or path.stem
        self._names = self._map_names()

    def _map_names(self) -> dict[str, str]:
        names = dict(_TOP)
        for i in range(self.config.num_layers):
            for hf, ggml in _LAYER.items():
                for part in ("weight", "bias"):
                    names[f"model.layers.{i}.{hf}.{part}"] = f"blk.{i}.{ggml}.{part}"
        return {hf: ggml for hf, ggml in names.items() if ggml in self.file.tensors}

    def names(self) -> Iterable[str]:
        return self._names.keys()

    def _tensor(self, name: str) -> GgufTensor:
        ggml = self._names.get(name)
        if ggml is None:
            raise DataLoss(f"{self.file.path}: the tensor for {name} is missing")
        return self.file.tensors[ggml]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def read(self, name: str) -> RawTensor:
        tensor = self._tensor(name)
        data = dequantize(self.file.raw(tensor.name), tensor.type.name, tensor.type.nbytes, tensor.shape)
        if self.config.architecture in _PERMUTED:
            heads = {"q_proj": self.config.num_heads, "k_proj": self.config.num_kv_heads}.get(name.split(".")[-2], 0)
            if heads:
                if data.ndim == 0 or data.shape[0] == 0 or data.shape[0] % (2 * heads):
                    raise DataLoss(
                        f"{self.file.path}: {tensor.name} of shape {tensor.shape} has no even number of rows for each "
                        f"of {heads} heads (corrupt)"
                    )
                data = unpermute(data, heads)
        return RawTensor(data, "fp32", tensor.nbytes)

    def total_bytes(self) -> int:
        return sum(self.file.tensors[ggml].nbytes for ggml in self._names.values())

    def describe(self) -> ModelDescription:
        c = self.config
        return ModelDescription(
            name=self.name,
            revision=fingerprint_files([self.file.path]),
            architecture=c.architecture,
            vocab_size=c.vocab_size,
            max_model_len=c.max_model_len,
            num_layers=c.num_layers,
            eos_token_ids=c.eos_token_ids,
            weight_bytes=self.total_bytes(),
        )

    def close(self) -> None:
        self.file.close()
