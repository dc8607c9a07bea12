"""Prefix cache: finished KV blocks, found again by chained hash, in the pool's own pages.

Look-up and eviction are one structure: a block is in `_blocks` exactly while the cache holds its page, so an evicted
block cannot be found. The cache is one more holder in the pool. A block is evictable when the pool says that nobody
else uses its page and no block below it is in use; eviction takes leaves only, least recently used first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvmesh.errors import Internal, InvalidArgument
from kvmesh.kv.hashing import Tokens, base_seed, block_hashes, hash_block, request_seed, token_bytes
from kvmesh.kv.pool import Owner, PagePool

__all__ = [
    "CacheEvent",
    "CacheStats",
    "Match",
    "PrefixCache",
    "Reservation",
    "base_seed",
    "block_hashes",
    "request_seed",
]


class Match(NamedTuple):
    """A cached prefix: its pages in order, and how many tokens they cover (whole blocks)."""

    pages: list[int]
    num_tokens: int


class Reservation(NamedTuple):
    """Pages for a sequence: the cached prefix, then new ones. `pages` is both, a block table in order."""

    match: Match
    new_pages: list[int]

    @property
    def pages(self) -> list[int]:
        return self.match.pages + self.new_pages


class CacheEvent(NamedTuple):
    """What the router needs to mirror the cache. `stored`: a run of a chain, its first block's parent in `parent` (a
    seed or a hash) and its depth, counted from 1, in `depth`; `removed`: leaves first, both are empty."""

    kind: str
    hashes: tuple[bytes, ...]
    parent: bytes = b""
    depth: int = 0


@dataclass(slots=True)
class CacheStats:
    """Totals since the start, in tokens and blocks."""

    query_tokens: int = 0
    hit_tokens: int = 0
    stored_blocks: int = 0
    evicted_blocks: int = 0
    forgotten_blocks: int = 0


@dataclass(slots=True, eq=False)
class _Block:
    hash: bytes
    seed: bytes  # of the chain's root
    tokens: bytes
    page: int
    parent: _Block | None
    children: int = 0
    # 1 if others than the cache use the page, plus the number of children whose own `busy` is not zero.
    busy: int = 1
    last_use: int = 0


class _CacheOwner:
    """The cache's key as a holder in the pool."""

    def __repr__(self) -> str:
        return "<prefix cache>"


