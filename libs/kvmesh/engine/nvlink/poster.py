"""The poster: an engine's own writer. Its sidecar says what may be written and when to stop; the engine's steps say
what is ready; the backend moves it.

Threads: messages on the client's loop, steps on the engine's thread, mapping and the ends of transfers on one here.
One lock guards the state; nothing waits for the stream while it is held.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from kvmesh.engine.failures import first_line
from kvmesh.engine.nvlink.backend import Backend, Batch
from kvmesh.engine.nvlink.rows import Claim, Peer, Transfer, batch_of, check_peer, claim, tail_batch, transfer_of
from kvmesh.engine.nvlink.steps import Step, places_of
from kvmesh.errors import InvalidArgument, KvmeshError
from kvmesh.kv.fds import close_fds
from kvmesh.kv.layout import KvLayout
from kvmesh.kv.ring import StepRecord
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.tail import TailBuffer

log = logging.getLogger(__name__)
MIN_SLEEP_S = 20e-6
MAX_SLEEP_S = 1e-3
SLEEP_PART = 1 / 8
# A point in the stream that could not be marked: what was launched may be in flight for as long as the process lives.
UNKNOWN = object()


class NvlinkPoster:
    """See kvmesh.transfer.posting.Poster, and `step`. The engine's regions outlive it (`close`)."""

    transports = ("nvlink",)

    def __init__(self, layout: KvLayout, backend: Backend, tails: Sequence[TailBuffer] = ()) -> None:
        self._layout = layout
        self._tails = tuple(tails)
        self._backend = backend
        self._places = places_of(layout)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tell: Callable[[pb.EngineMessage], None] | None = None
        # Peers' links that a sidecar has yet to hear of: said to the next one.
        self._untold: list[pb.PeerReleased] = []
        self._peers: dict[int, Peer] = {}
        self._mapping: set[int] = set()
        self._transfers: dict[int, Transfer] = {}
        self._jobs: list[Callable[[], None]] = []
        self._waiting: list[tuple[set[int], Callable[[], None]]] = []
        self._epoch = 0
        self._closing = False
        # Called once, from any thread, where the stream has failed: nothing will ever end on it.
        self.on_failed: Callable[[str], None] | None = None
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="kvmesh-nvlink", daemon=True)
        self._thread.start()

    # --- the client's loop ---------------------------------------------------------------------------------------

    def connected(self, tell: Callable[[pb.EngineMessage], None]) -> None:
        """See Poster."""
        self._loop = asyncio.get_running_loop()
        self._tell = tell
        untold, self._untold = self._untold, []
        for released in untold:
            tell(pb.EngineMessage(peer_released=released))

    def take(self, message: pb.SidecarMessage, take_fds: Callable[[int], list[int]]) -> None:
        """See Poster."""
        kind = message.WhichOneof("body")
        if kind == "peer_memory":
            fds = take_fds(len(message.peer_memory.regions) + 1)
            with self._changed:
                self._mapping.add(message.peer_memory.link_id)
                self._job(partial(self._map, message.peer_memory, fds, self._epoch))
        elif kind == "post_transfer":
            self._post(message.post_transfer)
        elif kind == "stop_transfer":
            with self._changed:
                transfer = self._transfers.get(message.stop_transfer.transfer_id)
                if transfer is not None:
                    self._stop(transfer, message.stop_transfer.reason or "stopped")
        elif kind == "release_peer":
            with self._changed:
                self._release(message.release_peer.link_id, message.release_peer.reason)
        else:
            raise InvalidArgument(f"{kind} is no poster's message")

    def pages_ready(self, transfer_id: int, first: int, count: int) -> None:
        """See Poster."""
        with self._changed:
            transfer = self._transfers.get(transfer_id)
            if transfer is not None and count:
                transfer.deferred.append((first, count))
                self._post_deferred(transfer)

    def tail_ready(self, transfer_id: int) -> None:
        """See Poster."""
        with self._changed:
            transfer = self._transfers.get(transfer_id)
            if transfer is not None:
                transfer.deferred.append(None)
                self._post_deferred(transfer)

    def when_drained(self, done: Callable[[], None], transfer_id: int | None = None) -> None:
        """See Poster."""
        with self._lock:
            wanted = {transfer_id} if transfer_id is not None else set(self._transfers)
            wanted &= set(self._transfers)
            if wanted:
                self._waiting.append((wanted, done))
                return
        done()

    def lost(self) -> None:
        """See Poster."""
        with self._changed:
            self._tell = None
            self._epoch += 1
            for transfer in self._transfers.values():
                transfer.orphan = True
                self._stop(transfer, "the sidecar is lost")
            for link_id in list(self._peers):
                self._release(link_id, "the sidecar is lost")

    async def leave(self, timeout_s: float) -> None:
        """See Poster."""
        with self._changed:
            for transfer in self._transfers.values():
                self._stop(transfer, "the engine leaves")
        until = time.monotonic() + timeout_s
        while (self._peers or self._mapping or self._transfers) and time.monotonic() < until:
            with self._changed:
                # Also of a link that comes meanwhile.
                for link_id in self._peers:
                    self._release(link_id, "the engine leaves")
            await asyncio.sleep(0.002)
        # What was said on the other thread is behind this on the loop.
        await asyncio.sleep(0)

    def close(self) -> None:
        """End the thread and the backend; everything is left by then. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(30.0)
        self._backend.close()

    # --- the engine's thread -------------------------------------------------------------------------------------

    def step(self, record: StepRecord) -> Step | None:
        """Begin a step: claim the pages of those entries that are ours (others are the sidecar's). None where none is.

        What cannot be (a page twice, no such page, another number of layers) fails that transfer."""
        with self._changed:
            claims: list[Claim] = []
            for entry in record.entries:
                transfer = self._transfers.get(entry.transfer_id)
                if transfer is None or transfer.stopped is not None:
                    continue
                if record.num_layers != len(self._places):
                    self._stop(transfer, f"a step of {record.num_layers} layers, the model has {len(self._places)}")
                    continue
                found = self._claim(transfer, entry.first_page, entry.num_pages)
                if found is not None:
                    claims.append(found)
            if not claims:
                return None
            return Step(claims, self._places, self._layout, self._backend, self._lock, self._step_launched, self._stop)

    def _step_launched(self, transfers: list[Transfer], over: bool) -> None:
        mark = self._mark() if transfers else None
        for transfer in transfers:
            transfer.mark = mark
        for transfer in transfers:
            self._post_deferred(transfer)
        if over:
            self._changed.notify()

    # --- under the lock ------------------------------------------------------------------------------------------

    def _claim(self, transfer: Transfer, first: int, count: int) -> Claim | None:
        try:
            return claim(transfer, self._layout, self._backend, first, count)
        except KvmeshError as error:
            self._stop(transfer, error.message)
        except Exception as error:
            log.exception("nvlink: pages cannot be claimed")
            self._stop(transfer, f"its pages cannot be claimed: {error}")
        return None

    def _post(self, post: pb.PostTransfer) -> None:
        with self._changed:
            peer = self._peers.get(post.link_id)
            if peer is None or peer.releasing is not None or post.transfer_id in self._transfers:
                self._say(pb.EngineMessage(post_ended=_ended(post.transfer_id, 0, "there is no such link any more")))
                return
            try:
                transfer = transfer_of(post, peer, self._layout, self._tails)
            except KvmeshError as error:
                self._say(pb.EngineMessage(post_ended=_ended(post.transfer_id, 0, error.message)))
                return
            self._transfers[post.transfer_id] = transfer
            if post.request.ready_pages:
                self._post_ready(transfer, 0, post.request.ready_pages)

    def _post_deferred(self, transfer: Transfer) -> None:
        """What became ready while no step of the transfer is under way."""
        while transfer.deferred and transfer.stopped is None and not transfer.open_steps:
            pages = transfer.deferred.pop(0)
            if pages is None:
                self._post_tail(transfer)
            else:
                self._post_ready(transfer, *pages)

    def _post_tail(self, transfer: Transfer) -> None:
        if transfer.tail_claimed or not transfer.tails:
            self._stop(transfer, "its tail was named before" if transfer.tails else "it has no tail")
            return
        transfer.tail_claimed = True
        try:
            batch, nbytes = tail_batch(transfer, self._layout, self._backend)
        except KvmeshError as error:
            self._stop(transfer, error.message)
            return
        transfer.planned += sum(nbytes.values())
        self._launch(transfer, batch, [1], nbytes)

    def _post_ready(self, transfer: Transfer, first: int, count: int) -> None:
        """All layers at once: a launch a group."""
        if transfer.stopped is not None or (found := self._claim(transfer, first, count)) is None:
            return
        launches = [(group.name, group.num_layers) for group in self._layout.groups]
        nbytes: dict[int, int] = {}
        for (name, rank), size in found.nbytes.items():
            nbytes[rank] = nbytes.get(rank, 0) + size * self._layout.group(name).num_layers
        batch = batch_of([found], self._layout, launches, [transfer.posted])
        self._launch(transfer, batch, [layers for _, layers in launches], nbytes)

    def _launch(self, transfer: Transfer, batch: Batch, layers: Sequence[int], nbytes: Mapping[int, int]) -> None:
        """All of a batch at once, a launch a group. What fails costs this transfer alone, which then ends behind what
        was launched of it."""
        try:
            prepared = self._backend.prepare(batch)
            self._backend.after_compute()
            for group, count in enumerate(layers):
                self._backend.launch(prepared, group, 0, count, group)
        except Exception as error:
            log.exception("nvlink: pages that are ready cannot be launched")
            self._stop(transfer, f"a launch failed: {error}")
        else:
            for rank, size in nbytes.items():
                transfer.posted[rank] = transfer.posted.get(rank, 0) + size
        transfer.mark = self._mark()
        self._changed.notify()

    def _mark(self) -> object:
        try:
            return self._backend.mark()
        except Exception as error:
            self._stream_failed("the stream cannot be marked", error)
            return UNKNOWN

    def _stream_failed(self, what: str, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            log.error("nvlink: %s: %s", what, error, exc_info=error)
            if self.on_failed is not None:
                self.on_failed(f"nvlink: {what}: {first_line(error)}")
        self._changed.notify()

    def _stop(self, transfer: Transfer, reason: str) -> None:
        if transfer.stopped is None:
            transfer.stopped = reason
            self._changed.notify()

    def _release_later(self, link_id: int, reason: str) -> None:
        with self._changed:
            self._release(link_id, reason)

    def _release(self, link_id: int, reason: str) -> None:
        peer = self._peers.get(link_id)
        if peer is not None and peer.releasing is None:
            peer.releasing = reason or "released"
            for transfer in self._transfers.values():
                if transfer.peer is peer:
                    self._stop(transfer, peer.releasing)
            self._changed.notify()
        elif peer is None and link_id in self._mapping:
            # Behind its mapping.
            self._job(partial(self._release_later, link_id, reason))

    def _job(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)
        self._changed.notify()

    def _say(self, message: pb.EngineMessage) -> None:
        """From any thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._send, message, self._epoch)

    def _send(self, message: pb.EngineMessage, epoch: int) -> None:
        if self._tell is not None and (epoch == self._epoch or message.WhichOneof("body") == "peer_released"):
            self._tell(message)
        elif message.WhichOneof("body") == "peer_released":
            self._untold.append(message.peer_released)

    # --- the thread here -----------------------------------------------------------------------------------------

    def _map(self, message: pb.PeerMemory, fds: list[int], epoch: int) -> None:
        reason = ""
        try:
            layout, tails = check_peer(message, self._layout)
            mapping = self._backend.open_peer(message.regions, fds, message.counter_bytes)
            with self._changed:
                self._peers[message.link_id] = peer = Peer(message, layout, tails, mapping)
                if epoch != self._epoch:
                    peer.releasing = "the sidecar is lost"
        except KvmeshError as error:
            reason = error.message
        except Exception as error:
            log.exception("a peer's memory cannot be mapped")
            reason = f"{type(error).__name__}: {error}"
        finally:
            close_fds(fds)
            with self._lock:
                self._mapping.discard(message.link_id)
        if reason:
            log.warning("nvlink: memory of %s cannot be mapped: %s", message.engine_id, reason)
        with self._lock:
            if epoch == self._epoch:
                mapped = pb.PeerMapped(link_id=message.link_id, ok=not reason, reason=reason[:500])
                self._say(pb.EngineMessage(peer_mapped=mapped))

    def _run(self) -> None:
        quiet_since = time.monotonic()
        while True:
            with self._changed:
                while not self._jobs and not self._closing and not self._pending():
                    self._changed.wait(60.0)
                    quiet_since = time.monotonic()
                if self._closing and not self._jobs and (self._failed or not self._pending()):
                    return
                jobs, self._jobs = self._jobs, []
            try:
                for job in jobs:
                    job()
                moved = self._collect()
            except Exception:
                log.exception("nvlink: a turn failed")
                time.sleep(0.05)
                continue
            if jobs or moved:
                quiet_since = time.monotonic()
            else:
                idle = time.monotonic() - quiet_since
                time.sleep(min(max(idle * SLEEP_PART, MIN_SLEEP_S), MAX_SLEEP_S))

    def _pending(self) -> bool:
        """Something ends without anybody's telling."""
        return any(t.stopped is not None or t.complete for t in self._transfers.values()) or any(
            peer.releasing is not None for peer in self._peers.values()
        )

    def _collect(self) -> bool:
        """End what is over; True where something was."""
        with self._lock:
            over = [
                transfer
                for transfer in self._transfers.values()
                if (transfer.stopped is not None or transfer.complete) and self._reached(transfer)
            ]
            for transfer in over:
                self._end(transfer)
            busy = {transfer.peer.link_id for transfer in self._transfers.values()}
            free = [p for p in self._peers.values() if p.releasing is not None and p.link_id not in busy]
            for peer in free:
                del self._peers[peer.link_id]
                # Not to be left before it is said.
                self._mapping.add(peer.link_id)
        for peer in free:
            try:
                self._backend.close_peer(peer.mapping)
            except Exception:
                # Nobody may say that it is unmapped: it waits for this process's exit. The others go on.
                log.exception("nvlink: memory of %s cannot be unmapped", peer.message.engine_id)
                with self._lock:
                    self._mapping.discard(peer.link_id)
                continue
            message = peer.message
            released = pb.PeerReleased(
                link_id=peer.link_id,
                engine_id=message.engine_id,
                incarnation=message.incarnation,
                control_address=message.control_address,
            )
            with self._lock:
                self._say(pb.EngineMessage(peer_released=released))
                self._mapping.discard(peer.link_id)
        return bool(over or free)

    def _reached(self, transfer: Transfer) -> bool:
        if transfer.mark is None or transfer.mark is UNKNOWN:
            return transfer.mark is None
        try:
            return self._backend.reached(transfer.mark)
        except Exception as error:
            transfer.mark = UNKNOWN
            self._stream_failed("the stream has failed", error)
            return False

    def _end(self, transfer: Transfer) -> None:
        del self._transfers[transfer.transfer_id]
        if not transfer.orphan:
            ended = _ended(transfer.transfer_id, transfer.total, transfer.stopped or "")
            self._say(pb.EngineMessage(post_ended=ended))
        for waiting in list(self._waiting):
            waiting[0].discard(transfer.transfer_id)
            if not waiting[0]:
                self._waiting.remove(waiting)
                if self._loop is not None:
                    with contextlib.suppress(RuntimeError):
                        self._loop.call_soon_threadsafe(waiting[1])


def _ended(transfer_id: int, nbytes: int, reason: str) -> pb.PostEnded:
    return pb.PostEnded(transfer_id=transfer_id, bytes=nbytes, reason=reason[:500])
