"""What came of one choice: text, reasoning and tool calls put together from their pieces."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmesh.proto.v1 import inference_pb2 as pb

_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


@dataclass(slots=True)
class _Call:
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


class Answer:
    """Grows with `add`."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, _Call] = {}
        self.token_ids: list[int] = []
        self.logprobs: list[pb.TokenLogprob] = []
        self.finish_reason = ""
        """stop, length or tool_calls once it has ended."""
        self.stop_reason = ""
        """The stop string or token that ended it, if one did."""

    def add(self, delta: pb.Delta) -> None:
        """The next piece."""
        if delta.text:
            self._text.append(delta.text)
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
        for piece in delta.tool_calls:
            call = self._calls.setdefault(piece.index, _Call())
            call.id = call.id or piece.id
            call.name = call.name or piece.name
            call.arguments.append(piece.arguments)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.finish_reason = _REASONS.get(delta.finish_reason, self.finish_reason)
        self.stop_reason = delta.stop_reason or self.stop_reason

    @property
    def text(self) -> str:
        """Text so far."""
        return _joined(self._text)

    @property
    def reasoning(self) -> str:
        """Reasoning so far."""
        return _joined(self._reasoning)

    @property
    def tool_calls(self) -> list[pb.ToolCall]:
        """Calls so far, in order."""
        return [
            pb.ToolCall(id=call.id, name=call.name, arguments=_joined(call.arguments))
            for _, call in sorted(self._calls.items())
        ]

    def message(self) -> pb.ChatMessage:
        """As an assistant's message."""
        return pb.ChatMessage(role="assistant", content=self.text, reasoning=self.reasoning, tool_calls=self.tool_calls)


def _joined(pieces: list[str]) -> str:
    """The pieces as one text. They are joined in place: whoever looks after every event would else pay for all of
    them each time."""
    if len(pieces) > 1:
        pieces[:] = ["".join(pieces)]
    return pieces[0] if pieces else ""
