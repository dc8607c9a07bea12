"""Answers of /v1/chat/completions: chunks of a stream, or one whole body.

Chunks are put together from texts that are made once for a request: a token costs one escape and one join.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvmesh.proto.v1 import inference_pb2 as pb
from services.gateway.http.answers import FINISH, Tally, chat_logprob, dumps, fingerprint, served
from services.gateway.http.escape import quoted, text_bytes


class ChatChunks:
    """Renders a streamed answer. `with_usage`: a last chunk tells it, and the others hold a null."""

    def __init__(self, ident: str, created: int, *, with_usage: bool) -> None:
        self._ident, self._created, self._with_usage = ident, created, with_usage
        self.tally = Tally()
        self._head = ""
        self._tail = ""
        self._text: dict[int, str] = {}
        self._text_tail = ""

    def accepted(self, event: pb.Accepted) -> None:
        """Who answers is known."""
        self._head = (
            f'data: {{"id":{quoted(self._ident)},"object":"chat.completion.chunk","created":{self._created},'
            f'"model":{quoted(event.model)},"system_fingerprint":"{fingerprint(event.model, event.revision)}",'
        )
        self._tail = ',"usage":null}\n\n' if self._with_usage else "}\n\n"
        self._text_tail = '},"logprobs":null,"finish_reason":null}]' + self._tail

    def prompt(self, event: pb.PromptScored) -> bytes:
        """Chats ask for no scores of their prompt."""
        return b""

    def delta(self, delta: pb.Delta) -> bytes:
        """Chunks of it; none where nothing is to be seen yet."""
        index = delta.choice
        known = self._text.get(index)
        if known is None:
            self._text[index] = self._head + f'"choices":[{{"index":{index},"delta":{{"content":'
            role = '{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null}]'
            first = self._head + f'"choices":[{{"index":{index},"delta":' + role + self._tail
            return text_bytes(first) + self.delta(delta)
        finish = delta.finish_reason
        if not finish and not delta.logprobs and not delta.reasoning and not delta.tool_calls:
            return text_bytes(known + quoted(delta.text) + self._text_tail) if delta.text else b""
        pieces = []
        if delta.reasoning:
            text = quoted(delta.reasoning)
            pieces.append(self._choice(index, f'{{"reasoning_content":{text},"reasoning":{text}}}'))
            if not delta.text:
                self.tally.reasoning += len(delta.token_ids)
        if delta.text or delta.logprobs:
            shown = "null"
            if delta.logprobs:
                shown = dumps({"content": [chat_logprob(entry) for entry in delta.logprobs], "refusal": None})
            pieces.append(self._choice(index, f'{{"content":{quoted(delta.text)}}}', shown))
        if delta.tool_calls:
            calls = dumps([_call_delta(call) for call in delta.tool_calls])
            pieces.append(self._choice(index, f'{{"tool_calls":{calls}}}'))
        if finish:
            pieces.append(self._choice(index, "{}", finish=f'"{FINISH.get(finish, "stop")}"'))
        return text_bytes("".join(pieces))

    def _choice(self, index: int, delta: str, logprobs: str = "null", finish: str = "null") -> str:
        return (
            f'{self._head}"choices":[{{"index":{index},"delta":{delta},"logprobs":{logprobs},'
            f'"finish_reason":{finish}}}]{self._tail}'
        )

    def last(self, ends: Sequence[pb.Finished], *, details: bool) -> bytes:
        """What follows all choices."""
        for end in ends:
            self.tally.add(end.usage)
        extra = ""
        if self._with_usage:
            extra += ',"usage":' + dumps(self.tally.json())
        if details:
            extra += ',"kvmesh":' + dumps(served([end.served for end in ends]))
        return text_bytes(f'{self._head}"choices":[]{extra}}}\n\n' if extra else "") + b"data: [DONE]\n\n"


def _call_delta(call: pb.ToolCallDelta) -> dict[str, Any]:
    function: dict[str, Any] = {}
    out: dict[str, Any] = {"index": call.index}
    if call.id:
        out |= {"id": call.id, "type": "function"}
        function["name"] = call.name
    function["arguments"] = call.arguments
    return out | {"function": function}


class _Choice:
    __slots__ = ("calls", "finish", "logprobs", "reasoning", "text")

    def __init__(self) -> None:
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.calls: dict[int, tuple[str, str, list[str]]] = {}
        self.logprobs: list[str] = []
        self.finish = "stop"


class ChatBody:
    """Collects a whole answer."""

    def __init__(self, ident: str, created: int, *, logprobs: bool) -> None:
        self._ident, self._created, self._logprobs = ident, created, logprobs
        self.tally = Tally()
        self._accepted = pb.Accepted()
        self._choices: dict[int, _Choice] = {}

    def accepted(self, event: pb.Accepted) -> None:
        """Who answers is known."""
        self._accepted = event

    def prompt(self, event: pb.PromptScored) -> bytes:
        """Chats ask for no scores of their prompt."""
        return b""

    def delta(self, delta: pb.Delta) -> bytes:
        """Take it; returns nothing to send."""
        choice = self._choices.get(delta.choice)
        if choice is None:
            choice = self._choices[delta.choice] = _Choice()
        choice.text.append(delta.text)
        if delta.reasoning:
            choice.reasoning.append(delta.reasoning)
            if not delta.text:
                self.tally.reasoning += len(delta.token_ids)
        for call in delta.tool_calls:
            known = choice.calls.setdefault(call.index, (call.id, call.name, []))
            known[2].append(call.arguments)
        # As text already: as objects they would take ten times the room.
        choice.logprobs.extend(dumps(chat_logprob(entry)) for entry in delta.logprobs)
        if delta.finish_reason:
            choice.finish = FINISH.get(delta.finish_reason, "stop")
        return b""

    def whole(self, ends: Sequence[pb.Finished], *, details: bool) -> bytes:
        """The body."""
        for end in ends:
            self.tally.add(end.usage)
        model = self._accepted.model
        body: dict[str, Any] = {
            "id": self._ident,
            "object": "chat.completion",
            "created": self._created,
            "model": model,
            "system_fingerprint": fingerprint(model, self._accepted.revision),
        }
        extra: dict[str, Any] = {"usage": self.tally.json()}
        if details:
            extra["kvmesh"] = served([end.served for end in ends])
        choices = ",".join(self._choice(index) for index in sorted(self._choices))
        return text_bytes(f'{dumps(body)[:-1]},"choices":[{choices}],{dumps(extra)[1:]}')

    def _choice(self, index: int) -> str:
        choice = self._choices[index]
        text = "".join(choice.text)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text if text or not (choice.calls or choice.reasoning) else None,
            "refusal": None,
            "annotations": [],
        }
        if choice.reasoning:
            message["reasoning_content"] = message["reasoning"] = "".join(choice.reasoning)
        if choice.calls:
            message["tool_calls"] = [
                {"id": ident, "type": "function", "function": {"name": name, "arguments": "".join(arguments)}}
                for _, (ident, name, arguments) in sorted(choice.calls.items())
            ]
        logprobs = "null"
        if self._logprobs:
            logprobs = f'{{"content":[{",".join(choice.logprobs)}],"refusal":null}}'
        return f'{{"index":{index},"message":{dumps(message)},"logprobs":{logprobs},"finish_reason":"{choice.finish}"}}'
