"""What a chat request becomes for one model: template input, grammar, and the reader of its output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvmesh.proto.v1 import inference_pb2 as pb
from services.gateway.speech.reader import MakeReader
from services.gateway.tokenizers import ModelTokenizer


@dataclass(frozen=True, slots=True)
class Shape:
    """`messages`, `tools`, `variables`: what the template is given. `grammar`: what the output must look like, instead
    of the request's own; None = as that says. `reader`: None = the output is plain text. `digest`: of all that shapes
    prompt and reading beside the messages, b"" where nothing does."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    grammar: pb.Grammar | None = None
    reader: MakeReader | None = None
    digest: bytes = b""


def shape(request: pb.ChatRequest, tokenizer: ModelTokenizer) -> Shape:
    """Raises InvalidArgument by field."""
    return Shape([{"role": message.role, "content": message.content} for message in request.messages])
