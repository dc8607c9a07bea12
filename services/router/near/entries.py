"""What the semantic cache remembers of a question, and who may keep how much of it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """A remembered answer.

    text: the question's last user text. prompt: the digest of its rendered tokens. answer: as stored, None where it is
    to be fetched. entry_id: 16 bytes, "" before it has one. tag, exact: what its keys in Redis are made of. tenant,
    model, family: tags by which it is purged.
    """

    text: str
    prompt: bytes
    answer: bytes | None
    entry_id: bytes = b""
    tag: str = ""
    exact: str = ""
    tenant: str = ""
    model: str = ""
    family: str = ""
    epoch: int = 0


@dataclass(slots=True)
class Kept:
    """An entry in its row. number: of all that were ever added. size: bytes it counts for. since, expires: seconds of
    the index's clock."""

    row: int
    number: int
    partition: bytes
    entry: Entry
    since: float
    expires: float
    size: int


class Shares:
    """Who leaves when the cache is full.

    It is the least recently used entry of all, with one exception: while its tenant holds no more than an equal share
    (the limits divided by the number of tenants that hold anything), the tenant that holds most loses its own least
    recently used entry instead. So a tenant that stores much pushes out its own entries, never all of another's.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._limits = (max_entries, max_bytes)
        self._recency: OrderedDict[int, Kept] = OrderedDict()
        self._tenants: dict[str, OrderedDict[int, Kept]] = {}
        self._bytes: dict[str, int] = {}
        self._largest = ""
        self._trusted = 0
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._recency)

    @property
    def tenants(self) -> int:
        """Tenants that hold an entry."""
        return len(self._tenants)

    def held(self, tenant: str) -> tuple[int, int]:
        """(entries, bytes) of a tenant."""
        return len(self._tenants.get(tenant, ())), self._bytes.get(tenant, 0)

    def of(self, tenant: str) -> list[Kept]:
        """All that a tenant holds, least recently used first."""
        return list(self._tenants.get(tenant, {}).values())

    def add(self, kept: Kept) -> None:
        """Take an entry in as the most recently used."""
        tenant = kept.entry.tenant
        self._recency[kept.row] = kept
        self._tenants.setdefault(tenant, OrderedDict())[kept.row] = kept
        self._bytes[tenant] = self._bytes.get(tenant, 0) + kept.size
        self.bytes += kept.size

    def remove(self, kept: Kept) -> None:
        """Take an entry out."""
        tenant = kept.entry.tenant
        del self._recency[kept.row]
        own = self._tenants[tenant]
        del own[kept.row]
        self._bytes[tenant] -= kept.size
        self.bytes -= kept.size
        if not own:
            del self._tenants[tenant], self._bytes[tenant]

    def resize(self, kept: Kept, size: int) -> None:
        """The entry counts for `size` bytes from now on."""
        self._bytes[kept.entry.tenant] += size - kept.size
        self.bytes += size - kept.size
        kept.size = size

    def touch(self, kept: Kept) -> None:
        """The entry was of use: it leaves later."""
        self._recency.move_to_end(kept.row)
        self._tenants[kept.entry.tenant].move_to_end(kept.row)

    def victim(self) -> Kept:
        """Who leaves next; there must be an entry."""
        oldest = next(iter(self._recency.values()))
        if self._weight(oldest.entry.tenant) * len(self._tenants) > 1.0:
            return oldest
        # Somebody holds more than the mean. Who holds most is looked up, at a cost linear in tenants, only once in a
        # thousandth of the entries.
        self._trusted -= 1
        if self._trusted < 0 or self._weight(self._largest) * len(self._tenants) <= 1.0:
            self._largest = max(self._tenants, key=self._weight)
            self._trusted = len(self._recency) // 1000
        return next(iter(self._tenants[self._largest].values()))

    def _weight(self, tenant: str) -> float:
        """Part of the limits that a tenant holds, of the limit that it is nearer to."""
        entries, size = self.held(tenant)
        return max(entries / self._limits[0], size / self._limits[1])

    def check_integrity(self) -> None:
        """Raise AssertionError unless all sums agree."""
        assert {row for own in self._tenants.values() for row in own} == set(self._recency)
        assert sum(len(own) for own in self._tenants.values()) == len(self._recency)
        assert self.bytes == sum(kept.size for kept in self._recency.values())
        for tenant, own in self._tenants.items():
            assert own, "a tenant without entries is gone"
            assert all(kept.entry.tenant == tenant for kept in own.values())
            assert self._bytes[tenant] == sum(kept.size for kept in own.values())
