"""What placement goes by, and what it needs to know of a request."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmesh.config import RouterSettings
from kvmesh.kv.hashing import CHAIN_STRIDE, HASH_BYTES
from kvmesh.proto.v1 import router_pb2
from services.router.fleet import Family
from services.router.placement.breaker import MAX_BACKOFF_S, BreakerRules
from services.router.placement.score import Weights
from services.router.placement.sessions import session_key

MAX_CHAINS = 8
MAX_HASHES = 4096


@dataclass(frozen=True, slots=True)
class Rules:
    """What placement goes by.

    stale_s: KV events of a loaded worker are in doubt when none came for so long. local_prefill_tokens: where a decode
    worker lacks no more of the prompt than this, it prefills on its own; 0: one page. look_ahead_pages: what a decode
    worker needs beyond the prompt.
    """

    weights: Weights = field(default_factory=Weights)
    breakers: BreakerRules = field(default_factory=BreakerRules)
    alternates: int = 3
    stale_s: float = 3.0
    local_prefill_tokens: int = 0
    look_ahead_pages: int = 1
    credit_ttl_s: float = 2.0
    max_sessions: int = 65_536

    @classmethod
    def of(cls, settings: RouterSettings) -> Rules:
        """The operator's."""
        return cls(
            weights=Weights(
                beta_prefill=settings.beta_prefill,
                beta_decode=settings.beta_decode,
                session=settings.session_bonus,
            ),
            breakers=BreakerRules(
                failures=settings.breaker_failures,
                window_s=settings.breaker_window_s,
                backoff_s=settings.breaker_backoff_s,
                max_backoff_s=max(settings.breaker_backoff_s, MAX_BACKOFF_S),
            ),
            alternates=settings.alternates,
            stale_s=settings.events_stale_s,
            local_prefill_tokens=settings.local_prefill_tokens,
            credit_ttl_s=settings.credit_ttl_s,
        )


@dataclass(frozen=True, slots=True)
class Ask:
    """What placement needs to know of a request.

    chains: (tokens that one hash stands for, packed hashes). grammar: only workers that serve grammars will do.
    family: place within it alone. revision, tokenizer: pinned by output that is there already. session holds the
    tenant; "" = none.
    """

    model: str
    prompt_tokens: int
    chains: tuple[tuple[int, bytes], ...] = ()
    exclude: frozenset[str] = frozenset()
    unified_only: bool = False
    grammar: bool = False
    family: Family | None = None
    revision: str = ""
    tokenizer: str = ""
    session: str = ""

    @classmethod
    def of(cls, request: router_pb2.RouteRequest, model: str, tenant: str, family: Family | None = None) -> Ask:
        """The placement part of a request whose name stands for `model`."""
        chains = tuple(
            (chain.block_size * CHAIN_STRIDE, chain.hashes[: MAX_HASHES * HASH_BYTES])
            for chain in request.chains[:MAX_CHAINS]
        )
        return cls(
            model=model,
            prompt_tokens=request.prompt_tokens,
            chains=chains,
            exclude=frozenset(request.exclude_workers),
            unified_only=request.sampling.HasField("prompt_logprobs"),
            grammar=request.sampling.HasField("grammar"),
            family=family,
            revision=request.pinned_revision,
            tokenizer=request.pinned_tokenizer,
            session=session_key(tenant, request.session_id) if request.session_id else "",
        )
