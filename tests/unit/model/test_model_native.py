"""The compiled kernels against the torch backend on the same bf16 weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from kvmesh import native
from kvmesh.engine.torch_runner import TorchRunner
from kvmesh.errors import InvalidArgument
from kvmesh.layers.native import build
from kvmesh.layers.native.build import NativeUnavailable, load_library, status
from kvmesh.layers.native.structs import PackedLinear
from model_harness import Bench
from model_tiny import TINY, VARIANTS, make_tiny

PROMPT = list(np.random.default_rng(4).integers(3, 190, 131))


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    try:
        load_library()
    except NativeUnavailable as error:
        pytest.skip(str(error))


def close(ours: torch.Tensor, exact: torch.Tensor, rounded: torch.Tensor) -> None:
    """ours (bf16 weights and KV, fp32 activations) is at least as near the fp32 run on the same weights as the torch
    backend's bf16 run is, which rounds after every operation."""
    scale = exact.abs().max()
    error, theirs = ((x - exact).abs().max() / scale for x in (ours, rounded))
    assert error < 0.02
    assert error <= theirs


@pytest.mark.parametrize("variant", VARIANTS)
def test_native_is_nearer_to_fp32_than_torch_bf16(tmp_path: Path, variant: str) -> None:
    make_tiny(tmp_path, variant, torch.bfloat16)
    runs = []
    for dtype, backend in (("bf16", "native"), ("fp32", "torch"), ("bf16", "torch")):
        runner = TorchRunner.load(str(tmp_path), dtype, backend=backend)
        assert runner.model.backend == backend
        bench = Bench(runner)
        table = bench.table(len(PROMPT))
        # A chunk without history, one with, then decode.
        first, second = bench.run(PROMPT[:50], 50, table), []
        second.append(bench.logits(bench.slice(PROMPT[50:100], 50, table)))
        second += [bench.logits(bench.slice([PROMPT[i]], i, table)) for i in range(100, 131)]
        runs.append(torch.cat([first, *second]))
    close(*runs)


def test_native_batches_of_every_size_equal_rows_alone(tmp_path: Path) -> None:
    # Row counts around the register block (12) and the cached block (96) take different paths through the kernels.
    make_tiny(tmp_path, "bias", torch.bfloat16)
    bench = Bench(TorchRunner.load(str(tmp_path), "bf16", backend="native"), num_pages=256)
    rng = np.random.default_rng(6)
    alone = {}
    for count in (1, 2, 3, 5, 11, 12, 13, 24, 25, 36, 97, 110):
        tokens = [int(t) for t in rng.integers(3, 190, count)]
        for t in tokens:
            if t not in alone:
                alone[t] = bench.logits(bench.slice([t], 0, np.array([0], np.int32)))[0]
        got = bench.logits(*(bench.slice([t], 0, np.array([i], np.int32)) for i, t in enumerate(tokens)))
        torch.testing.assert_close(got, torch.stack([alone[t] for t in tokens]), rtol=1e-4, atol=1e-4)


def test_threads_do_not_change_the_result(tmp_path: Path) -> None:
    make_tiny(tmp_path, "plain", torch.bfloat16)
    bench = Bench(TorchRunner.load(str(tmp_path), "bf16", backend="native"))
    one = bench.run(PROMPT, 40)
    try:
        torch.set_num_threads(3)
        three = bench.run(PROMPT, 40)
    finally:
        torch.set_num_threads(1)
    torch.testing.assert_close(one, three, rtol=0, atol=1e-5)


def test_masked_garbage_and_page_edges(tmp_path: Path) -> None:
    make_tiny(tmp_path, "plain", torch.bfloat16)
    runner = TorchRunner.load(str(tmp_path), "bf16", backend="native")
    reference = None
    for page_size in (1, 3, 16, 17):
        rows = Bench(runner, page_size, 256).run(PROMPT[:70], 1)
        assert rows.isfinite().all()
        reference = rows if reference is None else reference
        torch.testing.assert_close(rows, reference, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("n", "k"), [(32, 16), (33, 7), (199, 64), (1, 1)])
def test_panels_hold_every_weight_once(n: int, k: int) -> None:
    weight = torch.arange(1, n * k + 1, dtype=torch.float32).view(n, k).remainder(251).to(torch.bfloat16)
    packed = PackedLinear(weight, None).panels  # (panels, k, 16, 2)
    rows = packed.permute(0, 3, 2, 1).reshape(-1, k)
    assert torch.equal(rows[:n], weight)
    assert not rows[n:].any()
    assert TINY["vocab_size"] % 32  # the models above exercise a partial panel in the head


@pytest.fixture
def _fresh_library() -> Iterator[None]:
    load_library.cache_clear()
    yield
    load_library.cache_clear()


@pytest.mark.usefixtures("_fresh_library")
def test_no_kernels_means_torch_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny(tmp_path / "model", "plain", torch.bfloat16)
    monkeypatch.setenv("KVMESH_NATIVE", "0")
    assert TorchRunner.load(str(tmp_path / "model"), "bf16").model.backend == "torch"
    with pytest.raises(InvalidArgument, match="KVMESH_NATIVE"):
        TorchRunner.load(str(tmp_path / "model"), "bf16", backend="native")
    monkeypatch.setenv("KVMESH_NATIVE", "1")
    monkeypatch.setenv("KVMESH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert status() == "torch (no C++ compiler)"
    fake = tmp_path / "c++"
    fake.write_text("#!/bin/sh\necho broken >&2; exit 3\n")
    fake.chmod(0o755)
    assert "broken" in status()
    monkeypatch.setenv("KVMESH_CACHE", "/proc/nowhere")
    assert "nowhere" in status()
    open_cache = tmp_path / "open" / "kvmesh" / "native"
    open_cache.mkdir(parents=True)
    open_cache.chmod(0o777)
    monkeypatch.setenv("KVMESH_CACHE", str(tmp_path / "open"))
    assert "writable by others" in status()


@pytest.mark.usefixtures("_fresh_library")
def test_a_damaged_library_in_the_cache_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, name = (compiled := build._compile()).stat().st_size, compiled.name
    monkeypatch.setenv("KVMESH_CACHE", str(tmp_path))
    library = native._cache_dir() / name
    library.write_bytes(b"")
    assert status() == "native"
    assert library.stat().st_size == whole
    assert [path.name for path in library.parent.iterdir()] == [library.name]


@pytest.mark.usefixtures("_fresh_library")
def test_no_home_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    for name in ("KVMESH_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert "home directory" in status()
