"""Logits of prefill and decode apart: prefill's pages, moved by the real planner's runs into another engine's memory.

The last prompt token is decode's first token. Compared with one engine that computes the whole prompt, for every chunk
size and with prefix hits on either side.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kvmesh.engine.torch_runner import TorchRunner
from kvmesh.kv.planner import plan
from model_harness import Bench, assert_close
from model_tiny import make_tiny

PAGE = 16
PROMPT = np.random.default_rng(3).integers(3, 190, 5 * PAGE + 4).tolist()
LAST = len(PROMPT) - 1


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bench, Bench]:
    directory = tmp_path_factory.mktemp("pair")
    make_tiny(directory, "plain")
    return tuple(Bench(TorchRunner.load(str(directory), "fp32"), PAGE, num_pages=1024) for _ in range(2))  # type: ignore[return-value]


@pytest.fixture(scope="module")
def alone(pair: tuple[Bench, Bench]) -> torch.Tensor:
    """Logits at the last prompt token, computed whole by one engine."""
    return pair[1].run(PROMPT, len(PROMPT))[-1:]


def move(src: Bench, dst: Bench, src_table: np.ndarray, dst_table: np.ndarray, tokens: int, first_block: int) -> int:
    """Carry the plan out, byte by byte, layer by layer; returns the bytes moved."""
    pages = -(-tokens // PAGE)
    columns = plan(
        src.layout,
        dst.layout,
        src_table[first_block:pages].tolist(),
        dst_table[first_block:pages].tolist(),
        group="full",
    )
    moved = 0
    layers = src.layout.num_layers
    for layer in range(layers):
        src_base = layer * src.layout.layer_stride("full")
        dst_base = layer * dst.layout.layer_stride("full")
        for from_, to, length in zip(columns.src_offset, columns.dst_offset, columns.length, strict=True):
            a, b, n = int(from_) + src_base, int(to) + dst_base, int(length)
            dst.region[b : b + n] = src.region[a : a + n]
            moved += n
    return moved


def disaggregated(pair: tuple[Bench, Bench], prompt: list[int], chunk: int, src_hit: int, dst_hit: int) -> torch.Tensor:
    """src_hit, dst_hit: whole blocks that the side's prefix cache holds (computed there beforehand, in other steps)."""
    prefill, decode = pair
    n = len(prompt) - 1
    src_table, dst_table = prefill.table(n), decode.table(n + 1)
    for bench, table, hit in ((prefill, src_table, src_hit), (decode, dst_table, dst_hit)):
        if hit:
            bench.run(prompt[: hit * PAGE], hit * PAGE, table)
    for at in range(src_hit * PAGE, n, chunk):
        prefill.logits(prefill.slice(prompt[at : min(n, at + chunk)], at, src_table))
    first_block = min(dst_hit, n // PAGE)
    moved = move(prefill, decode, src_table, dst_table, n, first_block)
    assert moved == (-(-n // PAGE) - first_block) * prefill.layout.page_bytes("full") * prefill.layout.num_layers
    return decode.logits(decode.slice(prompt[n:], n, dst_table))


@pytest.mark.parametrize("chunk", [1, 2, 3, PAGE - 1, PAGE, PAGE + 1, LAST])
@pytest.mark.parametrize("dst_hit", [0, 1, LAST // PAGE])
@pytest.mark.parametrize("src_hit", [0, 1, LAST // PAGE])
def test_apart_equals_alone(
    pair: tuple[Bench, Bench], alone: torch.Tensor, chunk: int, src_hit: int, dst_hit: int
) -> None:
    assert_close(disaggregated(pair, PROMPT, chunk, src_hit, dst_hit), alone)


def test_smollm2_apart_equals_alone_and_transformers(smollm2_path: Path, smollm2_reference: torch.nn.Module) -> None:
    pair = tuple(Bench(TorchRunner.load(str(smollm2_path), "fp32"), PAGE, num_pages=64) for _ in range(2))
    prompt = np.random.default_rng(4).integers(0, 49152, 3 * PAGE + 2).tolist()
    with torch.inference_mode():
        theirs = smollm2_reference(torch.tensor([prompt])).logits[0, -1:]
    apart = disaggregated(pair, prompt, PAGE + 1, 1, 0)  # type: ignore[arg-type]
    assert_close(apart, theirs)
    assert_close(apart, pair[1].run(prompt, len(prompt))[-1:])


def test_a_page_that_was_not_moved_is_noticed(pair: tuple[Bench, Bench], alone: torch.Tensor) -> None:
    """The comparison can fail: without the transfer the answer is another one."""
    decode = pair[1]
    table = decode.table(len(PROMPT))
    with pytest.raises(AssertionError):
        assert_close(decode.logits(decode.slice(PROMPT[LAST:], LAST, table)), alone)
