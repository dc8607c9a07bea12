"""The device's sampler against the CPU's: the same tokens for the same logits and noise, whatever the batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kvmesh.engine.runner import SampleInput, SamplingParams

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

# What the sums' rounding on either side may move.
CLOSE = 1e-5
MakeSampler = Callable[..., Any]


@pytest.fixture
def vocab(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Llama's on a GPU; in the interpreter one that fills some blocks and a part of another."""
    if kernel_device != "cpu":
        return 128256
    from kvmesh.layers.cuda import sampling

    monkeypatch.setattr(sampling, "_BLOCK", 64)
    monkeypatch.setattr(sampling, "_DENSE_BLOCK", 128)
    monkeypatch.setattr(sampling, "_COUNT_BLOCK", 64)
    return 300


@pytest.fixture
def sampler(kernel_device: str, vocab: int) -> Any:
    from kvmesh.engine.cuda.sampler import DeviceSampler

    return DeviceSampler(vocab, 8, kernel_device)


def rows_of(seed: int, rows: int, vocab: int, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * spread).astype(np.float32)


def sample_of(params: SamplingParams, **fields: Any) -> SampleInput:
    return replace(SampleInput(params, 0, 0, [], []), **fields)


def device_tokens(sampler: Any, logits: np.ndarray, rows: Sequence[tuple[int, int, SampleInput, bool]]) -> list[int]:
    """One step, waited for."""
    prepared = sampler.prepare(rows)
    tokens = torch.full((len(rows),), -77, dtype=torch.int32, device=sampler.device)
    sampler.run(torch.from_numpy(logits).to(sampler.device), prepared, tokens)
    return [int(t) for t in tokens.cpu()]


def assert_same(logits: np.ndarray, sample: SampleInput, token: int) -> None:
    """The CPU's token, or one whose interval of the distribution the noise misses by rounding alone."""
    from kvmesh.engine.sampler import sample_row
    from kvmesh.engine.sampling.noise import uniform
    from kvmesh.engine.sampling.processors import adjust, distribution

    expected = sample_row(logits, sample)
    if token == expected:
        return
    assert 0 <= token < len(logits), (token, expected)
    row = adjust(logits, sample)
    if not row.max() > -np.inf:
        row = logits
    params = sample.params
    if params.temperature == 0:
        assert row[token] == pytest.approx(row[expected], rel=1e-6), (token, expected)
        return
    noise = uniform(params.seed, sample.choice, sample.position)
    for top_p, min_p in itertools.product((0, -1e-6, 1e-6), (0, -1e-6, 1e-6)):
        near = replace(params, top_p=params.top_p + top_p * (params.top_p < 1), min_p=params.min_p * (1 + min_p))
        ids, probs = distribution(row, near)
        at = int(np.searchsorted(ids, token))
        if at < len(ids) and ids[at] == token:
            high = float(probs[: at + 1].sum())
            if high - probs[at] - CLOSE <= noise <= high + CLOSE:
                return
    raise AssertionError(f"sampled {token}, not {expected}, at noise {noise} of {params}")


COMBINATIONS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.05},
    {"temperature": 1.9},
    {"temperature": 1e-40},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 50, "temperature": 0.7},
    {"top_k": 10**6},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"top_p": 0.999, "temperature": 1.5},
    {"top_p": 1e-9},
    {"min_p": 0.02},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8},
    {"top_k": 290, "top_p": 0.99, "min_p": 0.001},
    {"top_k": 20, "top_p": 0.95, "min_p": 0.05, "temperature": 0.6},
    {"top_p": 0.7, "min_p": 0.1},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2, "top_k": 30, "top_p": 0.9},
    {"repetition_penalty": 0.7, "temperature": 0.0},
    {"frequency_penalty": -1.5},
    {"presence_penalty": 1.9, "temperature": 0.0},
    {"logit_bias": {3: 9.5, 17: -4.0, 10**7: 3.0}, "temperature": 0.8},
]


