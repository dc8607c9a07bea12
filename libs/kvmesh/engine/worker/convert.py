"""Between protos and the core's own types. A submission is checked here by name, before anything is made of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.engine import events
from kvmesh.engine.runner import SamplingParams, TokenLogprobs
from kvmesh.errors import InvalidArgument, TooLarge
from kvmesh.proto.v1 import engine_pb2 as pb
from kvmesh.proto.v1 import inference_pb2
from kvmesh.rpc.status import to_frame

MAX_ID_BYTES = 128
MAX_SALT_BYTES = 1024
MAX_CHOICES = 16
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKENS = 64
MAX_PRIORITY = 1_000_000
# Serialized size of one alternative of a log-probability, rounded up.
_ALTERNATIVE_BYTES = 16

_FINISH = {
    events.FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    events.FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What bounds a request on this worker. Tokens, pages, bytes."""

    vocab_size: int
    max_model_len: int
    page_size: int
    num_pages: int
    look_ahead: int
    max_message_bytes: int
    prompt_logprobs: bool

    def fits(self, tokens: int) -> bool:
        """True when one sequence of that many tokens can ever be held."""
        return -(-tokens // self.page_size) <= self.num_pages


def refuse(field: str, why: str) -> InvalidArgument:
    """The error for a wrong field."""
    return InvalidArgument(f"{field}: {why}", details={"field": field})


def check_id(field: str, value: str) -> None:
    """An id is 1 to 128 bytes."""
    if not value:
        raise refuse(field, "must not be empty")
    if len(value.encode()) > MAX_ID_BYTES:
        raise refuse(field, f"longer than {MAX_ID_BYTES} bytes")


def check_tokens(tokens: Sequence[int], limits: ModelLimits) -> None:
    """Token ids: some, each in the vocabulary, not more than the context and the pages hold."""
    if not tokens:
        raise refuse("token_ids", "must not be empty")
    if len(tokens) > limits.max_model_len:
        raise refuse("token_ids", f"{len(tokens)} tokens, the context has {limits.max_model_len}")
    if max(tokens) >= limits.vocab_size:
        raise refuse("token_ids", f"token id {max(tokens)} is outside the vocabulary of {limits.vocab_size}")


def check_submit(request: pb.SubmitRequest, limits: ModelLimits) -> SamplingParams:
    """The request's sampling, or InvalidArgument (TooLarge) naming the field that is wrong."""
    check_id("gateway_id", request.gateway_id)
    check_id("request_id", request.request_id)
    check_tokens(request.token_ids, limits)
    length, prompt_len = len(request.token_ids), request.prompt_len
    if not 1 <= prompt_len <= length:
        raise refuse("prompt_len", f"must be in 1..{length} (the length of token_ids), got {prompt_len}")
    if request.ttft_ms == 0:
        raise refuse("ttft_ms", "no time is left")
    if request.total_ms == 0:
        raise refuse("total_ms", "no time is left")
    if len(request.cache_salt.encode()) > MAX_SALT_BYTES:
        raise refuse("cache_salt", f"longer than {MAX_SALT_BYTES} bytes")
    if abs(request.priority) > MAX_PRIORITY:
        raise refuse("priority", f"must be within ±{MAX_PRIORITY}")
    sampling = sampling_params(request.sampling, limits)
    if prompt_len + sampling.max_tokens > limits.max_model_len:
        raise refuse(
            "sampling.max_tokens",
            f"prompt of {prompt_len} + max_tokens {sampling.max_tokens} is over the context of {limits.max_model_len}",
        )
    if not limits.fits(prompt_len + sampling.max_tokens):
        raise TooLarge(
            f"prompt of {prompt_len} + max_tokens {sampling.max_tokens} is more than all {limits.num_pages} pages hold",
            details={"field": "sampling.max_tokens"},
        )
    if -(-length // limits.page_size) + limits.look_ahead > limits.num_pages:
        raise TooLarge(
            f"{length} tokens with look-ahead need more than all {limits.num_pages} pages",
            details={"field": "token_ids"},
        )
    if length - prompt_len > sampling.max_tokens:
        raise refuse("sampling.max_tokens", f"{length - prompt_len} tokens are output already")
    if length > prompt_len and choices_run(request.sampling) > 1:
        raise refuse("prompt_len", "output can only be replayed for a single choice")
    if request.first_choice + choices_run(request.sampling) > MAX_CHOICES:
        raise refuse("first_choice", f"choices are numbered below {MAX_CHOICES}, got {request.first_choice}")
    if sampling.prompt_logprobs is not None:
        if not limits.prompt_logprobs:
            raise refuse("sampling.prompt_logprobs", "served by workers of role unified only")
        if (sampling.prompt_logprobs + 2) * _ALTERNATIVE_BYTES * prompt_len > limits.max_message_bytes // 2:
            raise TooLarge(
                "prompt log-probabilities of this prompt do not fit a message",
                details={"field": "sampling.prompt_logprobs"},
            )
    return sampling


def choices_run(sampling: inference_pb2.SamplingParams) -> int:
    """Choices that are run: best_of, by default n, by default 1."""
    n = sampling.n if sampling.HasField("n") else 1
    return sampling.best_of if sampling.HasField("best_of") else n


def sampling_params(sampling: inference_pb2.SamplingParams, limits: ModelLimits) -> SamplingParams:
    """The core's sampling of a proto whose fields are effective. Absent fields take the default of their comment.

    max_tokens and seed must be there: the gateway fills them. Raises InvalidArgument naming the field.
    """
    if not sampling.HasField("max_tokens"):
        raise refuse("sampling.max_tokens", "is required here")
    if sampling.max_tokens < 1:
        raise refuse("sampling.max_tokens", "must be at least 1")
    if not sampling.HasField("seed"):
        raise refuse("sampling.seed", "is required here")
    n = sampling.n if sampling.HasField("n") else 1
    if not 1 <= n <= MAX_CHOICES:
        raise refuse("sampling.n", f"must be in 1..{MAX_CHOICES}, got {n}")
    best_of = choices_run(sampling)
    if not n <= best_of <= MAX_CHOICES:
        raise refuse("sampling.best_of", f"must be in n..{MAX_CHOICES}, got {best_of}")
    top_k = sampling.top_k if sampling.HasField("top_k") else 0
    if top_k > limits.vocab_size:
        raise refuse("sampling.top_k", f"is over the vocabulary of {limits.vocab_size}")
    top_p = _number(sampling, "top_p", 1.0, 0.0, 1.0)
    if top_p == 0.0:
        raise refuse("sampling.top_p", "must be above 0")
    repetition = _number(sampling, "repetition_penalty", 1.0, 0.0, 10.0)
    if repetition == 0.0:
        raise refuse("sampling.repetition_penalty", "must be above 0")
    if sampling.min_tokens > sampling.max_tokens:
        raise refuse("sampling.min_tokens", "must not be over max_tokens")
    if len(sampling.logit_bias) > MAX_LOGIT_BIAS:
        raise refuse("sampling.logit_bias", f"more than {MAX_LOGIT_BIAS} entries")
    for token, bias in sampling.logit_bias.items():
        if token >= limits.vocab_size:
            raise refuse("sampling.logit_bias", f"token id {token} is outside the vocabulary")
        if not -100.0 <= bias <= 100.0:
            raise refuse("sampling.logit_bias", "values must be in -100..100")
    if len(sampling.stop_token_ids) > MAX_STOP_TOKENS:
        raise refuse("sampling.stop_token_ids", f"more than {MAX_STOP_TOKENS} entries")
    if any(token >= limits.vocab_size for token in sampling.stop_token_ids):
        raise refuse("sampling.stop_token_ids", "a token id is outside the vocabulary")
    return SamplingParams(
        temperature=_number(sampling, "temperature", 1.0, 0.0, 100.0),
        top_k=top_k,
        top_p=top_p,
        min_p=_number(sampling, "min_p", 0.0, 0.0, 1.0),
        repetition_penalty=repetition,
        frequency_penalty=_number(sampling, "frequency_penalty", 0.0, -2.0, 2.0),
        presence_penalty=_number(sampling, "presence_penalty", 0.0, -2.0, 2.0),
        logit_bias=dict(sampling.logit_bias),
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=frozenset(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        seed=sampling.seed,
        want_logprobs=sampling.HasField("logprobs"),
        logprobs=_alternatives(sampling, "logprobs") or 0,
        prompt_logprobs=_alternatives(sampling, "prompt_logprobs"),
    )


def _number(sampling: inference_pb2.SamplingParams, name: str, default: float, low: float, high: float) -> float:
    if not sampling.HasField(name):  # type: ignore[arg-type]
        return default
    value = float(getattr(sampling, name))
    # A NaN fails every comparison, so it is refused here too.
    if not (math.isfinite(value) and low <= value <= high):
        raise refuse(f"sampling.{name}", f"must be in {low:g}..{high:g}, got {value:g}")
    return value


def _alternatives(sampling: inference_pb2.SamplingParams, name: str) -> int | None:
    if not sampling.HasField(name):  # type: ignore[arg-type]
        return None
    value = int(getattr(sampling, name))
    if value > MAX_LOGPROBS:
        raise refuse(f"sampling.{name}", f"must be in 0..{MAX_LOGPROBS}, got {value}")
    return value


def logprob_proto(score: TokenLogprobs) -> inference_pb2.TokenLogprob:
    """Ids only: the gateway knows the tokens' bytes."""
    return inference_pb2.TokenLogprob(
        token_id=score.token_id,
        logprob=score.logprob,
        rank=score.rank,
        top=[inference_pb2.TopLogprob(token_id=token, logprob=value) for token, value in score.top],
    )


def delta_proto(key: events.RequestKey, event: events.Tokens) -> pb.SequenceDelta:
    """A delta under the public key of the request (the core may know it by another)."""
    delta = pb.SequenceDelta(
        request_id=key.request_id,
        attempt=key.attempt,
        choice=event.choice,
        first_position=event.first_position,
        token_ids=event.token_ids,
        logprobs=[logprob_proto(score) for score in event.logprobs],
    )
    if event.finish_reason is not None:
        delta.finish_reason = _FINISH[event.finish_reason]
    if event.stop_token_id is not None:
        delta.stop_token_id = event.stop_token_id
    if event.cumulative_logprob is not None:
        delta.cumulative_logprob = event.cumulative_logprob
    return delta


def error_proto(error: BaseException) -> pb.WorkerError:
    """A terminal error for a frame, by the one table."""
    frame = to_frame(error)
    return pb.WorkerError(code=frame.code, reason=frame.reason, message=frame.message, retryable=frame.retryable)


def load_proto(load: events.LoadSnapshot) -> pb.WorkerLoad:
    """The load as it travels."""
    return pb.WorkerLoad(
        free_pages=load.free_pages,
        total_pages=load.total_pages,
        running=load.running,
        waiting=load.waiting,
        transferring=load.transferring,
        queued_tokens=load.queued_tokens,
        inflight_tokens=load.inflight_tokens,
        step=load.step,
    )
