"""`kvmesh chat`, over a client that says what a test wants."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvmesh.cli.ask import ask
from kvmesh.cli.chat import Chat, converse
from kvmesh.cli.conversation import Conversation
from kvmesh.cli.main import app
from kvmesh.client.answer import Answer
from kvmesh.errors import InvalidArgument, KvmeshError, NotFound, Overloaded, WorkerLost
from kvmesh.proto.v1 import inference_pb2 as pb

Step = pb.Delta | BaseException


class FakeStream:
    def __init__(self, steps: list[Step]) -> None:
        self._steps = steps
        self._answer = Answer()
        self.finished: pb.Finished | None = None
        self.closed = False

    def __iter__(self) -> Iterator[pb.GenerateEvent]:
        yield pb.GenerateEvent(accepted=pb.Accepted(request_id="r"))
        for step in self._steps:
            if isinstance(step, BaseException):
                raise step
            self._answer.add(step)
            yield pb.GenerateEvent(delta=step)
        self.finished = pb.Finished(usage=pb.Usage(prompt_tokens=7, completion_tokens=3))
        yield pb.GenerateEvent(finished=self.finished)

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.closed = True

    text = property(lambda self: self._answer.text)
    tool_calls = property(lambda self: self._answer.tool_calls)

    def message(self) -> pb.ChatMessage:
        return self._answer.message()

    def raise_for_error(self) -> None:
        """It ended well."""


class FakeClient:
    """`answers`: the steps of each answer in turn; an error alone is a refusal."""

    def __init__(self, *answers: list[Step] | KvmeshError) -> None:
        self.answers = list(answers) or [[pb.Delta(text="Hi")]]
        self.asked: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []
        self.streams: list[FakeStream] = []

    def chat(self, messages: list[dict[str, Any]], **options: Any) -> FakeStream:
        self.asked.append(([dict(each) for each in messages], options))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, KvmeshError):
            raise answer
        self.streams.append(FakeStream(answer))
        return self.streams[-1]

    def models(self) -> list[pb.Model]:
        return [pb.Model(name="m", dtype="bf16", max_model_len=99), pb.Model(name="vectors", embeds=True)]

    def model(self, name: str) -> pb.Model:
        if name != "m":
            raise NotFound(f"no worker serves model {name!r}")
        return pb.Model(name=name)

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *exc: object) -> None:
        """Nothing to close."""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Session:
    """Types lines into a chat; `said` is what people see, `answer` what went to stdout."""

    def __init__(self, client: FakeClient, conversation: Conversation | None = None, out: io.StringIO | None = None):
        self.client = client
        self._said, self._out = io.StringIO(), out or io.StringIO()
        self._lines: list[str | BaseException] = []
        self.chat = Chat(
            client,  # type: ignore[arg-type]
            conversation or Conversation("auto", "", {"temperature": 0.5}),
            read=self._read,
            console=Console(file=self._said, width=200),
            out=self._out,
        )

    def _read(self, prompt: str) -> str:
        if not self._lines:
            raise EOFError
        line = self._lines.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line

    def type(self, *lines: str | BaseException) -> None:
        self._lines = list(lines)
        assert self.chat.run() == 0

    @property
    def said(self) -> str:
        return self._said.getvalue()

    @property
    def answer(self) -> str:
        return self._out.getvalue()


def test_a_conversation_goes_on() -> None:
    session = Session(FakeClient([pb.Delta(text="He"), pb.Delta(text="llo")], [pb.Delta(text="again")]))
    session.type("hi", "", "and?")
    assert session.answer == "Hello\nagain\n"
    messages, options = session.client.asked[1]
    assert [(each["role"], each["content"]) for each in messages] == [
        ("user", "hi"),
        ("assistant", "Hello"),
        ("user", "and?"),
    ]
    assert options["temperature"] == 0.5
    assert options["model"] == "auto"
    assert all(stream.closed for stream in session.client.streams)


def test_commands() -> None:
    session = Session(FakeClient())
    session.type(
        "/help",
        "/system Be brief.",
        "/model",
        "/model m",
        "/model nope",
        '/params top_p=0.9 seed=7 stop=END,\\n json_schema=\'{"type": "null"}\' cache=off',
        "/params temperature=",
        "/stats",
        "hi",
        "/nothing",
        "/quit",
        "never asked",
    )
    ((messages, options),) = session.client.asked
    assert messages[0] == {"role": "system", "content": "Be brief."}
    assert {key: options[key] for key in ("model", "top_p", "seed", "stop", "cache")} == {
        "model": "m", "top_p": 0.9, "seed": 7, "stop": ["END", "\n"], "cache": "off"
    }  # fmt: skip
    assert json.loads(options["json_schema"]) == {"type": "null"}
    assert "temperature" not in options
    for words in ("/retry", "bf16, 99 tokens", "no worker serves model 'nope'", "7 in", "there is no /nothing"):
        assert words in session.said
    assert "vectors" not in session.said, "an embedder is no model to chat with"


@pytest.mark.parametrize(
    "wrong", ["nope=1", "seed=-1", "cache=maybe", "temperature", "regex=a json_object=true", "'", "grammar={}"]
)
def test_a_parameter_that_cannot_be_is_refused_at_once(wrong: str) -> None:
    session = Session(FakeClient())
    before = dict(session.chat.conversation.params)
    session.type(f"/params {wrong}", "hi")
    assert before.items() <= session.client.asked[0][1].items()
    assert "nope" not in session.client.asked[0][1]
    assert len(session.said.splitlines()) >= 2


def test_several_lines() -> None:
    session = Session(FakeClient())
    session.type('"""first', "  second", 'third"""', "a \\", "b", '"""one"""')
    asked = [messages[-1]["content"] for messages, _ in session.client.asked]
    assert asked == ["first\n  second\nthird", "a \nb", "one"]


def test_ctrl_c_ends_the_answer_and_not_the_chat() -> None:
    session = Session(FakeClient([pb.Delta(text="Half"), KeyboardInterrupt()], [pb.Delta(text="whole")]))
    session.type("one", KeyboardInterrupt(), "two")
    assert "stopped" in session.said
    assert session.client.streams[0].closed
    assert [each["content"] for each in session.client.asked[1][0]] == ["one", "Half", "two"]
    assert session.answer.endswith("whole\n")


@pytest.mark.parametrize(
    ("error", "words"),
    [(Overloaded("no room", retry_after=3.0), "come back in 3 s"), (WorkerLost("gone"), "WORKER_LOST: gone")],
)
def test_a_question_in_vain_is_forgotten(error: KvmeshError, words: str) -> None:
    session = Session(FakeClient(error, [pb.Delta(text="ok")]))
    session.type("one", "two")
    assert words in session.said
    assert [each["content"] for each in session.client.asked[1][0]] == ["two"]


def test_retry_asks_again_what_was_asked_in_vain() -> None:
    """And not what was asked, and answered, before it."""
    session = Session(FakeClient([pb.Delta(text="a")], Overloaded("no room"), WorkerLost("gone"), [pb.Delta(text="b")]))
    session.type("one", "two", "/retry", "/retry", "/clear", "/retry")
    asked = [[each["content"] for each in messages] for messages, _ in session.client.asked]
    assert asked == [["one"], *[["one", "a", "two"]] * 3]
    assert "nothing was asked yet" in session.said


def test_retry_and_clear() -> None:
    session = Session(FakeClient([pb.Delta(text="a")], [pb.Delta(text="b")], [pb.Delta(text="c")]))
    session.type("/retry", "one", "/retry", "/clear", "two")
    assert "nothing was asked yet" in session.said
    asked = [[each["content"] for each in messages] for messages, _ in session.client.asked]
    assert asked == [["one"], ["one"], ["two"]]


def test_reasoning_and_calls_are_shown_apart() -> None:
    call = pb.ToolCallDelta(index=0, id="1", name="f", arguments='{"x": 1}')
    session = Session(FakeClient([pb.Delta(reasoning="Hm"), pb.Delta(text="Yes"), pb.Delta(tool_calls=[call])]))
    session.type("one", "two")
    assert session.answer == "Yes\nYes\n"
    assert "Hm" in session.said
    assert 'call f({"x": 1})' in session.said
    said = session.client.asked[1][0][1]
    assert said["tool_calls"][0]["name"] == "f"
    assert said["reasoning"] == "Hm"


def test_a_terminal_is_told_nothing_that_it_would_obey() -> None:
    evil = "\x1b]0;owned\x07[bold]x[/bold]\u202e"
    session = Session(FakeClient([pb.Delta(text=evil, reasoning=evil)]), out=Terminal())
    session.type("one")
    for shown in (session.answer, session.said):
        assert "\x1b" not in shown
        assert "\x07" not in shown
        assert "\u202e" not in shown
        assert "[bold]x[/bold]" in shown


def test_save_and_load(tmp_path: Path) -> None:
    call = pb.ToolCallDelta(index=0, id="1", name="f", arguments="{}")
    first = Session(FakeClient([pb.Delta(text="Grüße"), pb.Delta(tool_calls=[call])]))
    file = tmp_path / "talk.json"
    first.type(
        "/save", "/system S", "hi", f"/save {file}", f"/save {file}", f"/save ! {file}", f"/save {tmp_path}/no/x"
    )
    assert "is there already" in first.said
    assert "No such file" in first.said
    assert file.stat().st_mode & 0o077 == 0
    second = Session(FakeClient())
    second.type(f"/load {file}", "on", "/load", f"/load {tmp_path / 'nothing'}", "/load ~nobody-here/x")
    messages, options = second.client.asked[0]
    assert [each["role"] for each in messages] == ["system", "user", "assistant", "user"]
    assert messages[2]["content"] == "Grüße"
    assert options["temperature"] == 0.5
    assert [each.name for each in tmp_path.iterdir()] == ["talk.json"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"messages": [{"role": 5}]}',
        '{"messages": [], "params": {"nope": 1}}',
        '{"messages": "x"}',
        "\xff",
    ],
)
def test_a_file_that_is_no_conversation(tmp_path: Path, content: str) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(InvalidArgument, match="holds no conversation"):
        Conversation.load(file)


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeClient], None]:
    def use(client: FakeClient) -> None:
        monkeypatch.setattr("kvmesh.cli.chat.SyncClient", lambda address, **options: client)

    return use


def test_a_pipe_is_one_question(piped: Callable[[FakeClient], None], tmp_path: Path) -> None:
    client = FakeClient([pb.Delta(text="\x1b[1mraw")])
    piped(client)
    out = io.StringIO()
    assert converse("x", Conversation(), stdin=io.StringIO("two\nlines\n"), stdout=out) == 0
    assert out.getvalue() == "\x1b[1mraw\n", "a program gets what was said, unchanged"
    assert client.asked[0][0][-1]["content"] == "two\nlines"
    assert converse("x", Conversation(), stdin=io.StringIO(" \n"), stdout=out) == 2
    piped(FakeClient(WorkerLost("gone")))
    assert converse("x", Conversation(), stdin=io.StringIO("q"), stdout=out) == 1


def test_a_terminal_without_unicode(piped: Callable[[FakeClient], None]) -> None:
    client = FakeClient([pb.Delta(text="né 🎉")])
    piped(client)
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    asked = io.TextIOWrapper(io.BytesIO(b"h\xffi"), encoding="utf-8")
    assert converse("x", Conversation(), stdin=asked, stdout=out) == 0
    assert raw.getvalue() == b"n? ?\n"
    assert client.asked[0][0][-1]["content"] == "h\ufffdi"


async def test_an_answer_to_ask_moves_no_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the words are a server's."""
    said, out = io.StringIO(), Terminal()
    monkeypatch.setattr("sys.stdout", out)
    hostile = "\x1b]0;owned\x07 ok\n"

    class Client:
        def __init__(self, *args: object, **options: object) -> None:
            """Nothing to connect to."""

        async def __aenter__(self) -> Any:
            return self

        async def __aexit__(self, *exc: object) -> None:
            """Nothing to close."""

        def chat(self, *args: object, **options: object) -> Any:
            return self

        async def __aiter__(self) -> AsyncIterator[pb.GenerateEvent]:
            yield pb.GenerateEvent(delta=pb.Delta(text=hostile))
            yield pb.GenerateEvent(error=pb.StreamError(reason="X", message=hostile))

    monkeypatch.setattr("kvmesh.cli.ask.Client", Client)
    assert await ask("x", "q", model="m", console=Console(file=said)) == 1
    for words in (out.getvalue(), said.getvalue()):
        assert "ok" in words
        assert "\x1b" not in words
        assert "\x07" not in words


def test_closed_streams(piped: Callable[[FakeClient], None], monkeypatch: pytest.MonkeyPatch) -> None:
    piped(FakeClient())
    monkeypatch.setattr("sys.stdin", None)
    monkeypatch.setattr("sys.stdout", None)
    assert converse("x", Conversation()) == 2
    assert converse("x", Conversation(), stdin=io.StringIO("q")) == 0


def test_the_command(piped: Callable[[FakeClient], None], tmp_path: Path) -> None:
    client = FakeClient()
    piped(client)
    result = CliRunner().invoke(app, ["chat", "--model", "m", "--system", "S", "--max-tokens", "9"], input="hi\n")
    assert (result.exit_code, result.stdout) == (0, "Hi\n")
    messages, options = client.asked[0]
    assert messages[0]["content"] == "S"
    assert (options["model"], options["max_tokens"]) == ("m", 9)
    result = CliRunner().invoke(app, ["chat", "--load", str(tmp_path / "nothing")], input="hi\n")
    assert result.exit_code == 2
