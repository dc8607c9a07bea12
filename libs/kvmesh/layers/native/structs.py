"""The kernels' structures in ctypes, and weights in the kernels' panel order. Mirrors `kernels.cpp`."""

from __future__ import annotations

import ctypes

import torch

PANEL = 32
LANES = 16
GROUP = 4
HEAD_DIMS = frozenset({16, 32, 64, 96, 128})

_P, _I = ctypes.c_void_p, ctypes.c_int64


class Linear(ctypes.Structure):
    """(n, k) weight in panels; bias fp32 (n,) or null."""

    _fields_ = [("panels", _P), ("bias", _P), ("n", _I), ("k", _I)]


class Model(ctypes.Structure):
    """Sizes that all layers share."""

    _fields_ = [
        ("hidden", _I),
        ("heads", _I),
        ("kv_heads", _I),
        ("dim", _I),
        ("page_size", _I),
        ("eps", ctypes.c_float),
    ]


class Layer(ctypes.Structure):
    """One decoder layer's weights and the address of its KV pages."""

    _fields_ = [
        ("attn_norm", _P),
        ("mlp_norm", _P),
        ("qkv", Linear),
        ("out", Linear),
        ("gate_up", Linear),
        ("down", Linear),
        ("kv", _P),
    ]


class Step(ctypes.Structure):
    """One step's activations and plan."""

    _fields_ = [
        ("rows", _I),
        ("decode_rows", _I),
        ("table_width", _I),
        ("x", _P),
        ("qkv", _P),
        ("attn", _P),
        ("act", _P),
        ("packed", _P),
        ("scores", _P),
        ("score_stride", _I),
        ("cos_sin", _P),
        ("pages", _P),
        ("offsets", _P),
        ("tables", _P),
        ("lengths", _P),
        ("threads", ctypes.c_int32),
    ]


def _pad_rows(weight: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -len(weight) % multiple
    return torch.nn.functional.pad(weight, (0, 0, 0, missing)) if missing else weight


class PackedLinear:
    """A bf16 weight (n, k) in panels of 32 rows, and the structure that names it. Owns the memory.

    `paired` is for gate over up (2 i, k): a panel then holds 16 gate rows and the same 16 up rows.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, paired: bool = False) -> None:
        n, k = weight.shape
        if paired:
            gate, up = (_pad_rows(half, LANES).view(-1, LANES, k) for half in weight.chunk(2))
            rows = torch.stack([gate, up], dim=1)
        else:
            rows = _pad_rows(weight, PANEL).view(-1, 2, LANES, k)
        self.panels = rows.permute(0, 3, 2, 1).to(torch.bfloat16).contiguous()
        self.bias = bias.float().contiguous() if bias is not None else None
        address = self.bias.data_ptr() if self.bias is not None else None
        self.struct = Linear(self.panels.data_ptr(), address, n, k)
