"""Chat templates: the model's own Jinja template in a sandbox, equal to what the ecosystem renders.

A template comes with the model file, so it may compute but not reach out: see `sandbox`; its output is bounded, and
there is no file loader. `protect` keeps users from writing control tokens (see its docstring).
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2

from kvmesh.errors import FailedPrecondition, InvalidArgument, TooLarge
from services.gateway.sandbox import RaisedByTemplate, TooSlow, bounded, compiled

log = logging.getLogger(__name__)

MAX_TEMPLATE_BYTES = 256 * 1024
RENDER_S = 2.0
"""Of a processor, for one rendering: a hundred times what megabytes of messages take."""
MAX_GROWTH = 8
"""What a template makes on its way may be so many times as long as the prompt."""

# What a template fails with that does not fit the messages, or never ends.
_FAILURES: tuple[type[Exception], ...] = (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError)
_FAILURES += (AttributeError, RecursionError, MemoryError)


def _up_to(text: str, end: str) -> str:
    """`text` up to the last `end`. InvalidArgument when the template dropped it."""
    at = text.rfind(end)
    if at < 0:
        raise InvalidArgument(
            "continue_final_message: the model's chat template does not show the last message",
            details={"field": "continue_final_message"},
        )
    return text[:at].replace(end, "")


def _first_characters(words: Iterable[str]) -> str:
    """A pattern of the first character of every one of the words in a text, those inside another one included. Some
    models have hundreds of them: a text is gone through once, not once for each."""
    ends = _by_head(words).items()
    return "|".join(f"{re.escape(head)}(?={_any_of(rests)})" for head, rests in ends)


def _any_of(words: Sequence[str]) -> str:
    if len(words) == 1:
        return re.escape(words[0])
    parts = [
        # Where a word is the beginning of another one, to find it is enough.
        re.escape(head) + ("" if "" in rests else _any_of(rests))
        for head, rests in _by_head(words).items()
    ]
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"


def _by_head(words: Iterable[str]) -> dict[str, list[str]]:
    """What follows each first character."""
    heads: dict[str, list[str]] = {}
    for word in words:
        heads.setdefault(word[0], []).append(word[1:])
    return heads


class _Marks:
    """How many cuts were made."""

    count = 0


class ChatTemplate:
    """One compiled chat template.

    `special` are the strings of the model's control tokens; `variables` (bos_token, eos_token, …) are what the template
    may name. FailedPrecondition when the template does not compile.
    """

    def __init__(self, source: str, *, special: Iterable[str], variables: Mapping[str, str]) -> None:
        if len(source.encode()) > MAX_TEMPLATE_BYTES:
            raise FailedPrecondition(f"the chat template is larger than {MAX_TEMPLATE_BYTES} bytes")
        try:
            self._template = compiled(source)
        except jinja2.TemplateError as exc:
            raise FailedPrecondition(f"the model's chat template does not compile: {exc}") from None
        # One character cannot be cut in two.
        controls = sorted({text for text in special if len(text) > 1})
        self._controls = re.compile(_first_characters(controls)) if controls else None
        # Proper beginnings of control tokens, by their last character.
        self._begins: dict[str, list[str]] = {}
        for begin in {text[:size] for text in controls for size in range(1, len(text))}:
            self._begins.setdefault(begin[-1], []).append(begin)
        self._variables = dict(variables)
        self.slow = False
        """True once a rendering took too long: others are not to be held up by the next one."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_chars: int,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continued: bool = False,
    ) -> list[str]:
        """Render messages, the assistant's header appended; with `continued`, up to the end of the last one's content.

        Returns the text in pieces to be tokenized one by one; there is more than one only where what a user gave holds
        the text of a control token or ends in the beginning of one. InvalidArgument when the template refuses the
        messages, TooLarge over `max_chars`.
        """
        # Digits: what templates do to text (trimming, joining, upper case, JSON) leaves them as they are.
        cut = f"\ufdd0{secrets.randbelow(10**18):018}\ufdd1"
        marks = _Marks()
        prepared = [self._protect_all(message, cut, marks) for message in messages]
        given_tools = self._protect_all(tools, cut, marks) if tools else None
        extra = self._protect_all(variables or {}, cut, marks)
        end = f"\ufdd0{secrets.randbelow(10**18):018}\ufdd2"
        if continued:
            prepared[-1]["content"] += end
            extra["add_generation_prompt"] = False
            extra["continue_final_message"] = True
        cuts = marks.count
        # Six characters for one, where a template writes JSON in ASCII.
        text = self._run(prepared, given_tools, extra, max_chars + (cuts + 1) * (len(cut) + 10))
        if continued:
            text = _up_to(text, end)
        if cuts:
            text = text.replace(json.dumps(cut)[1:-1], cut)
        return [piece for piece in text.split(cut) if piece] if cuts else [text]

    def _protect_all(self, value: Any, cut: str, marks: _Marks) -> Any:
        """The same for every string in it, names of fields included: tools come from users too."""
        if isinstance(value, str):
            text, count = self._protect(value, cut)
            marks.count += count
            return text
        if isinstance(value, Mapping):
            return {self._protect_all(k, cut, marks): self._protect_all(v, cut, marks) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._protect_all(item, cut, marks) for item in value]
        return value

    def _protect(self, text: str, cut: str) -> tuple[str, int]:
        """Marks a cut inside every control token's text in what a user wrote.

        Tokenized apart, the two halves are plain text: a user cannot end a message or open another role. The marks are
        random per request, so they cannot be forged, and survive what templates do to content (trimming, joining).
        """
        if self._controls is None:
            return text, 0
        protected, count = self._controls.subn(lambda start: start[0] + cut, text)
        # What a template writes behind it may make a control token of its end.
        if any(text.endswith(begin) for begin in self._begins.get(text[-1:], ())):
            return protected + cut, count + 1
        return protected, count

    def _run(self, messages: list[Any], tools: Any, variables: dict[str, Any], max_chars: int) -> str:
        given = {"documents": None, "add_generation_prompt": True} | variables | self._variables
        pieces, size = [], 0
        try:
            with bounded(RENDER_S, max(MAX_GROWTH * max_chars, 1 << 20)):
                for piece in self._template.generate(**given | {"messages": messages, "tools": tools}):
                    size += len(piece)
                    if size > max_chars:
                        raise TooLarge(f"the rendered prompt is longer than {max_chars} characters")
                    pieces.append(piece)
        except RaisedByTemplate as exc:
            raise InvalidArgument(f"messages: {exc}", details={"field": "messages"}) from None
        except _FAILURES as exc:
            if isinstance(exc, TooSlow) and not self.slow:
                self.slow = True
                log.warning("the model's chat template does not come to an end: %s", exc)
            raise InvalidArgument(
                f"messages: the model's chat template cannot render them ({type(exc).__name__})",
                details={"field": "messages"},
            ) from None
        return "".join(pieces)
