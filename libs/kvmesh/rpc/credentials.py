"""API keys of the public door: bearer key → tenant and policy, from one reloadable file of hashed keys.

TOML (or JSON of the same shape):

    [[keys]]
    sha256 = "<hex digest of the key>"
    tenant = "acme"
    name = "ci"                       # for people; optional
    expires = 2030-01-01T00:00:00Z    # optional; JSON: the same as a string

    [tenants.acme]                    # optional; what is left out has the default
    cache = "semantic"                # off | exact | semantic
    cache_scope = "tenant"            # tenant | user: answers only for the user that a request names, or for nobody
    cache_controls = ["no_cache", "only_if_cached", "max_age", "tau"] # what requests may ask for; no_store always may
    tau = 0.95                        # least similarity of a semantic hit; a request may only raise it
    models = ["SmolLM2-135M-Instruct", "auto"] # ["*"] = all
    max_tokens = 2048                 # per request; 0 = no limit
    max_concurrent = 16               # requests at a time; 0 = no limit

Keys are random (256 bits), so a plain SHA-256 cannot be reversed by guessing and a look-up by digest tells nothing.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import hmac
import json
import secrets
import struct
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from kvmesh.errors import InvalidArgument, PermissionDenied, Unauthenticated
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.rpc.auth import LOCAL_TENANT, TENANT_KEY, ServicerContext, metadata_value
from kvmesh.rpc.files import ReloadingFile, read_bounded
from kvmesh.telemetry import metrics, names

KEY_PREFIX = "kvm-"
MAX_KEY_CHARS = 512
MAX_FILE_BYTES = 16 << 20

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
    max_concurrent: int = Field(default=0, ge=0, description="Requests at a time; 0 = no limit.")
    priority: int = Field(default=0, ge=-100, le=100, description="Higher goes first when workers are full.")

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
    expires: dt.datetime | None = None


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    keys: tuple[_Key, ...] = ()
    tenants: dict[Tenant, Policy] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _unique(self) -> _Document:
        if len({key.sha256 for key in self.keys}) != len(self.keys):
            raise ValueError("a key is listed twice")
        return self


def _load(path: Path) -> dict[bytes, tuple[_Key, Policy]]:
    raw = read_bounded(path, MAX_FILE_BYTES).decode("utf-8")
    document = _Document.model_validate(json.loads(raw) if path.suffix == ".json" else tomllib.loads(raw))
    default = Policy()
    return {bytes.fromhex(key.sha256): (key, document.tenants.get(key.tenant, default)) for key in document.keys}


class Credentials:
    """The key store of a gateway. Without a file every caller is the tenant `local` with the default policy."""

    def __init__(self, path: Path | None, *, interval_s: float = 1.0) -> None:
        """Raises OSError or ValueError when the first version of the file is unusable."""
        self._file = (
            ReloadingFile([path], lambda: _load(path), what="credentials file", interval_s=interval_s)
            if path is not None
            else None
        )
        self._local = Principal(LOCAL_TENANT, Policy())

    @property
    def open(self) -> bool:
        """True when no file is configured and nobody needs a key."""
        return self._file is None

    def lookup(self, key: str | None) -> Principal:
        """The principal of a bearer key; Unauthenticated when it is missing, unknown or expired (never says which)."""
        if self._file is None:
            return self._local
        if key and len(key) <= MAX_KEY_CHARS:
            digest = hashlib.sha256(key.encode("utf-8", "replace")).digest()
            found = self._file.get().get(digest)
            if found is not None:
                record, policy = found
                fresh = record.expires is None or _utc(record.expires) > dt.datetime.now(dt.UTC)
                if fresh and hmac.compare_digest(bytes.fromhex(record.sha256), digest):
                    return Principal(record.tenant, policy, record.name)
        metrics.counter(names.AUTH_FAILURES).labels("key").inc()
        raise Unauthenticated("a valid API key is needed: authorization: Bearer <key>")

    def from_authorization(self, header: str | None) -> Principal:
        """The principal of an `authorization` value ("Bearer <key>"), from gRPC metadata or HTTP."""
        if self._file is None:
            return self._local
        scheme, _, key = (header or "").strip().partition(" ")
        return self.lookup(key.strip() if scheme.lower() == "bearer" else None)

    def authenticate(self, context: ServicerContext) -> Principal:
        """The principal of a gRPC call. PermissionDenied when the call names another tenant than its key's: that header
        is the mesh's own, and whoever sends it here must not believe that it did anything."""
        principal = self.from_authorization(metadata_value(context, "authorization"))
        named = metadata_value(context, TENANT_KEY)
        if named is not None and named != principal.tenant:
            raise PermissionDenied(f"{TENANT_KEY}: the tenant comes from the key alone", details={"field": TENANT_KEY})
        return principal


def _float32(value: float) -> float:
    """As it comes over the wire: what equals the tenant's own threshold there is not below it."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def _utc(moment: dt.datetime) -> dt.datetime:
    """A time without a zone is UTC."""
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=dt.UTC)
