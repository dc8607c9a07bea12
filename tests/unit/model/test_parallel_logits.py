"""Logits of prefill and decode apart with any number of ranks on either side, over gloo in real processes.

KV is carried from prefill's regions to decode's by the planner. Compared with transformers and with one rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvmesh.layers.native.build import status
from model_harness import assert_close
from parallel_kit import GREEDY, Memory, RankPool, Shards, apart, carry, rank_pool

SIZES = (1, 2, 4)
PAGE = 16
PROMPT = np.random.default_rng(8).integers(3, 190, 3 * PAGE + 6).tolist()
BASE = {
    "vocab_size": 199,  # divides by nothing: the last rank's part of the vocabulary is filled up
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "head_dim": 16,  # which the compiled kernels cover
    "max_position_embeddings": 256,
}
MODELS = {
    "gqa4": {"num_key_value_heads": 4},
    # With 4 ranks each head is held by two of them; biases are added once, not once a rank; embedding and head are one.
    "gqa2": {
        "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
    },
}  # fmt: skip


def need_kernels() -> None:
    if (have := status()) != "native":
        pytest.skip(have)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with rank_pool(max(SIZES)) as made:
        yield made


class World:
    """A model in every number of parts, with memory of its own for prefill and for decode."""

    def __init__(self, pool: RankPool, directory: Path, reference: torch.nn.Module) -> None:
        self.pool, self.directory = pool, directory
        self.named = dict(reference.named_parameters())
        self.matrices = [parameter for parameter in self.named.values() if parameter.dim() > 1]
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


@pytest.mark.parametrize("tp", SIZES[1:])
def test_mixed_steps_and_copies_equal_one_rank(world: World, tp: int) -> None:
    """Chunks, decode rows of unequal lengths and copied pages in one step, in an order that the plan must undo."""
    outcomes = []
    for size in (1, tp):
        shards, memory = world.shards[size], world.shards[size].memory(PAGE, num_pages=24)
        a, b, c = memory.table(40), memory.table(20), memory.table(33)
        shards.step(memory, (PROMPT[:33], 0, a))
        # What is copied is a page that one rank alone does not have in full.
        fork = np.array([*a[:2], c[2]], dtype=np.int32)
        outcomes.append(
            shards.step(
                memory,
                (PROMPT[:7], 0, b),
                (PROMPT[33:34], 33, a),
                (PROMPT[40:42], 33, fork),
                (PROMPT[5:6], 0, c),
                copies=[(int(a[2]), int(c[2]))],
            )
        )
    assert_close(outcomes[1], outcomes[0])


@pytest.mark.parametrize("tp", SIZES[1:])
def test_a_rank_keeps_its_part_alone(world: World, tp: int) -> None:
    """All that is large is cut: no rank has more than its share and what is replicated (norms, rotary, kv heads)."""
    whole = sum(world.pool.call(1, "weight_elements", world.shards[1].key))
    parts = world.pool.call(tp, "weight_elements", world.shards[tp].key)
    replicated = whole - sum(p.numel() for p in world.matrices)
    kv = sum(p.numel() for name, p in world.named.items() if "k_proj" in name or "v_proj" in name)
    share = (whole - replicated) / tp + (kv / 2 if tp > world.shards[1].unit.groups[0].kv_heads else 0)
    assert max(parts) <= share * 1.05 + replicated
    assert max(parts) < whole * 0.75


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_collectives(world: World, dtype: torch.dtype) -> None:
    pool, tp = world.pool, 4
    for rank in range(tp):
        pool.pipes[rank].send(("collective", world.shards[tp].key, "all_gather", [[rank, 10 + rank]] * 3, dtype))
    for gathered in pool.answers(tp):
        assert gathered == [[0, 10, 1, 11, 2, 12, 3, 13]] * 3
    for rank in range(tp):
        pool.pipes[rank].send(("collective", world.shards[tp].key, "all_reduce", [[rank, 10 + rank]] * 3, dtype))
    for summed in pool.answers(tp):
        assert summed == [[6, 46]] * 3
    # Nothing to do is no collective, and no hang.
    for rank in range(tp):
        pool.pipes[rank].send(("collective", world.shards[tp].key, "all_reduce", [], dtype))
    assert pool.answers(tp) == [[]] * tp


def test_pages_that_were_not_carried_are_noticed(world: World) -> None:
    """The comparison can fail: with one rank's KV missing the answer is another one."""
    shards, target = world.decode[4]
    n = len(PROMPT) - 1
    source = world.prefill[1][1]
    src, dst = source.table(n), target.table(n + 1)
    world.shards[1].step(source, (PROMPT[:n], 0, src))
    carry(source, target, src, dst, n)
    view = target.regions[2]["full"].view()
    stride, page = target.layout.layer_stride("full"), target.layout.page_bytes("full")
    view[stride + int(dst[1]) * page :][:page] = 0
    with pytest.raises(AssertionError):
        assert_close(shards.step(target, (PROMPT[n:], n, dst)), world.one[:1])


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_the_leader_rings_when_every_rank_has_appended(world: World, backend: str) -> None:
    shards = world.shards[4]
    if backend == "native":
        need_kernels()
        shards = world.pool.load(world.directory, 4, "bf16", "native")
    memory = shards.memory(PAGE, num_pages=8)
    step = [(np.asarray(PROMPT[:20], dtype=np.int32), 0, memory.table(20), GREEDY)]
    fds = [regions["full"].fd for regions in memory.regions]
    seen = world.pool.call(4, "appended_at_rings", shards.key, memory.key, step, os.getpid(), fds)[0]
    assert seen == [[True] * 4] * BASE["num_hidden_layers"]


def test_compiled_kernels_share_too(world: World) -> None:
    """bf16 weights and KV, fp32 activations and sums: near one rank on the kernels, and near fp32."""
    need_kernels()
    shards = {tp: world.pool.load(world.directory, tp, "bf16", "native") for tp in SIZES}
    sides = {tp: (each, each.memory(PAGE)) for tp, each in shards.items()}
    one = apart(sides[1], (shards[1], shards[1].memory(PAGE)), PROMPT, PAGE + 1)
    assert (one - world.theirs).abs().max() < 0.05 * world.theirs.abs().max()
    for prefill_tp in SIZES:
        for decode_tp in SIZES:
            if prefill_tp * decode_tp == 1:
                continue
            decode = shards[decode_tp]
            ours = apart(sides[prefill_tp], (decode, decode.memory(PAGE, num_pages=8)), PROMPT, PAGE + 1)
            # What may differ is how some KV value is rounded to bf16.
            assert_close(ours, one, 5e-3)
            source = sides[prefill_tp][1]
            source.free = np.random.default_rng(prefill_tp).permutation(source.layout.num_pages).tolist()
