"""Answers of /v1/completions. Several prompts are choices of one answer: `first` is where a prompt's own begin."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from kvmesh.proto.v1 import inference_pb2 as pb
from services.gateway.http.answers import FINISH, Tally, dumps, fingerprint, logprob, served
from services.gateway.http.escape import quoted, text_bytes

_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def _named(token: bytes) -> str:
    """A token as a string that tells it from every other."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


class Scores:
    """Log-probabilities of one choice, with the places of its tokens in the text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._place = 0

    def skip(self, token: bytes) -> int:
        """Place of a token, in characters; the next one follows it."""
        place = self._place
        self._place += len(self._decoder.decode(token))
        return place

    def take(self, entries: Sequence[pb.TokenLogprob]) -> dict[str, list[Any]]:
        """OpenAI's four lists, of these tokens."""
        return {
            "tokens": [_named(entry.token) for entry in entries],
            "token_logprobs": [logprob(entry.logprob) for entry in entries],
            "top_logprobs": [_top(entry) for entry in entries],
            "text_offset": [self.skip(entry.token) for entry in entries],
        }

    def take_prompt(self, first: bytes, entries: Sequence[pb.TokenLogprob]) -> dict[str, list[Any]]:
        """The same of a prompt, whose first token has no score."""
        place = self.skip(first)
        out = self.take(entries)
        heads: dict[str, Any] = {
            "tokens": _named(first),
            "token_logprobs": None,
            "top_logprobs": None,
            "text_offset": place,
        }
        return {name: [heads[name], *values] for name, values in out.items()}


def _top(entry: pb.TokenLogprob) -> dict[str, float]:
    out: dict[str, float] = {}
    for top in entry.top:
        # Two tokens can be one string; the likelier comes first.
        out.setdefault(_named(top.token), logprob(top.logprob))
    # As OpenAI does: what was drawn is there, also when it is not among the likeliest.
    out.setdefault(_named(entry.token), logprob(entry.logprob))
    return out


class Echo:
    """What goes before the output of one prompt: its text, and its tokens where scores are asked for. `silent`: the
    output itself is not wanted."""

    def __init__(self, text: str, tokens: Sequence[bytes], *, silent: bool) -> None:
        self.text, self.tokens, self.silent = text, tokens, silent


class _Choice:
    """Of a whole answer, so far."""

    __slots__ = ("finish", "scores", "text")

    def __init__(self) -> None:
        self.text: list[str] = []
        self.scores: dict[str, list[Any]] = {name: [] for name in _LISTS}
        self.finish = "stop"


class Completions:
    """What all prompts of a request share."""

    def __init__(self, ident: str, created: int, *, logprobs: bool, with_usage: bool = False) -> None:
        self.ident, self.created, self.logprobs, self.with_usage = ident, created, logprobs, with_usage
        self.tally = Tally()
        self.head = ""
        self.tail = ',"usage":null}\n\n' if with_usage else "}\n\n"
        self.choices: dict[int, _Choice] = {}

    def accepted(self, event: pb.Accepted, start: str) -> None:
        """Who answers is known."""
        if not self.head:
            self.head = (
                f'{start}{{"id":{quoted(self.ident)},"object":"text_completion","created":{self.created},'
                f'"model":{quoted(event.model)},"system_fingerprint":"{fingerprint(event.model, event.revision)}",'
            )

    def extra(self, ends: Sequence[pb.Finished], *, usage: bool, details: bool) -> str:
        """Usage and the service's own part, as members of the last object."""
        for end in ends:
            self.tally.add(end.usage)
        out = ',"usage":' + dumps(self.tally.json()) if usage else ""
        return out + (',"kvmesh":' + dumps(served([end.served for end in ends])) if details else "")


