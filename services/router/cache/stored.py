"""Answers worth keeping, and their stored form (the protobuf `CachedAnswer` itself)."""

from __future__ import annotations

import re
from collections.abc import Collection

from google.protobuf.message import DecodeError

from kvmesh.proto.v1 import inference_pb2, router_pb2

MAX_CHOICES = 16
# Ends of a whole answer. Calls of tools, once they are, join it for those that parse.
COMPLETE = (inference_pb2.FINISH_REASON_STOP,)

# How models begin to decline. Only openings: an answer may well go on to say what cannot be done.
_AM = r"(?:i[’']?m|i am)"
_UNABLE = rf"(?:(?:i (?:simply |really |just )?)?(?:can[’']?t|cannot|can not|won[’']?t)|{_AM} (?:unable|not able))\b"
_SERVE = (
    r"(?:be able to |to )?(?:help|assist|comply|fulfil|do that|provide|answer that|discuss|engage|create|support|"
    r"continue|generate|share)"
)
_SORRY = (
    rf"(?:{_AM} (?:very |really |so |truly )?sorry|{_AM} afraid(?: that)?|sorry|unfortunately|"
    r"(?:i|my) (?:sincerely )?apologi(?:[sz]e|es)|as an? (?:ai|language|large)[a-z -]{0,40})"
)
_REFUSAL = re.compile(
    rf"[*_\"'#> ]*(?:{_SORRY}[,.!]?(?: [a-z]{{1,20}}[,.])?"
    rf"(?: (?:but|as an? [a-z -]{{1,40}},))* (?:{_AM} afraid(?: that)? )?"
    rf"(?:{_UNABLE}|i (?:do not|don[’']?t) have|(?:that|this)(?:[’']?s| is) (?:not )?something i (?:{_UNABLE}))"
    rf"|{_UNABLE} {_SERVE}"
    rf"|i (?:must|have to|need to) (?:respectfully )?decline\b"
    rf"|(?:i (?:do not|don[’']?t) feel|{_AM} not) comfortable\b"
    # The same in other languages, by their commonest openings.
    r"|lo siento,? (?:pero )?no puedo\b|(?:je suis )?désolée?,? (?:mais )?je ne (?:peux|suis) pas\b"
    r"|(?:es )?tut mir leid,? (?:aber )?(?:ich kann|das kann ich|dabei kann ich)\b|desculpe,? (?:mas )?não posso\b"
    r"|mi dispiace,? (?:ma )?non posso\b|对不起,?我(?:不能|无法)|很?抱歉,?我(?:不能|无法))",
    re.IGNORECASE,
)
_LOOKED_AT = 200


def refusal(text: str) -> bool:
    """True when an answer opens by declining to answer."""
    return _REFUSAL.match(" ".join(text[:_LOOKED_AT].replace("，", ",").split())) is not None


def complete(answer: router_pb2.CachedAnswer) -> bool:
    """True when every choice ended by itself. Truncated answers are never kept: the next asker may have more room."""
    return 0 < len(answer.choices) <= MAX_CHOICES and all(choice.finish_reason in COMPLETE for choice in answer.choices)


def worth_keeping(answer: router_pb2.CachedAnswer) -> bool:
    """True for a complete answer with something in every choice, none of them a refusal."""
    return complete(answer) and all(
        (choice.text or choice.token_ids) and not refusal(choice.text) for choice in answer.choices
    )


def encode(answer: router_pb2.CachedAnswer, *, model: str, revision: str, max_bytes: int) -> bytes | None:
    """Bytes to store; None when the answer is not worth it, too large, or of another model or revision."""
    if not worth_keeping(answer) or answer.revision != revision or answer.model not in ("", model):
        return None
    if answer.ByteSize() > max_bytes:
        return None
    stored = router_pb2.CachedAnswer(
        choices=answer.choices, prompt_tokens=answer.prompt_tokens, revision=revision, model=model
    )
    data = stored.SerializeToString()
    return data if len(data) <= max_bytes else None


def decode(
    data: bytes,
    *,
    kind: str,
    score: float,
    served: Collection[tuple[str, str]],
    age_s: float = 0.0,
    purge_id: str = "",
) -> router_pb2.CachedAnswer | None:
    """The answer in stored bytes, marked with how it was found; None when they are none, or not of one of `served`,
    pairs of model and revision."""
    answer = router_pb2.CachedAnswer()
    try:
        answer.ParseFromString(data)
    except DecodeError:
        return None
    if not complete(answer) or (answer.model, answer.revision) not in served:
        return None
    answer.kind, answer.score, answer.age_s, answer.purge_id = kind, score, age_s, purge_id
    return answer
