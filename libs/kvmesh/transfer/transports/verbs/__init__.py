"""`verbs`: RDMA over reliable connections (ConnectX, soft-RoCE), by pyverbs. How it works: docs/transfer-verbs.md."""

from kvmesh.transfer.transports.verbs.options import VerbsOptions
from kvmesh.transfer.transports.verbs.transport import VerbsTransport

__all__ = ["VerbsOptions", "VerbsTransport"]
