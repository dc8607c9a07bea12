"""The CUDA backend of `Runner`: steps are queued on one stream, one ahead of the one being read.

A step of one-token rows alone replays a captured graph. Any other step (prompt chunks, with or without decode rows
beside them) is launched kernel by kernel.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch

from kvmesh.engine.cuda.attention import DecodeAttention
from kvmesh.engine.cuda.flight import Flight
from kvmesh.engine.cuda.graphs import DecodeGraphs, ladder
from kvmesh.engine.cuda.head import CudaHead
from kvmesh.engine.cuda.lost import leave_to_the_process
from kvmesh.engine.cuda.metadata import StepMetadata, StepShape, shape_of
from kvmesh.engine.cuda.page_type import PageType
from kvmesh.engine.cuda.parallel_head import ParallelHead
from kvmesh.engine.cuda.sampler import DeviceSampler
from kvmesh.engine.cuda.workspaces import told_what_to_lower, workspace_bytes
from kvmesh.engine.failures import DeviceFailed, first_line
from kvmesh.engine.runner import ModelInfo, SampleInput, Slice, StepBatch, StepResult, TokenLogprobs
from kvmesh.engine.sampling.processors import needs_processing
from kvmesh.errors import Internal, InvalidArgument, KvmeshError
from kvmesh.kv.layout import LAYOUT_VERSION, KvLayout
from kvmesh.kv.ring import Doorbell
from kvmesh.layers.cuda.decode_attention import PAGE_SIZES
from kvmesh.layers.cuda.doorbell import DeviceBell
from kvmesh.layers.cuda.pages import copy_pages
from kvmesh.layers.cuda.prefill_attention import PrefillAttention
from kvmesh.layers.cuda.skinny import MAX_ROWS
from kvmesh.layers.parallel import SINGLE, TensorParallel
from kvmesh.loading.random import open_reader
from kvmesh.loading.source import open_checkpoint, resolve
from kvmesh.loading.weights import Progress
from kvmesh.models.llama import LlamaWeights
from kvmesh.models.llama_cuda import CudaLlama, Last, Rows, Scratch

log = logging.getLogger(__name__)

# Steps whose results are in pinned memory at a time: one runs, one is read, one is queued.
TURNS = 3
# Prompt logprobs need a row of the vocabulary per token: so many rows at a time.
LOGPROB_ROWS = 64


class HostBell(Protocol):
    """The doorbell's host side, registered with the device."""

    device_pointer: int

    @property
    def value(self) -> int: ...


