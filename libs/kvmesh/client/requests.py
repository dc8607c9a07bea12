"""Requests out of what people write: messages, tools, grammars, sampling parameters."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvmesh.errors import InvalidArgument
from kvmesh.proto.v1 import inference_pb2 as pb

Message = pb.ChatMessage | Mapping[str, Any] | tuple[str, str]
Tool = pb.Tool | Mapping[str, Any]
ToolChoice = pb.ToolChoice | Mapping[str, Any] | str
Schema = Mapping[str, Any] | str | bool | type
Cache = str | None
CacheControl = Mapping[str, bool | int | float]

_CACHE = {
    None: pb.CACHE_MODE_UNSPECIFIED,
    "off": pb.CACHE_MODE_OFF,
    "exact": pb.CACHE_MODE_EXACT,
    "semantic": pb.CACHE_MODE_SEMANTIC,
}
_MODES = {
    "none": pb.ToolChoice.MODE_NONE,
    "auto": pb.ToolChoice.MODE_AUTO,
    "required": pb.ToolChoice.MODE_REQUIRED,
}


def bad(field: str, message: str) -> InvalidArgument:
    """The error for an argument that cannot be sent."""
    return InvalidArgument(f"{field}: {message}", details={"field": field})


def message(given: Message) -> pb.ChatMessage:
    """A message: a ChatMessage, a pair of role and content, or a mapping with the fields of ChatMessage.

    In a mapping, content may be None (an assistant that only calls tools), and tool calls may have OpenAI's form.
    """
    if isinstance(given, pb.ChatMessage):
        return given
    try:
        if isinstance(given, tuple):
            role, content = given
            return pb.ChatMessage(role=role, content=content)
        fields = dict(given)
        calls = [_tool_call(each) for each in fields.pop("tool_calls", None) or ()]
        known = {name: value for name, value in fields.items() if value is not None}
        if "role" not in known:
            raise bad("messages", "every message needs a role")
        return pb.ChatMessage(tool_calls=calls, **known)
    except (TypeError, ValueError) as exc:
        raise bad("messages", f"not a message ({exc})") from exc


def _tool_call(given: pb.ToolCall | Mapping[str, Any]) -> pb.ToolCall:
    if isinstance(given, pb.ToolCall):
        return given
    function = given.get("function", given)
    return pb.ToolCall(
        id=given.get("id", ""), name=function.get("name", ""), arguments=_json(function.get("arguments", ""))
    )


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def tool(given: Tool) -> pb.Tool:
    """A tool: a Tool, or a mapping with name, description, parameters (a JSON Schema) and strict; OpenAI's form with
    "function" around them will do too."""
    if isinstance(given, pb.Tool):
        return given
    fields = dict(given.get("function", given))
    parameters = fields.pop("parameters", None)
    fields.pop("type", None)
    try:
        made = pb.Tool(**{name: value for name, value in fields.items() if value is not None})
    except (TypeError, ValueError) as exc:
        raise bad("tools", f"not a tool ({exc})") from exc
    if parameters is not None:
        made.parameters = schema_text("tools", parameters)
    return made


def tool_choice(given: ToolChoice | None) -> pb.ToolChoice | None:
    """none, auto, required, or the name of a tool as {"name": …} (OpenAI's form will do too)."""
    if given is None or isinstance(given, pb.ToolChoice):
        return given
    if isinstance(given, str):
        if given not in _MODES:
            raise bad("tool_choice", f'{given!r} is none of none, auto, required; a tool is chosen by {{"name": …}}')
        return pb.ToolChoice(mode=_MODES[given])
    function = given.get("function", given)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise bad("tool_choice", "names no tool")
    return pb.ToolChoice(mode=pb.ToolChoice.MODE_NAMED, name=name)


def schema_text(field: str, given: Schema) -> str:
    """A JSON Schema as text. A class may be given that makes its own (pydantic's `model_json_schema`)."""
    if isinstance(given, type):
        make = getattr(given, "model_json_schema", None)
        if make is None:
            raise bad(field, f"{given.__name__} makes no JSON Schema")
        given = make()
    if isinstance(given, str):
        return given
    try:
        return json.dumps(given, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as exc:
        raise bad(field, f"is no JSON ({exc})") from exc


def grammar(
    given: pb.Grammar | None, json_schema: Schema | None, regex: str | None, lark: str | None, json_object: bool
) -> pb.Grammar | None:
    """The one constraint of the output, or None."""
    if not isinstance(given, pb.Grammar | None):
        raise bad("grammar", "is no Grammar; json_schema, regex and lark take what people write")
    made: list[pb.Grammar] = [] if given is None else [given]
    if json_schema is not None:
        made.append(pb.Grammar(json_schema=schema_text("json_schema", json_schema)))
    if regex is not None:
        made.append(pb.Grammar(regex=regex))
    if lark is not None:
        made.append(pb.Grammar(lark=lark))
    if json_object:
        made.append(pb.Grammar(json_object=True))
    if len(made) > 1:
        raise bad("grammar", "give one of grammar, json_schema, regex, lark and json_object")
    return made[0] if made else None


def sampling(given: Mapping[str, Any], constraint: pb.Grammar | None = None) -> pb.SamplingParams:
    """SamplingParams of keyword arguments; None = not given."""
    known = pb.SamplingParams.DESCRIPTOR.fields_by_name
    values = {name: value for name, value in given.items() if value is not None}
    for name in values:
        if name not in known:
            raise InvalidArgument(f"there is no sampling parameter {name!r}", details={"field": name})
    # One stop string is what people write; as a sequence it would be a stop at each of its letters.
    if isinstance(values.get("stop"), str):
        values["stop"] = [values["stop"]]
    try:
        made = pb.SamplingParams(**values)
    except (TypeError, ValueError) as exc:
        raise InvalidArgument(f"bad sampling parameter: {exc}") from exc
    if constraint is not None:
        made.grammar.CopyFrom(constraint)
    return made


def cache(mode: Cache) -> pb.CacheMode.ValueType:
    """off, exact, semantic, or None for what the tenant may have."""
    if mode not in _CACHE:
        raise InvalidArgument(f"unknown cache mode {mode!r}: off, exact or semantic", details={"field": "cache"})
    return _CACHE[mode]


def cache_control(given: CacheControl | None) -> pb.CacheControl | None:
    """The fields of CacheControl."""
    if given is None:
        return None
    for name in given:
        if name not in pb.CacheControl.DESCRIPTOR.fields_by_name:
            raise InvalidArgument(f"there is no cache control {name!r}", details={"field": "cache_control"})
    try:
        return pb.CacheControl(**given)  # type: ignore[arg-type]
    except (TypeError, ValueError) as exc:
        raise InvalidArgument(f"bad cache control: {exc}", details={"field": "cache_control"}) from exc


def limits(ttft_ms: int | None, total_ms: int | None) -> pb.Limits:
    """Limits of one request."""
    try:
        return pb.Limits(ttft_ms=ttft_ms, total_ms=total_ms)
    except (TypeError, ValueError) as exc:
        raise bad("limits", str(exc)) from exc


def chat_request(
    model: str,
    messages: Iterable[Message],
    tools: Iterable[Tool] | None = None,
    choice: ToolChoice | None = None,
    template_variables: Mapping[str, Any] | None = None,
    **fields: Any,
) -> pb.ChatRequest:
    """A ChatRequest; `fields` are those that need no translation."""
    request: pb.ChatRequest = _made(
        pb.ChatRequest,
        model=model,
        messages=[message(each) for each in messages],
        tools=[tool(each) for each in tools or ()],
        tool_choice=tool_choice(choice),
        **fields,
    )
    if template_variables is not None:
        request.template_variables = schema_text("template_variables", template_variables)
    return request


def generate_request(model: str, prompt: str | Sequence[int], **fields: Any) -> pb.GenerateRequest:
    """A GenerateRequest over text or token ids."""
    request: pb.GenerateRequest = _made(pb.GenerateRequest, model=model, **fields)
    try:
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.tokens.CopyFrom(pb.TokenIds(ids=prompt))
    except (TypeError, ValueError) as exc:
        raise bad("prompt", f"neither text nor token ids ({exc})") from exc
    return request


def _made(kind: type[Any], **fields: Any) -> Any:
    try:
        return kind(**fields)
    except (TypeError, ValueError) as exc:
        raise InvalidArgument(f"bad argument: {exc}") from exc
