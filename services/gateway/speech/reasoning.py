"""Divides a model's text into its reasoning and what it says."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

from services.gateway.speech.profile import Marks
from services.gateway.speech.scan import safe_length


class _State(Enum):
    BEGIN = auto()
    INSIDE_BEGIN = auto()
    INSIDE = auto()
    AFTER = auto()
    CONTENT = auto()


class ReasoningReader:
    """Reasoning stands at the output's beginning, between its marks; `opened`: the prompt wrote the first one.

    White space at the marks is dropped. An output that ends inside is reasoning to its end.
    """

    def __init__(
        self, marks: Marks, *, opened: bool, reasoning: Callable[[str], None], content: Callable[[str], None]
    ) -> None:
        self._marks = marks
        self._reasoning = reasoning
        self._content = content
        self._buffer = ""
        self._state = _State.INSIDE_BEGIN if opened else _State.BEGIN

    def push(self, text: str) -> None:
        """The next piece."""
        if self._state is _State.CONTENT:
            self._content(text)
            return
        self._buffer += text
        while self._step():
            pass

    def finish(self) -> None:
        """The output is over: what was held is told."""
        if self._state is _State.INSIDE:
            _tell(self._reasoning, self._buffer)
        elif self._state is _State.BEGIN:
            _tell(self._content, self._buffer)
        elif self._state is _State.INSIDE_BEGIN:
            _tell(self._reasoning, self._buffer.lstrip())
        self._buffer = ""

    def _step(self) -> bool:
        begin = self._buffer.lstrip()
        match self._state:
            case _State.BEGIN | _State.INSIDE_BEGIN:
                start, inside = self._marks.start, self._state is _State.INSIDE_BEGIN
                if begin.startswith(start):
                    self._buffer, self._state = begin[len(start) :].lstrip(), _State.INSIDE_BEGIN
                    # Some models repeat the mark that the prompt wrote for them; once is enough.
                    return bool(self._buffer)
                if start.startswith(begin):
                    return False
                if inside:
                    self._buffer = begin
                self._state = _State.INSIDE if inside else _State.CONTENT
            case _State.INSIDE:
                at = self._buffer.find(self._marks.end)
                if at < 0:
                    safe = safe_length(self._buffer, (self._marks.end,))
                    _tell(self._reasoning, self._buffer[:safe])
                    self._buffer = self._buffer[safe:]
                    return False
                _tell(self._reasoning, self._buffer[:at].rstrip())
                self._buffer, self._state = self._buffer[at + len(self._marks.end) :], _State.AFTER
            case _State.AFTER:
                self._buffer = begin
                if not begin:
                    return False
                self._state = _State.CONTENT
            case _State.CONTENT:
                _tell(self._content, self._buffer)
                self._buffer = ""
                return False
        return True


def _tell(where: Callable[[str], None], text: str) -> None:
    if text:
        where(text)
