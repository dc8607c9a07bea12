"""The page pool: who holds which page, and which pages a peer may still write or read.

A page is free → owned → exposed (named in a live descriptor) → draining (abort asked, writer not yet drained) → free.
A page is free only when nobody holds it AND no descriptor names it: releasing a page that a descriptor still names
takes the holder away but not the page, which is freed when the descriptor is settled. One private method frees.

Not thread-safe: it belongs to the engine's core thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from kvmesh.errors import Internal, InvalidArgument
from kvmesh.kv.freeruns import FreeRuns

Owner = Hashable


class PageState(IntEnum):
    """Where a page is in its life. EXPOSED wins over DRAINING where several descriptors name a page."""

    FREE = 0
    OWNED = 1
    EXPOSED = 2
    DRAINING = 3


class PoolCounts(NamedTuple):
    """Pages in each state; their sum is the pool's total."""

    free: int
    owned: int
    exposed: int
    draining: int


class CacheHooks(Protocol):
    """What a prefix cache gives the pool that it lives in.

    A cached page is *idle* when the cache is its only user, *busy* otherwise. `reclaim` must free exactly the pages it
    is asked for (the pool asks for at most `evictable_count`), by `PagePool.release_pages` of the cache's own holds.
    """

    @property
    def owner(self) -> Owner: ...

    @property
    def evictable_count(self) -> int: ...

    def reclaim(self, count: int) -> None: ...

    def on_busy(self, page: int) -> None: ...

    def on_idle(self, page: int) -> None: ...


@dataclass(slots=True)
class _Exposure:
    pages: list[int]
    for_write: bool
    draining: bool = False


@dataclass(slots=True)
class _Holding:
    """What one owner holds: pages in the order in which it got them (a dict is an ordered set)."""

    pages: dict[int, None]
    generation: int | None = None


