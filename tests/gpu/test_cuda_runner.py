"""The CUDA runner against transformers: prompts whole and chunked, decode in graphs, mixed steps, launches ahead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.version.cuda is None, reason="needs a GPU"),
]

SHAPES = ("gqa3_d64", "gqa4_d128", "mha_d64_tied", "bias_gqa7_d64")


@pytest.fixture(scope="module", params=SHAPES)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    from tests.gpu.cuda_kit import make_model

    directory = tmp_path_factory.mktemp(request.param)
    return directory, make_model(directory, request.param)


def _load(directory: Path, **options: Any) -> Any:
    from kvmesh.engine.cuda.runner import CudaRunner

    return CudaRunner.load(str(directory), "bf16", "cuda:0", **{"max_batch": 40, "token_budget": 1024, **options})


@pytest.fixture(scope="module", params=(16, 64))
def driver(request: pytest.FixtureRequest, models: tuple[Path, Any]) -> Iterator[Any]:
    from tests.gpu.cuda_kit import Driver

    made = Driver(_load(models[0]), request.param)
    yield made
    made.runner.close()


def _ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 2000, count).tolist()


def test_a_prompt_whole_and_in_chunks(models: tuple[Path, Any], driver: Any) -> None:
    from tests.gpu.cuda_kit import assert_close, reference

    ids = _ids(333)
    expected = reference(models[1], ids)
    whole = driver.logits(driver.slice(1, ids, 0, driver.table(400)))
    assert_close(whole, expected[-1:])
    table = driver.table(400)
    for start, end in ((0, 100), (100, 101), (101, 310), (310, 333)):
        logits = driver.logits(driver.slice(2, ids[start:end], start, table))
        assert_close(logits, expected[end - 1 : end])
    assert_close(logits, whole)


def test_decode_rows_in_a_graph(models: tuple[Path, Any], driver: Any) -> None:
    """Batches of many lengths, every one padded to its graph's size."""
    from tests.gpu.cuda_kit import assert_close, reference

    runner = driver.runner
    for count in (1, 3, 17, 33):
        lengths = [1 + (37 * i) % 300 for i in range(count)]
        prompts = [_ids(length, i) for i, length in enumerate(lengths)]
        tables = [driver.table(320) for _ in prompts] if count <= 3 else _tables(driver, lengths)
        for i, ids in enumerate(prompts):
            if len(ids) > 1:
                driver.run(driver.slice(i, ids[:-1], 0, tables[i], sample=False))
        logits = driver.logits(*[driver.slice(i, ids[-1:], len(ids) - 1, tables[i]) for i, ids in enumerate(prompts)])
        assert runner._graphs.bucket(count)
        assert_close(logits, torch.cat([reference(models[1], ids)[-1:] for ids in prompts]))
        for table in tables:
            driver.free += table.tolist()


def _tables(driver: Any, lengths: list[int]) -> list[np.ndarray]:
    return [driver.table(length + 1) for length in lengths]


def test_a_mixed_step(models: tuple[Path, Any], driver: Any) -> None:
    from tests.gpu.cuda_kit import assert_close, reference

    long, short, other = _ids(150, 1), _ids(40, 2), _ids(77, 3)
    tables = [driver.table(160), driver.table(64), driver.table(100)]
    driver.run(driver.slice(1, long[:-1], 0, tables[0], sample=False), driver.slice(2, short[:30], 0, tables[1], False))
    logits = driver.logits(
        driver.slice(1, long[-1:], len(long) - 1, tables[0]),
        driver.slice(2, short[30:], 30, tables[1]),
        driver.slice(3, other, 0, tables[2]),
    )
    # Rows: decode, prompts that begin, prompts that go on.
    assert_close(logits, torch.cat([reference(models[1], ids)[-1:] for ids in (long, other, short)]))
    for table in tables:
        driver.free += table.tolist()


def test_replay_is_bit_equal_to_the_same_kernels_launched(driver: Any) -> None:
    runner = driver.runner
    ids, table = _ids(90, 5), driver.table(100)
    driver.run(driver.slice(1, ids[:-1], 0, table, sample=False))
    row = driver.slice(1, ids[-1:], len(ids) - 1, table)
    replayed = driver.logits(row)
    with runner._on_device():
        runner._head.logits.fill_(float("nan"))
        runner._decode(1)
        runner.stream.synchronize()
    assert torch.equal(runner._head.logits[:1].cpu(), replayed)
    driver.free += table.tolist()


