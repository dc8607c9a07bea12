"""Certificates made here, and key files."""

from __future__ import annotations

from pathlib import Path

import trustme

from kvmesh.config import TlsSettings
from kvmesh.rpc import hash_key


class Authority:
    """A certificate authority and certificates of it as files."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.ca = trustme.CA()
        self.file = folder / f"{name}-ca.pem"
        self.ca.cert_pem.write_to_path(str(self.file))

    def issue(self, label: str, *identities: str, common_name: str | None = None) -> tuple[Path, Path]:
        """Files of a certificate and of its key; written over where the label is old."""
        issued = self.ca.issue_cert(*identities, common_name=common_name)
        cert, key = self.folder / f"{label}.pem", self.folder / f"{label}.key"
        cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        key.write_bytes(issued.private_key_pem.bytes())
        return cert, key

    def client(self, server: Authority, *identities: str, common_name: str | None = None) -> TlsSettings:
        """How a client of this authority connects to a server of that one."""
        cert, key = self.issue(f"client-{'-'.join(identities)}", *identities, common_name=common_name)
        return TlsSettings(ca=server.file, cert=cert, key=key)


def key_block(key: str, tenant: str, **more: str) -> str:
    """A record of a key file."""
    lines = [
        f'sha256 = "{hash_key(key)}"',
        f'tenant = "{tenant}"',
        *(f"{name} = {value}" for name, value in more.items()),
    ]
    return "\n".join(["[[keys]]", *lines, ""])