class PagePool:
    """`num_pages` pages with reference counts by holder. An owner holds a page at most once.

    An owner is any hashable key. `generation` names one attempt of an owner (one descriptor); an owner may have several
    live generations, for example one still draining while the next already runs.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise InvalidArgument(f"a page pool needs at least one page, got {num_pages}")
        self.total = num_pages
        self._runs = FreeRuns(num_pages)
        # users = holders + live descriptors; a page is free exactly when it has none.
        self._users = [0] * num_pages
        self._exposed = [0] * num_pages
        self._draining = [0] * num_pages
        self._writing = bytearray(num_pages)
        self._cached = bytearray(num_pages)
        self._suspect = bytearray(num_pages)
        self._state = bytearray(num_pages)
        self._holdings: dict[Owner, _Holding] = {}
        self._exposures: dict[tuple[Owner, int], _Exposure] = {}
        self._cache: CacheHooks | None = None

    # -- looking

    @property
    def free_count(self) -> int:
        """Pages that are free right now."""
        return self._runs.count

    @property
    def available_count(self) -> int:
        """Pages that `allocate` can give: free ones and those that the prefix cache would evict."""
        return self._runs.count + (self._cache.evictable_count if self._cache is not None else 0)

    def counts(self) -> PoolCounts:
        """Pages by state (a scan of one byte a page in C)."""
        count = self._state.count
        return PoolCounts(*(count(state) for state in PageState))

    def state(self, page: int) -> PageState:
        """The page's state."""
        self._check_page(page)
        return PageState(self._state[page])

    def refcount(self, page: int) -> int:
        """How many owners hold the page (descriptors not counted)."""
        self._check_page(page)
        return self._users[page] - self._exposed[page]

    def users(self, page: int) -> int:
        """How many owners hold the page plus how many live descriptors name it."""
        self._check_page(page)
        return self._users[page]

    def being_written(self, page: int) -> bool:
        """True while a live descriptor lets a peer write the page."""
        self._check_page(page)
        return bool(self._writing[page])

    def suspect(self, page: int) -> bool:
        """True from `suspect_pages` until the page is free."""
        self._check_page(page)
        return bool(self._suspect[page])

    def pages_of(self, owner: Owner) -> list[int]:
        """The pages that the owner holds, in the order in which it got them."""
        holding = self._holdings.get(owner)
        return list(holding.pages) if holding is not None else []

    def holds(self, owner: Owner, page: int) -> bool:
        """True if the owner holds the page."""
        holding = self._holdings.get(owner)
        return holding is not None and page in holding.pages

    def exposed_generations(self, owner: Owner) -> list[int]:
        """The owner's generations that are not settled yet."""
        return [generation for key, generation in self._exposures if key == owner]

    # -- taking

    def allocate(self, owner: Owner, n: int, *, generation: int | None = None) -> list[int] | None:
        """`n` free pages for the owner, or None: the whole need, never a part of it.

        Ascending and contiguous where possible; continues the owner's last page if the pages after it are free. Cached
        pages that nobody else uses are evicted for it, but only if that meets the need. `generation` marks the owner
        as being in that attempt, so that a late `release` of an older one changes nothing.
        """
        if n < 0:
            raise InvalidArgument(f"cannot allocate {n} pages")
        if n == 0:
            if generation is not None and owner in self._holdings:
                self._holdings[owner].generation = generation
            return []
        short = n - self._runs.count
        if short > 0:
            if self._cache is None or self._cache.evictable_count < short:
                return None
            self._cache.reclaim(short)
            if self._runs.count < n:
                raise Internal(f"prefix cache promised {short} pages and freed {short - n + self._runs.count}")
        holding = self._hold(owner, generation)
        last = next(reversed(holding.pages), None)
        pages = self._runs.take(n, last)
        users, state = self._users, self._state
        for page in pages:
            users[page] = 1
            state[page] = PageState.OWNED
        holding.pages.update(dict.fromkeys(pages))
        return pages

    def share(self, owner: Owner, pages: Sequence[int]) -> None:
        """Add the owner as a holder of pages that somebody holds. Raises InvalidArgument and changes nothing if one
        has no holder, is already held by it, named twice, or being written by a peer."""
        held = self._holdings[owner].pages if owner in self._holdings else {}
        for page in self._distinct(pages):
            if self._users[page] == self._exposed[page]:
                raise InvalidArgument(f"page {page} has no holder and cannot be shared")
            if page in held:
                raise InvalidArgument(f"page {page} is already held by {owner!r}")
            if self._writing[page]:
                raise InvalidArgument(f"page {page} is being written by a peer and cannot be shared")
        if not pages:
            return
        self._hold(owner, None).pages.update(dict.fromkeys(pages))
        for page in pages:
            self._add_user(page)

    def mark_cached(self, page: int) -> None:
        """The prefix cache says that it now holds this page; it alone calls this, after `share`."""
        if self._cache is None or not self.holds(self._cache.owner, page):
            raise Internal(f"page {page} is not held by the prefix cache")
        self._cached[page] = 1

    def suspect_pages(self, pages: Iterable[int]) -> None:
        """What is in these pages is not to be trusted as long as anybody uses them. Those that are free are ignored."""
        for page in pages:
            self._check_page(page)
            self._suspect[page] = self._users[page] > 0

    # -- descriptors

    def expose(self, owner: Owner, generation: int, pages: Sequence[int], *, for_write: bool = False) -> None:
        """The owner's pages are named in a live descriptor from now on, until `settle(owner, generation)`.

        for_write: a peer will write them (a destination). They must then have no other holder and no other descriptor,
        and may get none before they settle. Without it (a source) pages may be shared. Raises InvalidArgument and
        changes nothing where a page is not the owner's, or the generation is already live.
        """
        key = (owner, generation)
        if key in self._exposures:
            raise InvalidArgument(f"generation {generation} of {owner!r} is already exposed")
        for page in self._distinct(pages):
            if not self.holds(owner, page):
                raise InvalidArgument(f"page {page} is not held by {owner!r}")
            if self._writing[page]:
                raise InvalidArgument(f"page {page} is already being written by a peer")
            if for_write and self._users[page] != 1:
                raise InvalidArgument(f"page {page} has other users and cannot be written by a peer")
        self._exposures[key] = _Exposure(list(pages), for_write)
        if owner in self._holdings:
            self._holdings[owner].generation = generation
        for page in pages:
            self._exposed[page] += 1
            self._add_user(page)
            if for_write:
                self._writing[page] = 1
            self._restate(page)

    def drain(self, owner: Owner, generation: int) -> bool:
        """Abort was asked: the pages are draining until settled. False if that generation is not live (idempotent)."""
        exposure = self._exposures.get((owner, generation))
        if exposure is None:
            return False
        if not exposure.draining:
            exposure.draining = True
            for page in exposure.pages:
                self._draining[page] += 1
                self._restate(page)
        return True

    def settle(self, owner: Owner, generation: int) -> int:
        """The descriptor is dead: completed, drained or fenced. Pages still held become owned, others are freed.

        Returns the number of pages freed; 0 if that generation is not live (idempotent).
        """
        exposure = self._exposures.pop((owner, generation), None)
        if exposure is None:
            return 0
        for page in exposure.pages:
            self._exposed[page] -= 1
            if exposure.draining:
                self._draining[page] -= 1
            if exposure.for_write:
                self._writing[page] = 0
        return self._drop_users(exposure.pages)

    # -- giving back

    def release(self, owner: Owner, generation: int | None = None) -> int:
        """The owner lets go of every page it holds; returns how many became free (0 when called again).

        Pages that a live descriptor names, or that another owner holds, are not freed yet: `settle` or that owner's
        release does it. With `generation`, a call for another attempt than the owner's latest (set by `expose` or
        `allocate`) changes nothing, so a late or repeated release of an old attempt never takes a new one's pages.
        """
        holding = self._holdings.get(owner)
        if holding is None:
            return 0
        if generation is not None and holding.generation is not None and holding.generation != generation:
            return 0
        return self.release_pages(owner, list(holding.pages))

    def release_pages(self, owner: Owner, pages: Sequence[int]) -> int:
        """The owner lets go of these pages (preemption, eviction). Raises InvalidArgument and changes nothing if it
        does not hold one of them. Returns how many became free."""
        holding = self._holdings.get(owner)
        for page in self._distinct(pages):
            if holding is None or page not in holding.pages:
                raise InvalidArgument(f"page {page} is not held by {owner!r}")
        if holding is None:
            return 0
        for page in pages:
            del holding.pages[page]
        if not holding.pages:
            del self._holdings[owner]
        if self._cache is not None and owner == self._cache.owner:
            for page in pages:
                self._cached[page] = 0
        return self._drop_users(pages)

    # -- the prefix cache

    def attach_cache(self, cache: CacheHooks) -> None:
        """Let a prefix cache (one) live in this pool."""
        if self._cache is not None:
            raise InvalidArgument("this pool already has a prefix cache")
        self._cache = cache

    # -- integrity

    def check_integrity(self) -> None:
        """Recounts everything from holdings and descriptors; raises Internal naming what is wrong.

        free + owned + exposed + draining = total; reference counts = holders; no page in two states.
        """
        faults = self._faults()
        if faults:
            raise Internal("page pool is inconsistent: " + "; ".join(faults[:8]))

    def _faults(self) -> list[str]:
        faults: list[str] = []
        holders = Counter(page for holding in self._holdings.values() for page in holding.pages)
        exposed: Counter[int] = Counter()
        draining: Counter[int] = Counter()
        writing: set[int] = set()
        for exposure in self._exposures.values():
            exposed.update(exposure.pages)
            if exposure.draining:
                draining.update(exposure.pages)
            if exposure.for_write:
                writing.update(exposure.pages)
        counts = self.counts()
        if sum(counts) != self.total:
            faults.append(f"states {counts._asdict()} sum to {sum(counts)}, total is {self.total}")
        free = [page for start, length in self._runs.runs() for page in range(start, start + length)]
        if len(free) != len(set(free)) or len(free) != self.free_count:
            faults.append(f"free runs hold {len(free)} pages, {len(set(free))} distinct, count says {self.free_count}")
        free_set = set(free)
        for page in range(self.total):
            users = holders[page] + exposed[page]
            if self._users[page] != users:
                faults.append(f"page {page} counts {self._users[page]} users, has {users}")
            if self._exposed[page] != exposed[page] or self._draining[page] != draining[page]:
                faults.append(f"page {page} counts wrong descriptors")
            if bool(self._writing[page]) != (page in writing):
                faults.append(f"page {page} is wrongly marked as being written or not")
            expected = PageState.OWNED
            if users == 0:
                expected = PageState.FREE
            elif exposed[page]:
                expected = PageState.DRAINING if exposed[page] == draining[page] else PageState.EXPOSED
            if self._state[page] != expected:
                faults.append(f"page {page} is marked {PageState(self._state[page]).name}, is {expected.name}")
            if self._suspect[page] and not users:
                faults.append(f"page {page} is free and still suspect")
            if (page in free_set) != (users == 0):
                faults.append(
                    f"page {page} has {users} users and is{'' if page in free_set else ' not'} in the free runs"
                )
        cached = set(self.pages_of(self._cache.owner)) if self._cache is not None else set()
        if cached != {page for page in range(self.total) if self._cached[page]}:
            faults.append("pages marked cached are not those that the prefix cache holds")
        faults += [f"{owner!r} is remembered without pages" for owner, held in self._holdings.items() if not held.pages]
        return faults

    # -- inside

    def _drop_users(self, pages: Iterable[int]) -> int:
        """Take one user from each page and free those without any: the one place where pages become free."""
        users, cached = self._users, self._cached
        freed: list[int] = []
        for page in pages:
            users[page] -= 1
            left = users[page]
            if left == 0:
                freed.append(page)
                self._state[page] = PageState.FREE
                self._suspect[page] = 0
                continue
            self._restate(page)
            if left == 1 and cached[page] and self._cache is not None:
                self._cache.on_idle(page)
        self._runs.give(freed)
        return len(freed)

    def _add_user(self, page: int) -> None:
        self._users[page] += 1
        if self._users[page] == 2 and self._cached[page] and self._cache is not None:
            self._cache.on_busy(page)

    def _restate(self, page: int) -> None:
        exposed = self._exposed[page]
        if not exposed:
            self._state[page] = PageState.OWNED
        elif exposed > self._draining[page]:
            self._state[page] = PageState.EXPOSED
        else:
            self._state[page] = PageState.DRAINING

    def _hold(self, owner: Owner, generation: int | None) -> _Holding:
        holding = self._holdings.get(owner)
        if holding is None:
            holding = self._holdings[owner] = _Holding({})
        if generation is not None:
            holding.generation = generation
        return holding

    def _check_page(self, page: int) -> None:
        if not 0 <= page < self.total:
            raise InvalidArgument(f"page {page} is not in this pool of {self.total}")

    def _distinct(self, pages: Sequence[int]) -> Sequence[int]:
        for page in pages:
            self._check_page(page)
        if len(set(pages)) != len(pages):
            raise InvalidArgument("a page is named twice")
        return pages
