"""The GPU behind the backend's interface: a side stream, a scatter kernel a launch, counters in mapped host memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvmesh.engine.cuda.lost import leave_to_the_process
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
# Words of 8 bytes (of one byte where rows are not aligned: the largest alone). A few sizes, so that all are compiled
# before they are needed.
BLOCK_WORDS = (512, 2048, 8192)
MAX_BLOCK_WORDS = BLOCK_WORDS[-1]
WORDS_PER_WARP = 512
# Counters that the last block stores at a time.
COUNTERS = 32
# Tables under way, and words of each: five a row. Larger ones, or more, cost an allocation.
STAGING = 8
STAGING_WORDS = 1 << 16
ALIGNED = 16


@dataclass(slots=True, eq=False)
class _Rows:
    """A group's columns on the device: (src, dst, length, dst_stride, src_stride), each from an address on."""

    columns: tuple[int, ...]
    rows: int
    longest: int
    aligned: bool


@dataclass(slots=True, eq=False)
class _Prepared:
    """table: what the addresses are in; values: address of each launch's counter values."""

    table: torch.Tensor
    groups: list[_Rows | None]
    counters: int
    num_counters: int
    values: list[int]


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
        self._kernels: dict[tuple[int, int], Any] = {}
        # Pinned buffers, each with the event behind its last use.
        self._staging: list[tuple[torch.Tensor, object]] = [
            (torch.empty(STAGING_WORDS, dtype=torch.int64, pin_memory=True), None) for _ in range(STAGING)
        ]
        # Fill the allocator, so that a step's table asks the driver for nothing.
        with torch.cuda.device(device), torch.cuda.stream(self.stream):
            tables = [torch.empty(STAGING_WORDS, dtype=torch.int64, device=f"cuda:{device}") for _ in range(STAGING)]
        del tables
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
                stride = np.full(len(rows.src), rows.src_stride, dtype=np.int64)
                columns += [rows.src, rows.dst, rows.length, rows.dst_stride, stride]
        columns += [batch.counters, batch.values.ravel()]
        table = self._upload(columns)
        address = table.data_ptr()
        groups: list[_Rows | None] = []
        for rows in batch.groups:
            if rows is None or not len(rows.src):
                groups.append(None)
                continue
            count = len(rows.src)
            merged = int(np.bitwise_or.reduce(rows.src | rows.dst | rows.length | rows.dst_stride)) | rows.src_stride
            places = tuple(address + 8 * count * number for number in range(5))
            groups.append(_Rows(places, count, int(rows.length.max()), merged % ALIGNED == 0))
            address += 8 * 5 * count
        launches, counters = batch.values.shape
        values = [address + 8 * counters * (1 + number) for number in range(launches)]
        return _Prepared(table, groups, address, counters, values)

    def _upload(self, columns: Sequence[Column]) -> torch.Tensor:
        """Columns, one behind the other, on the device once the side stream gets there. Does not wait for the GPU: a
        new pinned buffer would."""
        size = max(1, sum(len(column) for column in columns))
        self._driver.set_device(self._device)
        number = next((i for i, (_, busy) in enumerate(self._staging) if busy is None or self.reached(busy)), None)
        if number is None or size > STAGING_WORDS:
            number, host = None, torch.empty(size, dtype=torch.int64, pin_memory=True)
        else:
            host = self._staging[number][0][:size]
        np.concatenate(columns, out=host.numpy()[: sum(len(column) for column in columns)])
        with torch.cuda.device(self._device), torch.cuda.stream(self.stream):
            table = host.to(f"cuda:{self._device}", non_blocking=True)
        if number is not None:
            self._staging[number] = (self._staging[number][0], self.stream.record_event())
        return table

    def after_compute(self) -> None:
        """See Backend."""
        self.stream.wait_event(self._compute.record_event())

    def launch(self, prepared: object, group: int, first_layer: int, layers: int, launch: int) -> None:
        """See Backend."""
        assert isinstance(prepared, _Prepared)
        rows = prepared.groups[group]
        columns = rows.columns if rows is not None else (prepared.counters,) * 5
        count = rows.rows if rows is not None else 0
        word = 8 if rows is None or rows.aligned else 1
        block = block_words(rows.longest // word) if rows is not None and word == 8 else MAX_BLOCK_WORDS
        chunks = -(-rows.longest // (block * word)) if rows is not None else 0
        # The same number of warps, whatever the block.
        grid = max(1, min(self._blocks * (MAX_BLOCK_WORDS // block), layers * count * chunks))
        kernel = self._kernel(block, word)
        self._driver.set_device(self._device)
        kernel[grid, 1, 1](
            *columns,
            prepared.counters,
            prepared.values[launch],
            self._ticket.data_ptr(),
            count,
            chunks,
            first_layer,
            layers,
            prepared.num_counters,
            block,
            COUNTERS,
            word,
            stream=self.stream.cuda_stream,
        )

    def _kernel(self, block: int, word: int) -> Any:
        """The compiled kernel: launched by its handle, since going through the compiler's cache costs the engine's
        thread several times what the launch does."""
        found = self._kernels.get((block, word))
        if found is None:
            with torch.cuda.device(self._device):
                column = torch.zeros(1, dtype=torch.int64, device=f"cuda:{self._device}")
                found = scatter.warmup(
                    *[column] * 7,
                    self._ticket,
                    *[1] * 5,
                    BLOCK=block,
                    COUNTERS=COUNTERS,
                    WORD=word,
                    num_warps=min(16, max(1, block // WORDS_PER_WARP)),
                    grid=(1,),
                )
                found._init_handles()
            self._kernels[block, word] = found
        return found

    def mark(self) -> object:
        """See Backend."""
        return self.stream.record_event()

    def reached(self, mark: object) -> bool:
        """See Backend."""
        assert isinstance(mark, torch.cuda.Event)
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def warm(self) -> None:
        """Compile what any step may need, before the first one waits for it."""
        for block in BLOCK_WORDS:
            self._kernel(block, 8)
        self._kernel(MAX_BLOCK_WORDS, 1)
        self._upload([np.zeros(1, dtype=np.int64)])
        self.stream.synchronize()

    def close(self) -> None:
        """See Backend."""
        try:
            self.stream.synchronize()
        except Exception:
            leave_to_the_process(self)
            raise


def block_words(words: int) -> int:
    """Words that a block copies at a time, for rows of at most so many: the largest that they fill."""
    return max((block for block in BLOCK_WORDS if block <= words), default=BLOCK_WORDS[0])
