"""A Hugging Face directory as a `Checkpoint`: config.json and one or many safetensors files. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast, get_args

from kvmesh.errors import DataLoss, InvalidArgument, NotFound
from kvmesh.loading.checkpoint import RawTensor
from kvmesh.loading.config import ModelConfig, ModelDescription, RopeConfig, RopeKind, yarn_mscale
from kvmesh.loading.fingerprint import fingerprint_files
from kvmesh.loading.hf_deepseek import DEEPSEEK, mla_of, moe_of, refuse_unknown
from kvmesh.loading.safetensors import SafetensorsFile

MAX_JSON_BYTES = 64 << 20
INDEX = "model.safetensors.index.json"
_SUPPORTED = frozenset({"llama", "mistral", "qwen2"}) | DEEPSEEK


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size. NotFound, or DataLoss when it is cut or is no object."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise DataLoss(f"{path}: {size} bytes, at most {MAX_JSON_BYTES} are expected (corrupt)")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotFound(f"{path}: no such file") from None
    except (ValueError, RecursionError) as error:
        raise DataLoss(f"{path}: not valid JSON (truncated or corrupt): {error}") from None
    if not isinstance(value, dict):
        raise DataLoss(f"{path}: no JSON object")
    return value


def _rope(raw: dict[str, Any], where: Path) -> RopeConfig:
    """Both spellings: `rope_theta` + `rope_scaling`, and the newer `rope_parameters`."""
    params: dict[str, Any] = {"rope_theta": raw.get("rope_theta")}
    params.update(raw.get("rope_scaling") or {})
    params.update(raw.get("rope_parameters") or {})
    kind = params.get("rope_type") or params.get("type") or "default"
    if kind not in get_args(RopeKind):
        raise InvalidArgument(f"{where}: rope type {kind!r} is not supported")
    if not params.get("truncate", True) or params.get("partial_rotary_factor", 1.0) != 1.0:
        raise InvalidArgument(f"{where}: rope with truncate false or a partial_rotary_factor is not supported")
    theta = params.get("rope_theta")
    # Yarn without a factor would be none.
    factor = float(params["factor"] if kind == "yarn" else params.get("factor", 1.0))
    return RopeConfig(
        theta=float(theta if theta is not None else 10000.0),
        kind=cast(RopeKind, kind),
        factor=factor,
        low_freq_factor=float(params.get("low_freq_factor", 1.0)),
        high_freq_factor=float(params.get("high_freq_factor", 4.0)),
        original_max_len=int(
            params.get("original_max_position_embeddings") or raw.get("max_position_embeddings") or 8192
        ),
        beta_fast=float(params.get("beta_fast") or 32.0),
        beta_slow=float(params.get("beta_slow") or 1.0),
        attention_factor=_attention_factor(params, factor) if kind == "yarn" else 1.0,
        mscale_all_dim=float(params.get("mscale_all_dim") or 0.0) if kind == "yarn" else 0.0,
    )


def _attention_factor(params: dict[str, Any], factor: float) -> float:
    """What yarn multiplies cos and sin by. With both mscales only their quotient: the rest is in the scores' scale."""
    given, mscale, all_dim = (params.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None:
        return float(given)
    if mscale and all_dim:
        return yarn_mscale(factor, float(mscale)) / yarn_mscale(factor, float(all_dim))
    return yarn_mscale(factor)


def _eos(directory: Path, raw: dict[str, Any]) -> frozenset[int]:
    value = raw.get("eos_token_id")
    generation = directory / "generation_config.json"
    if generation.exists():
        value = read_json(generation).get("eos_token_id", value)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    return frozenset(int(i) for i in ids)


def config_of(directory: Path) -> ModelConfig:
    """A directory's config.json → `ModelConfig`; see `config_in`."""
    return config_in(directory / "config.json")


def config_in(where: Path) -> ModelConfig:
    """config.json → `ModelConfig`. InvalidArgument for an architecture or option that is not supported."""
    raw = read_json(where)
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in _SUPPORTED:
        raise InvalidArgument(f"{where}: model_type {kind!r} is not one of {', '.join(sorted(_SUPPORTED))}")
    if raw.get("hidden_act", "silu") != "silu":
        raise InvalidArgument(f"{where}: activation {raw['hidden_act']!r} is not supported")
    if raw.get("sliding_window") and raw.get("use_sliding_window", kind == "mistral"):
        raise InvalidArgument(f"{where}: sliding window attention is not supported")
    if raw.get("quantization_config"):
        raise InvalidArgument(f"{where}: quantization_config is not supported, weights must be bf16, fp16 or fp32")
    if kind in DEEPSEEK:
        refuse_unknown(raw, where)
    try:
        hidden, heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
        bias = bool(raw.get("attention_bias", False))
        mla = mla_of(raw) if kind in DEEPSEEK else None
        head_dim = int(raw.get("head_dim") or hidden // max(heads, 1))
        return ModelConfig(
            architecture=kind,
            vocab_size=int(raw["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(raw["intermediate_size"]),
            num_layers=int(raw["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=1 if mla else int(raw.get("num_key_value_heads") or heads),
            head_dim=mla.qk_head_dim if mla else head_dim,
            max_model_len=int(raw.get("max_position_embeddings", 2048)),
            rms_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope=_rope(raw, where),
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=bias or kind == "qwen2",
            o_bias=bias,
            mlp_bias=bool(raw.get("mlp_bias", False)),
            eos_token_ids=_eos(where.parent, raw),
            bos_token_id=raw.get("bos_token_id"),
            mla=mla,
            moe=moe_of(raw) if mla else None,
        ).validate(str(where))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataLoss(f"{where}: {type(error).__name__} on {error} (corrupt)") from None


class HfCheckpoint:
    """`Checkpoint` over a directory. Files are mapped, so reading a tensor touches only its pages."""

    def __init__(self, directory: Path, name: str | None = None) -> None:
        self.directory = directory
        self.config = config_of(directory)
        self.name = name or directory.name
        self._paths = self._find_files()
        self._files: list[SafetensorsFile] = []
        self._where: dict[str, SafetensorsFile] = {}
        try:
            for path in self._paths:
                file = SafetensorsFile(path)
                self._files.append(file)
                self._where.update(dict.fromkeys(file.entries, file))
        except BaseException:
            self.close()
            raise

    def _find_files(self) -> list[Path]:
        index = self.directory / INDEX
        if index.exists():
            names = read_json(index).get("weight_map")
            if not isinstance(names, dict) or not names:
                raise DataLoss(f"{index}: no weight_map (corrupt)")
            shards = sorted({str(v) for v in names.values()})
            if any("/" in shard or shard.startswith(".") for shard in shards):
                raise DataLoss(f"{index}: a shard lies outside the directory (corrupt)")
            missing = [s for s in shards if not (self.directory / s).exists()]
            if missing:
                raise DataLoss(f"{self.directory}: {len(missing)} of {len(shards)} shards are missing: {missing[0]} …")
            return [self.directory / shard for shard in shards]
        paths = sorted(self.directory.glob("*.safetensors"))
        if not paths:
            raise NotFound(f"{self.directory}: no *.safetensors file")
        return paths

    def names(self) -> Iterable[str]:
        return self._where.keys()

    def _file(self, name: str) -> SafetensorsFile:
        file = self._where.get(name)
        if file is None:
            raise DataLoss(f"{self.directory}: tensor {name} is in none of {len(self._files)} files")
        return file

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file(name).entries[name].shape

    def read(self, name: str) -> RawTensor:
        return self._file(name).read(name)

    def total_bytes(self) -> int:
        return sum(e.nbytes for file in self._files for e in file.entries.values())

    def describe(self) -> ModelDescription:
        c = self.config
        return ModelDescription(
            name=self.name,
            revision=fingerprint_files([self.directory / "config.json", *self._paths]),
            architecture=c.architecture,
            vocab_size=c.vocab_size,
            max_model_len=c.max_model_len,
            num_layers=c.num_layers,
            eos_token_ids=c.eos_token_ids,
            weight_bytes=self.total_bytes(),
        )

    def close(self) -> None:
        for file in self._files:
            file.close()
