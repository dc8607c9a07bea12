"""The fused kernels around the GEMMs against plain torch: norms, rotary and append, SwiGLU, embedding, copies, bell.

Each combination of constants is a kernel to compile, a third of a second: the cases are chosen, not multiplied.
"""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

DEADLINE_S = 30.0
# Triton's interpreter cuts off where the GPU rounds to bf16.
EXACT = os.environ.get("TRITON_INTERPRET") != "1"


def draw(*shape: int, device: str, dtype: Any = None, scale: float = 1.0) -> Any:
    return (torch.randn(shape, device=device) * scale).to(dtype or torch.bfloat16)


def poisoned(*shape: int, device: str) -> Any:
    return torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device)


def can_pdl(device: str) -> bool:
    from kvmesh.layers.cuda.pdl import available

    return available(torch.device(device))


def dtype_of(wide: bool) -> Any:
    """Split-K partials are fp32, a GEMM's output bf16."""
    return torch.float32 if wide else torch.bfloat16


def launch_kinds(device: str) -> list[bool]:
    """Plain launches and, where the GPU has them, programmatic dependent ones."""
    return [False, True] if can_pdl(device) else [False]


def close(have: Any, want: Any, what: str, terms: Any = 0.0) -> None:
    """Within two last places of bf16 of the result and of `terms`, magnitudes of what was rounded on the way to it."""
    error = (have.double() - want.double()).abs()
    allowed = (2.0**-6 if EXACT else 2.0**-5) * (want.double().abs() + terms) + 1e-6
    # NaN is no less than anything.
    assert bool((error <= allowed).all()), f"{what}: error {error.max()}, {int((~(error <= allowed)).sum())} elements"


def sizes(device: str, small: Any, large: Any) -> Any:
    return small if device == "cpu" else large


def normed(residual: Any, weight: Any, eps: float) -> Any:
    from kvmesh.layers.norm import rms_norm

    return rms_norm(residual, weight, eps)


FEW, MANY = [(16, 1), (32, 20), (128, 128)], [(301, 299)]


@pytest.mark.parametrize(
    ("hidden", "splits", "biased", "wide", "pdl", "shapes"),
    [
        (4096, 4, False, True, True, FEW),
        (4096, 0, False, True, True, FEW),
        (4096, 1, False, False, False, MANY),
        (4096, 1, False, False, True, FEW),
        (576, 2, True, True, True, FEW),
        (576, 0, True, True, False, FEW),
        (576, 1, False, False, True, MANY),
        (960, 1, True, True, False, FEW),
        (8192, 7, False, True, True, FEW),
        (8192, 1, True, False, True, MANY),
    ],
)
def test_add_norm(
    kernel_device: str, hidden: int, splits: int, biased: bool, wide: bool, pdl: bool, shapes: list[tuple[int, int]]
) -> None:
    from kvmesh.layers.cuda.norm import add_norm

    device, pdl = kernel_device, pdl and can_pdl(kernel_device)
    for rows, m in sizes(device, [(4, 3)], shapes):
        partials = draw(splits, rows, hidden, device=device, dtype=dtype_of(wide)) if splits else None
        bias = draw(hidden, device=device) if biased else None
        residual = draw(rows, hidden, device=device, scale=3)
        weight = draw(hidden, device=device)
        total = torch.zeros(rows, hidden, dtype=torch.float64, device=device)
        if partials is not None:
            total += partials.double().sum(0)
        if bias is not None:
            total += bias.double()
        want = residual + total.to(torch.bfloat16)
        before = residual.clone()
        out = poisoned(rows, hidden, device=device)
        if partials is not None:
            # Rows that nobody computed: the padding of a captured batch.
            partials[:, m:] = float("nan")
        add_norm(partials, bias, residual, weight, 1e-5, out, m, pdl=pdl)
        close(residual[:m], want[:m], f"residual of {m} rows", total[:m].abs())
        close(out[:m], normed(residual[:m], weight, 1e-5), f"out of {m} rows")
        assert torch.equal(residual[m:], before[m:])
        assert torch.isnan(out[m:]).all()
        if not splits and not biased:
            assert torch.equal(residual, before)


def test_add_norm_takes_a_gemms_output_as_it_is(kernel_device: str) -> None:
    from kvmesh.layers.cuda.norm import add_norm

    device = kernel_device
    rows, hidden = sizes(device, (5, 64), (1500, 4096))
    output, residual = draw(rows, hidden, device=device), draw(rows, hidden, device=device)
    weight, out = draw(hidden, device=device), poisoned(rows, hidden, device=device)
    want = residual + output
    add_norm(output, None, residual, weight, 1e-6, out, rows)
    close(residual, want, "residual", output.abs())
    # One rounding of the same sum: bit-equal.
    assert torch.equal(residual, want) or not EXACT
    close(out, normed(residual, weight, 1e-6), "out")


