"""`Client`: chat, generate, abort and models of a gateway, on asyncio."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvmesh.client.stream import Stream
from kvmesh.config import TlsSettings
from kvmesh.errors import InvalidArgument
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.proto.v1 import inference_pb2_grpc
from kvmesh.rpc.channel import MeshChannel, open_channel, raising

DEFAULT_MODEL = "auto"
DEFAULT_TIMEOUT_S = 600.0
UNARY_TIMEOUT_S = 10.0

Message = pb.ChatMessage | Mapping[str, str] | tuple[str, str]
Cache = str | None
CacheControl = Mapping[str, bool | int | float]
_CACHE = {
    None: pb.CACHE_MODE_UNSPECIFIED,
    "off": pb.CACHE_MODE_OFF,
    "exact": pb.CACHE_MODE_EXACT,
    "semantic": pb.CACHE_MODE_SEMANTIC,
}


class Client:
    """A connection to one gateway ("host:port", or any gRPC target). To be made inside a running event loop.

    `api_key` is sent as `authorization: Bearer`. `tls`: certificates to verify the gateway with (and to show, for
    mTLS); None = plaintext, over which a key is only safe on one machine. `server_name` overrides the verified name.
    Sampling parameters are the fields of `SamplingParams` (temperature, top_p, max_tokens, stop, n, seed, …).
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        tls: TlsSettings | None = None,
        server_name: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self._timeout_s = timeout_s
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise InvalidArgument("the API key has characters that no key has (a line break, perhaps)")
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._channel: MeshChannel = open_channel(
            address, tls=tls, server_name=server_name, default_timeout_s=UNARY_TIMEOUT_S
        )
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    def chat(
        self,
        messages: Iterable[Message],
        *,
        model: str = DEFAULT_MODEL,
        request_id: str = "",
        ttft_ms: int | None = None,
        total_ms: int | None = None,
        cache: Cache = None,
        cache_control: CacheControl | None = None,
        cache_salt: str = "",
        user: str = "",
        session_id: str = "",
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> Stream:
        """Continue a conversation. `messages`: dicts with role and content, pairs, or ChatMessage.

        `cache`: off, exact or semantic; None = what the tenant may have. `cache_control`: fields of `CacheControl`
        (no_cache, no_store, only_if_cached, max_age_s, tau). `user`: whose question it is, answers are never shared
        between users. `session_id`: requests of one session prefer one worker. `timeout_s`: the call's own deadline.
        InvalidArgument for a sampling parameter that does not exist.
        """
        request = pb.ChatRequest(
            model=model,
            messages=[_message(message) for message in messages],
            sampling=_sampling(sampling),
            limits=_limits(ttft_ms, total_ms),
            cache=_cache(cache),
            cache_control=_cache_control(cache_control),
            request_id=request_id,
            cache_salt=cache_salt,
            user=user,
            session_id=session_id,
        )
        return self._stream(self._stub.Chat, request, "chat", timeout_s)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        model: str = DEFAULT_MODEL,
        request_id: str = "",
        ttft_ms: int | None = None,
        total_ms: int | None = None,
        cache: Cache = None,
        cache_control: CacheControl | None = None,
        cache_salt: str = "",
        user: str = "",
        session_id: str = "",
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> Stream:
        """Continue a raw prompt, text or token ids; no chat template is applied. Arguments as in `chat`."""
        request = pb.GenerateRequest(
            model=model,
            sampling=_sampling(sampling),
            limits=_limits(ttft_ms, total_ms),
            cache=_cache(cache),
            cache_control=_cache_control(cache_control),
            request_id=request_id,
            cache_salt=cache_salt,
            user=user,
            session_id=session_id,
        )
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.tokens.CopyFrom(pb.TokenIds(ids=prompt))
        return self._stream(self._stub.Generate, request, "text_completion", timeout_s)

    def _stream(self, method: Any, request: Any, operation: str, timeout_s: float | None) -> Stream:
        timeout = self._timeout_s if timeout_s is None else timeout_s
        return Stream(
            lambda: method(request, timeout=timeout, metadata=self._metadata), operation=operation, model=request.model
        )

    async def abort(self, request_id: str) -> bool:
        """End a running request of the same key's tenant; False when there is none of that id."""
        with raising():
            response = await self._call(self._stub.Abort, pb.AbortRequest(request_id=request_id))
        return bool(response.found)

    async def models(self) -> list[pb.Model]:
        """Served models."""
        with raising():
            response = await self._call(self._stub.ListModels, pb.ListModelsRequest())
        return list(response.models)

    async def model(self, name: str) -> pb.Model:
        """One served model, by name or alias; NotFound when nobody serves it."""
        with raising():
            response = await self._call(self._stub.GetModel, pb.GetModelRequest(name=name))
        found: pb.Model = response.model
        return found

    async def _call(self, method: Any, request: Any) -> Any:
        return await method(request, timeout=UNARY_TIMEOUT_S, metadata=self._metadata)

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


def _message(message: Message) -> pb.ChatMessage:
    if isinstance(message, pb.ChatMessage):
        return message
    if isinstance(message, tuple):
        role, content = message
        return pb.ChatMessage(role=role, content=content)
    return pb.ChatMessage(role=message["role"], content=message["content"])


def _sampling(given: dict[str, Any]) -> pb.SamplingParams:
    known = pb.SamplingParams.DESCRIPTOR.fields_by_name
    for name in given:
        if name not in known:
            raise InvalidArgument(f"there is no sampling parameter {name!r}", details={"field": name})
    try:
        return pb.SamplingParams(**{name: value for name, value in given.items() if value is not None})
    except (TypeError, ValueError) as exc:
        raise InvalidArgument(f"bad sampling parameter: {exc}") from exc


def _limits(ttft_ms: int | None, total_ms: int | None) -> pb.Limits:
    return pb.Limits(ttft_ms=ttft_ms, total_ms=total_ms)


def _cache(mode: Cache) -> pb.CacheMode.ValueType:
    if mode not in _CACHE:
        raise InvalidArgument(f"unknown cache mode {mode!r}: off, exact or semantic", details={"field": "cache"})
    return _CACHE[mode]


def _cache_control(given: CacheControl | None) -> pb.CacheControl | None:
    if given is None:
        return None
    for name in given:
        if name not in pb.CacheControl.DESCRIPTOR.fields_by_name:
            raise InvalidArgument(f"there is no cache control {name!r}", details={"field": "cache_control"})
    try:
        return pb.CacheControl(**given)  # type: ignore[arg-type]
    except (TypeError, ValueError) as exc:
        raise InvalidArgument(f"bad cache control: {exc}", details={"field": "cache_control"}) from exc
