"""TLS from PEM files, for servers (certificates are reloaded when the files change) and for channels."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import grpc

from kvmesh.config import TlsSettings
from kvmesh.errors import FailedPrecondition
from kvmesh.rpc.files import ReloadingFile, read_bounded

log = logging.getLogger(__name__)
MAX_PEM_BYTES = 1 << 20


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


def server_credentials(tls: TlsSettings) -> grpc.ServerCredentials:
    """Credentials of a server; raises FailedPrecondition naming the file that is unusable.

    With `require_client_cert` a client without a certificate signed by `ca` fails in the handshake. New files are
    used by connections made after them; a broken new version leaves the old one in use.
    """
    if tls.cert is None or tls.key is None:
        raise FailedPrecondition("TLS needs tls.cert and tls.key")
    cert, key, ca = tls.cert, tls.key, tls.ca if tls.require_client_cert else None

    def load() -> grpc.ServerCertificateConfiguration:
        roots = _read(ca) if ca is not None else None
        return grpc.ssl_server_certificate_configuration([(_read(key), _read(cert))], root_certificates=roots)

    # The files are read before grpc sees them, so that a missing one is an error of ours with its name in it.
    for path in (cert, key, ca):
        if path is not None:
            _read(path)
    file = ReloadingFile([p for p in (cert, key, ca) if p is not None], load, what="TLS certificate", interval_s=0.2)
    served = file.version

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal served
        configuration = file.get()
        if file.version == served:
            return None
        served = file.version
        return configuration

    make: Any = grpc.dynamic_ssl_server_credentials  # its stub forbids the None that means "no change"
    credentials: grpc.ServerCredentials = make(file.get(), fetch, tls.require_client_cert)
    return credentials


def channel_credentials(tls: TlsSettings) -> grpc.ChannelCredentials:
    """Credentials of a channel: `ca` verifies the server (None = the system's), cert and key prove the client."""
    return grpc.ssl_channel_credentials(
        root_certificates=_read(tls.ca) if tls.ca is not None else None,
        private_key=_read(tls.key) if tls.key is not None else None,
        certificate_chain=_read(tls.cert) if tls.cert is not None else None,
    )