@pytest.mark.parametrize("spread", [0.0, 0.05, 1.0, 4.0])
def test_every_parameter_in_one_batch(sampler: Any, vocab: int, spread: float) -> None:
    rng = np.random.default_rng(int(spread * 100))
    logits = rows_of(1, len(COMBINATIONS), vocab, spread)
    # Ties at the edges: coarse values in half of the rows.
    logits[::2] = np.round(logits[::2] * 4) / 4
    rows = []
    for i, fields in enumerate(COMBINATIONS):
        # The likely ones, so that penalties change what is sampled.
        likely = np.argsort(-logits[i], kind="stable")[:40]
        prompt, output = rng.choice(likely, 30).tolist(), rng.choice(likely, 25).tolist()
        banned = frozenset(rng.choice(likely, 3).tolist()) if i % 3 == 0 else frozenset()
        sample = SampleInput(SamplingParams(seed=i, **fields), i % 2, 100 + i, prompt, output, banned)
        rows.append((i, i, sample, False))
    tokens = device_tokens(sampler, logits, rows)
    for (i, _, sample, _), token in zip(rows, tokens, strict=True):
        assert_same(logits[i], sample, token)


@settings(
    max_examples=5,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.01, 0.3, 1.0, 4.0, 30.0]),
    coarse=st.booleans(),
    temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 3, 50, 299]),
    top_p=st.sampled_from([0.01, 0.5, 0.9, 0.9999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.5]),
    repetition=st.sampled_from([1.0, 1.2, 1e-5]),
    frequency=st.sampled_from([0.0, 0.7]),
    banned=st.integers(0, 5),
)
def test_random_parameters(
    sampler: Any,
    vocab: int,
    seed: int,
    spread: float,
    coarse: bool,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition: float,
    frequency: float,
    banned: int,
) -> None:
    logits = rows_of(seed, 4, vocab, spread)
    if coarse:
        logits = np.round(logits * 2) / 2
    params = SamplingParams(temperature, top_k, top_p, min_p, repetition, frequency)
    ids = np.random.default_rng(seed + 1).integers(0, vocab, 60).tolist()
    rows = [
        (
            i,
            i,
            SampleInput(replace(params, seed=seed + i), 0, i, ids[:20], ids[20 : 20 + 9 * i], frozenset(ids[:banned])),
            False,
        )
        for i in range(4)
    ]
    for (i, _, sample, _), token in zip(rows, device_tokens(sampler, logits, rows), strict=True):
        assert_same(logits[i], sample, token)
    sampler.forget(range(4))


def test_the_drawn_tokens_follow_the_distribution(sampler: Any, vocab: int) -> None:
    """Many samples of one row: a frequency each, against the CPU's probabilities."""
    from kvmesh.engine.sampling.processors import distribution

    logits = rows_of(5, 1, vocab)
    params = SamplingParams(top_k=8, temperature=2.0)
    count = 60 if vocab == 300 else 4000
    rows = [(0, 0, sample_of(params, position=i), False) for i in range(count)]
    tokens = np.array(device_tokens(sampler, logits, rows))
    ids, probs = distribution(logits[0], params)
    seen = np.array([(tokens == i).sum() for i in ids])
    assert seen.sum() == count
    assert np.all(np.abs(seen - count * probs) <= 5 * np.sqrt(count * probs) + 1)


def test_rows_do_not_depend_on_the_batch(sampler: Any, vocab: int) -> None:
    logits = rows_of(7, 6, vocab, 1.0)
    params = SamplingParams(top_k=200, top_p=0.97, repetition_penalty=1.1)
    rows = [
        (i, i, sample_of(replace(params, seed=i), prompt_token_ids=list(range(i, 90)), position=40 + i), False)
        for i in range(6)
    ]
    together = device_tokens(sampler, logits, rows)
    for order in ([5, 4, 3, 2, 1, 0], [2], [1, 3], [0, 0, 0, 4]):
        # Another sequence a place, so that nothing is left from the time before.
        again = [(k, 100 * k + 7 * i, rows[j][2], False) for i, (k, j) in enumerate(enumerate(order))]
        assert device_tokens(sampler, logits[order], again) == [together[j] for j in order]
        sampler.forget([row[1] for row in again])


