"""Readers: dequantization against the gguf package, and every kind of cut or corrupt file as a clear DataLoss."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from kvmesh.engine.torch_runner import TorchRunner
from kvmesh.errors import DataLoss, InvalidArgument, KvmeshError, NotFound
from kvmesh.loading.gguf import GgufFile
from kvmesh.loading.gguf_model import GgufCheckpoint, unpermute
from kvmesh.loading.hf_model import HfCheckpoint
from kvmesh.loading.quants import dequantize
from kvmesh.loading.safetensors import SafetensorsFile
from kvmesh.loading.source import describe, resolve
from kvmesh.loading.tokenizer import from_gguf
from model_tiny import make_tiny

QUANTS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K")
HEADS, KV_HEADS, DIM, HIDDEN, WIDE, VOCAB = 4, 2, 8, 32, 64, 48


def write_gguf(path: Path, quant: str = "Q8_0", layers: int = 2) -> dict[str, np.ndarray]:
    """A small llama written by the gguf package; returns the fp32 tensors before quantization."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(layers)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    words = [chr(33 + i) for i in range(VOCAB - 2)] + ['!"', "<eos>"]
    writer.add_token_list(words)
    writer.add_token_types([1] * (VOCAB - 1) + [3])
    writer.add_token_merges(['! "'])
    writer.add_eos_token_id(VOCAB - 1)
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for i in range(layers):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (HIDDEN,),
            f"blk.{i}.ffn_norm.weight": (HIDDEN,),
            f"blk.{i}.attn_q.weight": (HEADS * DIM, HIDDEN),
            f"blk.{i}.attn_k.weight": (KV_HEADS * DIM, HIDDEN),
            f"blk.{i}.attn_v.weight": (KV_HEADS * DIM, HIDDEN),
            f"blk.{i}.attn_output.weight": (HIDDEN, HEADS * DIM),
            f"blk.{i}.ffn_gate.weight": (WIDE, HIDDEN),
            f"blk.{i}.ffn_up.weight": (WIDE, HIDDEN),
            f"blk.{i}.ffn_down.weight": (HIDDEN, WIDE),
        }
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    kind = gguf.GGMLQuantizationType[quant]
    for name, data in tensors.items():
        if data.ndim == 1 or quant == "F32":
            writer.add_tensor(name, data)
        else:
            writer.add_tensor(name, gguf.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def open_everything(path: Path) -> None:
    """All that loading a GGUF touches."""
    checkpoint = GgufCheckpoint(path)
    try:
        for name in checkpoint.names():
            checkpoint.read(name)
        from_gguf(checkpoint.file)
    finally:
        checkpoint.close()


@pytest.mark.parametrize("quant", QUANTS)
def test_dequantize_equals_the_gguf_package(quant: str) -> None:
    rng = np.random.default_rng(3)
    kind = gguf.GGMLQuantizationType[quant]
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    # Random bits cover every field of a block; fp16 scales that are no number are replaced below.
    blocks = rng.integers(0, 256, (64, nbytes), dtype=np.uint8)
    halves = {"Q4_K": (0, 2), "Q6_K": (208,), "F32": (), "F16": (), "BF16": ()}.get(quant, (0, 2))
    for at in halves:
        blocks[:, at : at + 2] = rng.standard_normal((64, 1)).astype(np.float16).view(np.uint8)
    shape = (4, 16 * block)
    expected = gguf.dequantize(blocks.reshape(4, -1), kind).reshape(shape)
    got = dequantize(blocks.reshape(-1), quant, nbytes, shape)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, expected)


def test_smollm2_tensors_equal_the_gguf_package(smollm2_path: Path) -> None:
    theirs = {t.name: t for t in gguf.GGUFReader(smollm2_path).tensors}
    with GgufFile(smollm2_path) as file:
        assert file.tensors.keys() == theirs.keys()
        for name in list(theirs)[:12]:
            tensor = file.tensors[name]
            ours = dequantize(file.raw(name), tensor.type.name, tensor.type.nbytes, tensor.shape)
            np.testing.assert_array_equal(ours, gguf.dequantize(theirs[name].data, theirs[name].tensor_type))


