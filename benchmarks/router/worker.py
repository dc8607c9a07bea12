"""A simulated worker: a prefix cache of real capacity, chunked prefill in order of arrival, a decode batch.

`TreeCache` does with numbers of blocks what `kvmesh.kv.PrefixCache` over a `PagePool` does with tokens: the same hits,
the same evictions (a test compares them), about ten times as fast.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

from router.trace import Cost, Request

Told = Callable[[str, list[int], int], None]
"""(`stored` or `removed`, numbers of blocks, depth of the first from 1; 0 for removed)."""


class _Node:
    __slots__ = ("busy", "children", "last_use", "number", "own", "parent")

    def __init__(self, number: int, parent: _Node | None) -> None:
        self.number = number
        self.parent = parent
        self.children = 0
        self.own = 1
        self.busy = 1
        self.last_use = 0


class Held:
    """What a sequence holds: cached nodes in order, and pages of its own that the cache does not know."""

    __slots__ = ("matched", "nodes", "private")

    def __init__(self, nodes: list[_Node], private: int) -> None:
        self.nodes = nodes
        self.matched = len(nodes)
        self.private = private


class TreeCache:
    """Whole blocks, leaves evicted least recently used first, over `pages` pages of one block each."""

    def __init__(self, pages: int, told: Told | None = None) -> None:
        self.pages = pages
        self.free = pages
        self.evictable = 0
        self.nodes: dict[int, _Node] = {}
        self._told = told or (lambda kind, numbers, depth: None)
        self._clock = 0
        self._leaves: list[tuple[int, int]] = []

    @property
    def available(self) -> int:
        """Pages that an allocation can have."""
        return self.free + self.evictable

    def reserve(self, blocks: list[int], most: int, pages: int) -> Held | None:
        """Hold the cached prefix (at most `most` blocks) and new pages up to `pages` in all; None: no room."""
        found = []
        nodes = self.nodes
        for number in blocks[:most]:
            node = nodes.get(number)
            if node is None:
                break
            found.append(node)
        for node in found:
            self._busy(node)
        short = pages - len(found) - self.free
        if short > 0:
            if self.evictable < short:
                for node in found:
                    self._idle(node)
                return None
            self._evict(short)
        self.free -= pages - len(found)
        return Held(found, pages - len(found))

    def insert(self, held: Held, blocks: list[int]) -> None:
        """Cache the blocks, all of which the sequence has computed; those that are there stay as they are."""
        nodes = self.nodes
        parent = held.nodes[held.matched - 1] if held.matched else None
        stored, depth = [], 0
        for at in range(held.matched, len(blocks)):
            node = nodes.get(blocks[at])
            if node is None:
                node = nodes[blocks[at]] = _Node(blocks[at], parent)
                if parent is not None:
                    parent.children += 1
                    self._spread(parent)
                held.private -= 1
                held.nodes.append(node)
                if not stored:
                    depth = at + 1
                stored.append(blocks[at])
            parent = node
        if stored:
            self._told("stored", stored, depth)

    def release(self, held: Held) -> None:
        """The sequence is over."""
        for node in held.nodes:
            self._idle(node)
        self.free += held.private

    def _busy(self, node: _Node) -> None:
        node.own += 1
        if node.own == 1:
            self._spread(node)

    def _spread(self, node: _Node | None) -> None:
        while node is not None:
            node.busy += 1
            if node.busy > 1:
                return
            self.evictable -= 1
            node = node.parent

    def _idle(self, node: _Node) -> None:
        node.own -= 1
        if node.own:
            return
        self._clock += 1
        node.last_use = self._clock
        above: _Node | None = node
        while above is not None:
            above.busy -= 1
            if above.busy:
                return
            self.evictable += 1
            if not above.children:
                heapq.heappush(self._leaves, (above.last_use, above.number))
            above = above.parent

    def _evict(self, count: int) -> None:
        removed: list[int] = []
        nodes = self.nodes
        while len(removed) < count:
            last_use, number = heapq.heappop(self._leaves)
            node = nodes.get(number)
            if node is None or node.busy or node.children or node.last_use != last_use:
                continue
            del nodes[number]
            self.evictable -= 1
            self.free += 1
            removed.append(number)
            above = node.parent
            if above is not None:
                above.children -= 1
                if not above.children and not above.busy:
                    heapq.heappush(self._leaves, (above.last_use, above.number))
        self._told("removed", removed, 0)


class Running:
    """A request that was admitted."""

    __slots__ = ("held", "missing", "request", "started")

    def __init__(self, request: Request, held: Held, missing: int) -> None:
        self.request = request
        self.held = held
        self.missing = missing


class Worker:
    """Continuous batching as a fluid: between two events every step takes the same time.

    Admission in order of arrival, as soon as there are pages for prompt and output and a place in the batch; prompts
    are computed one after the other beside the decode batch. `advance(now)` brings it up to date, `next_event()` tells
    when something ends.
    """

    def __init__(self, number: int, pages: int, block: int, cost: Cost, max_batch: int, told: Told | None) -> None:
        self.number = number
        self.block = block
        self.cost = cost
        self.max_batch = max_batch
        self.cache = TreeCache(pages, told)
        self.waiting: deque[Request] = deque()
        self.prompts: deque[Running] = deque()
        self.decoding: list[tuple[float, int, Running]] = []
        self.seen: list[int] = []
        self.first_token: Callable[[Request, float, int], None] = lambda request, at, hit: None
        self.ended: Callable[[Request], None] = lambda request: None
        self.version = 0
        self._now = 0.0
        self._steps = 0.0
        self._left = 0.0
        self._inflight = 0
        self._waiting_tokens = 0
        self._missing = 0

    def submit(self, request: Request, now: float) -> None:
        """A request arrives. `advance(now)` was called."""
        self.seen.append(request.number)
        self.waiting.append(request)
        self._waiting_tokens += request.prompt
        self._admit()

    @property
    def pending(self) -> int:
        """Requests that are not over."""
        return len(self.waiting) + len(self.prompts) + len(self.decoding)

    @property
    def queued_tokens(self) -> int:
        """As the engine reports: whole prompts that wait, and what is missing of admitted ones."""
        left = self._missing - self.prompts[0].missing + int(self._left) if self.prompts else 0
        return self._waiting_tokens + left

    @property
    def inflight_tokens(self) -> int:
        """Tokens in KV of admitted sequences."""
        return self._inflight

    def _step_s(self) -> float:
        cost, batch = self.cost, len(self.decoding)
        busy = cost.step_s + cost.sequence_s * batch
        return busy + cost.chunk / cost.prefill_rate if self.prompts else busy

    def next_event(self) -> float | None:
        """When the first of what runs ends; None: nothing runs."""
        step = self._step_s()
        at = None
        if self.prompts:
            at = self._now + self._left / self.cost.chunk * step
        if self.decoding:
            end = self._now + (self.decoding[0][0] - self._steps) * step
            at = end if at is None or end < at else at
        return at

    def advance(self, now: float) -> None:
        """Let time pass, and end what ends on the way."""
        while True:
            end = self.next_event()
            if end is None or end > now:
                break
            self._pass(end)
            step = self._step_s()
            while self.decoding and self.decoding[0][0] <= self._steps + 1e-9:
                self._finish(heapq.heappop(self.decoding)[2])
            if self.prompts and self._left <= 1e-6:
                self._prefilled(step)
            self._admit()
        self._pass(now)

    def _pass(self, now: float) -> None:
        passed = now - self._now
        if passed > 0.0:
            steps = passed / self._step_s()
            self._steps += steps
            if self.prompts:
                self._left = max(0.0, self._left - steps * self.cost.chunk)
            self._now = now

    def _admit(self) -> None:
        waiting, block = self.waiting, self.block
        while waiting and len(self.prompts) + len(self.decoding) < self.max_batch:
            request = waiting[0]
            pages = (request.prompt + request.output + block - 1) // block
            blocks = request.blocks(request.prompt // block)
            held = self.cache.reserve(blocks, (request.prompt - 1) // block, pages)
            if held is None:
                return
            waiting.popleft()
            self._waiting_tokens -= request.prompt
            missing = request.prompt - len(held.nodes) * block
            self._inflight += request.prompt
            self._missing += missing
            self.prompts.append(Running(request, held, missing))
            if len(self.prompts) == 1:
                self._left = float(missing)

    def _prefilled(self, step: float) -> None:
        running = self.prompts.popleft()
        request = running.request
        self._missing -= running.missing
        self._left = float(self.prompts[0].missing) if self.prompts else 0.0
        self.cache.insert(running.held, request.blocks(request.prompt // self.block))
        self.first_token(request, self._now + step, request.prompt - running.missing)
        heapq.heappush(self.decoding, (self._steps + request.output, request.number, running))

    def _finish(self, running: Running) -> None:
        request = running.request
        self._inflight -= request.prompt
        self.cache.insert(running.held, request.blocks((request.prompt + request.output) // self.block))
        self.cache.release(running.held)
        self.ended(request)
