"""The reloadable file of hashed API keys, of certificates, and of what tenants may do.

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
first token; one that failed later costs what it had used, and one whose client leaves while a worker is at it costs
its prompt.

Keys are random (256 bits), so a plain SHA-256 cannot be reversed by guessing and a look-up by digest tells nothing.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import re
import secrets
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from kvmesh.rpc.files import read_bounded
from kvmesh.rpc.policy import Policy

KEY_PREFIX = "kvm-"
MAX_FILE_BYTES = 16 << 20
_OURS = re.compile(re.escape(KEY_PREFIX) + r"[A-Za-z0-9_-]{43}")

Tenant = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
Name = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]{0,128}$")]


def new_key() -> str:
    """A fresh API key (256 random bits). It is shown once; only `hash_key` of it is stored."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    """Hex SHA-256 of a key, as the credentials file holds it."""
    return hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()


def is_ours(key: str) -> bool:
    """True for what has the form of `new_key`'s keys."""
    return _OURS.fullmatch(key) is not None


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """A key as tools list it, wherever it is kept. `digest` is its SHA-256 in hex; a time that is None never comes."""

    digest: str
    tenant: str
    name: str
    created: dt.datetime | None = None
    expires: dt.datetime | None = None
    revoked: dt.datetime | None = None

    def live(self, now: dt.datetime) -> bool:
        """Whether it opens anything at `now`."""
        return self.revoked is None and (self.expires is None or self.expires > now)


class KeyRecord(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$", to_lower=True)]
    tenant: Tenant
    name: Name = ""
    created: dt.datetime | None = None
    expires: dt.datetime | None = None


class CertificateRecord(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    san: Annotated[str, StringConstraints(max_length=1024)] = ""
    subject: Annotated[str, StringConstraints(max_length=1024)] = ""
    tenant: Tenant
    name: Name = ""

    @model_validator(mode="after")
    def _one(self) -> CertificateRecord:
        if bool(self.san) == bool(self.subject):
            raise ValueError("a certificate is known by exactly one of san and subject")
        return self

    @property
    def alternative(self) -> str:
        """`san` as PeerCertificate has it: a URI as it is, a DNS name in lower case."""
        return self.san if ":" in self.san else self.san.lower()


class KeyFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    keys: tuple[KeyRecord, ...] = ()
    certificates: tuple[CertificateRecord, ...] = ()
    tenants: dict[Tenant, Policy] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _unique(self) -> KeyFile:
        if len({key.sha256 for key in self.keys}) != len(self.keys):
            raise ValueError("a key is listed twice")
        if len({(each.alternative, each.subject) for each in self.certificates}) != len(self.certificates):
            raise ValueError("a certificate is listed twice")
        return self


@dataclass(frozen=True, slots=True)
class Loaded:
    keys: dict[bytes, KeyRecord]
    names: dict[str, CertificateRecord]
    subjects: dict[str, CertificateRecord]
    tenants: dict[str, Policy]


def parse(raw: str, *, is_json: bool) -> KeyFile:
    """A key file's content. ValueError when it is none."""
    return KeyFile.model_validate(json.loads(raw) if is_json else tomllib.loads(raw))


def load(path: Path) -> Loaded:
    document = parse(read_bounded(path, MAX_FILE_BYTES).decode("utf-8"), is_json=path.suffix == ".json")
    return Loaded(
        keys={bytes.fromhex(key.sha256): key for key in document.keys},
        names={c.alternative: c for c in document.certificates if c.san},
        subjects={c.subject: c for c in document.certificates if c.subject},
        tenants=document.tenants,
    )


def utc(moment: dt.datetime) -> dt.datetime:
    """A time without a zone is UTC."""
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=dt.UTC)
