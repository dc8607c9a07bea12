"""Who gets a request: kvmesh's own placement code, and the policies it is compared with.

A policy is given each request once and answers with a worker's number. `Mesh` is the production code of
`services.router`, unmodified, under the simulation's clock: workers' reports and KV events go through the outboxes that
workers use. The others are written from what is published of them, and know every end of a request at once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvmesh.engine.worker.attach_events import CacheMirror, Outbox
from kvmesh.kv.hashing import CHAIN_STRIDE
from kvmesh.kv.prefix import CacheEvent
from kvmesh.proto.v1 import engine_pb2, router_pb2
from router.trace import Request
from router.worker import Worker
from services.router.fleet import Fleet, Session
from services.router.placement.placer import Ask, Placer, Rules

MODEL = "simulated"
REPORT_S = 0.2


class Clock:
    """The simulation's time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Policy(Protocol):
    """Chooses workers."""

    reports: bool
    """Whether workers report to it."""

    def choose(self, request: Request) -> int:
        """The worker's number."""

    def ended(self, request: Request, worker: int) -> None:
        """The request is over."""

    def changed(self, worker: int, kind: str, blocks: Sequence[int], depth: int) -> None:
        """The worker's cache has changed."""

    def report(self, worker: Worker) -> None:
        """It is time for the worker's report."""


class _Silent:
    """A policy without reports, by the number of its own requests that are not over."""

    reports = False

    def __init__(self, workers: int, rng: random.Random) -> None:
        self.workers = workers
        self.rng = rng
        self.pending = [0] * workers

    def choose(self, request: Request) -> int:
        worker = self.pick(request)
        self.pending[worker] += 1
        return worker

    def pick(self, request: Request) -> int:
        raise NotImplementedError

    def ended(self, request: Request, worker: int) -> None:
        self.pending[worker] -= 1

    def changed(self, worker: int, kind: str, blocks: Sequence[int], depth: int) -> None: ...

    def report(self, worker: Worker) -> None: ...


class RoundRobin(_Silent):
    """One after the other."""

    def pick(self, request: Request) -> int:
        return request.number % self.workers


class Random(_Silent):
    """Any."""

    def pick(self, request: Request) -> int:
        return self.rng.randrange(self.workers)


class PowerOfTwo(_Silent):
    """Of two at random the one with fewer requests."""

    def pick(self, request: Request) -> int:
        one, other = self.rng.randrange(self.workers), self.rng.randrange(self.workers)
        return other if self.pending[other] < self.pending[one] else one


