"""The fused kernels around the GEMMs against what they replace: torch's operations and FlashInfer's kernels.

    python benchmarks/gpu_kernels/fusions.py [--out fusions.json] [--sweep]

Llama-3.1-8B's shape. Each line is one CUDA graph of 32 calls in a row (8 where rows are many), median of 20 replays, µs
a call. Few rows come as four fp32 partials of a split-K GEMM, many as one bf16 output; "TB/s" is what must be read and
written, over our time. FlashInfer is compared with where its kernels are built already. `--sweep`: other warps.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "libs"))

import torch
import triton

from kvmesh.layers.cuda import norm, pdl, rope
from kvmesh.layers.cuda.activation import silu_mul
from kvmesh.layers.cuda.doorbell import DeviceBell
from kvmesh.layers.cuda.embed import embed
from kvmesh.layers.cuda.norm import add_norm
from kvmesh.layers.cuda.pages import copy_pages
from kvmesh.layers.cuda.rope import rope_append
from kvmesh.layers.norm import rms_norm
from kvmesh.layers.rotary import apply_rotary

LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, WIDE, VOCAB = 32, 4096, 32, 8, 128, 14336, 128256
PAGE, PAGES, POSITIONS, EPS = 64, 512, 8192, 1e-5
FEW, MANY = (1, 20, 64), (4096, 8192)
SPLITS, REPLAYS = 4, 20
QKV = (HEADS + 2 * KV_HEADS) * DIM
DEVICE = "cuda:0"

Call = Callable[[], Any]


def timed(call: Call, calls: int) -> float:
    """µs of one call inside a graph of `calls`."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPLAYS)]
    graph.replay()
    for begin, end in marks:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in marks) * 1000 / calls


def built_flashinfer() -> Any:
    """The module where its kernels need no compiler, else None."""
    try:
        import flashinfer
    except ImportError:
        return None
    return flashinfer if any((Path(flashinfer.__file__).parent / "data" / "aot").glob("*")) else None


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(shape, device=DEVICE) * 0.1).to(dtype)


