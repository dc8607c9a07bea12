"""What may enter the engine at all: checks that need no state but the limits. Pure, so any thread may ask."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvmesh.engine.events import EngineRequest, Mode
from kvmesh.errors import InvalidArgument, TooLarge

MAX_CHOICES = 64


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of the core. Sizes in tokens or pages, times in seconds.

    max_batch: choices admitted at once; token_budget (>= max_batch): tokens of a step; chunk_size: prompt tokens of one
    sequence in one step; look_ahead: pages beyond the prompt at admission; max_queue: requests that wait beyond what
    the batch could take. remote_resume: a preempted REMOTE request of one choice is Admitted again, to fetch its KV
    from elsewhere, instead of being recomputed here. ring_wait_s: how long a full step ring may hold up a step.
    overlap: with a runner that can, the next step is scheduled and launched while one runs on the device.
    check_integrity: recount all pages after every step (debugging and tests).
    """

    max_model_len: int
    max_batch: int = 32
    token_budget: int = 512
    chunk_size: int = 256
    max_queue: int = 32
    look_ahead: int = 1
    prefix_cache: bool = True
    remote_resume: bool = False
    stall_timeout_s: float = 10.0
    ring_wait_s: float = 1.0
    overlap: bool = True
    check_integrity: bool = False
    overload_retry_s: float = 1.0

    def __post_init__(self) -> None:
        if self.token_budget < self.max_batch:
            raise InvalidArgument(f"token_budget {self.token_budget} must be at least max_batch {self.max_batch}")
        if min(self.max_model_len, self.max_batch, self.chunk_size) < 1 or self.max_queue < 0 or self.look_ahead < 0:
            raise InvalidArgument("max_model_len, max_batch and chunk_size must be positive, the others not negative")
        if self.stall_timeout_s <= 0 or self.ring_wait_s < 0:
            raise InvalidArgument("stall_timeout_s must be positive and ring_wait_s not negative")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request is measured against."""

    max_model_len: int
    max_batch: int
    page_size: int
    total_pages: int
    vocab_size: int

    def limit_len(self, request: EngineRequest) -> int:
        """Tokens, prompt and output, at which a choice ends with `length`: max_tokens, the context or the pool."""
        context = min(self.max_model_len, self.total_pages * self.page_size)
        return min(context, request.prompt_len + request.sampling.max_tokens)

    def least_pages(self, num_tokens: int, choices: int, *, decodes: bool) -> int:
        """Fewest pages with which the request can run: its tokens and, if it decodes, one more for each choice."""
        need = -(-(num_tokens + decodes) // self.page_size)
        return need + (choices - 1) * (need - num_tokens // self.page_size)

    def check(self, request: EngineRequest) -> None:
        """Raises InvalidArgument for a request that makes no sense, TooLarge for one that can never fit."""
        tokens, prompt_len, sampling = request.token_ids, request.prompt_len, request.sampling
        prefill_only = request.mode is Mode.PREFILL_ONLY
        if not 1 <= prompt_len <= len(tokens):
            raise InvalidArgument(f"prompt_len must be in 1..{len(tokens)} (the tokens given), got {prompt_len}")
        ids = np.asarray(tokens)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size:
            raise InvalidArgument(f"token ids must be integers in 0..{self.vocab_size - 1}")
        choices = 1 if prefill_only else request.n
        if not 1 <= choices <= min(MAX_CHOICES, self.max_batch):
            raise InvalidArgument(f"n must be in 1..{min(MAX_CHOICES, self.max_batch)}, got {request.n}")
        if request.first_choice < 0:
            raise InvalidArgument(f"first_choice must not be negative, got {request.first_choice}")
        if len(tokens) > prompt_len and (choices > 1 or prefill_only):
            raise InvalidArgument("a healed request (token_ids beyond prompt_len) has one choice and decodes")
        if not prefill_only and (sampling.max_tokens < 1 or sampling.min_tokens < 0):
            raise InvalidArgument("max_tokens must be at least 1 and min_tokens not negative")
        if sampling.prompt_logprobs is not None and request.mode is not Mode.LOCAL:
            raise InvalidArgument("prompt_logprobs are served only where the whole prompt is computed (role unified)")
        room = self.max_model_len - (0 if prefill_only else 1)
        if max(prompt_len, len(tokens) - 1) > room:
            raise TooLarge(
                f"prompt of {prompt_len} tokens does not fit the context of {self.max_model_len}",
                details={"prompt_tokens": str(prompt_len), "max_model_len": str(self.max_model_len)},
            )
        if not prefill_only and len(tokens) > prompt_len and len(tokens) >= self.limit_len(request):
            return  # already complete: nothing will be computed
        need = self.least_pages(len(tokens), choices, decodes=not prefill_only)
        if need > self.total_pages:
            raise TooLarge(
                f"request needs {need} KV pages to run, this engine has {self.total_pages}",
                details={"pages": str(need), "total_pages": str(self.total_pages)},
            )
