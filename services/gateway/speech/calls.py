"""From a model's text to tool calls, piece by piece.

What is read depends on the text alone, never on how it was cut into pieces:

- White space beside a call's marks is dropped; all other text is content.
- A call is told as soon as its head is whole; its arguments follow as they come, as the model wrote them. They end with
  their last bracket, or where something stands that JSON does not have.
- What begins like a call and is none (no JSON, no name, a function that was not offered) is content, marks included.
"""

from __future__ import annotations

import json
import re
from collections.abc import Set
from enum import Enum, auto
from typing import Protocol

from services.gateway.speech.formats import ToolFormat
from services.gateway.speech.scan import JsonScan, first_mark, safe_length

MAX_HEAD_CHARS = 1024
# A head without an object around it is short.
MAX_BARE_HEAD_CHARS = 256

_FIRST_KEY = re.compile(r'\{\s*"([^"\\]*)"')
_NAME_BEGINS = re.compile(r"[A-Za-z0-9_-]")
_CALL_KEYS = frozenset({"name", "type", "id", "function", "arguments", "parameters"})


class Told(Protocol):
    """Takes what was read."""

    def text(self, text: str) -> None:
        """Content, never empty."""

    def call(self, name: str) -> None:
        """A call begins."""

    def arguments(self, text: str) -> None:
        """The next piece of the arguments of the call that began last, never empty."""

    def called(self) -> None:
        """The call that began last is whole."""


class _State(Enum):
    TEXT = auto()
    HEAD = auto()
    ARGUMENTS = auto()
    REST = auto()
    """Between the arguments and the end of the object around them."""
    TAIL = auto()


