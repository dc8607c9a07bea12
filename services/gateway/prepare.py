"""From a client's message to a checked job: who may ask, for which model, with what prompt and limits."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from kvmesh.errors import NotFound, Unavailable
from kvmesh.proto.v1 import engine_pb2
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.rpc.credentials import Policy, Principal
from kvmesh.rpc.limits import Deadline, RequestLimits
from kvmesh.telemetry import names, tracing
from services.gateway import validate
from services.gateway.fleet import Fleet
from services.gateway.grammars import GrammarCheck, NoGrammars
from services.gateway.job import Job
from services.gateway.registry import new_id
from services.gateway.speech.shape import Shape, Speech, shape
from services.gateway.tokenizers import ModelTokenizer, TokenizerStore

_CACHE_STRENGTH = (pb.CACHE_MODE_OFF, pb.CACHE_MODE_EXACT, pb.CACHE_MODE_SEMANTIC)
_POLICY_MODES = {"off": pb.CACHE_MODE_OFF, "exact": pb.CACHE_MODE_EXACT, "semantic": pb.CACHE_MODE_SEMANTIC}

# About a millisecond of parsing.
INLINE_TOOL_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Rules:
    """The operator's bounds."""

    ttft_limit_s: float = 60.0
    total_limit_s: float = 600.0
    max_prompt_bytes: int = 4 << 20
    max_prompt_tokens: int = 0
    max_choices: int = 16


def request_limits(given: pb.Limits, rules: Rules, call_remaining_s: float | None) -> RequestLimits:
    """Both limits, from now; the call's own deadline counts as well."""
    ttft_s = given.ttft_ms / 1e3 if given.HasField("ttft_ms") else rules.ttft_limit_s
    total_s = given.total_ms / 1e3 if given.HasField("total_ms") else rules.total_limit_s
    if call_remaining_s is not None:
        total_s = min(total_s, call_remaining_s)
    now = time.monotonic()
    return RequestLimits(Deadline(now + min(ttft_s, total_s)), Deadline(now + total_s))


def cache_mode(given: pb.CacheMode.ValueType, policy: Policy, *, user: str = "") -> pb.CacheMode.ValueType:
    """The weaker of what the request wants and what its tenant may have."""
    allowed = _POLICY_MODES[policy.cache]
    if policy.cache_scope == "user" and not user:
        # Nobody to share with.
        return pb.CACHE_MODE_OFF
    if given == pb.CACHE_MODE_UNSPECIFIED:
        return allowed
    return min((given, allowed), key=_CACHE_STRENGTH.index)


