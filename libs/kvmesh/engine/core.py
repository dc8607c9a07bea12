"""The engine core: one thread that owns scheduler, page pool, prefix cache and runner."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvmesh.engine.events import (
    Admitted,
    CoreEvent,
    Counters,
    Ended,
    EngineRequest,
    FinishReason,
    LoadSnapshot,
    Mode,
    PrefillComputed,
    PromptScored,
    RequestKey,
    StepDone,
    Tokens,
    Usage,
)
from kvmesh.engine.runner import Runner
from kvmesh.errors import InvalidArgument, KvmeshError
from kvmesh.kv.layout import KvLayout
from kvmesh.kv.prefix import CacheEvent
from kvmesh.kv.ring import Doorbell, StepRing

__all__ = [
    "Admitted", "CoreEvent", "Counters", "Ended", "EngineConfig", "EngineCore", "EngineRequest", "FinishReason",
    "LoadSnapshot", "Mode", "PrefillComputed", "PromptScored", "RequestKey", "StepDone", "Tokens", "Usage",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of the core. Sizes in tokens or pages, times in seconds.

    max_batch: choices admitted at once; token_budget (>= max_batch): tokens of a step; chunk_size: prompt tokens of one
    sequence in one step; look_ahead: pages beyond the prompt at admission; max_queue: requests that wait.
    """

    max_model_len: int
    max_batch: int = 32
    token_budget: int = 512
    chunk_size: int = 256
    max_queue: int = 32
    look_ahead: int = 1
    prefix_cache: bool = True
    stall_timeout_s: float = 10.0
    ring_wait_s: float = 1.0
    check_integrity: bool = False
    overload_retry_s: float = 1.0

    def __post_init__(self) -> None:
        if self.token_budget < self.max_batch:
            raise InvalidArgument("token_budget must be at least max_batch")


class EngineCore:
    """Public methods may be called from any thread and do not block; `on_events` is called on the core's thread.

    The caller has already bound the runner to `layout` and its regions. on_events must be quick and must not call
    `stop`. ring, doorbell and notify are needed for PREFILL_ONLY: notify wakes the sidecar (an eventfd write) after a
    step record was published. on_stall(True) is called from a watchdog thread when runnable work makes no progress,
    on_stall(False) when it does again.
    """

    counters: Counters

    def __init__(
        self,
        runner: Runner,
        layout: KvLayout,
        config: EngineConfig,
        on_events: Callable[[list[CoreEvent]], None],
        *,
        doorbell: Doorbell | None = None,
        ring: StepRing | None = None,
        notify: Callable[[], None] | None = None,
        on_stall: Callable[[bool], None] | None = None,
        on_cache_event: Callable[[CacheEvent], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        name: str = "engine",
    ) -> None:
        raise NotImplementedError

    def start(self) -> None:
        """Start the core thread (and the stall watchdog)."""
        raise NotImplementedError

    def check(self, request: EngineRequest) -> None:
        """Refuse early what `submit` would refuse: raises InvalidArgument, TooLarge, Overloaded or Unavailable."""
        raise NotImplementedError

    def submit(self, request: EngineRequest) -> None:
        """Take a request; whatever becomes of it, one Ended follows (also for what `check` would refuse).

        Raises InvalidArgument for a key that is live and Unavailable after `drain` or `stop`; no Ended follows then.
        """
        raise NotImplementedError

    def abort(self, key: RequestKey, choices: Iterable[int] | None = None, error: KvmeshError | None = None) -> None:
        """End a request with `error` (default Cancelled), or single choices silently: no event for them; Ended(ok)
        follows when all choices have ended. Unknown keys and choices are ignored.

        Pages return at once, except: exposed ones at kv_drained (or kv_ready), PREFILL_ONLY ones at release.
        """
        raise NotImplementedError

    def abort_all(self, error: KvmeshError) -> None:
        """Abort every request."""
        raise NotImplementedError

    def expose(self, key: RequestKey, generation: int) -> None:
        """REMOTE: a descriptor with the key's pages is about to leave. Takes effect before it returns: from now on the
        pages cannot go to anyone else until kv_ready or kv_drained of this generation, whatever ends the request.

        Raises Cancelled when the request does not await KV any more: the descriptor must then not leave.
        """
        raise NotImplementedError

    def kv_ready(self, key: RequestKey, generation: int) -> None:
        """Every byte landed and nothing more can: the sequence joins the batch (or, if it ended meanwhile, its pages
        are freed)."""
        raise NotImplementedError

    def kv_draining(self, key: RequestKey, generation: int) -> None:
        """The generation failed or was given up; writes may still land."""
        raise NotImplementedError

    def kv_drained(self, key: RequestKey, generation: int) -> None:
        """Nothing of the generation can land any more. A live request awaits KV again: `expose` a new generation or
        `prefill_here`."""
        raise NotImplementedError

    def prefill_here(self, key: RequestKey) -> None:
        """REMOTE that awaits KV and has no live generation: compute the rest of the prompt locally."""
        raise NotImplementedError

    def start_prefill(self, key: RequestKey, transfer_id: int, first_block: int = 0) -> None:
        """PREFILL_ONLY: compute; step records name `transfer_id` and pages relative to the descriptor's first_block.

        Pages that were cached at admission are not recorded: the service passed them as ready_pages =
        max(0, Admitted.first_block - first_block) to the sidecar.
        """
        raise NotImplementedError

    def release(self, key: RequestKey) -> None:
        """PREFILL_ONLY: no write of this transfer is or will be in flight (done, drained, or never started): pages
        back. If it was computed: Ended(ok); if it still runs: it ends with Cancelled."""
        raise NotImplementedError

    def load(self) -> LoadSnapshot:
        """The latest load; cheap, from any thread."""
        raise NotImplementedError

    def drain(self) -> None:
        """Accept nothing more; running work goes on (`load()` tells when nothing is left)."""
        raise NotImplementedError

    def stop(self, timeout_s: float = 10.0) -> None:
        """End every live request with Unavailable (one Ended each), stop the threads. Idempotent. The runner is not
        closed: its owner does that afterwards."""
        raise NotImplementedError

    def step_once(self) -> bool:
        """Tests and in-process use without the thread: handle commands and deadlines, run at most one step.

        True if a step ran. Must not be mixed with `start`.
        """
        raise NotImplementedError
