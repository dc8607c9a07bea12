"""The GPU behind the backend's interface: a side stream, a scatter kernel a launch, counters in mapped host memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvmesh.engine.nvlink.backend import Batch, Column, PeerMapping
from kvmesh.engine.nvlink.cuda_region import CudaRegion, PeerRegion
from kvmesh.engine.nvlink.driver import load
from kvmesh.engine.nvlink.host import address_of
from kvmesh.engine.nvlink.kernel import scatter
from kvmesh.errors import FailedPrecondition, InvalidArgument
from kvmesh.kv.region import Region
from kvmesh.proto.v1 import kvtransfer_pb2 as pb

# Half of an H200's multiprocessors, 64 KiB in flight each: within 2 % of what all of them reach, the rest computes.
BLOCKS = 66
MAX_BLOCK_WORDS = 8192
WORDS_PER_WARP = 512
MIN_EXACT_WORDS = 512
ALIGNED = 16


@dataclass(slots=True, eq=False)
class _Rows:
    """Columns of a group on the device (src, dst, length, dst_stride), rows, bytes of the longest, whether all is
    aligned."""

    columns: list[torch.Tensor]
    rows: int
    longest: int
    aligned: bool
    src_stride: int


@dataclass(slots=True, eq=False)
class _Prepared:
    groups: list[_Rows | None]
    counters: torch.Tensor
    # One for each launch.
    values: list[torch.Tensor]


@dataclass(slots=True, eq=False)
class _Mapped:
    regions: list[PeerRegion]
    counters: Region
    registered: int


class CudaBackend:
    """regions: by (group, rank), all on `device`. compute: the stream on which the engine queues its layers."""

    memory = "cuda"
    max_row = MAX_BLOCK_WORDS * 8

    def __init__(
        self,
        regions: Mapping[tuple[str, int], CudaRegion],
        device: int,
        *,
        compute: torch.cuda.Stream | None = None,
        blocks: int = BLOCKS,
    ) -> None:
        self._driver = load()
        self._device = device
        self._blocks = blocks
        self._bases = {key: region.address for key, region in regions.items()}
        self._compute = compute if compute is not None else torch.cuda.default_stream(device)
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ticket = torch.zeros(1, dtype=torch.int32, device=f"cuda:{device}")
        torch.cuda.synchronize(device)

    def base(self, group: str, rank: int) -> int:
        """See Backend."""
        return self._bases[group, rank]

    def open_peer(self, regions: Sequence[pb.RegionInfo], fds: Sequence[int], counter_bytes: int) -> PeerMapping:
        """See Backend."""
        self._driver.set_device(self._device)
        mapped: list[PeerRegion] = []
        counters: Region | None = None
        try:
            for info, fd in zip(regions, fds, strict=False):
                if info.memory != self.memory:
                    raise InvalidArgument(f"region {info.group!r} is {info.memory or 'host'} memory, not cuda")
                self._check_access(info.device)
                mapped.append(PeerRegion(fd, info.nbytes, self._device))
            counters = Region.adopt(os.dup(fds[-1]), counter_bytes, "peer-counters")
            registered = address_of(counters)
            pointer = self._driver.register_host(registered, counter_bytes)
        except BaseException:
            for region in mapped:
                region.close()
            if counters is not None:
                counters.close()
            raise
        return PeerMapping([region.address for region in mapped], pointer, _Mapped(mapped, counters, registered))

    def _check_access(self, uuid: str) -> None:
        """Raises FailedPrecondition where that GPU is seen here and our GPU cannot reach it."""
        for peer in range(self._driver.device_count()):
            if peer == self._device or self._driver.device_uuid(peer) != uuid:
                continue
            if not self._driver.can_access_peer(self._device, peer):
                raise FailedPrecondition(f"no peer access from this GPU to {uuid}")

    def close_peer(self, peer: PeerMapping) -> None:
        """See Backend."""
        assert isinstance(peer.handle, _Mapped)
        self._driver.set_device(self._device)
        self._driver.unregister_host(peer.handle.registered)
        peer.handle.counters.close()
        for region in peer.handle.regions:
            region.close()

    def prepare(self, batch: Batch) -> object:
        """See Backend. One upload on the side stream for everything."""
        columns: list[Column] = []
        for rows in batch.groups:
            if rows is not None:
                columns += [rows.src, rows.dst, rows.length, rows.dst_stride]
        columns += [batch.counters, batch.values.ravel()]
        sizes = [len(column) for column in columns]
        host = torch.empty(max(1, sum(sizes)), dtype=torch.int64, pin_memory=True)
        np.concatenate(columns, out=host.numpy()[: sum(sizes)])
        with torch.cuda.device(self._device), torch.cuda.stream(self.stream):
            table = host.to(f"cuda:{self._device}", non_blocking=True)
        at = 0
        groups: list[_Rows | None] = []
        for rows in batch.groups:
            if rows is None or not len(rows.src):
                groups.append(None)
                continue
            count = len(rows.src)
            merged = int(np.bitwise_or.reduce(rows.src | rows.dst | rows.length | rows.dst_stride)) | rows.src_stride
            groups.append(
                _Rows(
                    list(table[at : at + 4 * count].view(4, count).unbind(0)),
                    count,
                    int(rows.length.max()),
                    merged % ALIGNED == 0,
                    rows.src_stride,
                )
            )
            at += 4 * count
        counters = table[at : at + len(batch.counters)]
        at += len(batch.counters)
        values = table[at : at + batch.values.size].reshape(batch.values.shape)
        return _Prepared(groups, counters, list(values.unbind(0)))

    def after_compute(self) -> None:
        """See Backend."""
        self.stream.wait_event(self._compute.record_event())

    def launch(self, prepared: object, group: int, first_layer: int, layers: int, launch: int) -> None:
        """See Backend."""
        assert isinstance(prepared, _Prepared)
        rows = prepared.groups[group]
        columns, count, longest, aligned, stride = [prepared.counters] * 4, 0, 0, True, 0
        if rows is not None:
            columns, count, longest = rows.columns, rows.rows, rows.longest
            aligned, stride = rows.aligned, rows.src_stride
        word = 8 if aligned else 1
        block = block_words(longest // word)
        chunks = -(-longest // (block * word))
        # The same number of warps, whatever the block.
        grid = max(1, min(self._blocks * (MAX_BLOCK_WORDS // block), layers * count * chunks))
        counters = len(prepared.counters)
        with torch.cuda.device(self._device), torch.cuda.stream(self.stream):
            kernel: Any = scatter[(grid,)]
            kernel(
                *columns,
                count,
                chunks,
                first_layer,
                layers,
                stride,
                prepared.counters,
                prepared.values[launch],
                counters,
                self._ticket,
                BLOCK=block,
                COUNTERS=1 << max(0, (counters - 1)).bit_length(),
                WORD=word,
                num_warps=min(16, max(1, block // WORDS_PER_WARP)),
            )

    def mark(self) -> object:
        """See Backend."""
        return self.stream.record_event()

    def reached(self, mark: object) -> bool:
        """See Backend."""
        assert isinstance(mark, torch.cuda.Event)
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def warm(self, page_bytes: int) -> None:
        """Compile for pages of that size before the first step needs it: a copy of nothing."""
        rows = min(page_bytes, self.max_row)
        empty = np.zeros(0, dtype=np.int64)
        batch = Batch([None], empty, np.zeros((1, 0), dtype=np.int64))
        prepared = self.prepare(batch)
        assert isinstance(prepared, _Prepared)
        column = torch.zeros(1, dtype=torch.int64, device=f"cuda:{self._device}")
        prepared.groups = [_Rows([column] * 4, 1, rows, rows % ALIGNED == 0, 0)]
        self.launch(prepared, 0, 0, 0, 0)
        self.stream.synchronize()

    def close(self) -> None:
        """See Backend."""
        self.stream.synchronize()


def block_words(words: int) -> int:
    """Words that a block copies at a time: a power of two that divides the rows, where that is not too small."""
    exact = words & -words
    if exact < MIN_EXACT_WORDS:
        exact = max(256, 1 << max(1, words).bit_length() - 1)
    return min(MAX_BLOCK_WORDS, exact)
