"""The torch backend of `Runner`: weights, KV views, one forward pass per step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from kvmesh.engine.failures import SequencesFailed
from kvmesh.engine.runner import (
    ModelInfo,
    SampleInput,
    Slice,
    SliceResult,
    StepBatch,
    StepResult,
    TokenLogprobs,
)
from kvmesh.engine.sampler import NO_TOKEN, sample_rows
from kvmesh.engine.sampling.logprobs import token_logprobs
from kvmesh.errors import Internal, InvalidArgument
from kvmesh.kv.layout import LAYOUT_VERSION, KvLayout
from kvmesh.kv.ring import Doorbell
from kvmesh.layers.paged import PagedKv, StepPlan, plan_step
from kvmesh.layers.parallel import SINGLE, TensorParallel
from kvmesh.loading.source import open_checkpoint, resolve
from kvmesh.loading.weights import Progress, WeightReader, torch_dtype
from kvmesh.models.llama import Model
from kvmesh.models.registry import build_model

DTYPES = ("bf16", "fp32")
# Prompt logprobs need a row of the vocabulary per token: so many rows at a time (64 rows of 50k fp32 are 12 MiB).
_LOGPROB_ROWS = 64


@dataclass(frozen=True, slots=True)
class StepLogits:
    """What `forward_logits` computed.

    logits: fp32 (rows, vocab), one row per slice that samples; `rows[i]` is the row of the batch's slice i, or None.
    hidden and plan: final hidden states (tokens, hidden) in the plan's order. prompt: by slice, where asked.
    """

    logits: torch.Tensor
    rows: list[int | None]
    hidden: torch.Tensor
    plan: StepPlan
    prompt: dict[int, Sequence[TokenLogprobs]] = field(default_factory=dict)

    def hidden_of(self, index: int) -> torch.Tensor:
        """Hidden states (num_tokens, hidden) of the batch's slice `index`."""
        place = self.plan.order.index(index)
        begin = self.plan.first_row[place]
        ends = [*self.plan.first_row[1:], len(self.hidden)]
        return self.hidden[begin : ends[place]]


