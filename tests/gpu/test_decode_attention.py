"""Decode attention over pages against fp64 torch: any group, page and head size, unequal rows, splits, graphs.

Unused pages and the slots behind a row's end hold NaN; unused table entries name no page; outputs and workspace are
dirty. In the interpreter the sizes are small and the type is fp16, because its products of bf16 are wrong.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
SMS = 4 if INTERPRETED else 132


@dataclass
class Case:
    """Rows of random KV in shuffled pages, and what attention over them gives."""

    lengths: list[int]
    kv_heads: int
    group: int
    page_size: int
    head_dim: int
    device: str
    rows: int = 0  # of the buffers, at least one per length
    pages: int = 0  # of the region; 0: some more than needed
    width: int = 0  # of the tables
    q: Any = field(init=False)
    kv: Any = field(init=False)
    tables: Any = field(init=False)

    def __post_init__(self) -> None:
        self.rows = max(self.rows, len(self.lengths))
        counts = [-(-n // self.page_size) for n in self.lengths]
        pages = self.pages or sum(counts) + 3
        shape = (pages, self.kv_heads, 2, self.page_size, self.head_dim)
        self.kv = torch.full(shape, float("nan"), dtype=DTYPE, device=self.device)
        width = self.width or max([1, *counts]) + 2
        self.tables = torch.full((self.rows, width), 1 << 30, dtype=torch.int32, device=self.device)
        self.q = torch.randn(self.rows, self.kv_heads * self.group, self.head_dim, device=self.device).to(DTYPE)
        order = torch.randperm(pages, device=self.device)
        at = 0
        for row, (n, count) in enumerate(zip(self.lengths, counts, strict=True)):
            mine = order[at : at + count]
            at += count
            self.tables[row, :count] = mine.int()
            block = torch.randn(count, *shape[1:], device=self.device).to(DTYPE)
            if n % self.page_size:
                block[-1, :, :, n % self.page_size :] = float("nan")
            self.kv[mine] = block

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    def expected(self, row: int) -> Any:
        """fp64 (heads, head_dim)."""
        n = self.lengths[row]
        pages = self.tables[row, : -(-n // self.page_size)].long()
        # (heads, 2, tokens, d)
        kv = self.kv[pages].permute(1, 2, 0, 3, 4).reshape(self.kv_heads, 2, -1, self.head_dim)[:, :, :n].double()
        q = self.q[row].double().view(self.kv_heads, self.group, self.head_dim)
        weights = (q @ kv[:, 0].transpose(1, 2) * self.scale).softmax(-1)
        return (weights @ kv[:, 1]).reshape(-1, self.head_dim)

    def poisoned(self) -> Any:
        shape = (self.rows, self.kv_heads * self.group * self.head_dim)
        return torch.full(shape, float("nan"), dtype=DTYPE, device=self.device)

    def check(self, out: Any) -> None:
        heads = out.view(self.rows, -1, self.head_dim)
        for row, n in enumerate(self.lengths):
            if n:
                want = self.expected(row)
                error = (heads[row].double() - want).abs().max().item()
                assert error <= 0.012 * want.abs().max().item(), (row, n, error)
        idle = [row for row in range(self.rows) if row >= len(self.lengths) or not self.lengths[row]]
        assert out[idle].isnan().all()


class Launcher:
    """A bucket's plan with buffers that hold anything before the first launch."""

    def __init__(self, case: Case, config: Any, sms: int = SMS) -> None:
        from kvmesh.layers.cuda.decode_attention import Workspace

        self.config = config
        self.plan = config.plan(case.rows, case.kv_heads, sms)
        self.work = torch.full((self.plan.words,), 1 << 30, dtype=torch.int32, device=case.device)
        self.workspace = Workspace.allocate(
            self.plan.segments, case.rows, case.kv_heads, case.group, case.head_dim, case.device
        )
        self.soil()

    def soil(self) -> None:
        self.workspace.partial.fill_(float("nan"))
        self.workspace.lse.fill_(float("nan"))

    def fill(self, lengths: list[int]) -> int:
        host = np.full(self.plan.words, 1 << 30, dtype=np.int32)
        count = self.plan.fill(np.array(lengths, dtype=np.int32), host)
        self.work.copy_(torch.from_numpy(host))
        return count

    def launch(self, case: Case, out: Any, ragged: bool = False) -> None:
        from kvmesh.layers.cuda import pdl
        from kvmesh.layers.cuda.decode_attention import decode_attention

        tables, starts = case.tables, None
        if ragged:
            counts = torch.tensor(
                [-(-n // case.page_size) for n in case.lengths] + [0] * (case.rows - len(case.lengths))
            )
            tables = torch.cat([row[:count] for row, count in zip(case.tables, counts.tolist(), strict=True)])
            starts = (counts.cumsum(0) - counts).int().to(case.device)
        decode_attention(
            case.q,
            case.kv,
            tables,
            self.work,
            out,
            self.workspace,
            case.scale,
            self.plan,
            self.config,
            pdl=pdl.available(torch.device(case.device)),
            starts=starts,
        )


def run(case: Case, config: Any, sms: int = SMS) -> Any:
    launcher = Launcher(case, config, sms)
    launcher.fill(case.lengths)
    out = case.poisoned()
    launcher.launch(case, out)
    case.check(out)
    # The tickets are back at 0: once more, and the same bits.
    launcher.soil()
    again = case.poisoned()
    launcher.launch(case, again)
    assert torch.equal(out.view(torch.int16), again.view(torch.int16))
    assert not launcher.workspace.tickets.any()
    return out


def configs() -> list[Any]:
    from kvmesh.layers.cuda.decode_attention import AttentionConfig, config_for

    return [AttentionConfig(), AttentionConfig(ahead=512), config_for(1), config_for(64)]


SHAPES = [
    (8, 4, 64, 128),
    (3, 3, 16, 64),
    (3, 3, 64, 64),
    (1, 8, 32, 128),
    (2, 1, 16, 128),
    (4, 2, 32, 64),
    (2, 5, 64, 64),
]


def unequal(device: str, kv_heads: int, group: int, page_size: int, head_dim: int) -> Case:
    lengths = [130, 0, 1, 65] if INTERPRETED else [4250, 0, 1, 16, 17, 63, 64, 65, 1000, 9001, 0, 128, 300]
    return Case(lengths, kv_heads, group, page_size, head_dim, device, rows=len(lengths) + 3)


@pytest.mark.parametrize(("rows", "shape"), [*((64, shape) for shape in SHAPES), *((1, shape) for shape in SHAPES[:2])])
def test_unequal_rows(kernel_device: str, rows: int, shape: tuple[int, int, int, int]) -> None:
    from kvmesh.layers.cuda.decode_attention import config_for

    if INTERPRETED and shape[0] > 3:
        pytest.skip("slow in the interpreter")
    torch.manual_seed(rows)
    run(unequal(kernel_device, *shape), config_for(rows))


@pytest.mark.parametrize("which", range(4))
def test_every_way_to_compute(kernel_device: str, which: int) -> None:
    torch.manual_seed(which)
    run(unequal(kernel_device, 1, 2, 64, 64), configs()[which])


@pytest.mark.parametrize("rows", [1, 3, 20, 64, 256])
def test_batches(kernel_device: str, rows: int) -> None:
    from kvmesh.layers.cuda.decode_attention import config_for

    if INTERPRETED and rows > 3:
        pytest.skip("slow in the interpreter")
    torch.manual_seed(rows)
    longest = 100 if INTERPRETED else 4000 if rows < 256 else 700
    lengths = torch.randint(1, longest, (rows,)).tolist()
    lengths[rows // 2] = longest + 3
    heads = (1, 2) if INTERPRETED else (8, 4)
    run(Case(lengths, *heads, 64, 64 if INTERPRETED else 128, kernel_device), config_for(rows))


def test_one_very_long_row_beside_short_ones(kernel_device: str) -> None:
    from kvmesh.layers.cuda.decode_attention import config_for

    longest = 700 if INTERPRETED else 131072
    run(
        Case([5, longest, 33], 1, 2 if INTERPRETED else 8, 32, 64 if INTERPRETED else 128, kernel_device), config_for(3)
    )


def test_every_token_counts_once(kernel_device: str) -> None:
    """With q = 0 the output is the mean of V; V has one 1 a token, in column token % d: each column tells its count."""
    head_dim = 64
    lengths = [170, 77] if INTERPRETED else [4250, 77, 2999, 64]
    for config in configs():
        case = Case(lengths, 1, 2, 64, head_dim, kernel_device)
        case.q.zero_()
        for row, n in enumerate(lengths):
            token = torch.arange(n, device=kernel_device)
            pages = case.tables[row, token // 64].long()
            case.kv[pages, 0, 1, token % 64] = torch.eye(head_dim, dtype=DTYPE, device=kernel_device)[token % head_dim]
        out = run(case, config).view(case.rows, 2, head_dim)
        for row, n in enumerate(lengths):
            counts = torch.bincount(torch.arange(n) % head_dim, minlength=head_dim)
            assert ((out[row].float().cpu() * n - counts).abs() < 0.5).all()


def test_page_numbers_one_row_behind_the_other(kernel_device: str) -> None:
    from kvmesh.layers.cuda.decode_attention import AttentionConfig

    case = unequal(kernel_device, 1, 2, 64, 64)
    launcher = Launcher(case, AttentionConfig(ahead=128))
    launcher.fill(case.lengths)
    out = case.poisoned()
    launcher.launch(case, out, ragged=True)
    case.check(out)


def test_scores_of_any_size(kernel_device: str) -> None:
    """Large scores neither overflow nor lose the one token that matters."""
    for config in configs():
        case = Case([150 if INTERPRETED else 3000], 1, 2, 64, 64, kernel_device)
        case.q *= 100
        run(case, config)


def test_graph_replays_with_other_lengths(kernel_device: str) -> None:
    from kvmesh.layers.cuda.decode_attention import config_for

    if INTERPRETED:
        pytest.skip("no graphs in the interpreter")
    for rows in (1, 24):
        shape = {"rows": rows, "pages": 800, "width": 70}
        first = Case([4250] if rows == 1 else [100] * 20, 8, 4, 64, 128, kernel_device, **shape)
        launcher = Launcher(first, config_for(rows))
        launcher.fill(first.lengths)
        out = first.poisoned()
        launcher.launch(first, out)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            # Two in a row, as in a step: the second may start before the first has ended.
            launcher.launch(first, out)
            launcher.launch(first, out)
        for lengths in ([1], [517], [4096], [0]) if rows == 1 else ([4000, 1, 0, 900], [7] * 24, [1500] * 24):
            case = Case(lengths, 8, 4, 64, 128, kernel_device, **shape)
            for name in ("q", "kv", "tables"):
                getattr(first, name).copy_(getattr(case, name))
            launcher.fill(lengths)
            results = []
            for _ in range(20):
                out.fill_(float("nan"))
                launcher.soil()
                graph.replay()
                results.append(out.clone())
            case.check(results[0])
            assert all(torch.equal(results[0].view(torch.int16), other.view(torch.int16)) for other in results)
            assert not launcher.workspace.tickets.any()


def test_refuses_what_it_cannot_do(kernel_device: str) -> None:
    from kvmesh.layers.cuda.decode_attention import config_for

    for case in (Case([5], 1, 17, 16, 64, kernel_device), Case([5], 1, 2, 8, 64, kernel_device)):
        with pytest.raises(ValueError, match="decode attention"):
            run(case, config_for(1))
