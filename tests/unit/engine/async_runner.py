"""The scripted runner as a device that runs behind the host: steps are queued, and run when the test says so.

A step runs as early as at its launch or as late as when it is collected: `soon()` decides for each. A late step finds
out who gave pages away that it still writes, an early one who reads before it was collected. What a step continues
with is known to this "device" alone, and its tokens depend on the whole history: a wrong pending token shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvmesh.engine.failures import DeviceFailed, SequencesFailed
from kvmesh.engine.runner import PENDING, Slice, StepBatch, StepResult
from kvmesh.engine.scripted import ScriptedModel, ScriptedRunner


@dataclass(eq=False)
class Queued:
    """A launched step."""

    batch: StepBatch
    on_layer: Callable[[int], None] | None
    ran: bool = False
    result: StepResult | None = None
    error: Exception | None = None


class AsyncScripted(ScriptedRunner):
    """`fail_collect`: errors of the next collects, in order (None: fine); with `silent` such a step never runs.
    `while_waiting` is called at the start of each collect."""

    def __init__(
        self,
        model: ScriptedModel | None = None,
        *,
        before_step: Callable[[StepBatch], None] | None = None,
        soon: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(model)
        self.soon = soon
        self.before_launch = before_step
        self.while_waiting: Callable[[], None] | None = None
        self.fail_collect: list[Exception | None] = []
        self.silent = False
        self.device_lost = False
        self.flights: list[Queued] = []
        self.launched: list[StepBatch] = []
        self.deepest = 0
        self._last: dict[int, int] = {}

    def launch(self, batch: StepBatch, on_layer: Callable[[int], None] | None = None) -> object:
        if self.device_lost:
            raise DeviceFailed("the device fell off the bus")
        if self.before_launch is not None:
            self.before_launch(batch)
        assert batch.slices
        assert len(self.flights) < 2, "more than one step ahead"
        for part in batch.slices:
            known = {part.seq_id for flight in self.flights for part in flight.batch.slices if part.samples}
            assert (PENDING in part.token_ids) == any(s.pending for s in part.samples)
            assert PENDING not in part.token_ids or (len(part.token_ids) == 1 and part.seq_id in known)
        assert not (self.flights and batch.copies), "a copy was scheduled ahead"
        frozen = [
            replace(
                part,
                samples=tuple(replace(s, output_token_ids=tuple(s.output_token_ids)) for s in part.samples),
            )
            for part in batch.slices
        ]
        flight = Queued(replace(batch, slices=frozen), on_layer)
        self.flights.append(flight)
        self.launched.append(flight.batch)
        self.deepest = max(self.deepest, len(self.flights))
        if self.soon():
            self.advance()
        return flight

    def advance(self) -> None:
        """The device runs everything that is queued."""
        for flight in self.flights:
            if not flight.ran:
                self._run(flight)

    def collect(self, flight: object) -> StepResult:
        assert self.flights
        assert self.flights[0] is flight, "flights are collected in the order in which they were launched"
        if self.while_waiting is not None:
            self.while_waiting()
        if self.device_lost:
            raise DeviceFailed("the device fell off the bus")
        queued = self.flights[0]
        planned = self.fail_collect.pop(0) if self.fail_collect else None
        if planned is not None and self.silent:
            queued.ran = True
        if not queued.ran:
            self._run(queued)
        self.flights.pop(0)
        error = planned or queued.error
        if error is not None:
            raise error
        assert queued.result is not None
        return queued.result

    def _run(self, flight: Queued) -> None:
        flight.ran = True
        batch = replace(flight.batch, slices=[self._resolved(part) for part in flight.batch.slices])
        try:
            flight.result = answered = self.execute(batch, flight.on_layer)
        except SequencesFailed as error:
            flight.error, answered = error, error.result
        self._last = {part.seq_id: part.token_ids[0] for part in answered.slices if part.token_ids}

    def _resolved(self, part: Slice) -> Slice:
        if PENDING not in part.token_ids:
            return part
        token = self._last.get(part.seq_id, 0)  # none: it failed, and this is a stray
        (sample,) = part.samples
        assert sample.position == len(sample.prompt_token_ids) + len(sample.output_token_ids) + 1
        output = (*sample.output_token_ids, token)
        tokens = part.token_ids.copy()
        tokens[0] = token
        return replace(part, token_ids=tokens, samples=(replace(sample, output_token_ids=output, pending=False),))
