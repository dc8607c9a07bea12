"""What may be remembered of a request, and how much of the caches it may use.

Exact: a request that is greedy or names its seed has one answer. One that is sampled without a seed has many, and is
only remembered where its mode is semantic: that tenant has agreed to shared answers.

Semantic: one choice, no log-probabilities, no tools, a chat that ends in plain text of the user without a relative
date. The history before it is part of the partition, and so is equal to the letter.
"""

from __future__ import annotations

import enum
import hashlib
import math
import time
from dataclasses import dataclass, field

from kvmesh.config import RouterSettings, SemanticRule
from kvmesh.errors import InvalidArgument
from kvmesh.proto.v1 import inference_pb2, router_pb2
from kvmesh.rpc.auth import MeshToken
from kvmesh.rpc.files import read_bounded
from services.router.cache.fingerprint import CacheKey, cache_key, tenant_tag
from services.router.cache.reldates import relative_date

MAX_TEXT_CHARS = 4096
"""More is not looked at; the embedder's own window is in tokens, and its to judge."""

MAX_SECRET_BYTES = 4096
MIN_SECRET_BYTES = 16
MAX_USER_BYTES = 128
_NO_SECRET = b"kvmesh answers of a mesh without a secret"


class Mode(enum.IntEnum):
    """How much of the cache a request may use; the order is the order of strength."""

    OFF = 1
    EXACT = 2
    SEMANTIC = 3


BY_SETTING = {"off": Mode.OFF, "exact": Mode.EXACT, "semantic": Mode.SEMANTIC}


@dataclass(frozen=True, slots=True)
class CacheRules:
    """The operator's part. secret: names tenants in Redis. embedder: "" = no semantic cache.

    route_policy: version of whatever decides, apart from `aliases`, which model answers for an alias.
    """

    mode: Mode = Mode.SEMANTIC
    tau: float = 0.95
    secret: bytes = _NO_SECRET
    embedder: str = ""
    route_policy: str = ""
    aliases: dict[str, str] = field(default_factory=dict)
    semantic: tuple[SemanticRule, ...] = ()

    @classmethod
    def from_settings(cls, settings: RouterSettings, *, route_policy: str = "") -> CacheRules:
        """Raises OSError or ValueError when a secret's file is unusable."""
        return cls(
            mode=BY_SETTING[settings.cache],
            tau=settings.semantic_threshold,
            secret=_secret(settings),
            embedder="" if settings.embedder == "none" else settings.embedder,
            route_policy=route_policy,
            aliases=settings.alias_map | {alias: "|".join(pools) for alias, pools in settings.class_pools.items()},
            semantic=settings.semantic_rule_table,
        )

    def rule(self, tenant: str, model: str) -> SemanticRule | None:
        """The first rule for this tenant and this model, as named by the request."""
        return next((rule for rule in self.semantic if rule.matches(tenant, model)), None)


@dataclass(frozen=True, slots=True)
class CachePlan:
    """What one request may do with the caches.

    reason: why not more than `mode`. tau: least cosine. guards: whether near misses are looked for. max_age_s: oldest
    answer that will do. read: an answer may come from the cache. write: its own may be stored. fly: it may lead a
    flight or follow one. only_cached: no worker is to be asked. refresh: its answer replaces a stored one. scope:
    `tenant` or `user`. tenant_tag: the tenant as indices name it. epoch: the one that the key belongs to. made_at:
    monotonic seconds.
    """

    mode: Mode
    reason: str
    key: CacheKey
    tenant: str
    tenant_tag: str
    epoch: int
    tau: float
    guards: bool
    max_age_s: int | None
    read: bool
    write: bool
    fly: bool
    only_cached: bool
    refresh: bool
    scope: str
    made_at: float

    @property
    def semantic(self) -> bool:
        """Whether a similar question's answer will do."""
        return self.mode >= Mode.SEMANTIC and self.read and bool(self.key.partition)


def plan(request: router_pb2.RouteRequest, tenant: str, rules: CacheRules, epoch: int) -> CachePlan:
    """The plan of a request that passed `check`. A mode that this version does not know is OFF."""
    mode, reason = _mode(request, rules)
    rule = rules.rule(tenant, request.model)
    control = request.cache_control
    tau = request.tau if request.HasField("tau") else rules.tau
    if rule is not None:
        tau = max(rule.tau, request.tau) if request.HasField("tau") else rule.tau
    if control.HasField("tau"):
        tau = max(tau, control.tau)
    own = tenant_tag(rules.secret, tenant)
    if mode > Mode.OFF:
        scope = (
            tenant_tag(rules.secret, tenant, request.user) if request.user else own,
            "user" if request.user else "tenant",
            rules.aliases.get(request.model, ""),
            rules.route_policy,
            rules.embedder,
            str(epoch),
        )
        key = cache_key(request, scope, alias=request.model in rules.aliases)
        if mode < Mode.SEMANTIC:
            key = CacheKey(key.exact, prompt=key.prompt, tag=key.tag)
    else:
        key = CacheKey(b"")
    on = mode > Mode.OFF
    only_cached = control.only_if_cached
    write = on and not control.no_store and not only_cached
    read = on and not control.no_cache
    return CachePlan(
        mode=mode,
        reason=reason,
        key=key,
        tenant=tenant,
        tenant_tag=own,
        epoch=epoch,
        tau=tau,
        guards=rule.guards if rule is not None else True,
        max_age_s=control.max_age_s if control.HasField("max_age_s") else None,
        read=read,
        write=write,
        fly=read and write and not request.no_flight,
        only_cached=only_cached,
        refresh=control.no_cache or control.HasField("max_age_s"),
        scope="user" if request.user else "tenant",
        made_at=time.monotonic(),
    )