class CudaRunner:
    """`AsyncRunner` on one GPU, or one rank of several. Not thread-safe: the engine core's thread alone calls it."""

    def __init__(
        self, model: CudaLlama, info: ModelInfo, *, max_batch: int = 256, token_budget: int = 8192,
        max_model_len: int = 0, cuda_graphs: bool = True, max_graph_batch: int = 0, kv_dtype: str = "auto",
        k_scale: float = 1.0, v_scale: float = 1.0,
    ) -> None:  # fmt: skip
        """max_batch, token_budget: of a step. max_model_len 0: the model's. max_graph_batch: rows of the largest
        captured decode step, 0 = max_batch. kv_dtype, k_scale, v_scale: see `PageType.of`."""
        self.pages = PageType.of(kv_dtype, info.dtype, k_scale, v_scale)
        self.model = model
        self.info = info
        self.tp = model.tp
        self.device = model.device
        self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self.max_batch, self.token_budget = max_batch, max(token_budget, max_batch)
        self.max_model_len = min(max_model_len or info.max_model_len, info.max_model_len)
        # Measure: (start, end) of each step on the device.
        self.record_events = False
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._graphs = DecodeGraphs(ladder(min(max_graph_batch or max_batch, max_batch)) if cuda_graphs else [])
        self._bell: DeviceBell | None = None
        self._layers: list[torch.Tensor] = []
        self._last: dict[int, int] = {}
        self._turn = 0
        self._broken: str | None = None
        # Pinned memory of steps that may be under way goes when they are through, not when nobody awaits them any more.
        self._queued: deque[Flight] = deque(maxlen=TURNS)

    @classmethod
    def load(
        cls, spec: str, dtype: str, device: torch.device | str, progress: Progress | None = None,
        tp: TensorParallel = SINGLE, **options: Any,
    ) -> CudaRunner:  # fmt: skip
        """Load a model (`kvmesh.loading.source.resolve` says what a spec is) onto a GPU.

        options: of `__init__`. InvalidArgument for what this backend does not serve, Unavailable where the memory is
        not to be had; NotFound and DataLoss as the loaders raise them.
        """
        if dtype != "bf16":
            raise InvalidArgument(f"dtype {dtype!r} is not served on CUDA, only bf16", details={"field": "dtype"})
        device = torch.device(device)
        checkpoint = open_checkpoint(resolve(spec))
        try:
            if checkpoint.config.mla is not None:
                raise InvalidArgument("latent attention is not served on CUDA yet", details={"field": "model"})
            with torch.inference_mode(), torch.cuda.device(device), told_what_to_lower("weights"):
                reader = open_reader(checkpoint, torch.bfloat16, progress, device)
                model = CudaLlama(LlamaWeights(checkpoint.config, reader, tp), device)
            described = checkpoint.describe()
        finally:
            checkpoint.close()
        return cls(model, ModelInfo.of(described, dtype), **options)

    # -- memory

    def layout(self, page_size: int, num_pages: int) -> KvLayout:
        """The architecture's one group."""
        group, of = self.model.kv_group, self.pages
        return KvLayout(LAYOUT_VERSION, of.dtype, page_size, (group,), num_pages, self.tp.size, of.scales)

    def workspace_bytes(self) -> int:
        """Device memory that `bind_cuda` and the largest step take beside weights and KV, from above."""
        return workspace_bytes(self.model, self.max_batch, self.token_budget, self.max_model_len)

    def bind(self, layout: KvLayout, regions: Mapping[str, memoryview], doorbell: Doorbell) -> None:
        """Refused: this runner's pages are in device memory (`bind_cuda`)."""
        raise Internal("a CUDA runner is bound with bind_cuda")

    def bind_cuda(self, layout: KvLayout, regions: Mapping[str, Any], doorbell: HostBell | None) -> None:
        """Adopt KV memory: arrays of bytes on the device (`__cuda_array_interface__`), one per group. Then everything
        a step needs is allocated, compiled and captured. doorbell None: somebody else rings.

        InvalidArgument when the layout is not this model's, Unavailable where memory is short.
        """
        if (
            layout.fingerprint() != self.layout(layout.page_size, layout.num_pages).fingerprint()
            or layout.tp != self.tp.size
        ):
            raise InvalidArgument("the kv layout is not this model's")
        if layout.page_size not in PAGE_SIZES:
            raise InvalidArgument(f"on CUDA a page has one of {PAGE_SIZES} tokens", details={"field": "page_size"})
        group = self.model.kv_group.name
        if group not in regions:
            raise InvalidArgument(f"no region for kv group {group!r}")
        with self._on_device(), told_what_to_lower("workspaces and decode graphs"):
            self._adopt(layout, regions[group])
            # It counts for itself until everything is captured: what runs now is no step.
            self._bell = DeviceBell(self.device) if doorbell is not None else None
            self._warm_decode()
            if self._graphs.sizes:
                self._graphs.capture(self._decode, self.stream)
            # Behind the capture, which gives cached memory back.
            self._warm_prompts()
            if self._bell is not None and doorbell is not None:
                self._bell.bind(doorbell.device_pointer, doorbell.value)
            self.stream.synchronize()

    def _adopt(self, layout: KvLayout, region: Any) -> None:
        c, model, device = self.model.config, self.model, self.device
        shape = layout.region_shape(self.model.kv_group.name)
        count = int(np.prod(shape))
        self._region = torch.as_tensor(region, device=device).view(self.pages.element)[:count].view(shape)
        self._layers = list(self._region.unbind(0))
        size = layout.page_size
        pages_each = -(-self.max_model_len // size)
        self._attention = DecodeAttention(
            model.heads, model.kv_heads, c.head_dim, size, self.max_batch, device, model.pdl, self.pages.scales
        )
        self._metadata = StepMetadata(
            self.token_budget + self.max_batch, self.max_batch, self.max_batch * pages_each, size, layout.num_pages,
            c.vocab_size, self._attention, device,
        )  # fmt: skip
        # The rows of a step of prompts that are sampled: see `_last_rows`.
        self._ends = StepMetadata(
            self.max_batch, self.max_batch, self.max_batch * pages_each, size, layout.num_pages, c.vocab_size,
            self._attention, device,
        )  # fmt: skip
        self._prefill = PrefillAttention(
            model.heads, model.kv_heads, c.head_dim, size, device, self.max_batch,
            min(self.max_batch * pages_each, 1 << 22), self.pages.scales,
        )  # fmt: skip
        model.prepare(pages_each * size, self.pages.scales)
        self._scratch = Scratch(model)
        self._head: CudaHead | ParallelHead = (
            CudaHead(model.head, self.max_batch, model.pdl)
            if self.tp.size == 1
            else ParallelHead(model.head, c.vocab_size, self.max_batch, model.pdl, self.tp)
        )
        # Padded like the head's rows, of which it reads `count`.
        self._picked = torch.zeros(self._head.max_rows, c.hidden_size, dtype=torch.bfloat16, device=device)
        self._sampler = DeviceSampler(c.vocab_size, self._head.max_rows, device)
        # Tokens of a step: those of the head, or more where several choices begin from one prompt.
        self._tokens = torch.zeros(4 * self._head.max_rows, dtype=torch.int32, device=device)
        self._pinned = [torch.zeros(len(self._tokens), dtype=torch.int32, pin_memory=True) for _ in range(TURNS)]

    def _warm_decode(self) -> None:
        """Run what decode steps run, so that nothing is compiled while requests wait. Slots are -1: pages stay."""
        few = {1 << power for power in range(MAX_ROWS.bit_length())} | {self.max_batch}
        for bucket in sorted({*self._graphs.sizes, *(n for n in few if n <= self.max_batch)}, reverse=True):
            self._idle_columns(bucket, bucket)
            self._decode(bucket)
        self._sampler.warm()
        self.stream.synchronize()

    def _warm_prompts(self) -> None:
        """The same of the other steps, so that their memory is there too."""
        # The largest step first, so that the others find its memory; then one of few rows, of a prompt that goes on.
        size = self._metadata.page_size
        second = size if self._metadata.max_pages > 1 else 0
        for rows, start in ((self.token_budget, 0), (min(2, self.token_budget), second)):
            self._idle_columns(rows, 0)
            self._prefill.plan([rows], [start], [np.zeros(-(-(start + rows) // size), np.int32)])
            self._eager_rows(rows, 0)
        itself = self._indices([0])
        copy_pages(self._region, itself, itself)
        if self._bell is not None:
            self._bell.ring()
        self.stream.synchronize()

    def _idle_columns(self, rows: int, decode: int) -> None:
        columns = self._metadata.columns(rows, decode)
        for column in (columns.tokens, columns.positions, columns.lengths, columns.row_start, columns.work):
            column.zero_()
        columns.slots.fill_(-1)

    # -- a step's kernels

    def _decode(self, bucket: int) -> None:
        """All of a decode step of `bucket` rows, from columns to tokens."""
        columns = self._metadata.columns(bucket, bucket)
        rows = Rows(bucket, columns.tokens, columns.positions, columns.slots, self._tokens)

        def attend(layer: int, q: torch.Tensor, kv: torch.Tensor | None, out: torch.Tensor) -> None:
            self._attention.run(q, self._layers[layer], columns, out, bucket)

        scratch = self._scratch if bucket <= MAX_ROWS else None
        hidden = self.model.forward(rows, self._layers, attend, bell=self._bell, scratch=scratch)
        self._head(hidden, bucket)
        self._tokens[:bucket].copy_(self._head.tokens[:bucket])

    def _eager_rows(
        self, rows: int, decode: int, kv_ready: Callable[[int], None] | None = None, last: Last | None = None
    ) -> torch.Tensor:
        """Hidden states of a step that was planned and filled, or of its `last` rows."""
        columns = self._metadata.columns(rows, decode)

        def attend(layer: int, q: torch.Tensor, kv: torch.Tensor | None, out: torch.Tensor) -> None:
            if decode:
                self._attention.run(q[:decode], self._layers[layer], columns, out[:decode], decode)
            if rows > decode:
                assert kv is not None
                self._prefill.run(q[decode:], kv[decode:], self._layers[layer], out[decode:])

        step = Rows(rows, columns.tokens, columns.positions, columns.slots, self._tokens)
        return self.model.forward(step, self._layers, attend, bell=self._bell, kv_ready=kv_ready, last=last)

    def _last_rows(self, batch: StepBatch, shape: StepShape, samples: Sequence[tuple[int, int]]) -> Last | None:
        """The rows that are sampled, where a step of prompts needs no others behind its last layer's KV: their
        attention is that of decode rows."""
        if not shape.chunks or any(s.prompt_logprobs is not None for s in batch.slices):
            return None
        if len(samples) > min(MAX_ROWS, self.max_batch) or (self.tp.size > 1 and not samples):
            return None
        rows = [
            Slice(s.seq_id, s.token_ids[-1:], s.start + len(s.token_ids) - 1, s.block_table)
            for s in (batch.slices[i] for _, i in samples)
        ]
        ends = StepBatch(batch.step, rows)
        count = len(rows)
        if count:
            self._ends.fill(ends, shape_of(ends), self._last)
        columns = self._ends.columns(count, count)

        def attend(layer: int, q: torch.Tensor, kv: torch.Tensor | None, out: torch.Tensor) -> None:
            self._attention.run(q[:count], self._layers[layer], columns, out[:count], count)

        return Last(self._indices([shape.last_row(place) for place, _ in samples]), attend, self._scratch)

    # -- steps

    def launch(self, batch: StepBatch, on_layer: Callable[[int], None] | None = None) -> Flight:
        """See `AsyncRunner.launch`."""
        return self.launch_prepared(batch, self.prepare(batch), on_layer)

    def prepare(self, batch: StepBatch) -> tuple[StepShape, list[tuple[int, int]]]:
        """Check and order a batch; nothing is queued. Raises for one that cannot run."""
        if not self._layers:
            raise Internal("a step before bind_cuda")
        if self._broken is not None:
            raise DeviceFailed(self._broken)
        self._metadata.check(batch)
        shape = shape_of(batch)
        samples = [(place, i) for place, i in enumerate(shape.order) if batch.slices[i].samples]
        wanted = sum(len(batch.slices[i].samples) for _, i in samples)
        if len(samples) > self._head.max_rows or wanted > len(self._tokens) or shape.rows > self._metadata.max_rows:
            raise Internal(f"a step of {shape.rows} rows that samples {wanted} tokens is larger than planned for")
        return shape, samples

    def launch_prepared(
        self, batch: StepBatch, plan: tuple[StepShape, list[tuple[int, int]]],
        on_layer: Callable[[int], None] | None = None,
    ) -> Flight:  # fmt: skip
        """Queue a step that was prepared. With several ranks all of them must, with on_layer or without."""
        shape, samples = plan
        # Nothing is queued yet where it does not fit.
        with self._failing(KvmeshError), self._on_device():
            whole = shape.decode == shape.rows == len(samples) and on_layer is None
            bucket = self._graphs.bucket(shape.rows) if whole else 0
            self._metadata.fill(batch, shape, self._last, bucket)
            with self._failing():
                return self._queue(batch, shape, samples, bucket, on_layer)

    def _queue(
        self, batch: StepBatch, shape: StepShape, samples: Sequence[tuple[int, int]], bucket: int,
        on_layer: Callable[[int], None] | None,
    ) -> Flight:  # fmt: skip
        begin = self._mark()
        if batch.copies:
            copy_pages(self._region, *(self._indices(side) for side in zip(*batch.copies, strict=True)))
        hidden: torch.Tensor | None = None
        if bucket:
            self._graphs.replay(bucket)
        else:
            if shape.chunks:
                counts, starts, tables = zip(*shape.chunks, strict=True)
                self._prefill.plan(counts, starts, tables)
            ends = self._last_rows(batch, shape, samples)
            hidden = self._eager_rows(shape.rows, shape.decode, on_layer, ends)
            if samples:
                count = len(samples)
                if ends is None:
                    last = self._indices([shape.last_row(place) for place, _ in samples])
                    torch.index_select(hidden, 0, last, out=self._picked[:count])
                self._head(self._picked if ends is None else hidden, count)
                self._tokens[:count].copy_(self._head.tokens[:count])
        flight = self._sample(batch, samples)
        if begin is not None:
            end = _event(enable_timing=True)
            end.record()
            self.events.append((begin, end))
        for place, i in enumerate(shape.order):
            if batch.slices[i].prompt_logprobs is not None and hidden is not None and self.tp.rank == 0:
                flight.scored.append((i, hidden[shape.first_row[place] : shape.last_row(place) + 1]))
        return flight

    def _indices(self, numbers: Sequence[int]) -> torch.Tensor:
        # From pinned memory: any other copy would wait for the step that runs.
        return torch.tensor(numbers, dtype=torch.int64).pin_memory().to(self.device, non_blocking=True)

    def _sample(self, batch: StepBatch, samples: Sequence[tuple[int, int]]) -> Flight:
        """Tokens of the step, into device memory for the next one and into pinned memory for the host."""
        places = [slice(0, 0)] * len(batch.slices)
        at = 0
        special = False
        for _, i in samples:
            chosen = batch.slices[i].samples
            places[i] = slice(at, at + len(chosen))
            at += len(chosen)
            special = special or len(chosen) > 1 or any(_needs_sampler(sample) for sample in chosen)
        prepared: Any = None
        if special and self.tp.rank == 0:
            rows = [
                (row, batch.slices[i].seq_id, sample, sample.pending)
                for row, (_, i) in enumerate(samples)
                for sample in batch.slices[i].samples
            ]
            prepared = self._sampler.prepare(rows)
            self._sampler.run(self._head.logits, prepared, self._tokens[:at])
        # Rank 0 has sampled for all.
        self.tp.broadcast(self._tokens[:at])
        self._last = {batch.slices[i].seq_id: places[i].start for _, i in samples if len(batch.slices[i].samples) == 1}
        tokens: torch.Tensor | None = None
        if at:
            self._turn = (self._turn + 1) % TURNS
            tokens = self._pinned[self._turn][:at]
            tokens.copy_(self._tokens[:at], non_blocking=True)
        # Blocking: the core's thread sleeps while the step runs, and the next one is queued already.
        done = _event(blocking=True)
        done.record()
        flight = Flight(batch, places, tokens, done, prepared)
        self._queued.append(flight)
        return flight

    def collect(self, flight: Flight) -> StepResult:
        """See `AsyncRunner.collect`. Raises SequencesFailed for sequences whose logits are not finite."""
        with self._failing(), self._on_device():
            flight.done.synchronize()
            scored = {i: self._prompt_logprobs(flight.batch, i, hidden) for i, hidden in flight.scored}
            flight.scored.clear()
        scores = self._sampler.finish(flight.prepared) if flight.prepared is not None else ()
        return flight.result(scores, scored)

    def execute(self, batch: StepBatch, on_layer: Callable[[int], None] | None = None) -> StepResult:
        """See `Runner.execute`."""
        return self.collect(self.launch(batch, on_layer))

    def _prompt_logprobs(self, batch: StepBatch, index: int, hidden: torch.Tensor) -> Sequence[TokenLogprobs]:
        slice_, head = batch.slices[index], self.model.whole_head
        assert head is not None, "rank 0 alone scores prompts"
        targets = [int(t) for t in slice_.token_ids[1:]]
        if slice_.next_token is not None:
            targets.append(slice_.next_token)
        scores: list[TokenLogprobs] = []
        for at in range(0, len(targets), LOGPROB_ROWS):
            part = targets[at : at + LOGPROB_ROWS]
            logits = torch.mm(hidden[at : at + len(part)], head.t(), out_dtype=torch.float32)
            scores.extend(self._sampler.score(logits, part, slice_.prompt_logprobs or 0))
        return scores

    def ring(self, count: int) -> None:
        """Queue rings that belong to no layer."""
        if self._bell is not None:
            with self._failing(), self._on_device():
                self._bell.ring(count)

    def close(self) -> None:
        """Drop weights, graphs and KV views once what is queued is through. A device that has failed keeps them."""
        if self._broken is not None:
            return
        if self._layers:
            with self._on_device():
                self.stream.synchronize()
        self._graphs.close()
        self._layers = []
        for name in (
            "_region", "_head", "_picked", "_tokens", "_pinned", "_scratch", "_sampler", "_attention", "_prefill",
            "_metadata", "_ends", "model",
        ):  # fmt: skip
            if hasattr(self, name):
                delattr(self, name)

    # -- around

    def _mark(self) -> torch.cuda.Event | None:
        if not self.record_events:
            return None
        begin = _event(enable_timing=True)
        begin.record()
        return begin

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        with torch.inference_mode(), torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            yield

    @contextmanager
    def _failing(self, *harmless: type[Exception]) -> Iterator[None]:
        """A CUDA error leaves the process's context useless, and a step that broke off in the middle leaves the bell
        behind: either way this runner is done, but for what is harmless."""
        try:
            yield
        except harmless:
            raise
        except Exception as error:
            short = isinstance(error, torch.OutOfMemoryError)
            what = "out of device memory in a step: lower token_budget or max_batch" if short else "the device failed"
            self._broken = f"{what}: {first_line(error)}"
            leave_to_the_process(self, error)
            raise DeviceFailed(self._broken) from error


def _event(**options: bool) -> torch.cuda.Event:
    return torch.cuda.Event(**options)  # type: ignore[no-untyped-call]


def _needs_sampler(sample: SampleInput) -> bool:
    params = sample.params
    return params.temperature > 0 or params.want_logprobs or needs_processing(sample)
