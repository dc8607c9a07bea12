"""The link to one decode or unified worker: its Frames stream, kept open, and the unary calls beside it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import Enum

import grpc
import grpc.aio

from kvmesh.errors import KvmeshError, Overloaded, Unavailable, WorkerLost
from kvmesh.proto.v1 import engine_pb2, engine_pb2_grpc
from kvmesh.rpc.auth import tenant_metadata
from kvmesh.rpc.channel import MeshChannel, cancelling
from kvmesh.rpc.status import from_rpc_error
from kvmesh.rpc.tasks import BackgroundTasks
from kvmesh.telemetry import about, metrics, names
from services.gateway.breaker import Breaker
from services.gateway.demux import Demux, Key
from services.gateway.inbox import Inbox
from services.gateway.silence import SilenceWatch

log = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 5.0
ABORT_TRIES = 3
# A worker that still sends tokens of an attempt this long after its abort never got it.
ABORT_AGAIN_S = 2.0
MAX_REMEMBERED_ABORTS = 4096
BACKOFF_S = (0.1, 2.0)


def _occupancy(load: engine_pb2.WorkerLoad) -> int:
    return load.running + load.waiting + load.transferring


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Seats:
    """How many more requests a worker is expected to take, between two of its reports.

    It starts from one and a half batches (a short queue keeps a worker busy) and learns from refusals.
    """

    def __init__(self, max_batch: int) -> None:
        self.ceiling = max(1, max_batch + max_batch // 2)
        self.taken = 0
        self.promised = 0

    @property
    def free(self) -> int:
        """Seats left when all that was promised comes."""
        return self.ceiling - self.taken - self.promised

    def accepted(self) -> None:
        """A request was taken: it counts until a report shows it."""
        self.taken += 1
        self.ceiling = max(self.ceiling, self.taken)

    def reported(self, occupancy: int) -> None:
        """What the worker says it holds. A refusal may have come when less was known of it: what it holds, it can."""
        self.taken = occupancy
        self.ceiling = max(self.ceiling, occupancy)

    def refused(self) -> None:
        """The worker is full as it stands, with at least one seat: a worker that runs nothing must be asked again."""
        self.ceiling = max(1, self.taken)


class LinkState(Enum):
    """Whether requests can be placed on the link."""

    CONNECTING = "connecting"
    OPEN = "open"
    CLOSED = "closed"


class WorkerLink:
    """One worker incarnation as this gateway sees it.

    `load` is the newest the worker told, in frames or by the router. Losing the stream fails every open attempt with
    WorkerLost: there is no resume, the worker aborts them as well.
    """

    def __init__(
        self,
        info: engine_pb2.WorkerInfo,
        *,
        gateway_id: str,
        open_channel: Callable[[str], MeshChannel],
        tasks: BackgroundTasks,
        silence_s: float,
        on_load: Callable[[WorkerLink], None],
        on_state: Callable[[], None],
    ) -> None:
        self.info = info
        self.load = engine_pb2.WorkerLoad(free_pages=info.total_pages, total_pages=info.total_pages)
        self.state = LinkState.CONNECTING
        self.listed = True
        self.seats = Seats(info.max_batch)
        self.demux = Demux(self._stray)
        self.breaker = Breaker()
        self._gateway_id = gateway_id
        self._channel = open_channel(info.address)
        self._stub = engine_pb2_grpc.DecodeStub(self._channel)
        self._tasks = tasks
        self._silence_s = silence_s
        self._on_load = on_load
        self._on_state = on_state
        self._aborted: OrderedDict[Key, float] = OrderedDict()
        self._opened = asyncio.Event()
        self._trouble = ""
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"WorkerLink({self.info.worker_id}, {self.state.value})"

    def start(self) -> None:
        """Begin to connect."""
        self._task = self._tasks.spawn(self._run(), name=f"frames:{self.info.worker_id}", essential=False)

    @property
    def open(self) -> bool:
        """True while frames flow."""
        return self.state is LinkState.OPEN

    @property
    def accepting(self) -> bool:
        """True when a request may be placed here."""
        return self.open and self.listed and self.info.state == engine_pb2.WORKER_STATE_SERVING

    async def wait_open(self, timeout_s: float) -> bool:
        """Wait until frames flow; False when they do not within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._opened.wait()
        except TimeoutError:
            return False
        return self.open

    # --- requests
    async def submit(
        self, request: engine_pb2.SubmitRequest, inbox: Inbox, *, tenant: str, timeout_s: float
    ) -> engine_pb2.SubmitResponse:
        """Open the attempt and submit it. A failure closes the attempt, and aborts it where its fate is unknown."""
        key = (request.request_id, request.attempt)
        if not self.open:
            raise Unavailable(f"worker {self.info.worker_id} is not connected")
        self.demux.add(key, inbox)
        self.breaker.begun(key)
        try:
            response: engine_pb2.SubmitResponse = await self._stub.Submit(
                request, timeout=max(timeout_s, 0.001), metadata=tenant_metadata(tenant)
            )
        except grpc.aio.AioRpcError as exc:
            error = from_rpc_error(exc)
            unknown = exc.code() not in _REFUSALS
            self.release(key, abort=unknown)
            if isinstance(error, Overloaded):
                self.seats.refused()
            raise error from exc
        except BaseException:
            self.release(key, abort=True)
            raise
        self.seats.accepted()
        return response

    def release(self, key: Key, *, abort: bool) -> None:
        """Close an attempt; with `abort` the worker is told, in the background. Idempotent."""
        was_open = self.demux.remove(key)
        self.breaker.left(key)
        if was_open and abort:
            self.abort(key)
        self._maybe_retire()

    def abort(self, key: Key, choices: Sequence[int] = ()) -> None:
        """Tell the worker to end an attempt, or single choices of it; returns at once."""
        if not choices:
            self._aborted[key] = asyncio.get_running_loop().time()
            self._aborted.move_to_end(key)
            if len(self._aborted) > MAX_REMEMBERED_ABORTS:
                self._aborted.popitem(last=False)
        if self.open:
            with contextlib.suppress(RuntimeError):  # The gateway is closing: the end of the stream aborts everything.
                self._tasks.spawn(self._abort(key, list(choices)), name="abort", essential=False)

    async def _abort(self, key: Key, choices: list[int]) -> None:
        request = engine_pb2.DecodeAbortRequest(
            gateway_id=self._gateway_id, request_id=key[0], attempt=key[1], choices=choices
        )
        for attempt in range(ABORT_TRIES):
            try:
                await self._stub.Abort(request, timeout=ABORT_TIMEOUT_S)
                return
            except grpc.aio.AioRpcError as exc:
                if not self.open:
                    return  # The worker aborts everything of a gateway whose stream has ended.
                told = about.about(key[0])
                log.warning("abort on %s failed: %s", self.info.worker_id, exc.code().name, extra=told)
                await asyncio.sleep(0.05 * 2**attempt)

    def _stray(self, key: Key) -> None:
        """Tokens of an attempt that is not open: normal just after an abort, else the worker missed it."""
        now = asyncio.get_running_loop().time()
        since = self._aborted.get(key)
        if since is None or now - since > ABORT_AGAIN_S:
            self.abort(key)

    # --- the stream
    async def _run(self) -> None:
        backoff = BACKOFF_S[0]
        try:
            while self.listed:
                began = asyncio.get_running_loop().time()
                error = await self._stream()
                self._lost(error)
                if not self.listed:
                    break
                backoff = BACKOFF_S[0] if asyncio.get_running_loop().time() - began > 5.0 else backoff
                await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
                backoff = min(backoff * 2, BACKOFF_S[1])
        finally:
            self.state = LinkState.CLOSED
            self._lost(WorkerLost(f"the link to worker {self.info.worker_id} was closed"))
            await self._channel.close()

    async def _stream(self) -> KvmeshError:
        """One Frames call until it breaks; returns why."""
        expected = 1
        call = self._stub.Frames(engine_pb2.FramesRequest(gateway_id=self._gateway_id))
        watch = SilenceWatch(self._silence_s, call.cancel)
        try:
            with cancelling(call):
                while True:
                    frame = await call.read()
                    watch.heard()
                    if not isinstance(frame, engine_pb2.FramesResponse):
                        return WorkerLost(f"worker {self.info.worker_id} ended its stream")
                    if frame.incarnation != self.info.incarnation:
                        return WorkerLost(f"worker {self.info.worker_id} was restarted")
                    if frame.sequence != expected:
                        return WorkerLost(f"frame {expected} of worker {self.info.worker_id} is missing")
                    expected += 1
                    self._take(frame)
        except asyncio.CancelledError:
            # Reading a call that the watch has cancelled raises this as well.
            if not watch.silent or _being_cancelled():
                raise
            metrics.counter(names.HEARTBEATS_MISSED).labels("worker").inc()
            return WorkerLost(f"worker {self.info.worker_id} was silent for {self._silence_s:g} s")
        except grpc.aio.AioRpcError as exc:
            return WorkerLost(f"the stream of worker {self.info.worker_id} broke ({exc.code().name})")
        finally:
            watch.stop()

    def _take(self, frame: engine_pb2.FramesResponse) -> None:
        if frame.HasField("load"):
            self.load = frame.load
            self.seats.reported(_occupancy(frame.load))
        if self.state is LinkState.CONNECTING:
            self.state = LinkState.OPEN
            self._opened.set()
            self._trouble = ""
            log.info("frames of worker %s at %s are open", self.info.worker_id, self.info.address)
            self._on_state()
        self.demux.feed(frame)
        self._on_load(self)
        self._maybe_retire()

    def _lost(self, error: KvmeshError) -> None:
        was_open = self.state is LinkState.OPEN
        if self.state is not LinkState.CLOSED:
            self.state = LinkState.CONNECTING
        self._opened.clear()
        self._aborted.clear()
        if was_open or error.message != self._trouble:
            level = logging.INFO if self.state is LinkState.CLOSED else logging.WARNING
            log.log(level, "%s; %d request(s) lost", error.message, len(self.demux))
        self._trouble = error.message
        self.demux.lost(lambda: type(error)(error.message))
        if was_open:
            self._on_state()

    # --- end
    def retire(self) -> None:
        """The worker left the fleet: place nothing more, and close once nothing runs here."""
        self.listed = False
        self._maybe_retire()

    def _maybe_retire(self) -> None:
        if not self.listed and not len(self.demux):
            self.close()

    def close(self) -> None:
        """End the stream; open attempts fail. The task of the link ends shortly after."""
        self.listed = False
        if self._task is not None:
            self._task.cancel()


# Statuses with which a worker says that it has NOT taken the request; anything else leaves that open.
_REFUSALS = frozenset(
    {
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