def test_launched_ahead_equals_one_at_a_time(driver: Any) -> None:
    """Step n + 1 takes the token that step n has yet to sample."""
    from kvmesh.engine.runner import PENDING

    runner = driver.runner
    prompts = [_ids(20 + 7 * i, 20 + i) for i in range(5)]

    def generate(ahead: bool) -> list[list[int]]:
        tables = [driver.table(100) for _ in prompts]
        out: list[list[int]] = [[] for _ in prompts]
        first = driver.run(*[driver.slice(i, ids, 0, tables[i]) for i, ids in enumerate(prompts)])
        for tokens, result in zip(out, first.slices, strict=True):
            tokens += result.token_ids
        flight = None
        for step in range(24):
            known = not ahead or step == 0
            rows = [
                driver.slice(i, [out[i][-1] if known else PENDING], len(ids) + step, tables[i])
                for i, ids in enumerate(prompts)
            ]
            launched = runner.launch(driver.batch(*rows))
            if not ahead:
                flight, launched = launched, None
            if flight is not None:
                for tokens, result in zip(out, runner.collect(flight).slices, strict=True):
                    tokens += result.token_ids
            flight = launched
        if flight is not None:
            for tokens, result in zip(out, runner.collect(flight).slices, strict=True):
                tokens += result.token_ids
        for table in tables:
            driver.free += table.tolist()
        return out

    assert generate(True) == generate(False)


def test_seeds_are_stable_across_batches(driver: Any) -> None:
    """The same request alone, among others, and at another place of the batch."""
    from kvmesh.engine.runner import SamplingParams

    params = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, seed=7)
    ids = _ids(50, 9)
    tables = [driver.table(64) for _ in range(4)]
    drawn = []
    for others in (0, 3):
        for place in {0, others}:
            rows = [driver.slice(100 + i, _ids(50, 30 + i), 0, tables[1 + i]) for i in range(others)]
            rows.insert(place, driver.slice(7, ids, 0, tables[0], params=params))
            result = driver.run(*rows)
            drawn.append(next(r.token_ids[0] for r in result.slices if r.seq_id == 7))
    assert len(set(drawn)) == 1
    for table in tables:
        driver.free += table.tolist()


def test_the_bell_rings_once_a_layer_of_each_step(driver: Any) -> None:
    layers = driver.runner.info.num_layers
    ids, table = _ids(33, 4), driver.table(40)
    before = driver.bell.value
    driver.run(driver.slice(1, ids[:-1], 0, table, sample=False))
    assert driver.bell.value == before + layers
    driver.run(driver.slice(1, ids[-1:], 32, table))
    assert driver.bell.value == before + 2 * layers
    driver.free += table.tolist()


def test_logits_that_are_no_numbers_cost_their_sequence_alone(driver: Any) -> None:
    from kvmesh.engine.failures import SequencesFailed

    good, bad = driver.table(20), driver.table(20)
    ids = _ids(10, 6)
    driver.run(driver.slice(1, ids, 0, good))
    # Sequence 2's history was never written: NaN.
    with torch.inference_mode():
        for page in bad.tolist():
            driver.runner._region[:, page].fill_(float("nan"))
    with pytest.raises(SequencesFailed) as caught:
        driver.run(driver.slice(1, [5], 10, good), driver.slice(2, [5], 10, bad))
    assert caught.value.seq_ids == {2}
    assert [result.seq_id for result in caught.value.result.slices] == [1]
    driver.free += good.tolist() + bad.tolist()


def test_prompt_logprobs_and_forks(models: tuple[Path, Any], driver: Any) -> None:
    from kvmesh.engine.runner import SampleInput, SamplingParams
    from tests.gpu.cuda_kit import assert_close, reference

    ids, table = _ids(70, 8), driver.table(80)
    sampled = tuple(SampleInput(SamplingParams(temperature=1.0, seed=3), choice, 70, ids, []) for choice in range(3))
    from kvmesh.engine.runner import Slice

    result = driver.run(Slice(1, np.array(ids, np.int32), 0, table, sampled, prompt_logprobs=2)).slices[0]
    expected = torch.log_softmax(reference(models[1], ids), dim=-1)
    assert len(result.token_ids) == 3
    assert len(result.prompt_logprobs) == 69
    off = [abs(score.logprob - float(expected[i, ids[i + 1]])) for i, score in enumerate(result.prompt_logprobs)]
    assert float(np.median(off)) < 0.05
    # A fork's partial page is copied before the step that goes on from it.
    fork = np.concatenate([table[:-1], driver.table(1)]) if driver.page_size == 16 else driver.table(80)
    pairs = [(int(table[70 // driver.page_size]), int(fork[70 // driver.page_size]))]
    fork[: 70 // driver.page_size] = table[: 70 // driver.page_size]
    driver.run(driver.slice(1, [9], 70, table), driver.slice(2, [9], 70, fork), copies=pairs)
    both = driver.runner._head.logits[:2].cpu()
    assert_close(both[:1], both[1:])
    driver.free += table.tolist() + fork[70 // driver.page_size :].tolist()


def test_a_batch_that_cannot_run_leaves_the_runner_as_it_was(driver: Any) -> None:
    from kvmesh.errors import Internal, InvalidArgument

    table = driver.table(20)
    before = driver.bell.value
    with pytest.raises(InvalidArgument):
        driver.run(driver.slice(1, [5, 99999], 0, table))
    with pytest.raises(Internal):
        driver.run(driver.slice(1, [5], 70, table))
    with pytest.raises(Internal):
        driver.run(driver.slice(99, [-1], 3, table))
    driver.run(driver.slice(1, [5, 6], 0, table))
    assert driver.bell.value == before + driver.runner.info.num_layers
    driver.free += table.tolist()
