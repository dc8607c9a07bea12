"""Requests are checked here, once, field by field; what passes has an effective value in every sampling field.

Every refusal names its field in `details["field"]`. NaN fails every range, and infinities fail bounded ones.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvmesh.errors import InvalidArgument, TooLarge
from kvmesh.proto.v1 import inference_pb2 as pb

MAX_ID_BYTES = 128
MAX_MODEL_BYTES = 256
MAX_SALT_BYTES = 128
MAX_USER_BYTES = 128
MAX_SESSION_BYTES = 128
MAX_ROLE_BYTES = 64
MAX_NAME_BYTES = 64
MAX_MESSAGES = 1024
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_STOPS = 16
MAX_STOP_BYTES = 256
MAX_CHOICES = 16
MAX_LOGPROBS = 20
MAX_GRAMMAR_BYTES = 64 * 1024
MAX_TTFT_MS = 3_600_000
MAX_TOTAL_MS = 86_400_000

_REQUEST_ID = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the model and the operator allow. Token counts; `max_tokens` None = only the context limits the output."""

    vocab_size: int
    max_model_len: int
    max_prompt_bytes: int
    max_prompt_tokens: int = 0
    max_choices: int = MAX_CHOICES
    max_tokens: int | None = None


def bad(field: str, problem: str) -> InvalidArgument:
    """An InvalidArgument that names its field."""
    return InvalidArgument(f"{field}: {problem}", details={"field": field})


def check_request_id(value: str) -> None:
    """Client-chosen ids: printable ASCII without spaces, at most 128 bytes; empty = none chosen."""
    if value and (len(value) > MAX_ID_BYTES or not _REQUEST_ID.fullmatch(value)):
        raise bad("request_id", f"must be 1 to {MAX_ID_BYTES} printable ASCII characters without spaces")


def check_model(value: str) -> None:
    """A model name must be there and bounded; whether it exists is not known here."""
    if not value:
        raise bad("model", "is required")
    _size("model", value, MAX_MODEL_BYTES)


def check_common(request: pb.GenerateRequest | pb.ChatRequest) -> None:
    """The fields that Generate and Chat share, but for the prompt and the sampling parameters."""
    check_model(request.model)
    check_request_id(request.request_id)
    _size("cache_salt", request.cache_salt, MAX_SALT_BYTES)
    if request.cache not in pb.CacheMode.values():
        raise bad("cache", f"unknown value {request.cache}")
    _size("user", request.user, MAX_USER_BYTES)
    _size("session_id", request.session_id, MAX_SESSION_BYTES)
    _cache_control(request.cache_control)
    limits = request.limits
    if limits.HasField("ttft_ms"):
        _integer("limits.ttft_ms", limits.ttft_ms, 1, MAX_TTFT_MS)
    if limits.HasField("total_ms"):
        _integer("limits.total_ms", limits.total_ms, 1, MAX_TOTAL_MS)


def _cache_control(control: pb.CacheControl) -> None:
    """What it says must make sense; whether the tenant may say it is its policy's matter."""
    _number(control, "tau", 1.0, 0.0, 1.0, path="cache_control.")
    if control.only_if_cached and control.no_cache:
        raise bad("cache_control.only_if_cached", "cannot go with no_cache")


def check_messages(messages: Sequence[pb.ChatMessage], max_bytes: int) -> None:
    """At least one message, each with a role; TooLarge over `max_bytes` of text, calls and reasoning included.

    What calls and tools must be is looked at by `speech.check`.
    """
    if not messages:
        raise bad("messages", "at least one message is required")
    if len(messages) > MAX_MESSAGES:
        raise bad("messages", f"{len(messages)} messages; at most {MAX_MESSAGES} are allowed")
    total = 0
    for index, message in enumerate(messages):
        if not message.role:
            raise bad(f"messages[{index}].role", "is required")
        _size(f"messages[{index}].role", message.role, MAX_ROLE_BYTES)
        _size(f"messages[{index}].name", message.name, MAX_NAME_BYTES)
        _size(f"messages[{index}].tool_call_id", message.tool_call_id, MAX_ID_BYTES)
        total += len(message.content.encode()) + len(message.reasoning.encode())
        total += sum(call.ByteSize() for call in message.tool_calls)
        if total > max_bytes:
            raise TooLarge(f"the messages are larger than {max_bytes} bytes", details={"field": "messages"})


def check_prompt_text(text: str, max_bytes: int, *, field: str = "prompt") -> None:
    """Not empty; TooLarge over `max_bytes`."""
    if not text:
        raise bad(field, "is empty")
    if len(text) > max_bytes or len(text.encode()) > max_bytes:
        raise TooLarge(f"the {field} is larger than {max_bytes} bytes", details={"field": field})


def check_user(value: str) -> None:
    """The caller's own end user is bounded."""
    _size("user", value, MAX_USER_BYTES)


def check_prompt_length(count: int, bounds: Bounds, *, field: str = "prompt") -> None:
    """A prompt has at least one token, and leaves room for one token of output."""
    if not count:
        raise bad(field, "is empty")
    longest = bounds.max_model_len - 1
    if bounds.max_prompt_tokens:
        longest = min(longest, bounds.max_prompt_tokens)
    if count > longest:
        context = f"this model's maximum context length is {bounds.max_model_len} tokens"
        raise InvalidArgument(
            f"{field}: has {count} tokens; at most {longest} are allowed ({context})",
            details={"field": field, "reason": "context_length_exceeded"},
        )


