"""`kvmesh chat`: a conversation in the terminal."""

from __future__ import annotations

import io
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvmesh.cli.ask import summary
from kvmesh.cli.conversation import Conversation, assistant
from kvmesh.cli.options import TlsCa, TlsCert, TlsKey, TlsName, lenient, plain, secure_of, shown, write
from kvmesh.cli.state import read_state
from kvmesh.cli.tls import PLAINTEXT, Secure
from kvmesh.client import SyncClient, SyncStream
from kvmesh.errors import Cancelled, InvalidArgument, KvmeshError

INTERRUPTED = 130
FENCE = '"""'
HELP = (
    ("/system [text]", "show or set the system message (- takes it away)"),
    ("/model [name]", "list the models, or choose one"),
    ("/params [name=value …]", "show or set parameters: temperature=0.7 top_p=0.9 max_tokens=200 seed=1 stop=END …"),
    ("/retry", "ask the last question again"),
    ("/clear", "forget the conversation"),
    ("/save file, /load file", "keep it and take it up again"),
    ("/stats", "usage and timing after each answer, on or off"),
    ("/quit", "end (Ctrl-D does too)"),
    (f"{FENCE} … {FENCE}", "several lines; so does a \\ at the end of a line"),
    ("Ctrl-C", "ends the answer, not the chat"),
)


