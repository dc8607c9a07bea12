"""Tokens to text, one token at a time, in whole characters.

The sum of the pieces equals the full decode of the sequence (special tokens skipped). Byte-level vocabularies, which
most models have, are joined as bytes; everything else goes through the tokenizer's own decoder with the prefix-offset
method: decode a short window with and without the new token and show the difference once it ends in a whole character.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
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


class ByteDetokenizer:
    """For vocabularies in which each token is a fixed string of bytes."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._bytes = vocabulary.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._bytes(token_id) or b"")

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
        self._ids: list[int] = []
        self._read = 0
        self._shown = ""

    def push(self, token_id: int) -> str:
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


def detokenizer(vocabulary: Vocabulary, *, byte_level: bool) -> Detokenizer:
    """A fresh decoder for one choice."""
    return ByteDetokenizer(vocabulary) if byte_level else WindowDetokenizer(vocabulary)