def check_token_ids(ids: Sequence[int], bounds: Bounds, *, field: str = "prompt") -> None:
    """A prompt's tokens: as many as may be, all in the vocabulary."""
    check_prompt_length(len(ids), bounds, field=field)
    highest = max(ids)
    if highest >= bounds.vocab_size:
        raise bad(field, f"token id {highest} is outside the vocabulary of {bounds.vocab_size}")


def effective_sampling(given: pb.SamplingParams, prompt_tokens: int, bounds: Bounds) -> pb.SamplingParams:
    """Checked copy of `given` in which every field with a default is set, `seed` and `max_tokens` included.

    `logprobs` and `prompt_logprobs` stay absent when absent: absence is their meaning.
    """
    out = pb.SamplingParams()
    out.temperature = _number(given, "temperature", 1.0, 0.0, 100.0)
    out.top_k = _count(given, "top_k", 0, 0, bounds.vocab_size)
    out.top_p = _number(given, "top_p", 1.0, 0.0, 1.0, above=True)
    out.min_p = _number(given, "min_p", 0.0, 0.0, 1.0)
    out.repetition_penalty = _number(given, "repetition_penalty", 1.0, 0.0, 10.0, above=True)
    out.frequency_penalty = _number(given, "frequency_penalty", 0.0, -2.0, 2.0)
    out.presence_penalty = _number(given, "presence_penalty", 0.0, -2.0, 2.0)
    _logit_bias(given, out, bounds.vocab_size)
    out.seed = given.seed if given.HasField("seed") else secrets.randbits(64)
    out.max_tokens = _max_tokens(given, prompt_tokens, bounds)
    out.min_tokens = _count(given, "min_tokens", 0, 0, out.max_tokens)
    out.ignore_eos = given.ignore_eos
    _stops(given, out, bounds.vocab_size)
    highest = min(bounds.max_choices, MAX_CHOICES)
    out.n = _count(given, "n", 1, 1, highest)
    out.best_of = _count(given, "best_of", out.n, out.n, highest)
    if given.HasField("grammar"):
        out.grammar.CopyFrom(_grammar(given.grammar))
    for name in ("logprobs", "prompt_logprobs"):
        if given.HasField(name):
            setattr(out, name, _count(given, name, 0, 0, MAX_LOGPROBS))
    return out


def _grammar(given: pb.Grammar) -> pb.Grammar:
    kind = given.WhichOneof("kind")
    if kind is None or (kind == "json_object" and not given.json_object):
        raise bad("grammar", "names none")
    if given.ByteSize() > MAX_GRAMMAR_BYTES:
        raise bad("grammar", f"is larger than {MAX_GRAMMAR_BYTES} bytes")
    return given


def _max_tokens(given: pb.SamplingParams, prompt_tokens: int, bounds: Bounds) -> int:
    """What the context still holds is a fact (a larger wish is met as far as it goes); the tenant's limit is a rule."""
    room = bounds.max_model_len - prompt_tokens
    if not given.HasField("max_tokens"):
        return room if bounds.max_tokens is None else min(room, bounds.max_tokens)
    wanted = _count(given, "max_tokens", 0, 1, 2**32 - 1)
    if bounds.max_tokens is not None and wanted > bounds.max_tokens:
        raise bad("max_tokens", f"is {wanted}; this tenant may ask for at most {bounds.max_tokens}")
    return min(wanted, room)


def _logit_bias(given: pb.SamplingParams, out: pb.SamplingParams, vocab_size: int) -> None:
    if len(given.logit_bias) > MAX_LOGIT_BIAS:
        raise bad("logit_bias", f"has {len(given.logit_bias)} entries; at most {MAX_LOGIT_BIAS} are allowed")
    for token, value in given.logit_bias.items():
        if token >= vocab_size:
            raise bad("logit_bias", f"token id {token} is outside the vocabulary of {vocab_size}")
        if not -100.0 <= value <= 100.0:
            raise bad("logit_bias", f"the value of token {token} must be in [-100, 100]")
        out.logit_bias[token] = value


def _stops(given: pb.SamplingParams, out: pb.SamplingParams, vocab_size: int) -> None:
    if len(given.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise bad(
            "stop_token_ids", f"has {len(given.stop_token_ids)} entries; at most {MAX_STOP_TOKEN_IDS} are allowed"
        )
    for token in given.stop_token_ids:
        if token >= vocab_size:
            raise bad("stop_token_ids", f"token id {token} is outside the vocabulary of {vocab_size}")
    if len(given.stop) > MAX_STOPS:
        raise bad("stop", f"has {len(given.stop)} entries; at most {MAX_STOPS} are allowed")
    for stop in given.stop:
        if not stop:
            raise bad("stop", "must not hold an empty string")
        _size("stop", stop, MAX_STOP_BYTES)
    out.stop_token_ids.extend(given.stop_token_ids)
    out.stop.extend(given.stop)


def _size(field: str, value: str, limit: int) -> None:
    if len(value) > limit or len(value.encode()) > limit:
        raise bad(field, f"is longer than {limit} bytes")


def _integer(field: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise bad(field, f"is {value}; must be in [{low}, {high}]")
    return value


def _count(given: Any, name: str, default: int, low: int, high: int) -> int:
    return _integer(name, getattr(given, name), low, high) if given.HasField(name) else default


def _number(
    given: Any, name: str, default: float, low: float, high: float, *, above: bool = False, path: str = ""
) -> float:
    if not given.HasField(name):
        return default
    value: float = getattr(given, name)
    # Written so that NaN, for which every comparison is false, is refused.
    if not (low < value if above else low <= value) or not value <= high:
        raise bad(path + name, f"is {value:g}; must be in {'(' if above else '['}{low:g}, {high:g}]")
    return value