class Case:
    """Tensors of a step of m rows."""

    def __init__(self, m: int, layer: torch.Tensor) -> None:
        self.m, self.few = m, m <= norm.LATENCY_ROWS
        self.calls = 32 if self.few else 8
        splits, dtype = (SPLITS, torch.float32) if self.few else (1, torch.bfloat16)
        self.partial_bytes = splits * (4 if self.few else 2)
        self.partials = draw(splits, m, HIDDEN, dtype=dtype)
        self.qkv = draw(splits, m, QKV, dtype=dtype)
        self.residual, self.out, self.weight = draw(m, HIDDEN), draw(m, HIDDEN), draw(HIDDEN)
        self.gate_up, self.act = draw(m, 2 * WIDE), draw(m, WIDE)
        self.q, self.layer = draw(m, HEADS, DIM), layer
        self.positions = torch.randint(0, POSITIONS, (m,), dtype=torch.int32, device=DEVICE)
        self.slots = torch.randperm(PAGES * PAGE, device=DEVICE)[:m]
        angle = torch.rand(POSITIONS, DIM // 2, device=DEVICE)
        self.table = torch.cat([angle.cos(), angle.sin()], dim=1)
        self.tokens = torch.randint(0, VOCAB, (m,), dtype=torch.int32, device=DEVICE)
        self.last = torch.randint(0, VOCAB, (128,), dtype=torch.int32, device=DEVICE)

    def summed(self, parts: torch.Tensor) -> torch.Tensor:
        return parts.sum(0).to(torch.bfloat16) if len(parts) > 1 else parts[0].to(torch.bfloat16)


def add_norm_calls(c: Case, bell: DeviceBell | None, fi: Any) -> tuple[Call, Call, Call | None]:
    def ours() -> None:
        add_norm(c.partials, None, c.residual, c.weight, EPS, c.out, c.m, ring=bell, pdl=True)

    def torchs() -> None:
        c.residual.add_(c.summed(c.partials))
        c.out.copy_(rms_norm(c.residual, c.weight, EPS))
        if bell is not None:
            bell.ring()

    def flashinfers() -> None:
        fi.norm.fused_add_rmsnorm(c.summed(c.partials), c.residual, c.weight, EPS)
        if bell is not None:
            bell.ring()

    return ours, torchs, flashinfers if fi else None


def rope_calls(c: Case, fi: Any) -> tuple[Call, Call, Call | None]:
    pages, offsets = c.slots // PAGE, c.slots % PAGE
    # One sequence a row, of one page, for FlashInfer's form of slots.
    indices, indptr = pages.int(), torch.arange(c.m + 1, dtype=torch.int32, device=DEVICE)
    batch, last_page, place = indptr[:-1].contiguous(), (offsets + 1).int(), offsets.int()
    k_pages, v_pages = c.layer[:, :, 0], c.layer[:, :, 1]
    cut = HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM

    def ours() -> None:
        rope_append(c.qkv, None, c.table, c.positions, c.slots, c.layer, c.q, c.m, pdl=True)

    def torchs() -> None:
        heads = c.summed(c.qkv).view(c.m, -1, DIM)
        rotated = apply_rotary(heads[:, : HEADS + KV_HEADS], c.table[c.positions])
        c.q.copy_(rotated[:, :HEADS])
        both = torch.stack([rotated[:, HEADS:], heads[:, HEADS + KV_HEADS :]], dim=2)
        c.layer[pages, :, :, offsets] = both

    def flashinfers() -> None:
        q, k, v = c.summed(c.qkv).split(cut, dim=-1)
        fi.rope.apply_rope_with_cos_sin_cache_inplace(c.positions, q, k, DIM, c.table)
        k, v = k.view(c.m, KV_HEADS, DIM), v.view(c.m, KV_HEADS, DIM)
        fi.page.append_paged_kv_cache(k, v, batch, place, (k_pages, v_pages), indices, indptr, last_page, "HND")

    return ours, torchs, flashinfers if fi else None


def silu_calls(c: Case, fi: Any) -> tuple[Call, Call, Call | None]:
    def ours() -> None:
        silu_mul(c.gate_up, c.act, pdl=True)

    def torchs() -> None:
        gate, up = c.gate_up.chunk(2, dim=-1)
        torch.mul(torch.nn.functional.silu(gate), up, out=c.act)

    def flashinfers() -> None:
        fi.activation.silu_and_mul(c.gate_up, out=c.act)

    return ours, torchs, flashinfers if fi else None


def embed_calls(c: Case, table: torch.Tensor) -> tuple[Call, Call, None]:
    def ours() -> None:
        embed(c.tokens, c.last, table, c.residual, c.m, pdl=True)

    def torchs() -> None:
        sampled = c.last[(-1 - c.tokens).clamp(min=0)].clamp(min=0)
        torch.index_select(table, 0, torch.where(c.tokens < 0, sampled, c.tokens), out=c.residual)

    return ours, torchs, None


def lines(fi: Any) -> Iterator[dict[str, Any]]:
    layer = torch.zeros(PAGES, KV_HEADS, 2, PAGE, DIM, dtype=torch.bfloat16, device=DEVICE)
    table = draw(VOCAB, HIDDEN)
    host = torch.zeros(8, dtype=torch.int64, pin_memory=True)
    bell = DeviceBell(DEVICE, host.data_ptr(), 0)
    for m in (*FEW, *MANY):
        c = Case(m, layer)
        kernels: list[tuple[str, tuple[Call, Call, Call | None], int]] = [
            ("add_norm", add_norm_calls(c, None, fi), HIDDEN * (c.partial_bytes + 6)),
            ("add_norm + ring", add_norm_calls(c, bell, fi), HIDDEN * (c.partial_bytes + 6)),
            ("rope_append", rope_calls(c, fi), QKV * (c.partial_bytes + 2) + 4 * DIM),
            ("silu_mul", silu_calls(c, fi), WIDE * 6),
            ("embed", embed_calls(c, table), HIDDEN * 4),
        ]
        for name, (ours, torchs, flashinfers), row_bytes in kernels:
            c.residual.zero_()
            micros = timed(ours, c.calls)
            c.residual.zero_()
            line = {"kernel": name, "m": m, "us": micros, "torch_us": timed(torchs, c.calls)}
            c.residual.zero_()
            line["flashinfer_us"] = timed(flashinfers, c.calls) if flashinfers else None
            line["tb_s"] = m * row_bytes / micros / 1e6
            yield line
    micros = timed(lambda: bell.ring(pdl=True), 32)
    yield {"kernel": "ring alone", "m": 0, "us": micros, "torch_us": None, "flashinfer_us": None, "tb_s": 0.0}
    region = torch.zeros(LAYERS, 64, KV_HEADS, 2, PAGE, DIM, dtype=torch.bfloat16, device=DEVICE)
    for n in (1, 32):
        src = torch.arange(n, device=DEVICE)
        dst = src + 32

        def ours(src: torch.Tensor = src, dst: torch.Tensor = dst) -> None:
            copy_pages(region, src, dst, pdl=True)

        def torchs(src: torch.Tensor = src, dst: torch.Tensor = dst) -> None:
            region[:, dst] = region[:, src]

        micros = timed(ours, 8)
        moved = 2 * n * LAYERS * region.stride(1) * 2
        line = {"kernel": "copy_pages", "m": n, "us": micros, "torch_us": timed(torchs, 8), "flashinfer_us": None}
        yield {**line, "tb_s": moved / micros / 1e6}


def sweep() -> Iterator[dict[str, Any]]:
    """add_norm and rope_append with other numbers of warps and registers than they choose."""
    layer = torch.zeros(PAGES, KV_HEADS, 2, PAGE, DIM, dtype=torch.bfloat16, device=DEVICE)
    for m in (1, 64, 8192):
        c = Case(m, layer)
        splits, stride = len(c.partials), c.partials.stride(0) if len(c.partials) > 1 else 0
        for warps in (4, 8, 16, 32):
            for registers in (None, min(255, 65536 // (32 * warps)) if c.few else 64):
                constants = {"HIDDEN": HIDDEN, "BLOCK": HIDDEN, "SPLITS": splits, "BIAS": False, "RING": False}
                options = {**constants, "NATIVE": True, "num_warps": warps, "maxnreg": registers, **pdl.options(True)}

                def norm_call(c: Case = c, stride: int = stride, options: Any = options) -> None:
                    args = (c.partials, stride, c.weight, c.residual, c.weight, c.out, c.weight, EPS)
                    norm.add_norm_kernel[(c.m,)](*args, **options)

                what = f"add_norm warps {warps} registers {registers}"
                yield {"kernel": what, "m": m, "us": timed(norm_call, c.calls)}
        for heads in (2, 4, 8, 16, 32):
            for warps in sorted({max(heads // 4, 1), max(heads // 2, 1)}):
                constants = {"Q_HEADS": HEADS, "KV_HEADS": KV_HEADS, "DIM": DIM, "PAGE": PAGE, "HEADS": heads}
                options = {**constants, "PAIRS": DIM // 2, "SPLITS": splits, "BIAS": False, "num_warps": warps}
                options |= {"maxnreg": 168 if c.few else None, **pdl.options(True)}
                grid = (m * triton.cdiv(HEADS + 2 * KV_HEADS, heads),)

                def rope_call(c: Case = c, grid: Any = grid, options: Any = options) -> None:
                    stride = c.qkv.stride(0) if len(c.qkv) > 1 else 0
                    args = (c.qkv, stride, c.qkv, c.table, c.positions, c.slots, c.layer, c.q)
                    rope.rope_append_kernel[grid](*args, **options)

                yield {"kernel": f"rope_append heads {heads} warps {warps}", "m": m, "us": timed(rope_call, c.calls)}


def show(line: dict[str, Any]) -> None:
    others = [line.get("torch_us"), line.get("flashinfer_us")]
    cells = " ".join(f"{x:9.2f} ({x / line['us']:4.1f}x)" if x else " " * 17 for x in others)
    print(f"{line['kernel']:34s} {line['m']:6d} {line['us']:9.2f} {cells} {line.get('tb_s', 0):6.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    torch.cuda.set_device(0)
    if not pdl.available(torch.device(DEVICE)):
        raise SystemExit("needs a GPU with programmatic dependent launch (compute capability 9.0)")
    fi = built_flashinfer()
    print(f"{'kernel':34s} {'rows':>6s} {'us':>9s} {'torch us':>9s} {'':7s} {'flashinfer us':>17s} {'TB/s':>6s}")
    results = []
    for line in sweep() if args.sweep else lines(fi):
        show(line)
        results.append(line)
    if args.out:
        machine = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "triton": triton.__version__}
        machine |= {"python": platform.python_version(), "flashinfer": getattr(fi, "__version__", None)}
        args.out.write_text(json.dumps({"machine": machine, "lines": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
