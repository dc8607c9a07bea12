"""Value types shared by every settings class: addresses, address lists and paths of secrets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_settings import NoDecode


def split_host_port(address: str) -> tuple[str, int]:
    """Split "host:port" or "[v6]:port"; raises ValueError with the reason when it is neither."""
    host, sep, port = address.rpartition(":")
    if not sep or not host:
        raise ValueError('expected "host:port"')
    if host.startswith("["):
        if not host.endswith("]"):
            raise ValueError('expected "[ipv6]:port"')
    elif ":" in host:
        raise ValueError("an IPv6 host needs brackets, as in [::1]:50051")
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError("the port must be a number from 0 to 65535")
    return host, int(port)


def _listen(value: str) -> str:
    if value.startswith("unix:"):
        if len(value) <= len("unix:"):
            raise ValueError("expected unix:/path")
        return value
    split_host_port(value)
    return value


def _optional_listen(value: str) -> str:
    if value:
        split_host_port(value)
    return value


def _target(value: str) -> str:
    scheme, sep, rest = value.partition(":")
    if sep and scheme in {"unix", "dns", "ipv4", "ipv6"}:
        if not rest.strip("/"):
            raise ValueError(f"nothing follows {scheme}:")
        return value
    _, port = split_host_port(value)
    if port == 0:
        raise ValueError("an address to connect to needs a port above 0")
    return value


def _optional_target(value: str) -> str:
    return _target(value) if value else value


def _comma_list(value: object) -> object:
    """Lists are written "a,b" in the environment and on the command line."""
    if isinstance(value, str):
        return [item.strip() for item in value.split(",") if item.strip()]
    return value


def _no_userinfo(value: str) -> str:
    try:
        password = urlsplit(value).password
    except ValueError as exc:
        raise ValueError("not a URL") from exc
    if password:
        raise ValueError("a password does not belong in a URL; name a file that holds it")
    return value


ListenAddress = Annotated[str, AfterValidator(_listen)]
"""Where a server binds: "host:port" (port 0 = any free port) or "unix:/path"."""

OptionalListen = Annotated[str, AfterValidator(_optional_listen)]
"""Like ListenAddress over TCP, or "" for off."""

Target = Annotated[str, AfterValidator(_target)]
"""What a channel connects to: "host:port", "dns:///name:port", "ipv4:a:1,b:2" or "unix:/path"."""

OptionalTarget = Annotated[str, AfterValidator(_optional_target)]

TargetList = Annotated[list[Target], NoDecode, BeforeValidator(_comma_list)]
NameList = Annotated[list[str], NoDecode, BeforeValidator(_comma_list)]

PlainUrl = Annotated[str, AfterValidator(_no_userinfo)]
"""A URL without a password in it ("" = off)."""


class TlsSettings(BaseModel):
    """Certificate files of a service, PEM. Everything empty means plaintext."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cert: Path | None = Field(default=None, description="Certificate chain file of this service (PEM).")
    key: Path | None = Field(default=None, description="Private key file of this service (PEM).")
    ca: Path | None = Field(default=None, description="File of the authorities that peers are verified against (PEM).")
    require_client_cert: bool = Field(
        default=False, description="Refuse clients without a certificate signed by `ca` (mTLS)."
    )
    server_name: str = Field(
        default="",
        max_length=255,
        description="Name that the certificates of other services of the mesh must bear, instead of the addresses "
        'that they are reached at (pods have no certificate of their IP address); "" = the address.',
    )
    inner_cert: Path | None = Field(
        default=None,
        description="Certificate chain that members of the mesh see, where `cert` is for others (PEM): a gateway's "
        "public one need not be of the mesh's authorities, nor need there be one behind a proxy.",
    )
    inner_key: Path | None = Field(default=None, description="Private key file of `inner_cert` (PEM).")
    client_ca: Path | None = Field(
        default=None,
        description="File of the authorities of clients that are not of the mesh (PEM), for the gateway: over HTTP a "
        "certificate signed by them is accepted instead of a key, over gRPC at client_listen it is demanded.",
    )
    client_listen: OptionalListen = Field(
        default="",
        description='"host:port" of a second gRPC door, for clients with a certificate of `client_ca`; "" = none.',
    )

    @model_validator(mode="after")
    def _consistent(self) -> TlsSettings:
        if (self.cert is None) != (self.key is None):
            raise ValueError("tls.cert and tls.key are set together or not at all")
        if (self.inner_cert is None) != (self.inner_key is None):
            raise ValueError("tls.inner_cert and tls.inner_key are set together or not at all")
        if self.require_client_cert and (self.cert is None or self.ca is None):
            raise ValueError("tls.require_client_cert needs tls.cert, tls.key and tls.ca")
        if self.client_ca is not None and self.cert is None:
            raise ValueError("tls.client_ca needs tls.cert and tls.key")
        if self.client_ca is not None and self.require_client_cert:
            # Behind a server a certificate is a certificate: a client's must not pass for a member's of the mesh.
            raise ValueError("tls.client_ca and tls.require_client_cert exclude each other")
        if self.client_listen and self.client_ca is None:
            raise ValueError("tls.client_listen needs tls.client_ca")
        return self

    @property
    def serves_tls(self) -> bool:
        """True when a server with these settings speaks TLS."""
        return self.cert is not None

    @property
    def inner(self) -> TlsSettings:
        """These settings as they are between members of the mesh: `cert` is the one that members see."""
        if self.inner_cert is None:
            return self
        return TlsSettings(
            cert=self.inner_cert,
            key=self.inner_key,
            ca=self.ca,
            require_client_cert=self.require_client_cert and self.ca is not None,
            server_name=self.server_name,
        )

    @property
    def connects_tls(self) -> bool:
        """True when channels opened with these settings speak TLS."""
        return self.ca is not None or self.cert is not None


@dataclass(frozen=True, slots=True)
class SemanticRule:
    """Threshold and guards of the semantic cache for a tenant and a name of a model; "*" = all."""

    tenant: str
    model: str
    tau: float
    guards: bool = True

    @classmethod
    def parse(cls, text: str) -> SemanticRule:
        """From "tenant/model=tau" or "tenant/model=tau:no-guards"; ValueError says what is wrong."""
        names, equals, value = text.rpartition("=")
        tenant, slash, model = names.strip().partition("/")
        number, _, flag = value.strip().partition(":")
        if not equals or not slash or not tenant or not model or flag not in ("", "no-guards"):
            raise ValueError(f'{text!r}: expected "tenant/model=tau" or "tenant/model=tau:no-guards"')
        tau = float(number)
        # NaN fails every comparison.
        if not 0.0 <= tau <= 1.0:
            raise ValueError(f"{text!r}: tau must be in [0, 1]")
        return cls(tenant, model, tau, not flag)

    def matches(self, tenant: str, model: str) -> bool:
        """Whether the rule is for this tenant and this name."""
        return self.tenant in ("*", tenant) and self.model in ("*", model)
