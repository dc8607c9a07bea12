"""From a choice's raw text to content, reasoning and tool calls."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvmesh.proto.v1 import inference_pb2 as pb
from services.gateway.speech.calls import CallReader
from services.gateway.speech.formats import ToolFormat
from services.gateway.speech.profile import Marks
from services.gateway.speech.reasoning import ReasoningReader

_ID_BYTES = 12


class Reader(Protocol):
    """Reads the deltas of one request, all its choices. Never holds text back longer than it may belong to a mark."""

    def read(self, delta: pb.Delta) -> pb.Delta:
        """The delta with `text` divided into text, reasoning and tool calls. One that brings a finish reason brings all
        that was held back, and may change the reason to TOOL_CALLS."""


class MakeReader(Protocol):
    """A fresh reader: one for each client that reads an answer."""

    def __call__(self) -> Reader: ...


@dataclass(frozen=True, slots=True)
class Reading:
    """How the outputs of a request are read; a `MakeReader`.

    reasoning: its marks, None = none is read. opened: the prompt ends inside it. tools: the format of calls, None =
    none are read. names: the functions that were offered. parallel: False = only an output's first call is told.
    prompt: a digest of the prompt, of which ids of calls are made.
    """

    reasoning: Marks | None
    opened: bool
    tools: type[ToolFormat] | None
    names: Set[str]
    parallel: bool
    prompt: bytes

    def __call__(self) -> Reader:
        return SpeechReader(self)


def prompt_digest(token_ids: Sequence[int]) -> bytes:
    """16 bytes for a prompt."""
    return hashlib.blake2b(np.asarray(token_ids, dtype="<u4").tobytes(), digest_size=16).digest()


class SpeechReader:
    """See Reader."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._choices: dict[int, _Choice] = {}

    def read(self, delta: pb.Delta) -> pb.Delta:
        """See Reader."""
        choice = self._choices.get(delta.choice)
        if choice is None:
            choice = self._choices[delta.choice] = _Choice(self._reading, delta.choice)
        out = pb.Delta()
        # Others read the same delta.
        out.CopyFrom(delta)
        out.ClearField("text")
        choice.read(delta.text, out)
        return out


class _Choice:
    """What one choice has said so far; it takes what the readers of calls and of reasoning tell.

    Ids of calls are made of the prompt and of all that was said before the call: whoever reads the same output, now or
    from a cache, live or healed, gets the same ids, and no two calls of a conversation share one.
    """

    def __init__(self, reading: Reading, index: int) -> None:
        self._parallel = reading.parallel
        self._said = hashlib.blake2b(reading.prompt + index.to_bytes(4, "little"), digest_size=_ID_BYTES)
        self._calls = CallReader(reading.tools, reading.names, self) if reading.tools is not None else None
        self._reasoning: ReasoningReader | None = None
        if reading.reasoning is not None:
            content = self.text if self._calls is None else self._calls.push
            self._reasoning = ReasoningReader(
                reading.reasoning, opened=reading.opened, reasoning=self.reasoning, content=content
            )
        self._begun = 0
        self._whole = 0
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._parts: list[pb.ToolCallDelta] = []

    def read(self, text: str, out: pb.Delta) -> None:
        """Adds to `out` what `text` brings."""
        if text:
            if self._reasoning is not None:
                self._reasoning.push(text)
            elif self._calls is not None:
                self._calls.push(text)
            else:
                self.text(text)
        if out.finish_reason:
            if self._reasoning is not None:
                self._reasoning.finish()
            if self._calls is not None:
                self._calls.finish()
            if self._whole and out.finish_reason == pb.FINISH_REASON_STOP:
                out.finish_reason = pb.FINISH_REASON_TOOL_CALLS
        out.text, out.reasoning = "".join(self._texts), "".join(self._thoughts)
        out.tool_calls.extend(self._parts)
        for parts in (self._texts, self._thoughts, self._parts):
            parts.clear()

    def _note(self, text: str) -> None:
        self._said.update(text.encode("utf-8", "replace"))

    # --- told by the readers
    def text(self, text: str) -> None:
        """Content."""
        self._note(text)
        self._texts.append(text)

    def reasoning(self, text: str) -> None:
        """Reasoning."""
        self._note(text)
        self._thoughts.append(text)

    @property
    def _muted(self) -> bool:
        return self._begun > 1 and not self._parallel

    def call(self, name: str) -> None:
        """A call begins."""
        self._note(name)
        self._begun += 1
        if not self._muted:
            call_id = f"call_{self._said.hexdigest()}"
            self._parts.append(pb.ToolCallDelta(index=self._begun - 1, id=call_id, name=name))

    def arguments(self, text: str) -> None:
        """A piece of its arguments."""
        self._note(text)
        if self._muted:
            return
        index = self._begun - 1
        if self._parts and self._parts[-1].index == index:
            self._parts[-1].arguments += text
        else:
            self._parts.append(pb.ToolCallDelta(index=index, arguments=text))

    def called(self) -> None:
        """The call is whole."""
        self._whole += not self._muted
