"""What a model writes, read as content, reasoning and tool calls: the same however it is cut."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
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
GAPS = st.sampled_from(["", "", " ", "\n", "\n\n", " \u3000"])


@st.composite
def outputs(draw: st.DrawFn, form: type[ToolFormat]) -> str:
    """Mostly what models write, in any order, with any gaps; some of it broken."""
    calls = [written(form, "f", "{}"), written(form, "get_weather", WEATHER), two(form), written(form, "g", "{}")]
    thoughts = ["<think>hm</think>", "<think>\nhm \n</think>", " </think>"]
    segments = st.sampled_from(calls) | st.sampled_from(calls + thoughts + FRAGMENTS) | st.text(max_size=3)
    text = ""
    for segment in draw(st.lists(segments, max_size=6)):
        if draw(st.integers(0, 4)) == 0:
            # Cut short, or with a character too many.
            at = draw(st.integers(0, len(segment)))
            segment = segment[:at] + draw(st.sampled_from(["", "", "{", '"', "x", "<"]))
        text += segment + draw(GAPS)
    return text


@given(st.data(), st.sampled_from(sorted(FORMS)), st.booleans(), st.booleans())
@settings(max_examples=200)
def test_reading_does_not_depend_on_how_the_text_is_cut(
    data: st.DataObject, name: str, think: bool, opened: bool
) -> None:
    text = data.draw(outputs(FORMS[name]))
    cuts = data.draw(st.lists(st.integers(0, 400), max_size=8))
    finish = data.draw(st.sampled_from([pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH]))
    how = reading(FORMS[name], reasoning=THINK if think else None, opened=think and opened)
    whole = read(how, [text], finish)
    assert read(how, chunks(text, cuts), finish) == whole
    assert read(how, [*text, ""], finish) == whole


def pieces_of(how: Reading, pieces: list[str]) -> list[tuple[str, str, list[tuple[int, str, str]]]]:
    """What each piece brought: content, reasoning, parts of calls."""
    reader = how()
    deltas = [reader.read(pb.Delta(text=piece)) for piece in pieces]
    return [(d.text, d.reasoning, [(p.index, p.name, p.arguments) for p in d.tool_calls]) for d in deltas]


def test_a_call_is_told_as_it_comes() -> None:
    pieces = [
        "I look",
        " it up.\n<tool_",
        'call>\n{"name": "f", "argu',
        'ments": {',
        '"a": "',
        "x",
        '"}}',
        "\n</tool_call>",
    ]
    assert pieces_of(reading(), pieces) == [
        ("I look", "", []),
        (" it up.", "", []),
        ("", "", []),
        ("", "", [(0, "f", "{")]),
        ("", "", [(0, "", '"a": "')]),
        ("", "", [(0, "", "x")]),
        ("", "", [(0, "", '"}')]),
        ("", "", []),
    ]


def test_nothing_is_held_that_cannot_belong_to_a_mark() -> None:
    how = reading(reasoning=THINK)
    assert pieces_of(
        how, ["<th", "ink>so", " I", " think</thin", "g> yes</think>", "\n\nHi <b>", "<too", "l> 1 <", " 2"]
    ) == [
        ("", "", []),
        ("", "so", []),
        ("", " I", []),
        ("", " think", []),
        ("", "</thing> yes", []),
        ("Hi <b>", "", []),
        ("", "", []),
        ("<tool> 1", "", []),
        (" < 2", "", []),
    ]
    assert pieces_of(reading(None, reasoning=THINK), ["Hello", " there", " "])[:2] == [
        ("Hello", "", []),
        (" there", "", []),
    ]


def test_answers_in_json_are_not_held_by_a_model_that_calls_in_json() -> None:
    assert pieces_of(reading(Llama), ['{"ci', 'ty": ', "1}"]) == [("", "", []), ('{"city":', "", []), (" 1}", "", [])]


@pytest.mark.parametrize("opened", [True, False])
def test_reasoning(opened: bool) -> None:
    text = ("" if opened else "<think>") + "\n a  b \n</think>\n\nSo: c\n"
    out = read(reading(reasoning=THINK, opened=opened), [text])
    assert (out.reasoning, out.text, out.finish) == ("a  b", "So: c\n", pb.FINISH_REASON_STOP)


def test_reasoning_without_an_end_is_reasoning() -> None:
    out = read(reading(reasoning=THINK), ["<think>and so on </thi"], pb.FINISH_REASON_LENGTH)
    assert (out.reasoning, out.text) == ("and so on </thi", "")


def test_marks_of_reasoning_count_at_the_beginning_only() -> None:
    text = "Write <think>so</think>."
    assert read(reading(reasoning=THINK), [text]).text == text
    assert read(reading(None), [text]).text == text


def test_calls_after_reasoning_and_none_inside_it() -> None:
    inner = written(Hermes, "f", "{}")
    out = read(reading(reasoning=THINK, opened=True), [f"maybe {inner}?</think>\n{inner}"])
    assert (out.reasoning, out.said, out.text) == (f"maybe {inner}?", [("f", "{}")], "")


NO_CALLS = [
    "<tool_call>no json</tool_call>",
    '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "f"',
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "no json"}</tool_call>',
    '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
    '<tool_call>{"other": {}}</tool_call>',
    '<tool_call>{"arguments": {"a": }, "name": "f"}</tool_call>',
    "<tool_call>",
    " <tool_call> ",
    "text </tool_call>",
]


@pytest.mark.parametrize("text", NO_CALLS)
def test_what_is_no_call_is_text(text: str) -> None:
    out = read(reading(), [text])
    assert (out.text, out.calls, out.finish) == (text, [], pb.FINISH_REASON_STOP)
    # What follows may still be one.
    out = read(reading(), [text.rstrip() + written(Hermes, "f", "{}")])
    if text.startswith(("<tool_call>no", '<tool_call>{"name": "unknown', "text")):
        assert out.said == [("f", "{}")]
        assert out.text == text


UNUSUAL = [
    ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', '{"a": 1}'),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', '{"a": 1}'),
    ('<tool_call>{"name": "f"}</tool_call>', "{}"),
    ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "{}"),
    ('<tool_call>{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}</tool_call>', '{"a": 1}'),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}, "id": "x"} </tool_call> ', '{"a": 1}'),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}', '{"a": 1}'),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool', '{"a": 1}'),
    ('<tool_call>{"name": "f", "arguments": {"a": "\\\\\\"}<"}}', '{"a": "\\\\\\"}<"}'),
]


@pytest.mark.parametrize(("text", "arguments"), UNUSUAL)
def test_what_models_write_instead(text: str, arguments: str) -> None:
    out = read(reading(), [text])
    assert (out.said, out.text, out.finish) == ([("f", arguments)], "", pb.FINISH_REASON_TOOL_CALLS)


def test_arguments_end_where_they_are_no_json_any_more() -> None:
    out = read(reading(), ['<tool_call>{"name": "f", "arguments": {"a": <</tool_call>Sorry'])
    assert out.said == [("f", '{"a": ')]
    assert out.text == "<</tool_call>Sorry"
    # No whole call: the client must not take it for one.
    assert out.finish == pb.FINISH_REASON_STOP


@pytest.mark.parametrize("finish", [pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH])
def test_a_call_that_is_cut_off_is_told_as_far_as_it_came(finish: pb.FinishReason.ValueType) -> None:
    out = read(reading(), ['<tool_call>{"name": "f", "arguments": {"a": "x'], finish)
    assert (out.said, out.finish) == ([("f", '{"a": "x')], finish)


def test_without_parallel_calls_the_first_is_told() -> None:
    for form in FORMATS:
        out = read(reading(form, parallel=False), [two(form)])
        assert out.said == [("get_weather", WEATHER)]
        assert (out.text, out.finish) == ("", pb.FINISH_REASON_TOOL_CALLS)


def test_ids_are_the_same_for_whoever_reads_the_same_output_and_differ_otherwise() -> None:
    def ids(text: str, prompt: bytes = b"p", choice: int = 0) -> list[str]:
        delta = reading(prompt=prompt)().read(pb.Delta(choice=choice, text=text, finish_reason=pb.FINISH_REASON_STOP))
        return [part.id for part in delta.tool_calls]

    text = two(Hermes)
    assert ids(text) == ids(text)
    other = [ids(text), ids(text, b"q"), ids(text, choice=1), ids("So: " + text), ids(text.replace("Zürich", "Bern"))]
    # The first call of the last begins like the first one's.
    assert len({call_id for found in other for call_id in found}) == 9


def test_choices_are_read_apart_and_the_rest_of_a_delta_stays() -> None:
    reader = reading()()
    first = pb.Delta(choice=0, text="<tool_", token_ids=[1, 2], logprobs=[pb.TokenLogprob(token_id=1)])
    kept = pb.Delta()
    kept.CopyFrom(first)
    out = reader.read(first)
    # Others read the same delta.
    assert first == kept
    assert (list(out.token_ids), list(out.logprobs), out.text) == ([1, 2], list(first.logprobs), "")
    assert reader.read(pb.Delta(choice=1, text="call>")).text == "call>"
    last = reader.read(pb.Delta(choice=0, text="x", finish_reason=pb.FINISH_REASON_STOP, stop_reason="s"))
    assert (last.text, last.stop_reason, last.finish_reason) == ("<tool_x", "s", pb.FINISH_REASON_STOP)