class Preparer:
    """Makes jobs. Raises InvalidArgument by field, NotFound, PermissionDenied, Unavailable, TooLarge."""

    def __init__(
        self, fleet: Fleet, tokenizers: TokenizerStore, rules: Rules, grammars: GrammarCheck | None = None
    ) -> None:
        self._fleet = fleet
        self._tokenizers = tokenizers
        self._rules = rules
        self._grammars = grammars or NoGrammars()

    def check(self, request: pb.GenerateRequest | pb.ChatRequest, principal: Principal) -> None:
        """What can be said of a request before anything is spent on it."""
        validate.check_common(request)
        principal.policy.check_model(request.model)
        principal.policy.check_controls(request.cache_control)
        if isinstance(request, pb.ChatRequest):
            validate.check_messages(request.messages, self._rules.max_prompt_bytes)
        elif request.WhichOneof("prompt") is None:
            raise validate.bad("prompt", "is required")
        elif request.WhichOneof("prompt") == "text":
            validate.check_prompt_text(request.text, self._rules.max_prompt_bytes)

    async def job(
        self,
        request: pb.GenerateRequest | pb.ChatRequest,
        principal: Principal,
        request_id: str,
        limits: RequestLimits,
        *,
        served: str = "",
    ) -> Job:
        """The job of a request that passed `check`, its grammar unseen (`check_grammar`). `served`: the model behind an
        alias, "" = as the fleet says."""
        info = self._worker(served or request.model)
        tokenizer = await self._tokenizers.get(info)
        bounds = validate.Bounds(
            vocab_size=tokenizer.vocab_size,
            max_model_len=self._fleet.context(info.model),
            max_prompt_bytes=self._rules.max_prompt_bytes,
            max_prompt_tokens=self._rules.max_prompt_tokens,
            max_choices=self._rules.max_choices,
            max_tokens=principal.policy.max_tokens or None,
        )
        if isinstance(request, pb.GenerateRequest) and request.WhichOneof("prompt") == "tokens":
            # Before they are copied: a message has room for millions.
            validate.check_prompt_length(len(request.tokens.ids), bounds)
        shaped = await self._shape(request, tokenizer)
        with tracing.span(names.SPAN_GATEWAY_TOKENIZE):
            token_ids = await self._tokenize(request, shaped, tokenizer)
        validate.check_token_ids(token_ids, bounds, field="prompt" if shaped is None else "messages")
        sampling = validate.effective_sampling(request.sampling, len(token_ids), bounds)
        speech = shaped.speech(token_ids, tokenizer) if shaped is not None else Speech()
        if speech.grammar is not None:
            sampling.grammar.CopyFrom(speech.grammar)
        cache = cache_mode(request.cache, principal.policy, user=request.user)
        if shaped is not None and shaped.functions and cache == pb.CACHE_MODE_SEMANTIC:
            # Of a similar question the words may do; the arguments of its calls are another question's.
            cache = pb.CACHE_MODE_EXACT
        if sampling.HasField("logprobs") or sampling.HasField("prompt_logprobs"):
            # Remembered answers hold no log-probabilities.
            cache = pb.CACHE_MODE_OFF
        return Job(
            tenant=principal.tenant,
            request_id=request_id,
            inner_id=new_id(),
            model=request.model,
            served=info.model,
            fingerprint=info.tokenizer_fingerprint,
            tokenizer=tokenizer,
            token_ids=token_ids,
            sampling=sampling,
            drawn_seed=not request.sampling.HasField("seed"),
            limits=limits,
            cache=cache,
            tau=principal.policy.tau,
            cache_control=request.cache_control,
            user=request.user,
            session_id=request.session_id,
            cache_salt=request.cache_salt,
            priority=principal.policy.priority,
            weight=principal.policy.weight,
            messages=request.messages if isinstance(request, pb.ChatRequest) else (),
            prompt_text="" if isinstance(request, pb.ChatRequest) else request.text,
            remake=lambda model: self._remade(request, principal, request_id, limits, model),
            default_length=not request.sampling.HasField("max_tokens"),
            reader=speech.reader,
            context_digest=shaped.digest if shaped is not None else b"",
        )

    async def check_grammar(self, job: Job) -> None:
        """Whether its grammar, where there is one, compiles: dear, so that its tenant's limits come first."""
        if job.sampling.HasField("grammar"):
            await self._grammars.check(job.sampling.grammar, job.tokenizer)

    async def _remade(
        self,
        request: pb.GenerateRequest | pb.ChatRequest,
        principal: Principal,
        request_id: str,
        limits: RequestLimits,
        model: str,
    ) -> Job:
        job = await self.job(request, principal, request_id, limits, served=model)
        await self.check_grammar(job)
        return job

    def _worker(self, model: str) -> engine_pb2.WorkerInfo:
        info = self._fleet.example(model)
        if info is not None:
            return info
        if not self._fleet.known.is_set():
            raise Unavailable("no worker is known yet", retry_after=1.0)
        raise NotFound(f"no worker serves model {model!r}", details={"field": "model"})

    async def tokens(self, request: pb.TokenizeRequest, principal: Principal) -> pb.TokenizeResponse:
        """What a text or a conversation becomes."""
        validate.check_model(request.model)
        principal.policy.check_model(request.model)
        inner: pb.GenerateRequest | pb.ChatRequest
        if request.WhichOneof("prompt") == "chat":
            inner = request.chat
            validate.check_messages(inner.messages, self._rules.max_prompt_bytes)
        elif request.WhichOneof("prompt") == "text":
            inner = pb.GenerateRequest(text=request.text)
            validate.check_prompt_text(inner.text, self._rules.max_prompt_bytes)
        else:
            raise validate.bad("prompt", "is required")
        info = self._worker(request.model)
        tokenizer = await self._tokenizers.get(info)
        shaped = await self._shape(inner, tokenizer)
        token_ids = await self._tokenize(inner, shaped, tokenizer)
        return pb.TokenizeResponse(
            model=info.model,
            token_ids=token_ids,
            tokens=[tokenizer.raw_bytes(token_id) for token_id in token_ids],
            max_model_len=self._fleet.context(info.model),
        )

    async def prompt_tokens(self, request: pb.GenerateRequest, principal: Principal) -> list[bytes]:
        """The bytes of each token of a raw prompt, as a completion that echoes it needs them."""
        self.check(request, principal)
        tokenizer = await self._tokenizers.get(self._worker(request.model))
        token_ids = await self._tokenize(request, None, tokenizer)
        if max(token_ids, default=0) >= tokenizer.vocab_size:
            raise validate.bad("prompt", f"a token id is outside the vocabulary of {tokenizer.vocab_size}")
        return [tokenizer.raw_bytes(token_id) for token_id in token_ids]

    async def _shape(self, request: pb.GenerateRequest | pb.ChatRequest, tokenizer: ModelTokenizer) -> Shape | None:
        if not isinstance(request, pb.ChatRequest):
            return None
        calls = (call for message in request.messages for call in message.tool_calls)
        if sum(part.ByteSize() for part in (*request.tools, *calls)) <= INLINE_TOOL_BYTES:
            return shape(request, tokenizer)
        # Hundreds of kilobytes of schemas, or megabytes of arguments, must not hold up everybody's tokens.
        return await asyncio.to_thread(shape, request, tokenizer)

    async def _tokenize(
        self, request: pb.GenerateRequest | pb.ChatRequest, shaped: Shape | None, tokenizer: ModelTokenizer
    ) -> list[int]:
        if isinstance(request, pb.ChatRequest):
            assert shaped is not None
            return await tokenizer.encode_chat(
                shaped.messages,
                self._rules.max_prompt_bytes,
                tools=shaped.tools,
                variables=shaped.variables,
                continued=shaped.continued,
            )
        if request.WhichOneof("prompt") == "tokens":
            return list(request.tokens.ids)
        return await tokenizer.encode_raw(request.text)
