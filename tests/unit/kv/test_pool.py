"""Page pool against a dict model: random holders, descriptors, aborts and late settles in any order."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvmesh.errors import Internal, InvalidArgument
from kvmesh.kv.freeruns import FreeRuns
from kvmesh.kv.pool import PagePool, PageState

OWNERS = ["a", "b", ("c", 1), 4]
owners = st.sampled_from(OWNERS)
generations = st.integers(1, 3)


class PoolMachine(RuleBasedStateMachine):
    """The model says from first principles who holds what and which descriptors live; the pool must agree."""

    @initialize(total=st.integers(1, 20))
    def start(self, total):
        self.total = total
        self.pool = PagePool(total)
        self.held: dict[object, list[int]] = {}
        self.live: dict[tuple[object, int], tuple[list[int], bool, bool]] = {}  # pages, for_write, draining
        self.attempt: dict[object, int] = {}

    def users(self, page):
        return sum(page in pages for pages in self.held.values()) + sum(page in x[0] for x in self.live.values())

    def free(self):
        return {page for page in range(self.total) if not self.users(page)}

    def let_go(self, owner, pages):
        before = self.free()
        self.held[owner] = [page for page in self.held[owner] if page not in pages]
        if not self.held[owner]:
            del self.held[owner]
            self.attempt.pop(owner, None)
        return len(self.free() - before)

    @rule(owner=owners, n=st.integers(0, 8), generation=st.none() | generations)
    def allocate(self, owner, n, generation):
        free = self.free()
        pages = self.pool.allocate(owner, n, generation=generation)
        if n > len(free):
            assert pages is None
            return
        assert len(pages) == len(set(pages)) == n
        assert set(pages) <= free  # so: nothing that a live or draining descriptor names
        assert pages == sorted(pages)
        if n:
            self.held.setdefault(owner, []).extend(pages)
        if generation is not None and owner in self.held:
            self.attempt[owner] = generation

    @rule(owner=owners, other=owners, data=st.data())
    def share(self, owner, other, data):
        pages = data.draw(st.lists(st.sampled_from(self.held.get(other) or [0]), max_size=3))
        writing = {page for x, for_write, _ in self.live.values() if for_write for page in x}
        legal = (
            len(set(pages)) == len(pages)
            and all(any(page in held for held in self.held.values()) for page in pages)
            and not set(pages) & (set(self.held.get(owner, [])) | writing)
        )
        if not legal:
            with pytest.raises(InvalidArgument):
                self.pool.share(owner, pages)
            return
        self.pool.share(owner, pages)
        if pages:
            self.held.setdefault(owner, []).extend(pages)

    @rule(owner=owners, generation=generations, for_write=st.booleans(), data=st.data())
    def expose(self, owner, generation, for_write, data):
        pages = data.draw(st.lists(st.sampled_from(self.held.get(owner) or [0]), max_size=4))
        writing = {page for x, is_write, _ in self.live.values() if is_write for page in x}
        legal = (
            (owner, generation) not in self.live
            and len(set(pages)) == len(pages)
            and set(pages) <= set(self.held.get(owner, []))
            and not set(pages) & writing
            and not (for_write and any(self.users(page) != 1 for page in pages))
        )
        if not legal:
            with pytest.raises(InvalidArgument):
                self.pool.expose(owner, generation, pages, for_write=for_write)
            return
        self.pool.expose(owner, generation, pages, for_write=for_write)
        self.live[owner, generation] = (list(pages), for_write, False)
        if owner in self.held:
            self.attempt[owner] = generation

    @rule(owner=owners, generation=generations)
    def drain(self, owner, generation):
        live = (owner, generation) in self.live
        assert self.pool.drain(owner, generation) is live
        if live:
            pages, for_write, _ = self.live[owner, generation]
            self.live[owner, generation] = (pages, for_write, True)

    @rule(owner=owners, generation=generations)
    def settle(self, owner, generation):
        before = self.free()
        self.live.pop((owner, generation), None)
        assert self.pool.settle(owner, generation) == len(self.free() - before)
        assert self.pool.settle(owner, generation) == 0

    @rule(owner=owners, generation=st.none() | generations)
    def release(self, owner, generation):
        current = self.attempt.get(owner)
        stale = generation is not None and current is not None and generation != current
        freed = self.pool.release(owner, generation)
        if stale or owner not in self.held:
            assert freed == 0
        else:
            assert freed == self.let_go(owner, list(self.held[owner]))
            assert self.pool.release(owner, generation) == 0

    @rule(owner=owners, data=st.data())
    def release_some(self, owner, data):
        pages = data.draw(st.lists(st.sampled_from([*self.held.get(owner, []), 0]), max_size=3))
        if len(set(pages)) != len(pages) or not set(pages) <= set(self.held.get(owner, [])):
            with pytest.raises(InvalidArgument):
                self.pool.release_pages(owner, pages)
        elif pages:
            assert self.pool.release_pages(owner, pages) == self.let_go(owner, pages)

    @invariant()
    def agrees(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        expected = [0, 0, 0, 0]
        for page in range(self.total):
            named = [draining for pages, _, draining in self.live.values() if page in pages]
            if not self.users(page):
                state = PageState.FREE
            elif not named:
                state = PageState.OWNED
            else:
                state = PageState.DRAINING if all(named) else PageState.EXPOSED
            assert self.pool.state(page) == state
            assert self.pool.refcount(page) == sum(page in pages for pages in self.held.values())
            expected[state] += 1
        assert tuple(self.pool.counts()) == tuple(expected)
        assert self.pool.free_count == self.pool.available_count == expected[0]
        for owner in OWNERS:
            assert self.pool.pages_of(owner) == self.held.get(owner, [])
            assert self.pool.exposed_generations(owner) == [g for o, g in self.live if o == owner]

    def teardown(self):
        """After all have let go and every descriptor is settled, every page is free: nothing leaks."""
        for owner in list(self.held):
            self.pool.release(owner)
        for owner, generation in self.live:
            self.pool.settle(owner, generation)
        self.pool.check_integrity()
        assert self.pool.free_count == self.pool.total


PoolMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 30)), max_size=40), st.randoms(use_true_random=False))
def test_free_runs_against_a_set(steps, random):
    total = 64
    runs, free, taken = FreeRuns(total), set(range(total)), []
    for take, n in steps:
        if take:
            n = min(n, len(free))
            # The longest runs there are bound how few pieces the need takes.
            lengths = sorted((length for _, length in runs.runs()), reverse=True)
            pages = runs.take(n)
            assert pages == sorted(set(pages))
            assert len(pages) == n
            assert set(pages) <= free
            fewest = next(k for k in range(len(lengths) + 1) if sum(lengths[:k]) >= n)
            assert sum(page - 1 not in pages for page in pages) <= max(fewest, 0)
            free -= set(pages)
            taken += pages
        else:
            random.shuffle(taken)
            back, taken = taken[:n], taken[n:]
            runs.give(back)
            free |= set(back)
        assert runs.count == len(free)
        found = [page for start, length in runs.runs() for page in range(start, start + length)]
        assert found == sorted(free)
        ends = [start + length for start, length in runs.runs()]
        assert not set(ends) & {start for start, _ in runs.runs()}  # neighbours are joined


def test_prefers_ascending_runs():
    pool = PagePool(100)
    assert pool.allocate("a", 10) == list(range(10))
    assert pool.allocate("b", 5) == list(range(10, 15))
    pool.release("a")
    # Best fit: the hole of 10 rather than a piece of the long tail.
    assert pool.allocate("c", 9) == list(range(9))
    # Growth continues the owner's own run.
    assert pool.allocate("b", 2) == [15, 16]
    assert pool.allocate("c", 1) == [9]
    # No single run is left for 84: the fewest runs, ascending, whole need.
    pool.release("b")
    pages = pool.allocate("d", 90)
    assert pages == list(range(10, 100))
    assert pool.allocate("e", 1) is None
    pool.check_integrity()


def test_life_of_a_destination_page():
    pool = PagePool(4)
    pages = pool.allocate("seq", 2, generation=1)
    pool.expose("seq", 1, pages, for_write=True)
    assert tuple(pool.counts()) == (2, 0, 2, 0)
    with pytest.raises(InvalidArgument, match="written by a peer"):
        pool.share("fork", pages[:1])
    # Cancelled: let go before the writer has drained. The pages must not come back yet.
    assert pool.drain("seq", 1)
    assert pool.release("seq", 1) == 0
    assert tuple(pool.counts()) == (2, 0, 0, 2)
    # The second attempt runs beside the first one's drain, and a late release of the first changes nothing.
    again = pool.allocate("seq", 2, generation=2)
    assert not set(again) & set(pages)
    assert pool.allocate("other", 1) is None
    assert pool.release("seq", 1) == 0
    assert pool.pages_of("seq") == again
    pool.expose("seq", 2, again, for_write=True)
    assert pool.settle("seq", 1) == 2
    assert pool.settle("seq", 1) == 0
    assert pool.settle("seq", 2) == 0
    assert tuple(pool.counts()) == (2, 2, 0, 0)
    assert pool.release("seq", 2) == 2
    pool.check_integrity()


def test_a_shared_source_page_outlives_each_of_its_users():
    pool = PagePool(1)
    (page,) = pool.allocate("seq", 1)
    pool.share("fork", [page])
    pool.expose("seq", 7, [page])
    pool.expose("fork", 7, [page])
    assert pool.release("seq") == 0
    assert pool.drain("seq", 7)
    assert pool.state(page) is PageState.EXPOSED
    assert pool.settle("seq", 7) == 0
    assert pool.release("fork") == 0
    assert pool.state(page) is PageState.EXPOSED
    assert pool.settle("fork", 7) == 1


def test_integrity_names_what_is_wrong():
    def broken(change, match):
        pool = PagePool(4)
        pool.allocate("a", 2)
        pool.expose("a", 1, [0])
        pool.check_integrity()
        change(pool)
        with pytest.raises(Internal, match=match):
            pool.check_integrity()

    broken(lambda pool: pool._users.__setitem__(1, 2), "page 1 counts 2 users, has 1")
    broken(lambda pool: pool._state.__setitem__(1, PageState.FREE), "page 1 is marked FREE, is OWNED")
    broken(lambda pool: pool._runs.give([1]), "page 1 has 1 users and is in the free runs")
    broken(lambda pool: pool._runs.take(1), "page 2 has 0 users and is not in the free runs")
    broken(lambda pool: pool._draining.__setitem__(0, 1), "page 0 counts wrong descriptors")
    broken(lambda pool: pool._cached.__setitem__(1, 1), "cached")
    broken(lambda pool: pool._writing.__setitem__(0, 1), "page 0 is wrongly marked as being written")


def test_bad_arguments():
    pool = PagePool(4)
    pool.allocate("a", 2)
    for bad in (
        lambda: PagePool(0),
        lambda: pool.allocate("a", -1),
        lambda: pool.state(4),
        lambda: pool.refcount(-1),
        lambda: pool.share("b", [3]),
        lambda: pool.share("b", [99]),
        lambda: pool.share("b", [0, 0]),
        lambda: pool.expose("b", 1, [0]),
        lambda: pool.release_pages("a", [0, 0]),
        lambda: pool.release_pages("a", [3]),
        lambda: pool.release_pages("nobody", [0]),
    ):
        with pytest.raises(InvalidArgument):
            bad()
        pool.check_integrity()
    assert pool.pages_of("a") == [0, 1]
