"""Kernels over e4m3 pages: what is stored, and decode attention over it against fp64 torch on the same bytes."""

from __future__ import annotations

import os
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
E4M3 = torch.float8_e4m3fn
SCALES = (0.03, 2.5)


def _case(lengths: list[int], shape: tuple[int, int, int, int], device: str, rows: int = 0) -> Any:
    """`Case` of the other tests whose pages are e4m3, with its random K and V divided by SCALES."""
    from tests.gpu.test_decode_attention import Case

    class Fp8Case(Case):
        @property
        def scale(self) -> float:
            return float(self.head_dim**-0.5)

        def expected(self, row: int) -> Any:
            stored, self.kv = self.kv, self.kv.double() * torch.tensor(SCALES, device=device).double()[:, None, None]
            try:
                return super().expected(row)
            finally:
                self.kv = stored

    case = Fp8Case(lengths, *shape, device, rows=rows)
    # What nobody wrote stays NaN.
    case.kv = (case.kv.float() / torch.tensor(SCALES, device=device)[:, None, None]).to(E4M3)
    return case


def _run(case: Any, config: Any) -> Any:
    from kvmesh.layers.cuda import pdl
    from kvmesh.layers.cuda.decode_attention import decode_attention
    from tests.gpu.test_decode_attention import Launcher

    launcher = Launcher(case, config)
    launcher.fill(case.lengths)
    outs = []
    for _ in range(2):
        launcher.soil()
        outs.append(case.poisoned())
        decode_attention(
            case.q, case.kv, case.tables, launcher.work, outs[-1], launcher.workspace, case.scale, launcher.plan,
            config, pdl=pdl.available(torch.device(case.device)), kv_scales=SCALES,
        )  # fmt: skip
        assert not launcher.workspace.tickets.any()
    case.check(outs[0])
    assert torch.equal(outs[0].view(torch.int16), outs[1].view(torch.int16))
    return outs[0]


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("shape", [(3, 3, 16, 64), (8, 4, 64, 128), (2, 7, 64, 64), (1, 8, 32, 128), (2, 1, 16, 128)])
def test_unequal_rows(kernel_device: str, rows: int, shape: tuple[int, int, int, int]) -> None:
    from kvmesh.layers.cuda.decode_attention import config_for

    if INTERPRETED and shape[0] > 3:
        pytest.skip("slow in the interpreter")
    torch.manual_seed(rows)
    lengths = [130, 0, 1, 65] if INTERPRETED else [4250, 0, 1, 16, 17, 63, 64, 65, 1000, 9001, 0, 128, 300]
    _run(_case(lengths, shape, kernel_device, rows=len(lengths) + 3), config_for(rows, quantized=True))


