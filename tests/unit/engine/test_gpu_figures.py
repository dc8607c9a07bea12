"""What the GPU benchmarks make of stamps, and their floors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from gpu.floors import CONFIGS, Shape
from gpu.workload import poisson, prompts, row_of, trace_of


def test_figures_of_requests_at_once() -> None:
    """Two prompts of 4,000 tokens; the second's first token comes after 1.1 s, the first ends at 2.0 s."""
    first = [(1.0 + 0.01 * i, 1) for i in range(101)]
    second = [(1.1 + 0.01 * i, 1) for i in range(101)]
    steps = [1.0 + 0.01 * i for i in range(111)]
    row = row_of(0.0, [first, second], steps, 4000)
    assert row["prefill_tok_s"] == round(8000 / 1.1)
    assert row["step_ms"] == pytest.approx(10.0)
    assert row["steps"] == 90
    assert row["decode_tok_s"] == 200
    assert row["out_tok_s"] == round(202 / 2.1)


def test_figures_of_requests_that_arrive() -> None:
    told = trace_of([0.0, 0.5], [[(0.1, 1), (0.2, 1), (0.4, 2)], [(1.0, 1), (1.1, 1)]])
    assert told["requests"] == 2
    assert told["ttft_ms"]["max"] == pytest.approx(500)  # type: ignore[index]
    assert told["inter_token_ms"]["max"] == pytest.approx(200)  # type: ignore[index]
    assert told["tpot_ms"]["p50"] == pytest.approx(100)  # type: ignore[index]
    assert told["out_tok_s"] == round(6 / 1.1)


def test_a_workload_is_the_same_for_everybody() -> None:
    assert prompts(3, 50, 128256) == prompts(3, 50, 128256)
    assert prompts(3, 50, 128256) != prompts(3, 50, 128256, seed=1)
    assert all(100 <= token < 128000 for token in prompts(1, 4000, 128256)[0])
    times = poisson(6.8, 200)
    assert times == poisson(6.8, 200) == sorted(times)
    assert 0.85 < len(times) / (6.8 * 200) < 1.15


def test_floors_of_llama_31_8b() -> None:
    shape = Shape.of(CONFIGS / "llama-3.1-8b.json")
    floors = [round(shape.decode_ms(n, 4250), 2) for n in (1, 20, 64)]
    assert floors == [3.62, 6.08, 11.78]
    assert round(shape.prefill_rate(4000), -2) == 50600
