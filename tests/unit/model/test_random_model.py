"""Random weights: as a config asks, the same for a seed, and a model that runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from kvmesh.engine.runner import SampleInput, SamplingParams, Slice, StepBatch
from kvmesh.engine.torch_runner import TorchRunner
from kvmesh.errors import DataLoss, InvalidArgument, NotFound
from kvmesh.kv.ring import DOORBELL_BYTES, Doorbell
from kvmesh.layers.parallel import part
from kvmesh.loading.random import RandomReader, open_reader
from kvmesh.loading.random_model import RandomCheckpoint, tensor_shapes
from kvmesh.loading.source import describe, open_checkpoint, resolve
from kvmesh.loading.tokenizer import load_tokenizer
from kvmesh.models.llama import LlamaWeights

CONFIGS = Path(__file__).parents[3] / "benchmarks" / "gpu" / "configs"
TINY = CONFIGS / "tiny.json"


class _Rank:
    """One of two ranks, as far as `LlamaWeights` asks."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank


def test_every_tensor_that_the_model_reads_is_there_and_no_other(tmp_path: Path) -> None:
    raw = json.loads(TINY.read_text()) | {"attention_bias": True, "mlp_bias": True}
    path = tmp_path / "biased.json"
    path.write_text(json.dumps(raw))
    checkpoint = RandomCheckpoint(path)
    asked: set[str] = set()

    class Recorder(RandomReader):
        def _check(self, name: str, shape: tuple[int, ...]) -> None:
            super()._check(name, shape)
            asked.add(name)

    weights = LlamaWeights(checkpoint.config, Recorder(checkpoint, torch.bfloat16))
    blocks = list(weights.blocks())
    assert asked == set(checkpoint.names())
    assert weights.head is not weights.embed
    assert blocks[0].qkv.shape == (256, 128)
    assert torch.equal(blocks[1].mlp_norm, torch.ones(128, dtype=torch.bfloat16))
    assert blocks[0].qkv_bias is not None
    every = torch.cat([blocks[0].qkv.float().flatten(), blocks[1].down.float().flatten()])
    assert 0.0195 < float(every.std()) < 0.0205
    assert abs(float(every.mean())) < 1e-3
    assert not torch.equal(blocks[0].down, blocks[1].down)


def test_a_seed_decides_not_the_order() -> None:
    checkpoint = RandomCheckpoint(TINY)
    name, other = "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"
    a = RandomReader(checkpoint, torch.float32)
    b = RandomReader(checkpoint, torch.float32)
    b.read(other, (512, 128))
    first = a.read(name, (256, 128))
    assert torch.equal(first, b.read(name, (256, 128)))
    again = RandomReader(RandomCheckpoint(TINY, seed=1), torch.float32).read(name, (256, 128))
    assert not torch.equal(first, again)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_hold_parts_of_one_model(rank: int) -> None:
    checkpoint = RandomCheckpoint(TINY)
    whole = next(LlamaWeights(checkpoint.config, RandomReader(checkpoint, torch.float32)).blocks())
    tp = _Rank(rank)
    mine = next(LlamaWeights(checkpoint.config, RandomReader(checkpoint, torch.float32), tp).blocks())  # type: ignore[arg-type]
    wide = part(256, tp)  # type: ignore[arg-type]
    assert torch.equal(mine.down, whole.down[:, wide])
    assert torch.equal(mine.gate_up, torch.cat([whole.gate_up[:256][wide], whole.gate_up[256:][wide]]))


def test_the_spec_resolves_and_says_what_it_is() -> None:
    spec = f"random:{TINY}"
    checkpoint = open_checkpoint(resolve(spec))
    assert isinstance(open_reader(checkpoint, torch.bfloat16), RandomReader)
    told = describe(spec)
    assert (told.name, told.vocab_size, told.num_layers) == ("tiny", 512, 2)
    assert told.weight_bytes == checkpoint.total_bytes()
    assert load_tokenizer(spec).vocab_size > 0
    with pytest.raises(NotFound):
        resolve("random:nowhere.json")
    with pytest.raises(DataLoss):
        checkpoint.read("model.layers.9.mlp.up_proj.weight")


def test_the_benchmark_shape_is_llama_31_8b() -> None:
    told = describe(f"random:{CONFIGS / 'llama-3.1-8b.json'}")
    assert told.weight_bytes == 2 * 8_030_261_248
    assert told.max_model_len == 131072


def test_other_architectures_are_refused() -> None:
    config = RandomCheckpoint(TINY).config
    from dataclasses import replace

    from kvmesh.loading.config import MlaConfig

    with pytest.raises(InvalidArgument):
        tensor_shapes(replace(config, mla=MlaConfig(None, 16, 8, 8, 8)))


def test_it_runs() -> None:
    runner = TorchRunner.load(f"random:{TINY}", "fp32", backend="torch")
    layout = runner.layout(16, 4)
    region = np.zeros(layout.region_bytes("full"), dtype=np.uint8)
    runner.bind(layout, {"full": memoryview(region)}, Doorbell(bytearray(DOORBELL_BYTES)))
    sample = SampleInput(SamplingParams(temperature=0.0), 0, 20, (), ())
    tokens = np.arange(20, dtype=np.int32)
    batch = StepBatch(0, [Slice(1, tokens, 0, np.arange(2, dtype=np.int32), (sample,))])
    result = runner.execute(batch)
    assert 0 <= result.slices[0].token_ids[0] < 512
