"""Certificates of the commands that connect to a mesh: the same files and variables as the services'."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvmesh.config import TlsSettings
from kvmesh.errors import InvalidArgument
from kvmesh.rpc.channel import MeshChannel, open_channel

CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE = "KVMESH_TLS__CA", "KVMESH_TLS__CERT", "KVMESH_TLS__KEY"
NAME_VARIABLE = "KVMESH_TLS_SERVER_NAME"
CA_HELP = "Authorities that the server is verified against (PEM file); set means TLS."
CERT_HELP = "Own certificate, where the server demands one (PEM file)."
KEY_HELP = "Private key of the own certificate (PEM file)."
NAME_HELP = "Name in the server's certificate, where it is not that of the address."


@dataclass(frozen=True)
class Secure:
    """How to connect. Nothing set means plaintext."""

    tls: TlsSettings | None = None
    server_name: str = ""

    @classmethod
    def of(cls, ca: str = "", cert: str = "", key: str = "", server_name: str = "") -> Secure:
        """From flags, "" = not given. Raises InvalidArgument."""
        if bool(cert) != bool(key):
            raise InvalidArgument("--tls-cert and --tls-key are set together or not at all")
        files = [Path(value) if value else None for value in (ca, cert, key)]
        return cls(TlsSettings(ca=files[0], cert=files[1], key=files[2]), server_name)

    def channel(self, address: str) -> MeshChannel:
        """A channel to one service. Raises FailedPrecondition naming the file that is unusable."""
        return open_channel(address, tls=self.tls, server_name=self.server_name or None)


PLAINTEXT = Secure()
