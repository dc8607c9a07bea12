"""From bodies to what the front takes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from kvmesh.proto.v1 import inference_pb2 as pb
from services.gateway.http import requests as http
from services.gateway.http.body import check_free_form
from services.gateway.http.errors import Renamed
from services.gateway.http.fields import refuse

_CACHE = {"off": pb.CACHE_MODE_OFF, "exact": pb.CACHE_MODE_EXACT, "semantic": pb.CACHE_MODE_SEMANTIC}
_MODES = {
    "none": pb.ToolChoice.MODE_NONE,
    "auto": pb.ToolChoice.MODE_AUTO,
    "required": pb.ToolChoice.MODE_REQUIRED,
}
DEFAULT_COMPLETION_TOKENS = 16
# Fields whose names the front shares.
_SAMPLING = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "min_tokens",
    "ignore_eos",
    "n",
)
_META = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~/]")
_TOKEN_ID = re.compile(r"[0-9]{1,9}")
MAX_LOGIT_BIAS = 1024


def _sampling(body: http.Generate) -> pb.SamplingParams:
    out = pb.SamplingParams()
    for name in _SAMPLING:
        value = getattr(body, name)
        if value is not None:
            setattr(out, name, value)
    if body.top_k is not None:
        out.top_k = max(0, body.top_k)
    if body.seed is not None:
        out.seed = body.seed % 2**64
    if body.stop is not None:
        out.stop.extend([body.stop] if isinstance(body.stop, str) else body.stop)
    out.stop_token_ids.extend(body.stop_token_ids or ())
    if body.logit_bias:
        if len(body.logit_bias) > MAX_LOGIT_BIAS:
            raise refuse("logit_bias", f"logit_bias: at most {MAX_LOGIT_BIAS} entries are allowed", "invalid_value")
        for token, value in body.logit_bias.items():
            if not _TOKEN_ID.fullmatch(token):
                raise refuse("logit_bias", "logit_bias: a name in it is no token id", "invalid_value")
            out.logit_bias[int(token)] = value
    return out


def _grammar(body: http.Generate, form: http.ResponseFormat | None, sampling: pb.SamplingParams) -> str:
    """Set the grammar that the body names; returns the name of its field, "" without one."""
    given: dict[str, pb.Grammar] = {}
    if form is not None and form.type == "json_object":
        given["response_format"] = pb.Grammar(json_object=True)
    elif form is not None and form.type == "json_schema":
        schema = form.json_schema.schema_ if form.json_schema is not None else None
        if schema is None:
            field = "response_format.json_schema" + (".schema" if form.json_schema is not None else "")
            raise refuse(field, f"Missing required parameter: '{field}'.", "missing_required_parameter")
        given["response_format"] = pb.Grammar(json_schema=_json(schema, "response_format"))
    for name in ("regex", "guided_regex"):
        if (text := getattr(body, name)) is not None:
            given[name] = pb.Grammar(regex=text)
    for name in ("grammar", "guided_grammar"):
        if (text := getattr(body, name)) is not None:
            given[name] = pb.Grammar(lark=text)
    if body.guided_json is not None:
        schema_text = body.guided_json if isinstance(body.guided_json, str) else _json(body.guided_json, "guided_json")
        given["guided_json"] = pb.Grammar(json_schema=schema_text)
    if body.guided_choice is not None:
        # Longest first is not needed: a regular expression matches the whole output.
        given["guided_choice"] = pb.Grammar(regex="|".join(_META.sub(r"\\\g<0>", text) for text in body.guided_choice))
    if len(given) > 1:
        first, second = list(given)[:2]
        raise refuse(second, f"{second}: cannot go with {first}", "invalid_value")
    for name, grammar in given.items():
        sampling.grammar.CopyFrom(grammar)
        return name
    return ""


def _json(value: Any, field: str) -> str:
    check_free_form(value, field)
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _common(body: http.Generate, request: pb.GenerateRequest | pb.ChatRequest) -> None:
    """What both kinds have beside prompt and sampling."""
    request.model = body.model
    request.user = body.user or ""
    request.session_id = body.session_id or ""
    request.cache_salt = body.cache_salt or ""
    request.request_id = body.request_id or ""
    if body.cache is not None:
        request.cache = _CACHE[body.cache]
    if body.cache_control is not None:
        for name, value in body.cache_control:
            if value:
                setattr(request.cache_control, name, value)
        if body.cache_control.max_age_s == 0:
            request.cache_control.max_age_s = 0
        if body.cache_control.tau == 0:
            request.cache_control.tau = 0
    if body.limits is not None:
        if body.limits.ttft_ms is not None:
            request.limits.ttft_ms = body.limits.ttft_ms
        if body.limits.total_ms is not None:
            request.limits.total_ms = body.limits.total_ms
    if body.stream_options is not None and not body.stream:
        raise refuse("stream_options", "The 'stream_options' parameter is only allowed when 'stream' is enabled.")


# --- chats
def chat_request(body: http.Chat) -> tuple[pb.ChatRequest, Renamed]:
    """The front's request, and this face's names of its fields."""
    _unserved(body)
    request = pb.ChatRequest()
    _common(body, request)
    request.messages.extend(messages(body.messages))
    sampling = _sampling(body)
    names = {"logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        sampling.max_tokens = body.max_completion_tokens
        names["max_tokens"] = "max_completion_tokens"
    elif body.max_tokens is not None:
        sampling.max_tokens = body.max_tokens
    if body.logprobs:
        sampling.logprobs = body.top_logprobs or 0
    elif body.top_logprobs is not None:
        raise refuse("top_logprobs", "top_logprobs: needs logprobs to be true", "invalid_value")
    names["grammar"] = _grammar(body, body.response_format, sampling)
    request.sampling.CopyFrom(sampling)
    _tools(body, request)
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    if variables:
        request.template_variables = _json(variables, "chat_template_kwargs")
    names["template_variables"] = "chat_template_kwargs"
    request.continue_final_message = _continued(body)
    return request, Renamed(names)


def _continued(body: http.Chat | http.Tokenize) -> bool:
    continued = bool(body.continue_final_message)
    if body.add_generation_prompt is not None and body.add_generation_prompt is continued:
        raise refuse(
            "add_generation_prompt", "add_generation_prompt: is the opposite of continue_final_message", "invalid_value"
        )
    return continued


def _unserved(body: http.Chat) -> None:
    for name, instead in (("functions", "tools"), ("function_call", "tool_choice")):
        if getattr(body, name) is not None:
            raise refuse(name, f"'{name}' is not served here; use '{instead}' instead.")
    for name in ("audio", "prediction", "web_search_options"):
        if getattr(body, name) is not None:
            raise refuse(name, f"'{name}' is not supported by this service.")
    if body.modalities is not None and body.modalities != ["text"]:
        raise refuse("modalities", "modalities: this model answers with text only", "invalid_value")


def _tools(body: http.Chat, request: pb.ChatRequest) -> None:
    request.tools.extend(tools(body.tools))
    choice = body.tool_choice
    if choice is not None:
        if isinstance(choice, str):
            request.tool_choice.mode = _MODES[choice]
        else:
            request.tool_choice.mode = pb.ToolChoice.MODE_NAMED
            request.tool_choice.name = choice.function.name
        if not body.tools and choice not in ("none", "auto"):
            raise refuse("tool_choice", "'tool_choice' is only allowed when 'tools' are specified.", "invalid_value")
    if body.parallel_tool_calls is not None:
        request.parallel_tool_calls = body.parallel_tool_calls


def tools(given: Sequence[http.Tool] | None) -> list[pb.Tool]:
    """The functions that a model may call."""
    return [
        pb.Tool(
            name=tool.function.name,
            description=tool.function.description or "",
            parameters=_json(tool.function.parameters, f"tools[{index}].function.parameters")
            if tool.function.parameters is not None
            else "",
            strict=bool(tool.function.strict),
        )
        for index, tool in enumerate(given or ())
    ]


def messages(given: Sequence[http.Message]) -> list[pb.ChatMessage]:
    """A conversation."""
    return [_message(message, f"messages[{index}]") for index, message in enumerate(given)]


def _message(message: http.Message, path: str) -> pb.ChatMessage:
    if message.function_call is not None:
        raise refuse(f"{path}.function_call", f"'{path}.function_call' is not served here; use 'tool_calls' instead.")
    if message.audio is not None:
        raise refuse(f"{path}.audio", f"{path}.audio: this model takes text only")
    out = pb.ChatMessage(
        # What OpenAI calls developer, models were trained to read as system.
        role="system" if message.role == "developer" else message.role,
        content=_content(message, path),
        name=message.name or "",
        tool_call_id=message.tool_call_id or "",
        reasoning=message.reasoning_content or message.reasoning or "",
    )
    if message.role == "assistant":
        out.tool_calls.extend(
            pb.ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in message.tool_calls or ()
        )
    elif message.tool_calls:
        raise refuse(f"{path}.tool_calls", f"{path}.tool_calls: only an assistant's message has them", "invalid_value")
    if message.role == "tool" and not message.tool_call_id:
        field = f"{path}.tool_call_id"
        raise refuse(field, f"Missing required parameter: '{field}'.", "missing_required_parameter")
    if message.content is None and message.role != "assistant":
        field = f"{path}.content"
        raise refuse(field, f"Missing required parameter: '{field}'.", "missing_required_parameter")
    return out


def _content(message: http.Message, path: str) -> str:
    content = message.content
    if content is None:
        return message.refusal or ""
    if isinstance(content, str):
        return content
    pieces = []
    for index, part in enumerate(content):
        here = f"{path}.content[{index}]"
        if part.type in ("text", "input_text", "output_text"):
            if part.text is None:
                raise refuse(
                    f"{here}.text", f"Missing required parameter: '{here}.text'.", "missing_required_parameter"
                )
            pieces.append(part.text)
        elif part.type == "refusal" and message.role == "assistant":
            pieces.append(part.refusal or "")
        else:
            raise refuse(f"{here}.type", f"{here}.type: is {part.type[:32]!r}; this model takes text only")
    return "".join(pieces)


# --- completions
def completion_requests(body: http.Completion) -> tuple[list[pb.GenerateRequest], Renamed]:
    """One of the front's requests for each prompt."""
    if body.suffix is not None:
        raise refuse("suffix", "'suffix' is not supported by this service.")
    base = pb.GenerateRequest()
    _common(body, base)
    sampling = _sampling(body)
    sampling.max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if body.echo and body.max_tokens == 0:
        # Only the prompt is wanted; a worker gives a token at least, which is not shown.
        sampling.max_tokens = 1
    if body.best_of is not None:
        sampling.best_of = body.best_of
    if body.logprobs is not None:
        sampling.logprobs = body.logprobs
        if body.echo:
            sampling.prompt_logprobs = body.logprobs
    grammar = _grammar(body, None, sampling)
    base.sampling.CopyFrom(sampling)
    out = []
    for prompt in prompts(body):
        request = pb.GenerateRequest()
        request.CopyFrom(base)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.tokens.ids.extend(prompt)
        out.append(request)
    return out, Renamed({"prompt_logprobs": "logprobs", "grammar": grammar})


