"""The engine core: one thread that owns scheduler, page pool, prefix cache and runner."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable

from kvmesh.engine.admission import EngineConfig, Limits
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
from kvmesh.engine.failures import DeviceFailed
from kvmesh.engine.handoff import Handoff
from kvmesh.engine.ledger import ExposureLedger
from kvmesh.engine.runner import Runner, StepBatch, as_async
from kvmesh.engine.scheduler import Scheduler
from kvmesh.engine.seqpages import SequencePages
from kvmesh.engine.stall import StallWatch
from kvmesh.engine.steprecords import StepPoster, StepRecords
from kvmesh.engine.steps import Steps
from kvmesh.errors import (
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    KvmeshError,
    Overloaded,
    Unavailable,
)
from kvmesh.kv.layout import KvLayout
from kvmesh.kv.pool import PagePool
from kvmesh.kv.prefix import CacheEvent, PrefixCache
from kvmesh.kv.ring import Doorbell, StepRing

__all__ = [
    "Admitted", "CoreEvent", "Counters", "Ended", "EngineConfig", "EngineCore", "EngineRequest", "FinishReason",
    "LoadSnapshot", "Mode", "PrefillComputed", "PromptScored", "RequestKey", "StepDone", "Tokens", "Usage",
]  # fmt: skip

_log = logging.getLogger(__name__)

Command = Callable[[], None]


class EngineCore:
    """Public methods may be called from any thread and do not block; `on_events` is called on the core's thread.

    The caller has already bound the runner to `layout` and its regions. on_events must be quick, must not raise and
    must not call `stop`. ring, doorbell and notify are needed for PREFILL_ONLY with a sidecar: notify wakes it (an
    eventfd write) after a step record was published; poster writes what goes by nvlink. on_stall(True) is called from a
    watchdog thread when work makes no progress for `stall_timeout_s`, on_stall(False) when it does again. on_failed is
    called once, on the core's thread, after a failure that ended every request: the engine is of no use any more.

    With an AsyncRunner the core is one step ahead of the device: it launches step n + 1 before it collects step n.
    """

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
        poster: StepPoster | None = None,
        on_stall: Callable[[bool], None] | None = None,
        on_failed: Callable[[KvmeshError], None] | None = None,
        on_cache_event: Callable[[CacheEvent], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        name: str = "engine",
    ) -> None:
        self.counters = Counters()
        self.config = config
        self.pool = PagePool(layout.num_pages)
        self.cache = PrefixCache(self.pool, layout.page_size, on_event=on_cache_event) if config.prefix_cache else None
        # Released while a step in flight may be the one that computes them to their end.
        self._early_releases: list[RequestKey] = []
        self._on_events = on_events
        self._on_failed = on_failed
        self._clock = clock
        self._name = name
        info = runner.info
        self._limits = Limits(
            min(config.max_model_len, info.max_model_len),
            config.max_batch,
            layout.page_size,
            layout.num_pages,
            info.vocab_size,
        )
        self._ledger = ExposureLedger()
        pages = SequencePages(self.pool, self.cache, layout.page_size, config.look_ahead, self.counters)
        self.scheduler = Scheduler(pages, config, self._limits, info.eos_token_ids, self.counters, clock, self._ledger)
        self._handoff = Handoff(self.scheduler)
        self._stop_sleep = threading.Event()
        self._records: StepRecords | None = None
        if ring is not None:
            if doorbell is None:
                raise InvalidArgument("a step ring needs its doorbell")
            self._records = StepRecords(
                ring, doorbell, notify or (lambda: None), layout.num_layers, layout.page_size, config.ring_wait_s,
                lambda seconds: void(self._stop_sleep.wait(seconds)), poster,
            )  # fmt: skip
        ahead = as_async(runner) if config.overlap else None
        self._steps = Steps(runner, ahead, self.scheduler, self._records, self.counters, self._landed)
        self._cond = threading.Condition()
        # Guarded by _cond.
        self._inbox: list[Command] = []
        self._live: set[RequestKey] = set()
        self._pending_submits = 0
        self._accepting = True
        self._stopping = False
        self._failure: KvmeshError | None = None

        self._deadlines: list[tuple[float, int, RequestKey, bool]] = []
        self._serial = itertools.count()
        self._thread: threading.Thread | None = None
        self._watch = StallWatch(config.stall_timeout_s, clock, self._dump, on_stall, self.counters)
        self._load = self._measure()

    # -- any thread

    def start(self) -> None:
        """Start the core thread (and the stall watchdog)."""
        if self._thread is not None:
            raise Internal("the engine core is already started")
        self._thread = threading.Thread(target=self._run, name=f"{self._name}-core", daemon=True)
        self._thread.start()
        self._watch.start(f"{self._name}-stall")

    def check(self, request: EngineRequest) -> None:
        """Refuse early what `submit` would refuse: raises InvalidArgument, TooLarge, Overloaded or Unavailable."""
        with self._cond:
            self._check_open()
            pending = self._pending_submits
        self._limits.check(request)
        load = self._load
        if load.waiting + pending >= self.config.max_queue + load.free_slots:
            raise self._overloaded()

    def submit(self, request: EngineRequest) -> None:
        """Take a request; whatever becomes of it, one Ended follows (also for what `check` would refuse).

        Raises InvalidArgument for a key that is live and Unavailable after `drain` or `stop`; no Ended follows then.
        """
        with self._cond:
            self._check_open()
            if request.key in self._live:
                raise InvalidArgument(f"request {request.key.request_id} attempt {request.key.attempt} already runs")
            self._live.add(request.key)
            self._pending_submits += 1
            # In the same critical section, so that `stop` finds every request that was let in.
            self._post(lambda: self._submit(request))

    def abort(self, key: RequestKey, choices: Iterable[int] | None = None, error: KvmeshError | None = None) -> None:
        """End a request with `error` (default Cancelled), or single choices silently: no event for them; Ended(ok)
        follows when all choices have ended. Unknown keys and choices are ignored.

        Pages return at once, except: exposed ones at kv_drained (or kv_ready), PREFILL_ONLY ones at release.
        """
        numbers = None if choices is None else frozenset(choices)
        self._post(lambda: self._abort(key, numbers, error))

    def abort_all(self, error: KvmeshError) -> None:
        """Abort every request."""
        self._post(lambda: self._end_all(error))

    def expose(self, key: RequestKey, generation: int) -> None:
        """REMOTE: a descriptor with the key's pages is about to leave. Takes effect before it returns: from now on the
        pages cannot go to anyone else until kv_ready or kv_drained of this generation, whatever ends the request.

        Raises Cancelled when the request does not await KV any more, FailedPrecondition when another generation is
        out: the descriptor must then not leave.
        """
        self._ledger.grant(key, generation)
        self._post(lambda: self._handoff.exposed(key))

    def kv_ready(self, key: RequestKey, generation: int) -> None:
        """Every byte landed and nothing more can: the sequence joins the batch (or, if it ended meanwhile, its pages
        are freed)."""
        self._post(lambda: self._handoff.kv_ready(key, generation))

    def kv_draining(self, key: RequestKey, generation: int) -> None:
        """The generation failed or was given up; writes may still land."""
        self._post(lambda: self._handoff.kv_draining(key, generation))

    def kv_drained(self, key: RequestKey, generation: int) -> None:
        """Nothing of the generation can land any more. A live request awaits KV again: `expose` a new generation or
        `prefill_here`."""
        self._ledger.drained(key, generation)
        self._post(lambda: self._handoff.kv_drained(key, generation))

    def prefill_here(self, key: RequestKey) -> None:
        """REMOTE that awaits KV: compute the rest of the prompt locally.

        If a generation is still out or draining, its pages are left to it (kv_drained is still due) and the request
        starts over in others, from the queue.
        """
        self._post(lambda: self._handoff.prefill_here(key))

    def start_prefill(self, key: RequestKey, transfer_id: int, first_block: int = 0) -> None:
        """PREFILL_ONLY: compute; step records name `transfer_id` and pages relative to the descriptor's first_block.

        Pages that were cached at admission are not recorded: the service passed them as ready_pages =
        max(0, Admitted.first_block - first_block) to the sidecar.
        """
        self._post(lambda: self._handoff.start_prefill(key, transfer_id, first_block))

    def release(self, key: RequestKey) -> None:
        """PREFILL_ONLY: no write of this transfer is or will be in flight (done, drained, or never started): pages
        back. If it was computed: Ended(ok); if it still runs: it ends with Cancelled."""
        self._post(lambda: self._release(key))

    def load(self) -> LoadSnapshot:
        """The latest load; cheap, from any thread. `waiting` includes requests the core has not looked at yet."""
        return self._load.with_now(self._pending_submits, self._watch.stalled, self._accepting)

    @property
    def failure(self) -> KvmeshError | None:
        """What ended the engine for good, if anything did."""
        return self._failure

    def drain(self) -> None:
        """Accept nothing more; running work goes on (`load()` tells when nothing is left)."""
        with self._cond:
            self._accepting = False

    def stop(self, timeout_s: float = 10.0) -> None:
        """End every live request with Unavailable (one Ended each) and stop the threads. Idempotent.

        Raises Internal if the running step does not end within timeout_s. The runner is not closed here.
        """
        with self._cond:
            self._accepting = False
            self._stopping = True
            self._cond.notify_all()
        self._stop_sleep.set()
        self._watch.stop()
        if self._thread is None:
            self._finish(Unavailable("the engine is stopping"))
        else:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise Internal(f"the engine's step did not end within {timeout_s} s")
        self.scheduler.close()

    # -- core thread

    def step_once(self) -> bool:
        """Tests and in-process use without the thread: handle commands and deadlines, run at most one step.

        True if a step ran, was launched or was collected. Must not be mixed with `start`.
        """
        try:
            return self._turn()
        except DeviceFailed as error:
            _log.error("the device is lost: %s", error.message)
            self._fail(error)
            return False

    def _turn(self) -> bool:
        self._handle_inbox()
        self._expire()
        started = time.perf_counter()
        batch = self._steps.plan()
        self.counters.schedule_seconds += time.perf_counter() - started
        if batch is not None and self._records is not None:
            batch = self._publish(batch)
        self._flush()
        ran = self._steps.run(batch)
        if self.config.check_integrity:
            self.pool.check_integrity()
            if self.cache is not None:
                self.cache.check_integrity()
        self._after_step(ran)
        return ran

    def _run(self) -> None:
        try:
            while True:
                with self._cond:
                    if self._stopping or self._failure is not None:
                        break
                if not self.step_once():
                    self._wait()
            if self._failure is None:
                self._finish(Unavailable("the engine is stopping"))
        except BaseException as error:
            _log.exception("the engine core failed")
            self._fail(error if isinstance(error, KvmeshError) else Internal(f"engine core failed: {error!r}"))

    def _fail(self, failure: KvmeshError) -> None:
        """The engine is of no use any more. What is in flight is left to itself: no page goes to anyone now."""
        self._steps.flight = None
        with self._cond:
            self._accepting = False
            self._failure = failure
        self._watch.fail()
        self._finish(failure)
        if self._on_failed is not None:
            try:
                self._on_failed(failure)
            except Exception:
                _log.exception("on_failed failed")

    def _wait(self) -> None:
        """Sleep until there is a command, a deadline, or the end."""
        with self._cond:
            if self._inbox or self._stopping or self._failure is not None:
                return
            timeout = None
            if self._deadlines:
                timeout = max(0.0, self._deadlines[0][0] - self._clock())
            self._cond.wait(timeout)

    def _post(self, command: Command) -> None:
        with self._cond:
            self._watch.work()
            self._inbox.append(command)
            self._cond.notify_all()

    def _handle_inbox(self) -> None:
        with self._cond:
            commands, self._inbox = self._inbox, []
        handled = 0
        try:
            for command in commands:
                handled += 1
                command()
        except BaseException:
            # The engine ends. What it has not come to is `_finish`'s: those requests have their terminal too.
            with self._cond:
                self._inbox[:0] = commands[handled:]
            raise
        if commands:
            self._watch.progress()

    def _submit(self, request: EngineRequest) -> None:
        with self._cond:
            self._pending_submits -= 1
        try:
            self._limits.check(request)
            if self.scheduler.waiting_requests() >= self.config.max_queue + self.scheduler.free_slots():
                raise self._overloaded()
        except KvmeshError as error:
            self.counters.requests_failed += 1
            self.scheduler.events.append(Ended(request.key, _nothing(request.prompt_len), error))
            return
        self.scheduler.add(request)
        if len(self._deadlines) > 4 * len(self.scheduler.requests) + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[2] in self.scheduler.requests]
            heapq.heapify(self._deadlines)
        for when, first_token in ((request.ttft_deadline, True), (request.total_deadline, False)):
            if when is not None:
                heapq.heappush(self._deadlines, (when, next(self._serial), request.key, first_token))

    def _abort(self, key: RequestKey, numbers: frozenset[int] | None, error: KvmeshError | None) -> None:
        request = self.scheduler.requests.get(key)
        if request is None:
            return
        if numbers is None:
            self.scheduler.end(request, error or Cancelled("aborted"))
        elif request.options.mode is not Mode.PREFILL_ONLY:
            self.scheduler.abort_choices(request, numbers)

    def _release(self, key: RequestKey) -> None:
        request = self.scheduler.requests.get(key) or self.scheduler.lingering.get(key)
        if request is not None and request.root.ahead:
            self._early_releases.append(key)
            return
        self._release_now(key)

    def _release_now(self, key: RequestKey) -> None:
        self._handoff.release(key)
        if self._records is not None:
            self._records.released(key)

    def _expire(self) -> None:
        now = self._clock()
        in_flight = []
        while self._deadlines and self._deadlines[0][0] <= now:
            entry = heapq.heappop(self._deadlines)
            _, _, key, first_token = entry
            request = self.scheduler.requests.get(key)
            if request is None:
                continue
            if not first_token:
                self.scheduler.end(request, DeadlineExceeded("total time limit reached"))
            elif request.waits_for_first_token and request.first_token_in_flight:
                in_flight.append(entry)
            elif request.waits_for_first_token:
                self.scheduler.end(request, DeadlineExceeded("no first token within its time limit"))
        for entry in in_flight:
            heapq.heappush(self._deadlines, entry)

    def _publish(self, batch: StepBatch) -> StepBatch | None:
        """Tell the sidecar what this step fills; with the ring full, those transfers fail and the rest goes on."""
        assert self._records is not None
        if self._records.publish(self.scheduler.plan):
            self.counters.ring_records = self._records.count
            return batch
        self.counters.ring_full += 1
        _log.error("step ring stayed full: its transfers fail")
        gone = [p.choice.request for p in self.scheduler.plan if p.choice.request.options.mode is Mode.PREFILL_ONLY]
        for request in gone:
            self.scheduler.end(request, Unavailable("the sidecar does not take step records"))
        return self.scheduler.drop_from_plan(batch, gone)

    def _landed(self) -> None:
        """A step was collected: now it is known what the releases that came meanwhile find."""
        early, self._early_releases = self._early_releases, []
        for key in early:
            self._release_now(key)

    def _after_step(self, ran: bool) -> None:
        if ran:
            self._watch.progress()
        load = self._measure()
        if ran or load != self._load:
            self._load = load
            self.scheduler.events.append(StepDone(self.load()))
        # What waits for room that others hold while their KV travels waits for the peer, which has limits of its own.
        if self._steps.flight is None and not load.running and (not load.waiting or load.transferring):
            with self._cond:
                if not self._inbox:
                    self._watch.idle()
        self._flush()

    def _measure(self) -> LoadSnapshot:
        return self.scheduler.measure(self.counters.steps)

    def _flush(self) -> None:
        events = self.scheduler.events
        if not events:
            return
        self.scheduler.events = []
        ended = [event.key for event in events if isinstance(event, Ended)]
        if ended:
            with self._cond:
                self._live.difference_update(ended)
        try:
            self._on_events(events)
        except Exception:
            _log.exception("on_events failed")

    def _end_all(self, error: KvmeshError) -> None:
        for request in list(self.scheduler.requests.values()):
            self.scheduler.end(request, error)

    def _finish(self, error: KvmeshError) -> None:
        """End whatever lives, commands not handled yet included; what a step in flight computed is told first."""
        try:
            try:
                self._steps.land()
            except DeviceFailed as failed:
                error = failed
            self._handle_inbox()
            self._end_all(error)
        except Exception:
            _log.exception("ending requests failed")
            self._end_bluntly(error)
        self._load = self._measure()
        self._flush()

    def _end_bluntly(self, error: KvmeshError) -> None:
        """One Ended for each request that has none, where ending them in order has failed. Their pages are lost."""
        scheduler = self.scheduler
        told = {event.key for event in scheduler.events if isinstance(event, Ended)}
        with self._cond:
            live = [key for key in self._live if key not in told]
        for key in live:
            request = scheduler.requests.pop(key, None)
            usage = _nothing(0)
            if request is not None:
                request.ended = True
                usage = request.usage(self._clock())
            scheduler.events.append(Ended(key, usage, error))

    def _check_open(self) -> None:
        if self._failure is not None:
            raise Unavailable(f"the engine has failed: {self._failure.message}")
        if not self._accepting:
            raise Unavailable("the engine does not accept requests any more")

    def _overloaded(self) -> Overloaded:
        return Overloaded("the engine's queue is full", retry_after=self.config.overload_retry_s)

    def _dump(self) -> str:
        return self.scheduler.describe()


def _nothing(prompt_tokens: int) -> Usage:
    """Of a request that was never admitted."""
    return Usage(prompt_tokens, 0, 0, 0.0, 0.0, 0.0, 0)


def void(_: object) -> None:
    """Drop a result."""
