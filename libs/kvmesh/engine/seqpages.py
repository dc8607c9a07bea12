"""Pages of sequences: admission with the prefix cache, growth, forks, and giving back. Whole need or nothing."""

from __future__ import annotations

from collections.abc import Iterable

from kvmesh.engine.events import Counters, Mode
from kvmesh.engine.runner import Int32Array
from kvmesh.engine.sequence import Choice, Stamp
from kvmesh.kv.pool import PagePool
from kvmesh.kv.prefix import PrefixCache


class SequencePages:
    """Keeps `Choice.pages` and the pool in step. Owners in the pool are sequence ids."""

    def __init__(
        self, pool: PagePool, cache: PrefixCache | None, page_size: int, look_ahead: int, counters: Counters
    ) -> None:
        self.pool = pool
        self.cache = cache
        self.page_size = page_size
        self._look_ahead = look_ahead
        self._counters = counters
        self._admissions = 0
        # Over, but a launched step still writes into their pages.
        self._late: list[Choice] = []

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def hopeless(self, choice: Choice) -> bool:
        """Whether `admit`, having failed before, would certainly fail again; without hashing the prompt once more.

        A hit cannot have grown while no block was stored, so what it did not cover must be available. An equal stamp
        means that nothing at all has changed.
        """
        if choice.refusal is None:
            return False
        missing, stamp = choice.refusal
        now = self._stamp()
        return stamp == now or (stamp.stored_blocks == now.stored_blocks and missing > now.available)

    def _stamp(self) -> Stamp:
        pool, cache = self.pool, self.cache
        stored = cache.stats.stored_blocks if cache is not None else 0
        return Stamp(pool.available_count, pool.free_count, stored, self._admissions)

    def _refuse(self, choice: Choice, need: int, tokens: Int32Array, hit_limit: int) -> bool:
        """Remember what was missing; returns False."""
        hit = 0
        if self.cache is not None:
            hit = len(self.cache.match(choice.request.options.seed_bytes, tokens, hit_limit).pages)
        choice.refusal = need - hit, self._stamp()
        return False

    def admit(self, choice: Choice) -> bool:
        """Take prompt and look-ahead pages, for the choices that will fork from it too, or nothing.

        On success the choice has its block table, its tokens and `computed` = what the prefix cache holds.
        """
        request = choice.request
        total = choice.total_len
        forks = [] if request.forked else [fork for fork in request.seqs[1:] if fork.live]
        if request.options.mode is Mode.PREFILL_ONLY:
            capacity = need = self.pages_for(total)
            hit_limit = total
        else:
            least = self.pages_for(total + 1)
            capacity = max(least, self.pages_for(request.limit_len))
            need = max(least, min(self.pages_for(total) + self._look_ahead, capacity))
            if need + len(forks) * (need - total // self.page_size) > self.pool.total:
                need = least
            hit_limit = 0 if request.scoring else total - 1
        own = need - total // self.page_size
        total_need = need + len(forks) * own
        tokens = choice.all_tokens()
        cached = 0
        if self.cache is not None:
            reservation = self.cache.reserve(choice.seq_id, request.options.seed_bytes, tokens, need, hit_limit)
            if reservation is None:
                return self._refuse(choice, total_need, tokens, hit_limit)
            pages, cached = reservation.pages, reservation.match.num_tokens
        else:
            allocated = self.pool.allocate(choice.seq_id, need)
            if allocated is None:
                return self._refuse(choice, total_need, tokens, hit_limit)
            pages = allocated
        for index, fork in enumerate(forks):
            reserved = self.pool.allocate(fork.seq_id, own)
            if reserved is None:
                for earlier in forks[:index]:
                    self.free(earlier)
                self.free(choice)
                return self._refuse(choice, total_need, tokens, hit_limit)
            fork.reserved = reserved
        if not request.scoring and self.cache is not None:
            self._counters.prefix_cache_queries += total
            self._counters.prefix_cache_hits += cached
        self._admissions += 1
        choice.refusal = None
        choice.set_pages(pages, capacity)
        choice.tokens = tokens
        choice.computed = cached
        choice.first_block = choice.sent = cached // self.page_size
        return True

    def grow(self, choice: Choice) -> bool:
        """One more page, or False when there is none."""
        pages = self.pool.allocate(choice.seq_id, 1)
        if pages is None:
            return False
        choice.grow(pages)
        return True

    def fork(self, root: Choice, fork: Choice) -> tuple[int, int] | None:
        """Give the fork the root's whole pages by reference; returns the (src, dst) copy of the partial last one.

        The source is held under ("copy", fork id) until `copied`: the root may end before the copy is made.
        """
        full, partial = divmod(root.computed, self.page_size)
        shared = root.pages[:full]
        self.pool.share(fork.seq_id, shared)
        fork.set_pages(shared + fork.reserved, max(root.capacity, full + len(fork.reserved)))
        fork.reserved = []
        fork.computed = root.computed
        if not partial:
            return None
        source = root.pages[full]
        self.pool.share(("copy", fork.seq_id), [source])
        return source, fork.pages[full]

    def copied(self, fork_id: int) -> None:
        """The copy was made or is not needed any more."""
        self.pool.release(("copy", fork_id))

    def store(self, choice: Choice) -> None:
        """Whole computed blocks into the prefix cache."""
        if self.cache is not None and choice.computed >= self.page_size:
            self.cache.insert(choice.seq_id, choice.request.options.seed_bytes, choice.computed_tokens(), choice.pages)

    def forget(self, choices: Iterable[Choice]) -> None:
        """The KV of their history is not to be trusted: nobody may find it, not even what they found themselves."""
        if self.cache is not None:
            self.cache.forget({page for choice in choices for page in self.pool.pages_of(choice.seq_id)})

    def free(self, choice: Choice) -> None:
        """Let go of every page (those that a descriptor names return when it is settled).

        What a launched step still writes stays owned until that was collected: the device orders later steps behind
        it, but not what a peer would write.
        """
        if choice.ahead:
            self._late.append(choice)
        else:
            self.pool.release(choice.seq_id)
        choice.drop_pages()

    def settle(self) -> None:
        """A step was collected: what only it held up goes free."""
        if self._late:
            late, self._late = self._late, []
            for choice in late:
                if choice.ahead:
                    self._late.append(choice)
                else:
                    self.pool.release(choice.seq_id)
