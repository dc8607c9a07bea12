"""TCP: the writer streams runs from its mapped region, the destination's sidecar receives them straight into its own.

After a framed hello with a token, the writer sends writes: a head, a table of runs (offset, length), the bytes. The
destination checks every run against the pages that were granted to that immediate before one byte of it is taken, and
acknowledges each write by number once it has landed: only then is it complete. A link has one stream or several; bytes
are counted, so nothing depends on the order between them.
"""

from kvmesh.transfer.transports.tcp.inbound import TcpInbound
from kvmesh.transfer.transports.tcp.outbound import TcpOutbound
from kvmesh.transfer.transports.tcp.transport import TcpTransport
from kvmesh.transfer.transports.tcp.wireformat import ACK, CORRUPT, FLAG_CHECKSUM, HEAD, REFUSED, TRAILER

__all__ = ["ACK", "CORRUPT", "FLAG_CHECKSUM", "HEAD", "REFUSED", "TRAILER", "TcpInbound", "TcpOutbound", "TcpTransport"]