def test_every_token_and_column_counts_once(kernel_device: str) -> None:
    """With q = 0 the output is the mean of V, which has one 1 a token, in column token % d."""
    from kvmesh.layers.cuda.decode_attention import config_for

    lengths, head_dim = ([170, 77] if INTERPRETED else [4250, 77, 2999, 64]), 64
    for rows in (1, 64):
        case = _case(lengths, (1, 2, 64, head_dim), kernel_device)
        case.q.zero_()
        for row, n in enumerate(lengths):
            token = torch.arange(n, device=kernel_device)
            ones = (torch.eye(head_dim, device=kernel_device)[token % head_dim] / SCALES[1]).to(E4M3)
            # Bytes: torch does not index 8-bit floats everywhere.
            case.kv.view(torch.uint8)[case.tables[row, token // 64].long(), 0, 1, token % 64] = ones.view(torch.uint8)
        out = _run(case, config_for(rows, quantized=True)).view(case.rows, 2, head_dim)
        one = float(torch.tensor(1 / SCALES[1]).to(E4M3)) * SCALES[1]
        for row, n in enumerate(lengths):
            counts = torch.bincount(torch.arange(n) % head_dim, minlength=head_dim)
            assert ((out[row].float().cpu() * n / one - counts).abs() < 0.5).all()


def test_pages_of_one_type_are_not_read_as_the_other(kernel_device: str) -> None:
    from kvmesh.layers.cuda.decode_attention import config_for

    case = _case([5], (1, 2, 16, 64), kernel_device)
    with pytest.raises(ValueError, match="paired"):
        _run(case, config_for(1))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page_size", "splits", "rows"),
    [(32, 8, 128, 64, 4, 20), (32, 8, 128, 16, 1, 1500), (9, 3, 64, 16, 2, 5), (14, 2, 64, 64, 1, 700)],
)
def test_rope_append(
    kernel_device: str, heads: int, kv_heads: int, dim: int, page_size: int, splits: int, rows: int
) -> None:
    """Pages hold exactly what torch makes of the K and V beside them."""
    from kvmesh.layers.cuda import pdl
    from kvmesh.layers.cuda.rope import rope_append

    device = kernel_device
    rows = min(rows, 5) if INTERPRETED else rows
    pages = -(-rows // page_size) + 3
    qkv = torch.randn(splits, rows, (heads + 2 * kv_heads) * dim, device=device)
    # One token far out of range, and one that is no number.
    qkv[0, 1] *= 1e4
    qkv[0, 2, -1] = float("nan")
    angle = torch.rand(100, dim // 2, device=device)
    table = torch.cat([angle.cos(), angle.sin()], 1)
    positions = torch.randint(0, 100, (rows,), dtype=torch.int32, device=device)
    slots = torch.randperm(pages * page_size, device=device)[:rows]
    slots[3] = -1
    layer = torch.full((pages, kv_heads, 2, page_size, dim), 1.0, device=device).to(E4M3)
    before = layer.view(torch.uint8).clone()
    q_out, kv_out = (
        torch.full((rows, *shape), float("nan"), dtype=torch.bfloat16, device=device)
        for shape in ((heads, dim), (2, kv_heads, dim))
    )
    on = pdl.available(torch.device(device))
    rope_append(qkv, None, table, positions, slots, layer, q_out, rows, kv_out=kv_out, kv_scales=SCALES, pdl=on)
    units = torch.tensor(SCALES, device=device)[:, None, None]
    exact = (kv_out.float() / units).clamp(-448, 448).transpose(1, 2).contiguous()
    want = exact.to(E4M3).view(torch.uint8)
    kept = (slots >= 0).nonzero().flatten()
    place = slots[kept] // page_size, slice(None), slice(None), slots[kept] % page_size
    stored = layer.view(torch.uint8)
    same = (stored[place] == want[kept]) | (exact[kept].isnan() & (stored[place] & 0x7F == 0x7F))
    if INTERPRETED:
        # Its conversion does not round to even, carry into the exponent, round subnormals or know NaN.
        rounded = want[kept].view(E4M3).float()
        same |= rounded.isnan() | (rounded.abs() < 2**-6) | (rounded.frexp().exponent != exact[kept].frexp().exponent)
        same |= (stored[place].view(E4M3).float() - exact[kept]).abs() <= exact[kept].abs() / 16
    assert same.all()
    before[place] = stored[place]
    assert torch.equal(stored, before), "bytes beside what was appended"
    assert (want[1] & 0x7F == 0x7E).any(), "nothing saturated"
    assert (want[2] & 0x7F == 0x7F).sum() == 1
    # K and V beside the pages are those of bf16 pages.
    plain = torch.zeros(layer.shape, dtype=torch.bfloat16, device=device)
    other_q, other_kv = torch.empty_like(q_out), torch.empty_like(kv_out)
    rope_append(qkv, None, table, positions, slots, plain, other_q, rows, kv_out=other_kv, pdl=on)
    for mine, other in ((q_out, other_q), (kv_out, other_kv)):
        assert torch.equal(mine.view(torch.int16), other.view(torch.int16))


def test_copy_pages(kernel_device: str) -> None:
    from kvmesh.layers.cuda.pages import copy_pages

    region = torch.randint(0, 256, (2, 9, 3, 2, 16, 64), dtype=torch.uint8, device=kernel_device)
    want = region.clone()
    want[:, [4, 5, 8]] = region[:, [7, 0, 0]]
    src, dst = (torch.tensor(pages, device=kernel_device) for pages in ([7, 0, 0], [4, 5, 8]))
    copy_pages(region.view(E4M3), src, dst)
    assert torch.equal(region, want)
