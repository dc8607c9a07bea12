"""The OpenAPI 3.1 document of the HTTP face, made from the models that check its requests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic.json_schema import models_json_schema

from kvmesh import __version__
from services.gateway.http import requests

_REFERENCE = "#/components/schemas/{model}"
_STATUSES = {
    400: "The request is wrong; `param` names the field.",
    401: "No valid key.",
    403: "The key has no right to that.",
    404: "No such model.",
    408: "The body did not arrive in time.",
    409: "A request of that id is running.",
    413: "The body or the prompt is too large.",
    415: "The body is not JSON.",
    429: "Too much at once; `retry-after` says when to come back.",
    499: "Aborted by its caller.",
    500: "A fault of the service.",
    503: "No worker can serve it now.",
    504: "Out of time.",
}
_READ = (400, 401, 403, 408, 413, 415, 429, 500, 503)
_RUN = (*_READ, 404, 409, 499, 504)


def _integer(**more: Any) -> dict[str, Any]:
    return {"type": "integer"} | more


def _object(required: Mapping[str, Any], **optional: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {**required, **optional}, "required": list(required)}


def _array(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


_TEXT: dict[str, Any] = {"type": "string"}
_MAYBE_TEXT: dict[str, Any] = {"type": ["string", "null"]}
_FINISH: dict[str, Any] = {"enum": ["stop", "length", "tool_calls"]}
_TOKEN = _object({"token": _TEXT, "logprob": {"type": "number"}, "bytes": _array(_integer(minimum=0, maximum=255))})

_ANSWERS: dict[str, Any] = {
    "Error": _object(
        {"error": _object({"message": _TEXT, "type": _TEXT, "param": _MAYBE_TEXT, "code": _MAYBE_TEXT})},
    ),
    "Usage": _object(
        {"prompt_tokens": _integer(), "completion_tokens": _integer(), "total_tokens": _integer()},
        prompt_tokens_details=_object({"cached_tokens": _integer()}),
        completion_tokens_details=_object({"reasoning_tokens": _integer()}),
    ),
    "ChatCompletion": _object(
        {
            "id": _TEXT,
            "object": {"const": "chat.completion"},
            "created": _integer(),
            "model": _TEXT,
            "system_fingerprint": _TEXT,
            "choices": _array(
                _object(
                    {
                        "index": _integer(),
                        "message": _object(
                            {"role": {"const": "assistant"}, "content": _MAYBE_TEXT, "refusal": {"type": "null"}},
                            reasoning_content=_TEXT,
                            tool_calls=_array(
                                _object(
                                    {
                                        "id": _TEXT,
                                        "type": {"const": "function"},
                                        "function": _object({"name": _TEXT, "arguments": _TEXT}),
                                    }
                                )
                            ),
                        ),
                        "logprobs": {"anyOf": [_object({"content": _array(_TOKEN)}), {"type": "null"}]},
                        "finish_reason": _FINISH,
                    }
                )
            ),
            "usage": {"$ref": _REFERENCE.format(model="Usage")},
        },
        kvmesh={"type": "object"},
    ),
    "TextCompletion": _object(
        {
            "id": _TEXT,
            "object": {"const": "text_completion"},
            "created": _integer(),
            "model": _TEXT,
            "choices": _array(
                _object(
                    {
                        "text": _TEXT,
                        "index": _integer(),
                        "logprobs": {"type": ["object", "null"]},
                        "finish_reason": _FINISH,
                    }
                )
            ),
            "usage": {"$ref": _REFERENCE.format(model="Usage")},
        },
        kvmesh={"type": "object"},
    ),
    "EmbeddingList": _object(
        {
            "object": {"const": "list"},
            "data": _array(
                _object(
                    {
                        "object": {"const": "embedding"},
                        "index": _integer(),
                        "embedding": {"type": ["array", "string"], "items": {"type": "number"}},
                    }
                )
            ),
            "model": _TEXT,
            "usage": _object({"prompt_tokens": _integer(), "total_tokens": _integer()}),
        }
    ),
    "Model": _object(
        {"id": _TEXT, "object": {"const": "model"}, "created": _integer(), "owned_by": _TEXT},
        max_model_len=_integer(),
        revision=_TEXT,
        embeds={"type": "boolean"},
    ),
    "ModelList": _object(
        {"object": {"const": "list"}, "data": _array({"$ref": _REFERENCE.format(model="Model")})},
    ),
    "Tokens": _object(
        {
            "count": _integer(),
            "max_model_len": _integer(),
            "tokens": _array(_integer()),
            "token_strs": {"type": ["array", "null"], "items": _TEXT},
        }
    ),
    "Event": _object({"data": {"type": "string", "description": "A part of the answer as JSON, at last [DONE]."}}),
    "Aborted": _object({"request_id": _TEXT, "found": {"type": "boolean"}}),
    "State": _object({"status": _TEXT}),
}


def _content(schema: str, *, streams: bool = False) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"$ref": _REFERENCE.format(model=schema)}}}
    if streams:
        # Before OpenAPI 3.2 the schema of a stream is that of each of its events.
        content["text/event-stream"] = {"schema": {"$ref": _REFERENCE.format(model="Event")}}
    return content


_HEADERS: list[dict[str, Any]] = [
    {
        "name": "x-request-id",
        "in": "header",
        "required": False,
        "description": "Id of the request where its body names none; one that cannot be an id is ignored.",
        "schema": _TEXT,
    },
    {
        "name": "x-kvmesh-details",
        "in": "header",
        "required": False,
        "description": "Asks for the extension `kvmesh` in the answer.",
        "schema": _TEXT,
    },
]


def _responses(answer: str, statuses: Sequence[int], *, streams: bool = False) -> dict[str, Any]:
    out: dict[str, Any] = {"200": {"description": "The answer.", "content": _content(answer, streams=streams)}}
    for status in sorted(statuses):
        out[str(status)] = {"description": _STATUSES[status], "content": _content("Error")}
    return out


def _post(summary: str, body: str, answer: str, statuses: Sequence[int], *, streams: bool = False) -> dict[str, Any]:
    responses = _responses(answer, statuses, streams=streams)
    call: dict[str, Any] = {
        "summary": summary,
        "operationId": body,
        "requestBody": {"required": True, "content": _content(body)},
        "responses": responses,
    }
    if streams:
        call["parameters"] = _HEADERS
        responses["200"]["headers"] = {"x-request-id": {"description": "Id of the request.", "schema": _TEXT}}
    return {"post": call}


def _get(summary: str, ident: str, answer: str, statuses: Sequence[int]) -> dict[str, Any]:
    return {"get": {"summary": summary, "operationId": ident, "responses": _responses(answer, statuses)}}


def _state(summary: str, ident: str, *, may_fail: bool) -> dict[str, Any]:
    call = _get(summary, ident, "State", ())
    call["get"]["security"] = []
    if may_fail:
        call["get"]["responses"]["503"] = {"description": "Not ready.", "content": _content("State")}
    return call


def document() -> dict[str, Any]:
    """The document."""
    bodies = (requests.Chat, requests.Completion, requests.Embeddings, requests.Tokenize, requests.Abort)
    _, found = models_json_schema([(body, "validation") for body in bodies], ref_template=_REFERENCE, by_alias=True)
    model = _get("One model", "GetModel", "Model", (400, 401, 403, 404, 429, 500, 503))
    model["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvmesh",
            "version": __version__,
            "description": "OpenAI's API over a mesh of workers. Errors have OpenAI's form.",
        },
        "security": [{}, {"key": []}],
        "paths": {
            "/v1/chat/completions": _post("Answer a conversation", "Chat", "ChatCompletion", _RUN, streams=True),
            "/v1/completions": _post("Continue prompts", "Completion", "TextCompletion", _RUN, streams=True),
            "/v1/embeddings": _post("Vectors of texts", "Embeddings", "EmbeddingList", (*_READ, 404, 504)),
            "/v1/models": _get("Models that the key may use", "ListModels", "ModelList", (401, 429, 500, 503)),
            "/v1/models/{model}": model,
            "/v1/abort": _post("End a running request", "Abort", "Aborted", _READ),
            "/tokenize": _post("Tokens of a text or a conversation", "Tokenize", "Tokens", (*_READ, 404)),
            "/health": _state("Whether requests are served", "Health", may_fail=True),
            "/readyz": _state("Whether requests are served", "Ready", may_fail=True),
            "/livez": _state("Whether the process runs", "Live", may_fail=False),
        },
        "components": {
            "schemas": {**found["$defs"], **_ANSWERS},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def text() -> str:
    """The document as JSON."""
    return json.dumps(document(), ensure_ascii=False)
