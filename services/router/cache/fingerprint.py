"""What the answer caches compare.

The fingerprint of a request is a digest of the request itself, less the fields listed here that cannot change the
answer. A field added to the proto later is therefore part of it until somebody decides otherwise, and so are unknown
fields of a newer gateway. Whose question it is, the name it was asked under, and what stands behind that name by the
operator's settings are part of every key; which revision answered is kept in the entry.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass

from kvmesh.proto.v1 import inference_pb2, router_pb2

KEY_BYTES = 32
TAG_BYTES = 16
PROMPT_BYTES = 16

# Who asks, by when, how urgently, what may be cached, where it might run: none of it is the question.
NOT_COMPARED = (
    "request_id",
    "client_request_id",
    "gateway_id",
    "session_id",
    "cache",
    "cache_control",
    "tau",
    "no_flight",
    "ttft_ms",
    "total_ms",
    "priority",
    "exclude_workers",
    "chains",
    "chains_incomplete",
    "tokenized_for",
)
# Parts of the scope, or of the prompt's digest.
COMPARED_ELSEWHERE = ("model", "user", "token_ids", "prompt_digest")

_EXACT = b"kvmesh-answer-2"
_PARTITION = b"kvmesh-near-2"
_PROMPT = b"kvmesh-prompt-2"


@dataclass(frozen=True, slots=True)
class CacheKey:
    """Names of one request in the caches.

    exact: 32 bytes for the whole request. partition: 32 bytes for all but the last user text, empty when there is none
    that may differ. text: the last user text. prompt: 16 bytes for the rendered tokens; equal texts with different
    tokens are different questions. tag: 32 hex digits, the hash slot of all that is kept of this request.
    """

    exact: bytes
    partition: bytes = b""
    text: str = ""
    prompt: bytes = b""
    tag: str = ""


def tenant_tag(secret: bytes, tenant: str, user: str = "") -> str:
    """32 hex digits that stand for a tenant (and, with `user`, for one of its users), and tell nobody which one."""
    body = _frame((tenant.encode(), user.encode()) if user else (tenant.encode(),))
    return hmac.digest(secret, body, "sha256")[:TAG_BYTES].hex()


def model_tag(model: str) -> str:
    """32 hex digits for a model's name: its index."""
    return hashlib.blake2b(model.encode(), digest_size=TAG_BYTES, person=b"kvmesh-model-1").hexdigest()


def family_tag(model: str, revision: str) -> bytes:
    """8 bytes for a model in one revision: what an entry was answered by."""
    body = _frame((model.encode(), revision.encode()))
    return hashlib.blake2b(body, digest_size=8, person=b"kvmesh-family-1").digest()


def cache_key(request: router_pb2.RouteRequest, scope: Iterable[str], *, alias: bool = False) -> CacheKey:
    """Key of a request within `scope`: whatever sets it apart that is not in the request itself.

    alias: the name may stand for models of several templates and tokenizers, so that of a chat its messages are
    compared and not the tokens that one of them makes of it.
    """
    parts = tuple(part.encode() for part in (request.model, *scope))
    stripped = router_pb2.RouteRequest()
    stripped.CopyFrom(request)
    for name in (*NOT_COMPARED, *COMPARED_ELSEWHERE):
        stripped.ClearField(name)  # type: ignore[arg-type]
    if alias and request.messages and not request.prompt_text:
        stripped.ClearField("prompt_tokens")
        stripped.ClearField("tokenizer_fingerprint")
        prompt = b"\0" * PROMPT_BYTES
    else:
        prompt = _prompt(request)
    exact = _digest(_EXACT, (*parts, prompt, _canonical(stripped)))
    text = last_user_text(request)
    if not text:
        return CacheKey(exact, prompt=prompt, tag=exact[:TAG_BYTES].hex())
    stripped.messages[len(request.messages) - 1].content = ""
    # It follows from the tokens, which hold the text; what else they hold follows from the fields that stay. Of equal
    # texts `prompt` tells them apart.
    stripped.ClearField("prompt_tokens")
    partition = _digest(_PARTITION, (*parts, _canonical(stripped)))
    return CacheKey(exact, partition, text, prompt, partition[:TAG_BYTES].hex())


def last_user_text(request: router_pb2.RouteRequest) -> str:
    """The text a similar question may differ in: the last message if the user wrote it. A raw prompt has none: where
    in it a history ends is not known."""
    if request.prompt_text or not request.messages:
        return ""
    last: inference_pb2.ChatMessage = request.messages[-1]
    return last.content if last.role == "user" else ""


def _prompt(request: router_pb2.RouteRequest) -> bytes:
    """Digest of the rendered prompt: from the gateway's own, or from the tokens of one that still sends them."""
    tokens: bytes = request.prompt_digest
    if not tokens and request.token_ids:
        tokens = router_pb2.RouteRequest(token_ids=request.token_ids).SerializeToString()
    body = _frame((tokens, request.prompt_tokens.to_bytes(8, "little")))
    return hashlib.blake2b(body, digest_size=PROMPT_BYTES, person=_PROMPT).digest()


def _canonical(message: router_pb2.RouteRequest) -> bytes:
    """Bytes that depend on the contents alone (map entries sorted)."""
    return message.SerializeToString(deterministic=True)


def _frame(parts: Iterable[bytes]) -> bytes:
    """Parts with their lengths before them, so that no two lists look alike."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def _digest(person: bytes, parts: Iterable[bytes]) -> bytes:
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=person)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
