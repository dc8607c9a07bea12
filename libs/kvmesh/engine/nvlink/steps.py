"""One engine step's share of writing: its claims, launched layer by layer as the engine gets to them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from kvmesh.engine.nvlink.backend import Backend
from kvmesh.engine.nvlink.rows import Claim, Transfer, batch_of
from kvmesh.errors import InvalidArgument
from kvmesh.kv.layout import KvLayout

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a layer of the step is: group by position and name, and the layer's index in it."""

    position: int
    name: str
    index: int


def places_of(layout: KvLayout) -> list[Place]:
    """Step layer l is the l-th layer of the model that has KV."""
    position = {group.name: i for i, group in enumerate(layout.groups)}
    located = [layout.locate(layer) for layer in sorted(x for group in layout.groups for x in group.layers)]
    return [Place(position[group.name], group.name, index) for group, index in located]


class Step:
    """Call `layer(l)` for l = 0, 1, … when the KV of that layer is queued on the engine's compute stream (host memory:
    is in the pages). Each layer once, in order. A step that fails is left; its transfers are then cancelled."""

    def __init__(
        self,
        claims: Sequence[Claim],
        places: Sequence[Place],
        layout: KvLayout,
        backend: Backend,
        lock: AbstractContextManager[object],
        launched: Callable[[list[Transfer], bool], None],
        stop: Callable[[Transfer, str], None],
    ) -> None:
        self._claims = list(claims)
        self._places = places
        self._layout = layout
        self._backend = backend
        self._lock = lock
        self._launched = launched
        self._stop = stop
        self._next = 0
        self._prepared: object = None
        self._prepared_at = 0
        self._live: list[Claim] = []
        for item in claims:
            item.transfer.open_steps += 1

    @property
    def transfers(self) -> list[Transfer]:
        """Those that still write."""
        return [item.transfer for item in self._claims if item.transfer.stopped is None]

    def layer(self, number: int) -> None:
        """Queue the copies of one layer; returns at once. Raises InvalidArgument out of order."""
        with self._lock:
            if number != self._next or number >= len(self._places):
                raise InvalidArgument(f"layer {number} of a step of {len(self._places)}, expected {self._next}")
            self._next += 1
            if number == 0:
                for transfer in self.transfers:
                    if transfer.step not in (None, self):
                        self._stop(transfer, "a step began before the last one's layers were through")
                    transfer.step = self
            live = [item for item in self._claims if item.transfer.stopped is None]
            if live:
                try:
                    self._launch(live, number)
                except Exception as error:
                    # Costs these transfers, not the step of everybody else.
                    log.exception("nvlink: layer %d cannot be launched", number)
                    for item in live:
                        self._stop(item.transfer, f"a launch failed: {error}")
            over = self._next == len(self._places)
            if over:
                for item in self._claims:
                    item.transfer.open_steps -= 1
                    item.transfer.step = None
            self._launched(list(dict.fromkeys(item.transfer for item in live)), over)

    def _launch(self, live: list[Claim], number: int) -> None:
        if self._prepared is None or len(live) != len(self._live):
            launches = [(place.name, 1) for place in self._places[number:]]
            posted = [item.transfer.posted for item in live]
            self._prepared = self._backend.prepare(batch_of(live, self._layout, launches, posted))
            self._prepared_at = number
            self._live = live
        place = self._places[number]
        self._backend.after_compute()
        self._backend.launch(self._prepared, place.position, place.index, 1, number - self._prepared_at)
        for item in live:
            for (name, rank), nbytes in item.nbytes.items():
                if name == place.name:
                    item.transfer.posted[rank] = item.transfer.posted.get(rank, 0) + nbytes
