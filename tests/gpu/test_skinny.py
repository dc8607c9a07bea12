"""Skinny products against torch in fp32: odd numbers of rows, tails of N and K, ties, rows that are not finite."""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

ROWS = (1, 2, 3, 5, 16, 17, 33, 64, 100, 128)
SMALL = ((576, 576), (960, 576), (3072, 576), (576, 1536), (200, 80))
LLAMA = ((6144, 4096), (4096, 4096), (4096, 14336))
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def cases(pdl: bool, *more: tuple[int, int]) -> list[tuple[int, int, int]]:
    """(m, n, k). Where launches wait for each other the kernels are the same: few cases do, for each is compiled."""
    if INTERPRETED:
        return [(m, n, k) for n, k in ((192, 80), (200, 144)) for m in (1, 3, 17)]
    if not pdl:
        return [(m, n, k) for n, k in ((960, 576), (200, 80)) for m in (5, 64)]
    return [(m, n, k) for n, k in (*SMALL, *more) for m in ROWS]


def operands(m: int, n: int, k: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x (R, K), NaN from row m on, and a weight (N, K)."""
    from kvmesh.layers.cuda.skinny import row_bucket

    x = torch.randn(row_bucket(m), k, device=device).to(torch.bfloat16)
    x[m:] = float("nan")
    return x, (torch.randn(n, k, device=device) / k**0.5).to(torch.bfloat16)


def poisoned(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan") if dtype.is_floating_point else -7, device=device, dtype=dtype)


@pytest.mark.parametrize("pdl", [False, True])
def test_linear(kernel_device: str, pdl: bool) -> None:
    from kvmesh.layers.cuda import pdl as launches
    from kvmesh.layers.cuda.skinny import skinny_linear, splits_for

    if pdl and not launches.available(torch.device(kernel_device)):
        pytest.skip("needs a GPU with programmatic dependent launch")
    for m, n, k in cases(pdl, *LLAMA):
        x, weight = operands(m, n, k, kernel_device)
        out = poisoned(splits_for(m, n, k), len(x), n, device=kernel_device)
        skinny_linear(x, weight, out, m, pdl=pdl)
        want = x[:m].float() @ weight.float().T
        torch.testing.assert_close(
            out[:, :m].sum(0), want, rtol=2e-3, atol=2e-3, msg=lambda e, at=(m, n, k): f"{at}: {e}"
        )
        assert out[:, m:].isnan().all()


@pytest.mark.parametrize("pdl", [False, True])
def test_gate_up(kernel_device: str, pdl: bool) -> None:
    from kvmesh.layers.cuda import pdl as launches
    from kvmesh.layers.cuda.skinny import skinny_gate_up

    if pdl and not launches.available(torch.device(kernel_device)):
        pytest.skip("needs a GPU with programmatic dependent launch")
    for m, n, k in cases(pdl, (28672, 4096)):
        x, weight = operands(m, n, k, kernel_device)
        out = poisoned(len(x), n // 2, device=kernel_device, dtype=torch.bfloat16)
        skinny_gate_up(x, weight, out, m, pdl=pdl)
        gate, up = (x[:m].float() @ weight.float().T).chunk(2, dim=1)
        want = torch.nn.functional.silu(gate) * up
        torch.testing.assert_close(
            out[:m].float(), want, rtol=1e-2, atol=2e-3, msg=lambda e, at=(m, n, k): f"{at}: {e}"
        )
        assert out[m:].isnan().all()


@pytest.mark.parametrize("pdl", [False, True])
def test_head(kernel_device: str, pdl: bool) -> None:
    from kvmesh.layers.cuda import pdl as launches
    from kvmesh.layers.cuda.skinny import argmax_reduce, head_tiles, skinny_head

    if pdl and not launches.available(torch.device(kernel_device)):
        pytest.skip("needs a GPU with programmatic dependent launch")
    heads = [(m, 200, 80) for m in ((1, 3, 17) if INTERPRETED else (5, 64))]
    if pdl:
        heads = [(m, 49152, 576) for m in ROWS] + [(m, 200, 80) for m in (2, 128)]
        heads += [(m, 128256, 4096) for m in (1, 33, 64, 128)]
    for m, vocab, k in heads:
        x, weight = operands(m, vocab, k, kernel_device)
        # Two rows of the weight that are the same and better than all others, in tiles far apart and in one tile.
        weight[7] = weight[8] = weight[vocab - 3] = 8 * x[0].sign() / k**0.5
        tiles = head_tiles(m, vocab)
        logits = poisoned(len(x), vocab, device=kernel_device)
        value = poisoned(len(x), tiles, device=kernel_device)
        index = poisoned(len(x), tiles, device=kernel_device, dtype=torch.int32)
        tokens = poisoned(len(x), device=kernel_device, dtype=torch.int32)
        skinny_head(x, weight, logits, value, index, m, pdl=pdl)
        argmax_reduce(value, index, tokens, m, pdl=pdl)
        want = x[:m].float() @ weight.float().T
        torch.testing.assert_close(logits[:m], want, rtol=2e-3, atol=2e-3)
        assert logits[m:].isnan().all()
        assert value[m:].isnan().all()
        assert (index[m:] == -7).all()
        assert tokens[:m].tolist() == logits[:m].cpu().numpy().argmax(1).tolist()
        assert tokens[0] == 7
        assert (tokens[m:] == -7).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_has_no_token(kernel_device: str, bad: float) -> None:
    from kvmesh.layers.cuda.skinny import argmax_reduce, head_tiles, skinny_head

    m, vocab, k = 3, 200, 80
    x, weight = operands(m, vocab, k, kernel_device)
    if bad != bad:
        x[1, 5] = bad
    else:
        # All logits -inf, or all +inf.
        weight[:, 5] = 1
        x[1, 5] = bad
    tiles = head_tiles(m, vocab)
    logits = poisoned(len(x), vocab, device=kernel_device)
    value = poisoned(len(x), tiles, device=kernel_device)
    index = poisoned(len(x), tiles, device=kernel_device, dtype=torch.int32)
    tokens = poisoned(len(x), device=kernel_device, dtype=torch.int32)
    skinny_head(x, weight, logits, value, index, m, pdl=False)
    argmax_reduce(value, index, tokens, m, pdl=False)
    assert tokens[1] == -1
    assert tokens[0] == logits[0].argmax()
    assert tokens[2] == logits[2].argmax()


def test_one_bad_logit_is_enough(kernel_device: str) -> None:
    from kvmesh.layers.cuda.skinny import argmax_reduce, head_tiles, skinny_head

    m, vocab, k = 2, 200, 80
    x, weight = operands(m, vocab, k, kernel_device)
    weight[150, 3] = float("nan")
    tiles = head_tiles(m, vocab)
    logits = poisoned(len(x), vocab, device=kernel_device)
    value = poisoned(len(x), tiles, device=kernel_device)
    index = poisoned(len(x), tiles, device=kernel_device, dtype=torch.int32)
    tokens = poisoned(len(x), device=kernel_device, dtype=torch.int32)
    skinny_head(x, weight, logits, value, index, m, pdl=False)
    argmax_reduce(value, index, tokens, m, pdl=False)
    assert tokens[:m].tolist() == [-1, -1]


def test_ties_over_tiles_go_to_the_lowest_id(kernel_device: str) -> None:
    from kvmesh.layers.cuda.skinny import argmax_reduce

    value = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, -1.0, 5.0, 5.0]], device=kernel_device)
    index = torch.tensor([[9, 40, 70, 100], [3, 44, 66, 99]], device=kernel_device, dtype=torch.int32)
    tokens = torch.full((2,), -7, device=kernel_device, dtype=torch.int32)
    argmax_reduce(value, index, tokens, 2, pdl=False)
    assert tokens.tolist() == [40, 3]


def test_operands_by_tensor_maps(kernel_device: str) -> None:
    from kvmesh.layers.cuda.skinny import skinny_gate_up, skinny_linear
    from kvmesh.layers.cuda.skinny_config import Config

    for m, n, k in ((3, 192, 176),) if INTERPRETED else ((3, 200, 176), (16, 4096, 4096)):
        x, weight = operands(m, n, k, kernel_device)
        full = x[:m].float() @ weight.float().T
        config = Config(64, 64, 4, 4, splits=2, tma=True)
        out = poisoned(config.num_splits(k), len(x), n, device=kernel_device)
        skinny_linear(x, weight, out, m, pdl=False, config=config)
        torch.testing.assert_close(out[:, :m].sum(0), full, rtol=2e-3, atol=2e-3)
        assert out[:, m:].isnan().all()
        both = poisoned(len(x), n // 2, device=kernel_device, dtype=torch.bfloat16)
        skinny_gate_up(x, weight, both, m, pdl=False, config=Config(64, 64, 4, 4, tma=True))
        gate, up = full.chunk(2, dim=1)
        want = torch.nn.functional.silu(gate) * up
        torch.testing.assert_close(both[:m].float(), want, rtol=1e-2, atol=2e-3)


def test_few_rows_without_tensor_cores(kernel_device: str) -> None:
    from kvmesh.layers.cuda.skinny import skinny_gate_up, skinny_linear
    from kvmesh.layers.cuda.skinny_config import Config

    for n, k, splits in ((200, 176, 2),) if INTERPRETED else ((200, 176, 2), (4096, 4096, 1)):
        for m in (1, 2, 3, 4):
            x, weight = operands(m, n, k, kernel_device)
            full = x[:m].float() @ weight.float().T
            config = Config(8, 128 if splits > 1 else 1024, 1, 4, splits=splits, gemv=True)
            out = poisoned(config.num_splits(k), len(x), n, device=kernel_device)
            skinny_linear(x, weight, out, m, pdl=False, config=config)
            torch.testing.assert_close(out[:, :m].sum(0), full, rtol=2e-3, atol=2e-3)
            assert out[:, m:].isnan().all()
            both = poisoned(len(x), n // 2, device=kernel_device, dtype=torch.bfloat16)
            skinny_gate_up(x, weight, both, m, pdl=False, config=config)
            gate, up = full.chunk(2, dim=1)
            want = torch.nn.functional.silu(gate) * up
            torch.testing.assert_close(both[:m].float(), want, rtol=1e-2, atol=2e-3)
            assert both[m:].isnan().all()


WAYS: dict[str, dict[str, int | bool]] = {
    "part of a tile": {"step": 56},
    "starts apart": {"turn": 1},
    "both": {"step": 40, "turn": 3},
    "by tensor maps": {"turn": 1, "tma": True},
    "late": {"late": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_cut(kernel_device: str, way: str) -> None:
    from kvmesh.layers.cuda import pdl as launches
    from kvmesh.layers.cuda.skinny import skinny_gate_up, skinny_linear
    from kvmesh.layers.cuda.skinny_config import Config

    pdl = launches.available(torch.device(kernel_device))
    for m, n, k in ((17, 400, 144), (3, 192, 176)) if INTERPRETED else ((17, 400, 144), (40, 6144, 4096)):
        x, weight = operands(m, n, k, kernel_device)
        full = x[:m].float() @ weight.float().T
        config = Config(64, 64, 4, 4, splits=2, prefetch=128, **WAYS[way])  # type: ignore[arg-type]
        out = poisoned(config.num_splits(k), len(x), n, device=kernel_device)
        skinny_linear(x, weight, out, m, pdl=pdl, config=config)
        torch.testing.assert_close(out[:, :m].sum(0), full, rtol=2e-3, atol=2e-3)
        assert out[:, m:].isnan().all()
        gate, up = full.chunk(2, dim=1)
        want = torch.nn.functional.silu(gate) * up
        both = poisoned(len(x), n // 2, device=kernel_device, dtype=torch.bfloat16)
        skinny_gate_up(x, weight, both, m, pdl=pdl, config=config)
        torch.testing.assert_close(both[:m].float(), want, rtol=1e-2, atol=2e-3)
        assert both[m:].isnan().all()


def test_splits_cover_k_and_none_is_empty() -> None:
    from kvmesh.layers.cuda.skinny_config import BUCKETS, config_for

    for rows_ in BUCKETS:
        for n, k in (*SMALL, *LLAMA, (64, 16), (128, 11008)):
            config = config_for("linear", rows_, n, k)
            assert (
                (config.num_splits(k) - 1) * config.split_columns(k)
                < k
                <= config.num_splits(k) * config.split_columns(k)
            )
