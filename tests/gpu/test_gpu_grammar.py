"""Grammars on the device: what is drawn is what the CPU draws behind the same mask, and the engine keeps to it.

The sampler's part also runs in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvmesh.engine.core import EngineConfig, EngineCore
from kvmesh.engine.events import CoreEvent, Ended, EngineRequest, RequestKey, Tokens
from kvmesh.engine.runner import SampleInput, SamplingParams
from kvmesh.grammar.source import GrammarSource
from kvmesh.grammar.vocabulary import Vocabulary
from kvmesh.loading.tokenizer import scripted_tokenizer
from kvmesh.proto.v1.inference_pb2 import Grammar

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

CLOSE = 1e-5


@dataclass
class Allowed:
    """A mask of given tokens."""

    ids: Sequence[int]
    vocab: int

    def mask(self) -> npt.NDArray[np.uint32]:
        bits = np.zeros(-(-self.vocab // 32) * 32, np.uint8)
        bits[list(self.ids)] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)


@pytest.fixture
def vocab(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Not a multiple of 32; in the interpreter one that fills some blocks and a part of another."""
    if kernel_device != "cpu":
        return 49_153
    from kvmesh.layers.cuda import sampling

    monkeypatch.setattr(sampling, "_BLOCK", 64)
    monkeypatch.setattr(sampling, "_DENSE_BLOCK", 128)
    monkeypatch.setattr(sampling, "_COUNT_BLOCK", 64)
    return 300


def near(logits: npt.NDArray[np.float32], sample: SampleInput, token: int) -> bool:
    """Whether rounding of the sums alone parts the token from the CPU's."""
    from kvmesh.engine.sampling.noise import uniform
    from kvmesh.engine.sampling.processors import adjust, distribution, permitted_ids

    allowed = permitted_ids(sample, len(logits))
    row = adjust(logits, sample)[allowed]
    if sample.params.temperature == 0:
        return bool(row[np.searchsorted(allowed, token)] == pytest.approx(row.max(), rel=1e-6))
    places, probs = distribution(row, sample.params)
    at = int(np.searchsorted(allowed[places], token))
    high = float(probs[: at + 1].sum())
    noise = uniform(sample.params.seed, sample.choice, sample.position)
    return bool(allowed[places][at] == token and high - probs[at] - CLOSE <= noise <= high + CLOSE)


COMBINATIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 1.9},
    {"top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.02, "temperature": 0.6},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"logit_bias": {3: 9.5, 17: 100.0, 29: -100.0}},
]


@pytest.mark.parametrize("count", [1, 2, 31, 250])
def test_masked_sampling_is_the_cpus(kernel_device: str, vocab: int, count: int) -> None:
    from kvmesh.engine.cuda.sampler import DeviceSampler
    from kvmesh.engine.sampler import sample_row

    sampler = DeviceSampler(vocab, 4, kernel_device)
    rng = np.random.default_rng(count)
    rows: list[tuple[int, int, SampleInput, bool]] = []
    for i, fields in enumerate(COMBINATIONS):
        allowed = rng.choice(vocab, count, replace=False).tolist()
        output = rng.choice(vocab, 40).tolist() + allowed[:1]
        for banned in (frozenset(), frozenset(allowed[: count // 2]), frozenset(allowed)):
            sample = SampleInput(
                SamplingParams(seed=i, **fields),
                0,
                7 + len(rows),
                [1, 2],
                output,
                banned,
                False,
                Allowed(allowed, vocab),
            )
            rows.append((len(rows), len(rows), sample, False))
            # A neighbour without one, and one that is only scored.
            plain = replace(sample, grammar=None, banned_token_ids=frozenset())
            rows.append((len(rows), len(rows), plain, False))
    logits = (rng.standard_normal((len(rows), vocab)) * 3).astype(np.float32)
    prepared = sampler.prepare(rows)
    tokens = torch.full((len(rows),), -77, dtype=torch.int32, device=sampler.device)
    sampler.run(torch.from_numpy(logits).to(sampler.device), prepared, tokens)
    for (at, _, sample, _), token in zip(rows, tokens.cpu().tolist(), strict=True):
        if sample.grammar is None:
            continue
        assert isinstance(sample.grammar, Allowed)
        assert token in sample.grammar.ids
        kept = [t for t in sample.grammar.ids if t not in sample.banned_token_ids]
        assert token in (kept or sample.grammar.ids)
        assert token == sample_row(logits[at], sample) or near(logits[at], sample, token)
    sampler.finish(prepared)


PATTERNS = (r"(yes|no)\.", r"[a-f]{3}-[0-9]{2,4}", r"x{40}y?", r'\{"a":[0-9]+\}')


@pytest.mark.parametrize("overlap", [True, False])
def test_the_engine_keeps_to_its_grammars(kernel_device: str, tmp_path: Path, overlap: bool) -> None:
    """A random model and its neighbours without a grammar, on a real device."""
    if kernel_device == "cpu":
        pytest.skip("needs a GPU")
    from cuda_kit import Driver, make_model

    from kvmesh.engine.cuda.runner import CudaRunner

    make_model(tmp_path, "gqa3_d64")
    runner = CudaRunner.load(str(tmp_path), "bf16", kernel_device, max_batch=16, token_budget=128, max_model_len=512)
    driver = Driver(runner)
    bundle = scripted_tokenizer()
    vocabulary = Vocabulary(bundle.tokenizer.to_str(), runner.info.vocab_size, runner.info.eos_token_ids)
    events: list[CoreEvent] = []
    core = EngineCore(
        runner, driver.layout, EngineConfig(512, 16, 128, 64, overlap=overlap, check_integrity=True), events.extend
    )
    for i in range(12):
        pattern = PATTERNS[i % 6] if i % 6 < len(PATTERNS) else None
        params = SamplingParams(temperature=1.0, seed=i, max_tokens=60, ignore_eos=pattern is None)
        match = None
        if pattern is not None:
            match = vocabulary.compile(GrammarSource.of(Grammar(regex=pattern))).begin((), frozenset(), False)
        core.submit(EngineRequest(RequestKey(str(i)), [5 + i] * (20 + 9 * i), 20 + 9 * i, params, grammar=match))
    while core.step_once() or core.load().waiting or core.load().running:
        pass
    outputs: dict[str, list[int]] = {}
    for event in events:
        if isinstance(event, Tokens):
            outputs.setdefault(event.key.request_id, []).extend(event.token_ids)
        elif isinstance(event, Ended):
            assert event.error is None
    for i in range(12):
        output = outputs[str(i)]
        if i % 6 >= len(PATTERNS):
            assert len(output) == 60
        elif len(output) < 60:
            text = bytes(t for t in output if t not in runner.info.eos_token_ids).decode()
            assert re.fullmatch(PATTERNS[i % 6], text), text
    core.stop()
    runner.close()
