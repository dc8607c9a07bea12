"""DeepSeek-V2 and V3 in config.json: the latent attention's and the experts' fields. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from kvmesh.errors import InvalidArgument
from kvmesh.loading.config import MlaConfig, MoeConfig, MoeMethod

DEEPSEEK = frozenset({"deepseek_v2", "deepseek_v3"})
_METHODS = {"deepseek_v2": ("greedy", "group_limited_greedy"), "deepseek_v3": ("noaux_tc",)}
_SCORING = {"deepseek_v2": "softmax", "deepseek_v3": "sigmoid"}


def refuse_unknown(raw: dict[str, Any], where: Path) -> None:
    """InvalidArgument naming the field for what these architectures may ask for and kvmesh does not compute."""
    kind = raw["model_type"]
    # Field, the values that are computed, what a missing field or null means.
    known: list[tuple[str, tuple[Any, ...], Any]] = [
        ("topk_method", _METHODS[kind], _METHODS[kind][0]),
        ("scoring_func", (_SCORING[kind],), _SCORING[kind]),
        ("moe_layer_freq", (1,), 1),
        ("mlp_bias", (False,), False),
    ]
    if kind == "deepseek_v2":
        # Its two reference implementations disagree on what follows from True; no published model has it.
        known.append(("norm_topk_prob", (False,), False))
    for field, values, missing in known:
        value = missing if raw.get(field) is None else raw[field]
        if value not in values:
            allowed = " or ".join(repr(v) for v in values)
            raise InvalidArgument(f"{where}: {field} {value!r} is not supported for {kind}, {allowed} is")


def mla_of(raw: dict[str, Any]) -> MlaConfig:
    """KeyError, TypeError, ValueError as config.json lacks or garbles a field."""
    rank = raw["q_lora_rank"]
    return MlaConfig(
        q_lora_rank=None if rank is None else int(rank),
        kv_lora_rank=int(raw["kv_lora_rank"]),
        qk_nope_head_dim=int(raw["qk_nope_head_dim"]),
        qk_rope_head_dim=int(raw["qk_rope_head_dim"]),
        v_head_dim=int(raw["v_head_dim"]),
        interleaved=raw["model_type"] == "deepseek_v2" or bool(raw.get("rope_interleave", True)),
    )


def moe_of(raw: dict[str, Any]) -> MoeConfig | None:
    """None where all layers are dense. Raises as `mla_of`."""
    if raw["n_routed_experts"] is None:
        return None
    v3 = raw["model_type"] == "deepseek_v3"
    method = "noaux_tc" if v3 else raw.get("topk_method") or "greedy"
    # Greedy looks at no groups, whatever the file says of them.
    grouped = method != "greedy"
    return MoeConfig(
        num_experts=int(raw["n_routed_experts"]),
        experts_per_token=int(raw["num_experts_per_tok"]),
        intermediate_size=int(raw["moe_intermediate_size"]),
        shared_experts=int(raw.get("n_shared_experts") or 0),
        first_layer=int(raw.get("first_k_dense_replace") or 0),
        method=cast(MoeMethod, method),
        groups=int(raw["n_group"]) if grouped else 1,
        top_groups=int(raw["topk_group"]) if grouped else 1,
        normalize=v3 and bool(raw.get("norm_topk_prob", True)),
        scaling=float(raw.get("routed_scaling_factor", 1.0)),
    )