def test_samples_share_a_row(sampler: Any, vocab: int) -> None:
    logits = rows_of(8, 2, vocab)
    params = SamplingParams(temperature=1.2, presence_penalty=0.5)
    rows = [
        (1, 4, SampleInput(replace(params, temperature=1.2 * (choice != 2)), choice, 9, [1, 2], [5]), False)
        for choice in range(5)
    ]
    for (row, _, sample, _), token in zip(rows, device_tokens(sampler, logits, rows), strict=True):
        assert_same(logits[row], sample, token)


def test_rows_that_are_no_numbers(sampler: Any, vocab: int) -> None:
    logits = rows_of(9, 6, vocab)
    logits[0, vocab - 1] = np.nan
    logits[1, 7] = np.inf
    logits[2, :] = -np.inf
    logits[3, ::2] = -np.inf
    params = SamplingParams(top_k=20, top_p=0.9, frequency_penalty=0.5)
    everything = frozenset(range(vocab))
    rows = [(i, i, sample_of(replace(params, seed=i)), False) for i in range(5)]
    rows.append((5, 5, sample_of(params, banned_token_ids=everything), False))
    rows += [(i, 10 + i, sample_of(SamplingParams(temperature=0.0, want_logprobs=True)), False) for i in range(5)]
    rows.append((5, 15, sample_of(SamplingParams(temperature=0.0), banned_token_ids=everything), False))
    prepared = sampler.prepare(rows)
    tokens = torch.full((len(rows),), -77, dtype=torch.int32, device=sampler.device)
    sampler.run(torch.from_numpy(logits).to(sampler.device), prepared, tokens)
    got = tokens.tolist()
    assert got[:3] == got[6:9] == [-1, -1, -1]
    for (row, _, sample, _), token in list(zip(rows, got, strict=True))[3:6] + list(zip(rows, got, strict=True))[9:]:
        assert_same(logits[row], sample, token)
    scores = sampler.finish(prepared)
    assert [score is None for score in scores] == [True] * 9 + [False] * 2 + [True]


def test_penalties_of_steps_that_are_queued_ahead(sampler: Any, vocab: int) -> None:
    """The host learns a token one step late; the counts do not."""
    steps, count = 10, 5
    params = [
        SamplingParams(0.0, repetition_penalty=1.5),
        SamplingParams(0.0, frequency_penalty=1.1),
        SamplingParams(0.8, top_k=20, presence_penalty=1.3, seed=3),
        SamplingParams(0.0, logit_bias={11: 2.0, 12: 2.5}, repetition_penalty=1.2, frequency_penalty=0.3),
        SamplingParams(1.0, top_p=0.9, seed=4),
    ]
    # Close to one another and the same every step, so that each penalty decides the next token.
    logits = np.repeat(rows_of(12, 1, vocab, 0.3), count, 0)
    table = torch.from_numpy(logits).to(sampler.device)
    prompts = [list(range(3 * i, 40)) for i in range(count)]
    outputs: list[list[int]] = [[5, 5, 9] if i % 2 else [] for i in range(count)]
    flight: Any = None
    pending: list[Any] = []
    truth = [list(o) for o in outputs]
    for _ in range(steps):
        rows = []
        for i in range(count):
            position = len(prompts[i]) + len(outputs[i]) + (flight is not None)
            banned = frozenset([0, 1]) if position < len(prompts[i]) + 4 else frozenset()
            sample = SampleInput(params[i], 0, position, prompts[i], list(outputs[i]), banned)
            rows.append((i, i, sample, flight is not None))
        prepared = sampler.prepare(rows)
        tokens = torch.full((count,), -77, dtype=torch.int32, device=sampler.device)
        sampler.run(table, prepared, tokens)
        pending.append((rows, tokens))
        if flight is not None:
            for i, token in enumerate(flight.tolist()):
                outputs[i].append(token)
        flight = tokens
    for rows, tokens in pending:
        for i, token in enumerate(tokens.tolist()):
            sample = replace(rows[i][2], output_token_ids=list(truth[i]))
            assert_same(logits[i], sample, token)
            truth[i].append(token)
    assert len(set(truth[0])) > 5


