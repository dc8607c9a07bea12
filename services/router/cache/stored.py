"""Answers worth keeping, and their stored form (the protobuf `CachedAnswer` itself)."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from kvmesh.proto.v1 import inference_pb2, router_pb2

MAX_CHOICES = 16


def complete(answer: router_pb2.CachedAnswer) -> bool:
    """True when every choice ended by stop. Truncated answers are never kept: the next asker may have more room."""
    return 0 < len(answer.choices) <= MAX_CHOICES and all(
        choice.finish_reason == inference_pb2.FINISH_REASON_STOP for choice in answer.choices
    )


def encode(answer: router_pb2.CachedAnswer, *, revision: str, max_bytes: int) -> bytes | None:
    """Bytes to store, None when the answer is incomplete, too large, or of another revision than was asked."""
    if not complete(answer) or answer.revision != revision:
        return None
    if answer.ByteSize() > max_bytes:
        return None
    stored = router_pb2.CachedAnswer(
        choices=answer.choices, prompt_tokens=answer.prompt_tokens, revision=answer.revision
    )
    return stored.SerializeToString()


def decode(data: bytes, *, kind: str, score: float, revision: str) -> router_pb2.CachedAnswer | None:
    """The answer in stored bytes, marked with how it was found; None when they are not a usable one."""
    answer = router_pb2.CachedAnswer()
    try:
        answer.ParseFromString(data)
    except DecodeError:
        return None
    if not complete(answer) or answer.revision != revision:
        return None
    answer.kind, answer.score = kind, score
    return answer
