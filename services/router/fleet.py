"""The fleet: which workers are attached, what they are, how loaded, which prefix blocks they hold.

A worker is known by the stream it attached on (its `Session`). The end of the stream or silence takes it out; a new
incarnation of the same worker id replaces the old one at once, and a replaced incarnation is never taken back, nor one
that had left before its successor came, so an old process that lingers cannot fight the new one for the name. Nothing
here is kept in Redis or on disk.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from kvmesh.errors import FailedPrecondition, InvalidArgument, KvmeshError, Unavailable
from kvmesh.kv.hashing import HASH_BYTES
from kvmesh.proto.v1 import engine_pb2, router_pb2
from services.router.placement.columns import Columns
from services.router.placement.index import MAX_BLOCKS, PrefixIndex

log = logging.getLogger(__name__)

Clock = Callable[[], float]

MAX_WORKERS = 4096
MAX_ID_BYTES = 128
MAX_NAME_BYTES = 512
MAX_HASH_BYTES = 32
RETIRED_PER_WORKER = 8
MAX_FAMILIES_KEPT = 256
MAX_TRANSPORTS = 16
SWEEP_BITS = 4096
SNAPSHOT_AGAIN_S = 2.0
"""A snapshot that was asked for and has not begun is asked for again."""

ROLES = {
    engine_pb2.WORKER_ROLE_PREFILL: "prefill",
    engine_pb2.WORKER_ROLE_DECODE: "decode",
    engine_pb2.WORKER_ROLE_UNIFIED: "unified",
}


@dataclass(frozen=True, slots=True, order=True)
class Family:
    """What may stand in for one another: one model, one revision, one tokenizer."""

    model: str
    revision: str
    tokenizer: str

    @classmethod
    def of(cls, info: engine_pb2.WorkerInfo) -> Family:
        """The family a worker belongs to."""
        return cls(info.model, info.revision, info.tokenizer_fingerprint)


class Session:
    """One attached stream. `closed` is set when the fleet has let go of it; `reason` tells why."""

    def __init__(self) -> None:
        self.registered = asyncio.Event()
        self.closed = asyncio.Event()
        self.reason = ""
        self.replaced = False
        self.worker_id = ""
        # Set when the stream's handler has something to do before the next heartbeat is due.
        self.wake = asyncio.Event()
        self.need_snapshot = False

    def close(self, reason: str, *, replaced: bool = False) -> None:
        """Tell the stream's handler to end; the first reason stays."""
        if not self.closed.is_set():
            self.reason, self.replaced = reason, replaced
            self.closed.set()
            self.wake.set()

    def ask_snapshot(self) -> None:
        """The worker's events are not whole: have it begin again."""
        self.need_snapshot = True
        self.wake.set()

    def take_need(self) -> bool:
        """Whether the next answer asks for a snapshot; asked once."""
        need, self.need_snapshot = self.need_snapshot, False
        self.wake.clear()
        return need

    def error(self) -> KvmeshError:
        """What the worker is told: Unavailable = attach again, FailedPrecondition = another has your place."""
        return FailedPrecondition(self.reason) if self.replaced else Unavailable(self.reason)


@dataclass(slots=True, eq=False)
class Worker:
    """An attached worker. Its numbers and blocks are in the fleet's columns and index, under its slot."""

    info: engine_pb2.WorkerInfo
    session: Session
    last_seen: float
    slot: int
    family: Family
    load: engine_pb2.WorkerLoad = field(default_factory=engine_pb2.WorkerLoad)
    breaker: str = "closed"
    # Of KV events: number of the last message that was taken, and whether a snapshot is under way.
    sequence: int = 0
    in_snapshot: bool = False
    asked_at: float = float("-inf")

    @property
    def worker_id(self) -> str:
        return self.info.worker_id

    @property
    def serving(self) -> bool:
        return self.info.state == engine_pb2.WORKER_STATE_SERVING

    def status(self) -> router_pb2.WorkerStatus:
        """What watchers are told."""
        return router_pb2.WorkerStatus(info=self.info, load=self.load, breaker=self.breaker)