def prompts(body: http.Completion) -> Sequence[str | list[int]]:
    """The prompts, one or several."""
    given: Any = body.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        raise refuse("prompt", "prompt: is empty", "invalid_value")
    if isinstance(given[0], int):
        return [given]
    return list(given)


# --- the small ones
def embed_request(body: http.Embeddings) -> pb.EmbedRequest:
    """Texts to embed."""
    if body.dimensions is not None:
        raise refuse("dimensions", "dimensions: this model's vectors have one size only")
    texts = [body.input] if isinstance(body.input, str) else body.input
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise refuse(f"input[{index}]", f"input[{index}]: must be a string; arrays of tokens are not served")
    return pb.EmbedRequest(model=body.model, input=texts, user=body.user or "")


def tokenize_request(body: http.Tokenize) -> pb.TokenizeRequest:
    """A text or a conversation to count."""
    if (body.prompt is None) is (body.messages is None):
        raise refuse("prompt", "either 'prompt' or 'messages' is required", "missing_required_parameter")
    if body.prompt is not None:
        return pb.TokenizeRequest(model=body.model, text=body.prompt)
    chat = pb.ChatRequest(model=body.model, messages=messages(body.messages or ()), tools=tools(body.tools))
    if body.chat_template_kwargs:
        chat.template_variables = _json(body.chat_template_kwargs, "chat_template_kwargs")
    chat.continue_final_message = _continued(body)
    return pb.TokenizeRequest(model=body.model, chat=chat)
