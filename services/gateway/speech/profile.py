"""How a model writes tool calls and reasoning: read off its chat template and vocabulary, once per tokenizer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from services.gateway.speech.formats import Hermes, ToolFormat, detect


@dataclass(frozen=True, slots=True)
class Marks:
    """What stands around a model's reasoning."""

    start: str
    end: str


_WORD = re.compile(r"""(?<![\w\])]\[)(?<!get\()(['"])([A-Za-z]\w*)\1""")
_REASONING = (Marks("<think>", "</think>"), Marks("[THINK]", "[/THINK]"))


@lru_cache(maxsize=64)
def _words(source: str) -> frozenset[str]:
    return frozenset(found[2] for found in _WORD.finditer(source))


@dataclass(frozen=True, slots=True)
class Profile:
    """`source`: the chat template, "" without one. `tools`: the format of calls. `reasoning`: None = not marked.

    `tokens`: marks that are one token of the vocabulary, with its id.
    """

    source: str = ""
    tools: type[ToolFormat] = Hermes
    reasoning: Marks | None = None
    tokens: Mapping[str, int] = field(default_factory=dict)

    @property
    def knows_tools(self) -> bool:
        """True when the template describes tools itself."""
        return "tools" in self.source

    @property
    def refuses_system(self) -> bool:
        """True when the template has no place for a system message and says so."""
        return "System role not supported" in self.source or (
            "raise_exception" in self.source and not self.names("system")
        )

    def names(self, text: str) -> bool:
        """True when the template writes the word as a string, as it does with the roles that it knows; keys are none:
        `message['role']`, `message.get('role')`."""
        return text in _words(self.source)


def profile(source: str | None, added: Mapping[str, int]) -> Profile:
    """The profile of a chat template and the tokens added to the vocabulary (text -> id)."""
    source = source or ""
    tools = detect(source, frozenset(added))
    reasoning = next((marks for marks in _REASONING if marks.end in source), None)
    around = () if reasoning is None else (reasoning.start, reasoning.end)
    return Profile(source, tools, reasoning, {mark: added[mark] for mark in (*tools.marks(), *around) if mark in added})