class PrefixCache:
    """Whole blocks of `page_size` tokens, one page each, for one pool. Lives on the pool's thread.

    on_event: called after the change with what was stored or removed; it must not call back into the cache.
    hash_fn: the chain's link, replaced in tests to force collisions.
    """

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        *,
        on_event: Callable[[CacheEvent], None] | None = None,
        hash_fn: Callable[[bytes, bytes], bytes] = hash_block,
    ) -> None:
        if page_size < 1:
            raise InvalidArgument(f"page_size must be at least 1, got {page_size}")
        self.page_size: Final = page_size
        self.stats = CacheStats()
        self._pool = pool
        self._on_event = on_event
        self._hash = hash_fn
        self._owner = _CacheOwner()
        self._blocks: dict[bytes, _Block] = {}
        self._by_page: dict[int, _Block] = {}
        self._evictable = 0
        self._clock = 0
        # (last_use, page) of idle leaves; entries go stale and are dropped when they come up.
        self._leaves: list[tuple[int, int]] = []
        pool.attach_cache(self)

    # -- looking up

    def __len__(self) -> int:
        """Blocks in the cache."""
        return len(self._blocks)

    def match(self, seed: bytes, tokens: Tokens, max_tokens: int | None = None) -> Match:
        """The longest cached prefix, WITHOUT taking a hold: its pages may be gone after the next allocation.

        max_tokens bounds what a hit may cover (a request of n prompt tokens passes n - 1); whole blocks only.
        """
        found = self._walk(seed, tokens, max_tokens)
        return Match([block.page for block in found], len(found) * self.page_size)

    def acquire(self, owner: Owner, seed: bytes, tokens: Tokens, max_tokens: int | None = None) -> Match:
        """As `match`, and the owner holds the pages: nothing can evict them until it releases them in the pool.

        The owner must not already hold one of them (InvalidArgument).
        """
        found = self.match(seed, tokens, max_tokens)
        self._pool.share(owner, found.pages)
        self.stats.query_tokens += len(tokens)
        self.stats.hit_tokens += found.num_tokens
        return found

    def reserve(
        self, owner: Owner, seed: bytes, tokens: Tokens, num_pages: int, max_tokens: int | None = None
    ) -> Reservation | None:
        """Admission in one step: hold the cached prefix and allocate the rest of `num_pages` pages, or None and
        nothing held. The hit never exceeds `num_pages` pages."""
        limit = num_pages * self.page_size
        match = self.acquire(owner, seed, tokens, limit if max_tokens is None else min(limit, max_tokens))
        new_pages = self._pool.allocate(owner, num_pages - len(match.pages))
        if new_pages is None:
            self._pool.release_pages(owner, match.pages)
            self.stats.query_tokens -= len(tokens)
            self.stats.hit_tokens -= match.num_tokens
            return None
        return Reservation(match, new_pages)

    def hashes(self) -> list[bytes]:
        """Every cached block's hash, parents before children: a snapshot for a router that just connected."""
        return list(self._blocks)

    # -- storing

    def insert(self, owner: Owner, seed: bytes, tokens: Tokens, pages: Sequence[int]) -> int:
        """Cache the whole blocks of `tokens`, block i in pages[i], which the owner holds and whose KV is complete.

        A block that is already cached stays as it is and the owner's page for it is not cached. Stops at a hash that
        belongs to other tokens, and at a page that was to be forgotten while others used it: all behind it was computed
        from that. Returns the number of blocks stored. Raises InvalidArgument for a page that the owner
        does not hold or that a peer may still write, before anything is stored.
        """
        raw = token_bytes(tokens)
        step = 4 * self.page_size
        count = min(len(raw) // step, len(pages))
        for page in pages[:count]:
            if not self._pool.holds(owner, page):
                raise InvalidArgument(f"page {page} is not held by {owner!r} and cannot be cached")
            if self._pool.being_written(page):
                raise InvalidArgument(f"page {page} may still be written by a peer and cannot be cached")
        parent: _Block | None = None
        stored: list[bytes] = []
        above, depth = seed, 0
        for index in range(count):
            if self._pool.suspect(pages[index]):
                break
            block_tokens = raw[index * step : (index + 1) * step]
            key = self._hash(parent.hash if parent is not None else seed, block_tokens)
            block = self._blocks.get(key)
            if block is None:
                if pages[index] in self._by_page:
                    raise Internal(f"page {pages[index]} is already cached under other tokens")
                if not stored:
                    above, depth = parent.hash if parent is not None else seed, index + 1
                block = self._store(key, seed, block_tokens, pages[index], parent)
                stored.append(key)
            elif not _same(block, seed, block_tokens, parent):
                break
            parent = block
        if stored:
            self.stats.stored_blocks += len(stored)
            self._emit(CacheEvent("stored", tuple(stored), above, depth))
        return len(stored)

    def clear(self) -> int:
        """Evict every block that nobody uses; returns how many."""
        return self._evict(self._evictable)

    def forget(self, pages: Iterable[int]) -> int:
        """What these pages hold is not to be trusted: no look-up finds their blocks again, nor any block below them.

        Pages that others use stay theirs, and `insert` takes none of them; the rest is freed. Returns the number of
        blocks forgotten.
        """
        suspects = set(pages)
        doomed: dict[bytes, _Block] = {}
        for block in self._blocks.values():  # parents come before children
            if block.page in suspects or (block.parent is not None and block.parent.hash in doomed):
                doomed[block.hash] = block
        self._pool.suspect_pages(suspects.union(block.page for block in doomed.values()))
        for block in reversed(doomed.values()):
            self._remove(block)
        if doomed:
            self._pool.release_pages(self._owner, [block.page for block in doomed.values()])
            self.stats.forgotten_blocks += len(doomed)
            self._emit(CacheEvent("removed", tuple(reversed(doomed))))
        return len(doomed)

    # -- what the pool calls (kvmesh.kv.pool.CacheHooks)

    @property
    def owner(self) -> Owner:
        """The cache's key as a holder in the pool."""
        return self._owner

    @property
    def evictable_count(self) -> int:
        """Blocks that can be evicted now, each of which frees one page."""
        return self._evictable

    def reclaim(self, count: int) -> None:
        """Evict `count` blocks for an allocation."""
        self._evict(count)

    def on_busy(self, page: int) -> None:
        """Somebody besides the cache uses the page now."""
        block: _Block | None = self._by_page[page]
        while block is not None:
            block.busy += 1
            if block.busy > 1:
                return
            self._evictable -= 1
            block = block.parent

    def on_idle(self, page: int) -> None:
        """Only the cache uses the page now: this is its last use."""
        block: _Block | None = self._by_page[page]
        assert block is not None
        self._clock += 1
        block.last_use = self._clock
        while block is not None:
            block.busy -= 1
            if block.busy:
                return
            self._evictable += 1
            if not block.children:
                self._push(block)
            block = block.parent

    # -- inside

    def check_integrity(self) -> None:
        """Raises Internal where blocks, pages, children and evictable counts do not agree with the pool."""
        faults: list[str] = []
        leaves = set(self._leaves)
        children: dict[bytes, int] = {}
        busy_children: dict[bytes, int] = {}
        for block in reversed(list(self._blocks.values())):
            own = self._pool.users(block.page) - 1
            busy = (own > 0) + busy_children.get(block.hash, 0)
            if busy != block.busy or children.get(block.hash, 0) != block.children:
                faults.append(f"block of page {block.page} counts busy {block.busy}, children {block.children}")
            if block.parent is not None:
                if self._blocks.get(block.parent.hash) is not block.parent:
                    faults.append(f"block of page {block.page} has lost its parent")
                children[block.parent.hash] = children.get(block.parent.hash, 0) + 1
                busy_children[block.parent.hash] = busy_children.get(block.parent.hash, 0) + (busy > 0)
            if self._by_page.get(block.page) is not block or not self._pool.holds(self._owner, block.page):
                faults.append(f"page {block.page} is not where its block says")
            if not block.busy and not block.children and (block.last_use, block.page) not in leaves:
                faults.append(f"idle leaf of page {block.page} cannot be found for eviction")
        idle = sum(not block.busy for block in self._blocks.values())
        if idle != self._evictable or len(self._by_page) != len(self._blocks):
            faults.append(f"{idle} blocks are evictable, {self._evictable} counted; {len(self._by_page)} pages")
        if len(self._pool.pages_of(self._owner)) != len(self._blocks):
            faults.append("the pool holds other pages for the cache than its blocks")
        if faults:
            raise Internal("prefix cache is inconsistent: " + "; ".join(faults[:8]))

    def _walk(self, seed: bytes, tokens: Tokens, max_tokens: int | None) -> list[_Block]:
        limit = len(tokens) if max_tokens is None else max(0, min(max_tokens, len(tokens)))
        count = limit // self.page_size
        found: list[_Block] = []
        if not count or not self._blocks:
            return found
        raw = token_bytes(tokens[: count * self.page_size])
        step = 4 * self.page_size
        parent: _Block | None = None
        for at in range(0, len(raw), step):
            block_tokens = raw[at : at + step]
            block = self._blocks.get(self._hash(parent.hash if parent is not None else seed, block_tokens))
            if block is None or not _same(block, seed, block_tokens, parent):
                break
            found.append(block)
            parent = block
        return found

    def _store(self, key: bytes, seed: bytes, tokens: bytes, page: int, parent: _Block | None) -> _Block:
        self._pool.share(self._owner, [page])
        block = _Block(key, seed, tokens, page, parent)
        self._blocks[key] = block
        self._by_page[page] = block
        self._pool.mark_cached(page)
        if parent is not None:
            parent.children += 1
            # The new block starts busy (its owner holds it), so everything above it is busy too.
            above: _Block | None = parent
            while above is not None:
                above.busy += 1
                if above.busy > 1:
                    break
                self._evictable -= 1
                above = above.parent
        return block

    def _evict(self, count: int) -> int:
        pages: list[int] = []
        removed: list[bytes] = []
        while len(pages) < count:
            if not self._leaves:
                raise Internal(f"prefix cache has {count - len(pages)} evictable blocks too few")
            last_use, page = heapq.heappop(self._leaves)
            block = self._by_page.get(page)
            if block is None or block.busy or block.children or block.last_use != last_use:
                continue
            self._remove(block)
            pages.append(page)
            removed.append(block.hash)
        if pages:
            freed = self._pool.release_pages(self._owner, pages)
            if freed != len(pages):
                raise Internal(f"evicting {len(pages)} blocks freed {freed} pages")
            self.stats.evicted_blocks += len(pages)
            self._emit(CacheEvent("removed", tuple(removed)))
        return len(pages)

    def _remove(self, block: _Block) -> None:
        """Take a leaf out, whoever uses its page; the caller lets go of the page."""
        del self._blocks[block.hash]
        del self._by_page[block.page]
        if not block.busy:
            self._evictable -= 1
        above = block.parent
        if above is None:
            return
        above.children -= 1
        if not block.busy:
            if not above.children and not above.busy:
                self._push(above)
            return
        while above is not None:
            above.busy -= 1
            if above.busy:
                return
            self._evictable += 1
            if not above.children:
                self._push(above)
            above = above.parent

    def _push(self, block: _Block) -> None:
        if len(self._leaves) > 2 * len(self._blocks) + 64:
            self._leaves = [
                (b.last_use, b.page) for b in self._blocks.values() if not b.busy and not b.children and b is not block
            ]
            heapq.heapify(self._leaves)
        heapq.heappush(self._leaves, (block.last_use, block.page))

    def _emit(self, event: CacheEvent) -> None:
        if self._on_event is not None:
            self._on_event(event)


def _same(block: _Block, seed: bytes, tokens: bytes, parent: _Block | None) -> bool:
    """Whether the block really is these tokens under that parent: a hash alone proves nothing."""
    return block.tokens == tokens and block.parent is parent and block.seed == seed
