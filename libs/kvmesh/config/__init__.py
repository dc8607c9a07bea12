"""Typed settings: one schema a service, filled from flags, environment, a TOML file and defaults, in that order."""

from kvmesh.config.base import MIB, ServiceSettings
from kvmesh.config.gateway import GatewaySettings, JwtSettings, LimitSettings
from kvmesh.config.load import ConfigError, build_settings, load_settings
from kvmesh.config.services import (
    DecodeSettings,
    KvTransferSettings,
    PrefillSettings,
    RouterSettings,
    WorkerSettings,
)
from kvmesh.config.types import SemanticRule, TlsSettings, split_host_port

__all__ = [
    "MIB",
    "ConfigError",
    "DecodeSettings",
    "GatewaySettings",
    "JwtSettings",
    "KvTransferSettings",
    "LimitSettings",
    "PrefillSettings",
    "RouterSettings",
    "SemanticRule",
    "ServiceSettings",
    "TlsSettings",
    "WorkerSettings",
    "build_settings",
    "load_settings",
    "split_host_port",
]
