"""`AsyncRunner` over several ranks on devices: steps are launched ahead on all of them, and sampled on the leader's."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvmesh.engine.failures import DeviceFailed, SequencesFailed
from kvmesh.engine.parallel.backends import AsyncShard, CudaBackend, RankBackend
from kvmesh.engine.parallel.clock import StepClock
from kvmesh.engine.parallel.network import name_interface
from kvmesh.engine.parallel.ranks import RankGroup
from kvmesh.engine.parallel.runner import HELLO_S, LOAD_S, gather_ready, unless_lost
from kvmesh.engine.parallel.wire import Kind, pack_step
from kvmesh.engine.runner import StepBatch, StepResult
from kvmesh.errors import Internal, KvmeshError
from kvmesh.kv.layout import KvLayout
from kvmesh.kv.ring import Doorbell
from kvmesh.layers.parallel import leader_store
from kvmesh.loading.weights import Progress

log = logging.getLogger(__name__)


class AheadRunner:
    """The leader. A step goes to all ranks and is launched on each; the leader's result says that all took part, since
    its last collective needed them.

    A batch that cannot run is refused before it is sent. Whatever fails later ends the group (`ranks.on_lost`): the
    communicator is aborted, so that nobody waits on a device for a rank that is gone, and every launch and collect
    raises DeviceFailed. A rank that does not take part within the time limit is lost too.
    """

    def __init__(self, shard: AsyncShard, ranks: RankGroup, timeout_s: float, store: Any = None) -> None:
        self.info = shard.info
        self.ranks = ranks
        self.stream = shard.stream
        self._shard = shard
        self._timeout_s = timeout_s
        self._page_size = 1
        # Must outlive the group.
        self._store = store
        self._clock = StepClock(timeout_s, self._late)

    @classmethod
    def load(
        cls,
        ranks: RankGroup,
        spec: str,
        dtype: str,
        *,
        first_gpu: int,
        options: Mapping[str, Any],
        timeout_s: float,
        progress: Progress | None = None,
        logs: Mapping[str, str] | None = None,
        backend: RankBackend | None = None,
    ) -> AheadRunner:
        """Load the model's parts in all ranks at the same time, on each host's GPUs from first_gpu on. On any failure
        the ranks are ended.

        options: of `CudaRunner.load`, what JSON can say. timeout_s: what a rank may come late. logs: as in
        `ParallelRunner.load`. backend: what the ranks' program has instead of GPUs. Raises Unavailable where a rank
        ends, and as the loaders do.
        """
        try:
            ranks.assemble()
            if ranks.several_hosts:
                name_interface(ranks.address)
            store, port = leader_store(timeout_s, ranks.address)
            for rank, member in enumerate(ranks.pids, 1):
                log.info("rank %d of %d is process %d", rank, ranks.size, member)
            ranks.setup({
                "model": spec,
                "dtype": dtype,
                "size": ranks.size,
                "port": port,
                "timeout_s": timeout_s,
                "logs": dict(logs or {}),
                "cuda": {"first": first_gpu, "options": dict(options)},
            })  # fmt: skip
            ranks.gather(Kind.HELLO, HELLO_S)
            made = backend or CudaBackend(first_gpu, options, ranks.local)
            group = unless_lost(ranks, lambda: made.group(store, 0, ranks.size, timeout_s))
            ranks.on_lost(lambda reason: group.abort())

            def watched(done: int, total: int) -> None:
                ranks.check()
                if progress is not None:
                    progress(done, total)

            # A loader may gather parts of the model from all ranks.
            shard = unless_lost(ranks, lambda: made.load(spec, dtype, group, watched))
            gather_ready(ranks, shard.info.revision)
            return cls(shard, ranks, timeout_s, store)
        except BaseException:
            ranks.close()
            raise

    def layout(self, page_size: int, num_pages: int) -> KvLayout:
        """See `Runner.layout`; its regions are those of each rank."""
        return self._shard.layout(page_size, num_pages)

    def workspace_bytes(self) -> int:
        """See `CudaRunnerFace`; of each rank."""
        return self._shard.workspace_bytes()

    def bind(self, layout: KvLayout, regions: Mapping[str, memoryview], doorbell: Doorbell) -> None:
        """Refused: pages are in device memory (`bind_cuda`)."""
        raise Internal("ranks on devices are bound with bind_cuda")

    def bind_cuda(self, layout: KvLayout, regions: Mapping[str, Any], doorbell: Any) -> None:
        """See `CudaRunnerFace`: `regions` are the leader's, every other rank makes its own. All bind at the same time:
        they capture graphs with collectives in them."""
        self.ranks.note(Kind.BIND, {"layout": layout.to_dict()})
        self._page_size = layout.page_size
        self._clock.begin(LOAD_S)
        with self._or_lost("while binding"):
            self._shard.bind_cuda(layout, regions, doorbell)
        self.ranks.gather(Kind.BOUND, LOAD_S)
        self._clock.end()
        self.ranks.up()

    def launch(self, batch: StepBatch, on_layer: Callable[[int], None] | None = None) -> object:
        """See `AsyncRunner.launch`."""
        self._check()
        plan = self._shard.prepare(batch)
        body = pack_step(batch, self._page_size, on_layer is not None)
        with self._or_lost(f"in step {batch.step}"):
            # Sent first: what the leader queues may fill its launch queue, which empties only with their help.
            self.ranks.send_step(body, self._timeout_s)
            self._clock.begin()
            return self._shard.launch_prepared(batch, plan, on_layer)

    def collect(self, flight: object) -> StepResult:
        """See `AsyncRunner.collect`."""
        with self._or_lost("in a step"):
            try:
                result = self._shard.collect(flight)
            except SequencesFailed:
                self._clock.end()
                # Not if it is an aborted collective's garbage.
                self._check()
                raise
            self._clock.end()
            self._check()
            return result

    def execute(self, batch: StepBatch, on_layer: Callable[[int], None] | None = None) -> StepResult:
        """See `Runner.execute`."""
        return self.collect(self.launch(batch, on_layer))

    def ring(self, count: int) -> None:
        """Queue rings of the leader's doorbell that belong to no layer."""
        self._shard.ring(count)

    def close(self) -> None:
        """End the ranks, then drop weights, graphs and KV views. Blocks for up to `ranks.STOP_S`."""
        self._clock.close()
        self.ranks.close()
        # Nobody is left to meet in a collective.
        self._shard.tp.abort()
        self._shard.close()

    def _late(self, limit: float) -> None:
        self.ranks.fail(f"a step did not end within {limit:g} s: a rank stands still")

    def _check(self) -> None:
        if self.ranks.lost is not None:
            raise DeviceFailed(self.ranks.lost)

    @contextlib.contextmanager
    def _or_lost(self, where: str) -> Iterator[None]:
        """Whatever fails inside ends the group, but for single sequences."""
        try:
            yield
        except SequencesFailed:
            raise
        except BaseException as error:
            why = error.message if isinstance(error, KvmeshError) else repr(error)
            lost = self.ranks.lost or self.ranks.broken(f"rank 0 failed {where}: {why}").message
            raise DeviceFailed(lost) from error
