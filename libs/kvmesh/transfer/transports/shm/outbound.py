"""The writer's end of a shm link: copies into the peer's mapped regions, then tells the counts."""

from __future__ import annotations

import contextlib
import select
import socket
from collections import Counter, deque
from collections.abc import Sequence
from functools import partial

from kvmesh.kv.region import Region
from kvmesh.transfer.native.moves import Copy, memory_of
from kvmesh.transfer.transports.base import Completion, Write
from kvmesh.transfer.transports.shm.records import KIND_BYTES, KIND_UNMAPPED, RECORD
from kvmesh.transfer.transports.sockets.helpers import Helpers
from kvmesh.transfer.transports.sockets.outbound import SocketOutbound

# What is worth a second thread: waking one costs as much as copying a tenth of this.
MIN_SHARE_BYTES = 1 << 20


class ShmOutbound(SocketOutbound):
    """Copies from this engine's regions into the peer's mapped ones, which are this object's to close."""

    def __init__(
        self,
        sock: socket.socket,
        source: Sequence[Region],
        target: Sequence[Region],
        helpers: Helpers | None = None,
    ) -> None:
        super().__init__()
        sock.setblocking(False)
        self._sock = sock
        self._target = list(target)
        self._src = [memory_of(region) for region in source]
        self._dst = [memory_of(region) for region in target]
        self._helpers = helpers or Helpers(1)
        self._queue: deque[Write] = deque()
        self._next_run = 0
        self._copying: tuple[Write, Copy] | None = None
        # By immediate: writes in the queue, and what has landed without being told yet.
        self._queued: Counter[int] = Counter()
        self._landed: dict[int, tuple[int, list[Completion]]] = {}
        self._untold: deque[tuple[bytes, list[Completion]]] = deque()

    def take(self, write: Write) -> None:
        self._queue.append(write)
        self._queued[write.immediate] += 1

    def step(self, budget: int) -> None:
        self._look()
        while self._queue and budget > 0 and not self.broken:
            write = self._queue[0]
            self._next_run, moved = self.copy(write, self._next_run, budget)
            budget -= moved
            nbytes, done = self._landed.get(write.immediate, (0, []))
            self._landed[write.immediate] = (nbytes + moved, done)
            if self._next_run == len(write.length):
                self._next_run = 0
                self._queue.popleft()
                self._queued[write.immediate] -= 1
                done.append(Completion(write.context, write.nbytes))
        # A count in the middle of a burst would only wake the receiver, on a core that the copies want.
        for immediate in [x for x in self._landed if not self._queued[x]]:
            nbytes, done = self._landed.pop(immediate)
            del self._queued[immediate]
            self._untold.append((RECORD.pack(immediate, KIND_BYTES, nbytes), done))
        if self._untold:
            self._send()

    def copy(self, write: Write, first: int, budget: int) -> tuple[int, int]:
        """Copy runs from `first` on, about `budget` bytes and at least one: (next run, bytes moved). Raises
        InvalidArgument, and has then copied nothing: a wrong plan never writes outside of the region it names."""
        if self._copying is None or self._copying[0] is not write:
            dst, src = self._dst[write.dst_region], self._src[write.src_region]
            self._copying = write, Copy(dst, src, write.dst, write.src, write.length)
        move = self._copying[1].move
        count = len(write.length)
        last = min(count, first + max(1, budget * count // write.nbytes))
        runs = last - first
        shares = min(self._helpers.threads, runs, max(1, write.nbytes * runs // count // MIN_SHARE_BYTES))
        if shares == 1:
            return last, move(first, last)
        cuts = [first + runs * share // shares for share in range(shares + 1)]
        return last, sum(self._helpers.run([partial(move, cuts[i], cuts[i + 1]) for i in range(shares)]))

    def tell(self, immediate: int, nbytes: int) -> None:
        """Tell the receiver a count outside of `poll` (the fake transport's way)."""
        self._untold.append((RECORD.pack(immediate, KIND_BYTES, nbytes), []))
        self._send()

    def flush(self, immediate: int) -> None:
        kept: deque[Write] = deque()
        for position, write in enumerate(self._queue):
            if write.immediate == immediate and not (position == 0 and self._next_run):
                self.completions.append(Completion(write.context, 0, "flushed"))
                self._queued[immediate] -= 1
            else:
                kept.append(write)
        self._queue = kept
        if not self._queued[immediate] and immediate not in self._landed:
            del self._queued[immediate]

    def give_up(self) -> None:
        self.completions.extend(Completion(write.context, 0, self.broken) for write in self._queue)
        self._queue.clear()
        self._queued.clear()
        self._next_run = 0
        self._copying = None
        for _, done in [*self._landed.values(), *self._untold]:
            # Landed, but the receiver will not know: to the transfer that is a failure.
            self.completions.extend(Completion(item.context, 0, self.broken) for item in done)
        self._landed.clear()
        self._untold.clear()

    def release(self) -> None:
        for region in self._target:
            region.close()
        # Without waiting: where this does not get through, the control API tells it.
        with contextlib.suppress(OSError):
            self._sock.send(RECORD.pack(0, KIND_UNMAPPED, 0), socket.MSG_NOSIGNAL)
        self._sock.close()

    @property
    def busy(self) -> bool:
        return bool(self._queue) or bool(self._landed) or bool(self.completions)

    def wait_fds(self) -> list[tuple[int, int]]:
        if self.broken:
            return []
        return [(self._sock.fileno(), select.POLLIN | (select.POLLOUT if self._untold else 0))]

    def _look(self) -> None:
        """The destination never sends: readable means that it is gone."""
        try:
            data = self._sock.recv(1)
            self.fence("the destination's sidecar sent what nobody asked for" if data else "the destination is gone")
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self.fence(f"the destination is gone: {error.strerror}")

    def _send(self) -> None:
        """Tell what has been copied. A write is complete when the receiver's socket has taken its count."""
        while self._untold and not self.broken:
            data, done = self._untold[0]
            try:
                sent = self._sock.send(data, socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self.fence(f"the destination is gone: {error.strerror}")
                return
            if sent < len(data):
                self._untold[0] = (data[sent:], done)
                return
            self._untold.popleft()
            self.completions.extend(done)
