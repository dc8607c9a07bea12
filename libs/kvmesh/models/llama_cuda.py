"""Llama and its look-alikes on a GPU: the same steps for a captured decode graph and for an eager step of prompts.

A matrix product leaves partial sums (splits, rows, width) in any float type; whatever comes next in the model adds them
up, so that splitting a product over the whole machine costs no launch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from kvmesh.errors import InvalidArgument
from kvmesh.layers.cuda.activation import silu_mul
from kvmesh.layers.cuda.decode_attention import HEAD_DIMS, QUERIES
from kvmesh.layers.cuda.doorbell import DeviceBell
from kvmesh.layers.cuda.embed import embed
from kvmesh.layers.cuda.norm import add_norm
from kvmesh.layers.cuda.pdl import available
from kvmesh.layers.cuda.rope import rope_append
from kvmesh.layers.cuda.skinny import MAX_ROWS, row_bucket, skinny_gate_up, skinny_linear, splits_for
from kvmesh.loading.config import ModelConfig
from kvmesh.models.llama import BlockWeights, LlamaWeights, full_group


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """A step's rows on the device. tokens, positions int32 (R,), slots int64 (R,); R >= count, the rest is padding.
    last: tokens of the step before."""

    count: int
    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    last: torch.Tensor


class Attend(Protocol):
    """q (R, heads, head_dim) over layer number `layer` → out (R, heads, head_dim), bf16. kv: the rows' own K and V in
    one piece, (R, 2, kv_heads, head_dim), in steps with prompts."""

    def __call__(self, layer: int, q: torch.Tensor, kv: torch.Tensor | None, out: torch.Tensor) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Last:
    """Rows whose hidden states are wanted, where most are not: behind the last layer's KV, only they go on.

    rows: int64 (count,), count <= MAX_ROWS; none at all with one rank alone, whose KV needs no collective. attend: for
    them alone.
    """

    rows: torch.Tensor
    attend: Attend
    scratch: Scratch


class Scratch:
    """Activations of at most MAX_ROWS rows at addresses that never change. Contents are anybody's between two uses."""

    def __init__(self, model: CudaLlama) -> None:
        c = model.config
        width = model.qkv_width
        shapes = [(width, c.hidden_size), (c.hidden_size, model.q_width), (c.hidden_size, model.wide)]
        if c.mlp_bias:
            # No epilogue: see `_Skinny.gate_up`.
            shapes.append((2 * model.wide, c.hidden_size))
        partial = max(
            splits_for(m, n, k) * row_bucket(m) * n for n, k in shapes for m in (1, 2, 4, 8, 16, 32, 64, MAX_ROWS)
        )

        def take(count: int, dtype: torch.dtype) -> torch.Tensor:
            # Zeros: rows that no kernel wrote yet are read by products whose result nobody reads; no NaN in them.
            return torch.zeros(count, dtype=dtype, device=model.device)

        self.partial = take(partial, torch.float32)
        self.residual = take(MAX_ROWS * c.hidden_size, torch.bfloat16)
        self.normed = take(MAX_ROWS * c.hidden_size, torch.bfloat16)
        self.q = take(MAX_ROWS * model.q_width, torch.bfloat16)
        self.attended = take(MAX_ROWS * model.q_width, torch.bfloat16)
        self.act = take(MAX_ROWS * model.wide, torch.bfloat16)


