"""What the engine core asks of a model backend, whatever it runs on. Torch-free.

The core builds one `StepBatch` per iteration and calls `Runner.execute` from its own thread. A backend holds weights
and KV views, nothing about requests: everything it needs to know of a sequence is in its `Slice`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Final, Protocol, cast

import numpy as np
import numpy.typing as npt

from kvmesh.kv.layout import KvLayout
from kvmesh.kv.ring import Doorbell
from kvmesh.loading.config import ModelDescription

Int32Array = npt.NDArray[np.int32]

# In a slice's token_ids: the token that the step launched last samples for this sequence (see AsyncRunner).
PENDING: Final = -1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request samples. Every field is already validated and has its effective value.

    temperature 0 means greedy. top_k 0, top_p 1.0 and min_p 0.0 switch the filter off. Penalties: repetition (1.0 off,
    over prompt and output), frequency and presence (0.0 off, over output). `logprobs` is the number of alternatives
    returned per position (0 with `want_logprobs`: the chosen token alone). `prompt_logprobs` likewise, None = off.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    seed: int = 0
    want_logprobs: bool = False
    logprobs: int = 0
    prompt_logprobs: int | None = None


class TokenMask(Protocol):
    """Which tokens a grammar allows next; computed beside the forward pass."""

    def mask(self) -> npt.NDArray[np.uint32]:
        """Bit t % 32 of word t // 32 is set where token t may be drawn; at least one is. Waits for it. It covers the
        vocabulary, and is to be read before the step's result is handed back."""


@dataclass(frozen=True, slots=True)
class SampleInput:
    """What the sampler needs for one row.

    Noise is a pure function of (params.seed, choice, position), never of the batch: `position` is the index in the
    whole sequence of the token being sampled. `banned_token_ids` may not be sampled (eos/stop ids while output is
    shorter than min_tokens).
    pending: the slice's token is PENDING: output_token_ids lacks it, `position` and the ban count it.
    grammar: nothing else than its mask allows may be sampled, whatever is banned; never together with pending.
    """

    params: SamplingParams
    choice: int
    position: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    banned_token_ids: frozenset[int] = frozenset()
    pending: bool = False
    grammar: TokenMask | None = None


@dataclass(frozen=True, slots=True)
class Slice:
    """A run of one sequence's tokens computed in one step.

    token_ids: int32 (num_tokens,), positions start .. start + num_tokens - 1; KV of [0, start) is already in the pages.
    block_table: int32 (>= ceil((start + num_tokens) / page_size),) page ids.
    samples: one entry per token to sample from the LAST position's logits (several when choices fork from one prompt);
    empty when nothing is sampled (an inner chunk, or role prefill: its logits are then not computed at all).
    prompt_logprobs: alternatives per position; scores token_ids[1:] (and `next_token` for the last position if given).
    """

    seq_id: int
    token_ids: Int32Array
    start: int
    block_table: Int32Array
    samples: Sequence[SampleInput] = ()
    prompt_logprobs: int | None = None
    next_token: int | None = None


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One iteration. `copies` are (src page, dst page) done in every layer BEFORE the step (copy on write of forks)."""

    step: int
    slices: Sequence[Slice]
    copies: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities under the model's raw distribution (before temperature and filters)."""

    token_id: int
    logprob: float
    rank: int
    top: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True, slots=True)
class SliceResult:
    """`token_ids[i]` answers `samples[i]`; `logprobs[i]` is present where the sample asked for it."""

    seq_id: int
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs | None] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results in the order of the batch's slices."""

    slices: Sequence[SliceResult]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the outside may know of a loaded model. `revision` is a content fingerprint of the weights file(s)."""

    name: str
    revision: str
    architecture: str
    vocab_size: int
    max_model_len: int
    num_layers: int
    dtype: str
    eos_token_ids: frozenset[int]
    weight_bytes: int

    @classmethod
    def of(cls, described: ModelDescription, dtype: str) -> ModelInfo:
        """A checkpoint's description, of a model that was loaded as `dtype`."""
        return cls(dtype=dtype, **{part.name: getattr(described, part.name) for part in fields(described)})


class Runner(Protocol):
    """A model backend. Contract: `layout()` → `bind()` once → any number of `execute()` → `close()`."""

    info: ModelInfo

    def layout(self, page_size: int, num_pages: int) -> KvLayout:
        """The KV layout for this model with the given pool."""

    def bind(self, layout: KvLayout, regions: Mapping[str, memoryview], doorbell: Doorbell) -> None:
        """Adopt KV memory: one writable buffer per layer group, `layout.region_bytes(group)` bytes, shared with the
        sidecar. The runner rings `doorbell` once after each layer of EVERY execute (num_layers rings a step), after
        that layer's KV is in its pages."""

    def execute(self, batch: StepBatch, on_layer: Callable[[int], None] | None = None) -> StepResult:
        """Run one step to its end. Raises KvmeshError only for the whole step. on_layer(l) is called when layer l's KV
        is in the pages (or queued on the compute stream), behind the doorbell's ring."""

    def close(self) -> None:
        """Drop weights and KV views."""


class AsyncRunner(Runner, Protocol):
    """A backend that can be given a step while the one before is still running on its device.

    Steps run in the order in which they were launched, each behind the one before. At most one is launched ahead of the
    one being collected; every launched step is collected, in order, unless DeviceFailed ended it all. A decode slice
    whose token_ids are [PENDING] continues with the token that the step launched last samples for its seq_id; it may
    turn out that the sequence had ended there, and that nobody wants its result.
    """

    def launch(self, batch: StepBatch, on_layer: Callable[[int], None] | None = None) -> object:
        """Queue the step and return at once. The batch is read before it returns: lists in it change afterwards.

        Raises before anything is queued (no ring, no write) where the batch cannot run, DeviceFailed where the device
        is lost. on_layer(l) as with `execute`, where "queued" is the rule. A launched step rings num_layers times.
        """

    def collect(self, flight: object) -> StepResult:
        """Wait for the step. Raises as `execute` does, or DeviceFailed.

        After any error but SequencesFailed and DeviceFailed, a step launched behind it is collected too, and dropped.
        """


def as_async(runner: Runner) -> AsyncRunner | None:
    """The runner, if it can be driven one step ahead."""
    if callable(getattr(runner, "launch", None)) and callable(getattr(runner, "collect", None)):
        return cast(AsyncRunner, runner)
    return None
