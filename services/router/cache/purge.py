"""Forgetting answers: one by its id, all of a tenant, of a model, of a model's revision, or all there are.

An entry that is stored while its kind is purged may have been generated before: `Purges` remembers what was ordered,
and whoever stores asks it first.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable

from kvmesh.errors import InvalidArgument, Unavailable
from kvmesh.store import RedisStore, events, keys
from kvmesh.store.keys import Member
from services.router.cache.epoch import EpochKeeper, publish
from services.router.cache.fingerprint import family_tag, model_tag, tenant_tag
from services.router.cache.indices import Indices

MAX_REMEMBERED = 256
MAX_NAME_BYTES = 512
PARALLEL = 16
_ID = re.compile(r"[0-9a-f]{32}")


class Purges:
    """What was purged lately, by the clock of this process. Of many the oldest are forgotten; what began before those
    counts as purged."""

    def __init__(
        self, listener: Callable[[events.Purged], None] = lambda _: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`listener` hears of each, on the event loop."""
        self._listener = listener
        self._clock = clock
        self._seen: deque[tuple[float, events.Purged]] = deque()
        self._forgotten: float | None = None

    def __len__(self) -> int:
        return len(self._seen)

    def note(self, event: events.Event) -> None:
        """From this router or from another."""
        if not isinstance(event, events.Purged):
            return
        if event.what != "id":
            # What is yet to be stored has no id that anybody could have named.
            self._seen.append((self._clock(), event))
            if len(self._seen) > MAX_REMEMBERED:
                self._forgotten = self._seen.popleft()[0]
        self._listener(event)

    def since(self, when: float, *, tenant: str, model: str, family: str) -> bool:
        """Whether answers of this tenant, model or family (tags, hex) were purged at or after `when`."""
        if self._forgotten is not None and when <= self._forgotten:
            return True
        mine = {"tenant": tenant, "model": model, "family": family}
        return any(at >= when and mine.get(event.what) == event.value for at, event in self._seen)


class Purger:
    """Orders purges. All methods raise Unavailable when Redis is away: what was forgotten by then stays so."""

    def __init__(self, store: RedisStore, indices: Indices, epoch: EpochKeeper, purges: Purges, secret: bytes) -> None:
        self._store = store
        self._indices = indices
        self._epoch = epoch
        self._purges = purges
        self._secret = secret

    async def purge(
        self, *, purge_id: str = "", tenant: str = "", model: str = "", revision: str = "", everything: bool = False
    ) -> int:
        """Forget what is named, here and on every replica; the number of answers that were found.

        Of everything the number is not known: 0. Raises InvalidArgument unless exactly one thing is named.
        """
        check_purge(purge_id=purge_id, tenant=tenant, model=model, revision=revision, everything=everything)
        if everything:
            if await self._epoch.bump() is None:
                raise Unavailable("redis is away: nothing was purged", retry_after=1.0)
            return 0
        epoch = self._epoch.value
        await self._tell(event(self._secret, purge_id=purge_id, tenant=tenant, model=model, revision=revision))
        if purge_id:
            member = await self._indices.by_id(purge_id)
            self._check_there()
            return int(member is not None and await self._indices.drop(member, epoch))
        if tenant:
            return await self._sweep(keys.tenant_index(tenant_tag(self._secret, tenant), epoch), epoch, "")
        family = family_tag(model, revision).hex() if revision else ""
        return await self._sweep(keys.model_index(model_tag(model), epoch), epoch, family)

    async def _tell(self, purged: events.Purged) -> None:
        """First of all, so that nothing of the kind is stored any more, and nothing served from memory."""
        self._purges.note(purged)
        if not await publish(self._store, purged):
            raise Unavailable("redis is away: nothing was purged", retry_after=1.0)

    async def _sweep(self, index: tuple[str, str], epoch: int, family: str) -> int:
        """Drop an index's entries, those of `family` or all, batch by batch."""
        purged, cursor = 0, 0
        limit = asyncio.Semaphore(PARALLEL)

        async def drop(member: Member) -> bool:
            async with limit:
                return await self._indices.drop(member, epoch)

        while True:
            batch = await self._indices.scan(index[0], cursor)
            if batch is None:
                raise Unavailable(f"redis went away in the middle: {purged} answers were purged", retry_after=1.0)
            cursor, members = batch
            members = [member for member in members if not family or member.family == family]
            purged += sum(await asyncio.gather(*(drop(member) for member in members)))
            self._check_there()
            # Also those whose answer was gone already.
            await self._indices.remove(index, members)
            if cursor == 0:
                return purged

    def _check_there(self) -> None:
        if not self._store.ok:
            raise Unavailable("redis is away: not everything was purged", retry_after=1.0)


def event(secret: bytes, *, purge_id: str, tenant: str, model: str, revision: str) -> events.Purged:
    """What replicas are told of a purge that passed `check_purge`, but for one of everything."""
    what: events.What = "id" if purge_id else "tenant" if tenant else "family" if revision else "model"
    value = {
        "id": lambda: purge_id,
        "tenant": lambda: tenant_tag(secret, tenant),
        "family": lambda: family_tag(model, revision).hex(),
        "model": lambda: model_tag(model),
    }[what]()
    return events.Purged(what, value, int(time.time() * 1000))


def check_purge(*, purge_id: str, tenant: str, model: str, revision: str, everything: bool) -> None:
    """Raise InvalidArgument unless exactly one thing is named, well."""
    named = [name for name, value in (("purge_id", purge_id), ("tenant", tenant), ("model", model)) if value]
    if len(named) + everything != 1:
        raise InvalidArgument("name one of purge_id, tenant, model, all", details={"field": "purge_id"})
    if revision and not model:
        raise InvalidArgument("revision goes with model", details={"field": "revision"})
    if purge_id and not _ID.fullmatch(purge_id):
        raise InvalidArgument("purge_id must have 32 hex digits", details={"field": "purge_id"})
    for name, value in (("tenant", tenant), ("model", model), ("revision", revision)):
        if len(value.encode()) > MAX_NAME_BYTES:
            raise InvalidArgument(f"{name} is longer than {MAX_NAME_BYTES} bytes", details={"field": name})
