"""Tokens to text, one token at a time, in whole characters.

The sum of the pieces equals the full decode of the sequence (silent tokens skipped). Vocabularies in which each token
is a string of bytes, which most models have, are joined as bytes: byte-level ones, and those of SentencePiece, whose
decoders drop the space before the first word. Everything else goes through the tokenizer's own decoder with the
prefix-offset method: decode a short window with and without the new token and show the difference once it ends in a
whole character.

Bytes that are no UTF-8 become U+FFFD as soon as that is certain, as Unicode recommends it. A decoder that only looks at
them at the output's end may spoil the characters beside them too.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from enum import Enum, auto
from typing import Protocol

REPLACEMENT = "�"
# A character takes at most four bytes, so a window this long that still ends in a replacement character is truly
# undecodable; holding on would only grow the window.
MAX_HELD_TOKENS = 16


class Vocabulary(Protocol):
    """What detokenization asks of a tokenizer."""

    def decode(self, ids: Sequence[int]) -> str:
        """Full decode, special tokens skipped, invalid bytes replaced."""

    def token_bytes(self, token_id: int) -> bytes | None:
        """Bytes a token adds to the text (b"" for a special one); None when that depends on its neighbours."""


class Detokenizer(Protocol):
    """Incremental decoder of one choice."""

    def push(self, token_id: int) -> str:
        """Text that became certain with this token, often "" """

    def flush(self) -> str:
        """The rest at the end of the output; an unfinished character becomes U+FFFD."""


class Lead(Enum):
    """What a decoder drops at the beginning of an output."""

    NOTHING = auto()
    SPACE = auto()
    """One space."""
    SPACES = auto()
    """The spaces of the first token."""


class ByteDetokenizer:
    """For vocabularies in which each token is a fixed string of bytes. `lead`: what is dropped of the first one."""

    def __init__(self, vocabulary: Vocabulary, lead: Lead = Lead.NOTHING) -> None:
        self._bytes = vocabulary.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._lead = lead

    def push(self, token_id: int) -> str:
        piece = self._bytes(token_id) or b""
        if self._lead is not Lead.NOTHING and piece:
            piece = piece.replace(b" ", b"") if self._lead is Lead.SPACES else piece.removeprefix(b" ")
            self._lead = Lead.NOTHING
        return self._decoder.decode(piece)

    def flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class WindowDetokenizer:
    """For all other decoders: the prefix-offset method.

    `ids[prefix:read]` has been shown and is kept as context, since a decoder may strip or join at a sequence's start.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._decode = vocabulary.decode
        self._bytes = vocabulary.token_bytes
        self._ids: list[int] = []
        self._read = 0
        self._shown = ""

    def push(self, token_id: int) -> str:
        if self._bytes(token_id) == b"":
            # A silent token would only make the window longer, and a thousand of them a thousand times.
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text.endswith(REPLACEMENT) and len(self._ids) - self._read < MAX_HELD_TOKENS:
            return ""
        return self._advance(text)

    def flush(self) -> str:
        return self._advance(self._decode(self._ids)) if len(self._ids) > self._read else ""

    def _advance(self, text: str) -> str:
        new = text[len(self._shown) :]
        if not new:
            return ""
        # Keep the tokens of the last piece as context for the next one.
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        self._shown = self._decode(self._ids)
        return new


def detokenizer(vocabulary: Vocabulary, lead: Lead | None) -> Detokenizer:
    """A fresh decoder for one choice; `lead`: None = tokens are no fixed strings of bytes."""
    return WindowDetokenizer(vocabulary) if lead is None else ByteDetokenizer(vocabulary, lead)
