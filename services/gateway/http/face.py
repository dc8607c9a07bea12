"""The calls of the HTTP face: read, check, run through the front, answer."""

from __future__ import annotations

import asyncio
import base64
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvmesh.errors import InvalidArgument, KvmeshError, NotFound
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.rpc.auth import TENANT_KEY
from kvmesh.rpc.credentials import Principal
from services.gateway import validate
from services.gateway.front import Front
from services.gateway.http import completion, requests, translate
from services.gateway.http.answers import dumps
from services.gateway.http.body import Reading, check_type, header, parse_body, read_body
from services.gateway.http.callers import HttpCaller, Render
from services.gateway.http.chat import ChatBody, ChatChunks
from services.gateway.http.errors import Renamed
from services.gateway.http.escape import text_bytes
from services.gateway.http.exchange import Exchange
from services.gateway.http.fields import M, check
from services.gateway.http_tls import certificate_of
from services.gateway.registry import new_id

# Asks for the extension `kvmesh` in an answer.
DETAILS_HEADER = b"x-kvmesh-details"
# Prompts of one request that run at a time.
PARALLEL_PROMPTS = 16
BODY_TIMEOUT_S = 60.0


@dataclass(slots=True)
class Face:
    """What all calls share. `live`: streams that may want a sign of life."""

    front: Front
    max_body_bytes: int
    body_timeout_s: float = BODY_TIMEOUT_S
    reading: Reading = field(default_factory=Reading)
    live: set[Exchange] = field(default_factory=set)
    draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    # --- what calls begin with
    async def principal(self, exchange: Exchange) -> Principal:
        """Who calls. Unauthenticated before a byte of the body is read."""
        given, named = (
            [value.decode("latin-1") for name, value in exchange.scope["headers"] if name == wanted]
            for wanted in (b"authorization", TENANT_KEY.encode())
        )
        return await self.front.credentials.identify(given, certificate_of(exchange.scope), named=named)

    async def body(self, exchange: Exchange, model: type[M]) -> M:
        """The call's body, read and checked."""
        check_type(exchange.scope)
        raw = await read_body(exchange.scope, exchange.receive, self.max_body_bytes, self.body_timeout_s, self.reading)
        exchange.body_read = True
        return check(model, await parse_body(raw))

    def name(self, exchange: Exchange, chosen: str | None = None) -> str:
        """The request's id: the body's, the header's, or a fresh one."""
        if not chosen:
            given = header(exchange.scope, b"x-request-id")
            chosen = given.decode("latin-1") if given else ""
            try:
                validate.check_request_id(chosen)
            except InvalidArgument:
                chosen = ""
        else:
            validate.check_request_id(chosen)
        exchange.request_id = chosen or new_id()
        return exchange.request_id

    # --- chats
    async def chat(self, exchange: Exchange) -> None:
        """POST /v1/chat/completions."""
        principal = await self.principal(exchange)
        body = await self.body(exchange, requests.Chat)
        request, renamed = translate.chat_request(body)
        ident = "chatcmpl-" + self.name(exchange, body.request_id)
        created, details = int(time.time()), _wants_details(exchange)
        run = _Run(exchange, renamed)
        if body.stream:
            chunks = ChatChunks(ident, created, with_usage=_wants_usage(body))
            if await self._run(run, principal, [request], [chunks], streams=True):
                await exchange.end(chunks.last(run.ends, details=details))
        else:
            whole = ChatBody(ident, created, logprobs=bool(body.logprobs))
            if await self._run(run, principal, [request], [whole], streams=False):
                await exchange.answer(whole.whole(run.ends, details=details), headers=run.cache)

    # --- completions
    async def complete(self, exchange: Exchange) -> None:
        """POST /v1/completions."""
        principal = await self.principal(exchange)
        body = await self.body(exchange, requests.Completion)
        asked, renamed = translate.completion_requests(body)
        ident = "cmpl-" + self.name(exchange, body.request_id)
        details, logprobs = _wants_details(exchange), body.logprobs is not None
        shared = completion.Completions(ident, int(time.time()), logprobs=logprobs, with_usage=_wants_usage(body))
        run = _Run(exchange, renamed)
        echoes = await self._echoes(principal, body, asked, run)
        if echoes is None:
            return
        choices = body.n or 1
        make = completion.CompletionChunks if body.stream else completion.CompletionBody
        renders = [make(shared, index * choices, choices, echo) for index, echo in enumerate(echoes)]
        if not await self._run(run, principal, asked, renders, streams=bool(body.stream)):
            return
        if body.stream:
            await exchange.end(completion.last_chunks(shared, run.ends, details=details))
        else:
            await exchange.answer(completion.whole(shared, run.ends, details=details), headers=run.cache)

    async def _echoes(
        self, principal: Principal, body: requests.Completion, asked: Sequence[pb.GenerateRequest], run: _Run
    ) -> list[completion.Echo | None] | None:
        """What each prompt's choices begin with; None when that failed and was told."""
        if not body.echo:
            return [None for _ in asked]
        try:
            out: list[completion.Echo | None] = []
            for request in asked:
                tokens = await self.front.preparer.prompt_tokens(request, principal)
                text = request.text or b"".join(tokens).decode("utf-8", "replace")
                out.append(completion.Echo(text, tokens, silent=body.max_tokens == 0))
            return out
        except KvmeshError as error:
            await run.exchange.fail(error, run.renamed)
            return None

    # --- the run
    async def _run(
        self,
        run: _Run,
        principal: Principal,
        asked: Sequence[pb.ChatRequest | pb.GenerateRequest],
        renders: Sequence[Render],
        *,
        streams: bool,
    ) -> bool:
        """Run them all; True when all went well and `run.ends` has an end for each. Otherwise all has been told."""
        exchange = run.exchange
        callers = [HttpCaller(exchange, render, streams=streams) for render in renders]
        if streams:
            exchange.streams()
        done = False
        async with exchange.client_watched():
            try:
                if len(asked) == 1:
                    await self._one(run, principal, asked[0], callers[0], exchange.request_id)
                else:
                    await self._several(run, principal, asked, callers)
                done = True
            except KvmeshError as error:
                await exchange.fail(error, run.renamed)
            if done:
                run.ends = [caller.finished for caller in callers if caller.finished is not None]
                if len(run.ends) != len(callers):
                    # Cut off, since its client does not even take the error: there is nothing true left to say.
                    raise asyncio.CancelledError
                if len(callers) == 1:
                    run.cache = [(name.encode(), value.encode("latin-1")) for name, value in callers[0].cache]
            return done
        return False

    async def _one(
        self,
        run: _Run,
        principal: Principal,
        request: pb.ChatRequest | pb.GenerateRequest,
        caller: HttpCaller,
        request_id: str,
    ) -> None:
        request.request_id = request_id
        try:
            await self.front.run(principal, request, caller, request_id=request_id)
        except KvmeshError:
            # What the caller itself refused comes back as a client that has left.
            if caller.error is not None:
                raise caller.error from None
            raise
        if caller.error is not None:
            raise caller.error

    async def _several(
        self,
        run: _Run,
        principal: Principal,
        asked: Sequence[pb.ChatRequest | pb.GenerateRequest],
        callers: Sequence[HttpCaller],
    ) -> None:
        """A few at a time; the first failure ends all."""
        room = asyncio.Semaphore(PARALLEL_PROMPTS)

        async def one(index: int) -> None:
            async with room:
                ident = prompt_id(run.exchange.request_id, index)
                await self._one(run, principal, asked[index], callers[index], ident)

        first: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(len(asked)):
                    group.create_task(one(index))
        except BaseExceptionGroup as failed:
            first = failed.exceptions[0]
        if first is not None:
            raise first

    # --- the small ones
    async def embed(self, exchange: Exchange) -> None:
        """POST /v1/embeddings."""
        principal = await self.principal(exchange)
        body = await self.body(exchange, requests.Embeddings)
        self.name(exchange)
        async with exchange.client_watched():
            found = await self.front.embed(principal, translate.embed_request(body))
            await exchange.answer(_embeddings(found, packed=body.encoding_format == "base64"))

    async def tokenize(self, exchange: Exchange) -> None:
        """POST /tokenize."""
        principal = await self.principal(exchange)
        body = await self.body(exchange, requests.Tokenize)
        request = translate.tokenize_request(body)
        async with exchange.client_watched():
            found = await self.front.preparer.tokens(request, principal)
            answer: dict[str, Any] = {
                "count": len(found.token_ids),
                "max_model_len": found.max_model_len,
                "tokens": list(found.token_ids),
                "token_strs": None,
            }
            if body.return_token_strs:
                answer["token_strs"] = [token.decode("utf-8", "replace") for token in found.tokens]
            await exchange.answer(text_bytes(dumps(answer)))

    async def abort(self, exchange: Exchange) -> None:
        """POST /v1/abort."""
        principal = await self.principal(exchange)
        body = await self.body(exchange, requests.Abort)
        ident = body.request_id
        for prefix in ("chatcmpl-", "cmpl-"):
            ident = ident.removeprefix(prefix)
        found = await self.front.abort(principal.tenant, ident)
        # Of several prompts, each has a run of its own; the others run where the first one does.
        for index in range(1, requests.MAX_PROMPTS):
            found = self.front.abort_here(principal.tenant, prompt_id(ident, index)) or found
        await exchange.answer(text_bytes(dumps({"request_id": body.request_id, "found": found})))

    async def models(self, exchange: Exchange) -> None:
        """GET /v1/models."""
        principal = await self.principal(exchange)
        data = [self._model(model) for model in self.front.models(principal)]
        await exchange.answer(text_bytes(dumps({"object": "list", "data": data})))

    async def model(self, exchange: Exchange) -> None:
        """GET /v1/models/{id}."""
        principal = await self.principal(exchange)
        name = exchange.scope["path_params"]["model"]
        try:
            found = self.front.model(principal, name)
        except NotFound:
            raise NotFound(f"The model {name[:256]!r} does not exist.", details={"field": "model"}) from None
        await exchange.answer(text_bytes(dumps(self._model(found))))

    def _model(self, model: pb.Model) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": self.created,
            "owned_by": "kvmesh",
            "max_model_len": model.max_model_len,
            "revision": model.revision,
            "embeds": model.embeds,
        }


class _Run:
    """What one call's runs end with."""

    def __init__(self, exchange: Exchange, renamed: Renamed) -> None:
        self.exchange = exchange
        self.renamed = renamed
        self.ends: list[pb.Finished] = []
        self.cache: list[tuple[bytes, bytes]] = []


def prompt_id(request_id: str, index: int) -> str:
    """Id of one of several prompts' runs; the first one has the request's own."""
    return f"{request_id}.{index}" if index else request_id


def _wants_details(exchange: Exchange) -> bool:
    return header(exchange.scope, DETAILS_HEADER) not in (None, b"", b"0", b"false")


def _wants_usage(body: requests.Generate) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def _embeddings(found: pb.EmbedResponse, *, packed: bool) -> bytes:
    data: list[dict[str, Any]] = []
    for index, one in enumerate(found.embeddings):
        values: Any = list(one.values)
        if packed:
            values = base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
        data.append({"object": "embedding", "index": index, "embedding": values})
    tokens = found.usage.prompt_tokens
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return text_bytes(dumps({"object": "list", "data": data, "model": found.model, "usage": usage}))
