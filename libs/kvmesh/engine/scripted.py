"""The scripted runner: a pretended model at a programmed pace, for every test that needs no real one. Torch-free.

It writes KV bytes that tell token, position and layer, checks on later steps that a sequence's whole history holds
exactly those bytes, and draws its next token from a hash of the history, the seed and the choice: so output does not
depend on batching, chunking, preemption or where the prompt was computed, and foreign or missing KV is noticed. With
a grammar it draws from what that allows, and comes to an end where it may.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvmesh.engine.failures import SequencesFailed
from kvmesh.engine.runner import (
    ModelInfo,
    SampleInput,
    SamplingParams,
    Slice,
    SliceResult,
    StepBatch,
    StepResult,
    TokenLogprobs,
)
from kvmesh.engine.sampling.processors import permitted
from kvmesh.engine.scripted_kv import ScriptedKv, mix
from kvmesh.errors import FailedPrecondition
from kvmesh.grammar.match import Match
from kvmesh.kv.layout import LAYOUT_VERSION, KvGroup, KvLayout
from kvmesh.kv.ring import Doorbell

# The byte tokenizer's vocabulary, padded.
IM_START, EOS, VOCAB = 256, 257, 512
_FIRST, _PRINTABLE = 32, 95
_CLOSING = b'"}]'


@dataclass(frozen=True, slots=True)
class ScriptedModel:
    """Shape, pace and habits. A step lasts step_s + token_s a decode row + prefill_token_s a prompt token, in seconds,
    spread evenly over the layers. eos_after: output tokens after which it says end-of-sequence (None: never).
    verify: check the "all" of a slice's history, its "last" page only, or nothing ("off": nor is anything written)."""

    step_s: float = 0.0
    token_s: float = 0.0
    prefill_token_s: float = 0.0
    layers: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    dtype: Literal["bf16", "fp32"] = "bf16"
    max_model_len: int = 8192
    eos_after: int | None = None
    verify: Literal["all", "last", "off"] = "all"
    name: str = "scripted"


class ScriptedRunner:
    """See the module. `wait(seconds)` paces it (default: a wait that `close` ends early).

    before_step is called with each batch first; what it raises fails the step. `foreign` counts wrong KV positions.
    """

    def __init__(
        self,
        model: ScriptedModel | None = None,
        *,
        wait: Callable[[float], object] | None = None,
        before_step: Callable[[StepBatch], None] | None = None,
    ) -> None:
        self.model = model if model is not None else ScriptedModel()
        self._closed = threading.Event()
        self._wait = wait if wait is not None else self._closed.wait
        self._before_step = before_step
        self._kv: ScriptedKv | None = None
        self._doorbell: Doorbell | None = None
        self.foreign = 0
        self.steps = 0
        self.info = ModelInfo(
            name=self.model.name,
            revision=f"scripted-{self.model.layers}x{self.model.kv_heads}x{self.model.head_dim}",
            architecture="Scripted",
            vocab_size=VOCAB,
            max_model_len=self.model.max_model_len,
            num_layers=self.model.layers,
            dtype=self.model.dtype,
            eos_token_ids=frozenset({EOS}),
            weight_bytes=0,
        )

    def layout(self, page_size: int, num_pages: int) -> KvLayout:
        """One group `kv` of all layers."""
        model = self.model
        group = KvGroup("kv", "full", tuple(range(model.layers)), model.kv_heads, model.head_dim)
        return KvLayout(LAYOUT_VERSION, model.dtype, page_size, (group,), num_pages=num_pages)

    def bind(self, layout: KvLayout, regions: Mapping[str, memoryview], doorbell: Doorbell) -> None:
        """Adopt KV memory and the doorbell."""
        self._kv = ScriptedKv(layout, regions)
        self._doorbell = doorbell

    def execute(self, batch: StepBatch, on_layer: Callable[[int], None] | None = None) -> StepResult:
        """One step. Raises SequencesFailed where KV is not what it must be; the other sequences' results are in it."""
        kv, doorbell = self._kv, self._doorbell
        if kv is None or doorbell is None:
            raise FailedPrecondition("the runner is not bound to KV memory")
        if self._before_step is not None:
            self._before_step(batch)
        for src, dst in batch.copies:
            kv.copy(src, dst)
        failed = [part.seq_id for part in batch.slices if self._wrong(kv, part)]
        pause = self._duration(batch) / kv.num_layers
        for layer in range(kv.num_layers):
            if pause > 0:
                self._wait(pause)
            for part in batch.slices if self.model.verify != "off" else ():
                kv.write(layer, part.block_table, part.start, part.token_ids)
            doorbell.ring()
            if on_layer is not None:
                on_layer(layer)
        self.steps += 1
        results = [self._answer(part) for part in batch.slices]
        if failed:
            kept = StepResult([result for result in results if result.seq_id not in failed])
            raise SequencesFailed("KV of its history is not what was written", failed, kept)
        return StepResult(results)

    def close(self) -> None:
        """End a pause and let go of the memory."""
        self._closed.set()
        self._kv = None
        self._doorbell = None

    def _duration(self, batch: StepBatch) -> float:
        model = self.model
        if not (model.step_s or model.token_s or model.prefill_token_s):
            return 0.0
        rows = sum(len(part.token_ids) == 1 for part in batch.slices)
        prompt = sum(len(part.token_ids) for part in batch.slices) - rows
        return model.step_s + model.token_s * rows + model.prefill_token_s * prompt

    def _wrong(self, kv: ScriptedKv, part: Slice) -> bool:
        if self.model.verify == "off" or not part.start:
            return False
        first = 0 if self.model.verify == "all" else (part.start - 1) // kv.page_size * kv.page_size
        wrong = kv.wrong_positions(part.block_table, first, part.start, _history(part))
        self.foreign += len(wrong)
        return len(wrong) > 0

    def _answer(self, part: Slice) -> SliceResult:
        tokens: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        if part.samples:
            digest = history_digest(_history(part))
            for sample in part.samples:
                token = scripted_token(digest, sample, self.model.eos_after)
                tokens.append(token)
                logprobs.append(
                    _logprob(token, sample.position, sample.params.logprobs) if sample.params.want_logprobs else None
                )
        scores: Sequence[TokenLogprobs] = ()
        if part.prompt_logprobs is not None:
            scored = part.token_ids[1:].tolist() + ([] if part.next_token is None else [part.next_token])
            scores = [_logprob(t, part.start + 1 + i, part.prompt_logprobs) for i, t in enumerate(scored)]
        return SliceResult(part.seq_id, tokens, logprobs, scores)


