"""From the log of a flight to its frames, in batches: what came since the last one is one frame."""

from __future__ import annotations

from kvmesh.errors import KvmeshError
from kvmesh.proto.v1 import inference_pb2 as pb
from kvmesh.proto.v1 import router_pb2
from kvmesh.rpc.status import to_frame
from kvmesh.store.flights import Appended, FlightRef, FlightStore, How
from services.gateway.flights.log import FlightLog, Reader

FRAME_TOKENS = 8192
"""Of a choice in one frame, about: a long answer that somebody begins to follow late is told in several."""

BATCH = 8


class Publisher:
    """Writes `log` under `token`. `begun`: the stream holds already all that the log does now."""

    def __init__(self, store: FlightStore, ref: FlightRef, token: int, log: FlightLog, *, begun: bool) -> None:
        self._store = store
        self._ref = ref
        self._token = token
        self._log = log
        self.reader: Reader = log.reader()
        self.reader.close()
        self._opened = False
        self._pending: list[bytes] = []
        self.begun = begun
        """True once anything is in the stream."""
        if begun:
            self.reader.take()

    def greet(self) -> None:
        """Somebody follows from now on: let there be a frame, even if there is no output yet."""
        if not self._pending and not self.begun:
            self._pending.append(self._frame(deltas=router_pb2.FlightDeltas()))

    async def publish(self) -> Appended | None:
        """Write all that has come. `lost`: not ours any more. None or `unknown`: not now, nothing is lost by it."""
        while True:
            frames = self._pending or self._next()
            if not frames:
                return "ok"
            said = await self._store.append(self._ref, self._token, frames, begun=self.begun)
            self._pending = []
            if said == "ok":
                self.begun = True
            elif said == "gap":
                self.reader.rewind()
                self._opened = self.begun = False
            else:
                self._pending = frames
                return said

    async def finish(self, finished: pb.Finished) -> bool:
        """Write the rest and the end of a whole answer. False when Redis does not take it now."""
        said = await self.publish() if self.begun else "unknown"
        if said == "unknown":
            # Redis has forgotten the flight; or nobody has followed, and the lease was not renewed for as long.
            renewed = await self._store.renew(self._ref, self._token)
            if renewed is None or not renewed.held:
                return renewed is not None
            said = await self.publish()
        if said != "ok":
            return said == "lost"
        frames = [self._frame(finished=finished)]
        return await self._store.end(self._ref, self._token, "finished", frames) is not None

    async def fail(self, error: KvmeshError, how: How, *, followed: bool) -> bool:
        """Write the end without an answer: everybody's (`failed`), or only ours. False when Redis does not take it.

        What is out and not yet written is told before a handover, so that the next leader has less to compute anew;
        nothing is where nobody follows.
        """
        hand_over = how != "failed"
        if not followed and not self.begun:
            return await self._store.end(self._ref, self._token, how) is not None
        if hand_over and await self.publish() == "lost":
            return True
        frame = to_frame(error)
        given = pb.StreamError(
            code=frame.code, reason=frame.reason, message=frame.message, retryable=hand_over or frame.retryable
        )
        frames = [self._frame(error=given)]
        return await self._store.end(self._ref, self._token, how, frames) is not None

    def _next(self) -> list[bytes]:
        frames: list[bytes] = []
        opened = self._log.opened
        if opened is not None and not self._opened:
            self._opened = True
            frames.append(
                self._frame(
                    opened=router_pb2.FlightOpened(
                        model=opened.model,
                        revision=opened.revision,
                        tokenizer_fingerprint=opened.fingerprint,
                        seed=opened.seed,
                        prompt_tokens=opened.prompt_tokens,
                        traceparent=opened.traceparent,
                    )
                )
            )
        while self.reader.behind and len(frames) < BATCH:
            first = [self.reader.position(choice) for choice in range(self._log.choices)]
            deltas = [
                router_pb2.FlightDelta(first_position=first[delta.choice], delta=delta)
                for delta in self.reader.take(FRAME_TOKENS)
            ]
            frames.append(self._frame(deltas=router_pb2.FlightDeltas(deltas=deltas)))
        return frames

    def _frame(self, **event: object) -> bytes:
        return router_pb2.FlightFrame(token=self._token, **event).SerializeToString()  # type: ignore[arg-type]
