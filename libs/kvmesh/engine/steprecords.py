"""Step records: tells the sidecar, before a step, which pages leave as its layers are done."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from kvmesh.engine.events import Mode, RequestKey
from kvmesh.engine.sequence import Planned
from kvmesh.errors import DataLoss, InvalidArgument
from kvmesh.kv.ring import Doorbell, StepEntry, StepRecord, StepRing

log = logging.getLogger(__name__)
_POLL_S = 0.001


class StepPost(Protocol):
    """A step whose pages this engine writes to their destinations by itself."""

    def layer(self, number: int) -> None:
        """That layer's KV is there, or queued on the compute stream."""


class StepPoster(Protocol):
    """What writes: see kvmesh.engine.nvlink."""

    def step(self, record: StepRecord) -> StepPost | None:
        """Begin a step. None where it has no page of a transfer that goes this way; the sidecar sends the others."""


@dataclass(slots=True, eq=False)
class StepMark:
    """What was recorded of one step: the transfers that are not released yet, and the doorbell's value at its end."""

    keys: set[RequestKey] = field(default_factory=set)
    target: int = 0


class StepRecords:
    """Publishes into the ring and keeps the doorbell's count honest after a failed step.

    A step that was launched rings num_layers times, sooner or later: while one is in flight, the next one's first value
    is counted from what was promised. With none in flight, the doorbell itself is the truth.

    A record names doorbell values that a failed step never reached, but that later steps will reach: a sidecar would
    then send pages that were not computed. So after such a failure no step may run until every transfer of the record
    was released (nothing of it in flight, the sidecar has dropped it); the count is then brought to the record's end.
    """

    def __init__(
        self,
        ring: StepRing,
        doorbell: Doorbell,
        notify: Callable[[], None],
        num_layers: int,
        page_size: int,
        wait_s: float,
        sleep: Callable[[float], None],
        poster: StepPoster | None = None,
    ) -> None:
        self._ring = ring
        self._doorbell = doorbell
        self._notify = notify
        self._num_layers = num_layers
        self._page_size = page_size
        self._polls = max(1, round(wait_s / _POLL_S))
        self._sleep = sleep
        self._poster = poster
        self._post: StepPost | None = None
        self.mark = StepMark()
        self._in_flight: list[StepMark] = []
        self._promised = 0
        self._blocking: set[RequestKey] = set()
        # Where the count must be before the next step, after steps that failed.
        self._due = 0
        self.count = 0

    @property
    def blocked(self) -> bool:
        """No step may run now."""
        return bool(self._blocking)

    def publish(self, plan: Iterable[Planned]) -> bool:
        """Record the pages that the planned step completes. False: the ring stayed full; nothing was recorded.

        A page counts as complete when the step fills it, the last one when the step computes the last token.
        """
        entries: list[StepEntry] = []
        advances = []
        for choice, num_tokens, _ in plan:
            if choice.request.options.mode is not Mode.PREFILL_ONLY:
                continue
            end = choice.computed + choice.ahead + num_tokens
            whole = end == choice.tokens.size
            upto = -(-end // self._page_size) if whole else end // self._page_size
            if upto > choice.sent:
                entries.append(StepEntry(choice.transfer_id, choice.sent - choice.transfer_base, upto - choice.sent))
                advances.append((choice, upto))
        self.mark = StepMark()
        self._post = None
        if not self._in_flight:
            self._promised = self._doorbell.value
        if not entries:
            return True
        first = self._promised + 1
        record = StepRecord(first, self._num_layers, tuple(entries))
        if not self._try_publish(record):
            return False
        if self._poster is not None:
            self._post = self._poster.step(record)
        self.mark = StepMark({choice.request.key for choice, _ in advances}, first + self._num_layers - 1)
        for choice, upto in advances:
            choice.sent = upto
        self.count += 1
        self._notify()
        return True

    @property
    def on_layer(self) -> Callable[[int], None] | None:
        """What the runner calls behind each layer of the published step, None where nobody wants to know."""
        return self._post.layer if self._post is not None else None

    def launched(self) -> None:
        """The step of the last `publish` was launched: its rings will come."""
        self._in_flight.append(self.mark)
        self._promised += self._num_layers

    def landed(self, mark: StepMark) -> None:
        """A launched step is over, however it ended."""
        if mark in self._in_flight:
            self._in_flight.remove(mark)
            self._catch_up()

    def step_failed(self, mark: StepMark) -> None:
        """That step, published and not in flight any more, did not run to its end."""
        self._blocking |= mark.keys
        self._due = max(self._due, mark.target)
        self._catch_up()

    def released(self, key: RequestKey) -> None:
        """The service released this key: the sidecar serves no record of it any more."""
        for mark in (self.mark, *self._in_flight):
            mark.keys.discard(key)
        if key in self._blocking:
            self._blocking.discard(key)
            self._catch_up()

    def _catch_up(self) -> None:
        """Ring what failed steps owe, once no transfer of theirs is left and no step rings by itself."""
        if self._due and not self._blocking and not self._in_flight:
            for _ in range(self._due - self._doorbell.value):
                self._doorbell.ring()
            self._due = 0

    def _try_publish(self, record: StepRecord) -> bool:
        try:
            for _ in range(self._polls):
                if self._ring.publish(record):
                    return True
                self._sleep(_POLL_S)
            return self._ring.publish(record)
        except InvalidArgument:
            return False  # more entries than the ring can ever hold
        except DataLoss as error:
            # The consumer's cursor makes no sense: this engine goes on without sending.
            log.error("no step record can be published: %s", error.message)
            return False
