"""The workers of one model, laid out for placement: made anew when the fleet's epoch changes, read by each decision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np

from kvmesh.proto.v1 import engine_pb2
from services.router.fleet import Family, Worker
from services.router.placement.pairs import KvKind, can_prefill, can_receive, decodes
from services.router.placement.score import Ints
from services.router.placement.sessions import name_hash

T = TypeVar("T")

_STATES = {
    engine_pb2.WORKER_STATE_STARTING: "starting",
    engine_pb2.WORKER_STATE_SERVING: "serving",
    engine_pb2.WORKER_STATE_DRAINING: "draining",
    engine_pb2.WORKER_STATE_STALLED: "stalled",
    engine_pb2.WORKER_STATE_CORDONED: "cordoned",
}


def state_name(info: engine_pb2.WorkerInfo) -> str:
    """For people: `serving`, `cordoned`, …"""
    return _STATES.get(info.state, "unknown")


class Pool:
    """Workers of one model, whatever their state, as they were when the pool was made. Arrays are by position.

    decode, prefill: positions of those that serve and generate, and of those that serve and prefill for others.
    """

    def __init__(self, model: str, workers: Iterable[Worker]) -> None:
        self.model = model
        self.workers = [worker for worker in workers if worker.family.model == model]
        infos = self.infos = [worker.info for worker in self.workers]
        self.position = {info.worker_id: at for at, info in enumerate(infos)}
        self.slots = np.array([worker.slot for worker in self.workers], np.int64)
        self.serving = np.array([worker.serving for worker in self.workers], np.bool_)
        self.decode = np.array([at for at, i in enumerate(infos) if self.serving[at] and decodes(i)], np.int64)
        self.prefill = np.array([at for at, i in enumerate(infos) if self.serving[at] and can_prefill(i)], np.int64)
        self.unified = np.array([i.role == engine_pb2.WORKER_ROLE_UNIFIED for i in infos], np.bool_)
        self.grammars = np.array([bool(i.grammars) for i in infos], np.bool_)
        self.targets = [
            engine_pb2.PrefillTarget(worker_id=i.worker_id, address=i.address, incarnation=i.incarnation) for i in infos
        ]
        self.receives = [can_receive(info) for info in infos]
        self.context = np.array([i.max_model_len or 1 << 62 for i in infos], np.int64)
        self.page = np.array([max(1, i.page_size) for i in infos], np.int64)
        self.names = np.array([name_hash(i.worker_id) for i in infos], np.uint64)
        families = [worker.family for worker in self.workers]
        self.families, self.family = _numbered(families)
        kinds = [KvKind.of(info) for info in infos]
        self.kinds, self.kind = _numbered(kinds)
        # [source kind, target kind]: why not, "" = it fits.
        self.mismatch = [[source.mismatch(target) for target in self.kinds] for source in self.kinds]
        self.fits = np.array([[not why for why in row] for row in self.mismatch], np.bool_)

    def family_number(self, family: Family) -> int:
        """The family's number in `family`; -1 for one that is not here."""
        return self.families.index(family) if family in self.families else -1

    def absence(self) -> str:
        """Why nothing is placed here, in words, where no worker that generates serves."""
        states = Counter(state_name(info) for info in self.infos if decodes(info))
        if not states:
            return f"no worker serves model {self.model!r} now"
        told = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        return f"no worker serves model {self.model!r} now: of those that could, {told}"


def _numbered(values: Sequence[T]) -> tuple[list[T], Ints]:
    """The distinct values, in order of appearance, and the number of each one given."""
    numbers: dict[T, int] = {}
    found = [numbers.setdefault(value, len(numbers)) for value in values]
    return list(numbers), np.array(found, np.int64)
