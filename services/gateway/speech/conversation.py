"""A conversation as the model's chat template is given it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvmesh.proto.v1 import inference_pb2 as pb
from services.gateway.speech.check import MAX_ARGUMENTS_BYTES, Function, json_object
from services.gateway.speech.profile import Profile
from services.gateway.validate import bad

_ALWAYS = frozenset({"system", "user", "assistant", "tool"})
_REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
# Some templates refuse any other length of a call's id.
_SHORT_ID = "length 9"


def template_messages(
    messages: Sequence[pb.ChatMessage], calls: Mapping[str, str], profile: Profile
) -> list[dict[str, Any]]:
    """The messages; where the template knows no tools, with calls and their answers written into the text."""
    out: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        role = _role(message.role, index, profile)
        if profile.knows_tools:
            out.append(_message(message, role, index, calls, profile))
        elif role != "tool":
            out.append({"role": role, "content": _with_calls(message, index)} | _reasoning(message, profile))
        else:
            answer = f"<tool_response>\n{message.content}\n</tool_response>"
            if index and messages[index - 1].role == "tool":
                # Answers to calls of one message stand in one message.
                out[-1]["content"] += "\n" + answer
            else:
                out.append({"role": "user", "content": answer})
    return out


def _role(role: str, index: int, profile: Profile) -> str:
    if role == "developer" and not profile.names("developer"):
        return "system"
    if role not in _ALWAYS and not profile.names(role):
        raise bad(f"messages[{index}].role", f"the model knows no role {role!r}")
    return role


def _reasoning(message: pb.ChatMessage, profile: Profile) -> dict[str, str]:
    if not message.reasoning:
        return {}
    return {name: message.reasoning for name in _REASONING_NAMES if name in profile.source}


def _message(
    message: pb.ChatMessage, role: str, index: int, calls: Mapping[str, str], profile: Profile
) -> dict[str, Any]:
    out: dict[str, Any] = {"role": role, "content": message.content} | _reasoning(message, profile)
    name = message.name or calls.get(message.tool_call_id, "")
    if name:
        out["name"] = name
    if message.tool_call_id:
        out["tool_call_id"] = _call_id(message.tool_call_id, profile)
    if message.tool_calls:
        out["tool_calls"] = [
            {
                "type": "function",
                "id": _call_id(call.id, profile),
                "function": {"name": call.name, "arguments": _arguments(call, index, number)},
            }
            for number, call in enumerate(message.tool_calls)
        ]
    return out


def _arguments(call: pb.ToolCall, index: int, number: int) -> dict[str, Any]:
    return json_object(f"messages[{index}].tool_calls[{number}].arguments", call.arguments or "{}", MAX_ARGUMENTS_BYTES)


def _call_id(call_id: str, profile: Profile) -> str:
    if _SHORT_ID not in profile.source or (len(call_id) == 9 and call_id.isalnum()):
        return call_id
    return hashlib.blake2b(call_id.encode(), digest_size=8).hexdigest()[:9]


def _with_calls(message: pb.ChatMessage, index: int) -> str:
    parts = [message.content] if message.content else []
    for number, call in enumerate(message.tool_calls):
        said = {"name": call.name, "arguments": _arguments(call, index, number)}
        parts.append(f"<tool_call>\n{json.dumps(said, ensure_ascii=False)}\n</tool_call>")
    return "\n".join(parts)


def describe_tools(
    messages: list[dict[str, Any]], functions: Sequence[Function], profile: Profile, *, forced: bool
) -> list[dict[str, Any]]:
    """The messages with the tools described in the system message, or in the first one of a template that has no place
    for that; `forced`: one of them is to be called."""
    listed = "\n".join(json.dumps(function.describe(), ensure_ascii=False) for function in functions)
    must = "Call a function now." if forced else "When no function helps, answer the user directly."
    text = (
        "You can call functions. Their signatures, in JSON, are inside <tools></tools>:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "To call a function, write a JSON object with its name and arguments inside <tool_call></tool_call>, "
        "and nothing after it:\n"
        '<tool_call>\n{"name": "function_name", "arguments": {"argument": "value"}}\n</tool_call>\n'
        f"{must}"
    )
    if profile.refuses_system:
        return [messages[0] | {"content": f"{text}\n\n{messages[0]['content']}"}, *messages[1:]]
    if messages[0]["role"] == "system":
        first = messages[0] | {"content": f"{messages[0]['content']}\n\n{text}".lstrip()}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
