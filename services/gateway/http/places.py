"""How many connections a gateway process keeps: in all, and of one address.

A client that opens sockets without end must not take those of the others, nor the descriptors that workers need.
"""

from __future__ import annotations

import ipaddress
import logging
import resource
from collections import Counter

log = logging.getLogger(__name__)

# Descriptors for all else: workers, routers, Redis, gRPC clients, files.
RESERVE = 256
IPV6_PREFIX = 64


class Places:
    """Of one process. `take` as a connection comes, `leave` as it goes."""

    def __init__(self, most: int, most_of_one: int) -> None:
        """most_of_one: of one address, 0 = no bound of its own."""
        self.most = min(most, _descriptors())
        self.most_of_one = most_of_one or self.most
        if self.most < self.most_of_one:
            log.warning(
                "one address can take all %d HTTP connections of this process: http_max_connections_per_address is %d"
                " (http_max_connections %d, less where the limit of open files is low)", self.most, most_of_one, most
            )  # fmt: skip
        self._of: Counter[str] = Counter()
        self._total = 0
        self._refused: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._total

    def take(self, host: str | None) -> str | None:
        """None: there is a place, to be given back. Else who has too many: "all" or the address."""
        of = origin(host)
        full = "all" if self._total >= self.most else of if of and self._of[of] >= self.most_of_one else None
        if full is not None:
            self._refused[full] += 1
            return full
        self._total += 1
        if of:
            self._of[of] += 1
        return None

    def leave(self, host: str | None) -> None:
        """Give a place back."""
        self._total -= 1
        if of := origin(host):
            self._of[of] -= 1
            if not self._of[of]:
                del self._of[of]

    def tell(self) -> None:
        """Log what was refused since the last time; one line, however many."""
        if self._refused:
            worst, _ = self._refused.most_common(1)[0]
            whose = f"{self.most} are open" if worst == "all" else f"{worst} has {self.most_of_one}"
            log.warning("%d HTTP connection(s) refused: %s", self._refused.total(), whose)
            self._refused.clear()


def origin(host: str | None) -> str:
    """What counts as one address: of IPv6 the network that one customer gets. "" = unknown."""
    if not host:
        return ""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, IPV6_PREFIX), strict=False))


def _descriptors() -> int:
    """Connections that the process may have open, whatever its settings say."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else max(1, soft - RESERVE, soft // 2)