class FleetListener(Protocol):
    """Hears of changes, on the event loop, after they took effect. Must not block or change the fleet."""

    def worker_changed(self, worker_id: str) -> None:
        """Registered, replaced, or another state."""

    def worker_loaded(self, worker_id: str) -> None:
        """A new load, or another state of its breaker."""

    def worker_left(self, worker_id: str) -> None:
        """Gone."""

    def worker_replaced(self, worker_id: str) -> None:
        """What was placed on the worker before is lost; `worker_changed` follows."""


class Fleet:
    """Attached workers by id. Not thread-safe: it lives on the event loop."""

    def __init__(self, timeout_s: float, clock: Clock = time.monotonic, *, forget_s: float = 60.0) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._forget_s = forget_s
        self._workers: dict[str, Worker] = {}
        self._retired: dict[str, deque[int]] = {}
        # Worker id → the incarnation that left last.
        self._left: dict[str, int] = {}
        self._families: dict[Family, float] = {}
        self._listeners: list[FleetListener] = []
        self._started = clock()
        self.columns = Columns()
        self.index = PrefixIndex()
        self.epoch = 0
        """Grows with each change of who is there and what it is; loads and blocks do not count."""

    def add_listener(self, listener: FleetListener) -> None:
        """Call `listener` on every change from now on."""
        self._listeners.append(listener)

    # --- what workers say -----------------------------------------------------------------------------------------

    def register(self, info: engine_pb2.WorkerInfo, session: Session) -> Worker:
        """A registration on `session`: the first, or again with another state.

        Raises InvalidArgument for an unusable description and FailedPrecondition for a replaced incarnation, a full
        fleet, or a stream that already speaks for another worker.
        """
        _check_info(info)
        if session.closed.is_set():
            raise FailedPrecondition(f"this stream was ended: {session.reason}")
        if session.worker_id not in ("", info.worker_id):
            raise FailedPrecondition(f"this stream registered {session.worker_id!r} before")
        if info.incarnation in self._retired.get(info.worker_id, ()):
            raise FailedPrecondition(
                f"incarnation {info.incarnation} of {info.worker_id!r} was replaced by a newer one"
            )
        old = self._workers.get(info.worker_id)
        if old is not None and old.session is session and old.info.incarnation != info.incarnation:
            raise FailedPrecondition("an incarnation is constant over a stream")
        if old is None and len(self._workers) >= MAX_WORKERS:
            raise FailedPrecondition(f"the fleet is full ({MAX_WORKERS} workers)")
        session.worker_id = info.worker_id
        session.registered.set()
        self.epoch += 1
        if old is not None and old.session is session:
            old.info, old.family, old.last_seen = info, Family.of(info), self._clock()
            self._tell("worker_changed", info.worker_id)
            return old
        before = self._left.pop(info.worker_id, info.incarnation)
        if old is not None:
            self._replace(old, info)
        elif before != info.incarnation:
            self._retire(info.worker_id, before)
        slot = old.slot if old is not None else self.columns.take()
        # A new stream starts from nothing: events of the time between two streams are lost, so old blocks mislead.
        self.index.drop(slot)
        if old is not None and old.info.incarnation == info.incarnation:
            self.columns.synced[slot] = False
        else:
            self.columns.clear(slot)
        worker = Worker(info, session, self._clock(), slot, Family.of(info))
        if old is not None and old.info.incarnation == info.incarnation:
            worker.load = old.load
        self._workers[info.worker_id] = worker
        log.info(
            "worker attached",
            extra={"worker": info.worker_id, "role": ROLES[info.role], "model": info.model, "address": info.address},
        )
        self._tell("worker_changed", info.worker_id)
        return worker

    def _replace(self, old: Worker, info: engine_pb2.WorkerInfo) -> None:
        if old.info.incarnation != info.incarnation:
            self._retire(old.worker_id, old.info.incarnation)
            old.session.close("a new incarnation of this worker attached", replaced=True)
            self._tell("worker_replaced", old.worker_id)
        else:
            old.session.close("this worker attached again on another stream", replaced=True)

    def _retire(self, worker_id: str, incarnation: int) -> None:
        """Never take this incarnation again: incarnations are random, so which of two is the older only order tells."""
        retired = self._retired.pop(worker_id, None) or deque(maxlen=RETIRED_PER_WORKER)
        retired.append(incarnation)
        self._retired[worker_id] = retired
        while len(self._retired) > MAX_WORKERS:
            del self._retired[next(iter(self._retired))]

    def report(self, session: Session, load: engine_pb2.WorkerLoad) -> Worker:
        """A load report. Raises FailedPrecondition when the stream has not registered or was replaced."""
        worker = self._of(session)
        worker.load = load
        columns, slot = self.columns, worker.slot
        columns.queued[slot], columns.inflight[slot] = load.queued_tokens, load.inflight_tokens
        columns.sequences[slot] = load.running + load.waiting + load.transferring
        columns.free_pages[slot], columns.reported[slot] = load.free_pages, load.total_pages > 0
        self._tell("worker_loaded", worker.worker_id)
        return worker

    def kv_events(self, session: Session, events: router_pb2.KvEvents) -> None:
        """Blocks stored and removed. Where a message is missing, all of the worker's blocks are in doubt: they are
        forgotten, and the session asks for a snapshot.

        Raises InvalidArgument for hashes that are not whole or too many, FailedPrecondition as `report` does.
        """
        worker = self._of(session)
        if len(events.stored_packed) % HASH_BYTES or len(events.removed_packed) % HASH_BYTES:
            raise InvalidArgument(f"packed hashes have {HASH_BYTES} bytes each")
        if len(events.stored_packed) + len(events.removed_packed) > MAX_BLOCKS * HASH_BYTES:
            raise InvalidArgument(f"a message has at most {MAX_BLOCKS} hashes")
        slot, now = worker.slot, self._clock()
        if events.incarnation != worker.info.incarnation:
            self._ask_snapshot(worker, now)
            return
        if events.reset:
            self.columns.synced[slot] = False
            self.index.reset(slot, _hash_limit(worker.info))
            worker.in_snapshot = True
        elif events.sequence != worker.sequence + 1 or not (worker.in_snapshot or self.columns.synced[slot]):
            self.columns.synced[slot] = False
            self.index.drop(slot)
            worker.in_snapshot = False
            self._ask_snapshot(worker, now)
            return
        worker.sequence = events.sequence
        self.columns.events_at[slot] = now
        if events.removed_packed:
            self.index.remove(slot, events.removed_packed)
        if events.stored_packed:
            self.index.store(slot, events.stored_packed)
        if worker.in_snapshot and not events.more:
            worker.in_snapshot = False
            worker.asked_at = float("-inf")
            self.columns.synced[slot] = True
            self.index.show(slot)

    def _ask_snapshot(self, worker: Worker, now: float) -> None:
        if now - worker.asked_at >= SNAPSHOT_AGAIN_S:
            worker.asked_at = now
            worker.session.ask_snapshot()

    def show_breaker(self, worker: Worker, state: str) -> None:
        """Tell watchers another breaker state with the next heartbeat."""
        worker.breaker = state
        self._tell("worker_loaded", worker.worker_id)

    def detach(self, session: Session, reason: str = "the stream ended") -> None:
        """The stream is over: its worker leaves, unless another stream has taken its place. Idempotent."""
        session.close(reason)
        worker = self._workers.get(session.worker_id)
        if worker is not None and worker.session is session:
            self._remove(worker, reason)

    def expire(self) -> list[str]:
        """Remove the workers that were silent for `timeout_s`; returns their ids."""
        self.index.sweep(SWEEP_BITS)
        oldest = self._clock() - self.timeout_s
        silent = [worker for worker in self._workers.values() if worker.last_seen < oldest]
        for worker in silent:
            self._remove(worker, f"silent for {self.timeout_s:g} s")
        return [worker.worker_id for worker in silent]

    def _of(self, session: Session) -> Worker:
        worker = self._workers.get(session.worker_id)
        if worker is None or worker.session is not session:
            raise FailedPrecondition(session.reason or "the first message of a stream is the registration")
        worker.last_seen = self._clock()
        return worker

    def _remove(self, worker: Worker, reason: str) -> None:
        del self._workers[worker.worker_id]
        self.epoch += 1
        self.index.drop(worker.slot)
        self.columns.give_back(worker.slot)
        worker.session.close(reason)
        self._left[worker.worker_id] = worker.info.incarnation
        while len(self._left) > MAX_WORKERS:
            del self._left[next(iter(self._left))]
        self._remember(worker.family)
        log.info("worker left", extra={"worker": worker.worker_id, "reason": reason})
        self._tell("worker_left", worker.worker_id)

    def _remember(self, family: Family) -> None:
        self._families.pop(family, None)
        while len(self._families) >= MAX_FAMILIES_KEPT:
            del self._families[next(iter(self._families))]
        self._families[family] = self._clock()

    # --- what the router asks -------------------------------------------------------------------------------------

    @property
    def workers(self) -> Iterable[Worker]:
        """All attached workers, in order of attachment."""
        return self._workers.values()

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, worker_id: str) -> Worker | None:
        """The attached worker of this id."""
        return self._workers.get(worker_id)

    def known_families(self) -> set[Family]:
        """Families attached now or until a moment ago: their absence is an outage, not a wrong name."""
        oldest = self._clock() - self._forget_s
        recent = {family for family, left_at in self._families.items() if left_at >= oldest}
        return recent | {worker.family for worker in self._workers.values()}

    @property
    def gathering(self) -> bool:
        """True in the first moments of this router, when a model not yet seen may be about to attach."""
        return self._clock() - self._started < self.timeout_s

    def count_by_role(self) -> dict[str, int]:
        """Role name → attached workers, zeros included."""
        counts = dict.fromkeys(ROLES.values(), 0)
        for worker in self._workers.values():
            counts[ROLES[worker.info.role]] += 1
        return counts

    def _tell(self, event: str, worker_id: str) -> None:
        for listener in self._listeners:
            getattr(listener, event)(worker_id)


