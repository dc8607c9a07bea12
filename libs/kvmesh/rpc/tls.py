"""TLS from PEM files, for servers (certificates are reloaded when the files change) and for channels."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import grpc

from kvmesh.config import TlsSettings
from kvmesh.errors import FailedPrecondition
from kvmesh.rpc.files import ReloadingFile, read_bounded

log = logging.getLogger(__name__)
MAX_PEM_BYTES = 1 << 20
INTERVAL_S = 0.2

T = TypeVar("T")


def _read(path: Path) -> bytes:
    try:
        data = read_bounded(path, MAX_PEM_BYTES)
    except OSError as exc:
        raise FailedPrecondition(f"cannot read {path}: {exc.strerror}") from None
    except ValueError as exc:
        raise FailedPrecondition(str(exc)) from None
    if b"-----BEGIN " not in data:
        raise FailedPrecondition(f"{path} is not a PEM file")
    return data


def _own(tls: TlsSettings, ca: Path | None) -> tuple[Path, Path]:
    """Certificate and key. Files are read before a library sees them, so that a missing one is an error of ours with
    its name in it."""
    if tls.cert is None or tls.key is None:
        raise FailedPrecondition("TLS needs tls.cert and tls.key")
    for path in (tls.cert, tls.key, ca):
        if path is not None:
            _read(path)
    return tls.cert, tls.key


def server_credentials(tls: TlsSettings, *, clients: bool = False) -> grpc.ServerCredentials:
    """Credentials of a server; raises FailedPrecondition naming the file that is unusable.

    With `require_client_cert` a client without a certificate signed by `ca` fails in the handshake; with `clients`,
    one without a certificate signed by `client_ca`. New files are used by connections made after them; a broken new
    version leaves the old one in use.
    """
    ca = tls.client_ca if clients else tls.ca if tls.require_client_cert else None
    cert, key = _own(tls, ca)

    def load() -> grpc.ServerCertificateConfiguration:
        roots = _read(ca) if ca is not None else None
        return grpc.ssl_server_certificate_configuration([(_read(key), _read(cert))], root_certificates=roots)

    file = _following((cert, key, ca), load)
    served = file.version

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal served
        configuration = file.get()
        if file.version == served:
            return None
        served = file.version
        return configuration

    make: Any = grpc.dynamic_ssl_server_credentials  # its stub forbids the None that means "no change"
    credentials: grpc.ServerCredentials = make(file.get(), fetch, ca is not None)
    return credentials


def reloading_ssl_context(tls: TlsSettings) -> ssl.SSLContext:
    """Context of a server that is not gRPC's; raises FailedPrecondition naming the file that is unusable.

    A client's certificate is demanded with `require_client_cert`, asked for with `client_ca`. Each handshake takes the
    files as they are then, as `server_credentials` does.
    """
    ca = tls.ca if tls.require_client_cert else tls.client_ca
    cert, key = _own(tls, ca)

    def load() -> ssl.SSLContext:
        made = _server_context(tls.require_client_cert, ca is not None)
        # Without a password a protected key would ask for one on the terminal, and wait.
        made.load_cert_chain(cert, key, password="")
        if ca is not None:
            made.load_verify_locations(cadata=_read(ca).decode("ascii"))
        return made

    try:
        file = _following((cert, key, ca), load)
    except (ssl.SSLError, ValueError) as exc:
        raise FailedPrecondition(f"tls.cert, tls.key or its authorities cannot be used: {type(exc).__name__}") from None

    def choose(connection: ssl.SSLObject, name: str | None, outer: ssl.SSLContext) -> None:
        connection.context = file.get()

    door = load()
    door.sni_callback = choose
    return door


def _server_context(demanded: bool, asked: bool) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.verify_mode = ssl.CERT_REQUIRED if demanded else ssl.CERT_OPTIONAL if asked else ssl.CERT_NONE
    if asked:
        # A resumed session would keep a client whose authority is gone since.
        made.num_tickets = 0
        made.options |= ssl.OP_NO_TICKET
    return made


def _following(paths: tuple[Path | None, ...], load: Callable[[], T]) -> ReloadingFile[T]:
    return ReloadingFile([p for p in paths if p is not None], load, what="TLS certificate", interval_s=INTERVAL_S)


def channel_credentials(tls: TlsSettings) -> grpc.ChannelCredentials:
    """Credentials of a channel: `ca` verifies the server (None = the system's), cert and key prove the client."""
    return grpc.ssl_channel_credentials(
        root_certificates=_read(tls.ca) if tls.ca is not None else None,
        private_key=_read(tls.key) if tls.key is not None else None,
        certificate_chain=_read(tls.cert) if tls.cert is not None else None,
    )