def test_unpermute_inverts_the_converter() -> None:
    rows = np.arange(HEADS * DIM * 3).reshape(HEADS * DIM, 3)
    # What llama.cpp's converter does to q and k rows.
    permuted = rows.reshape(HEADS, 2, DIM // 2, 3).swapaxes(1, 2).reshape(rows.shape)
    assert not np.array_equal(permuted, rows)
    assert np.array_equal(unpermute(permuted, HEADS), rows)


def test_a_written_gguf_reads_back(tmp_path: Path) -> None:
    tensors = write_gguf(tmp_path / "m.gguf", "F32")
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    c = checkpoint.config
    assert (c.num_layers, c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim) == (2, HIDDEN, HEADS, KV_HEADS, DIM)
    assert c.tie_embeddings
    assert c.eos_token_ids == {VOCAB - 1}
    down = checkpoint.read("model.layers.1.mlp.down_proj.weight")
    np.testing.assert_array_equal(down.data, tensors["blk.1.ffn_down.weight"])
    q = checkpoint.read("model.layers.0.self_attn.q_proj.weight").data
    np.testing.assert_array_equal(q, unpermute(tensors["blk.0.attn_q.weight"], HEADS))
    assert checkpoint.total_bytes() == sum(t.nbytes for t in tensors.values())
    with pytest.raises(DataLoss, match="missing"):
        checkpoint.read("model.layers.7.mlp.down_proj.weight")


@pytest.mark.parametrize("quant", ["F32", "Q4_1"])
def test_a_gguf_cut_anywhere_is_data_loss(tmp_path: Path, quant: str) -> None:
    write_gguf(tmp_path / "whole.gguf", quant)
    whole = (tmp_path / "whole.gguf").read_bytes()
    open_everything(tmp_path / "whole.gguf")
    cut = tmp_path / "cut.gguf"
    # Every byte of the header's start, a stride through metadata and data, and the last bytes. The writer pads the
    # file's end to the alignment, so cuts inside that padding lose nothing.
    data_end = max(t.offset + t.nbytes for t in GgufFile(tmp_path / "whole.gguf").tensors.values())
    points = {*range(64), *range(64, data_end, 97), *range(data_end - 40, data_end)}
    for at in sorted(points):
        cut.write_bytes(whole[:at])
        with pytest.raises(DataLoss) as caught:
            open_everything(cut)
        assert "cut.gguf" in str(caught.value)


def test_truncation_message_names_tensor_and_sizes(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    raw = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(raw[:-2000])
    with pytest.raises(DataLoss, match=rf"tensor blk\.1\.\S+ lies at .* the file has {len(raw) - 2000}.*missing"):
        GgufCheckpoint(tmp_path / "m.gguf")


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_corrupt_gguf_never_raises_anything_else(corruptible: Path, data: st.DataObject) -> None:
    raw = bytearray(corruptible.read_bytes())
    header = GgufFile(corruptible).tensors["token_embd.weight"].offset
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, header - 1))
        width = data.draw(st.sampled_from([1, 4, 8]))
        raw[at : at + width] = data.draw(st.sampled_from([b"\xff", b"\x00", b"\x7f", b"\x01"])) * width
    broken = corruptible.with_name("broken.gguf")
    broken.write_bytes(raw[: len(raw)])
    # Damage that goes unseen is fine here, any exception that is not ours is not.
    with contextlib.suppress(KvmeshError):
        open_everything(broken)


@pytest.fixture(scope="module")
def corruptible(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path)
    return path


def test_huge_claims_are_refused_before_allocation(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for tensors, pairs in ((1 << 60, 0), (0, 1 << 60), (1 << 40, 1 << 40)):
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs) + bytes(64))
        with pytest.raises(DataLoss, match="needs"):
            GgufFile(path)
    # An array that claims 2^61 numbers, and a string of 2^63 bytes.
    for body in (
        struct.pack("<IIQ", 9, 4, 1 << 61),
        struct.pack("<IQ", 8, 1 << 63),
        struct.pack("<IIQ", 9, 8, 1 << 59),
    ):
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + body + bytes(64))
        with pytest.raises(DataLoss, match="metadata k"):
            GgufFile(path)


