"""DeepSeek directories: fields that are not computed are refused by name, damaged files are a clear DataLoss."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from kvmesh.engine.torch_runner import TorchRunner
from kvmesh.errors import DataLoss, InvalidArgument, KvmeshError
from kvmesh.loading.hf_model import HfCheckpoint, config_of
from kvmesh.loading.tokenizer import load_tokenizer
from mla_tiny import MLA_TINY, make_mla, make_mla_service


@pytest.fixture(scope="module", params=["v2_groups", "v3_yarn"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mla")
    make_mla(path, request.param)
    return path


@pytest.fixture(scope="module")
def v3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("v3")
    make_mla(path, "v3")
    return path


def changed(source: Path, target: Path, **changes: Any) -> Path:
    """The model with another config.json; a field of value `...` is taken out."""
    raw = json.loads((source / "config.json").read_text()) | changes
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}))
    link = target / "model.safetensors"
    if not link.exists():
        link.symlink_to(source / "model.safetensors")
    return target


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("topk_method", "aux_loss"),
        ("scoring_func", "tanh"),
        ("moe_layer_freq", 2),
        ("mlp_bias", True),
        ("quantization_config", {"quant_method": "fp8"}),
        ("hidden_act", "gelu"),
        ("rope_scaling", {"type": "dynamic", "factor": 2.0}),
    ],
)
def test_what_is_not_computed_is_refused_by_name(directory: Path, tmp_path: Path, field: str, value: object) -> None:
    changes = {field: value} | ({"rope_parameters": ...} if field == "rope_scaling" else {})
    with pytest.raises(InvalidArgument, match=rf"config\.json.*({field}|activation|rope type)"):
        HfCheckpoint(changed(directory, tmp_path / "m", **changes))


def test_what_two_implementations_read_differently_is_refused(tmp_path: Path) -> None:
    make_mla(tmp_path / "v2", "v2_greedy")
    with pytest.raises(InvalidArgument, match="norm_topk_prob"):
        HfCheckpoint(changed(tmp_path / "v2", tmp_path / "m", norm_topk_prob=True))
    # Each version's router is its own.
    with pytest.raises(InvalidArgument, match="topk_method 'noaux_tc'"):
        HfCheckpoint(changed(tmp_path / "v2", tmp_path / "m", topk_method="noaux_tc"))


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_lora_rank": ...},
        {"kv_lora_rank": 0},
        {"q_lora_rank": ...},
        {"q_lora_rank": 0},
        {"q_lora_rank": "many"},
        {"qk_nope_head_dim": -16},
        {"qk_rope_head_dim": 7},
        {"v_head_dim": None},
        {"n_routed_experts": 0},
        {"n_routed_experts": 9},
        {"n_group": 3},
        {"topk_group": 5},
        {"n_group": None},
        {"num_experts_per_tok": 5},
        {"num_experts_per_tok": 0},
        {"moe_intermediate_size": 1 << 40},
        {"n_shared_experts": -1},
        {"first_k_dense_replace": -1},
        {"routed_scaling_factor": float("nan")},
        {"rope_parameters": {"rope_type": "yarn", "factor": 1e999}},
    ],
)
def test_configs_that_are_no_model_are_data_loss(directory: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(DataLoss, match=r"config\.json"):
        HfCheckpoint(changed(directory, tmp_path / "m", **changes))


def test_groups_of_one_cannot_be_ranked_by_their_two_best(v3: Path, tmp_path: Path) -> None:
    with pytest.raises(DataLoss, match="noaux_tc"):
        HfCheckpoint(changed(v3, tmp_path / "m", n_group=8, topk_group=4))


@pytest.mark.parametrize(
    "name",
    [
        "self_attn.q_b_proj.weight",
        "self_attn.kv_a_proj_with_mqa.weight",
        "self_attn.kv_a_layernorm.weight",
        "self_attn.kv_b_proj.weight",
        "mlp.gate.weight",
        "mlp.gate.e_score_correction_bias",
        "mlp.experts.5.up_proj.weight",
        "mlp.shared_experts.down_proj.weight",
    ],
)
@pytest.mark.parametrize("damage", ["missing", "shape"])
def test_tensors_missing_or_of_another_shape(v3: Path, tmp_path: Path, name: str, damage: str) -> None:
    name = f"model.layers.1.{name}"
    tensors = load_file(v3 / "model.safetensors")
    (tmp_path / "config.json").write_text((v3 / "config.json").read_text())
    if damage == "missing":
        del tensors[name]
    else:
        tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(DataLoss, match=name.replace(".", r"\.")):
        TorchRunner.load(str(tmp_path), "fp32")


@pytest.mark.parametrize(
    "field",
    ["num_hidden_layers", "n_routed_experts", "n_shared_experts", "kv_lora_rank", "v_head_dim", "qk_nope_head_dim"],
)
def test_a_config_that_asks_for_terabytes_is_data_loss(directory: Path, tmp_path: Path, field: str) -> None:
    started = time.process_time()
    with pytest.raises(DataLoss):
        TorchRunner.load(str(changed(directory, tmp_path / "m", **{field: (1 << 31) - 8})), "fp32")
    assert time.process_time() - started < 20


def test_the_spelling_of_published_files_is_understood(tmp_path: Path) -> None:
    """config.json as DeepSeek wrote it for V3: rope_scaling and rope_theta apart, fields that transformers drops."""
    make_mla(tmp_path / "new", "v3_yarn")
    raw = json.loads((tmp_path / "new" / "config.json").read_text())
    rope = raw["rope_parameters"]
    scaling = {key: rope[key] for key in rope if key not in ("rope_theta", "rope_type")} | {"type": "yarn"}
    published = {
        "rope_parameters": ...,
        "head_dim": ...,
        "rope_interleave": ...,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
        "ep_size": 1,
        "seq_aux": True,
        "aux_loss_alpha": 0.001,
    }
    assert config_of(changed(tmp_path / "new", tmp_path / "old", **published)) == config_of(tmp_path / "new")


def test_layers_beyond_the_configs_are_not_read(v3: Path, tmp_path: Path) -> None:
    """A V3 file carries layers for predicting several tokens after the model's own."""
    runner = TorchRunner.load(str(changed(v3, tmp_path / "m", num_hidden_layers=2)), "fp32")
    assert runner.layout(16, 4).num_layers == 2


