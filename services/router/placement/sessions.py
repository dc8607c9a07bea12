"""Sessions: which workers served a session last. Soft: it is a bonus in the score, not a promise.

A session that this router does not know (it has just started, or another replica served it) has a worker all the same:
the one with the highest hash of (session, worker), on which every replica agrees while the fleet stays the same.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S1, _S2, _S3 = np.uint64(30), np.uint64(27), np.uint64(31)


class Served(NamedTuple):
    """Ids of the workers that served last; prefill "" where decode prefilled."""

    decode: str
    prefill: str


class Sessions:
    """The last workers of the sessions seen lately, at most `limit` of them. Keys hold the tenant."""

    def __init__(self, limit: int = 65_536) -> None:
        self._limit = limit
        self._served: OrderedDict[str, Served] = OrderedDict()

    def __len__(self) -> int:
        return len(self._served)

    def get(self, session: str) -> Served | None:
        """Who served last; None when that is not known here."""
        served = self._served.get(session)
        if served is not None:
            self._served.move_to_end(session)
        return served

    def note(self, session: str, served: Served) -> None:
        """The session was placed."""
        self._served[session] = served
        self._served.move_to_end(session)
        while len(self._served) > self._limit:
            self._served.popitem(last=False)


def session_key(tenant: str, session_id: str) -> str:
    """The key of a tenant's session: of one length, whatever a client calls it."""
    return hashlib.blake2b(f"{tenant}\0{session_id}".encode(), digest_size=16).hexdigest()


def name_hash(name: str) -> int:
    """64 bits of a session's or worker's name, the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def rendezvous(session: str, workers: Hashes) -> int:
    """Index of the session's worker among at least one, given by `name_hash`."""
    mixed = workers ^ np.uint64(name_hash(session))
    mixed = (mixed ^ (mixed >> _S1)) * _M1
    mixed = (mixed ^ (mixed >> _S2)) * _M2
    return int(np.argmax(mixed ^ (mixed >> _S3)))