def with_number(raw: bytes, key: str, value: int) -> bytes:
    """The file with another u32 under a metadata key."""
    at = raw.index(key.encode()) + len(key) + 4
    return raw[:at] + struct.pack("<I", value) + raw[at + 4 :]


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "feed_forward_length"])
def test_huge_sizes_are_refused_before_allocation(tmp_path: Path, key: str) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    raw = path.read_bytes()
    path.write_bytes(with_number(raw, f"llama.{key}", (1 << 31) - 4))
    started = time.process_time()
    with pytest.raises(DataLoss):
        TorchRunner.load(str(path), "fp32")
    assert time.process_time() - started < 5


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "intermediate_size", "num_hidden_layers"])
def test_a_config_that_asks_for_terabytes_is_data_loss(tmp_path: Path, field: str) -> None:
    make_tiny(tmp_path, "plain")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: (1 << 31) - 4}))
    with pytest.raises(DataLoss):
        TorchRunner.load(str(tmp_path), "fp32")


def test_tensors_that_overlap_or_are_not_aligned_are_data_loss(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, "F32")
    raw = path.read_bytes()
    name = b"blk.0.attn_k.weight"
    at = raw.index(name) + len(name) + 4 + 2 * 8 + 4  # after dimensions, shape and type
    (offset,) = struct.unpack_from("<Q", raw, at)
    for wrong, match in ((offset - 32, "overlap"), (offset + 4, "aligned")):
        path.write_bytes(raw[:at] + struct.pack("<Q", wrong) + raw[at + 8 :])
        with pytest.raises(DataLoss, match=match):
            GgufFile(path)


def test_not_a_gguf(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(DataLoss, match="magic"):
        GgufFile(path)
    with pytest.raises(NotFound):
        GgufFile(tmp_path / "absent.gguf")
    with pytest.raises(NotFound):
        GgufFile(tmp_path)


def test_unsupported_architecture_is_invalid(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "mamba")
    writer.add_tensor("x", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InvalidArgument, match="mamba"):
        GgufCheckpoint(tmp_path / "m.gguf")


def test_safetensors_values_and_types(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).to(torch.bfloat16),
        "c": torch.randn(2, 2, 2).to(torch.float16),
        "d": torch.zeros(0, 4),
    }
    save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "m.safetensors")
    for name, tensor in tensors.items():
        raw = file.read(name)
        assert raw.data.shape == tuple(tensor.shape)
        expected = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
        np.testing.assert_array_equal(raw.data, expected.numpy())
    save_file({"i": torch.zeros(3, dtype=torch.int64)}, tmp_path / "i.safetensors")
    with pytest.raises(InvalidArgument, match="I64"):
        SafetensorsFile(tmp_path / "i.safetensors").read("i")


def read_all(directory: Path) -> None:
    checkpoint = HfCheckpoint(directory)
    try:
        for name in checkpoint.names():
            checkpoint.read(name)
    finally:
        checkpoint.close()


def test_safetensors_cut_anywhere_is_data_loss(tmp_path: Path) -> None:
    make_tiny(tmp_path, "plain")
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    read_all(tmp_path)
    for at in {*range(80), *range(80, 4000, 61), *range(4000, len(whole), 9973), len(whole) - 1}:
        path.write_bytes(whole[:at])
        with pytest.raises(DataLoss, match=r"model\.safetensors"):
            read_all(tmp_path)


