"""Captured decode steps, one for each of a ladder of batch sizes. A step runs in the next larger one, padded."""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Sequence

import torch

log = logging.getLogger(__name__)
LOG_EVERY_S = 1.0


def ladder(max_batch: int) -> list[int]:
    """Batch sizes: dense where a step is short, so that padding never costs much. The last is max_batch."""
    sizes = [1, 2, 4, *range(8, 128, 8), *range(128, 257, 32), *range(320, max_batch + 1, 64)]
    return sorted({size for size in sizes if size < max_batch} | {max_batch})


class DecodeGraphs:
    """`replay(bucket)` queues the step of that batch size on the current stream."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sorted(sizes)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def capture(self, step: Callable[[int], None], stream: torch.cuda.Stream) -> None:
        """Capture `step(bucket)` for each size, the largest first: the others find its memory.

        step queues the kernels of a bucket on the current stream and allocates nothing that outlives it. The caller
        has run it once already, so that nothing is compiled here. Raises torch's errors.
        """
        pool = torch.cuda.graph_pool_handle()
        started = told = time.monotonic()
        for number, bucket in enumerate(reversed(self.sizes), 1):
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                step(bucket)
            self._graphs[bucket] = graph
            if time.monotonic() - told >= LOG_EVERY_S:
                told = time.monotonic()
                log.info("captured %d of %d decode graphs", number, len(self.sizes))
        log.info("captured %d decode graphs in %.1f s", len(self.sizes), time.monotonic() - started)

    def bucket(self, rows: int) -> int:
        """The graph that a step of so many decode rows runs in, 0 = none."""
        at = bisect.bisect_left(self.sizes, rows)
        return self.sizes[at] if self._graphs and at < len(self.sizes) else 0

    def replay(self, bucket: int) -> None:
        """Queue it."""
        self._graphs[bucket].replay()

    def close(self) -> None:
        """Drop the graphs. None of them runs."""
        self._graphs.clear()
