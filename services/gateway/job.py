"""One request as the gateway carries it through placement: what to run, for whom, and how long it may take."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from opentelemetry.trace import SpanContext

from kvmesh.errors import KvmeshError, Unavailable
from kvmesh.proto.v1 import engine_pb2, router_pb2
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.rpc.auth import LOCAL_TENANT
from kvmesh.rpc.limits import RequestLimits
from kvmesh.rpc.status import row
from services.gateway.breaker import accuses
from services.gateway.chains import Kind, PromptNames
from services.gateway.link import WorkerLink
from services.gateway.output import worker_sampling
from services.gateway.routers import Replica
from services.gateway.speech.reader import MakeReader
from services.gateway.tokenizers import ModelTokenizer

# What ran before goes ahead on its next worker too, of whatever priority it is: more than all priorities differ by.
AHEAD = 1000


def inner_salt(tenant: str, salt: str) -> str:
    """Cache salt of every inner hop: the tenant's and the client's in one, "" only for tenant local without a salt.

    Workers know prefixes by tokens and salt alone. Without the tenant in it, `usage.cached_tokens` and the time to the
    first token would tell anyone which prompts another tenant has sent, a page at a time.
    """
    if tenant == LOCAL_TENANT and not salt:
        return ""
    # A tenant's name holds no NUL; hashed, so that no salt a client chooses equals another tenant's.
    return hashlib.sha256(f"{tenant}\0{salt}".encode()).hexdigest()


@dataclass(slots=True)
class Job:
    """A checked request.

    `inner_id` is unique over the mesh; `request_id` is the client's own, unique per tenant only. `model` is the name
    the client gave, `served` the model behind it. `sampling` has effective values; `drawn_seed` tells that the seed is
    the gateway's own.
    """

    tenant: str
    request_id: str
    inner_id: str
    model: str
    served: str
    fingerprint: str
    tokenizer: ModelTokenizer
    token_ids: list[int]
    sampling: pb.SamplingParams
    drawn_seed: bool
    limits: RequestLimits
    cache: pb.CacheMode.ValueType
    tau: float | None = None
    cache_salt: str = ""
    messages: Sequence[pb.ChatMessage] = ()
    remake: Callable[[str], Awaitable[Job]] | None = None
    """The same request for another model, when the router decides that an alias stands for that one."""
    prompt_text: str = ""
    default_length: bool = False
    """True when `max_tokens` is what the context holds, not the client's wish."""
    prompt: PromptNames = field(default_factory=PromptNames)
    cache_control: pb.CacheControl = field(default_factory=pb.CacheControl)
    user: str = ""
    session_id: str = ""
    priority: int = 0
    """Higher goes first, in the gateway's line and on workers."""
    weight: float = 1.0
    """Of its tenant among those of one priority: with 2 it gets twice as much."""
    unattended: bool = False
    """True when nobody waits for it: it never lines up."""
    reader: MakeReader | None = None
    """Makes a reader of the output; None = it is plain text."""
    context_digest: bytes = b""
    """Of what shapes the prompt or its reading beside the messages."""

    async def retarget(self, model: str) -> None:
        """Become the same request for `model`, under the name it was asked by: what is remembered is found by that.

        InvalidArgument and the like when it does not fit that model.
        """
        if self.remake is None:
            raise Unavailable(f"{self.model!r} stands for another model now; send the request again")
        other = await self.remake(model)
        self.served, self.fingerprint, self.tokenizer = other.served, other.fingerprint, other.tokenizer
        self.token_ids, self.sampling = other.token_ids, other.sampling
        self.reader, self.context_digest = other.reader, other.context_digest

    @property
    def unified_only(self) -> bool:
        """True when only workers of role unified can serve it."""
        return self.sampling.HasField("prompt_logprobs")

    @property
    def may_store(self) -> bool:
        """True when the answer may be remembered for others."""
        return self.cache != pb.CACHE_MODE_OFF and not self.cache_control.no_store

    def route_request(
        self,
        gateway_id: str,
        *,
        cache: pb.CacheMode.ValueType,
        exclude: Sequence[str],
        no_flight: bool = True,
        pinned_revision: str = "",
        model: str = "",
        kinds: Iterable[Kind] | None = None,
    ) -> router_pb2.RouteRequest:
        """What the router is asked. `pinned_revision`: of a request that a worker took, the only one to go on with it.
        `kinds`: the prefix caches that the prompt is named for, None where they are not known.

        A drawn seed stays out: it would make every request different from all others. So does a default `max_tokens`:
        it follows from the prompt's length, and similar questions would never share an answer.
        """
        sampling = pb.SamplingParams()
        sampling.CopyFrom(self.sampling)
        if self.drawn_seed:
            sampling.ClearField("seed")
        if self.default_length:
            sampling.ClearField("max_tokens")
        ttft_ms, total_ms = self.limits.remaining_ms()
        request = router_pb2.RouteRequest(
            request_id=self.inner_id,
            gateway_id=gateway_id,
            model=model or self.model,
            sampling=sampling,
            cache=cache,
            tau=self.tau,
            cache_salt=inner_salt(self.tenant, self.cache_salt),
            messages=self.messages,
            prompt_text=self.prompt_text,
            ttft_ms=ttft_ms,
            total_ms=total_ms,
            exclude_workers=exclude,
            priority=self.priority,
            user=self.user,
            session_id=self.session_id,
            cache_control=self.cache_control if self.cache_control.ByteSize() else None,
            client_request_id=self.request_id,
            no_flight=no_flight,
            pinned_revision=pinned_revision,
            pinned_tokenizer=self.fingerprint if pinned_revision else "",
            tokenized_for=self.served,
            tokenizer_fingerprint=self.fingerprint,
            context_digest=self.context_digest,
        )
        self.prompt.fill(request, self.token_ids, request.cache_salt, kinds)
        return request

    def submit_request(
        self, gateway_id: str, attempt: int, model: str, prefill: Sequence[engine_pb2.PrefillTarget], share: Share
    ) -> engine_pb2.SubmitRequest:
        """What a worker gets of the job for one share."""
        ttft_ms, total_ms = self.limits.remaining_ms()
        if share.heal:
            # The client has had its first token: only the total limit is left.
            ttft_ms = total_ms
        return engine_pb2.SubmitRequest(
            gateway_id=gateway_id,
            request_id=self.inner_id,
            attempt=attempt,
            model=model,
            token_ids=[*self.token_ids, *share.output] if share.output else self.token_ids,
            prompt_len=len(self.token_ids),
            sampling=worker_sampling(self.sampling, choices=share.choices, scored=share.scored),
            prefill=prefill,
            ttft_ms=max(1, ttft_ms),
            total_ms=max(1, total_ms),
            cache_salt=inner_salt(self.tenant, self.cache_salt),
            priority=self.priority + (AHEAD if share.again else 0),
            first_choice=share.first_choice,
        )


