"""Sampling on the device: the same tokens that the CPU's sampler gives for the same logits, without waiting for them.

A step's parameters go to the device in one copy. Steps are queued ahead: what the token of the step before adds to a
sequence's penalties is counted on the device, and only a sequence that is new here, or has gone another way since,
sends its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from kvmesh.engine.cuda.sampler_masks import Anything, grammar_masks
from kvmesh.engine.cuda.sampler_slots import CountSlots, Key
from kvmesh.engine.runner import SampleInput, SamplingParams, TokenLogprobs
from kvmesh.engine.sampling.noise import uniform
from kvmesh.engine.sampling.processors import needs_processing
from kvmesh.errors import Internal
from kvmesh.layers.cuda import sampling as kernels

# One sample: row of logits, sequence, parameters, whether the host lacks the sequence's last token.
Row = tuple[int, int, SampleInput, bool]

_TYPES: dict[str, tuple[type[np.generic], torch.dtype]] = {
    "noise": (np.float64, torch.float64),
    "top_p": (np.float64, torch.float64),
    "frequency": (np.float64, torch.float64),
    "presence": (np.float64, torch.float64),
    "least": (np.int64, torch.int64),
    "adjusted": (np.int64, torch.int64),
    "rate": (np.float32, torch.float32),
    "repetition": (np.float32, torch.float32),
    "row": (np.int32, torch.int32),
    "top_k": (np.int32, torch.int32),
    "slot": (np.int32, torch.int32),
    "alternatives": (np.int32, torch.int32),
}
# Every array starts at a multiple of this: kernels are compiled for aligned pointers.
_ALIGN = 16
_LISTS_BYTES = 256 << 10
_ALTERNATIVES = 20
_LOG2E = math.log2(math.e)
# A temperature's inverse stays finite; below this all mass lies on the most likely tokens anyway.
_COLDEST = 1e-30
_NO_SEQUENCE = -1


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _empty(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu", pin: bool = False
) -> torch.Tensor:
    """No tensor of inference mode: those may be written in that mode only, and the caller's is its own affair."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device, pin_memory=pin)


class _Staging:
    """Pinned memory of one step: the columns, then lists of any length; and what comes back of its scores."""

    def __init__(self, rows: int, nbytes: int, pinned: bool) -> None:
        self.rows = rows
        self.buffer = _empty((nbytes,), torch.uint8, pin=pinned)
        self.bytes: npt.NDArray[np.uint8] = self.buffer.numpy()
        self.scores = _empty((0,), torch.int32)
        self.event = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]

    @property
    def idle(self) -> bool:
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]


def _layout(rows: int) -> tuple[dict[str, int], int]:
    """Offsets of the columns for up to `rows` samples, and of what follows them."""
    at, offsets = 0, {}
    for name, (kind, _) in _TYPES.items():
        offsets[name] = at
        at += _aligned(rows * np.dtype(kind).itemsize)
    return offsets, at


@dataclass(slots=True, eq=False)
class Prepared:
    """A step's samples, packed. Used for one `run` and one `finish`."""

    count: int
    staging: _Staging
    nbytes: int
    keys: list[Key]
    lengths: list[int]
    scored: list[int]
    alternatives: list[int]
    lists: dict[str, tuple[int, int]]  # name → offset in bytes, elements
    width: int = 0
    ran: bool = field(default=False)


