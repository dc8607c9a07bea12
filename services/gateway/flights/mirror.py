"""From the frames of a flight to a log of it here.

The stream tells an answer once, in order; but a batch may be in it twice (a write whose answer was lost), a leader may
begin anew (Redis had lost what was written), and a leader after a takeover goes on where the stream stood. What is in
the log already is left out, token by token and character by character.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvmesh.errors import Internal, KvmeshError
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.proto.v1 import router_pb2
from kvmesh.rpc.status import from_frame
from kvmesh.store.flights import FIRST, Frames
from services.gateway.flights.log import FlightLog, Opened

Outcome = Literal["ok", "broken", "failed", "free"]
"""`broken`: no way to go on from these frames. `failed`: the flight has ended with an error that is everybody's.
`free`: its leader has given up, and another may lead."""


@dataclass(slots=True)
class _Told:
    """How far the stream has told a choice."""

    tokens: int = 0
    chars: int = 0


class Mirror:
    """Applies frames to `log`. `place` is that of the last frame read; `broken`: there is no going on from them."""

    def __init__(self, log: FlightLog) -> None:
        self._log = log
        self.place = FIRST
        self.broken = False
        self.read_at = 0.0
        """When the last frame came, on the loop's clock."""
        self._told = [_Told() for _ in range(log.choices)]
        self.token = 0
        """Of the last frame. Redis lets none under a lower one in after it."""
        self.heard = False
        """True once there was any frame."""
        self.error: KvmeshError | None = None
        """Why the leader gave up, or the flight failed."""

    def rewind(self) -> None:
        """Frames are to be read from the first on again."""
        self.token, self.place = 0, FIRST

    def read(self, place: str, given: Frames, now: float) -> bool:
        """Take frames that came after `place`; ignored when they have been read in another way meanwhile.

        True when there is more to them than output.
        """
        if place != self.place:
            return False
        self.place = given.last
        if given.frames:
            self.read_at = now
        outcomes = [self.apply(frame) for frame in given.frames]
        if "failed" in outcomes and self.error is not None:
            self._log.fail(self.error)
        self.broken = self.broken or given.broken or "broken" in outcomes
        return self.broken or self._log.ended or "free" in outcomes

    def apply(self, frame: router_pb2.FlightFrame) -> Outcome:
        """Take one frame."""
        self.heard = True
        if frame.token < self.token:
            return "broken"
        if frame.token > self.token:
            # Another leads now: what the one before gave up for is past.
            self.token, self.error = frame.token, None
        event = frame.WhichOneof("event")
        if event == "opened":
            return self._open(frame.opened)
        if event == "deltas":
            return "ok" if all(self._add(given) for given in frame.deltas.deltas) else "broken"
        if event == "finished":
            if not self._log.complete:
                return "broken"
            self._log.finish(frame.finished)
            return "ok"
        if event == "error":
            error = frame.error
            self.error = from_frame(error.code, error.reason, error.message, error.retryable)
            return "free" if error.retryable else "failed"
        return "broken"

    def _open(self, given: router_pb2.FlightOpened) -> Outcome:
        opened = Opened(
            given.model,
            given.revision,
            given.tokenizer_fingerprint,
            given.seed,
            prompt_tokens=given.prompt_tokens,
            traceparent=given.traceparent,
        )
        if self._log.opened is None:
            self._log.open(opened)
        elif self._log.opened != opened:
            self.error = Internal("a running answer was continued by another model")
            return "broken"
        return "ok"

    def _add(self, given: router_pb2.FlightDelta) -> bool:
        """False when the frame does not join on to what was told before."""
        delta, first = given.delta, given.first_position
        if delta.choice >= len(self._told):
            return False
        told, log = self._told[delta.choice], self._log
        if first == 0:
            # From the beginning: the first frame, or the stream was begun anew.
            told.tokens = told.chars = 0
        elif first < told.tokens and first + len(delta.token_ids) <= told.tokens:
            return True
        elif first != told.tokens:
            return False
        known, known_chars = log.position(delta.choice) - first, log.chars(delta.choice) - told.chars
        told.tokens = first + len(delta.token_ids)
        told.chars += len(delta.text)
        if known < 0:
            return False
        fresh = told.tokens > log.position(delta.choice) or (delta.finish_reason and not log.finish_of(delta.choice))
        if fresh:
            new = pb.Delta(
                choice=delta.choice,
                text=delta.text[max(0, known_chars) :],
                token_ids=delta.token_ids[known:],
                logprobs=delta.logprobs[known:],
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason,
            )
            log.append(new)
        return True
