"""`Runner` over several ranks: the leader's shard here, the others in their processes."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from kvmesh.engine.parallel.ranks import RankGroup
from kvmesh.engine.parallel.wire import Kind, pack_step
from kvmesh.engine.runner import StepBatch, StepResult
from kvmesh.engine.torch_runner import TorchRunner
from kvmesh.errors import Internal, KvmeshError, Unavailable
from kvmesh.kv.layout import KvLayout
from kvmesh.kv.ring import Doorbell
from kvmesh.layers.parallel import GlooParallel, leader_store
from kvmesh.loading.source import open_checkpoint, resolve
from kvmesh.loading.weights import Progress, torch_dtype
from kvmesh.models.registry import choose_backend

log = logging.getLogger(__name__)
T = TypeVar("T")

# For a process that imports torch, and for one that reads its weights from a slow disk. A rank that ends is noticed at
# once in any case.
HELLO_S = 300.0
LOAD_S = 1800.0


class ParallelRunner:
    """`Runner` of the leader. Each step is sent to all ranks, computed by all, sampled here.

    A batch that cannot run is refused before it is sent, and the group goes on. Whatever fails later leaves ranks at
    different places: the group is then lost (`ranks.on_lost`), and every further step raises Unavailable.
    """

    def __init__(self, shard: TorchRunner, ranks: RankGroup, timeout_s: float, store: Any = None) -> None:
        self.info = shard.info
        self.ranks = ranks
        self._shard = shard
        self._timeout_s = timeout_s
        self._page_size = 1
        # Gloo connects lazily in places: it must outlive the group.
        self._store = store

    @classmethod
    def load(
        cls,
        ranks: RankGroup,
        spec: str,
        dtype: str,
        *,
        threads: int,
        timeout_s: float,
        progress: Progress | None = None,
        logs: Mapping[str, str] | None = None,
    ) -> ParallelRunner:
        """Load the model's parts, in all ranks at the same time. On any failure the ranks are ended.

        threads: of each rank. timeout_s: what a rank may come late to a collective. logs: service, instance, level and
        fmt of `kvmesh.telemetry.setup_logs`. Raises Unavailable where a rank ends, and as `TorchRunner.load`.
        """
        try:
            return cls._load(ranks, spec, dtype, threads, timeout_s, progress, logs or {})
        except BaseException:
            ranks.close()
            raise

    @classmethod
    def _load(
        cls,
        ranks: RankGroup,
        spec: str,
        dtype: str,
        threads: int,
        timeout_s: float,
        progress: Progress | None,
        logs: Mapping[str, str],
    ) -> ParallelRunner:
        checkpoint = open_checkpoint(resolve(spec))
        try:
            # Here and not in each rank: one that chose otherwise would not fit in the collectives.
            backend = choose_backend(checkpoint.config, torch_dtype(dtype))
        finally:
            checkpoint.close()
        ranks.assemble()
        store, port = leader_store(timeout_s, ranks.address)
        setup = {
            "model": spec,
            "dtype": dtype,
            "threads": threads,
            "size": ranks.size,
            "port": port,
            "backend": backend,
        }
        for rank, member in enumerate(ranks.pids, 1):
            log.info("rank %d of %d is process %d", rank, ranks.size, member)
        ranks.setup(setup | {"timeout_s": timeout_s, "logs": dict(logs)})
        ranks.gather(Kind.HELLO, HELLO_S)
        group = unless_lost(ranks, lambda: GlooParallel(store, 0, ranks.size, timeout_s, address=ranks.address))

        def watched(done: int, total: int) -> None:
            # Between two tensors: no reason to read the rest of the weights for ranks that are gone.
            ranks.check()
            if progress is not None:
                progress(done, total)

        shard = TorchRunner.load(spec, dtype, threads, watched, backend, group)
        gather_ready(ranks, shard.info.revision)
        return cls(shard, ranks, timeout_s, store)

    def layout(self, page_size: int, num_pages: int) -> KvLayout:
        """See `Runner.layout`; its regions are those of each rank."""
        return self._shard.layout(page_size, num_pages)

    def bind(self, layout: KvLayout, regions: Mapping[str, memoryview], doorbell: Doorbell) -> None:
        """See `Runner.bind`: `regions` are the leader's, every other rank makes its own."""
        self._shard.bind(layout, regions, doorbell)
        self._page_size = layout.page_size
        self.ranks.note(Kind.BIND, {"layout": layout.to_dict()})
        self.ranks.gather(Kind.BOUND, self._timeout_s)
        self.ranks.up()

    def execute(self, batch: StepBatch, on_layer: Callable[[int], None] | None = None) -> StepResult:
        """See `Runner.execute`."""
        ranks, shard = self.ranks, self._shard
        ranks.check()
        plan = shard.prepare(batch)
        body = pack_step(batch, self._page_size)
        ranks.send(Kind.STEP, body)
        try:
            step = shard.compute(batch, plan, on_layer)
        except BaseException as error:
            reason = error.message if isinstance(error, KvmeshError) else repr(error)
            raise ranks.broken(f"rank 0 failed in step {batch.step}: {reason}") from error
        ranks.gather(Kind.DONE, self._timeout_s)
        return shard.sample(batch, step)

    def close(self) -> None:
        """End the ranks, then drop weights and KV views. Blocks for up to `ranks.STOP_S`."""
        self.ranks.close()
        self._shard.close()


def gather_ready(ranks: RankGroup, revision: str) -> None:
    """Wait until all ranks have loaded. Raises Unavailable, and Internal where one loaded something else."""
    for rank, frame in enumerate(ranks.gather(Kind.READY, LOAD_S), 1):
        if (theirs := frame.note().get("revision")) != revision:
            raise Internal(f"rank {rank} loaded revision {theirs}, the leader {revision}")


def unless_lost(ranks: RankGroup, work: Callable[[], T]) -> T:
    """What `work` returns or raises; Unavailable at once when a rank is lost meanwhile, which `work` itself would only
    see at its time limit. It is then left behind in its thread."""
    ended: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            ended.put((work(), None))
        except Unavailable as error:
            ended.put((None, ranks.broken(error.message)))
        except BaseException as error:
            ended.put((None, error))

    ranks.on_lost(lambda reason: ended.put((None, Unavailable(reason))))
    threading.Thread(target=run, name="ranks-meet", daemon=True).start()
    value, error = ended.get()
    if error is not None:
        raise error
    return value  # type: ignore[return-value]