def history_digest(tokens: npt.NDArray[np.int32] | Sequence[int] | None) -> int:
    """A 64-bit hash of tokens in their order."""
    values = np.asarray(tokens if tokens is not None else [], np.uint64)
    positions = np.arange(len(values), dtype=np.uint64)
    return int(mix(positions << np.uint64(32) | values).sum(dtype=np.uint64))


def scripted_token(digest: int, sample: SampleInput, eos_after: int | None = None) -> int:
    """The next token after a history: a printable byte that is not banned, or end-of-sequence where programmed."""
    if sample.grammar is not None:
        return _grammar_token(digest, sample)
    if eos_after is not None and len(sample.output_token_ids) >= eos_after and EOS not in sample.banned_token_ids:
        return EOS
    at = _draw(digest, sample) % _PRINTABLE
    for offset in range(_PRINTABLE):
        token = _FIRST + (at + offset) % _PRINTABLE
        if token not in sample.banned_token_ids:
            return token
    return _FIRST + at


def _draw(digest: int, sample: SampleInput) -> int:
    """64 bits for this token."""
    mask = (1 << 64) - 1
    key = (digest ^ (sample.params.seed * 0x9E3779B97F4A7C15 + sample.choice * 0xD1B54A32D192ED03)) & mask
    return int(mix(np.array([key], np.uint64))[0])


def _grammar_token(digest: int, sample: SampleInput) -> int:
    """The end where it may be; else, one time in four, what closes something; else what comes first from a drawn byte
    on. So nothing goes on for long that need not."""
    allowed = np.unpackbits(permitted(sample).view(np.uint8), bitorder="little").tobytes()
    if allowed[EOS]:
        return EOS
    bits = _draw(digest, sample)
    if bits >> 32 & 3 == 0:
        for token in _CLOSING:
            if allowed[token]:
                return token
    at = bits % _PRINTABLE
    for offset in range(_PRINTABLE):
        token = _FIRST + (at + offset) % _PRINTABLE
        if allowed[token]:
            return token
    return allowed.index(1)


def scripted_output(
    prompt: Sequence[int],
    params: SamplingParams,
    choice: int = 0,
    *,
    max_model_len: int = 8192,
    eos_after: int | None = None,
    grammar: Match | None = None,
) -> tuple[list[int], bool]:
    """What the scripted model answers to a prompt, computed alone: (output tokens, whether it ended by a stop).

    grammar: as in `EngineRequest`."""
    match = grammar.copy() if grammar is not None else None
    stops = params.stop_token_ids | (frozenset() if params.ignore_eos else frozenset({EOS}))
    output: list[int] = []
    while len(output) < params.max_tokens and len(prompt) + len(output) < max_model_len:
        banned = stops if len(output) < params.min_tokens else frozenset()
        sample = SampleInput(params, choice, len(prompt) + len(output), prompt, output, banned, grammar=match)
        if match is not None:
            match.fill()
        output.append(scripted_token(history_digest([*prompt, *output]), sample, eos_after))
        if match is not None:
            match.take(output[-1])
            if match.over:
                return output, True
        if output[-1] in stops and len(output) > params.min_tokens:
            return output, True
    return output, False


def _history(part: Slice) -> npt.NDArray[np.int32] | None:
    """All tokens up to the slice's end, where a sample tells them; healed or preempted ones are in the output."""
    if not part.samples:
        return None
    sample = part.samples[0]
    return np.array([*sample.prompt_token_ids, *sample.output_token_ids], np.int32)


def _logprob(token: int, position: int, alternatives: int) -> TokenLogprobs:
    """Made up, but the same for the same (token, position)."""
    value = -1.0 - (token * 31 + position * 17) % 97 / 97
    top = [(token, value)] + [((token + k) % VOCAB, value - k) for k in range(1, alternatives)]
    return TokenLogprobs(token, value, 1, tuple(top[:alternatives]))