class CacheAware(_Silent):
    """The cache-aware policy that public routers document.

    A tree per worker of the prompts it was sent. Out of balance, that is where the most and the fewest pending requests
    differ by more than `absolute` and by more than the factor `relative`: the fewest. Else the worker with the longest
    match if that is more than `threshold` of the prompt, and the one with the smallest tree if not. Its trees hold
    more than a run of the simulation, so nothing is evicted from them.
    """

    def __init__(
        self,
        workers: int,
        rng: random.Random,
        *,
        threshold: float = 0.3,
        absolute: int = 64,
        relative: float = 1.5,
        block: int = 64,
    ) -> None:
        super().__init__(workers, rng)
        self.threshold, self.absolute, self.relative, self.block = threshold, absolute, relative, block
        self.sent: dict[int, int] = {}
        self.sizes = np.zeros(workers, np.int64)

    def pick(self, request: Request) -> int:
        least, most = min(self.pending), max(self.pending)
        blocks = request.blocks(request.prompt // self.block)
        if most - least > self.absolute and most > self.relative * least:
            worker = self.pending.index(least)
        else:
            holders, depth = 0, 0
            for block in blocks:
                left = self.sent.get(block, 0) & (holders or -1)
                if not left:
                    break
                holders, depth = left, depth + 1
            if depth * self.block > self.threshold * request.prompt:
                worker = self.rng.choice([at for at in range(self.workers) if holders >> at & 1])
            else:
                worker = int(np.argmin(self.sizes))
        bit = 1 << worker
        for block in blocks:
            mask = self.sent.get(block, 0)
            if not mask & bit:
                self.sent[block] = mask | bit
                self.sizes[worker] += 1
        return worker


class _Replica:
    """One router: its own view of the fleet, its own credit."""

    def __init__(self, workers: int, pages: int, block: int, rules: Rules, clock: Clock, rng: random.Random) -> None:
        self.fleet = Fleet(1e9, clock)
        self.placer = Placer(self.fleet, rules, clock=clock, rng=rng)
        self.sessions = [Session() for _ in range(workers)]
        for number, session in enumerate(self.sessions):
            self.fleet.register(
                engine_pb2.WorkerInfo(
                    worker_id=str(number),
                    incarnation=1,
                    address=f"w{number}:1",
                    role=engine_pb2.WORKER_ROLE_UNIFIED,
                    model=MODEL,
                    page_size=block,
                    state=engine_pb2.WORKER_STATE_SERVING,
                    total_pages=pages,
                ),
                session,
            )


class Mesh:
    """kvmesh's placement in `replicas` routers, among which requests are spread at random; each message from a worker
    to a router is lost with probability `lost`."""

    reports = True

    def __init__(
        self,
        workers: int,
        rng: random.Random,
        *,
        pages: int,
        block: int,
        clock: Clock,
        rules: Rules | None = None,
        replicas: int = 1,
        lost: float = 0.01,
        sessions: bool = True,
    ) -> None:
        self.block, self.lost, self.rng, self.named = block, lost, rng, sessions
        self.mirrors = [CacheMirror() for _ in range(workers)]
        self.replicas = [_Replica(workers, pages, block, rules or Rules(), clock, rng) for _ in range(replicas)]
        self.boxes = [[Outbox(mirror, 1, clock) for _ in range(replicas)] for mirror in self.mirrors]
        self.placed: dict[int, _Replica] = {}
        self.messages = self.dropped = 0

    def choose(self, request: Request) -> int:
        told = request.blocks(request.prompt // self.block)[CHAIN_STRIDE - 1 :: CHAIN_STRIDE]
        ask = Ask(
            MODEL,
            request.prompt,
            ((self.block * CHAIN_STRIDE, b"".join(_hash(block) for block in told)),),
            session=f"s{request.session}" if self.named else "",
        )
        replica = self.rng.choice(self.replicas)
        pair = replica.placer.place(ask)[0]
        replica.placer.take(str(request.number), pair, ask)
        self.placed[request.number] = replica
        return int(pair.decode.worker_id)

    def ended(self, request: Request, worker: int) -> None:
        message = router_pb2.ReportRequest(request_id=str(request.number), decode_worker=str(worker))
        self.placed.pop(request.number).placer.report(message)

    def changed(self, worker: int, kind: str, blocks: Sequence[int], depth: int) -> None:
        told = self.mirrors[worker].apply(CacheEvent(kind, tuple(_hash(block) for block in blocks), b"", depth))
        if told:
            for box in self.boxes[worker]:
                box.changed(told, stored=kind == "stored")

    def report(self, worker: Worker) -> None:
        seen, worker.seen = [str(number) for number in worker.seen], []
        load = engine_pb2.WorkerLoad(
            free_pages=worker.cache.available,
            total_pages=worker.cache.pages,
            running=len(worker.decoding) + len(worker.prompts),
            waiting=len(worker.waiting),
            queued_tokens=worker.queued_tokens,
            inflight_tokens=worker.inflight_tokens,
        )
        for replica, box in zip(self.replicas, self.boxes[worker.number], strict=True):
            session = replica.sessions[worker.number]
            if session.take_need():
                box.resync()
            for events in box.take_kv():
                if self._arrives():
                    replica.fleet.kv_events(session, events)
            if self._arrives():
                replica.fleet.report(session, load)
                replica.placer.credit.seen(str(worker.number), seen)

    def _arrives(self) -> bool:
        self.messages += 1
        lost = self.rng.random() < self.lost
        self.dropped += lost
        return not lost


def _hash(block: int) -> bytes:
    return block.to_bytes(16, "little")
