"""Llama on the compiled kernels: bf16 weights and KV, fp32 activations, two calls a layer (several ranks: three)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvmesh.errors import Internal
from kvmesh.layers.attention import prefill_chunk
from kvmesh.layers.native import structs
from kvmesh.layers.native.build import load_library
from kvmesh.layers.native.structs import PackedLinear
from kvmesh.layers.norm import rms_norm
from kvmesh.layers.paged import PagedKv, StepPlan
from kvmesh.layers.parallel import Embedding
from kvmesh.loading.config import ModelConfig
from kvmesh.models.llama import BlockWeights, LlamaWeights, full_group


def supports(config: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether the kernels cover a model; other models run on torch."""
    return dtype == torch.bfloat16 and config.mla is None and config.head_dim in structs.HEAD_DIMS


class _Layer:
    """A layer's packed weights; `struct` is what the kernels get. Holds every tensor that the struct points into."""

    def __init__(self, weights: BlockWeights) -> None:
        self.norms = (weights.attn_norm.float(), weights.mlp_norm.float())
        self.linears = (
            PackedLinear(weights.qkv, weights.qkv_bias),
            PackedLinear(weights.out, weights.out_bias),
            PackedLinear(weights.gate_up, weights.gate_up_bias, paired=True),
            PackedLinear(weights.down, weights.down_bias),
        )
        norms = [norm.data_ptr() for norm in self.norms]
        self.struct = structs.Layer(*norms, *(linear.struct for linear in self.linears), None)


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Activations of a step, fp32, reused while steps fit."""

    rows: int
    qkv: torch.Tensor
    attn: torch.Tensor
    act: torch.Tensor
    share: torch.Tensor
    packed: torch.Tensor


class NativeLlama:
    """`Model` on the kernels. NativeUnavailable when they cannot be built."""

    backend = "native"

    def __init__(self, weights: LlamaWeights) -> None:
        self._library = load_library()
        c = self.config = weights.config
        tp = self.tp = weights.tp
        self.heads, self.kv_heads = weights.heads, weights.kv_heads
        self.rotary, self.embed = weights.rotary, Embedding(weights.embed, c.vocab_size, tp)
        self.norm = weights.norm.float()
        self.layers = [_Layer(block) for block in weights.blocks()]
        self.kv_group = full_group(c)  # after the layers were found, as in TorchLlama
        self.head = PackedLinear(weights.head, None)
        self._model = structs.Model(c.hidden_size, self.heads, self.kv_heads, c.head_dim, 0, c.rms_eps)
        self._buffers: _Buffers | None = None
        self._scores = torch.empty(0)

    def bind(self, kv: PagedKv) -> None:
        """Point every layer at its pages."""
        self._model.page_size = kv.page_size
        for layer, pages in zip(self.layers, kv.layers, strict=True):
            layer.struct.kv = pages.data_ptr()

    def _scratch(self, rows: int) -> _Buffers:
        if self._buffers is None or self._buffers.rows < rows:
            c = self.config
            attn, wide = self.heads * c.head_dim, c.intermediate_size // self.tp.size
            widths = (attn + 2 * self.kv_heads * c.head_dim, attn, wide, c.hidden_size if self.tp.size > 1 else 0)
            qkv, out, act, share = (torch.empty((rows, width), dtype=torch.float32) for width in widths)
            packed = torch.empty(rows * max(c.hidden_size, attn, wide), dtype=torch.float32)
            self._buffers = _Buffers(rows, qkv, out, act, share, packed)
        return self._buffers

    def forward(self, plan: StepPlan, kv: PagedKv, kv_ready: Callable[[int], None]) -> torch.Tensor:
        """See `Model.forward`; the hidden states are fp32."""
        if not self._model.page_size:
            raise Internal("forward before bind")
        c, rows, threads = self.config, len(plan.token_ids), torch.get_num_threads()
        x = self.embed(plan.token_ids).float()
        cos_sin = self.rotary.ensure(plan.max_position + 1)[plan.positions]
        scratch = self._scratch(rows)
        longest = -(-(plan.max_position + 1) // structs.LANES) * structs.LANES
        need = threads * structs.GROUP * longest
        if self._scores.numel() < need:
            self._scores = torch.empty(2 * need, dtype=torch.float32)
        step = structs.Step(
            rows,
            plan.num_decode,
            plan.tables.shape[1],
            x.data_ptr(),
            scratch.qkv.data_ptr(),
            scratch.attn.data_ptr(),
            scratch.act.data_ptr(),
            scratch.packed.data_ptr(),
            self._scores.data_ptr(),
            longest,
            cos_sin.data_ptr(),
            plan.pages.data_ptr(),
            plan.offsets.data_ptr(),
            plan.tables.data_ptr(),
            plan.lengths.data_ptr(),
            threads,
        )
        q = scratch.qkv[:rows, : self.heads * c.head_dim].view(rows, self.heads, c.head_dim)
        attn = scratch.attn[:rows].view(rows, self.heads, c.head_dim)
        attention_in, attention_out = self._library.kvmesh_attention_in, self._library.kvmesh_attention_out
        alone, share = self.tp.size == 1, scratch.share[:rows]
        share_ref = ctypes.c_void_p(share.data_ptr())
        model, step_ref = ctypes.byref(self._model), ctypes.byref(step)
        for i, layer in enumerate(self.layers):
            ref = ctypes.byref(layer.struct)
            attention_in(model, ref, step_ref)
            if alone:
                kv_ready(i)
            for chunk in plan.chunks:
                begin, end = chunk.rows
                attn[begin:end] = prefill_chunk(kv.layers[i], q[begin:end], chunk, kv)
            if alone:
                attention_out(model, ref, step_ref)
                continue
            self._library.kvmesh_attention_share(model, ref, step_ref, share_ref)
            x += self.tp.all_reduce(share)
            # Their sum is here, so every rank has appended.
            kv_ready(i)
            self._library.kvmesh_mlp_share(model, ref, step_ref, share_ref)
            x += self.tp.all_reduce(share)
        return rms_norm(x, self.norm, c.rms_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model.logits`."""
        rows = len(hidden)
        out = torch.empty((rows, self.head.struct.n), dtype=torch.float32)
        if rows:
            hidden = hidden.contiguous()
            packed = torch.empty_like(hidden)
            self._library.kvmesh_linear(
                ctypes.byref(self.head.struct),
                ctypes.c_void_p(hidden.data_ptr()),
                ctypes.c_int64(rows),
                ctypes.c_void_p(packed.data_ptr()),
                ctypes.c_void_p(out.data_ptr()),
                ctypes.c_int32(torch.get_num_threads()),
            )
        return out if self.tp.size == 1 else self.tp.all_gather(out)[:, : self.config.vocab_size].contiguous()
