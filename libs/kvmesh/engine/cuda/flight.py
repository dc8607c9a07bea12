"""A step that is queued on the device, and what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvmesh.engine.failures import SequencesFailed
from kvmesh.engine.runner import SliceResult, StepBatch, StepResult, TokenLogprobs

NO_TOKEN = -1
"""What is sampled from logits that are not finite."""


@dataclass(slots=True, eq=False)
class Flight:
    """A queued step. places: of each slice of the batch, its tokens' part of the step's tokens."""

    batch: StepBatch
    places: list[slice]
    tokens: torch.Tensor | None
    done: torch.cuda.Event
    prepared: Any = None
    # (slice, hidden states of its tokens), where its prompt is scored.
    scored: list[tuple[int, torch.Tensor]] = field(default_factory=list)

    def result(
        self, scores: Sequence[TokenLogprobs | None], prompts: Mapping[int, Sequence[TokenLogprobs]]
    ) -> StepResult:
        """Once it is done. scores: of all tokens, or none at all; prompts: those of slices by number.

        Raises SequencesFailed for sequences whose logits are not finite.
        """
        tokens = self.tokens.tolist() if self.tokens is not None else []
        results, failed = [], []
        for i, (slice_, place) in enumerate(zip(self.batch.slices, self.places, strict=True)):
            mine = tokens[place]
            if NO_TOKEN in mine:
                failed.append(slice_.seq_id)
                continue
            logprobs = scores[place] if scores else (None,) * len(mine)
            results.append(SliceResult(slice_.seq_id, mine, logprobs, prompts.get(i, ())))
        if failed:
            raise SequencesFailed("the model's logits are not finite", failed, StepResult(results))
        return StepResult(results)
