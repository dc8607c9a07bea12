"""Reading text that comes in pieces: where a mark may begin, where a JSON value ends."""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_DEPTH = 64

_STRING = re.compile(r'[^"\\]*')
# What JSON has outside of strings and brackets.
_PLAIN = re.compile(r"[\s,:0-9+\-.eEtrufalsn]*")


def first_mark(text: str, marks: Sequence[str]) -> tuple[int, str] | None:
    """The mark that begins first, and where."""
    found = [(at, -len(mark), mark) for mark in marks if (at := text.find(mark)) >= 0]
    if not found:
        return None
    at, _, mark = min(found)
    return at, mark


def safe_length(text: str, marks: Sequence[str]) -> int:
    """How much of `text` is text whatever follows: less the longest end that is a mark's beginning, and less the white
    space before that, which is dropped beside a mark."""
    longest = max(map(len, marks), default=0)
    end = len(text)
    for start in range(max(0, len(text) - longest + 1), len(text)):
        if any(mark.startswith(text[start:]) for mark in marks):
            end = start
            break
    return len(text[:end].rstrip())


class JsonScan:
    """Finds the end of a JSON object or array; `depth` brackets are open already.

    `ended`: its last bracket was met. `broken`: something stands there that JSON does not have.
    """

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._escape = False
        self.ended = False
        self.broken = False

    def feed(self, text: str, start: int = 0) -> int:
        """Goes on at `start`. Returns where the value ended (behind its bracket) or broke, -1 while it goes on."""
        at, size = start, len(text)
        while at < size:
            if self._escape:
                self._escape = False
                at += 1
                continue
            run = (_STRING if self._in_string else _PLAIN).match(text, at)
            assert run is not None
            at = run.end()
            if at == size:
                break
            character = text[at]
            if self._in_string:
                self._escape = character == "\\"
                self._in_string = self._escape
            elif character == '"':
                self._in_string = True
            elif character in "{[" and self._depth < MAX_DEPTH:
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.ended = True
                    return at + 1
            else:
                self.broken = True
                return at
            at += 1
        return -1
