"""What a model writes, read as content, reasoning and tool calls: the same however it is cut."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.proto.v1 import inference_pb2 as pb
from services.gateway.speech.formats import FORMATS, Hermes, Llama, MistralArgs, ToolFormat
from services.gateway.speech.profile import Marks
from services.gateway.speech.reader import Reading

THINK = Marks("<think>", "</think>")
NAMES = frozenset({"get_weather", "f"})
WEATHER = '{"city": "Zürich 🎉", "days": [1, 2, {"x": "}]\\"{"}]}'
FORMS = {form.name: form for form in FORMATS}


def written(form: type[ToolFormat], name: str, arguments: str) -> str:
    """One call in the format, as models write it."""
    return {
        "hermes": f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>',
        "llama": f'{{"name": "{name}", "parameters": {arguments}}}',
        "mistral": f'[TOOL_CALLS][{{"name": "{name}", "arguments": {arguments}}}]',
        "mistral-args": f"[TOOL_CALLS]{name}[ARGS]{arguments}",
        "deepseek": (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
            f"{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
    }[form.name]


def two(form: type[ToolFormat]) -> str:
    """Two calls, of get_weather and of f."""
    return {
        "hermes": written(Hermes, "get_weather", WEATHER) + "\n" + written(Hermes, "f", "{}"),
        "llama": written(Llama, "get_weather", WEATHER) + "; " + written(Llama, "f", "{}"),
        "mistral": written(FORMS["mistral"], "get_weather", WEATHER)[:-1] + ', {"name": "f", "arguments": {}}]',
        "mistral-args": written(MistralArgs, "get_weather", WEATHER) + written(MistralArgs, "f", "{}"),
        "deepseek": (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
            f"get_weather\n```json\n{WEATHER}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>f<｜tool▁sep｜>{{}}"
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
    }[form.name]


def reading(
    form: type[ToolFormat] | None = Hermes,
    *,
    reasoning: Marks | None = None,
    opened: bool = False,
    parallel: bool = True,
    prompt: bytes = b"p",
) -> Reading:
    return Reading(reasoning, opened, form, NAMES, parallel, prompt)


class Read:
    """All that the deltas of a choice said."""

    def __init__(self) -> None:
        self.text = self.reasoning = ""
        self.calls: list[tuple[str, str, str]] = []
        self.finish = pb.FINISH_REASON_UNSPECIFIED

    def add(self, delta: pb.Delta) -> None:
        self.text += delta.text
        self.reasoning += delta.reasoning
        for part in delta.tool_calls:
            if part.index == len(self.calls):
                assert part.id
                assert part.name
                self.calls.append((part.id, part.name, part.arguments))
            else:
                # Only the first part of a call has id and name, and calls come one after the other.
                assert part.index == len(self.calls) - 1
                assert not part.id
                assert not part.name
                call_id, name, arguments = self.calls[-1]
                self.calls[-1] = (call_id, name, arguments + part.arguments)
        if delta.finish_reason:
            self.finish = delta.finish_reason

    @property
    def said(self) -> list[tuple[str, str]]:
        return [(name, arguments) for _, name, arguments in self.calls]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Read) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return repr(vars(self))


def read(given_reading: Reading, pieces: list[str], finish: pb.FinishReason.ValueType = pb.FINISH_REASON_STOP) -> Read:
    reader, out = given_reading(), Read()
    for index, piece in enumerate(pieces):
        last = index == len(pieces) - 1
        out.add(reader.read(pb.Delta(text=piece, finish_reason=finish if last else pb.FINISH_REASON_UNSPECIFIED)))
    return out


def chunks(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_call(form: type[ToolFormat]) -> None:
    out = read(reading(form), [written(form, "get_weather", WEATHER)])
    assert out.said == [("get_weather", WEATHER)]
    assert json.loads(out.said[0][1])["city"] == "Zürich 🎉"
    assert (out.text, out.finish) == ("", pb.FINISH_REASON_TOOL_CALLS)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_several_calls(form: type[ToolFormat]) -> None:
    out = read(reading(form), [two(form)])
    assert out.said == [("get_weather", WEATHER), ("f", "{}")]
    assert out.text == ""
    assert len({call_id for call_id, _, _ in out.calls}) == 2
    assert all(call_id.startswith("call_") and len(call_id) == 29 for call_id, _, _ in out.calls)


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<｜tool▁call▁begin｜>",
    "<｜tool▁calls▁begin｜>", "<think>", "</think>", "</thi", "{", "}", "[", "]", '"', "\\", ":", ",", ";", " ", "\n",
    '{"name": "f", "arguments": {}}', '{"name": "f", "parameters": {"a": 1}}', '{"arguments": {"a": 1}, "name": "f"}',
    '{"name": "g", "arguments": {}}', '{"name": "f", "arguments": {', "f", "hello", "é🎉", "```", "f[ARGS]{}",
    '{"type": "function", "name": "f", "parameters": {"q": "</tool_call>"}}',
    "function<｜tool▁sep｜>f\n```json\n{}\n```",
]  # fmt: skip
outputs = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=14).map("".join)


@given(
    st.sampled_from(sorted(FORMS)),
    outputs,
    st.lists(st.integers(0, 400), max_size=8),
    st.booleans(),
    st.booleans(),
    st.sampled_from([pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH]),
)
def test_reading_does_not_depend_on_how_the_text_is_cut(
    name: str, text: str, cuts: list[int], think: bool, opened: bool, finish: pb.FinishReason.ValueType
) -> None:
    how = reading(FORMS[name], reasoning=THINK if think else None, opened=think and opened)
    whole = read(how, [text], finish)
    assert read(how, chunks(text, cuts), finish) == whole
    assert read(how, [*text, ""], finish) == whole
