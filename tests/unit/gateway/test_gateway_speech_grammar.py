"""Grammars of calls: they compile, they let through what the format is, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvmesh.errors import InvalidArgument
from kvmesh.grammar.source import GrammarSource
from kvmesh.proto.v1 import inference_pb2 as pb
from services.gateway.speech.formats import FORMATS
from services.gateway.speech.reader import Reading
from services.gateway.speech.shape import Speech, shape
from speech_models import END_OF_SEQUENCE, model, vocabulary

CITY = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Bern", "Rom"]}}, "required": ["city"]}
GOOD, BAD = '{"city": "Bern"}', '{"city": "Oslo"}'
REQUIRED, AUTO = pb.ToolChoice.MODE_REQUIRED, pb.ToolChoice.MODE_AUTO


def request(mode: pb.ToolChoice.Mode.ValueType, *, strict: bool = False, **more: Any) -> pb.ChatRequest:
    return pb.ChatRequest(
        messages=[pb.ChatMessage(role="user", content="hi")],
        tools=[
            pb.Tool(name="weather", parameters=json.dumps(CITY), strict=strict),
            pb.Tool(name="now", description="The time"),
        ],
        tool_choice=pb.ToolChoice(mode=mode, name=more.pop("named", "")),
        **more,
    )


def speech(name: str, given: pb.ChatRequest, *, marks: bool = True, opened: bool = False) -> Speech:
    tokenizer = model(name, marks=marks)
    prompt = tokenizer._tokenizer.encode("<think>\n" if opened else "x").ids
    return shape(given, tokenizer).speech(prompt, tokenizer)


def accepts(name: str, grammar: pb.Grammar | None, text: str, *, marks: bool = True, cut: bool = False) -> bool:
    """Whether the grammar lets the model write `text` (marks as tokens where it has them) and end there; with `cut`,
    whether it lets it write so far."""
    assert grammar is not None
    match = vocabulary(name, marks=marks).compile(GrammarSource.of(grammar)).copy()
    for token in model(name, marks=marks)._tokenizer.encode(text, add_special_tokens=False).ids:
        match.fill()
        if not match.mask()[token >> 5] >> (token & 31) & 1:
            return False
        match.take(token)
        assert match.error is None
    match.fill()
    return cut or bool(match.mask()[END_OF_SEQUENCE >> 5] >> (END_OF_SEQUENCE & 31) & 1)


def call(form: str, name: str, arguments: str) -> str:
    return {
        "hermes": f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>',
        "llama": f'{{"name": "{name}", "parameters": {arguments}}}',
        "mistral": f'[TOOL_CALLS][{{"name": "{name}", "arguments": {arguments}}}]',
        "mistral-args": f"[TOOL_CALLS]{name}[ARGS]{arguments}",
        "deepseek": (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
            f"{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
    }[form]


def two(form: str) -> str:
    first, second = call(form, "weather", GOOD), call(form, "now", "{}")
    if form == "mistral":
        return first[:-1] + ", " + second.removeprefix("[TOOL_CALLS][")
    if form == "deepseek":
        return first.removesuffix("<｜tool▁calls▁end｜>") + "\n" + second.removeprefix("<｜tool▁calls▁begin｜>")
    return first + {"hermes": "\n", "llama": "; "}.get(form, "") + second


every_form = pytest.mark.parametrize("form", [form.name for form in FORMATS])
both_spellings = pytest.mark.parametrize("marks", [True, False], ids=["tokens", "spelled"])


@every_form
@both_spellings
def test_required_is_calls_and_nothing_else(form: str, marks: bool) -> None:
    told = speech(form, request(REQUIRED), marks=marks)

    def may(text: str) -> bool:
        return accepts(form, told.grammar, text, marks=marks)

    assert may(call(form, "weather", GOOD))
    assert may(call(form, "now", "{}"))
    assert may(two(form))
    assert not may("")
    assert not may("Hello")
    assert not may(call(form, "weather", BAD))
    assert not may(call(form, "weather", '{"city": "Bern", "more": 1}'))
    assert not may(call(form, "other", "{}"))
    assert not may(call(form, "weather", GOOD) + " and text")
    assert not may("text " + call(form, "weather", GOOD))


@every_form
def test_one_call_where_calls_may_not_be_parallel(form: str) -> None:
    told = speech(form, request(REQUIRED, parallel_tool_calls=False))
    assert accepts(form, told.grammar, call(form, "now", "{}"))
    assert not accepts(form, told.grammar, two(form))


@every_form
def test_named_is_that_function(form: str) -> None:
    told = speech(form, request(pb.ToolChoice.MODE_NAMED, named="now"))
    assert accepts(form, told.grammar, call(form, "now", '{"any": [1]}'))
    assert not accepts(form, told.grammar, call(form, "weather", GOOD))


@every_form
def test_what_the_grammar_lets_through_is_read_as_calls(form: str) -> None:
    told = speech(form, request(REQUIRED))
    assert told.reader is not None
    delta = told.reader().read(pb.Delta(text=two(form), finish_reason=pb.FINISH_REASON_STOP))
    assert [(part.name, part.arguments) for part in delta.tool_calls] == [("weather", GOOD), ("now", "{}")]
    assert (delta.text, delta.finish_reason) == ("", pb.FINISH_REASON_TOOL_CALLS)


@every_form
@both_spellings
def test_strict_leaves_text_free_and_holds_inside_a_call(form: str, marks: bool) -> None:
    told = speech(form, request(AUTO, strict=True), marks=marks)

    def may(text: str, *, cut: bool = False) -> bool:
        return accepts(form, told.grammar, text, marks=marks, cut=cut)

    assert may("Hello,\n world")
    assert may(call(form, "weather", GOOD))
    assert may(two(form))
    # The one that is not strict may have any arguments.
    assert may(call(form, "now", '{"tz": "CET"}'))
    assert not may(call(form, "weather", BAD), cut=True)
    assert not may(call(form, "other", "{}"), cut=True)
    if form != "llama":
        assert may("I look. " + call(form, "weather", GOOD))
        assert not may("I look. " + call(form, "weather", BAD), cut=True)


def test_auto_is_free_without_a_strict_tool() -> None:
    assert speech("hermes", request(AUTO)).grammar is None
    assert speech("hermes", request(pb.ToolChoice.MODE_NONE)) == Speech()


@both_spellings
@pytest.mark.parametrize("opened", [True, False], ids=["begun", "not begun"])
def test_a_model_that_reasons_does_so_before_it_must_call(marks: bool, opened: bool) -> None:
    told = speech("think", request(REQUIRED), marks=marks, opened=opened)
    one = call("hermes", "weather", GOOD)

    def may(text: str) -> bool:
        return accepts("think", told.grammar, text, marks=marks)

    thought = "Which city?\nBern." if opened else "<think>\nWhich city?\nBern."
    assert may(f"{thought}\n</think>\n\n{one}")
    assert not may(f"{thought}\n</think>\n\nBern")
    assert not may(f"{thought}\n")
    assert may(one) is not opened
    assert isinstance(told.reader, Reading)
    assert told.reader.opened is opened


@both_spellings
@pytest.mark.parametrize("opened", [True, False], ids=["begun", "not begun"])
def test_a_form_of_answer_comes_after_the_reasoning(marks: bool, opened: bool) -> None:
    for form, good, bad in [
        (pb.Grammar(json_schema=json.dumps(CITY)), GOOD, BAD),
        (pb.Grammar(json_object=True), "{}", "1"),
        (pb.Grammar(regex="a/b|[0-9]+"), "a/b", "a"),
        (pb.Grammar(regex=r"a\/b|/"), "a/b", "ab"),
        (pb.Grammar(regex=r"a\\/b\\\/"), "a\\/b\\/", "a/b/"),
    ]:
        given = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="hi")])
        given.sampling.grammar.CopyFrom(form)
        told = speech("think", given, marks=marks, opened=opened)
        thought = "x</think>\n" if opened else "<think>x</think>\n"
        assert accepts("think", told.grammar, thought + good, marks=marks)
        assert not accepts("think", told.grammar, thought + bad, marks=marks)
        assert accepts("think", told.grammar, good, marks=marks) is not opened


def test_a_lark_grammar_leaves_no_room_for_reasoning() -> None:
    given = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="hi")])
    given.sampling.grammar.lark = 'start: "yes" | "no"'
    assert speech("think", given, opened=True) == Speech()


def test_a_form_of_answer_without_tools_or_reasoning_is_left_as_it_is() -> None:
    given = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="hi")])
    given.sampling.grammar.json_schema = json.dumps(CITY)
    assert speech("hermes", given) == Speech()


@every_form
def test_a_form_of_answer_beside_tools_is_calls_or_the_form(form: str) -> None:
    given = request(AUTO)
    given.sampling.grammar.json_schema = json.dumps({"type": "object", "properties": {"ok": {"type": "boolean"}}})
    told = speech(form, given)
    assert accepts(form, told.grammar, '{"ok": true}')
    # Only a mark tells a call from an answer in JSON.
    mark = "<|python_tag|>" if form == "llama" else ""
    assert accepts(form, told.grammar, mark + call(form, "now", "{}"))
    assert not accepts(form, told.grammar, "Hello")


def test_what_cannot_go_together_is_refused() -> None:
    given = request(REQUIRED)
    given.sampling.grammar.json_object = True
    with pytest.raises(InvalidArgument, match="must call") as raised:
        speech("hermes", given)
    assert raised.value.details["field"] == "grammar"
    given = request(AUTO)
    given.sampling.grammar.lark = 'start: "a"'
    with pytest.raises(InvalidArgument, match="lark grammar cannot go with tools"):
        speech("hermes", given)


def test_as_many_tools_as_may_be() -> None:
    """The names alone fit within what a grammar may have."""
    given = pb.ChatRequest(
        messages=[pb.ChatMessage(role="user", content="hi")],
        tools=[pb.Tool(name=f"{index:03}" + "n" * 61, parameters=json.dumps(CITY)) for index in range(128)],
        tool_choice=pb.ToolChoice(mode=REQUIRED),
    )
    told = speech("hermes", given)
    assert accepts("hermes", told.grammar, call("hermes", "127" + "n" * 61, GOOD))
    assert not accepts("hermes", told.grammar, call("hermes", "127" + "n" * 61, BAD))
