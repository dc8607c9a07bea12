"""Small random models on a GPU, and a driver for their runner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvmesh.engine.runner import SampleInput, SamplingParams, Slice, StepBatch, StepResult

GREEDY = SamplingParams(temperature=0.0)
BASE = {
    "vocab_size": 2000,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Queries per KV head: 3, 4, 1, 7.
SHAPES: dict[str, dict[str, Any]] = {
    "gqa3_d64": {},
    "gqa4_d128": {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128},
    "mha_d64_tied": {"num_key_value_heads": 9, "tie_word_embeddings": True},
    "bias_gqa7_d64": {
        "hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2, "attention_bias": True,
        "mlp_bias": True,
    },
}  # fmt: skip


def make_model(directory: Path, shape: str, gain: float = 1.5) -> torch.nn.Module:
    """Write a random Llama in bf16; returns it in fp32 on CPU. gain: of matrices; scores grow with its square."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(11)
    model = LlamaForCausalLM(LlamaConfig(**{**BASE, **SHAPES[shape]})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Large enough that attention is far from uniform and norms matter.
            scale = gain / parameter.shape[-1] ** 0.5 if parameter.dim() == 2 else 0.1
            parameter.copy_((torch.randn_like(parameter) * scale + (1.0 if parameter.dim() == 1 else 0.0)).bfloat16())
    model.to(torch.bfloat16).save_pretrained(directory)
    # Read again: the cast has rounded the rotary frequencies too.
    return LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def reference(model: torch.nn.Module, ids: Sequence[int]) -> torch.Tensor:
    """fp32 logits (tokens, vocab) by transformers on CPU."""
    with torch.inference_mode():
        return model(torch.tensor([list(ids)])).logits[0].float()


class PinnedBell:
    """A doorbell's host side in pinned memory."""

    def __init__(self, value: int = 0) -> None:
        self.word = torch.full((1,), value, dtype=torch.int64, pin_memory=True)
        self.device_pointer = self.word.data_ptr()

    @property
    def value(self) -> int:
        return int(self.word[0])


class Driver:
    """A bound CudaRunner over pages of garbage, handed out in a shuffled order."""

    def __init__(self, runner: Any, page_size: int = 16, num_pages: int = 512, bell: Any = None) -> None:
        self.runner = runner
        self.page_size = page_size
        self.layout = runner.layout(page_size, num_pages)
        group = self.layout.groups[0]
        # 0xff: NaN in bf16, wherever a page was not written.
        self.region = torch.full((self.layout.region_bytes(group),), 255, dtype=torch.uint8, device=runner.device)
        self.bell = bell if bell is not None else PinnedBell()
        runner.bind_cuda(self.layout, {group.name: self.region}, self.bell)
        self.free = np.random.default_rng(3).permutation(num_pages).tolist()
        self.steps = 0

    def table(self, tokens: int) -> np.ndarray:
        return np.array([self.free.pop() for _ in range(-(-tokens // self.page_size))], dtype=np.int32)

    def slice(self, seq_id: int, ids: Sequence[int], start: int, table: np.ndarray, sample: bool = True,
              params: SamplingParams = GREEDY, **more: Any) -> Slice:  # fmt: skip
        samples = (SampleInput(params, 0, start + len(ids), [], []),) if sample else ()
        return Slice(seq_id, np.asarray(ids, np.int32), start, table, samples, **more)

    def batch(self, *slices: Slice, copies: Sequence[tuple[int, int]] = ()) -> StepBatch:
        self.steps += 1
        return StepBatch(self.steps, slices, copies)

    def run(self, *slices: Slice, copies: Sequence[tuple[int, int]] = ()) -> StepResult:
        return self.runner.execute(self.batch(*slices, copies=copies))

    def logits(self, *slices: Slice) -> torch.Tensor:
        """fp32 (slices, vocab) on CPU of slices that all sample: one-token ones first, as the runner orders rows."""
        self.run(*slices)
        return self.runner._head.logits[: len(slices)].cpu().clone()


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 0.03) -> None:
    """Relative in norm: bf16 activations over a few layers differ by 1 to 2 %."""
    error = float((ours.double() - theirs.double()).norm() / theirs.double().norm())
    assert error < tolerance, f"relative error {error:.4f}"