def test_bf16_keeps_the_router_exact(v3: Path) -> None:
    runner = TorchRunner.load(str(v3), "bf16")
    stored = load_file(v3 / "model.safetensors")["model.layers.1.mlp.gate.weight"]
    assert runner.model.blocks[1].mlp.router.weight.equal(stored)  # type: ignore[attr-defined]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_configs_are_a_model_or_a_clear_error(directory: Path, tmp_path: Path, data: st.DataObject) -> None:
    raw = json.loads((directory / "config.json").read_text())
    junk = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 300),
        st.integers(),
        st.floats(),
        st.text(max_size=5),
        st.lists(st.integers(), max_size=2),
        st.dictionaries(st.sampled_from(["rope_type", "factor", "mscale", "rope_theta"]), st.floats(), max_size=3),
    )
    changes = data.draw(st.dictionaries(st.sampled_from(sorted(raw)), junk, min_size=1, max_size=3))
    with contextlib.suppress(KvmeshError):
        config_of(changed(directory, tmp_path / "m", **changes))


def test_what_a_mesh_needs_of_a_directory(tmp_path: Path) -> None:
    make_mla_service(tmp_path)
    bundle = load_tokenizer(str(tmp_path))
    config = config_of(tmp_path)
    assert bundle.tokenizer.encode("Ab", add_special_tokens=False).ids == [65, 98]
    assert bundle.eos_token_ids == config.eos_token_ids == {257}
    assert bundle.vocab_size <= config.vocab_size
    assert (config.mla.kv_lora_rank, config.num_heads) == (32, MLA_TINY["num_attention_heads"])  # type: ignore[union-attr]