def test_a_sequence_that_went_on_elsewhere_is_counted_anew(sampler: Any, vocab: int) -> None:
    logits = rows_of(13, 1, vocab, 0.2)
    params = SamplingParams(0.0, frequency_penalty=1.9)
    best = np.argsort(-logits[0], kind="stable").tolist()
    for output in ([], best[:3], best[:1] * 2, best[:9], best[:8]):
        sample = sample_of(params, output_token_ids=output)
        assert_same(logits[0], sample, device_tokens(sampler, logits, [(0, 1, sample, False)])[0])
    # Prepared, never run: the counts are not what was prepared.
    sampler.prepare([(0, 1, sample_of(params, output_token_ids=best[:4]), False)])
    sample = sample_of(params, output_token_ids=best[:5])
    assert_same(logits[0], sample, device_tokens(sampler, logits, [(0, 1, sample, False)])[0])


def test_more_sequences_than_slots(sampler: Any, vocab: int) -> None:
    logits = rows_of(14, 20, vocab, 0.2)
    params = SamplingParams(0.0, repetition_penalty=1.7)
    for first, count in ((0, 6), (6, 6), (3, 6), (0, 20), (0, 20)):
        rows = [
            (i, i, sample_of(params, prompt_token_ids=np.argsort(-logits[i])[: i + 1].tolist()), False)
            for i in range(first, first + count)
        ]
        for (i, _, sample, _), token in zip(rows, device_tokens(sampler, logits, rows), strict=True):
            assert_same(logits[i], sample, token)


@pytest.mark.parametrize("coarse", [False, True])
def test_logprobs(sampler: Any, vocab: int, coarse: bool) -> None:
    from kvmesh.engine.sampling.logprobs import token_logprobs

    logits = rows_of(15, 5, vocab)
    if coarse:
        logits = np.round(logits)
    logits[1, 3:vocab:2] = -np.inf
    params = SamplingParams(3.0, logit_bias={3: 50.0}, want_logprobs=True)
    wanted = [0, 1, 20, 5, 20]
    rows = [
        (i, i, sample_of(replace(params, logprobs=n, temperature=3.0 * (i < 3), want_logprobs=i != 3)), False)
        for i, n in enumerate(wanted)
    ]
    prepared = sampler.prepare(rows)
    tokens = torch.full((5,), -77, dtype=torch.int32, device=sampler.device)
    sampler.run(torch.from_numpy(logits).to(sampler.device), prepared, tokens)
    got = tokens.tolist()
    scores = sampler.finish(prepared)
    assert scores[3] is None
    for i in (0, 1, 2, 4):
        expected = token_logprobs(logits[i], got[i], wanted[i])
        score = scores[i]
        assert (score.token_id, score.rank) == (got[i], expected.rank)
        assert score.logprob == pytest.approx(expected.logprob, abs=1e-4)
        # Which of equals are the last of numpy's selection is its own affair; here the lowest ids are.
        best = np.argsort(-logits[i], kind="stable")[: wanted[i]]
        assert [t for t, _ in score.top] == best.tolist()
        assert [v for _, v in score.top] == pytest.approx([v for _, v in expected.top], abs=1e-4)


def test_scores_of_given_tokens(sampler: Any, vocab: int) -> None:
    from kvmesh.engine.sampling.logprobs import token_logprobs

    logits = rows_of(16, 7, vocab)
    targets = np.random.default_rng(0).integers(0, vocab, 7).tolist()
    scores = sampler.score(torch.from_numpy(logits).to(sampler.device), targets, 3)
    assert sampler.score(torch.from_numpy(logits).to(sampler.device), [], 3) == []
    for row, target, score in zip(logits, targets, scores, strict=True):
        expected = token_logprobs(row, target, 3)
        assert (score.token_id, score.rank) == (target, expected.rank)
        assert score.logprob == pytest.approx(expected.logprob, abs=1e-4)
        assert [t for t, _ in score.top] == [t for t, _ in expected.top]


def test_nothing_to_sample(sampler: Any, vocab: int) -> None:
    assert device_tokens(sampler, rows_of(0, 1, vocab), []) == []


def test_warm(sampler: Any) -> None:
    sampler.warm()
