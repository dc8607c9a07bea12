"""Host memory behind the backend's interface: memfd regions, a thread as the stream. For tests without a GPU."""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kvmesh.engine.nvlink.backend import Batch, PeerMapping
from kvmesh.errors import InvalidArgument
from kvmesh.kv.region import Region
from kvmesh.proto.v1 import kvtransfer_pb2 as pb

log = logging.getLogger(__name__)
WORD = ctypes.c_uint64


def address_of(region: Region) -> int:
    """Where it is mapped; the region has to stay open."""
    return int(region.view().__array_interface__["data"][0])


class HostBackend:
    """regions: by (group, rank). gate: copies wait for it before each launch (tests hold the stream up with it);
    on_launch(group, first_layer) is called on the stream before a launch's first byte moves."""

    memory = "host"
    max_row = 1 << 20

    def __init__(
        self, regions: Mapping[tuple[str, int], Region], on_launch: Callable[[int, int], None] | None = None
    ) -> None:
        self._bases = {key: address_of(region) for key, region in regions.items()}
        self._on_launch = on_launch
        self.gate = threading.Event()
        self.gate.set()
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._launched = 0
        self._done = 0
        self._thread = threading.Thread(target=self._run, name="kvmesh-host-stream", daemon=True)
        self._thread.start()

    def base(self, group: str, rank: int) -> int:
        """See Backend."""
        return self._bases[group, rank]

    def open_peer(self, regions: Sequence[pb.RegionInfo], fds: Sequence[int], counter_bytes: int) -> PeerMapping:
        """See Backend."""
        mapped: list[Region] = []
        try:
            for info, fd in zip(regions, fds, strict=False):
                if info.memory not in ("", self.memory):
                    raise InvalidArgument(f"region {info.group!r} is {info.memory} memory, not host")
                mapped.append(Region.adopt(os.dup(fd), info.nbytes, f"peer-{info.group}"))
            mapped.append(Region.adopt(os.dup(fds[-1]), counter_bytes, "peer-counters"))
        except BaseException:
            for region in mapped:
                region.close()
            raise
        addresses = [address_of(region) for region in mapped]
        return PeerMapping(addresses[:-1], addresses[-1], mapped)

    def close_peer(self, peer: PeerMapping) -> None:
        """See Backend."""
        assert isinstance(peer.handle, list)
        for region in peer.handle:
            region.close()

    def prepare(self, batch: Batch) -> object:
        """See Backend."""
        return batch

    def after_compute(self) -> None:
        """See Backend: the engine writes its pages before it says so."""

    def launch(self, prepared: object, group: int, first_layer: int, layers: int, launch: int) -> None:
        """See Backend."""
        assert isinstance(prepared, Batch)
        batch = prepared
        self._launched += 1
        self._queue.put(lambda: self._copy(batch, group, first_layer, layers, launch))

    def mark(self) -> object:
        """See Backend."""
        return self._launched

    def reached(self, mark: object) -> bool:
        """See Backend."""
        assert isinstance(mark, int)
        return self._done >= mark

    def close(self) -> None:
        """See Backend."""
        self.gate.set()
        self._queue.put(None)
        self._thread.join(30.0)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            self.gate.wait()
            try:
                job()
            except Exception:
                log.exception("a copy failed")
            self._done += 1

    def _copy(self, batch: Batch, group: int, first_layer: int, layers: int, launch: int) -> None:
        if self._on_launch is not None:
            self._on_launch(group, first_layer)
        rows = batch.groups[group]
        if rows is not None:
            for layer in range(first_layer, first_layer + layers):
                src = (rows.src + layer * rows.src_stride).tolist()
                dst = (rows.dst + layer * rows.dst_stride).tolist()
                for there, here, nbytes in zip(dst, src, rows.length.tolist(), strict=True):
                    ctypes.memmove(there, here, nbytes)
        # x86 keeps stores in order; a single aligned store each.
        for address, value in zip(batch.counters.tolist(), np.atleast_1d(batch.values[launch]).tolist(), strict=True):
            WORD.from_address(address).value = value