class DeviceSampler:
    """Samples tokens of sequences from logits on the device. Not thread-safe; all on one stream, in order.

    max_rows: samples of a step, as planned for: more are possible, but take memory then.
    """

    def __init__(self, vocab: int, max_rows: int, device: torch.device | str) -> None:
        if not 0 < vocab <= kernels.MAX_VOCAB:
            raise Internal(f"a vocabulary of {vocab} tokens: at most {kernels.MAX_VOCAB} can be sampled")
        self.vocab = vocab
        self.device = torch.device(device)
        self._pinned = self.device.type == "cuda"
        self._slots = CountSlots(max_rows)
        self._staged: list[_Staging] = []
        self._state = self._tensor((max_rows, vocab), torch.int32)
        self._adjusted = self._tensor((max_rows, vocab), torch.float32)
        self._scores = self._tensor((max_rows, kernels.SCORE_HEADER + 2 * _ALTERNATIVES), torch.int32)
        self._set_rows(max_rows)

    @property
    def nbytes(self) -> int:
        """Device memory held."""
        return sum(t.nbytes for t in (self._state, self._adjusted, self._scores, self._scratch, self._buffer))

    def _retire(self, *tensors: torch.Tensor) -> None:
        """Queued kernels may still use these: their memory is nobody else's before that."""
        if self._pinned:
            for tensor in tensors:
                tensor.record_stream(torch.cuda.current_stream(self.device))

    def _tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return _empty(shape, dtype, self.device)

    def _set_rows(self, rows: int) -> None:
        self._rows = rows
        self._offsets, self._lists_at = _layout(rows)
        self._scratch = self._tensor((rows, kernels.SCRATCH_WORDS), torch.int64)
        self._set_buffer(self._lists_at + _LISTS_BYTES)

    def _set_buffer(self, nbytes: int) -> None:
        self._buffer = self._tensor((nbytes,), torch.uint8)
        self._columns = kernels.Columns(
            **{
                name: self._view(self._offsets[name], self._rows, dtype, np.dtype(kind).itemsize)
                for name, (kind, dtype) in _TYPES.items()
            }
        )

    def _view(self, at: int, count: int, dtype: torch.dtype, size: int = 4) -> torch.Tensor:
        return self._buffer[at : at + count * size].view(dtype)

    def warm(self) -> None:
        """Compiles every kernel, so that no step waits for that; waits for the device."""
        logits = torch.zeros((1, self.vocab), dtype=torch.float32, device=self.device)
        tokens = torch.zeros(1, dtype=torch.int32, device=self.device)
        params = SamplingParams(
            temperature=1.0,
            top_k=1,
            top_p=0.5,
            repetition_penalty=2.0,
            logit_bias={0: 1.0},
            want_logprobs=True,
            logprobs=1,
        )
        sample = SampleInput(params, 0, 0, (0,), (0,), grammar=Anything(self.vocab))
        prepared = self.prepare([(0, _NO_SEQUENCE, sample, False)])
        self.run(logits, prepared, tokens)
        tokens.cpu()
        self.finish(prepared)
        self.forget((_NO_SEQUENCE,))

    # -- the host's part

    def prepare(self, rows: Sequence[Row]) -> Prepared:
        """Packs a step's samples. Waits for nothing but grammars' masks."""
        if len(rows) > self._rows:
            self._retire(self._scratch, self._buffer)
            self._set_rows(2 * len(rows))
        samples = [sample for _, _, sample, _ in rows]
        penalized = [i for i, sample in enumerate(samples) if _penalized(sample)]
        keys = [(rows[i][1], samples[i].choice) for i in penalized]
        lengths = [len(samples[i].output_token_ids) + bool(rows[i][3]) for i in penalized]
        slots, fresh = self._slots.take(keys, lengths)
        self._check(rows, penalized, fresh)
        slot_of = dict(zip(penalized, slots, strict=True))
        processed = [i for i, sample in enumerate(samples) if needs_processing(sample)]
        scored = [i for i, sample in enumerate(samples) if sample.params.want_logprobs]
        self._grow(len(processed), len(scored), max((samples[i].params.logprobs for i in scored), default=0))
        lists = self._lists(samples, [i for i, new in zip(penalized, fresh, strict=True) if new], slot_of, processed)
        lists["scored"] = np.array(scored, np.int32)
        nbytes, places = self._lists_at, {}
        for name, values in lists.items():
            if len(values):
                places[name] = (nbytes, len(values))
                nbytes += _aligned(values.nbytes)
        staging = self._staging(nbytes)
        self._pack(staging, rows, slot_of, processed)
        for name, (at, _) in places.items():
            staging.bytes[at : at + lists[name].nbytes] = lists[name].view(np.uint8)
        alternatives = [min(samples[i].params.logprobs, self.vocab) for i in scored]
        return Prepared(len(rows), staging, nbytes, keys, lengths, scored, alternatives, places)

    def _check(self, rows: Sequence[Row], penalized: Sequence[int], fresh: Sequence[bool]) -> None:
        for i, new in zip(penalized, fresh, strict=True):
            if new and rows[i][3]:
                raise Internal(f"sequence {rows[i][1]} continues with a token that was not sampled here")

    def _grow(self, processed: int, scored: int, alternatives: int) -> None:
        if self._slots.capacity > len(self._state):
            grown = self._tensor((2 * self._slots.capacity, self.vocab), torch.int32)
            grown[: len(self._state)].copy_(self._state)
            self._retire(self._state)
            self._state = grown
        if processed > len(self._adjusted):
            self._retire(self._adjusted)
            self._adjusted = self._tensor((2 * processed, self.vocab), torch.float32)
        width = kernels.SCORE_HEADER + 2 * min(alternatives, self.vocab)
        if scored > len(self._scores) or width > self._scores.shape[1]:
            rows = max(scored, len(self._scores))
            self._retire(self._scores)
            self._scores = self._tensor((rows, max(width, self._scores.shape[1])), torch.int32)

    def _lists(
        self, samples: Sequence[SampleInput], fresh: Sequence[int], slot_of: dict[int, int], processed: Sequence[int]
    ) -> dict[str, npt.NDArray[np.generic]]:
        """Arrays of this step whose length depends on it."""
        prompts = [np.asarray(samples[i].prompt_token_ids, np.int32) for i in fresh]
        outputs = [np.asarray(samples[i].output_token_ids, np.int32) for i in fresh]
        sizes = [len(p) + len(o) for p, o in zip(prompts, outputs, strict=True)]
        places: list[int] = []
        tokens: list[int] = []
        biases: list[float] = []
        for place, i in enumerate(processed):
            changed = dict(samples[i].params.logit_bias)
            if samples[i].grammar is None:
                changed.update(dict.fromkeys(samples[i].banned_token_ids, -math.inf))
            for token, value in changed.items():
                if 0 <= token < self.vocab:
                    places.append(place)
                    tokens.append(token)
                    biases.append(value)
        return {
            "processed": np.array(processed, np.int32),
            "fresh_slot": np.array([slot_of[i] for i in fresh], np.int32),
            "fresh_first": np.cumsum([0, *sizes])[:-1].astype(np.int32),
            "fresh_prompt": np.array([len(p) for p in prompts], np.int32),
            "fresh_output": np.array([len(o) for o in outputs], np.int32),
            "ids": np.concatenate([x for pair in zip(prompts, outputs, strict=True) for x in pair] or [_NO_IDS]),
            "bias_place": np.array(places, np.int32),
            "bias_token": np.array(tokens, np.int32),
            "bias": np.array(biases, np.float32),
        } | grammar_masks(samples, processed)

    def _staging(self, nbytes: int) -> _Staging:
        """Memory that no queued copy reads any more."""
        if nbytes > self._buffer.nbytes:
            self._retire(self._buffer)
            self._set_buffer(2 * nbytes)
        for i, staging in enumerate(self._staged):
            if staging.idle:
                del self._staged[i]
                if staging.rows == self._rows and len(staging.bytes) >= nbytes:
                    return staging
                break
        return _Staging(self._rows, self._buffer.nbytes, self._pinned)

    def _pack(self, staging: _Staging, rows: Sequence[Row], slot_of: dict[int, int], processed: Sequence[int]) -> None:
        count = len(rows)
        params = [sample.params for _, _, sample, _ in rows]
        place_of = dict(zip(processed, range(count), strict=False))

        def put(name: str, values: Sequence[float]) -> None:
            at, kind = self._offsets[name], np.dtype(_TYPES[name][0])
            staging.bytes[at : at + count * kind.itemsize].view(kind)[:] = values

        temperature = [float(np.float32(p.temperature)) for p in params]
        put("rate", [_LOG2E / max(t, _COLDEST) if t > 0 else 0.0 for t in temperature])
        put("noise", [uniform(sample.params.seed, sample.choice, sample.position) for _, _, sample, _ in rows])
        put("top_p", [min(max(p.top_p, 0.0), 1.0) for p in params])
        put("top_k", [p.top_k if 0 < p.top_k < self.vocab else 0 for p in params])
        put("least", [math.ceil(min(p.min_p, 1.0) * kernels.UNIT) if p.min_p > 0 else 0 for p in params])
        put("row", [row for row, _, _, _ in rows])
        put("slot", [slot_of.get(i, -1) for i in range(count)])
        put("alternatives", [min(p.logprobs, self.vocab) for p in params])
        # The place for now; `run` knows where the logits are.
        put("adjusted", [place_of.get(i, -1) for i in range(count)])
        if processed:
            put("repetition", [p.repetition_penalty for p in params])
            put("frequency", [p.frequency_penalty for p in params])
            put("presence", [p.presence_penalty for p in params])

    # -- the device's part

    def run(self, logits: torch.Tensor, prepared: Prepared, tokens: torch.Tensor) -> None:
        """logits fp32 (R, vocab), contiguous → tokens int32 (count,), -1 where a row is not finite. Queued only."""
        if prepared.ran or prepared.staging.rows != self._rows:
            raise Internal("a prepared step runs once, and before the next is prepared")
        if logits.shape[1] != self.vocab or logits.data_ptr() % _ALIGN or not logits.is_contiguous():
            raise Internal(f"logits of {tuple(logits.shape)}, not of {self.vocab} tokens, contiguous and aligned")
        prepared.ran = True
        if not prepared.count:
            return
        staging, lists, columns, state = prepared.staging, prepared.lists, self._columns, self._state
        at = self._offsets["adjusted"]
        places = staging.bytes[at : at + 8 * prepared.count].view(np.int64)
        distance = self._adjusted.data_ptr() - logits.data_ptr()
        places[:] = np.where(places < 0, 0, distance // logits.element_size() + places * self.vocab)
        self._buffer[: prepared.nbytes].copy_(staging.buffer[: prepared.nbytes], non_blocking=True)
        if "fresh_slot" in lists:
            fresh = [
                self._list(prepared, name) for name in ("fresh_slot", "fresh_first", "fresh_prompt", "fresh_output")
            ]
            # A sequence without any tokens has no list of ids, but zeros to be written.
            ids = self._list(prepared, "ids") if "ids" in lists else fresh[0]
            kernels.count_tokens(fresh[0], fresh[1], fresh[2], fresh[3], ids, state)
        if "processed" in lists:
            processed = self._list(prepared, "processed")
            kernels.adjust(logits, processed, columns, state, self._adjusted)
            if "bias_place" in lists:
                which, changed = self._list(prepared, "bias_place"), self._list(prepared, "bias_token")
                biases = self._list(prepared, "bias", torch.float32)
                kernels.bias(logits, which, changed, biases, processed, columns, state, self._adjusted)
            if "mask" in lists:
                kernels.mask(self._list(prepared, "mask_place"), self._list(prepared, "mask"), self._adjusted)
        kernels.sample(logits, columns, prepared.count, state, self._scratch, tokens)
        self._slots.counted(prepared.keys, prepared.lengths)
        if prepared.scored:
            self._score(logits, prepared, tokens)
        if staging.event is not None:
            staging.event.record(torch.cuda.current_stream(self.device))
        if not prepared.scored:
            self._staged.append(staging)

    def _list(self, prepared: Prepared, name: str, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        at, count = prepared.lists[name]
        return self._view(at, count, dtype)

    def _score(self, logits: torch.Tensor, prepared: Prepared, tokens: torch.Tensor) -> None:
        count, width, staging = len(prepared.scored), self._scores.shape[1], prepared.staging
        columns = self._columns
        scored = self._list(prepared, "scored")
        kernels.score(logits, scored, columns.alternatives, columns.row, tokens, self._scores)
        if staging.scores.numel() < count * width:
            staging.scores = _empty((self._scores.numel(),), torch.int32, pin=self._pinned)
        prepared.width = width
        staging.scores[: count * width].copy_(self._scores[:count].view(-1), non_blocking=True)

    def finish(self, prepared: Prepared) -> list[TokenLogprobs | None]:
        """Scores of the samples that asked for them, once the stream has got past `run`."""
        answers: list[TokenLogprobs | None] = [None] * prepared.count
        if not prepared.scored or not prepared.ran:
            return answers
        staging, count, width = prepared.staging, len(prepared.scored), prepared.width
        words = staging.scores[: count * width].numpy().reshape(count, width)
        for i, alternatives, row in zip(prepared.scored, prepared.alternatives, words, strict=True):
            answers[i] = _score_of(row, alternatives) if row[0] >= 0 else None
        prepared.scored = []
        self._staged.append(staging)
        return answers

    def score(self, logits: torch.Tensor, targets: Sequence[int], alternatives: int) -> list[TokenLogprobs]:
        """Scores targets[i] by row i of logits fp32 (>= N, vocab), contiguous, as prompts want it. Waits."""
        count, alternatives = len(targets), min(alternatives, self.vocab)
        if not count:
            return []
        words = self._tensor((count, kernels.SCORE_HEADER + 2 * alternatives), torch.int32)
        numbers = torch.arange(count, dtype=torch.int32, device=self.device)
        tokens = torch.tensor(targets, dtype=torch.int32, device=self.device)
        kernels.score(logits, numbers, torch.full_like(numbers, alternatives), numbers, tokens, words)
        return [_score_of(row, alternatives) for row in words.cpu().numpy()]

    def forget(self, seq_ids: Iterable[int]) -> None:
        """These sequences have ended; unknown ones are ignored."""
        self._slots.forget(seq_ids)


_NO_IDS: npt.NDArray[np.int32] = np.zeros(0, np.int32)


def _penalized(sample: SampleInput) -> bool:
    p = sample.params
    return p.repetition_penalty != 1.0 or p.frequency_penalty != 0.0 or p.presence_penalty != 0.0


def _score_of(words: npt.NDArray[np.int32], alternatives: int) -> TokenLogprobs:
    """From the words that `score_kernel` writes."""
    token, rank = int(words[0]), int(words[1])
    header = kernels.SCORE_HEADER
    logit, peak = (float(x) for x in words[2:4].view(np.float32))
    mass = int(words[4]) % (1 << 32) + (int(words[5]) << 32)
    # No mass: the row held an infinite value, and no probability means anything.
    total = peak + math.log(mass / kernels.UNIT) if mass > 0 else math.nan
    ids = words[header : header + 2 * alternatives : 2]
    values = words[header + 1 : header + 1 + 2 * alternatives].view(np.float32)[::2]
    top = [(int(i), float(v) - total) for i, v in zip(ids, values, strict=False)]
    return TokenLogprobs(token_id=token, logprob=logit - total, rank=rank, top=top)