def check_served(config: ModelConfig, group: int, ranks: int) -> None:
    """Raises InvalidArgument for shapes that the kernels do not have. group: queries per KV head."""
    widths = (config.hidden_size, config.intermediate_size // ranks)
    if config.head_dim not in HEAD_DIMS or group > QUERIES or any(width % 16 for width in widths):
        raise InvalidArgument(
            f"not served on CUDA: {group} queries per KV head (at most {QUERIES}) of {config.head_dim} (one of "
            f"{HEAD_DIMS}), widths {widths} (multiples of 16)",
            details={"field": "model"},
        )


class CudaLlama:
    """Weights on one GPU and the forward pass. Everything is queued on the current stream; nothing is waited for."""

    backend = "cuda"

    def __init__(self, weights: LlamaWeights, device: torch.device) -> None:
        c = self.config = weights.config
        self.device, self.tp = device, weights.tp
        self.heads, self.kv_heads = weights.heads, weights.kv_heads
        check_served(c, self.heads // self.kv_heads, self.tp.size)
        self.pdl = available(device)
        self.rotary = weights.rotary

        def here(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device)

        self.norm = here(weights.norm)
        # Whole on every rank: a collective a step costs more than its memory. The head is this rank's part;
        # `whole_head`, for the scores of prompts, is there on rank 0.
        self.embed = self._gathered(here(weights.embed))
        tied = weights.head is weights.embed
        part, rows = here(weights.head) if not tied else None, len(weights.head)
        self.head = self.embed[self.tp.rank * rows :][:rows] if part is None else part
        whole = self.embed if part is None else self._gathered(part)
        self.whole_head = whole[: c.vocab_size] if self.tp.rank == 0 else None
        del part, whole
        self.blocks = [block.to(device) for block in weights.blocks()]
        self.kv_group = full_group(c)
        self.q_width = self.heads * c.head_dim
        self.qkv_width = self.q_width + 2 * self.kv_heads * c.head_dim
        self.wide = self.blocks[0].down.shape[1]
        self.kv_scales: tuple[float, float] | None = None
        self.cos_sin = torch.empty(0, c.head_dim, device=device)

    def _gathered(self, part: torch.Tensor) -> torch.Tensor:
        """The ranks' rows of a matrix, one after the other. Waits for them."""
        if self.tp.size == 1:
            return part
        whole = part.new_empty(self.tp.size * len(part), part.shape[1])
        self.tp.all_gather_into(whole, part)
        if self.device.type == "cuda":
            # Steps are queued on a stream of their own.
            torch.cuda.current_stream(self.device).synchronize()
        return whole

    def prepare(self, max_positions: int, kv_scales: tuple[float, float] | None = None) -> None:
        """Fill the rotary table for positions below max_positions. kv_scales: of e4m3 pages; None: pages are bf16."""
        self.kv_scales = kv_scales
        self.cos_sin = self.rotary.ensure(max_positions)[:max_positions].to(self.device)

    def forward(
        self, rows: Rows, layers: list[torch.Tensor], attend: Attend, *, bell: DeviceBell | None,
        scratch: Scratch | None = None, kv_ready: Callable[[int], None] | None = None, last: Last | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Normed hidden states bf16 (R, hidden); with `last`, of its rows alone.

        layers: KV of each layer, (pages, kv_heads, 2, page_size, head_dim), of the type told to `prepare`. bell: rung
        on the device for each layer once its KV is in its pages. kv_ready(i): layer i's KV was queued. scratch: where
        at most MAX_ROWS rows live (the products are then the memory-bound kind); None: allocate, multiply by cuBLAS.
        """
        c, m, pdl = self.config, rows.count, self.pdl
        alone = self.tp.size == 1
        # Behind a collective, whose kernel knows nothing of the rule of `layers.cuda.pdl`.
        behind = pdl and alone
        run: _Skinny | _Blas = _Skinny(self, scratch, m) if scratch is not None else _Blas(self, len(rows.tokens))
        residual, normed = run.residual, run.normed
        self._embed(rows, residual, m)
        partials: torch.Tensor | None = None
        bias: torch.Tensor | None = None
        for i, block in enumerate(self.blocks):
            add_norm(partials, bias, residual, block.attn_norm, c.rms_eps, normed, m, ring=None, pdl=behind)
            qkv = run.linear(normed, block.qkv)
            rope_append(
                qkv, block.qkv_bias, self.cos_sin, rows.positions, rows.slots, layers[i], run.q, m, kv_out=run.kv,
                kv_scales=self.kv_scales, pdl=pdl,
            )  # fmt: skip
            if alone and kv_ready is not None:
                kv_ready(i)
            if last is not None and i + 1 == len(self.blocks):
                if not len(last.rows):
                    if bell is not None:
                        bell.ring()
                    return normed[:0]
                m, attend, whole = len(last.rows), last.attend, run
                run = _Skinny(self, last.scratch, m)
                torch.index_select(whole.q, 0, last.rows, out=run.q[:m])
                torch.index_select(residual, 0, last.rows, out=run.residual[:m])
                residual, normed = run.residual, run.normed
            attend(i, run.q, run.kv, run.attended)
            out, bias = self._reduced(
                run.linear(run.attended.view(len(run.attended), -1), block.out), block.out_bias, m
            )
            if not alone and kv_ready is not None:
                # Their sum is queued: what follows it comes behind the append of every rank.
                kv_ready(i)
            add_norm(out, bias, residual, block.mlp_norm, c.rms_eps, normed, m, ring=bell, pdl=behind)
            partials, bias = self._reduced(run.linear(run.gate_up(normed, block), block.down), block.down_bias, m)
        add_norm(partials, bias, residual, self.norm, c.rms_eps, normed, m, ring=None, pdl=behind)
        return normed

    def _embed(self, rows: Rows, residual: torch.Tensor, m: int) -> None:
        embed(rows.tokens, rows.last, self.embed, residual, m, pdl=self.pdl)

    def _reduced(
        self, partials: torch.Tensor, bias: torch.Tensor | None, m: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Partial sums (splits, R, width) of this rank, and the bias that one rank has → what `add_norm` adds up: with
        several ranks, the sum of all (m, width)."""
        if self.tp.size == 1:
            return partials, bias
        mine = partials[0, :m] if len(partials) == 1 else partials[:, :m].sum(0)
        if bias is not None:
            mine += bias
        return self.tp.all_reduce(mine), None


class _Skinny:
    """Products of few rows, in scratch memory."""

    def __init__(self, model: CudaLlama, scratch: Scratch, m: int) -> None:
        rows, c = row_bucket(m), model.config
        self._model, self._scratch, self._m, self._rows = model, scratch, m, rows
        self.kv: torch.Tensor | None = None

        def view(buffer: torch.Tensor, *shape: int) -> torch.Tensor:
            return buffer[: rows * (buffer.numel() // MAX_ROWS)].view(rows, *shape)

        self.residual = view(scratch.residual, c.hidden_size)
        self.normed = view(scratch.normed, c.hidden_size)
        self.q = view(scratch.q, model.heads, c.head_dim)
        self.attended = view(scratch.attended, model.heads, c.head_dim)
        self.act = view(scratch.act, model.wide)

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        n, k = weight.shape
        splits = splits_for(self._m, n, k)
        out = self._scratch.partial[: splits * self._rows * n].view(splits, self._rows, n)
        skinny_linear(x, weight, out, self._m, pdl=self._model.pdl)
        return out

    def gate_up(self, x: torch.Tensor, block: BlockWeights) -> torch.Tensor:
        if block.gate_up_bias is not None:
            both = self.linear(x, block.gate_up).sum(0).add_(block.gate_up_bias).to(torch.bfloat16)
            silu_mul(both, self.act, pdl=False)
        else:
            skinny_gate_up(x, block.gate_up, self.act, self._m, pdl=self._model.pdl)
        return self.act


class _Blas:
    """Products of many rows; memory comes from torch's allocator."""

    def __init__(self, model: CudaLlama, rows: int) -> None:
        c = model.config

        def new(*shape: int) -> torch.Tensor:
            return torch.empty(rows, *shape, dtype=torch.bfloat16, device=model.device)

        self._model = model
        self.residual, self.normed = new(c.hidden_size), new(c.hidden_size)
        self.q, self.attended = new(model.heads, c.head_dim), new(model.heads, c.head_dim)
        self.kv: torch.Tensor | None = new(2, model.kv_heads, c.head_dim)
        self._act = new(model.wide)

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, weight.t())[None]

    def gate_up(self, x: torch.Tensor, block: BlockWeights) -> torch.Tensor:
        both = torch.mm(x, block.gate_up.t())
        if block.gate_up_bias is not None:
            both += block.gate_up_bias
        silu_mul(both, self._act, pdl=self._model.pdl)
        return self._act
