"""Who calls at the public door: a credential → tenant and policy.

A credential is, in this order: an API key of the reloadable file of hashed keys, an API key in Redis, a token (JWT) of
an identity provider, or, where the call brings no `authorization` at all, the certificate that TLS verified. Policies
are the file's, whatever the credential. Without any of the sources everybody is the tenant `local`.

TOML (or JSON of the same shape):

    [[keys]]
    sha256 = "<hex digest of the key>"
    tenant = "acme"
    name = "ci"                       # for people; optional
    created = 2026-01-01T00:00:00Z    # for people; optional
    expires = 2030-01-01T00:00:00Z    # optional; JSON: the same as a string

    [[certificates]]                  # clients that prove themselves by TLS (tls.client_ca): exactly one of
    san = "spiffe://example.org/acme" # a URI or DNS name among the subject's alternatives, or
    # subject = "batch.acme"          # the subject's common name; compared whole, without wildcards
    tenant = "acme"
    name = "batch"                    # for people; optional

    [tenants.acme]                    # optional; what is left out has the default
    cache = "semantic"                # off | exact | semantic
    cache_scope = "tenant"            # tenant | user: answers only for the user that a request names, or for nobody
    cache_controls = ["no_cache", "only_if_cached", "max_age", "tau"] # what requests may ask for; no_store always may
    tau = 0.95                        # least similarity of a semantic hit; a request may only raise it
    models = ["SmolLM2-135M-Instruct", "auto"] # ["*"] = all
    max_tokens = 2048                 # per request; 0 = no limit
    max_concurrent = 16               # requests at a time, over all gateways; 0 = no limit
    requests_per_minute = 600         # 0 = no limit; unused ones add up to a minute's worth
    tokens_per_minute = 200_000       # prompt and output; 0 = no limit
    budget = { amount = 50_000_000, period = "month", unit = "money" }  # 0 = no limit; day | month | none (UTC)

    [tenants.acme.prices."SmolLM2*"]  # per model (a pattern; the most exact counts), micro-units per million tokens
    prompt = 150_000
    cached = 75_000                   # prompt tokens that a prefix cache had; left out = as `prompt`
    completion = 600_000

A budget counts `tokens` (prompt + output) or `money`, in whole micro-units: 50_000_000 are 50. A model that no pattern
names costs the dearest of them. An answer from the cache costs nothing, nor does a request that failed before its
first token; one that failed later costs what it had used.

Keys are random (256 bits), so a plain SHA-256 cannot be reversed by guessing and a look-up by digest tells nothing.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import hmac
import json
import re
import secrets
import struct
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Protocol, get_args

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from kvmesh.errors import InvalidArgument, PermissionDenied, Unauthenticated
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.rpc.auth import LOCAL_TENANT, TENANT_KEY, ServicerContext
from kvmesh.rpc.budget import Budget, Price, price_of
from kvmesh.rpc.certificates import PeerCertificate
from kvmesh.rpc.files import ReloadingFile, read_bounded
from kvmesh.telemetry import metrics, names

KEY_PREFIX = "kvm-"
MAX_KEY_CHARS = 512
MAX_TOKEN_CHARS = 8192
MAX_FILE_BYTES = 16 << 20
REFUSED = "a valid API key is needed: authorization: Bearer <key>"
"""Whatever is wrong with a credential, or that there is none: nobody learns which part failed."""

_OURS = re.compile(re.escape(KEY_PREFIX) + r"[A-Za-z0-9_-]{43}")
MAX_COUNT = 1_000_000_000

CacheRight = Literal["no_cache", "only_if_cached", "max_age", "tau"]
Tenant = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]


def new_key() -> str:
    """A fresh API key (256 random bits). It is shown once; only `hash_key` of it is stored."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    """Hex SHA-256 of a key, as the credentials file holds it."""
    return hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()


class Policy(BaseModel):
    """What a tenant may do."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cache: Literal["off", "exact", "semantic"] = Field(default="semantic", description="Strongest cache mode.")
    cache_scope: Literal["tenant", "user"] = Field(
        default="tenant", description="Who shares answers; with user, a request that names none uses no cache."
    )
    cache_controls: tuple[CacheRight, ...] = Field(
        default=get_args(CacheRight), description="Cache controls that requests may use, no_store apart."
    )
    tau: float | None = Field(default=None, ge=0.0, le=1.0, description="Semantic threshold; None = the router's.")
    models: tuple[str, ...] = Field(default=("*",), description='Models that may be used; "*" = all.')
    max_tokens: int = Field(default=0, ge=0, description="Generated tokens per request; 0 = no limit.")
    max_concurrent: int = Field(default=0, ge=0, le=MAX_COUNT, description="Requests at a time; 0 = no limit.")
    requests_per_minute: int = Field(default=0, ge=0, le=MAX_COUNT, description="0 = no limit.")
    tokens_per_minute: int = Field(default=0, ge=0, le=MAX_COUNT, description="Prompt and output; 0 = no limit.")
    budget: Budget = Field(default=Budget(), description="What may be spent in a period.")
    prices: dict[Annotated[str, StringConstraints(min_length=1, max_length=512)], Price] = Field(
        default={}, max_length=1024, description="Model pattern -> price."
    )
    priority: int = Field(default=0, ge=-100, le=100, description="Higher goes first when workers are full.")

    @model_validator(mode="after")
    def _priced(self) -> Policy:
        if self.budget.amount and self.budget.unit == "money" and not self.prices:
            raise ValueError("a budget of money needs prices")
        return self

    @property
    def limited(self) -> bool:
        """True when anything of what the tenant takes is counted against a limit."""
        return bool(self.requests_per_minute or self.tokens_per_minute or self.max_concurrent or self.budget.amount)

    def cost(self, model: str, prompt: int, cached: int, completion: int) -> int:
        """Of a request, in the unit of the budget: tokens, or micro-units of money."""
        if self.budget.unit == "tokens":
            return prompt + completion
        return price_of(self.prices, model).of(prompt, cached, completion)

    def allows(self, model: str) -> bool:
        """True when the tenant may use `model`."""
        return "*" in self.models or model in self.models

    def check_model(self, model: str) -> None:
        """Raise PermissionDenied when the tenant may not use `model`."""
        if not self.allows(model):
            raise PermissionDenied(f"no right to use model {model[:128]!r}", details={"field": "model"})

    def check_controls(self, control: pb.CacheControl) -> None:
        """Raise PermissionDenied for a cache control that the tenant may not use, InvalidArgument for a threshold below
        its own. Both name the field."""
        asked: dict[CacheRight, tuple[str, bool]] = {
            "no_cache": ("no_cache", control.no_cache),
            "only_if_cached": ("only_if_cached", control.only_if_cached),
            "max_age": ("max_age_s", control.HasField("max_age_s")),
            "tau": ("tau", control.HasField("tau")),
        }
        for right, (name, used) in asked.items():
            if used and right not in self.cache_controls:
                field = f"cache_control.{name}"
                raise PermissionDenied(f"{field}: this tenant has no right to it", details={"field": field})
        if control.HasField("tau") and self.tau is not None and control.tau < _float32(self.tau):
            field = "cache_control.tau"
            raise InvalidArgument(f"{field}: is below this tenant's {self.tau:g}", details={"field": field})


