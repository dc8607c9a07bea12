"""Prefill and decode apart with latent KV: one short page entry a token, moved by the same planner."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from disagg_kit import disaggregated
from kvmesh.engine.failures import SequencesFailed
from kvmesh.engine.runner import StepBatch
from kvmesh.engine.torch_runner import TorchRunner
from mla_tiny import MLA_TINY, make_mla
from model_harness import Bench, assert_close

PAGE = 16
PROMPT = np.random.default_rng(3).integers(3, 190, 5 * PAGE + 4).tolist()
LAST = len(PROMPT) - 1


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mla")
    make_mla(path)
    return path


@pytest.fixture(scope="module")
def pair(directory: Path) -> tuple[Bench, Bench]:
    prefill, decode = (Bench(TorchRunner.load(str(directory), "fp32"), PAGE, num_pages=1024) for _ in range(2))
    return prefill, decode


@pytest.fixture(scope="module")
def alone(pair: tuple[Bench, Bench]) -> torch.Tensor:
    """Logits at the last prompt token, computed whole by one engine."""
    return pair[1].run(PROMPT, len(PROMPT))[-1:]


def test_a_page_holds_one_latent_a_token(pair: tuple[Bench, Bench]) -> None:
    layout = pair[0].layout
    (group,) = layout.groups
    width = MLA_TINY["kv_lora_rank"] + MLA_TINY["qk_rope_head_dim"]
    assert (group.kind, group.num_layers) == ("mla", 3)
    assert layout.page_shape(group) == (PAGE, width)
    assert layout.page_bytes(group) == PAGE * width * 4


@pytest.mark.parametrize("chunk", [1, 2, 3, PAGE - 1, PAGE, PAGE + 1, LAST])
@pytest.mark.parametrize("dst_hit", [0, 1, LAST // PAGE])
@pytest.mark.parametrize("src_hit", [0, 1, LAST // PAGE])
def test_apart_equals_alone(
    pair: tuple[Bench, Bench], alone: torch.Tensor, chunk: int, src_hit: int, dst_hit: int
) -> None:
    assert_close(disaggregated(pair, PROMPT, chunk, src_hit, dst_hit), alone)


def test_apart_equals_transformers(tmp_path: Path) -> None:
    model = make_mla(tmp_path, "v2_yarn")
    with torch.inference_mode():
        theirs = model(torch.tensor([PROMPT])).logits[0, -1:]
    prefill, decode = (Bench(TorchRunner.load(str(tmp_path), "fp32"), PAGE) for _ in range(2))
    assert_close(disaggregated((prefill, decode), PROMPT, PAGE + 1, 1, 0), theirs)


def test_a_page_that_was_not_moved_is_noticed(pair: tuple[Bench, Bench], alone: torch.Tensor) -> None:
    """The comparison can fail: without the transfer the answer is another one."""
    decode = pair[1]
    table = decode.table(len(PROMPT))
    with pytest.raises(AssertionError):
        assert_close(decode.logits(decode.slice(PROMPT[LAST:], LAST, table)), alone)


def test_forks_copy_latents_in_every_layer(directory: Path) -> None:
    runner = TorchRunner.load(str(directory), "fp32")
    bench = Bench(runner)
    table = bench.table(48)
    bench.run(PROMPT[:41], 41, table)  # the third page is partial
    fork = table.copy()
    fork[2] = bench.free.pop()
    parent, child = bench.slice([7], 41, table), bench.slice([9], 41, fork)
    both = bench.logits(parent, child, copies=[(int(table[2]), int(fork[2]))])
    # The two go on apart.
    again = bench.logits(bench.slice([3], 42, table), bench.slice([3], 42, fork))
    for token, first, second in zip((7, 9), both, again, strict=True):
        assert_close(first[None], Bench(runner).run([*PROMPT[:41], token], 42))
        assert_close(second[None], Bench(runner).run([*PROMPT[:41], token, 3], 43))


def test_the_doorbell_rings_once_a_layer_after_the_latents_are_there(directory: Path) -> None:
    bench = Bench(TorchRunner.load(str(directory), "fp32"), num_pages=8)
    layers, table = bench.layout.num_layers, bench.table(41)
    seen: list[tuple[int, int, int]] = []

    def on_layer(layer: int) -> None:
        region = np.frombuffer(bench.region, dtype=np.uint8).reshape(layers, 8, -1)
        written = int((region[:, table[0]] != 0x7F).any(axis=1).sum())
        seen.append((layer, bench.doorbell.value, written))

    bench.runner.execute(StepBatch(1, [bench.slice(PROMPT[:41], 0, table, samples=())]), on_layer)
    assert seen == [(i, i + 1, i + 1) for i in range(layers)]


@pytest.mark.parametrize("batched", [False, True])
def test_stale_kv_that_is_nan_harms_nobody(directory: Path, batched: bool) -> None:
    """What lies past a sequence's end, and in the page that pads short block tables, is another's: maybe NaN."""
    bench = Bench(TorchRunner.load(str(directory), "fp32"))
    fresh = Bench(bench.runner)
    expected = torch.cat([fresh.run(PROMPT[:n], n) for n in (18, 34)])
    bench = Bench(bench.runner)
    bench.region[:] = b"\xff" * len(bench.region)
    bench.free.remove(0)
    tables = {n: bench.table(n) for n in (18, 34)}
    for n, table in tables.items():
        bench.run(PROMPT[: n - 1], 9, table)
    slices = [bench.slice(PROMPT[n - 1 : n], n - 1, table) for n, table in tables.items()]
    got = bench.logits(*slices) if batched else torch.cat([bench.logits(each) for each in slices])
    assert_close(got, expected)


def test_a_sequence_whose_latents_are_nan_fails_alone(directory: Path) -> None:
    """Its row goes through the router and the experts with the others' and must not touch them."""
    bench = Bench(TorchRunner.load(str(directory), "fp32"))
    bench.region[:] = b"\xff" * len(bench.region)
    sick, well = bench.table(18), bench.table(18)
    bench.run(PROMPT[:17], 17, well)
    alone = bench.logits(bench.slice([PROMPT[17]], 17, well))
    slices = [bench.slice([9], 17, sick, seq_id=1), bench.slice([PROMPT[17]], 17, well, seq_id=2)]
    assert_close(bench.logits(*slices)[1:], alone)
    with pytest.raises(SequencesFailed, match="not finite") as caught:
        bench.runner.execute(StepBatch(1, slices))
    assert caught.value.seq_ids == {1}
    assert [part.token_ids for part in caught.value.result.slices] == [[int(alone[0].argmax())]]
