"""TLS of the HTTP face: the certificate by which a client proved itself, from the connection to the request."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvmesh.rpc.certificates import PeerCertificate

STATE_KEY = "kvmesh_certificate"


class TlsAwareProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol; each request's `state` says what certificate its connection has.

    For connections of `kvmesh.rpc.tls.reloading_ssl_context`, whose certificates are verified.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        tls = transport.get_extra_info("ssl_object")
        certificate = PeerCertificate.of_socket(tls.getpeercert()) if tls is not None else None
        if certificate is not None:
            self.app_state = {**self.app_state, STATE_KEY: certificate}


def certificate_of(scope: Mapping[str, Any]) -> PeerCertificate | None:
    """The client's certificate of an ASGI scope, None where it gave none."""
    found = scope.get("state", {}).get(STATE_KEY)
    return found if isinstance(found, PeerCertificate) else None
