"""Shared memory: the writer's sidecar maps the destination's regions and copies, then tells the counts.

The memory travels as memfds over a Unix socket, after a hello with a token and a pidfd of the writer. The same socket
carries the counts, and the writer's last word: unmapped. Until that word (or the same over the control API) or the
writer's exit, the memory may still be written to, whatever has become of the connections.
"""

from kvmesh.transfer.transports.shm.inbound import ShmInbound
from kvmesh.transfer.transports.shm.mapping import host_id, prefault
from kvmesh.transfer.transports.shm.outbound import ShmOutbound
from kvmesh.transfer.transports.shm.records import KIND_BYTES, KIND_UNMAPPED, RECORD
from kvmesh.transfer.transports.shm.transport import ShmTransport
from kvmesh.transfer.transports.sockets.listener import listen_unix

__all__ = [
    "KIND_BYTES",
    "KIND_UNMAPPED",
    "RECORD",
    "ShmInbound",
    "ShmOutbound",
    "ShmTransport",
    "host_id",
    "listen_unix",
    "prefault",
]