class TorchRunner:
    """`Runner` on CPU, or one rank of several (`kvmesh.engine.parallel` makes one runner of them). Not thread-safe: the
    engine core's thread alone calls it."""

    def __init__(self, model: Model, info: ModelInfo, tp: TensorParallel = SINGLE) -> None:
        self.model = model
        self.info = info
        self.tp = tp
        self._kv: PagedKv | None = None
        self._doorbell: Doorbell | None = None

    @classmethod
    def load(
        cls,
        spec: str,
        dtype: str = "bf16",
        threads: int | None = None,
        progress: Progress | None = None,
        backend: str = "auto",
        tp: TensorParallel = SINGLE,
    ) -> TorchRunner:
        """Load a model (`kvmesh.loading.source.resolve` says what a spec is).

        threads: of torch's pool, for the whole process; None leaves it. progress(done, total) counts stored bytes.
        backend: `native` kernels, `torch`, or `auto` (native where it can be built and covers the model).
        tp: this rank's place; only its part of the weights is kept.
        NotFound, DataLoss and InvalidArgument as the loaders raise them.
        """
        if dtype not in DTYPES:
            raise InvalidArgument(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
        if threads is not None:
            torch.set_num_threads(threads)
        checkpoint = open_checkpoint(resolve(spec))
        try:
            with torch.inference_mode():
                reader = WeightReader(checkpoint, torch_dtype(dtype), progress)
                model = build_model(checkpoint.config, reader, backend, tp)
            described = checkpoint.describe()
        finally:
            checkpoint.close()
        return cls(model, ModelInfo.of(described, dtype), tp)

    def layout(self, page_size: int, num_pages: int) -> KvLayout:
        """The architecture's one group, in the model's dtype."""
        return KvLayout(LAYOUT_VERSION, self.info.dtype, page_size, (self.model.kv_group,), num_pages, self.tp.size)

    def bind(self, layout: KvLayout, regions: Mapping[str, memoryview], doorbell: Doorbell) -> None:
        """Adopt KV memory. InvalidArgument when the layout is not this model's or a region is too small."""
        if (
            layout.fingerprint() != self.layout(layout.page_size, layout.num_pages).fingerprint()
            or layout.tp != self.tp.size
        ):
            raise InvalidArgument("the kv layout is not this model's")
        group = self.model.kv_group.name
        if group not in regions:
            raise InvalidArgument(f"no region for kv group {group!r}")
        self._kv = PagedKv(layout, group, regions[group])
        self.model.bind(self._kv)
        self._doorbell = doorbell

    def prepare(self, batch: StepBatch) -> StepPlan:
        """Check a batch and plan it; nothing is computed and no other rank needed. Internal and InvalidArgument for a
        batch that cannot run."""
        kv = self._kv
        if kv is None:
            raise Internal("execute before bind")
        if not batch.slices:
            raise Internal("a step without slices")
        if any(not 0 <= page < kv.num_pages for pair in batch.copies for page in pair):
            raise Internal(f"a copy names a page outside 0..{kv.num_pages - 1}")
        slices = [(s.token_ids, s.start, s.block_table) for s in batch.slices]
        return plan_step(slices, kv, self.info.vocab_size, self.model.backend == "torch")

    @torch.inference_mode()
    def compute(
        self, batch: StepBatch, plan: StepPlan, on_layer: Callable[[int], None] | None = None, score: bool = True
    ) -> StepLogits:
        """All of a step but sampling: copies, forward pass, doorbell rings, logits, prompt logprobs. With several ranks
        each must call it with the same batch; `score` False on those whose logprobs nobody reads."""
        kv, doorbell = self._kv, self._doorbell
        if kv is None or doorbell is None:
            raise Internal("execute before bind")
        kv.copy_pages(batch.copies)

        def kv_ready(layer: int) -> None:
            doorbell.ring()
            if on_layer is not None:
                on_layer(layer)

        hidden = self.model.forward(plan, kv, kv_ready)
        rows: list[int | None] = [None] * len(batch.slices)
        last = [*plan.first_row[1:], len(hidden)]
        sampled = [place for place, i in enumerate(plan.order) if batch.slices[i].samples]
        for row, place in enumerate(sampled):
            rows[plan.order[place]] = row
        picked = hidden[[last[place] - 1 for place in sampled]]
        step = StepLogits(self.model.logits(picked), rows, hidden, plan)
        for i, slice_ in enumerate(batch.slices):
            if slice_.prompt_logprobs is not None:
                step.prompt[i] = self._prompt_logprobs(slice_, step.hidden_of(i), score)
        return step

    def forward_logits(self, batch: StepBatch, on_layer: Callable[[int], None] | None = None) -> StepLogits:
        """`prepare` and `compute`."""
        return self.compute(batch, self.prepare(batch), on_layer)

    @torch.inference_mode()
    def sample(self, batch: StepBatch, step: StepLogits) -> StepResult:
        """Tokens from a computed step. Raises SequencesFailed for sequences whose logits are not finite, them alone."""
        flat: list[SampleInput] = []
        rows: list[int] = []
        for slice_, row in zip(batch.slices, step.rows, strict=True):
            if row is not None:
                flat.extend(slice_.samples)
                rows.extend([row] * len(slice_.samples))
        tokens, scores = sample_rows(step.logits, rows, flat) if flat else ([], [])
        results = []
        at = 0
        for i, slice_ in enumerate(batch.slices):
            end = at + len(slice_.samples)
            results.append(SliceResult(slice_.seq_id, tokens[at:end], scores[at:end], step.prompt.get(i, ())))
            at = end
        failed = [result.seq_id for result in results if NO_TOKEN in result.token_ids]
        if failed:
            kept = StepResult([result for result in results if result.seq_id not in failed])
            raise SequencesFailed("the model's logits are not finite", failed, kept)
        return StepResult(results)

    def execute(self, batch: StepBatch, on_layer: Callable[[int], None] | None = None) -> StepResult:
        """See `Runner.execute` and `sample`."""
        return self.sample(batch, self.forward_logits(batch, on_layer))

    def _prompt_logprobs(self, slice_: Slice, hidden: torch.Tensor, score: bool) -> Sequence[TokenLogprobs]:
        targets = [int(t) for t in slice_.token_ids[1:]]
        if slice_.next_token is not None:
            targets.append(slice_.next_token)
        scores: list[TokenLogprobs] = []
        for at in range(0, len(targets), _LOGPROB_ROWS):
            part = targets[at : at + _LOGPROB_ROWS]
            logits = self.model.logits(hidden[at : at + len(part)])
            if score:
                scores.extend(
                    token_logprobs(row, token, slice_.prompt_logprobs or 0)
                    for row, token in zip(logits.numpy(), part, strict=True)
                )
        return scores

    def close(self) -> None:
        """Drop weights and KV views."""
        self._kv = None
        self._doorbell = None
        del self.model
