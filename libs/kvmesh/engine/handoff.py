"""The service's commands about pages that travel: REMOTE sequences receive them, PREFILL_ONLY ones are read from.

Each command tolerates coming late: the request may have ended, or been admitted anew, since the service sent it.
"""

from __future__ import annotations

from kvmesh.engine.events import RequestKey
from kvmesh.engine.scheduler import Scheduler
from kvmesh.engine.sequence import Choice, Request, SeqState
from kvmesh.errors import Cancelled

_WITH_PEER = (SeqState.AWAITING_KV, SeqState.EXPOSED, SeqState.DRAINING)


class Handoff:
    """Runs on the core's thread, over the scheduler's requests."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._pool = scheduler.pages.pool
        self._ledger = scheduler.ledger

    # -- REMOTE

    def exposed(self, key: RequestKey) -> None:
        """The ledger granted a generation: show it in the pool."""
        self._awaiting(key)

    def kv_ready(self, key: RequestKey, generation: int) -> None:
        """All KV but the last token's is in the pages: the sequence joins."""
        root = self._awaiting(key)
        if root is None or root.state is not SeqState.EXPOSED or root.generation != generation:
            self.settle(key, generation)
            return
        self._ledger.close(key)
        root.generation = None
        self.settle(key, generation)
        root.computed = root.total_len - 1
        self._scheduler.pages.store(root)
        self._scheduler.join(root)

    def kv_draining(self, key: RequestKey, generation: int) -> None:
        """The generation was given up; its pages stay untouched until `kv_drained`."""
        root = self._awaiting(key)
        if root is not None and root.state is SeqState.EXPOSED and root.generation == generation:
            self._pool.drain(root.seq_id, generation)
            root.move(SeqState.DRAINING)

    def kv_drained(self, key: RequestKey, generation: int) -> None:
        """Nothing of the generation can land any more (the ledger knows already)."""
        self._awaiting(key)
        self.settle(key, generation)

    def prefill_here(self, key: RequestKey) -> None:
        """Compute the prompt locally. With a generation still draining it starts over in other pages."""
        root = self._awaiting(key)
        if root is None:
            return
        self._ledger.close(key)
        root.local_only = True
        if root.state is SeqState.AWAITING_KV:
            self._scheduler.join(root)
            return
        generation, root.generation = root.generation, None
        assert generation is not None
        self._pool.drain(root.seq_id, generation)
        if root.state is SeqState.EXPOSED:
            root.move(SeqState.DRAINING)
        self._scheduler.requeue(root)

    def settle(self, key: RequestKey, generation: int) -> None:
        """Idempotent: the pages that only this generation kept go free."""
        scheduler = self._scheduler
        request = scheduler.requests.get(key) or scheduler.lingering.get(key)
        if request is None or generation not in request.live_generations:
            return
        self._pool.settle(request.root.seq_id, generation)
        request.live_generations.discard(generation)
        self._forget(request)

    def _awaiting(self, key: RequestKey) -> Choice | None:
        """The root of a live request whose pages are with a peer, in step with the ledger."""
        request = self._scheduler.requests.get(key)
        if request is None or request.root.state not in _WITH_PEER:
            return None
        self._scheduler.sync_exposure(request.root, self._ledger.granted(key))
        return request.root

    # -- PREFILL_ONLY

    def start_prefill(self, key: RequestKey, transfer_id: int, first_block: int) -> None:
        """The sidecar took the descriptor: compute, and record pages for `transfer_id`."""
        request = self._scheduler.requests.get(key)
        if request is None or request.root.state is not SeqState.AWAITING_START:
            return
        root = request.root
        root.transfer_id = transfer_id
        root.transfer_base = first_block
        root.sent = max(root.sent, first_block)
        self._pool.expose(root.seq_id, transfer_id, root.pages)
        request.live_generations.add(transfer_id)
        if root.computed == root.total_len:
            self._scheduler.hold(root, self._scheduler.clock())
        else:
            self._scheduler.join(root)

    def release(self, key: RequestKey) -> None:
        """Nothing of the transfer is in flight: its pages are ours again."""
        scheduler = self._scheduler
        request = scheduler.requests.get(key)
        if request is not None:
            computed = request.root.state is SeqState.HELD
            scheduler.end(request, None if computed else Cancelled("released before it was computed"))
        request = scheduler.lingering.get(key)
        if request is None:
            return
        for generation in list(request.live_generations):
            self._pool.settle(request.root.seq_id, generation)
        request.live_generations.clear()
        scheduler.pages.free(request.root)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        root = request.root
        if not request.ended or request.live_generations:
            return
        if root.state is SeqState.ENDED_HELD and root.num_pages:
            return  # never started, or drained by a peer: still the service's to release
        if root.state is not SeqState.ENDED:
            root.move(SeqState.ENDED)
        self._scheduler.lingering.pop(request.key, None)
