"""The destination's end of a verbs link: it posts receives, reads the mailbox, gives credits back, and fences."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Sequence

from kvmesh.errors import DataLoss, KvmeshError, Unavailable
from kvmesh.transfer.transports.base import Arrival, Expected, GrantedPages, Inbound
from kvmesh.transfer.transports.verbs.credits import CREDIT_WORDS, ReceiveCredits
from kvmesh.transfer.transports.verbs.device import Device, Memory
from kvmesh.transfer.transports.verbs.mailbox import Mailbox
from kvmesh.transfer.transports.verbs.qp import KIND_RECEIVE, KIND_WORD, CompletionQueue, Done, QueuePair, Remote

log = logging.getLogger(__name__)
POLL_BATCH = 64
DRAIN_STEP_S = 0.001


class VerbsInbound(Inbound):
    """Made with its queue pairs in INIT and all receives posted, before the writer knows of it. Methods of the
    interface are the loop's; `progress` may be another thread's."""

    def __init__(self, device: Device, expected: Expected) -> None:
        options = device.options
        self.expected = expected
        self._device = device
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._arrivals: list[Arrival] = []
        self._credits = [ReceiveCredits(options.receives) for _ in range(options.qps)]
        self._sequence = 0
        self._fault = ""
        self._ended = ""
        self._open = True
        self._reading = False
        self._ready_told = False
        self.pairs: list[QueuePair] = []
        self.mailbox = Mailbox(options.qps, options.receives)
        self.mail: Memory | None = None
        self.queue: CompletionQueue | None = None
        try:
            self.mail = device.register(self.mailbox.address, self.mailbox.nbytes)
            self.queue, self.pairs = make_pairs(
                device, self.mailbox, self.mail, options.qps, send_depth=CREDIT_WORDS, receive_depth=options.receives
            )
        except BaseException:
            self.destroy()
            raise

    def connect(self, remotes: Sequence[Remote]) -> None:
        """Let the writer's queue pairs in. Raises Unavailable."""
        for pair, remote in zip(self.pairs, remotes, strict=True):
            pair.connect(remote)

    def begin(self) -> None:
        """Take completions by the loop, whenever the channel has an event."""
        assert self.queue is not None
        self._reading = True
        self._loop.add_reader(self.queue.fd, self._readable)
        # What came before the reader.
        self._readable()

    # --- the interface -------------------------------------------------------------------------------------------

    def grant(self, immediate: int, pages: GrantedPages) -> None:
        """The writer's device stores by itself: what it may reach is what is registered."""

    def revoke(self, immediate: int) -> None:
        """See `grant`."""

    def poll(self) -> list[Arrival]:
        # No need to be told of what is taken here.
        self._ready_told = True
        self.progress()
        with self._lock:
            self._ready_told = False
            arrivals, self._arrivals = self._arrivals, []
        return arrivals

    async def fence(self) -> None:
        self._stop_reading()
        with self._lock:
            if not self._ended:
                self._ended = "fenced"
            for pair in self.pairs:
                pair.fail()
        # Their receives are flushed; a destroyed queue pair is fenced whether that is seen or not.
        until = self._loop.time() + self._device.options.drain_timeout_s
        left = sum(credits.receives - credits.missing for credits in self._credits)
        while left > 0 and self._open and self._loop.time() < until:
            flushed = self._flushed()
            left -= flushed
            if not flushed:
                await asyncio.sleep(DRAIN_STEP_S)
        self.destroy()

    def unmapped(self) -> None:
        """Nothing of ours is ever mapped there."""

    # --- work ----------------------------------------------------------------------------------------------------

    def progress(self) -> bool:
        """Take what has completed. True where there was something. On any thread."""
        told = ""
        with self._lock:
            if not self._open or self._ended:
                return False
            try:
                found = self._take()
            except (KvmeshError, self._device.api.error) as error:
                told = self._ended = str(error)
                found = True
            tell_ready = bool(self._arrivals) and not self._ready_told
            self._ready_told |= tell_ready
        if tell_ready:
            self._on_loop(self.expected.on_ready)
        if told:
            self._on_loop(self._broke)
        return found

    @property
    def destroyed(self) -> bool:
        """Nothing of it is left at the device."""
        return not self._open

    @property
    def usable(self) -> bool:
        """Not yet broken, fenced or destroyed."""
        return self._open and not self._ended

    def destroy(self) -> None:
        """Queue pairs first, then what they could reach. Idempotent."""
        self._stop_reading()
        with self._lock:
            if not self._open:
                return
            self._open = False
            for pair in self.pairs:
                pair.close()
            if self.queue is not None:
                self.queue.close()
            if self.mail is not None:
                self._device.release(self.mail)
            self.mailbox.close()

    def _take(self) -> bool:
        assert self.queue is not None
        any_found = False
        while True:
            found = self.queue.poll(POLL_BATCH)
            for done in found:
                if not done.status:
                    self._completed(done)
                elif not self._fault:
                    self._fault = f"queue pair {done.qp} failed with status {done.status}"
            any_found |= bool(found)
            if found and not self._fault:
                self._give_back()
            if len(found) < POLL_BATCH:
                break
        if self._fault:
            # Only now: what has landed on other queue pairs counts.
            raise Unavailable(self._fault)
        return any_found

    def _completed(self, done: Done) -> None:
        if done.kind == KIND_WORD:
            self._credits[done.qp].told()
        elif done.kind == KIND_RECEIVE:
            if done.opcode != self._device.api.enums.IBV_WC_RECV_RDMA_WITH_IMM:
                raise DataLoss(f"the writer sent opcode {done.opcode}")
            run = self._credits[done.qp].consumed()
            self._arrivals.append(Arrival(done.immediate, self.mailbox.take(done.qp, run)))
        else:
            raise DataLoss(f"a completion of kind {done.kind}, which is never asked for")

    def _give_back(self) -> None:
        """Post again the receives whose entries have been read, and say so when it is due."""
        for pair, credits in zip(self.pairs, self._credits, strict=True):
            missing = credits.missing
            if missing:
                pair.post_receives(missing)
                credits.reposted(missing)
            word = credits.due()
            if word is not None:
                self._sequence += 1
                pair.post_word(self._sequence, word)
                credits.telling()

    def _flushed(self) -> int:
        with self._lock:
            if not self._open or self.queue is None:
                return 0
            try:
                found = self.queue.poll(POLL_BATCH)
                for done in found:
                    if not done.status:
                        self._completed(done)
                return sum(done.kind == KIND_RECEIVE for done in found)
            except (KvmeshError, self._device.api.error):
                return 0

    def _readable(self) -> None:
        self.progress()

    def _broke(self) -> None:
        self._stop_reading()
        self.expected.on_end(self._ended)

    def _stop_reading(self) -> None:
        if self._reading and self.queue is not None:
            self._reading = False
            self._loop.remove_reader(self.queue.fd)

    def _on_loop(self, call: Callable[[], None]) -> None:
        # The loop is closed at interpreter exit only.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)


def make_pairs(
    device: Device, mailbox: Mailbox, mail: Memory, count: int, *, send_depth: int, receive_depth: int
) -> tuple[CompletionQueue, list[QueuePair]]:
    """Queue pairs in INIT with all receives posted, over one completion queue that has room for all they can hold.
    Raises Unavailable; nothing is left behind then."""
    queue = CompletionQueue(device, count * (send_depth + receive_depth))
    pairs: list[QueuePair] = []
    try:
        for place in range(count):
            pair = QueuePair(
                device,
                queue,
                place=place,
                psn=secrets.randbits(24),
                send_depth=send_depth,
                receive_depth=receive_depth,
                sink=mailbox.sink,
                sink_lkey=mail.lkey,
            )
            pairs.append(pair)
            pair.post_receives(receive_depth)
    except BaseException as error:
        for pair in pairs:
            pair.close()
        queue.close()
        if isinstance(error, device.api.error):
            raise Unavailable(f"{device.name} gives no queue pair: {error}") from None
        raise
    return queue, pairs