class CallReader:
    """Reads the content of one choice. `names`: the functions that may be called."""

    def __init__(self, form: type[ToolFormat], names: Set[str], told: Told) -> None:
        self._form = form
        self._names = names
        self._told = told
        self._marks = (*form.opens, *form.drop)
        self._lead = re.compile(rf"[\s{re.escape(form.lead)}]*")
        self._buffer = ""
        self._state = _State.TEXT
        self._scan = JsonScan()
        self._scanned = 0
        # Of what may be a call: the text before the buffer that becomes content where it is none.
        self._opened = ""
        self._fresh = form.bare
        self._after_call = False

    def push(self, text: str) -> None:
        """The next piece of the content."""
        self._buffer += text
        while self._step():
            pass

    def finish(self) -> None:
        """The content is over: what was held is told."""
        while self._state is _State.HEAD:
            self._no_call()
            while self._step():
                pass
        if self._state is _State.TEXT:
            self._fresh = False
            self._say(self._buffer.lstrip() if self._after_call else self._buffer)
        self._buffer = ""

    def _say(self, text: str) -> None:
        if text:
            self._told.text(text)

    def _step(self) -> bool:
        """One transition; False when it takes more text."""
        match self._state:
            case _State.TEXT:
                return self._in_text()
            case _State.HEAD:
                return self._in_head()
            case _State.ARGUMENTS:
                return self._in_arguments()
            case _State.REST:
                return self._in_rest()
            case _State.TAIL:
                return self._in_tail()

    # --- content
    def _in_text(self) -> bool:
        if self._after_call:
            self._buffer = self._buffer.lstrip()
            if not self._buffer:
                return False
            self._after_call = False
        if self._fresh:
            begin = self._buffer.lstrip()
            if not begin:
                return False
            self._fresh = False
            if begin[0] == "{":
                self._open(self._buffer[: -len(begin)], begin)
                return True
        found = first_mark(self._buffer, self._marks)
        if found is None:
            safe = safe_length(self._buffer, self._marks)
            self._say(self._buffer[:safe])
            self._buffer = self._buffer[safe:]
            return False
        at, mark = found
        text = self._buffer[:at].rstrip()
        self._say(text)
        rest = self._buffer[at + len(mark) :]
        if mark in self._form.drop:
            self._buffer, self._after_call = rest, True
        else:
            self._open(self._buffer[len(text) : at + len(mark)], rest)
        return True

    def _open(self, opened: str, rest: str) -> None:
        self._state, self._opened, self._buffer = _State.HEAD, opened, rest
        self._scan, self._scanned = JsonScan(), 0

    def _no_call(self) -> None:
        """What was opened is content; the text behind its mark may hold another one."""
        self._say(self._opened)
        self._state, self._opened = _State.TEXT, ""

    # --- a call
    def _in_head(self) -> bool:
        form = self._form
        if not self._scanned:
            lead = self._lead.match(self._buffer)
            assert lead is not None
            self._opened += lead[0]
            self._buffer = self._buffer[lead.end() :]
        if not self._buffer:
            return False
        if not (self._buffer[0] == "{" if form.wrapped else _NAME_BEGINS.match(self._buffer)):
            self._no_call()
            return True
        head = form.head.match(self._buffer[:MAX_HEAD_CHARS])
        if head is not None:
            if head["name"] not in self._names:
                self._no_call()
                return True
            self._told.call(head["name"])
            self._buffer = self._buffer[head.end() :]
            self._scan, self._state = JsonScan(), _State.ARGUMENTS
            return True
        return self._whole_object() if form.wrapped else self._bare_head()

    def _bare_head(self) -> bool:
        if len(self._buffer) < MAX_BARE_HEAD_CHARS:
            return False
        self._no_call()
        return True

    def _whole_object(self) -> bool:
        """An object that names the function later: held until it is whole."""
        key = _FIRST_KEY.match(self._buffer)
        if key is not None and key[1] not in _CALL_KEYS:
            self._no_call()
            return True
        end = self._scan.feed(self._buffer, self._scanned)
        if end < 0:
            self._scanned = len(self._buffer)
            return False
        call = None if self._scan.broken else _parsed(self._buffer[:end])
        if call is None or call[0] not in self._names:
            self._no_call()
            return True
        self._told.call(call[0])
        self._told.arguments(call[1])
        self._told.called()
        self._buffer, self._state = self._buffer[end:], _State.TAIL
        return True

    def _in_arguments(self) -> bool:
        end = self._scan.feed(self._buffer)
        piece = self._buffer if end < 0 else self._buffer[:end]
        if piece:
            self._told.arguments(piece)
        self._buffer = self._buffer[len(piece) :]
        if end < 0:
            return False
        if self._scan.broken:
            self._state = _State.TAIL
            return True
        self._told.called()
        self._scan, self._state = JsonScan(1), _State.REST if self._form.wrapped else _State.TAIL
        return True

    def _in_rest(self) -> bool:
        end = self._scan.feed(self._buffer)
        self._buffer = "" if end < 0 else self._buffer[end:]
        if end >= 0:
            self._state = _State.TAIL
        return end >= 0

    def _in_tail(self) -> bool:
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        if self._buffer[0] in self._form.again:
            self._open(self._buffer[0], self._buffer[1:])
            return True
        for close in self._form.close:
            if self._buffer.startswith(close):
                self._buffer = self._buffer[len(close) :]
                return True
        if any(close.startswith(self._buffer) for close in self._form.close):
            return False
        self._state, self._after_call = _State.TEXT, True
        return True


def _parsed(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call as a whole JSON object; None when it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    inner = value.get("function", value)
    if not isinstance(inner, dict):
        return None if not isinstance(inner, str) else _named(inner, value)
    return _named(inner.get("name"), inner)


def _named(name: object, value: dict[str, object]) -> tuple[str, str] | None:
    given = value.get("arguments", value.get("parameters"))
    if isinstance(given, str):
        # Some models write the arguments as the text of an object.
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            return None
    if not isinstance(name, str) or not isinstance(given, dict | None):
        return None
    # Escaped: half of a surrogate pair is no text.
    return name, json.dumps(given or {}, ensure_ascii=True)
