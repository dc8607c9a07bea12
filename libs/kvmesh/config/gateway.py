"""Settings of the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_settings import SettingsConfigDict

from kvmesh.config.base import MIB, ServiceSettings
from kvmesh.config.types import NameList, OptionalListen, PlainUrl, TargetList


class JwtSettings(BaseModel):
    """How bearer tokens that are JWTs are checked. Without `jwks` none is accepted."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    jwks: str = Field(
        default="",
        max_length=2048,
        description="File or https URL of the provider's key set (JWKS); a URL is read again as it changes.",
    )
    issuer: str = Field(default="", max_length=1024, description="Issuer that a token must name (`iss`).")
    audience: str = Field(default="", max_length=1024, description="Audience that a token must name (`aud`).")
    tenant_claim: str = Field(
        default="tenant", min_length=1, max_length=256, description="Claim that holds the tenant's name."
    )
    leeway_s: float = Field(default=30.0, ge=0, le=600, description="Seconds that clocks may differ.")

    @model_validator(mode="after")
    def _whole(self) -> JwtSettings:
        if self.jwks and not (self.issuer and self.audience):
            raise ValueError("jwt.jwks needs jwt.issuer and jwt.audience: a token for somebody else is not for us")
        return self


class LimitSettings(BaseModel):
    """How rates, concurrency and budgets of tenants are kept. With Redis they hold over all gateways."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    replicas: int = Field(
        default=1, ge=1, le=10_000, description="Gateway processes in all: what each keeps alone is a share of it."
    )
    hold_s: float = Field(
        default=15.0, gt=0.5, le=600, description="Seconds a request's hold lives unless it is renewed."
    )
    budget_away: Literal["open", "closed"] = Field(
        default="open",
        description="Tenants with a budget while Redis is away: open = served for 60 s, closed = refused.",
    )
    journal: Path | None = Field(
        default=None, description="Folder of spend that is not in Redis yet; none = kept in memory alone."
    )
    usage_file: Path | None = Field(
        default=None, description="JSONL file that gets a line per request: tenant, key, model, tokens, cost."
    )


class GatewaySettings(ServiceSettings):
    """The public front door: authenticates, tokenizes, places requests and streams answers."""

    model_config = SettingsConfigDict(env_prefix="KVMESH_GATEWAY_")
    service: ClassVar[str] = "gateway"

    routers: TargetList = Field(
        default=[], description='Router addresses, comma separated; "dns:///name:port" is resolved.'
    )
    workers: TargetList = Field(default=[], description="Decode and unified workers used when no router was ever seen.")
    credentials_file: Path | None = Field(
        default=None, description="TOML or JSON file of hashed API keys; none = every caller is tenant local."
    )
    redis_url: PlainUrl = Field(
        default="",
        description='Redis or Valkey URL without a password, the same as the routers\' ("redis://host:6379/0" or '
        '"rediss://"): identical requests share one generation over all gateways; "" = they do not.',
    )
    redis_cluster: bool = Field(default=False, description="redis_url names a node of a Redis Cluster.")
    redis_ca_file: Path | None = Field(
        default=None, description="PEM bundle that signs Redis's TLS certificate; default the system's."
    )
    redis_password_file: Path | None = Field(default=None, description="File that holds the Redis password.")
    model: str = Field(
        default="",
        max_length=512,
        description='Model whose tokenizer and chat template are loaded; "" = what workers report.',
    )
    ttft_limit_s: float = Field(
        default=60.0, gt=0, le=3600, description="Seconds to the first token where a request names no limit."
    )
    total_limit_s: float = Field(
        default=600.0, gt=0, le=86400, description="Seconds in total where a request names no limit."
    )
    route_timeout_ms: int = Field(
        default=100, ge=1, le=60_000, description="Milliseconds a router gets before the gateway places on its own."
    )
    submit_timeout_s: float = Field(default=5.0, gt=0, le=60, description="Seconds a worker gets to accept a request.")
    heartbeat_s: float = Field(
        default=1.0, gt=0, le=60, description="Expected interval of heartbeat frames, in seconds."
    )
    heartbeats_missed: int = Field(
        default=3, ge=1, le=100, description="Missed heartbeats after which a worker is lost."
    )
    first_metadata_s: float = Field(
        default=10.0,
        gt=0,
        le=600,
        description="Seconds of waiting after which initial metadata is sent without a token.",
    )
    max_prompt_bytes: int = Field(default=4 * MIB, ge=1, le=256 * MIB, description="Largest prompt text, in bytes.")
    max_prompt_tokens: int = Field(
        default=0, ge=0, le=10_000_000, description="Longest prompt in tokens; 0 = the model's context decides."
    )
    max_choices: int = Field(default=16, ge=1, le=16, description="Largest n or best_of.")
    max_concurrent_requests: int = Field(
        default=4096, ge=1, le=1_000_000, description="Requests held at a time, all tenants."
    )
    max_waiting_requests: int = Field(
        default=4096, ge=0, le=1_000_000, description="Requests that may wait for a worker."
    )
    request_buffer_tokens: int = Field(
        default=8192,
        ge=16,
        le=10_000_000,
        description="Tokens buffered for one slow reader before its request is aborted.",
    )
    request_buffer_bytes: int = Field(
        default=4 * MIB,
        ge=4096,
        le=256 * MIB,
        description="Bytes buffered for one slow reader before its request is aborted.",
    )
    max_attempts: int = Field(
        default=3,
        ge=1,
        le=16,
        description="Placements of one request, first one included; with new output they are counted anew.",
    )
    empty_fleet_grace_s: float = Field(
        default=15.0,
        ge=0,
        le=600,
        description="Seconds that connected workers stay although no router lists any, as after all routers restarted.",
    )
    heal_wait_s: float = Field(
        default=10.0,
        ge=0,
        le=600,
        description="Seconds a request that has output waits for another worker when its own is lost.",
    )
    http_listen: OptionalListen = Field(
        default="", description='"host:port" of the OpenAI-compatible HTTP API (port 0 = any free port); "" = off.'
    )
    http_max_body_bytes: int = Field(
        default=8 * MIB, ge=1024, le=1024 * MIB, description="Largest HTTP request body, in bytes."
    )
    http_max_connections: int = Field(
        default=10_000,
        ge=1,
        le=1_000_000,
        description="HTTP connections of a process (fewer where the limit of open files leaves fewer).",
    )
    http_max_connections_per_address: int = Field(
        default=5000,
        ge=0,
        le=1_000_000,
        description="HTTP connections of one address (IPv6: of a /64) to a process; 0 = no limit of its own.",
    )
    http_keep_alive_s: int = Field(
        default=75, ge=1, le=3600, description="Seconds that an HTTP connection may be open without a request."
    )
    cors_origins: NameList = Field(
        default=[], description='Origins whose pages may call the HTTP API ("*" = all); none = no page may.'
    )
    playground: bool = Field(default=False, description="Serve a page for trying the mesh at / of the HTTP API.")
    playground_spans: OptionalListen = Field(
        default="",
        description='Loopback "host:port" on which the playground takes the spans of all services (their '
        'otlp_endpoint names it); "" = it shows no times. For a single process.',
    )
    processes: int = Field(
        default=1, ge=1, le=256, description="Processes that share the listening ports; each is a gateway of its own."
    )
    peer_listen: OptionalListen = Field(
        default="",
        description='"host:port" on which other gateways reach this one (each process a port of its own); "" = a Unix '
        "socket where several processes share a port, else nowhere.",
    )
    max_connection_age_s: float = Field(
        default=0.0,
        ge=0,
        le=86_400 * 30,
        description="Seconds after which a client must reconnect (a tenth more or less); 0 = never.",
    )
    early_refusal: bool = Field(
        default=True,
        description="Refuse at once a request that cannot get its first token in time at the measured rate.",
    )
    slo_ttft_ms: float = Field(
        default=2000.0, gt=0, le=3_600_000, description="Milliseconds to the first token of a good request."
    )
    slo_tpot_ms: float = Field(
        default=100.0, gt=0, le=60_000, description="Milliseconds a token after it of a good request."
    )
    access_log: bool = Field(default=True, description="Log a line for each request at its end, at level info.")
    log_prompts: bool = Field(
        default=False, description="With prompts and outputs in these lines. Whoever reads the logs reads them."
    )
    log_prompts_chars: int = Field(
        default=1000, ge=1, le=100_000, description="Characters of a prompt and of an output that are logged at most."
    )
    metrics_tenants: int = Field(
        default=100, ge=0, le=10_000, description='Tenants that have metrics of their own; the others are "other".'
    )
    grammar_timeout_ms: int = Field(
        default=200, ge=1, le=60_000, description="Milliseconds that a request's grammar gets to compile."
    )
    jwt: JwtSettings = Field(default=JwtSettings(), description="Tokens of an identity provider (JWT, OIDC).")
    keys_in_redis: bool = Field(default=False, description="Look API keys up in Redis too (`kvmesh keys create`).")
    limits: LimitSettings = Field(default=LimitSettings(), description="How tenants' limits and budgets are kept.")

    @property
    def connection_life_s(self) -> tuple[float, float]:
        """See ServiceSettings. The grace is the longest total limit that a request may name."""
        return self.max_connection_age_s, 86_400.0
