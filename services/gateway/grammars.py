"""Whether a grammar compiles: asked before anything is spent on its request."""

from __future__ import annotations

from typing import Protocol

from kvmesh.errors import FailedPrecondition
from kvmesh.proto.v1 import inference_pb2 as pb
from services.gateway.tokenizers import ModelTokenizer


class GrammarCheck(Protocol):
    """Compiles grammars, off the event loop and within limits."""

    async def check(self, grammar: pb.Grammar, tokenizer: ModelTokenizer) -> None:
        """Raises InvalidArgument (it does not compile, or not within the limits)."""


class NoGrammars:
    """Where the library is not installed."""

    async def check(self, grammar: pb.Grammar, tokenizer: ModelTokenizer) -> None:
        """See GrammarCheck."""
        raise FailedPrecondition("this gateway serves no grammars")
