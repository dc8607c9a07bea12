"""Logits of prefill and decode apart: prefill's pages, moved by the real planner's runs into another engine's memory.

The last prompt token is decode's first token. Compared with one engine that computes the whole prompt, for every chunk
size and with prefix hits on either side.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from disagg_kit import disaggregated
from kvmesh.engine.torch_runner import TorchRunner
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


@pytest.mark.parametrize("chunk", [1, 2, 3, PAGE - 1, PAGE, PAGE + 1, LAST])
@pytest.mark.parametrize("dst_hit", [0, 1, LAST // PAGE])
@pytest.mark.parametrize("src_hit", [0, 1, LAST // PAGE])
def test_apart_equals_alone(
    pair: tuple[Bench, Bench], alone: torch.Tensor, chunk: int, src_hit: int, dst_hit: int
) -> None:
    assert_close(disaggregated(pair, PROMPT, chunk, src_hit, dst_hit), alone)


def test_a_page_that_was_not_moved_is_noticed(pair: tuple[Bench, Bench], alone: torch.Tensor) -> None:
    """The comparison can fail: without the transfer the answer is another one."""
    decode = pair[1]
    table = decode.table(len(PROMPT))
    with pytest.raises(AssertionError):
        assert_close(decode.logits(decode.slice(PROMPT[LAST:], LAST, table)), alone)
