"""Names in the certificate that a peer proved itself by, as TLS verified it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvmesh.rpc.auth import ServicerContext

MAX_NAMES = 64
MAX_NAME_CHARS = 1024


@dataclass(frozen=True, slots=True)
class PeerCertificate:
    """Common name of the subject ("" = none), and the URI and DNS names of the subject's alternatives."""

    subject: str = ""
    names: frozenset[str] = frozenset()

    @classmethod
    def of_call(cls, context: ServicerContext) -> PeerCertificate | None:
        """The peer's of a gRPC call; None when it gave none."""
        found: Mapping[str, Any] = context.auth_context() or {}
        subject = _texts(found.get("x509_common_name", ()))
        return _made(subject, [*_texts(found.get("peer_uri", ())), *map(str.lower, _texts(found.get("peer_dns", ())))])

    @classmethod
    def of_socket(cls, described: Mapping[str, Any] | None) -> PeerCertificate | None:
        """From what `getpeercert()` of a verified TLS connection says; None when it is empty."""
        if not described:
            return None
        pairs = [pair for group in described.get("subject", ()) for pair in group]
        subject = [value for kind, value in pairs if kind == "commonName"]
        names = [
            value if kind == "URI" else value.lower()
            for kind, value in described.get("subjectAltName", ())
            if kind in ("URI", "DNS")
        ]
        return _made(subject, names)


def _texts(values: Any) -> list[str]:
    return [value.decode("utf-8", "replace") for value in values]


def _made(subject: list[str], names: list[str]) -> PeerCertificate | None:
    """None for a certificate without a name. One that has too many names, or too long ones, has none of them: what is
    compared must be whole."""
    if len(names) > MAX_NAMES:
        names = []
    kept = frozenset(name for name in names if 0 < len(name) <= MAX_NAME_CHARS)
    # Several common names are several claims; which of them an authority checked is not known.
    common = subject[0] if len(subject) == 1 and len(subject[0]) <= MAX_NAME_CHARS else ""
    return PeerCertificate(common, kept) if common or kept else None