def test_corrupt_safetensors_headers(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    for header in (
        [],
        {"a": 3},
        {"a": {**entry, "shape": [-2]}},
        {"a": {**entry, "shape": ["x"]}},
        {"a": {**entry, "data_offsets": [8, 0]}},
        {"a": {**entry, "data_offsets": [0, 1 << 60]}},
        {"a": {**entry, "data_offsets": [0]}},
        {"a": {**entry, "shape": [3]}},
        {"a": {**entry, "shape": [1 << 70, 0], "data_offsets": [0, 0]}},
        {"a": {**entry, "shape": [1] * 100 + [2]}},
        {"a": {**entry, "shape": [True, 2]}},
    ):
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
        with pytest.raises(DataLoss):
            SafetensorsFile(path).read("a")
    for raw in ((1 << 62).to_bytes(8, "little") + bytes(20), (5).to_bytes(8, "little") + b"{nope" + bytes(9)):
        path.write_bytes(raw)
        with pytest.raises(DataLoss):
            SafetensorsFile(path)


def test_missing_shard_and_bad_index(tmp_path: Path) -> None:
    make_tiny(tmp_path, "plain", max_shard_size="50KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    shards[1].rename(tmp_path / "gone")
    with pytest.raises(DataLoss, match="missing"):
        HfCheckpoint(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for content in ("{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": "../../etc/passwd"}}'):
        index.write_text(content)
        with pytest.raises(DataLoss):
            HfCheckpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"model_type": "gpt_neox"}, InvalidArgument),
        ({"hidden_act": "gelu"}, InvalidArgument),
        ({"rope_parameters": {"rope_type": "dynamic"}}, InvalidArgument),
        ({"rope_parameters": {"rope_type": "yarn"}}, DataLoss),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 0.0}}, DataLoss),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0}}, DataLoss),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 2}}, DataLoss),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "truncate": False}}, InvalidArgument),
        ({"quantization_config": {"quant_method": "fp8"}}, InvalidArgument),
        ({"num_hidden_layers": -1}, DataLoss),
        ({"hidden_size": "wide"}, DataLoss),
        ({"num_key_value_heads": 3}, DataLoss),
        ({"vocab_size": 1 << 40}, DataLoss),
        ({"num_attention_heads": 0}, DataLoss),
        ({"hidden_size": 1e999}, DataLoss),
        ({"rms_norm_eps": float("nan")}, DataLoss),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.0}}, DataLoss),
        ({"rope_parameters": {"rope_type": "llama3", "low_freq_factor": 4.0, "high_freq_factor": 4.0}}, DataLoss),
    ],
)
def test_bad_configs(tmp_path: Path, change: dict[str, object], error: type[KvmeshError]) -> None:
    make_tiny(tmp_path, "plain")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(error, match=r"config\.json"):
        HfCheckpoint(tmp_path)


def test_resolve_and_describe(tmp_path: Path, smollm2_path: Path) -> None:
    assert resolve("smollm2").kind == "gguf"
    described = describe("smollm2")
    assert (described.name, described.max_model_len, described.vocab_size) == ("SmolLM2-135M-Instruct", 8192, 49152)
    assert described.weight_bytes < smollm2_path.stat().st_size
    make_tiny(tmp_path / "a", "plain")
    make_tiny(tmp_path / "b", "plain")
    first, second = describe(str(tmp_path / "a")), describe(str(tmp_path / "b"))
    assert first.revision == second.revision
    weights = tmp_path / "b" / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    assert describe(str(tmp_path / "b")).revision != first.revision
    assert describe("scripted").eos_token_ids == {257}
    with pytest.raises(NotFound, match="smollm2"):
        resolve("no-such-model")
    with pytest.raises(NotFound):
        describe(str(tmp_path))


@pytest.mark.parametrize("rows", [1, 2, HEADS * 2 + 1, HEADS * 3])
def test_query_rows_that_do_not_fit_the_heads_are_corrupt(tmp_path: Path, rows: int) -> None:
    """Found by fuzzing: the shape was believed and the reshape failed."""
    write_gguf(tmp_path / "m.gguf", "F32")
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    name = "model.layers.0.self_attn.q_proj.weight"
    tensor = checkpoint._tensor(name)
    columns = tensor.shape[1]
    checkpoint.file.tensors[tensor.name] = dataclasses.replace(tensor, shape=(rows, columns), nbytes=rows * columns * 4)
    with pytest.raises(DataLoss, match="attn_q"):
        checkpoint.read(name)
    checkpoint.close()