class _Run:
    """One prompt's choices."""

    def __init__(self, shared: Completions, first: int, choices: int, echo: Echo | None, start: str) -> None:
        self._shared, self._first, self._count, self._echo, self._start = shared, first, choices, echo, start
        self._scores = [Scores() for _ in range(choices)] if shared.logprobs or echo is not None else []
        self._scored: pb.PromptScored | None = None
        self._echoed: set[int] = set()

    def accepted(self, event: pb.Accepted) -> None:
        """Who answers is known."""
        self._shared.accepted(event, self._start)

    def prompt(self, event: pb.PromptScored) -> bytes:
        """The prompt's scores; shown with what is echoed."""
        self._scored = event
        return b""

    def parts(self, delta: pb.Delta) -> list[tuple[int, str, dict[str, list[Any]] | None, str]]:
        """(choice, text, scores, finish reason) that become visible with it."""
        out: list[tuple[int, str, dict[str, list[Any]] | None, str]] = []
        choice = delta.choice
        index = self._first + choice
        echo = self._echo
        if echo is not None and choice not in self._echoed:
            self._echoed.add(choice)
            out.append((index, echo.text, self._prompt_scores(choice, echo), ""))
        silent = echo is not None and echo.silent
        text = "" if silent else delta.text
        scores = None
        if delta.logprobs and not silent:
            scores = self._scores[choice].take(delta.logprobs)
        finish = FINISH.get(delta.finish_reason, "") if delta.finish_reason else ""
        if finish and silent:
            finish = "length"
        if text or scores or finish:
            out.append((index, text, scores, finish))
        return out

    def _prompt_scores(self, choice: int, echo: Echo) -> dict[str, list[Any]] | None:
        if not self._shared.logprobs or self._scored is None or not echo.tokens:
            return None
        return self._scores[choice].take_prompt(echo.tokens[0], self._scored.logprobs)


class CompletionChunks(_Run):
    """Streams one prompt's choices."""

    def __init__(self, shared: Completions, first: int, choices: int, echo: Echo | None) -> None:
        super().__init__(shared, first, choices, echo, "data: ")
        self._plain = echo is None and not shared.logprobs

    def delta(self, delta: pb.Delta) -> bytes:
        """Chunks of it."""
        shared = self._shared
        if self._plain and not delta.finish_reason:
            if not delta.text:
                return b""
            return text_bytes(
                f'{shared.head}"choices":[{{"text":{quoted(delta.text)},"index":{self._first + delta.choice},'
                f'"logprobs":null,"finish_reason":null}}]{shared.tail}'
            )
        pieces = []
        for index, text, scores, finish in self.parts(delta):
            reason = f'"{finish}"' if finish else "null"
            pieces.append(
                f'{shared.head}"choices":[{{"text":{quoted(text)},"index":{index},"logprobs":{dumps(scores)},'
                f'"finish_reason":{reason}}}]{shared.tail}'
            )
        return text_bytes("".join(pieces))


def last_chunks(shared: Completions, ends: Sequence[pb.Finished], *, details: bool) -> bytes:
    """What follows all choices of a stream."""
    extra = shared.extra(ends, usage=shared.with_usage, details=details)
    return text_bytes(f'{shared.head}"choices":[]{extra}}}\n\n' if extra else "") + b"data: [DONE]\n\n"


class CompletionBody(_Run):
    """Collects one prompt's choices into what they share."""

    def __init__(self, shared: Completions, first: int, choices: int, echo: Echo | None) -> None:
        super().__init__(shared, first, choices, echo, "")

    def delta(self, delta: pb.Delta) -> bytes:
        """Take it; returns nothing to send."""
        for index, text, scores, finish in self.parts(delta):
            choice = self._shared.choices.get(index)
            if choice is None:
                choice = self._shared.choices[index] = _Choice()
            choice.text.append(text)
            for name, values in (scores or {}).items():
                choice.scores[name].extend(values)
            choice.finish = finish or choice.finish
        return b""


def whole(shared: Completions, ends: Sequence[pb.Finished], *, details: bool) -> bytes:
    """The body."""
    pieces = []
    for index in sorted(shared.choices):
        choice = shared.choices[index]
        scores = dumps(choice.scores) if shared.logprobs else "null"
        pieces.append(
            f'{{"text":{quoted("".join(choice.text))},"index":{index},"logprobs":{scores},'
            f'"finish_reason":"{choice.finish}"}}'
        )
    extra = shared.extra(ends, usage=True, details=details)
    return text_bytes(f'{shared.head}"choices":[{",".join(pieces)}]{extra}}}')
