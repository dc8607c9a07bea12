"""Logits of prefill and decode apart with any number of ranks on either side, over gloo in real processes.

KV is carried from prefill's regions to decode's by the planner. Compared with transformers and with one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from model_harness import assert_close
from parallel_kit import Memory, RankPool, Shards, apart, rank_pool

SIZES = (1, 2, 4)
PAGE = 16
PROMPT = np.random.default_rng(8).integers(3, 190, 3 * PAGE + 6).tolist()
BASE = {
    "vocab_size": 199,  # divides by nothing: the last rank's part of the vocabulary is filled up
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "max_position_embeddings": 256,
}
MODELS = {
    "gqa4": {"num_key_value_heads": 4},
    # With 4 ranks each head is held by two of them; biases are added once, not once a rank; embedding and head are one.
    "gqa2": {
        "num_key_value_heads": 2, "head_dim": 16, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with rank_pool(max(SIZES)) as made:
        yield made


class World:
    """A model in every number of parts, with memory of its own for prefill and for decode."""

    def __init__(self, pool: RankPool, directory: Path, reference: torch.nn.Module) -> None:
        self.pool, self.directory = pool, directory
        with torch.inference_mode():
            tokens = torch.tensor([[*PROMPT, PROMPT[0], PROMPT[1]]])
            self.theirs = reference(tokens).logits[0, -3:].clone()
        self.shards = {tp: pool.load(directory, tp) for tp in SIZES}
        self.prefill: dict[int, tuple[Shards, Memory]] = {tp: (s, s.memory(PAGE)) for tp, s in self.shards.items()}
        self.decode: dict[int, tuple[Shards, Memory]] = {tp: (s, s.memory(PAGE)) for tp, s in self.shards.items()}
        self.one = apart(self.prefill[1], self.decode[1], PROMPT, len(PROMPT))


@pytest.fixture(scope="module", params=MODELS)
def world(request: pytest.FixtureRequest, pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> World:
    directory = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(23)
    model = LlamaForCausalLM(LlamaConfig(**BASE, **MODELS[request.param])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.12 + (1.0 if parameter.dim() == 1 else 0.0))
    model.save_pretrained(directory)
    return World(pool, directory, model)


@pytest.mark.parametrize("decode_tp", SIZES)
@pytest.mark.parametrize("prefill_tp", SIZES)
def test_every_sharding_equals_transformers_and_one_rank(world: World, prefill_tp: int, decode_tp: int) -> None:
    ours = apart(world.prefill[prefill_tp], world.decode[decode_tp], PROMPT, PAGE + 1, draw=prefill_tp + decode_tp)
    assert_close(ours, world.theirs)
    assert_close(ours, world.one)