@dataclass(frozen=True, slots=True)
class Principal:
    """Who a public call comes from."""

    tenant: str
    policy: Policy
    key_name: str = ""


class _Key(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$", to_lower=True)]
    tenant: Tenant
    name: Annotated[str, StringConstraints(max_length=128)] = ""
    created: dt.datetime | None = None
    expires: dt.datetime | None = None


class _Certificate(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    san: Annotated[str, StringConstraints(max_length=1024)] = ""
    subject: Annotated[str, StringConstraints(max_length=1024)] = ""
    tenant: Tenant
    name: Annotated[str, StringConstraints(max_length=128)] = ""

    @model_validator(mode="after")
    def _one(self) -> _Certificate:
        if bool(self.san) == bool(self.subject):
            raise ValueError("a certificate is known by exactly one of san and subject")
        return self


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    keys: tuple[_Key, ...] = ()
    certificates: tuple[_Certificate, ...] = ()
    tenants: dict[Tenant, Policy] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _unique(self) -> _Document:
        if len({key.sha256 for key in self.keys}) != len(self.keys):
            raise ValueError("a key is listed twice")
        if len({(each.san, each.subject) for each in self.certificates}) != len(self.certificates):
            raise ValueError("a certificate is listed twice")
        return self


@dataclass(frozen=True, slots=True)
class _Loaded:
    keys: dict[bytes, _Key]
    names: dict[str, _Certificate]
    subjects: dict[str, _Certificate]
    tenants: dict[str, Policy]


def parse(raw: str, *, is_json: bool) -> _Document:
    """A key file's content. ValueError when it is none."""
    return _Document.model_validate(json.loads(raw) if is_json else tomllib.loads(raw))


def _load(path: Path) -> _Loaded:
    document = parse(read_bounded(path, MAX_FILE_BYTES).decode("utf-8"), is_json=path.suffix == ".json")
    return _Loaded(
        keys={bytes.fromhex(key.sha256): key for key in document.keys},
        # As PeerCertificate has them: a URI as it is, a DNS name in lower case.
        names={c.san if ":" in c.san else c.san.lower(): c for c in document.certificates if c.san},
        subjects={c.subject: c for c in document.certificates if c.subject},
        tenants=document.tenants,
    )


@dataclass(frozen=True, slots=True)
class Identity:
    """What a source other than the file knows of a valid credential."""

    tenant: str
    name: str = ""


class KeySource(Protocol):
    """API keys that are kept elsewhere."""

    async def find(self, digest: bytes) -> Identity | None:
        """Whose key has this SHA-256, None for nobody's. Unavailable or Overloaded when that cannot be told now."""


class TokenSource(Protocol):
    """Tokens that somebody else issues."""

    async def check(self, token: str) -> Identity | None:
        """Who a token stands for, None when it is not good. Unavailable when that cannot be told now."""


class Credentials:
    """What a gateway tells its callers by. Without any source everybody is the tenant `local`."""

    def __init__(
        self,
        path: Path | None,
        *,
        keys: KeySource | None = None,
        tokens: TokenSource | None = None,
        interval_s: float = 1.0,
    ) -> None:
        """Raises OSError or ValueError when the first version of the file is unusable."""
        self._file = (
            ReloadingFile([path], lambda: _load(path), what="credentials file", interval_s=interval_s)
            if path is not None
            else None
        )
        self._keys = keys
        self._tokens = tokens
        self._local = Principal(LOCAL_TENANT, Policy())

    @property
    def open(self) -> bool:
        """True when no source is configured and nobody needs a credential."""
        return self._file is None and self._keys is None and self._tokens is None

    async def identify(
        self, authorization: str | Sequence[str] | None, certificate: PeerCertificate | None = None
    ) -> Principal:
        """Who a call comes from, by its `authorization` values ("Bearer <key or token>") and its TLS certificate.

        A call that brings an `authorization` is judged by it alone: a wrong key does not become right by a certificate.
        Unauthenticated for whatever is not good; Unavailable or Overloaded when a source cannot tell now.
        """
        if self.open:
            return self._local
        given = [authorization] if isinstance(authorization, str) else list(authorization or ())
        if given:
            found = await self._of_bearer(_bearer(given))
        else:
            found = self._of_certificate(certificate)
        if found is None:
            metrics.counter(names.AUTH_FAILURES).labels("key").inc()
            raise Unauthenticated(REFUSED)
        return found

    async def authenticate_call(self, context: ServicerContext) -> Principal:
        """The principal of a gRPC call. PermissionDenied when the call names another tenant than its credential's: that
        header is the mesh's own, and whoever sends it here must not believe that it did anything."""
        given = [(key, value) for key, value in context.invocation_metadata() or () if isinstance(value, str)]
        principal = await self.identify(
            [value for key, value in given if key == "authorization"],
            # Nothing to learn from it where nobody needs one.
            None if self.open else PeerCertificate.of_call(context),
        )
        if any(key == TENANT_KEY and value != principal.tenant for key, value in given):
            raise PermissionDenied(f"{TENANT_KEY}: the tenant comes from the key alone", details={"field": TENANT_KEY})
        return principal

    async def _of_bearer(self, key: str) -> Principal | None:
        if not key:
            return None
        if len(key) <= MAX_KEY_CHARS:
            digest = hashlib.sha256(key.encode("utf-8", "replace")).digest()
            record = self._file.get().keys.get(digest) if self._file is not None else None
            if record is not None and hmac.compare_digest(bytes.fromhex(record.sha256), digest):
                fresh = record.expires is None or utc(record.expires) > dt.datetime.now(dt.UTC)
                return self._principal(record.tenant, record.name) if fresh else None
            # Only keys of the form that `kvmesh keys` makes are there: anything else is not worth a round trip.
            if self._keys is not None and _OURS.fullmatch(key):
                stored = await self._keys.find(digest)
                return self._principal(stored.tenant, stored.name) if stored is not None else None
        if self._tokens is not None and key.count(".") == 2:
            told = await self._tokens.check(key)
            return self._principal(told.tenant, told.name) if told is not None else None
        return None

    def _of_certificate(self, certificate: PeerCertificate | None) -> Principal | None:
        if certificate is None or self._file is None:
            return None
        loaded = self._file.get()
        found = [loaded.names[name] for name in certificate.names if name in loaded.names]
        if certificate.subject in loaded.subjects:
            found.append(loaded.subjects[certificate.subject])
        # One that stands for two tenants stands for none.
        if len({each.tenant for each in found}) != 1:
            return None
        return self._principal(found[0].tenant, min(each.name for each in found))

    def _principal(self, tenant: str, name: str) -> Principal:
        policy = self._file.get().tenants.get(tenant) if self._file is not None else None
        return Principal(tenant, policy or self._local.policy, name)


def _bearer(values: Sequence[str]) -> str:
    """The key or token of the only `authorization` value; "" for several, another scheme, or one that is too long."""
    if len(values) != 1 or len(values[0]) > MAX_TOKEN_CHARS + 64:
        return ""
    scheme, _, key = values[0].strip(" ").partition(" ")
    key = key.strip(" ")
    return key if scheme.lower() == "bearer" and len(key) <= MAX_TOKEN_CHARS else ""


def _float32(value: float) -> float:
    """As it comes over the wire: what equals the tenant's own threshold there is not below it."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def utc(moment: dt.datetime) -> dt.datetime:
    """A time without a zone is UTC."""
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=dt.UTC)
