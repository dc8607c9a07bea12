"""Tools, calls and variables of a chat request, checked field by field."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from kvmesh.proto.v1 import inference_pb2 as pb
from services.gateway.validate import bad

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 512 * 1024
MAX_SCHEMA_BYTES = 64 * 1024
MAX_DESCRIPTION_BYTES = 16 * 1024
MAX_VARIABLES_BYTES = 16 * 1024
MAX_ARGUMENTS_BYTES = 256 * 1024
MAX_CALLS = 128
MAX_CALL_ID_BYTES = 128
MAX_DEPTH = 32

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
# What the gateway itself tells a template.
RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
RESERVED |= {"bos_token", "eos_token", "raise_exception", "strftime_now"}


@dataclass(frozen=True, slots=True)
class Function:
    """A checked tool. `parameters`: the JSON Schema of its arguments, an object's; `text`: as it was given."""

    name: str
    description: str
    parameters: dict[str, Any]
    strict: bool
    text: str = ""

    def describe(self) -> dict[str, Any]:
        """As templates are given it."""
        function: dict[str, Any] = {"name": self.name, "parameters": self.parameters}
        if self.description:
            function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


def json_object(field: str, text: str, limit: int) -> dict[str, Any]:
    """The text as a JSON object of bounded size and depth. Raises InvalidArgument."""
    if len(text) > limit or len(text.encode()) > limit:
        raise bad(field, f"is larger than {limit} bytes")

    def constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is no JSON")

    try:
        value = json.loads(text, parse_constant=constant)
        # Half of a surrogate pair can be written in JSON, but not in a prompt.
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise bad(field, "holds half of a surrogate pair") from None
    except RecursionError:
        raise bad(field, f"is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as exc:
        raise bad(field, f"is not JSON ({exc})"[:200]) from None
    if not isinstance(value, dict):
        raise bad(field, "must be a JSON object")
    if _deeper(value, MAX_DEPTH):
        raise bad(field, f"is nested deeper than {MAX_DEPTH} levels")
    return value


def _deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_deeper(item, levels - 1) for item in inner)


def check_tools(tools: Sequence[pb.Tool]) -> list[Function]:
    """The tools of a request."""
    if len(tools) > MAX_TOOLS:
        raise bad("tools", f"has {len(tools)} entries; at most {MAX_TOOLS} are allowed")
    if sum(tool.ByteSize() for tool in tools) > MAX_TOOLS_BYTES:
        raise bad("tools", f"are larger than {MAX_TOOLS_BYTES} bytes together")
    functions: dict[str, Function] = {}
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if not NAME.fullmatch(tool.name):
            raise bad(f"{where}.name", "must be 1 to 64 letters, digits, _ and -")
        if tool.name in functions:
            raise bad(f"{where}.name", f"{tool.name!r} is there twice")
        if len(tool.description.encode()) > MAX_DESCRIPTION_BYTES:
            raise bad(f"{where}.description", f"is longer than {MAX_DESCRIPTION_BYTES} bytes")
        functions[tool.name] = Function(
            tool.name, tool.description, _schema(f"{where}.parameters", tool.parameters), tool.strict, tool.parameters
        )
    return list(functions.values())


def _schema(field: str, text: str) -> dict[str, Any]:
    if not text:
        return {"type": "object", "properties": {}}
    schema = json_object(field, text, MAX_SCHEMA_BYTES)
    if schema.get("type", "object") != "object":
        raise bad(field, 'must be the schema of an object (its "type" is another one)')
    if not isinstance(schema.get("properties", {}), dict):
        raise bad(field, '"properties" must be an object')
    if not isinstance(schema.get("required", []), list):
        raise bad(field, '"required" must be a list')
    # Templates look for both.
    return {"type": "object", "properties": {}} | schema


def check_choice(choice: pb.ToolChoice, functions: Sequence[Function]) -> list[Function]:
    """The functions that may be called. Raises InvalidArgument where the choice does not fit them."""
    match choice.mode:
        case pb.ToolChoice.MODE_NONE:
            return []
        case pb.ToolChoice.MODE_UNSPECIFIED | pb.ToolChoice.MODE_AUTO:
            return list(functions)
        case pb.ToolChoice.MODE_REQUIRED:
            if not functions:
                raise bad("tool_choice", "required needs tools")
            return list(functions)
        case pb.ToolChoice.MODE_NAMED:
            named = [function for function in functions if function.name == choice.name]
            if not named:
                raise bad("tool_choice.name", f"there is no tool {choice.name[:64]!r}")
            return named
    raise bad("tool_choice.mode", f"unknown value {choice.mode}")


def check_variables(text: str) -> dict[str, Any]:
    """Variables of the template."""
    if not text:
        return {}
    variables = json_object("template_variables", text, MAX_VARIABLES_BYTES)
    for name in variables:
        if not _VARIABLE.fullmatch(name):
            raise bad("template_variables", f"{name[:64]!r} cannot be a variable's name")
        if name in RESERVED:
            raise bad("template_variables", f"{name!r} is the gateway's own")
    return variables


def check_calls(messages: Sequence[pb.ChatMessage]) -> dict[str, str]:
    """The calls of a conversation and what answers them. Returns id of each call -> name of its function."""
    calls: dict[str, str] = {}
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message.tool_calls and message.role != "assistant":
            raise bad(f"{where}.tool_calls", "only an assistant calls tools")
        if message.reasoning and message.role != "assistant":
            raise bad(f"{where}.reasoning", "only an assistant reasons")
        if len(message.tool_calls) > MAX_CALLS:
            raise bad(f"{where}.tool_calls", f"has {len(message.tool_calls)} entries; at most {MAX_CALLS} are allowed")
        for number, call in enumerate(message.tool_calls):
            at = f"{where}.tool_calls[{number}]"
            if not call.id or len(call.id.encode()) > MAX_CALL_ID_BYTES:
                raise bad(f"{at}.id", f"must be 1 to {MAX_CALL_ID_BYTES} bytes")
            if call.id in calls:
                raise bad(f"{at}.id", "is not unique in the conversation")
            if not NAME.fullmatch(call.name):
                raise bad(f"{at}.name", "must be 1 to 64 letters, digits, _ and -")
            calls[call.id] = call.name
        if message.role == "tool" and not message.tool_call_id:
            raise bad(f"{where}.tool_call_id", "is required: which call does it answer?")
        if message.role == "tool" and message.tool_call_id not in calls:
            raise bad(f"{where}.tool_call_id", "answers no call of the conversation")
        if message.tool_call_id and message.role != "tool":
            raise bad(f"{where}.tool_call_id", "only a tool's message answers a call")
    return calls
