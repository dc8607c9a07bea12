"""Names in Redis, and what lies under them. Everything that shares a command or a script shares a hash slot.

Of one question (`tag` = 32 hex digits, one for all questions that differ only in the last user text; `exact` = 64 hex
digits of the whole request), all under the slot of `{tag}`:

    kvmesh:{tag}:a:<exact>     string  an answer: header and protobuf `CachedAnswer`; expires by itself
    kvmesh:{tag}:f:<exact>     string  pointer of the running flight, `<token> <flight id> <gateway id>`; lives as long
                                       as the leader's lease, 3 s, renewed each second
    kvmesh:{tag}:n:<exact>     string  counter of fencing tokens; never falls while anybody can hold a token
    kvmesh:{tag}:s:<flight id> stream  frames of a flight (field `f` = protobuf `FlightFrame`)
    kvmesh:{tag}:j:<flight id> any     who is in the flight; its form is `flights`' own
    kvmesh:{tag}:e:<entry id>  string  a semantic entry (a packed `events.Added`); expires with its answer

`Flight.key` of the protocol is `kvmesh:{tag}:` + exact, from which `FlightKeys.parse` makes all the others.

Indices, each in a slot of its own, written by commands of their own after the answer. Losing one costs no correctness:
entries that an index has lost are not found by a purge of that kind (a new epoch finds them) and not evicted by
count, and go when they expire.

    kvmesh:{t:<tenant tag>}:z:<epoch>     zset  member of an entry -> expiry in ms; caps and purge by tenant
    kvmesh:{t:<tenant tag>}:b:<epoch>     string sum of the members' bytes
    kvmesh:{m:<model tag>}:z:<epoch>, b:  the same for every revision of a model
    kvmesh:{i:<entry id>}                 string member of the entry; purge by id
    kvmesh:{v:<00..3f>}:z:<epoch>         zset  `<tag> <entry id>` of semantic entries -> expiry in ms, in 64 shards by
                                                the first byte of the id: what a fresh replica rebuilds from

A member is `<tag> <exact> <entry id> <family tag> <bytes>`.

    kvmesh:cache:epoch         string  number of the epoch; entries of another are not found. A lost one is made anew
                                       from the clock, so that it never falls
    kvmesh:cache:events        stream  what replicas of the semantic cache follow; `events` has its entries
"""

from __future__ import annotations

import re
from typing import NamedTuple

EPOCH = "kvmesh:cache:epoch"
EVENTS = "kvmesh:cache:events"
EVENTS_MAXLEN = 50_000
"""Entries kept in the stream, about. A replica that has fallen behind further rebuilds."""

VECTOR_SHARDS = 64

_FLIGHT_KEY = re.compile(r"kvmesh:\{([0-9a-f]{32})\}:([0-9a-f]{64})")
_MEMBER = re.compile(rb"([0-9a-f]{32}) ([0-9a-f]{64}) ([0-9a-f]{32}) ([0-9a-f]{16}) ([0-9]{1,12})")


def prefix(tag: str) -> str:
    """What all keys of one slot begin with."""
    return f"kvmesh:{{{tag}}}:"


def answer(tag: str, exact: str) -> str:
    """Key of an answer."""
    return f"{prefix(tag)}a:{exact}"


def pointer(tag: str, exact: str) -> str:
    """Key of the pointer to the flight that answers this question now."""
    return f"{prefix(tag)}f:{exact}"


def counter(tag: str, exact: str) -> str:
    """Key of the fencing tokens' counter."""
    return f"{prefix(tag)}n:{exact}"


def frames(tag: str, flight_id: str) -> str:
    """Key of a flight's stream."""
    return f"{prefix(tag)}s:{flight_id}"


def joined(tag: str, flight_id: str) -> str:
    """Key of who is in a flight."""
    return f"{prefix(tag)}j:{flight_id}"


def entry(tag: str, entry_id: str) -> str:
    """Key of a semantic entry."""
    return f"{prefix(tag)}e:{entry_id}"


def tenant_index(tenant_tag: str, epoch: int) -> tuple[str, str]:
    """Keys of a tenant's index: the sorted set, the sum of bytes."""
    base = f"kvmesh:{{t:{tenant_tag}}}:"
    return f"{base}z:{epoch}", f"{base}b:{epoch}"


def model_index(model_tag: str, epoch: int) -> tuple[str, str]:
    """Keys of a model's index, as of a tenant's."""
    base = f"kvmesh:{{m:{model_tag}}}:"
    return f"{base}z:{epoch}", f"{base}b:{epoch}"


def id_index(entry_id: str) -> str:
    """Key that leads from an entry's id to its member."""
    return f"kvmesh:{{i:{entry_id}}}"


def vector_shard(entry_id: str) -> int:
    """Shard of a semantic entry, from the id's first byte."""
    return int(entry_id[:2], 16) % VECTOR_SHARDS


def vector_index(shard: int, epoch: int) -> str:
    """Key of one shard of the index of semantic entries."""
    return f"kvmesh:{{v:{shard:02x}}}:z:{epoch}"


class FlightKeys(NamedTuple):
    """Keys of one question's flight."""

    tag: str
    exact: str

    @classmethod
    def parse(cls, key: str) -> FlightKeys | None:
        """From `Flight.key`; None when it is not one (it came over the wire)."""
        match = _FLIGHT_KEY.fullmatch(key)
        return cls(match[1], match[2]) if match else None

    @property
    def key(self) -> str:
        """As `Flight.key`."""
        return prefix(self.tag) + self.exact

    @property
    def pointer(self) -> str:
        """See `pointer`."""
        return pointer(self.tag, self.exact)

    @property
    def counter(self) -> str:
        """See `counter`."""
        return counter(self.tag, self.exact)

    def frames(self, flight_id: str) -> str:
        """See `frames`."""
        return frames(self.tag, flight_id)

    def joined(self, flight_id: str) -> str:
        """See `joined`."""
        return joined(self.tag, flight_id)


class Member(NamedTuple):
    """One entry as indices name it. `family`: 16 hex digits of (model, revision). `size`: bytes of the answer."""

    tag: str
    exact: str
    entry_id: str
    family: str
    size: int

    @classmethod
    def parse(cls, raw: object) -> Member | None:
        """From Redis; None when it is not one."""
        match = _MEMBER.fullmatch(raw) if isinstance(raw, bytes) else None
        if match is None:
            return None
        tag, exact, entry_id, family, size = (part.decode() for part in match.groups())
        return cls(tag, exact, entry_id, family, int(size))

    def __str__(self) -> str:
        return f"{self.tag} {self.exact} {self.entry_id} {self.family} {self.size}"
