"""The destination's end of a verbs link: it posts receives, reads the mailbox, gives credits back, and fences."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence

from kvmesh.errors import DataLoss, KvmeshError, Unavailable
from kvmesh.transfer.transports.base import Arrival, Expected
from kvmesh.transfer.transports.verbs.credits import CREDIT_WORDS, ReceiveCredits
from kvmesh.transfer.transports.verbs.device import Device, Memory
from kvmesh.transfer.transports.verbs.mailbox import Mailbox
from kvmesh.transfer.transports.verbs.qp import KIND_RECEIVE, KIND_WORD, Done, QueuePair, Remote, RunQueue
from kvmesh.transfer.transports.verbs.receiver import POLL_BATCH, RdmaInbound

DRAIN_STEP_S = 0.001


class VerbsInbound(RdmaInbound):
    """Made with its queue pairs in INIT and all receives posted, before the writer knows of it."""

    queue: RunQueue | None

    def __init__(self, device: Device, expected: Expected) -> None:
        super().__init__(device, expected)
        options = device.options
        self._options = options
        self._credits = [ReceiveCredits(options.receives) for _ in range(options.qps)]
        self._sequence = 0
        self._fault = ""
        self.pairs: list[QueuePair] = []
        self.mailbox = Mailbox(options.qps, options.receives)
        self.mail: Memory | None = None
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
        with self._lock:
            if not self._open:
                raise Unavailable("the link has ended")
            for pair, remote in zip(self.pairs, remotes, strict=True):
                pair.connect(remote)

    async def fence(self) -> None:
        self._stop_reading()
        with self._lock:
            if not self._ended:
                self._ended = "fenced"
            for pair in self.pairs:
                pair.fail()
        # Their receives are flushed; a destroyed queue pair is fenced whether that is seen or not.
        until = self._loop.time() + self._options.drain_timeout_s
        left = sum(credits.receives - credits.missing for credits in self._credits)
        while left > 0 and self._open and self._loop.time() < until:
            flushed = self._flushed()
            left -= flushed
            if not flushed:
                await asyncio.sleep(DRAIN_STEP_S)
        self.destroy()

    def _free(self) -> None:
        for pair in self.pairs:
            pair.close()
        if self.queue is not None:
            self.queue.close()
        if self.mail is not None:
            self._device.release(self.mail)
            self.mail = None
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


def make_pairs(
    device: Device, mailbox: Mailbox, mail: Memory, count: int, *, send_depth: int, receive_depth: int
) -> tuple[RunQueue, list[QueuePair]]:
    """Queue pairs in INIT with all receives posted, over one completion queue that has room for all they can hold.
    Raises Unavailable; nothing is left behind then."""
    queue = RunQueue(device, count * (send_depth + receive_depth))
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
