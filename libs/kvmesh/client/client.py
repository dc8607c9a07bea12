"""`Client`: everything that a gateway's Inference service can do, on asyncio."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from kvmesh.client import requests
from kvmesh.client.requests import Cache, CacheControl, Message, Schema, Tool, ToolChoice
from kvmesh.client.retry import Retry, call
from kvmesh.client.stream import Stream
from kvmesh.config import TlsSettings
from kvmesh.errors import Cancelled, FailedPrecondition, InvalidArgument
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.proto.v1 import inference_pb2_grpc
from kvmesh.rpc.channel import MeshChannel, open_channel

T = TypeVar("T")
DEFAULT_MODEL = "auto"
DEFAULT_TIMEOUT_S = 600.0
UNARY_TIMEOUT_S = 10.0
API_KEY_VARIABLE = "KVMESH_API_KEY"


class Client:
    """A connection to gateways. To be made inside a running event loop; safe for many tasks at once.

    `address`: "host:port", several numeric ones (a list, or with commas between), or any gRPC target such as
    "dns:///gateway.example:8080"; calls go round all that the address stands for.
    `api_key` is sent as `authorization: Bearer`; None = the variable KVMESH_API_KEY, "" = none.
    `tls`: certificates to verify the gateway with (and to show, for mTLS); None = plaintext, over which a key is only
    safe on one machine. `server_name` overrides the verified name.
    `timeout_s`: deadline of an answer, retries included, where the call names none.
    `retry`: what happens to calls that fail before their first event because nobody could serve them.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        api_key: str | None = None,
        tls: TlsSettings | None = None,
        server_name: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retry: Retry | None = None,
        keepalive_s: float = 20.0,
    ) -> None:
        self._timeout_s = timeout_s
        self._retry = retry or Retry()
        key = os.environ.get(API_KEY_VARIABLE, "") if api_key is None else api_key
        if key and not (key.isascii() and key.isprintable()):
            raise InvalidArgument("the API key has characters that no key has (a line break, perhaps)")
        self._metadata = (("authorization", f"Bearer {key}"),) if key else ()
        if not address:
            raise InvalidArgument("address: none is given", details={"field": "address"})
        try:
            self._channel: MeshChannel = open_channel(
                address, tls=tls, server_name=server_name, default_timeout_s=UNARY_TIMEOUT_S, keepalive_s=keepalive_s
            )
        except ValueError as exc:
            raise InvalidArgument(f"address: {exc}", details={"field": "address"}) from None
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    def __repr__(self) -> str:
        # Never the key.
        return f"Client({self._channel.address!r})"

    def chat(
        self,
        messages: Iterable[Message],
        *,
        model: str = DEFAULT_MODEL,
        tools: Iterable[Tool] | None = None,
        tool_choice: ToolChoice | None = None,
        parallel_tool_calls: bool | None = None,
        grammar: pb.Grammar | None = None,
        json_schema: Schema | None = None,
        regex: str | None = None,
        lark: str | None = None,
        json_object: bool = False,
        template_variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        request_id: str = "",
        ttft_ms: int | None = None,
        total_ms: int | None = None,
        cache: Cache = None,
        cache_control: CacheControl | None = None,
        cache_salt: str = "",
        user: str = "",
        session_id: str = "",
        timeout_s: float | None = None,
        restart: bool = False,
        **sampling: Any,
    ) -> Stream:
        """Continue a conversation. `messages`: dicts with role and content (and tool_calls, tool_call_id, name,
        reasoning), pairs, or ChatMessage.

        `tools`: what the model may call, each with name, description, parameters (a JSON Schema), strict.
        `tool_choice`: none, auto, required or {"name": …}.
        `json_schema`, `regex`, `lark` (a grammar), `json_object` or `grammar`: what the answer must look like.
        `template_variables`: further variables of the model's chat template. `continue_final_message`: go on with the
        last message, an assistant's, instead of answering it.
        `cache`: off, exact or semantic; None = what the tenant may have. `cache_control`: fields of `CacheControl`
        (no_cache, no_store, only_if_cached, max_age_s, tau). `user`: whose question it is, answers are never shared
        between users. `session_id`: requests of one session prefer one worker. `timeout_s`: the call's own deadline.
        `restart`: an answer that broke in the middle begins anew, with another `accepted` (see docs/client.md).
        `sampling`: fields of `SamplingParams` (temperature, top_p, max_tokens, stop, n, seed, …).
        InvalidArgument for what cannot be sent.
        """
        request = requests.chat_request(
            model,
            messages,
            tools,
            tool_choice,
            template_variables,
            parallel_tool_calls=parallel_tool_calls,
            continue_final_message=continue_final_message,
            sampling=requests.sampling(sampling, requests.grammar(grammar, json_schema, regex, lark, json_object)),
            limits=requests.limits(ttft_ms, total_ms),
            cache=requests.cache(cache),
            cache_control=requests.cache_control(cache_control),
            request_id=request_id,
            cache_salt=cache_salt,
            user=user,
            session_id=session_id,
        )
        return self._stream(self._stub.Chat, request, "chat", timeout_s, restart)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        model: str = DEFAULT_MODEL,
        grammar: pb.Grammar | None = None,
        json_schema: Schema | None = None,
        regex: str | None = None,
        lark: str | None = None,
        json_object: bool = False,
        request_id: str = "",
        ttft_ms: int | None = None,
        total_ms: int | None = None,
        cache: Cache = None,
        cache_control: CacheControl | None = None,
        cache_salt: str = "",
        user: str = "",
        session_id: str = "",
        timeout_s: float | None = None,
        restart: bool = False,
        **sampling: Any,
    ) -> Stream:
        """Continue a raw prompt, text or token ids; no chat template is applied. Arguments as in `chat`."""
        request = requests.generate_request(
            model,
            prompt,
            sampling=requests.sampling(sampling, requests.grammar(grammar, json_schema, regex, lark, json_object)),
            limits=requests.limits(ttft_ms, total_ms),
            cache=requests.cache(cache),
            cache_control=requests.cache_control(cache_control),
            request_id=request_id,
            cache_salt=cache_salt,
            user=user,
            session_id=session_id,
        )
        return self._stream(self._stub.Generate, request, "text_completion", timeout_s, restart)

    def _stream(self, method: Any, request: Any, operation: str, timeout_s: float | None, restart: bool) -> Stream:
        return Stream(
            lambda left: method(request, timeout=left, metadata=self._metadata),
            operation=operation,
            model=request.model,
            retry=self._retry,
            timeout_s=self._timeout_s if timeout_s is None else timeout_s,
            restart=restart,
        )

    async def embed(
        self, texts: str | Sequence[str], *, model: str = "", user: str = "", timeout_s: float = 60.0
    ) -> list[list[float]]:
        """Vectors of texts, one each, of unit length. `model`: an embedder that `models` lists; "" = the first of them.
        FailedPrecondition where there is none."""
        given = [texts] if isinstance(texts, str) else list(texts)
        if not model:
            model = next((each.name for each in await self.models() if each.embeds), "")
            if not model:
                raise FailedPrecondition("no embedder serves here", details={"field": "model"})
        request = pb.EmbedRequest(model=model, input=given, user=user)
        response: pb.EmbedResponse = await self._call(self._stub.Embed, request, timeout_s)
        return [list(each.values) for each in response.embeddings]

    async def tokenize(
        self,
        prompt: str | Iterable[Message],
        *,
        model: str = DEFAULT_MODEL,
        tools: Iterable[Tool] | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> pb.TokenizeResponse:
        """The tokens that a text, or a conversation with the model's chat template, becomes."""
        request = pb.TokenizeRequest(model=model)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.chat.CopyFrom(requests.chat_request(model, prompt, tools, None, template_variables))
        response: pb.TokenizeResponse = await self._call(self._stub.Tokenize, request)
        return response

    async def abort(self, request_id: str) -> bool:
        """End a running request of the same key's tenant; False when there is none of that id."""
        response = await self._call(self._stub.Abort, pb.AbortRequest(request_id=request_id))
        return bool(response.found)

    async def models(self) -> list[pb.Model]:
        """Served models."""
        response = await self._call(self._stub.ListModels, pb.ListModelsRequest())
        return list(response.models)

    async def model(self, name: str) -> pb.Model:
        """One served model, by name or alias; NotFound when nobody serves it."""
        response = await self._call(self._stub.GetModel, pb.GetModelRequest(name=name))
        found: pb.Model = response.model
        return found

    async def _call(self, method: Any, request: Any, timeout_s: float = UNARY_TIMEOUT_S) -> Any:
        attempt: Callable[[float | None], Awaitable[Any]] = lambda left: method(  # noqa: E731
            request, timeout=left, metadata=self._metadata
        )
        return await call(self._retry, timeout_s, attempt, Cancelled("the client is closed"))

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait for a connection; Unavailable when there is none in time."""
        await self._channel.wait_ready(timeout_s)

    async def close(self) -> None:
        """Close the connection; running requests are cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
