"""What the answer caches compare.

The fingerprint of a request is a digest of the request itself, less the fields listed here that cannot change the
answer. A field added to the proto later is therefore part of it until somebody decides otherwise, and so are unknown
fields of a newer gateway. Which tenant asks, which model in which revision answers, and what the digest is for are
part of every key.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from kvmesh.proto.v1 import inference_pb2, router_pb2
from services.router.fleet import Family

KEY_BYTES = 32
MAX_TEXT_CHARS = 4096

# Who asks, by when, how urgently and what may be cached: none of it is the question. The model's name is replaced by
# the family that serves, so that an alias and the model it stands for share answers.
NOT_COMPARED = (
    "request_id",
    "gateway_id",
    "model",
    "cache",
    "tau",
    "ttft_ms",
    "total_ms",
    "exclude_workers",
    "priority",
    "prompt_tokens",
)

_EXACT = b"kvmesh-answer-1"
_PARTITION = b"kvmesh-near-1"
_PROMPT = b"kvmesh-prompt-1"


@dataclass(frozen=True, slots=True)
class CacheKey:
    """Names of one request in the caches.

    exact: 32 bytes for the whole request. partition: 32 bytes for all but the last user text, empty when the request
    has no such text. text: the last user text. prompt: digest of the rendered tokens; equal texts with different
    tokens are different questions.
    """

    exact: bytes
    partition: bytes = b""
    text: str = ""
    prompt: bytes = b""


def cacheable(request: router_pb2.RouteRequest) -> bool:
    """False for requests that want more than an answer's text: log-probabilities are not kept."""
    sampling = request.sampling
    return not sampling.HasField("logprobs") and not sampling.HasField("prompt_logprobs")


def cache_key(request: router_pb2.RouteRequest, tenant: str, family: Family) -> CacheKey:
    """Key of a request of `tenant` that `family` serves."""
    stripped = router_pb2.RouteRequest()
    stripped.CopyFrom(request)
    for name in NOT_COMPARED:
        stripped.ClearField(name)  # type: ignore[arg-type]
    scope = [tenant, family.model, family.revision, family.tokenizer]
    exact = _digest(_EXACT, scope, _canonical(stripped))
    text = last_user_text(request)
    if not text or len(text) > MAX_TEXT_CHARS:
        return CacheKey(exact)
    # The rendered tokens hold the text too. What else they hold follows from the fields that stay and from the
    # family's template.
    stripped.ClearField("token_ids")
    if request.messages:
        stripped.messages[len(request.messages) - 1].content = ""
    else:
        stripped.prompt_text = ""
    prompt = hashlib.blake2b(_pack(request.token_ids), digest_size=16, person=_PROMPT).digest()
    return CacheKey(exact, _digest(_PARTITION, scope, _canonical(stripped)), text, prompt)


def last_user_text(request: router_pb2.RouteRequest) -> str:
    """The text a similar question may differ in: the last message if the user wrote it, or the raw prompt."""
    if request.messages:
        last: inference_pb2.ChatMessage = request.messages[-1]
        return last.content if last.role == "user" and not request.prompt_text else ""
    return request.prompt_text


def _canonical(message: router_pb2.RouteRequest) -> bytes:
    """Bytes that depend on the contents alone (map entries sorted)."""
    return message.SerializeToString(deterministic=True)


def _pack(token_ids: object) -> bytes:
    return router_pb2.RouteRequest(token_ids=token_ids).SerializeToString()  # type: ignore[arg-type]


def _digest(person: bytes, scope: list[str], body: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=person)
    for field in [*(part.encode() for part in scope), body]:
        digest.update(len(field).to_bytes(8, "little") + field)
    return digest.digest()
