"""JSON text for the wire: raw UTF-8, but nothing in it that any client takes for the end of a line."""

from __future__ import annotations

from json.encoder import encode_basestring

# Some clients split an event stream at every line separator that Unicode knows. JSON itself escapes those in ASCII.
_SEPARATORS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def text_bytes(text: str) -> bytes:
    """UTF-8 of JSON text."""
    return (text if text.isascii() else text.translate(_SEPARATORS)).encode("utf-8", "replace")


def quoted(text: str) -> str:
    """A JSON string; separators are escaped in `text_bytes`."""
    return encode_basestring(text)