class Chat:
    """One chat over a client. `read` gives a line of input (EOFError at its end); `console` is for people, `out` gets
    the answers."""

    def __init__(
        self,
        client: SyncClient,
        conversation: Conversation,
        *,
        read: Callable[[str], str],
        console: Console,
        out: TextIO,
        timeout_s: float = 600.0,
    ) -> None:
        self._client = client
        self.conversation = conversation
        self._read = read
        self._console = console
        self._out = out
        self._timeout_s = timeout_s
        self._stats = False
        self._in_vain = ""
        """What was asked last, where nothing came of it."""
        self._commands: dict[str, Callable[[str], None]] = {
            "help": self._help,
            "system": self._system,
            "model": self._model,
            "params": self._params,
            "clear": self._clear,
            "save": self._save,
            "load": self._load,
            "retry": self._retry,
            "stats": self._stats_too,
        }

    # --- the loop
    def run(self) -> int:
        """Until the input ends; the exit status."""
        self._tell("/help shows the commands, Ctrl-D ends")
        while True:
            try:
                text = self._question().strip()
            except EOFError:
                self._console.print()
                return 0
            except KeyboardInterrupt:
                # At the prompt it takes back what was typed.
                self._console.print()
                continue
            if text in ("/quit", "/exit", "/q"):
                return 0
            if text.startswith("/"):
                self._command(text)
            elif text:
                self.ask(text)

    def _question(self) -> str:
        line = self._read("> ")
        lines: list[str] = []
        if line.strip().startswith(FENCE):
            line = line.strip().removeprefix(FENCE)
            while not line.rstrip().endswith(FENCE):
                lines.append(line)
                line = self._read("… ")
            return "\n".join([*lines, line.rstrip().removesuffix(FENCE)])
        while line.endswith("\\"):
            lines.append(line[:-1])
            line = self._read("… ")
        return "\n".join([*lines, line])

    # --- answers
    def ask(self, question: str) -> bool:
        """One question and its answer; True where that ended well. What was asked in vain is forgotten."""
        self.conversation.messages.append({"role": "user", "content": question})
        stream: SyncStream | None = None
        ended = False
        try:
            params = {key: value for key, value in self.conversation.params.items() if value is not None}
            stream = self._client.chat(
                self.conversation.asked(), model=self.conversation.model, timeout_s=self._timeout_s, **params
            )
            with stream:
                self._show(stream)
            stream.raise_for_error()
            ended = True
        except KeyboardInterrupt:
            self._tell("\nstopped")
        except Cancelled as error:
            self._fail(f"{error.message}")
        except KvmeshError as error:
            after = f" (come back in {error.retry_after:.0f} s)" if error.retry_after else ""
            self._fail(f"{error.reason}: {error.message}{after}")
        said = stream is not None and bool(stream.text or stream.tool_calls)
        if stream is not None and said:
            # What was said before it was stopped is part of the conversation: it has been read.
            self.conversation.messages.append(assistant(stream.message()))
            self._in_vain = ""
        else:
            self._in_vain = self.conversation.take_back()
        if stream is not None and stream.finished is not None and self._stats:
            self._console.print(summary(stream.finished))
        return ended

    def _show(self, stream: SyncStream) -> None:
        """The answer as it comes: reasoning faint, calls of tools after it."""
        thinking = False
        for event in stream:
            if not event.HasField("delta") or event.delta.choice:
                continue
            delta = event.delta
            if delta.reasoning:
                thinking = True
                self._console.print(shown(delta.reasoning), style="dim italic", end="", highlight=False)
            if delta.text:
                if thinking:
                    self._console.print()
                    thinking = False
                write(self._out, delta.text)
        self._out.write("\n")
        self._out.flush()
        for call in stream.tool_calls:
            self._console.print(Text.assemble(("call ", "dim"), plain(f"{call.name}({call.arguments})")))

    # --- commands
    def _command(self, text: str) -> None:
        name, _, rest = text[1:].partition(" ")
        command = self._commands.get(name)
        if command is None:
            self._fail(f"there is no /{name}; /help shows what there is")
            return
        try:
            command(rest.strip())
        except KeyboardInterrupt:
            self._console.print()
        except KvmeshError as error:
            self._fail(error.message)
        except OSError as error:
            self._fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))

    def _help(self, _: str) -> None:
        table = Table.grid(padding=(0, 2))
        for command, what in HELP:
            table.add_row(Text(command, style="bold"), Text(what))
        self._console.print(table)

    def _system(self, text: str) -> None:
        if text:
            self.conversation.system = "" if text == "-" else text
        self._tell(f"system: {self.conversation.system or 'none'}")

    def _model(self, name: str) -> None:
        if name:
            self.conversation.model = self._client.model(name).name if name != "auto" else name
            self._tell(f"model: {self.conversation.model}")
            return
        for model in self._client.models():
            if not model.embeds:
                mark = "*" if model.name == self.conversation.model else " "
                self._console.print(plain(f"{mark} {model.name}  {model.dtype}, {model.max_model_len} tokens"))
        if self.conversation.model == "auto":
            self._tell("* auto")

    def _params(self, text: str) -> None:
        try:
            items = _words(text)
        except ValueError as error:
            self._fail(f"{error}")
            return
        for item in items:
            name, equals, value = item.partition("=")
            if not equals:
                self._fail(f"{item}: expected name=value (name= takes it away)")
                return
            self.conversation.set(name, value)
        shown = ", ".join(f"{name}={value}" for name, value in self.conversation.params.items())
        self._tell(f"params: {shown or 'the defaults'}")

    def _clear(self, _: str) -> None:
        self.conversation.messages.clear()
        self._in_vain = ""
        self._tell("forgotten")

    def _save(self, name: str) -> None:
        if not name:
            self._fail("/save needs a file")
            return
        force = name.startswith("! ")
        path = _path(name.removeprefix("! ").strip() if force else name)
        if path.exists() and not force:
            self._fail(f"{path} is there already; /save ! {path} replaces it")
            return
        self.conversation.save(path)
        self._tell(f"{len(self.conversation.messages)} message(s) in {path}")

    def _load(self, name: str) -> None:
        if not name:
            self._fail("/load needs a file")
            return
        self.conversation = Conversation.load(_path(name))
        self._in_vain = ""
        self._tell(f"{len(self.conversation.messages)} message(s)")
        for message in self.conversation.messages[-2:]:
            self._tell(f"{message['role']}: {message.get('content') or ''}")

    def _retry(self, _: str) -> None:
        question = self._in_vain or self.conversation.take_back()
        if not question:
            self._fail("nothing was asked yet")
            return
        self.ask(question)

    def _stats_too(self, _: str) -> None:
        self._stats = not self._stats
        self._tell(f"statistics {'on' if self._stats else 'off'}")

    # --- words to people
    def _tell(self, text: str) -> None:
        self._console.print(shown(text), style="dim", highlight=False)

    def _fail(self, text: str) -> None:
        self._console.print(shown(text), style="red", highlight=False)


