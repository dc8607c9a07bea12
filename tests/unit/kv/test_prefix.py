"""Prefix cache against a dict model, with page CONTENT simulated: a hit must always hold exactly the asked tokens."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvmesh.errors import Internal, InvalidArgument
from kvmesh.kv.hashing import hash_block, request_seed
from kvmesh.kv.pool import PagePool
from kvmesh.kv.prefix import CacheEvent, PrefixCache

PAGE = 2
SEEDS = [request_seed(bytes(16)), request_seed(bytes(16), salt="other")]
OWNERS = ["a", "b", "c", "d"]
prompts = st.lists(st.integers(0, 1), max_size=11)


class PrefixMachine(RuleBasedStateMachine):
    """`content[page]` is what an engine wrote there: (seed, all tokens up to the block's end). `cached` mirrors the
    cache by (seed, prefix), changed by what insert must do and by the removals that the cache announces."""

    hash_fn = staticmethod(hash_block)
    exact = True

    @initialize(total=st.integers(1, 14))
    def start(self, total):
        self.pool = PagePool(total)
        self.cache = PrefixCache(self.pool, PAGE, on_event=self.on_event, hash_fn=self.hash_fn)
        self.content: dict[int, tuple] = {}
        self.owners: dict[str, tuple] = {}  # owner -> (seed, tokens, pages)
        self.cached: dict[tuple, int] = {}
        self.names: dict[bytes, tuple] = {}
        self.mirror: dict[bytes, bytes] = {}
        self.forgetting = False
        self.suspect: set[int] = set()  # forgotten while in use; cleared where a page is given out anew

    def on_event(self, event: CacheEvent):
        """What a router would keep: hash -> parent hash. Parents come first and leave last."""
        if event.kind == "stored":
            parent = event.parent
            assert parent in SEEDS or parent in self.mirror
            for key in event.hashes:
                assert key not in self.mirror
                self.mirror[key], parent = parent, key
            return
        assert event.kind == "removed"
        for key in event.hashes:
            assert key not in self.mirror.values(), "a block left before its child"
            del self.mirror[key]
            if self.exact:
                page = self.cached.pop(self.names[key])
                assert self.forgetting or not any(page in pages for _, _, pages in self.owners.values()), (
                    "evicted in use"
                )

    def prefixes(self, seed, tokens, count):
        return [(seed, tuple(tokens[: (i + 1) * PAGE])) for i in range(count)]

    def expected(self, seed, tokens, limit):
        pages = []
        for name in self.prefixes(seed, tokens, min(limit, len(tokens)) // PAGE):
            if name not in self.cached:
                break
            pages.append(self.cached[name])
        return pages

    def check_hit(self, match, seed, tokens, limit):
        assert match.num_tokens == len(match.pages) * PAGE <= max(0, limit)
        names = self.prefixes(seed, tokens, len(match.pages))
        assert [self.content[page] for page in match.pages] == names
        if self.exact:
            assert match.pages == self.expected(seed, tokens, limit)

    @rule(owner=st.sampled_from(OWNERS), seed=st.sampled_from(SEEDS), tokens=prompts, spare=st.integers(0, 2))
    def admit(self, owner, seed, tokens, spare):
        if owner in self.owners:
            return
        need = -(-len(tokens) // PAGE) + spare
        limit = len(tokens) - 1
        free, evictable = self.pool.free_count, self.cache.evictable_count
        hit = self.cache.match(seed, tokens, limit).pages
        idle = sum(self.pool.users(page) == 1 for page in hit)
        before = self.cached.copy()
        got = self.cache.reserve(owner, seed, tokens, need, limit)
        if got is None:
            assert self.pool.pages_of(owner) == []
            assert self.cached == before, "evicted for an admission that was refused"
            # The idle part of the hit is not evictable while it is held.
            assert need - len(hit) > free + evictable - idle
            return
        assert got.match.pages == hit
        self.check_hit(got.match, seed, tokens, limit)
        assert len(set(got.pages)) == need
        assert not set(got.new_pages) & {page for _, _, pages in self.owners.values() for page in pages}
        self.owners[owner] = (seed, tuple(tokens), got.pages)
        self.suspect -= set(got.new_pages)
        for page, name in zip(got.pages, self.prefixes(seed, tokens, len(tokens) // PAGE), strict=False):
            if page in got.new_pages:
                self.content[page] = name
        for page in got.new_pages[max(0, len(tokens) // PAGE - len(hit)) :]:
            self.content[page] = ("partial or empty",)

    @rule(owner=st.sampled_from(OWNERS), part=st.integers(0, 11))
    def insert(self, owner, part):
        if owner not in self.owners:
            return
        seed, tokens, pages = self.owners[owner]
        tokens = tokens[:part]
        stored = self.cache.insert(owner, seed, tokens, pages)
        if self.exact:
            whole = len(tokens) // PAGE
            good = next((i for i in range(whole) if pages[i] in self.suspect), whole)
            new = [name for name in self.prefixes(seed, tokens, good) if name not in self.cached]
            assert stored == len(new)
            parent = seed
            for i, name in enumerate(self.prefixes(seed, tokens, good)):
                raw = b"".join(token.to_bytes(4, "little") for token in tokens[i * PAGE : (i + 1) * PAGE])
                parent = hash_block(parent, raw)
                self.names[parent] = name
                self.cached.setdefault(name, pages[i])

    @rule(seed=st.sampled_from(SEEDS), tokens=prompts, limit=st.integers(0, 12))
    def look(self, seed, tokens, limit):
        self.check_hit(self.cache.match(seed, tokens, limit), seed, tokens, limit)

    @rule(owner=st.sampled_from(OWNERS))
    def finish(self, owner):
        self.owners.pop(owner, None)
        self.pool.release(owner)

    @rule(owner=st.sampled_from(OWNERS), n=st.integers(1, 4))
    def grow(self, owner, n):
        if owner not in self.owners:
            return
        available = self.pool.available_count
        pages = self.pool.allocate(owner, n)
        assert (pages is not None) == (n <= available)
        if pages is not None:
            seed, tokens, held = self.owners[owner]
            self.owners[owner] = (seed, tokens, held + pages)
            for page in pages:
                self.content[page] = ("grown",)

    @rule(owner=st.sampled_from(OWNERS))
    def send(self, owner):
        """A source names its pages in a descriptor, lets go, and the descriptor settles: never evicted in between."""
        if owner not in self.owners:
            return
        _, _, pages = self.owners.pop(owner)
        self.pool.expose(owner, 1, pages)
        self.pool.release(owner)
        self.cache.clear()
        assert all(self.pool.users(page) for page in pages)
        self.agrees()
        self.pool.settle(owner, 1)

    @rule(owner=st.sampled_from(OWNERS), first=st.integers(0, 5))
    def forget(self, owner, first):
        """An owner's KV is bad from some page on: those blocks and all below them go, other owners keep their pages."""
        if owner not in self.owners:
            return
        bad = set(self.owners[owner][2][first:])
        roots = {name for name, page in self.cached.items() if page in bad}
        below = {
            (seed, tokens)
            for seed, tokens in self.cached
            if any((seed, tokens[:cut]) in roots for cut in range(PAGE, len(tokens) + 1, PAGE))
        }
        below_pages = {self.cached[name] for name in below}
        before, held = len(self.cache), {name: self.pool.pages_of(name) for name in self.owners}
        self.forgetting = True
        count = self.cache.forget(bad)
        self.forgetting = False
        assert before - len(self.cache) == count
        assert {name: self.pool.pages_of(name) for name in self.owners} == held
        self.suspect |= bad
        if self.exact:
            self.suspect |= below_pages
            assert count == len(below)
            assert not below & set(self.cached)

    @rule()
    def clear(self):
        count = self.cache.evictable_count
        assert self.cache.clear() == count
        assert self.cache.evictable_count == 0

    @invariant()
    def agrees(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        self.cache.check_integrity()
        assert set(self.cache.hashes()) == set(self.mirror)
        assert len(self.cache) == len(self.mirror)
        if self.exact:
            assert len(self.cache) == len(self.cached)

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        for owner in list(self.owners):
            self.owners.pop(owner)
            self.pool.release(owner)
        self.cache.clear()
        assert len(self.cache) == 0
        assert self.pool.free_count == self.pool.total


class CollidingMachine(PrefixMachine):
    """Five hash values for all blocks: hits get rarer, never wrong."""

    exact = False

    @staticmethod
    def hash_fn(parent: bytes, block: bytes) -> bytes:
        return bytes([hash_block(parent, block)[0] % 5]) * 16


PrefixMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
CollidingMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestPrefix = PrefixMachine.TestCase
TestColliding = CollidingMachine.TestCase


def cached(cache, pool, owner, tokens, seed=SEEDS[0]):
    pages = pool.allocate(owner, len(tokens) // PAGE)
    cache.insert(owner, seed, tokens, pages)
    pool.release(owner)
    return pages


def test_of_n_tokens_a_hit_covers_at_most_what_the_caller_allows():
    pool = PagePool(8)
    cache = PrefixCache(pool, PAGE)
    cached(cache, pool, "a", [1, 2, 3, 4])
    assert cache.acquire("x", SEEDS[0], [1, 2, 3, 4], 4).num_tokens == 4
    assert cache.acquire("y", SEEDS[0], [1, 2, 3, 4], 3).num_tokens == 2
    assert cache.acquire("z", SEEDS[0], [1, 2, 3, 4], 1).num_tokens == 0
    assert cache.match(SEEDS[0], [1, 2, 3, 4], -1).num_tokens == 0
    assert cache.match(SEEDS[1], [1, 2, 3, 4]).num_tokens == 0
    assert (cache.stats.query_tokens, cache.stats.hit_tokens) == (12, 6)


def test_eviction_is_least_recently_used_and_leaves_first():
    pool = PagePool(6)
    cache = PrefixCache(pool, PAGE)
    old = cached(cache, pool, "a", [1, 1, 2, 2])
    new = cached(cache, pool, "b", [3, 3, 4, 4])
    # A look-up with a hold makes the old chain the younger one.
    cache.acquire("c", SEEDS[0], [1, 1, 2, 2])
    pool.release("c")
    assert pool.allocate("d", 3) is not None
    assert cache.match(SEEDS[0], [3, 3, 4, 4]).pages == new[:1]
    assert cache.match(SEEDS[0], [1, 1, 2, 2]).pages == old
    assert pool.allocate("e", 2) is not None
    assert cache.match(SEEDS[0], [3, 3, 4, 4]).pages == []
    assert cache.match(SEEDS[0], [1, 1, 2, 2]).pages == old[:1]
    assert cache.stats.evicted_blocks == 3


def test_a_duplicate_is_not_cached_and_its_children_hang_on_the_first():
    pool = PagePool(8)
    cache = PrefixCache(pool, PAGE)
    a = pool.allocate("a", 1)
    b = pool.allocate("b", 2)
    assert cache.insert("a", SEEDS[0], [1, 2], a) == 1
    assert cache.insert("b", SEEDS[0], [1, 2, 3, 4], b) == 1
    assert cache.match(SEEDS[0], [1, 2, 3, 4]).pages == [a[0], b[1]]
    pool.release("a")
    # Nobody uses the parent, but its child is in use: it must stay findable.
    assert cache.evictable_count == 0
    assert pool.allocate("c", 6) is None
    pool.release("b")
    assert cache.evictable_count == 2
    assert pool.allocate("c", 8) is not None
    cache.check_integrity()


def test_an_idle_leaf_that_gets_a_child_is_no_leaf_any_more():
    pool = PagePool(8)
    removed = []
    cache = PrefixCache(pool, PAGE, on_event=lambda e: removed.extend(e.hashes) if e.kind == "removed" else None)
    a, b = pool.allocate("a", 1), pool.allocate("b", 2)
    cache.insert("a", SEEDS[0], [1, 2], a)
    pool.release("a")  # queued for eviction as a leaf …
    cache.insert("b", SEEDS[0], [1, 2, 3, 4], b)  # … and now a parent, older than its child and as idle
    pool.release("b")
    parent, child = cache.hashes()
    assert pool.allocate("c", 7) is not None
    assert removed == [child]
    assert cache.match(SEEDS[0], [1, 2, 3, 4]).pages == a
    assert pool.allocate("d", 1) is not None
    assert removed == [child, parent]


def test_a_colliding_hash_is_a_miss_whatever_it_collides_in():
    """Links that forget the parent, the seed or the tokens: only the comparison stands between a hit and foreign KV."""

    def fill(forgetful):
        pool = PagePool(16)
        cache = PrefixCache(pool, PAGE, hash_fn=forgetful)
        cached(cache, pool, "a", [1, 2, 3, 4])
        return pool, cache

    no_parent = lambda parent, block: hash_block(bytes(16), block)  # noqa: E731
    no_tokens = lambda parent, block: hash_block(parent, b"")  # noqa: E731
    pool, cache = fill(no_parent)
    assert cache.match(SEEDS[0], [1, 2, 3, 4]).num_tokens == 4
    assert cache.match(SEEDS[1], [1, 2, 3, 4]).num_tokens == 0  # same tokens, other seed
    assert cache.match(SEEDS[0], [3, 4]).num_tokens == 0  # same tokens, other place
    cached(cache, pool, "b", [5, 6])
    assert cache.match(SEEDS[0], [5, 6, 3, 4]).num_tokens == 2  # same tokens, other parent
    pool, cache = fill(no_tokens)
    assert cache.match(SEEDS[0], [1, 2, 3, 4]).num_tokens == 4
    assert cache.match(SEEDS[0], [1, 2, 7, 8]).num_tokens == 2
    # A newcomer with a taken name is not cached, nor anything below it.
    pages = pool.allocate("c", 2)
    assert cache.insert("c", SEEDS[0], [7, 8, 9, 9], pages) == 0
    assert cache.match(SEEDS[0], [7, 8, 9, 9]).num_tokens == 0
    cache.check_integrity()


def test_what_was_forgotten_does_not_come_back_with_those_who_still_use_it():
    pool = PagePool(8)
    cache = PrefixCache(pool, PAGE)
    tokens = list(range(3 * PAGE))
    first = cache.reserve("a", SEEDS[0], tokens, 3)
    cache.insert("a", SEEDS[0], tokens[: 2 * PAGE], first.pages)
    second = cache.reserve("b", SEEDS[0], tokens, 3)
    assert second.match.pages == first.pages[:2]
    # The first block's KV is bad; "b" computes on, on top of it.
    assert cache.forget(first.pages[:1]) == 2
    pool.release("a")
    assert cache.insert("b", SEEDS[0], tokens, second.pages) == 0
    assert cache.match(SEEDS[0], tokens).pages == []
    # Somebody computes it anew: what "b" made of the bad block is no continuation of that.
    third = cache.reserve("c", SEEDS[0], tokens[:PAGE], 1)
    assert cache.insert("c", SEEDS[0], tokens[:PAGE], third.pages) == 1
    assert cache.insert("b", SEEDS[0], tokens, second.pages) == 0
    # A page is as good as any once it was free.
    pool.release("b")
    again = cache.reserve("d", SEEDS[0], tokens, 3)
    assert cache.insert("d", SEEDS[0], tokens, again.pages) == 2
    pool.check_integrity()
    cache.check_integrity()


def test_a_page_that_a_peer_may_still_write_is_not_cached():
    pool = PagePool(4)
    cache = PrefixCache(pool, PAGE)
    pages = pool.allocate("a", 1)
    pool.expose("a", 1, pages, for_write=True)
    with pytest.raises(InvalidArgument, match="written"):
        cache.insert("a", SEEDS[0], [1, 2], pages)
    pool.settle("a", 1)
    assert cache.insert("a", SEEDS[0], [1, 2], pages) == 1
    # Now it is shared, so it is no destination any more.
    with pytest.raises(InvalidArgument, match="other users"):
        pool.expose("a", 2, pages, for_write=True)


def test_misuse_is_named():
    pool = PagePool(4)
    cache = PrefixCache(pool, PAGE)
    pages = pool.allocate("a", 2)
    with pytest.raises(InvalidArgument, match="not held"):
        cache.insert("b", SEEDS[0], [1, 2], pages)
    assert cache.insert("a", SEEDS[0], [1, 2], pages) == 1
    with pytest.raises(Internal, match="already cached under other tokens"):
        cache.insert("a", SEEDS[0], [7, 8], pages)
    with pytest.raises(InvalidArgument, match="already held"):
        cache.acquire("a", SEEDS[0], [1, 2])
    with pytest.raises(InvalidArgument, match="already has"):
        PrefixCache(pool, PAGE)
    pool.check_integrity()
    cache.check_integrity()


def test_the_eviction_queue_does_not_grow_with_use():
    pool = PagePool(8)
    cache = PrefixCache(pool, PAGE)
    cached(cache, pool, "a", [1, 1, 2, 2])
    for i in range(2000):
        cache.acquire(i, SEEDS[0], [1, 1, 2, 2])
        pool.release(i)
    assert len(cache._leaves) < 200
    cache.check_integrity()
    assert cache.clear() == 2