def _check_info(info: engine_pb2.WorkerInfo) -> None:
    if not 0 < len(info.worker_id.encode()) <= MAX_ID_BYTES:
        raise InvalidArgument(f"worker_id must have 1 to {MAX_ID_BYTES} bytes")
    if info.role not in ROLES:
        raise InvalidArgument("role must be prefill, decode or unified")
    for name in ("model", "address"):
        if not 0 < len(getattr(info, name).encode()) <= MAX_NAME_BYTES:
            raise InvalidArgument(f"{name} must have 1 to {MAX_NAME_BYTES} bytes")
    for name in ("revision", "tokenizer_fingerprint", "kvtransfer_address", "architecture", "dtype"):
        if len(getattr(info, name).encode()) > MAX_NAME_BYTES:
            raise InvalidArgument(f"{name} must have at most {MAX_NAME_BYTES} bytes")
    for name in ("base_seed", "layout_fingerprint", "kv_fingerprint"):
        if len(getattr(info, name)) > MAX_HASH_BYTES:
            raise InvalidArgument(f"{name} must have at most {MAX_HASH_BYTES} bytes")
    if len(info.speculation.encode()) > MAX_NAME_BYTES:
        raise InvalidArgument(f"speculation must have at most {MAX_NAME_BYTES} bytes")
    if len(info.transports) > MAX_TRANSPORTS or any(len(name) > MAX_ID_BYTES for name in info.transports):
        raise InvalidArgument(f"at most {MAX_TRANSPORTS} transports of at most {MAX_ID_BYTES} characters")


def _hash_limit(info: engine_pb2.WorkerInfo) -> int:
    """Hashes that the worker can hold. Each 8th of a chain is told, but chains may part at just such a block."""
    return min(info.total_pages or MAX_BLOCKS, MAX_BLOCKS)
