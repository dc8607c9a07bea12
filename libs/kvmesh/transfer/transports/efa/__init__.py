"""`efa`: RDMA writes over AWS' scalable reliable datagrams (SRD), by pyverbs. How it works: docs/transfer-efa.md."""

from kvmesh.transfer.transports.efa.options import EfaOptions
from kvmesh.transfer.transports.efa.transport import EfaTransport

__all__ = ["EfaOptions", "EfaTransport"]
