"""`ServiceSettings`: what every kvmesh service can be told, and where the values come from.

Order of sources: flags, then `KVMESH_<SERVICE>_NAME`, then `KVMESH_NAME`, then the TOML file of `--config`, then the
defaults. Nested values use `__` in the environment (`KVMESH_TLS__CERT`) and a dot in flags (`--tls.cert`).
"""

from __future__ import annotations

import socket
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from kvmesh.config.types import ListenAddress, OptionalListen, OptionalTarget, PlainUrl, TlsSettings

MIB = 1 << 20

_file_values: ContextVar[dict[str, Any] | None] = ContextVar("kvmesh_config_file", default=None)
"""Values of the TOML file while `load_settings` builds an instance; None when settings are built in code."""


class ServiceSettings(BaseSettings):
    """Settings that all services share."""

    model_config = SettingsConfigDict(
        env_prefix="KVMESH_",
        env_nested_delimiter="__",
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        validate_default=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        cli_show_env_vars=True,
        cli_use_class_docs_for_groups=True,
    )
    service: ClassVar[str] = ""

    config: Path | None = Field(default=None, description="TOML file of settings; flags and environment go first.")
    listen: ListenAddress = Field(
        default="127.0.0.1:0",
        description='Where the gRPC server binds: "host:port" (port 0 = any free port) or "unix:/path".',
    )
    advertise: OptionalTarget = Field(
        default="", description='Address that peers use to reach this service; "" = the bound address.'
    )
    metrics_listen: OptionalListen = Field(
        default="", description='"host:port" of the Prometheus endpoint /metrics (port 0 = any free port); "" = off.'
    )
    ready_file: Path | None = Field(
        default=None, description="File that receives a JSON line with the addresses and the pid once the server is up."
    )
    instance: str = Field(
        default="",
        max_length=128,
        pattern=r"^[A-Za-z0-9._-]*$",
        description='Name of this instance; "" = host name and pid.',
    )
    tls: TlsSettings = Field(default=TlsSettings(), description="Certificates (PEM files).")
    mesh_token_file: Path | None = Field(
        default=None,
        description="File of the shared secret of inner hops; the first line is sent, every line is accepted.",
    )
    otlp_endpoint: PlainUrl = Field(
        default="", description='OTLP/gRPC endpoint for traces, for example "http://127.0.0.1:4317"; "" = no export.'
    )
    otlp_metrics: bool = Field(
        default=False, description="Push the OpenTelemetry GenAI metrics to otlp_endpoint too (Prometheus has its own)."
    )
    otlp_ca_file: Path | None = Field(
        default=None, description="PEM file of who signed the collector's certificate (https); none = system roots."
    )
    trace_sample_ratio: float = Field(
        default=0.05, ge=0.0, le=1.0, description="Share of traces kept when this service starts them (0 to 1)."
    )
    trace_failures_per_s: float = Field(
        default=50.0,
        ge=0.0,
        le=10_000.0,
        description="Traces a second kept beyond that share since something of them failed; 0 = none are.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe level logged."
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="Log lines for people (text) or machines (json)."
    )
    drain_delay_s: float = Field(
        default=0.0,
        ge=0.0,
        le=600.0,
        description="Seconds after SIGTERM in which readiness is off and everything is still served, until those who "
        "balance over this service have heard of it; the drain follows.",
    )
    drain_timeout_s: float = Field(
        default=30.0, ge=0.0, le=86400.0, description="Seconds that work in flight gets in a drain before it is cut."
    )
    max_message_bytes: int = Field(
        default=16 * MIB, ge=4096, le=1024 * MIB, description="Largest gRPC message accepted or sent, in bytes."
    )
    default_deadline_s: float = Field(
        default=30.0, gt=0.0, le=3600.0, description="Deadline in seconds of public unary calls that bring none."
    )
    keepalive_s: float = Field(
        default=20.0, ge=1.0, le=3600.0, description="Seconds between keepalive pings on idle connections."
    )

    @property
    def instance_name(self) -> str:
        """The configured instance name, or one that is unique on this network."""
        import os

        return self.instance or f"{self.service or 'kvmesh'}-{socket.gethostname()}-{os.getpid()}"

    @property
    def connection_life_s(self) -> tuple[float, float]:
        """Seconds after which a client's connection takes no further calls (0 = never), and seconds that the calls it
        has then get to end."""
        return 0.0, 0.0

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags or keyword arguments > own variables > shared variables > file."""
        sources: list[PydanticBaseSettingsSource] = [init_settings, env_settings]
        prefix = settings_cls.model_config.get("env_prefix")
        if prefix != "KVMESH_":
            sources.append(EnvSettingsSource(settings_cls, env_prefix="KVMESH_"))
        values = _file_values.get()
        if values:
            sources.append(InitSettingsSource(settings_cls, init_kwargs=values))
        return tuple(sources)