@dataclass(slots=True)
class Share:
    """What one submission runs of a job: its `choices` from `first_choice` on.

    `output`: tokens of its one choice that are out already. `heal`: the client has seen output of this job, so that it
    goes on elsewhere instead of beginning anew. `again`: it ran before, and goes ahead of what has not begun.
    `revision`: once a worker has taken the job, the only one to go on with. `scored`: the prompt's scores are out.
    `failures`: placements that failed since there was new output; `turned_away`: those that a worker took and had no
    room for after all.
    """

    first_choice: int
    choices: int
    output: Sequence[int] = ()
    heal: bool = False
    again: bool = False
    scored: bool = False
    revision: str = ""
    failures: int = 0
    turned_away: int = 0
    replaces: SpanContext | None = None
    """The span of the attempt that was lost."""

    @property
    def positions(self) -> dict[int, int]:
        """Choice -> output index of the next token."""
        return {self.first_choice + index: len(self.output) for index in range(self.choices)}

    def cost(self, job: Job) -> int:
        """Tokens it may make the mesh compute, for fairness."""
        return len(job.token_ids) + job.sampling.max_tokens * self.choices

    def unified_only(self, job: Job) -> bool:
        """True when only workers of role unified can serve it."""
        return job.unified_only and not self.scored


@dataclass(slots=True)
class Progress:
    """What has happened to a job so far; kept over its attempts. `excluded`: worker id -> incarnation that failed it.

    The report goes to the router that decided first: what it meant to remember is bound to that decision.
    """

    attempt: int = 0
    submits: int = 0
    excluded: dict[str, int] = field(default_factory=dict)
    decision_id: str = ""
    decided_by: Replica | None = None
    degraded: bool = False
    queued: bool = False
    failures: list[router_pb2.AttemptFailure] = field(default_factory=list)

    def failed(self, link: WorkerLink, error: KvmeshError) -> None:
        """A worker failed this request: it is not asked again, and breakers hear of it, once for all its choices, where
        the error speaks against the worker."""
        info = link.info
        if self.excluded.get(info.worker_id) == info.incarnation:
            return
        self.excluded[info.worker_id] = info.incarnation
        if not accuses(error):
            return
        link.breaker.failed(error)
        code = row(error).code.value[0]
        self.failures.append(
            router_pb2.AttemptFailure(worker_id=info.worker_id, incarnation=info.incarnation, code=code)
        )
