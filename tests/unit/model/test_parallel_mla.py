"""Latent attention and experts with any number of ranks on either side: the latent KV is whole on every rank, so each
destination rank draws it from one of the source's ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from kvmesh.engine.torch_runner import TorchRunner
from kvmesh.errors import InvalidArgument
from mla_tiny import MLA_TINY, make_mla
from model_harness import assert_close
from parallel_kit import Memory, RankPool, Shards, apart, rank_pool

SIZES = (1, 2, 4)
PAGE = 16
PROMPT = np.random.default_rng(8).integers(3, 190, 3 * PAGE + 6).tolist()
# Sigmoid and softmax routing, yarn, queries with and without a latent of their own, output bias, tied embeddings.
VARIANTS = ("v3_yarn", "v3_bias", "v2_greedy", "v2_bias_tied")


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
        self.prefill: dict[int, tuple[Shards, Memory]] = {tp: (s, s.memory(PAGE, 80)) for tp, s in self.shards.items()}
        self.decode: dict[int, tuple[Shards, Memory]] = {tp: (s, s.memory(PAGE, 80)) for tp, s in self.shards.items()}
        self.one = apart(self.prefill[1], self.decode[1], PROMPT, len(PROMPT))


@pytest.fixture(scope="module", params=VARIANTS)
def world(request: pytest.FixtureRequest, pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> World:
    directory = tmp_path_factory.mktemp(request.param)
    return World(pool, directory, make_mla(directory, request.param))


@pytest.mark.parametrize("decode_tp", SIZES)
@pytest.mark.parametrize("prefill_tp", SIZES)
def test_every_sharding_equals_transformers_and_one_rank(world: World, prefill_tp: int, decode_tp: int) -> None:
    ours = apart(world.prefill[prefill_tp], world.decode[decode_tp], PROMPT, PAGE + 1, draw=prefill_tp + decode_tp)
    assert_close(ours, world.theirs)
    assert_close(ours, world.one)


@pytest.mark.parametrize("tp", SIZES)
def test_every_rank_holds_the_same_latents_to_the_last_bit(world: World, tp: int) -> None:
    """What lets a destination draw from any of them, and routers on all ranks choose alike."""
    shards, memory = world.shards[tp], world.shards[tp].memory(PAGE, 8)
    table = memory.table(len(PROMPT))
    for at in range(0, len(PROMPT), 19):
        shards.step(memory, (PROMPT[at : at + 19], at, table))
    first, *others = [memory.regions[rank]["mla"].view() for rank in range(tp)]
    assert (first != 0x7F).any()
    assert all((first == other).all() for other in others)


def test_ranks_divide_what_is_divided(world: World) -> None:
    """Nearly all of these weights are heads and experts; the latent projections and the router are whole everywhere."""
    counts = {tp: max(world.pool.call(tp, "weight_elements", world.shards[tp].key)) for tp in SIZES}
    assert counts[2] < 0.7 * counts[1]
    assert counts[4] < 0.5 * counts[1]


@pytest.mark.parametrize(
    ("changes", "tp", "reason"),
    [
        ({"num_attention_heads": 2, "num_key_value_heads": 2}, 4, "2 heads"),
        ({"moe_intermediate_size": 33}, 2, "33 columns of an expert"),
        ({"moe_intermediate_size": 34}, 4, "set tp to one of 1, 2$"),
        ({"intermediate_size": 97}, 2, "97 intermediate columns"),
        ({}, 3, "set tp to one of 1, 2, 4$"),
    ],
)
def test_a_number_of_ranks_that_does_not_divide_is_refused(
    tmp_path: Path, changes: dict[str, int], tp: int, reason: str
) -> None:
    class Ranks:
        """Only asked for its size: the model is refused before anything is read or sent."""

        rank, size = 0, tp

    make_mla(tmp_path, **{**MLA_TINY, **changes})
    with pytest.raises(InvalidArgument, match=reason) as refused:
        TorchRunner.load(str(tmp_path), "fp32", tp=Ranks())  # type: ignore[arg-type]
    assert refused.value.details["field"] == "tp"