def _mode(request: router_pb2.RouteRequest, rules: CacheRules) -> tuple[Mode, str]:
    """The mode, and why it is not more."""
    mode, reason = rules.mode, "" if rules.mode == Mode.SEMANTIC else "the router offers no more"
    if request.cache != inference_pb2.CACHE_MODE_UNSPECIFIED:
        try:
            asked = Mode(request.cache)
        except ValueError:
            return Mode.OFF, "the request asks for a mode that is not known here"
        if asked < mode:
            mode, reason = asked, "the request or its tenant's policy allows no more"
    if mode == Mode.OFF:
        return mode, reason
    sampling = request.sampling
    if sampling.HasField("logprobs") or sampling.HasField("prompt_logprobs"):
        return Mode.OFF, "log-probabilities are not remembered"
    if request.exclude_workers or request.pinned_revision or request.pinned_tokenizer:
        # It may have tokens out already.
        return Mode.OFF, "a second try"
    if mode < Mode.SEMANTIC:
        if not _determined(sampling):
            return Mode.OFF, "sampled without a seed"
        return mode, reason
    why_not = _not_semantic(request, rules)
    if not why_not:
        return mode, ""
    return Mode.EXACT, why_not


def _determined(sampling: inference_pb2.SamplingParams) -> bool:
    """Greedy, or drawn by a seed that the client knows."""
    return sampling.HasField("seed") or (sampling.HasField("temperature") and sampling.temperature == 0.0)


def _not_semantic(request: router_pb2.RouteRequest, rules: CacheRules) -> str:
    """Why a similar question's answer would not do; "" when it may."""
    sampling = request.sampling
    if not rules.embedder:
        return "there is no embedder"
    if max(sampling.n, sampling.best_of) > 1:
        return "more than one choice"
    if request.prompt_text or not request.messages:
        return "a raw prompt"
    if request.messages[-1].role != "user":
        return "the last message is not the user's"
    if any(message.role in ("tool", "function") for message in request.messages):
        return "tools"
    text = request.messages[-1].content
    if not text.strip():
        return "the last message is empty"
    if len(text) > MAX_TEXT_CHARS:
        return "the last message is longer than the embedder's window"
    if "\0" in text:
        return "the last message is not plain text"
    word = relative_date(text)
    return f"a relative date: {word}" if word else ""


def check(request: router_pb2.RouteRequest) -> None:
    """Raise InvalidArgument, naming the field, for controls that mean nothing. NaN fails every range."""
    for name, message in (("tau", request), ("cache_control.tau", request.cache_control)):
        if message.HasField("tau") and not (math.isfinite(message.tau) and 0.0 <= message.tau <= 1.0):
            raise _bad(name, "must be in [0, 1]")
    control = request.cache_control
    if control.only_if_cached and control.no_cache:
        raise _bad("cache_control.only_if_cached", "cannot go with no_cache")
    if len(request.user.encode()) > MAX_USER_BYTES:
        raise _bad("user", f"is longer than {MAX_USER_BYTES} bytes")
    if len(request.prompt_digest) not in (0, 16):
        raise _bad("prompt_digest", "must have 16 bytes")


def _bad(name: str, problem: str) -> InvalidArgument:
    return InvalidArgument(f"{name}: {problem}", details={"field": name})


def _secret(settings: RouterSettings) -> bytes:
    """The secret of the setting; else one from the mesh's own, so that all replicas have the same; else a constant."""
    if settings.cache_secret_file is not None:
        secret = read_bounded(settings.cache_secret_file, MAX_SECRET_BYTES).strip()
        if len(secret) < MIN_SECRET_BYTES:
            raise ValueError(f"cache_secret_file must hold at least {MIN_SECRET_BYTES} bytes")
        return secret
    if settings.mesh_token_file is not None:
        token = MeshToken(settings.mesh_token_file).current().encode()
        return hashlib.blake2b(token, digest_size=32, person=b"kvmesh-tenants-1").digest()
    return _NO_SECRET
