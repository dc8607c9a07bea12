"""How models write tool calls: one small class per form.

In all of them a mark opens a call, a head names the function, a JSON object of arguments follows. `calls.CallReader`
reads what a format describes; `grammar` lets a model write nothing else.
"""

from __future__ import annotations

import re
from typing import ClassVar, NamedTuple

_WS = r"\s{0,16}"
# `{"name": "f", "arguments": ` up to the brace of the arguments; `{"type": "function", ` may come first.
_JSON_HEAD = re.compile(
    rf'\{{{_WS}(?:"type"{_WS}:{_WS}"function"{_WS},{_WS})?"name"{_WS}:{_WS}"(?P<name>[^"\\]{{1,64}})"{_WS},'
    rf'{_WS}"(?:arguments|parameters)"{_WS}:{_WS}(?=\{{)'
)


class Mark(NamedTuple):
    """A piece of a grammar: text that may be a token of its own."""

    text: str


Piece = str | Mark


class ToolFormat:
    """A form of calls.

    opens: marks after which a call stands. head: matches from the call's first character to before the brace of the
    arguments; its group `name` is the function. wrapped: that first character is the brace of an object that holds the
    arguments. lead: characters that may stand between mark and call. again: characters after which another call
    follows. close: texts after a call that belong to it. drop: marks that say nothing. bare: an output that begins with
    a brace may be a call without a mark.
    """

    name: ClassVar[str]
    opens: ClassVar[tuple[str, ...]]
    head: ClassVar[re.Pattern[str]] = _JSON_HEAD
    wrapped: ClassVar[bool] = True
    lead: ClassVar[str] = ""
    again: ClassVar[str] = ""
    close: ClassVar[tuple[str, ...]] = ()
    drop: ClassVar[tuple[str, ...]] = ()
    inner: ClassVar[tuple[str, ...]] = ()
    """Marks inside a head."""
    bare: ClassVar[bool] = False

    # For grammars, a call as models were trained to write it: `begin`, the name, `middle`, the arguments, `end`; and
    # what stands before all calls, between two of them, and after all.
    begin: ClassVar[tuple[Piece, ...]]
    middle: ClassVar[tuple[Piece, ...]]
    end: ClassVar[tuple[Piece, ...]] = ()
    before: ClassVar[tuple[Piece, ...]] = ()
    between: ClassVar[tuple[Piece, ...]] = ()
    after: ClassVar[tuple[Piece, ...]] = ()

    @classmethod
    def marks(cls) -> tuple[str, ...]:
        """Every text of it that may be a token of its own."""
        return (*cls.opens, *cls.drop, *cls.inner, *(text for text in cls.close if len(text) > 3))


class Hermes(ToolFormat):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen, SmolLM3 and many more."""

    name = "hermes"
    opens = ("<tool_call>",)
    close = ("</tool_call>",)
    between = ("\n",)
    begin = (Mark("<tool_call>"), '\n{"name": "')
    middle = ('", "arguments": ',)
    end = ("}\n", Mark("</tool_call>"))


class Llama(ToolFormat):
    """`{"name": …, "parameters": {…}}`, perhaps after `<|python_tag|>`: Llama 3."""

    name = "llama"
    opens = ("<|python_tag|>",)
    again = ";"
    bare = True
    between = ("; ",)
    begin = ('{"name": "',)
    middle = ('", "parameters": ',)
    end = ("}",)


class Mistral(ToolFormat):
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`: Mistral's tokenizers up to v7."""

    name = "mistral"
    opens = ("[TOOL_CALLS]",)
    lead = "["
    again = ","
    close = ("]",)
    before = (Mark("[TOOL_CALLS]"), "[")
    between = (", ",)
    after = ("]",)
    begin = ('{"name": "',)
    middle = ('", "arguments": ',)
    end = ("}",)


class MistralArgs(ToolFormat):
    """`[TOOL_CALLS]name[ARGS]{…}`, once per call: Mistral's tokenizers from v11 on."""

    name = "mistral-args"
    opens = ("[TOOL_CALLS]",)
    head = re.compile(r"(?P<name>[A-Za-z0-9_-]{1,64})(?:\[CALL_ID\][A-Za-z0-9]{0,64})?(?:\[ARGS\])?(?=\{)")
    wrapped = False
    inner = ("[ARGS]", "[CALL_ID]")
    begin = (Mark("[TOOL_CALLS]"),)
    middle = (Mark("[ARGS]"),)


class DeepSeek(ToolFormat):
    """`<｜tool▁call▁begin｜>function<｜tool▁sep｜>name` and the arguments in a fence of code: DeepSeek V3 and R1."""

    name = "deepseek"
    opens = ("<｜tool▁call▁begin｜>",)
    head = re.compile(
        r"(?:function<｜tool▁sep｜>)?(?P<name>[A-Za-z0-9_-]{1,64})(?:\s{0,4}```json\s{0,4}|<｜tool▁sep｜>\s{0,4})(?=\{)"
    )
    wrapped = False
    close = ("```", "<｜tool▁call▁end｜>")
    drop = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    inner = ("<｜tool▁sep｜>",)
    before = (Mark("<｜tool▁calls▁begin｜>"),)
    between = ("\n",)
    after = (Mark("<｜tool▁calls▁end｜>"),)
    begin = (Mark("<｜tool▁call▁begin｜>"), "function", Mark("<｜tool▁sep｜>"))
    middle = ("\n```json\n",)
    end = ("\n```", Mark("<｜tool▁call▁end｜>"))


FORMATS: tuple[type[ToolFormat], ...] = (Hermes, Llama, Mistral, MistralArgs, DeepSeek)


def detect(source: str, added: frozenset[str]) -> type[ToolFormat]:
    """The format that a chat template speaks of; else, where it leaves the form to the model, what the vocabulary has
    a mark for. Hermes' for a model whose template knows no tools: it is told to write so."""
    if "tools" not in source:
        return Hermes
    for where in (source, " ".join(added)):
        if "<｜tool▁call▁begin｜>" in where:
            return DeepSeek
        if "[TOOL_CALLS]" in where:
            return MistralArgs if "[ARGS]" in where else Mistral
        if "<tool_call>" in where:
            return Hermes
        if "<|python_tag|>" in where or '"parameters": dictionary of argument name' in where:
            return Llama
    return Hermes
