"""A conversation of `kvmesh chat`: its messages, its parameters, and the file it is kept in."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict

from kvmesh.client import requests
from kvmesh.errors import InvalidArgument, KvmeshError
from kvmesh.proto.v1 import inference_pb2 as pb

MAX_FILE_BYTES = 16 << 20
_TEXTS = ("stop", "json_schema", "regex", "lark", "cache", "session_id", "user")


@dataclass
class Conversation:
    """`messages` are the user's and the assistant's, in turn; the system message is apart from them."""

    model: str = "auto"
    system: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)

    def asked(self) -> list[dict[str, Any]]:
        """What is sent: the system message first."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.messages]

    def take_back(self) -> str:
        """Remove the last question and whatever came after it; the question, "" where there is none."""
        while self.messages:
            last = self.messages.pop()
            if last["role"] == "user":
                return str(last["content"])
        return ""

    def set(self, name: str, text: str) -> None:
        """A parameter of a request from what was typed; "" takes it away. InvalidArgument."""
        if not text:
            self.params.pop(name, None)
            return
        value = _value(name, text)
        checked = {**self.params, name: value}
        _check(checked)
        self.params = checked

    def save(self, path: Path) -> None:
        """Write it as JSON, all or nothing, for this user alone."""
        fields = {"model": self.model, "system": self.system, "params": self.params, "messages": self.messages}
        handle, temporary = tempfile.mkstemp(dir=path.parent or Path(), prefix=f".{path.name}-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(fields, file, ensure_ascii=False, indent=1)
                file.write("\n")
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: Path) -> Conversation:
        """What `save` wrote. OSError, or InvalidArgument for a file of another kind."""
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            raise InvalidArgument(f"{path} is larger than {MAX_FILE_BYTES} bytes")
        try:
            fields = json.loads(raw)
            made = cls(
                model=_text(fields.get("model", "auto")),
                system=_text(fields.get("system", "")),
                params=dict(fields.get("params", {})),
                messages=[dict(message) for message in fields["messages"]],
            )
            for message in made.messages:
                requests.message(message)
                _text(message.get("content") or "")
            _check(made.params)
        except (ValueError, KeyError, TypeError, AttributeError, KvmeshError) as error:
            raise InvalidArgument(f"{path} holds no conversation ({error})") from None
        return made


def assistant(message: pb.ChatMessage) -> dict[str, Any]:
    """An answer as a message that can be kept and sent again."""
    fields: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True)
    fields.setdefault("content", "")
    return fields


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a text is expected")
    return value


def _value(name: str, text: str) -> Any:
    """A number, a list or a word, as the parameter wants it."""
    if name == "stop":
        # As in a program: \n is the end of a line.
        return [part.replace("\\n", "\n") for part in text.split(",") if part]
    if name in _TEXTS:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _check(params: dict[str, Any]) -> None:
    """Make a request of them and throw it away."""
    given = dict(params)
    requests.cache(given.pop("cache", None))
    constraint = requests.grammar(
        given.pop("grammar", None),
        given.pop("json_schema", None),
        given.pop("regex", None),
        given.pop("lark", None),
        bool(given.pop("json_object", False)),
    )
    requests.limits(given.pop("ttft_ms", None), given.pop("total_ms", None))
    for name in ("session_id", "user"):
        _text(given.pop(name, ""))
    given.pop("continue_final_message", None)
    requests.sampling(given, constraint)
