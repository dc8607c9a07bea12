"""The CUDA runner over e4m3 pages against transformers in fp32: prompts whole and chunked, decode in graphs, forks.

Rounding K and V of these models to e4m3 moves logits by 6 to 9 % in norm (on CPU, with a cache that rounds), so 0.12
leaves room for bf16 activations. A scale that is forgotten, or used twice, moves them by far more. What does not
read pages is held to bf16's 0.03.
"""

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

TOLERANCE, EXACT = 0.12, 0.03
# (page_size, (k_scale, v_scale)): K of these models is below 7, V below 5, so nothing saturates.
PAGES = ((16, (1.0, 1.0)), (64, (0.1, 0.05)))


@pytest.fixture(scope="module", params=("gqa3_d64", "gqa4_d128"))
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    from tests.gpu.cuda_kit import make_model

    directory = tmp_path_factory.mktemp(request.param)
    # Scores of about 1: the sharper attention is, the more a rounded K changes it.
    return directory, make_model(directory, request.param, gain=1.0)


@pytest.fixture(scope="module", params=PAGES, ids=("pages16", "pages64_scaled"))
def driver(request: pytest.FixtureRequest, models: tuple[Path, Any]) -> Iterator[Any]:
    from kvmesh.engine.cuda.runner import CudaRunner
    from tests.gpu.cuda_kit import Driver

    page_size, (k_scale, v_scale) = request.param
    runner = CudaRunner.load(
        str(models[0]), "bf16", "cuda:0", max_batch=40, token_budget=1024, kv_dtype="fp8_e4m3", k_scale=k_scale,
        v_scale=v_scale,
    )  # fmt: skip
    made = Driver(runner, page_size)
    yield made
    made.runner.close()


def _ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 2000, count).tolist()


def _give_back(driver: Any, *tables: np.ndarray) -> None:
    driver.free += np.unique(np.concatenate(tables)).tolist()


def test_pages_have_half_the_bytes(driver: Any) -> None:
    from dataclasses import replace

    from kvmesh.errors import InvalidArgument

    layout = driver.layout
    bf16 = replace(layout, dtype="bf16", kv_scales=None)
    assert driver.runner._region.nbytes * 2 == bf16.region_bytes(layout.groups[0])
    assert driver.runner._region.dtype == torch.float8_e4m3fn
    k_scale, v_scale = layout.kv_scales
    for other in (bf16, replace(layout, kv_scales=(k_scale, 2 * v_scale))):
        with pytest.raises(InvalidArgument, match="layout"):
            driver.runner.bind_cuda(other, {layout.groups[0].name: driver.region}, driver.bell)


def test_a_prompt_whole_and_in_chunks(models: tuple[Path, Any], driver: Any) -> None:
    from tests.gpu.cuda_kit import assert_close, reference

    ids = _ids(333)
    expected = reference(models[1], ids)
    tables = [driver.table(400) for _ in range(3)]
    assert_close(driver.logits(driver.slice(1, ids, 0, tables[0])), expected[-1:], TOLERANCE)
    for start, end in ((0, 100), (100, 101), (101, 310), (310, 333)):
        logits = driver.logits(driver.slice(2, ids[start:end], start, tables[1]))
        assert_close(logits, expected[end - 1 : end], TOLERANCE)
    # All rows are wanted, and none of them reads a page.
    assert_close(driver.logits(driver.slice(3, ids, 0, tables[2], prompt_logprobs=1)), expected[-1:], EXACT)
    _give_back(driver, *tables)


def test_decode_rows_in_a_graph(models: tuple[Path, Any], driver: Any) -> None:
    from tests.gpu.cuda_kit import assert_close, reference

    for count in (1, 3, 17, 33):
        lengths = [1 + (37 * i) % 300 for i in range(count)] if count > 1 else [290]
        prompts = [_ids(length, i) for i, length in enumerate(lengths)]
        tables = [driver.table(length + 1) for length in lengths]
        for i, ids in enumerate(prompts):
            if len(ids) > 1:
                driver.run(driver.slice(i, ids[:-1], 0, tables[i], sample=False))
        logits = driver.logits(*[driver.slice(i, ids[-1:], len(ids) - 1, tables[i]) for i, ids in enumerate(prompts)])
        assert driver.runner._graphs.bucket(count)
        assert_close(logits, torch.cat([reference(models[1], ids)[-1:] for ids in prompts]), TOLERANCE)
        _give_back(driver, *tables)


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
    expected = torch.cat([reference(models[1], ids)[-1:] for ids in (long, other, short)])
    for mine, theirs in zip(logits, expected, strict=True):
        assert_close(mine, theirs, TOLERANCE)
    _give_back(driver, *tables)


def test_replay_is_bit_equal_to_the_same_kernels_launched(driver: Any) -> None:
    runner = driver.runner
    ids, table = _ids(90, 5), driver.table(100)
    driver.run(driver.slice(1, ids[:-1], 0, table, sample=False))
    replayed = driver.logits(driver.slice(1, ids[-1:], len(ids) - 1, table))
    with runner._on_device():
        runner._head.logits.fill_(float("nan"))
        runner._decode(1)
        runner.stream.synchronize()
    assert torch.equal(runner._head.logits[:1].cpu(), replayed)
    _give_back(driver, table)


def test_a_fork_goes_on_from_a_copied_page(driver: Any) -> None:
    from tests.gpu.cuda_kit import assert_close

    ids, table = _ids(70, 8), driver.table(80)
    driver.run(driver.slice(1, ids, 0, table))
    shared = 70 // driver.page_size
    fork = np.concatenate([table[:shared], driver.table(80)[shared:]])
    rows = driver.slice(1, [9], 70, table), driver.slice(2, [9], 70, fork)
    driver.run(*rows, copies=[(int(table[shared]), int(fork[shared]))])
    both = driver.runner._head.logits[:2].cpu()
    # Rows may be cut differently, and a K beside a rounding's edge then falls to either side.
    assert_close(both[:1], both[1:], EXACT)
    region = driver.runner._region.view(torch.uint8)
    used = 70 % driver.page_size
    ours, copy = (region[:, int(pages[shared]), ..., :used, :] for pages in (table, fork))
    assert torch.equal(ours, copy)
    _give_back(driver, table, fork)


def test_pages_that_are_no_numbers_cost_their_sequence_alone(driver: Any) -> None:
    from kvmesh.engine.failures import SequencesFailed

    good, bad = driver.table(20), driver.table(20)
    driver.run(driver.slice(1, _ids(10, 6), 0, good))
    with torch.inference_mode():
        for page in bad.tolist():
            driver.runner._region.view(torch.uint8)[:, page].fill_(0xFF)
    with pytest.raises(SequencesFailed) as caught:
        driver.run(driver.slice(1, [5], 10, good), driver.slice(2, [5], 10, bad))
    assert caught.value.seq_ids == {2}
    _give_back(driver, good, bad)
