"""Runs the scheduler's steps: one at a time, or one ahead of the device, and takes in what they computed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kvmesh.engine.events import Counters
from kvmesh.engine.failures import DeviceFailed, SequencesFailed
from kvmesh.engine.flights import Flight, arrived, plan_ahead, take_off
from kvmesh.engine.runner import AsyncRunner, Runner, StepBatch, StepResult
from kvmesh.engine.scheduler import Scheduler
from kvmesh.engine.steprecords import StepMark, StepRecords
from kvmesh.errors import Internal, KvmeshError

_log = logging.getLogger(__name__)


class Steps:
    """On the core's thread. DeviceFailed passes through every method; any other failure ends at its requests.

    ahead: the runner, where it is driven one step ahead. on_landed is called after each step that was in flight.
    """

    def __init__(
        self,
        runner: Runner,
        ahead: AsyncRunner | None,
        scheduler: Scheduler,
        records: StepRecords | None,
        counters: Counters,
        on_landed: Callable[[], None],
    ) -> None:
        self.flight: Flight | None = None
        self._runner = runner
        self._ahead = ahead
        self._scheduler = scheduler
        self._records = records
        self._counters = counters
        self._on_landed = on_landed
        self._landed_at = 0.0

    def plan(self) -> StepBatch | None:
        """The next step: None where none may run, nothing can be computed, or the one in flight must land first."""
        if self._records is not None and self._records.blocked:
            return None
        return self._scheduler.schedule() if self.flight is None else plan_ahead(self._scheduler, self.flight)

    def run(self, batch: StepBatch | None) -> bool:
        """Run the planned step, or launch it and take in the one before. True if anything ran."""
        if self._ahead is not None:
            return self._fly(self._ahead, batch)
        if batch is None:
            return False
        self._execute(batch)
        return True

    def land(self) -> None:
        """Take in the step in flight, if there is one."""
        flight, self.flight = self.flight, None
        if flight is not None:
            self._land(flight)

    def _execute(self, batch: StepBatch) -> None:
        on_layer, mark = self._recorded()

        def run() -> StepResult:
            return self._runner.execute(batch, on_layer) if on_layer is not None else self._runner.execute(batch)

        self._take_in(batch.step, run, mark, time.perf_counter())

    def _recorded(self) -> tuple[Callable[[int], None] | None, StepMark | None]:
        records = self._records
        return (records.on_layer, records.mark) if records is not None else (None, None)

    def _take_in(
        self, step: int, run: Callable[[], StepResult], mark: StepMark | None, started: float
    ) -> KvmeshError | None:
        """Run or await a step and take in what it computed; returns its failure, if it failed as a whole."""
        scheduler, counters = self._scheduler, self._counters
        failure: KvmeshError | None = None
        try:
            result = run()
            elapsed = time.perf_counter() - started
            scheduler.postprocess(result, elapsed)
        except SequencesFailed as error:
            counters.step_errors += 1
            _log.error("sequences failed in step %d: %s", step, error)
            elapsed = time.perf_counter() - started
            scheduler.fail_step(error, error.seq_ids)
            scheduler.postprocess(error.result, elapsed)
        except DeviceFailed:
            raise
        except Exception as error:
            counters.step_errors += 1
            _log.exception("step %d failed", step)
            elapsed = time.perf_counter() - started
            failure = error if isinstance(error, KvmeshError) else Internal(f"step failed: {error!r}")
            scheduler.fail_step(failure)
            if self._records is not None and mark is not None:
                self._records.step_failed(mark)
        counters.steps += 1
        counters.step_seconds += elapsed
        return failure

    # -- one step ahead

    def _fly(self, runner: AsyncRunner, batch: StepBatch | None) -> bool:
        before = self.flight
        flight = self.flight = self._launch(runner, batch) if batch is not None else None
        failure = self._land(before) if before is not None else None
        if flight is not None and (failure is not None or flight.failure is not None):
            self.flight = None
            self._land(flight, failure)
        return before is not None or flight is not None

    def _launch(self, runner: AsyncRunner, batch: StepBatch) -> Flight:
        """A launch that fails is told after the step before it was taken in."""
        on_layer, mark = self._recorded()
        flight = take_off(self._scheduler, batch, mark, time.perf_counter())
        try:
            flight.handle = runner.launch(batch, on_layer) if on_layer is not None else runner.launch(batch)
        except DeviceFailed:
            raise
        except Exception as error:
            _log.exception("step %d cannot be launched", batch.step)
            flight.failure = error if isinstance(error, KvmeshError) else Internal(f"launch failed: {error!r}")
        else:
            if self._records is not None:
                self._records.launched()
        return flight

    def _land(self, flight: Flight, failure: KvmeshError | None = None) -> KvmeshError | None:
        """Wait for a step and take it in, or fail it with `failure`, whatever it computed. Returns its failure."""

        def run() -> StepResult:
            try:
                return self._await(flight, failure)
            finally:
                arrived(self._scheduler, flight)
                if self._records is not None and flight.mark is not None:
                    self._records.landed(flight.mark)

        failed = self._take_in(flight.step, run, flight.mark, max(flight.launched_at, self._landed_at))
        self._landed_at = time.perf_counter()
        self._scheduler.pages.settle()
        self._on_landed()
        return failed

    def _await(self, flight: Flight, failure: KvmeshError | None) -> StepResult:
        assert self._ahead is not None
        if flight.failure is not None:
            raise flight.failure
        if failure is None:
            return self._ahead.collect(flight.handle)
        try:
            self._ahead.collect(flight.handle)
        except DeviceFailed:
            raise
        except Exception as error:
            _log.error("step %d, behind one that failed, failed too: %r", flight.step, error)
        raise failure