def _path(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        # ~somebody who is not there.
        raise InvalidArgument(f"{name}: {error}") from None


def _words(text: str) -> list[str]:
    """Split as a shell would, but a backslash is one: regular expressions are full of them. ValueError."""
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split, lexer.escape, lexer.commenters = True, "", ""
    return list(lexer)


def converse(
    address: str,
    conversation: Conversation,
    *,
    api_key: str = "",
    secure: Secure = PLAINTEXT,
    stdin: TextIO | None = None,
    stdout: TextIO | None = None,
    timeout_s: float = 600.0,
) -> int:
    """Run a chat, or answer the one question that a pipe brings; the exit status."""
    # Both may be closed.
    stdin, stdout = stdin or sys.stdin or io.StringIO(), stdout or sys.stdout or io.StringIO()
    lenient(stdin, stdout)
    console = Console(stderr=True)
    options: Mapping[str, Any] = {"tls": secure.tls, "server_name": secure.server_name or None}
    with SyncClient(address, api_key=api_key or None, **options) as client:
        if not stdin.isatty():
            chat = Chat(client, conversation, read=_nothing, console=console, out=stdout, timeout_s=timeout_s)
            question = stdin.read().strip()
            if not question:
                console.print("nothing to ask: the input is empty", style="red")
                return 2
            return 0 if chat.ask(question) else 1
        _edit_lines()
        console.print(Text(f"kvmesh chat at {address}, model {conversation.model}", style="dim"))
        return Chat(client, conversation, read=input, console=console, out=stdout, timeout_s=timeout_s).run()


def _nothing(prompt: str) -> str:
    raise EOFError


def _edit_lines() -> None:
    """Arrow keys and earlier lines, where this Python can."""
    try:
        import readline
    except ImportError:
        return
    # A pasted tab is a tab, and no completion.
    readline.parse_and_bind("tab: self-insert")


def chat(
    address: Annotated[
        str, typer.Option(help="Gateway; default: the mesh that runs here.", envvar="KVMESH_GATEWAY")
    ] = "",
    model: Annotated[str, typer.Option(help="Model or alias; default: what the mesh serves.")] = "",
    system: Annotated[str, typer.Option(help="System message.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, max=100.0, help="0 is greedy.")] = 0.7,
    load: Annotated[str, typer.Option(help="Take up a conversation that was saved.")] = "",
    api_key: Annotated[str, typer.Option(help="Bearer key.", envvar="KVMESH_API_KEY", show_default=False)] = "",
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_server_name: TlsName = "",
) -> None:
    """Chat with a model in the terminal; with a pipe as input, answer it as one question."""
    from kvmesh.cli.main import DEFAULT_GATEWAY
    from kvmesh.cli.options import fail

    state = read_state()
    target = address or (state.gateway if state else DEFAULT_GATEWAY)
    name = model or (state.model if state and not address else "auto")
    secure = secure_of(tls_ca, tls_cert, tls_key, tls_server_name)
    conversation = Conversation(name, system, {"temperature": temperature, "max_tokens": max_tokens})
    if load:
        try:
            conversation = Conversation.load(_path(load))
        except (KvmeshError, OSError) as error:
            raise fail(error.message if isinstance(error, KvmeshError) else str(error)) from None
    try:
        code = converse(target, conversation, api_key=api_key, secure=secure)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except KvmeshError as error:
        raise fail(error.message) from None
    raise typer.Exit(code)