def rope_reference(qkv: Any, bias: Any, table: Any, positions: Any, heads: int, kv_heads: int) -> tuple[Any, Any]:
    """q (rows, heads, dim), K and V side by side (rows, kv_heads, 2, dim) as the CPU computes them."""
    from kvmesh.layers.rotary import apply_rotary

    total = qkv.double().sum(0) + (0 if bias is None else bias.double())
    total = total.to(torch.bfloat16).view(qkv.shape[1], heads + 2 * kv_heads, -1)
    rotated = apply_rotary(total[:, : heads + kv_heads], table[positions.long()])
    return rotated[:, :heads], torch.stack([rotated[:, heads:], total[:, heads + kv_heads :]], dim=2)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page_size", "splits", "biased", "wide", "pdl", "shapes"),
    [
        (32, 8, 128, 64, 4, False, True, True, FEW),
        (32, 8, 128, 64, 1, False, False, True, MANY),
        (32, 8, 128, 16, 1, True, False, False, FEW),
        (9, 3, 64, 16, 2, False, True, True, FEW),
        (9, 3, 64, 64, 1, True, False, False, MANY),
        (14, 2, 64, 16, 4, True, True, True, FEW),
        (4, 4, 128, 64, 1, False, True, True, MANY),
        (5, 1, 96, 16, 2, True, True, False, FEW),
    ],
)
def test_rope_append(
    kernel_device: str,
    heads: int,
    kv_heads: int,
    dim: int,
    page_size: int,
    splits: int,
    biased: bool,
    wide: bool,
    pdl: bool,
    shapes: list[tuple[int, int]],
) -> None:
    from kvmesh.layers.cuda.rope import rope_append
    from kvmesh.layers.rotary import RotaryTable
    from kvmesh.loading.config import RopeConfig

    device, pdl = kernel_device, pdl and can_pdl(kernel_device)
    table = RotaryTable(RopeConfig(theta=10000.0), dim).ensure(1024).to(device)
    for rows, m in sizes(device, [(4, 3)], shapes):
        pages = -(-rows // page_size) + 3
        qkv = draw(splits, rows, (heads + 2 * kv_heads) * dim, device=device, dtype=dtype_of(wide))
        bias = draw((heads + 2 * kv_heads) * dim, device=device) if biased else None
        positions = torch.randint(0, len(table), (rows,), dtype=torch.int32, device=device)
        slots = torch.randperm(pages * page_size, device=device)[:rows]
        if m > 1:
            slots[m // 2] = -1
        slots[m:] = -1
        layer = poisoned(pages, kv_heads, 2, page_size, dim, device=device)
        q_out = poisoned(rows, heads, dim, device=device)
        q, kv = rope_reference(qkv, bias, table, positions, heads, kv_heads)
        kept = (slots >= 0).nonzero().flatten()
        page, offset = slots[kept] // page_size, slots[kept] % page_size
        appended = torch.zeros_like(layer, dtype=torch.bool)
        appended[page, :, :, offset] = True
        rope_append(qkv, bias, table, positions, slots, layer, q_out, m, pdl=pdl)
        # The two of a pair were rounded before they were turned.
        close(q_out[:m], q[:m], f"q of {m} rows", q[:m].abs().amax(-1, keepdim=True))
        assert torch.isnan(q_out[m:]).all()
        assert torch.equal(torch.isnan(layer), ~appended)
        close(layer[page, :, :, offset], kv[kept], f"pages of {m} rows", kv[kept].abs().amax(-1, keepdim=True))
        if splits == 1 and not biased and EXACT:
            assert torch.equal(layer[page, :, 1, offset], kv[kept, :, 1])


def test_rope_append_far_into_a_region(kernel_device: str) -> None:
    """Pages beyond 2^31 elements of one layer."""
    from kvmesh.layers.cuda.rope import rope_append

    device = kernel_device
    pages, kv_heads, page_size, dim, heads = 17000, 8, 64, 128, 8
    elements = pages * kv_heads * 2 * page_size * dim
    assert elements > 1 << 31
    if device == "cpu" or torch.cuda.mem_get_info()[0] < 3 * elements:
        pytest.skip("needs 6 GB of GPU memory")
    layer = torch.zeros(pages, kv_heads, 2, page_size, dim, dtype=torch.bfloat16, device=device)
    qkv = draw(1, 2, (heads + 2 * kv_heads) * dim, device=device)
    table = torch.cat([torch.ones(4, dim // 2), torch.zeros(4, dim // 2)], dim=1).to(device)
    slots = torch.tensor([pages * page_size - 1, 0], device=device)
    q_out = poisoned(2, heads, dim, device=device)
    rope_append(qkv, None, table, torch.zeros(2, dtype=torch.int32, device=device), slots, layer, q_out, 2)
    want = qkv.view(2, heads + 2 * kv_heads, dim)
    for row, (page, offset) in enumerate([(pages - 1, page_size - 1), (0, 0)]):
        assert torch.equal(layer[page, :, 0, offset], want[row, heads : heads + kv_heads])
        assert torch.equal(layer[page, :, 1, offset], want[row, heads + kv_heads :])
    assert torch.count_nonzero(layer[1 : pages - 1]) == 0


@pytest.mark.parametrize(("wide", "pdl"), [(1536, True), (4864, False), (14336, True), (100, False)])
def test_silu_mul(kernel_device: str, wide: int, pdl: bool) -> None:
    from kvmesh.layers.cuda.activation import silu_mul

    device, pdl = kernel_device, pdl and can_pdl(kernel_device)
    for rows in sizes(device, [2], [1, 20, 700]):
        gate_up = draw(rows, 2 * wide, device=device, scale=4)
        # exp overflows for the first.
        gate_up[0, 0], gate_up[0, 1] = -200.0, 200.0
        out = poisoned(rows, wide, device=device)
        silu_mul(gate_up, out, pdl=pdl)
        gate, up = gate_up.chunk(2, dim=-1)
        close(out, torch.nn.functional.silu(gate) * up, f"{rows} rows")


@pytest.mark.parametrize(("hidden", "pdl"), [(576, True), (960, False), (4096, True), (8192, False)])
def test_embed(kernel_device: str, hidden: int, pdl: bool) -> None:
    from kvmesh.layers.cuda.embed import embed

    device, pdl = kernel_device, pdl and can_pdl(kernel_device)
    vocab, batch = 1000, 7
    table = draw(vocab, hidden, device=device)
    last = torch.randint(0, vocab, (batch,), dtype=torch.int32, device=device)
    last[3] = -1
    ids = last.clamp(min=0)
    for rows, m in sizes(device, [(9, 8)], [(16, 16), (900, 899)]):
        tokens = torch.randint(0, vocab, (rows,), dtype=torch.int32, device=device)
        # The step before's tokens, in other order, the one that is none among them.
        tokens[: batch - 1] = -1 - torch.arange(1, batch, dtype=torch.int32, device=device)
        out = poisoned(rows, hidden, device=device)
        embed(tokens, last, table, out, m, pdl=pdl)
        want = tokens.clone()
        want[: batch - 1] = ids[1:]
        assert torch.equal(out[:m], table[want[:m].long()])
        assert torch.isnan(out[m:]).all()


@pytest.mark.parametrize(("page_size", "dim"), [(16, 64), (64, 128), (8, 24)])
def test_copy_pages(kernel_device: str, page_size: int, dim: int) -> None:
    from kvmesh.layers.cuda.pages import copy_pages

    device = kernel_device
    layers, pages, kv_heads = sizes(device, (2, 6, 1), (5, 40, 3))
    region = draw(layers, pages, kv_heads, 2, page_size, dim, device=device)
    order = torch.randperm(pages, device=device)
    # One source twice: two forks of one sequence.
    src, dst = torch.cat([order[:1], order[:2]]), order[3:6]
    want = region.clone()
    want[:, dst] = want[:, src]
    copy_pages(region, src, dst)
    assert torch.equal(region, want)
    copy_pages(region, src[:0], dst[:0])
    assert torch.equal(region, want)


def test_copy_pages_far_into_a_region(kernel_device: str) -> None:
    from kvmesh.layers.cuda.pages import copy_pages

    device = kernel_device
    shape = (2, 8500, 8, 2, 64, 128)
    if device == "cpu" or torch.cuda.mem_get_info()[0] < 3 * 2 * 8500 * 131072:
        pytest.skip("needs 7 GB of GPU memory")
    region = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    region[:, 8499] = draw(2, *shape[2:], device=device)
    copy_pages(region, torch.tensor([8499], device=device), torch.tensor([8498], device=device))
    assert torch.equal(region[:, 8498], region[:, 8499])
    assert torch.count_nonzero(region[:, :8498]) == 0


class Counter:
    """A host counter that the device can store into, at a cache line of pinned memory."""

    def __init__(self, device: str, value: int) -> None:
        self.memory = torch.zeros(8, dtype=torch.int64, pin_memory=device != "cpu")
        self.memory[0] = value
        self._words = memoryview(self.memory.numpy()).cast("B").cast("q")

    @property
    def address(self) -> int:
        # Unified addressing: pinned memory of torch has one address on both sides.
        return int(self.memory.data_ptr())

    @property
    def value(self) -> int:
        return self._words[0]

    def reach(self, value: int) -> list[int]:
        """All values seen on the way there."""
        seen = [self.value]
        end = time.monotonic() + DEADLINE_S
        while seen[-1] != value and time.monotonic() < end:
            now = self.value
            if now != seen[-1]:
                seen.append(now)
        return seen


def test_bell_rings_what_it_is_told(kernel_device: str) -> None:
    from kvmesh.layers.cuda.doorbell import DeviceBell

    device = kernel_device
    start = (1 << 40) + 5
    counter, other = Counter(device, start), Counter(device, 7)
    bell = DeviceBell(device, counter.address, start)
    for pdl in launch_kinds(device):
        before = bell.value()
        bell.ring(pdl=pdl)
        bell.ring(32, pdl=pdl)
        assert bell.value() == before + 33
        assert counter.value == before + 33
    if device != "cpu":
        stream = torch.cuda.Stream()
        before = bell.value()
        with torch.cuda.stream(stream):
            bell.ring(3)
        stream.synchronize()
        assert counter.value == before + 3
    there = counter.value
    bell.bind(other.address, 7)
    bell.ring()
    assert bell.value() == 8
    assert (counter.value, other.value) == (there, 8)
    # Without a counter it counts for itself.
    bell.bind(None, 0)
    bell.ring(4)
    assert bell.value() == 4
    assert other.value == 8


def test_add_norm_rings_in_order_from_a_graph(kernel_device: str) -> None:
    """32 rings a replay; whoever sees a value sees what was written before its ring."""
    from kvmesh.layers.cuda.doorbell import DeviceBell
    from kvmesh.layers.cuda.norm import add_norm

    device = kernel_device
    layers = sizes(device, 3, 32)
    rows, hidden = sizes(device, (2, 64), (20, 4096))
    start = 100
    counter = Counter(device, start)
    bell = DeviceBell(device)
    for pdl in launch_kinds(device):
        residual, weight = draw(rows, hidden, device=device), draw(hidden, device=device)
        partials, out = draw(4, rows, hidden, device=device, dtype=torch.float32), poisoned(rows, hidden, device=device)

        def step(pdl: bool = pdl, args: Any = (partials, None, residual, weight, 1e-5, out, rows)) -> None:
            for _ in range(layers):
                add_norm(*args, ring=bell, pdl=pdl)

        if device == "cpu":
            bell.bind(counter.address, start)
            step()
            assert counter.value == start + layers
            continue
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        # Neither warm-up nor capture rang the counter; a captured graph rings what is bound when it runs.
        assert counter.value == start
        bell.bind(counter.address, start)
        for replay in range(3):
            first = start + replay * layers
            graph.replay()
            seen = counter.reach(first + layers)
            assert seen[-1] == first + layers
            assert seen == sorted(seen)
        torch.cuda.synchronize()
        assert bell.value() == counter.value == start + 3 * layers
        bell.bind(None, 0)
        start += 3 * layers


def test_rows_and_the_ring_are_apart(kernel_device: str) -> None:
    """With a ring the rows are the same as without; no rows is a ring alone."""
    from kvmesh.layers.cuda.doorbell import DeviceBell
    from kvmesh.layers.cuda.norm import add_norm

    device = kernel_device
    rows, hidden = sizes(device, (3, 64), (33, 4096))
    counter = Counter(device, 0)
    bell = DeviceBell(device, counter.address, 0)
    residual, weight = draw(rows, hidden, device=device), draw(hidden, device=device)
    partials = draw(2, rows, hidden, device=device, dtype=torch.float32)
    got = []
    for ring in (None, bell):
        here, out = residual.clone(), poisoned(rows, hidden, device=device)
        add_norm(partials, None, here, weight, 1e-5, out, rows, ring=ring)
        got.append((here, out))
    assert torch.equal(got[0][0], got[1][0])
    assert torch.equal(got[0][1], got[1][1])
    add_norm(partials, None, residual, weight, 1e-5, poisoned(rows, hidden, device=device), 0, ring=bell)
    assert bell.value() == counter.value == 2
