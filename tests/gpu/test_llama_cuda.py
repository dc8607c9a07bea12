"""The forward pass by itself: rows that are left out behind the last layer's KV, and what is told of each layer.

Attention is plain torch; everything else are the kernels, by few rows and by many.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, DIM, HIDDEN, WIDE, VOCAB, LAYERS, PAGE, PAGES = 2, 1, 64, 96, 176, 40, 2, 16, 6
ROWS = 7


def _model(device: str, mlp_bias: bool) -> Any:
    from kvmesh.layers.parallel import SINGLE
    from kvmesh.layers.rotary import RotaryTable
    from kvmesh.loading.config import RopeConfig
    from kvmesh.models.llama import BlockWeights
    from kvmesh.models.llama_cuda import CudaLlama

    made = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Any:
        return (torch.randn(*shape, generator=made) / shape[-1] ** 0.5).bfloat16()

    width = (HEADS + 2 * KV_HEADS) * DIM
    blocks = [
        BlockWeights(
            1 + draw(HIDDEN), draw(width, HIDDEN), draw(width), draw(HIDDEN, HEADS * DIM), None, 1 + draw(HIDDEN),
            draw(2 * WIDE, HIDDEN), draw(2 * WIDE) if mlp_bias else None, draw(HIDDEN, WIDE),
            draw(HIDDEN) if mlp_bias else None,
        )
        for _ in range(LAYERS)
    ]  # fmt: skip
    config: Any = SimpleNamespace(
        hidden_size=HIDDEN, head_dim=DIM, num_kv_heads=KV_HEADS, num_layers=LAYERS, intermediate_size=WIDE,
        rms_eps=1e-5, vocab_size=VOCAB, mlp_bias=mlp_bias,
    )  # fmt: skip
    embed = draw(VOCAB, HIDDEN)
    weights: Any = SimpleNamespace(
        config=config, tp=SINGLE, heads=HEADS, kv_heads=KV_HEADS, rotary=RotaryTable(RopeConfig(), DIM),
        norm=1 + draw(HIDDEN), embed=embed, head=embed, blocks=lambda: iter(blocks),
    )  # fmt: skip
    model = CudaLlama(weights, torch.device(device))
    model.prepare(PAGE * PAGES)
    return model


class Pass:
    """One prompt of ROWS tokens on pages of its own: hidden states, pages, and what was told of layers."""

    def __init__(self, model: Any, device: str, *, few: bool, ends: list[int] | None) -> None:
        """few: skinny products all the way. ends: rows that are wanted, None = all."""
        from kvmesh.layers.cuda.doorbell import DeviceBell
        from kvmesh.models.llama_cuda import Last, Rows, Scratch

        scratch = Scratch(model)
        # Any earlier step's.
        for name in ("residual", "normed", "q", "attended", "act"):
            getattr(scratch, name).fill_(3.0)
        self.pages = torch.zeros(LAYERS, PAGES, KV_HEADS, 2, PAGE, DIM, dtype=torch.bfloat16, device=device)
        layers = list(self.pages.unbind(0))
        bell = DeviceBell(device)
        self.told: list[int] = []

        def column(values: Any, dtype: Any = torch.int32) -> Any:
            return torch.tensor(values, dtype=dtype, device=device)

        rows = Rows(
            ROWS, column([(5 * i + 3) % VOCAB for i in range(16)]), column(list(range(16))),
            column([2 * PAGE + i for i in range(ROWS)] + [-1] * (16 - ROWS), torch.int64), column([0]),
        )  # fmt: skip

        def attention(of: list[int]) -> Any:
            def attend(layer: int, q: Any, kv: Any, out: Any) -> None:
                k, v = (layers[layer][2, 0, plane].float() for plane in (0, 1))
                for at, row in enumerate(of):
                    scores = q[at].float() @ k[: row + 1].t() / DIM**0.5
                    out[at] = (scores.softmax(-1) @ v[: row + 1]).bfloat16()

            return attend

        last = None if ends is None else Last(column(ends, torch.int64), attention(ends), scratch)
        own = Scratch(model) if few else None
        self.hidden = model.forward(
            rows, layers, attention(list(range(ROWS))), bell=bell, scratch=own, kv_ready=self.told.append, last=last
        ).clone()
        self.rung = bell.value()


@pytest.mark.parametrize("mlp_bias", [False, True])
def test_rows_that_nobody_wants_change_nothing(kernel_device: str, mlp_bias: bool) -> None:
    """Sampled rows alone behind the last layer's KV, or none: the same states, the same pages, each layer told once."""
    with torch.inference_mode():
        model = _model(kernel_device, mlp_bias)
        few, many = (Pass(model, kernel_device, few=few, ends=None) for few in (True, False))
        some = Pass(model, kernel_device, few=False, ends=[2, 6])
        none = Pass(model, kernel_device, few=False, ends=[])
    for made in (few, many, some, none):
        assert made.told == list(range(LAYERS))
        assert made.rung == LAYERS
    assert torch.equal(some.pages, many.pages)
    assert torch.equal(none.pages, many.pages)
    assert len(none.hidden) == 0
    scale = float(many.hidden[:ROWS].float().norm()) / ROWS**0.5
    for ours, theirs in ((few.hidden[:ROWS], many.hidden[:ROWS]), (some.hidden[:2], many.hidden[[2, 6]])):
        assert torch.isfinite(ours).all()
        assert float((ours.float() - theirs.float()).norm()) < 0.03 * scale * len(ours) ** 0.5


def test_scratch_holds_every_product(kernel_device: str) -> None:
    """Of the largest bucket; gates and ups are a product of their own where they have biases."""
    from kvmesh.layers.cuda.skinny import MAX_ROWS, row_bucket, splits_for
    from kvmesh.models.llama_cuda import Scratch

    with torch.inference_mode():
        scratch = Scratch(_model(kernel_device, mlp_bias=True))
    for m in (1, 40, MAX_ROWS):
        for n, k in (((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), (HIDDEN, HEADS * DIM), (HIDDEN, WIDE), (2 * WIDE, HIDDEN)):
            assert scratch.partial.numel() >= splits_for(m, n, k) * row_bucket(m) * n
