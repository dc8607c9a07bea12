"""The leader's hold on the other ranks: starts their processes, or lets other hosts' ranks in (`hosts`), talks to them,
notices at once when one is gone.

A rank that is lost cannot be replaced: its part of the KV is gone, and the others wait for it in a collective. So the
first loss ends the group: every other rank is killed, which also frees a leader that waits in a collective, since its
connections break. The owner is told once and is expected to end the process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvmesh.engine.parallel.hosts import Hosts
from kvmesh.engine.parallel.process import PROGRAM, RankProcess, spawn_rank
from kvmesh.engine.parallel.slots import SLOT_BYTES, StepSlots, bytes_for
from kvmesh.engine.parallel.wire import Frame, Kind, recv_frame, send_frame
from kvmesh.engine.runner import Runner
from kvmesh.errors import KvmeshError, Unavailable
from kvmesh.kv.region import Region
from kvmesh.loading.sharding import check_parallel
from kvmesh.loading.source import open_checkpoint, resolve

log = logging.getLogger(__name__)

STOP_S = 5.0
_REAP_S = 2.0
# Between two looks at a slot that a rank has yet to read.
_SLOT_POLL_S = 0.001
_WAITING_FRAMES = 64


@dataclass(slots=True)
class _Rank:
    rank: int
    process: RankProcess
    sock: socket.socket
    # Of its SETUP, where it is on another host.
    setup: Mapping[str, Any] | None = None
    frames: queue.Queue[Frame | None] = field(default_factory=lambda: queue.Queue(_WAITING_FRAMES))
    thread: threading.Thread | None = None


class RankGroup:
    """Processes of ranks 1 .. size - 1. `gather` is for one thread at a time; all else is thread-safe."""

    def __init__(self, size: int, threads: int, program: str = PROGRAM, hosts: Hosts | None = None) -> None:
        """Start the processes of this host; `threads` is for OpenMP in each of them, `program` the module that they
        run. hosts: lets those of other hosts in; closed with the group. Raises Unavailable."""
        self.size = size
        self.local = size if hosts is None else hosts.plan.ranks_per_host
        self._hosts = hosts
        self._region = Region.create("kvmesh-steps", bytes_for(self.local))
        self._slots = StepSlots(self._region, self.local)
        self._lock = threading.Lock()
        # Frames of two threads must not mix. Not `_lock`: a rank that does not read holds a sender up.
        self._sending = threading.Lock()
        self._reason: str | None = None
        self._lost = threading.Event()
        self._closing = False
        self._listeners: list[Callable[[str], None]] = []
        self._ranks: list[_Rank] = []
        try:
            for rank in range(1, self.local):
                self._ranks.append(_Rank(rank, *spawn_rank(self._region.fd, threads, program)))
        except OSError as error:
            self.kill()
            self._slots.close()
            self._region.close()
            if hosts is not None:
                hosts.close()
            raise Unavailable(f"cannot start rank {len(self._ranks) + 1}: {error.strerror}") from error
        for member in self._ranks:
            self._hear(member)

    def _hear(self, member: _Rank) -> None:
        member.thread = threading.Thread(target=self._read, args=(member,), name=f"rank-{member.rank}", daemon=True)
        member.thread.start()

    def assemble(self) -> None:
        """Wait for the ranks of other hosts, if there are any. Before anything is said to a rank. Raises Unavailable,
        after which the group is lost."""
        if self._hosts is None or len(self._ranks) == self.size - 1:
            return
        self._hosts.on_lost = self._host_lost
        try:
            found = self._hosts.wait(self._lost)
        except KvmeshError as error:
            self.check()
            raise self.fail(error.message) from None
        for each in found:
            member = _Rank(each.rank, each.process, each.sock, each.setup)
            self._ranks.append(member)
            self._hear(member)
        self.check()

    def _host_lost(self, reason: str, told: bool) -> None:
        if told:
            self.broken(reason)
        else:
            self.fail(reason)

    @property
    def address(self) -> str:
        """Where this host's ranks have their collectives, once assembled."""
        return "127.0.0.1" if self._hosts is None else self._hosts.own

    @property
    def several_hosts(self) -> bool:
        """Whether some ranks are elsewhere."""
        return self._hosts is not None

    def on_leaving(self, listener: Callable[[str], None]) -> None:
        """Call `listener(reason)`, from any thread, when another host is told to stop."""
        if self._hosts is not None:
            self._hosts.on_leaving = listener

    def up(self) -> None:
        """Tell the other hosts that the group serves."""
        if self._hosts is not None:
            self._hosts.tell(Kind.UP)

    @property
    def pids(self) -> list[int]:
        """Process ids of ranks 1 .. size - 1."""
        return [member.process.pid for member in self._ranks]

    @property
    def lost(self) -> str | None:
        """Why the group is of no further use, None while it is."""
        return self._reason

    def check(self) -> None:
        """Raises Unavailable once a rank is lost."""
        if self._reason is not None:
            raise Unavailable(self._reason)

    def on_lost(self, listener: Callable[[str], None]) -> None:
        """Call `listener(reason)` once, from any thread, when the group is lost; at once if it already is."""
        with self._lock:
            reason = self._reason
            if reason is None:
                self._listeners.append(listener)
        if reason is not None:
            listener(reason)

    def fail(self, reason: str) -> KvmeshError:
        """The group is lost: kill every rank, tell the listeners. Returns the error to raise, with the first reason."""
        with self._lock:
            first = self._reason is None
            if self._reason is None:
                self._reason = reason
            told = self._reason
            self._lost.set()
            listeners = self._listeners if first and not self._closing else []
        if first:
            log.error("tensor parallel group lost: %s", told)
            if self._hosts is not None:
                self._hosts.tell(Kind.FAILED, {"reason": told[:4096]})
            self._kill()
            for listener in listeners:
                listener(told)
            self._reap()
        return Unavailable(told)

    def broken(self, reason: str) -> KvmeshError:
        """`fail`, unless a rank turns out to be gone: what failed then failed because of it."""
        self._lost.wait(_REAP_S)
        return self.fail(reason)

    def send(self, kind: Kind, body: bytes = b"") -> None:
        """The same frame to every rank. Raises Unavailable, after which the group is lost."""
        self._send_each([(kind, body)] * len(self._ranks))

    def send_step(self, body: bytes, timeout_s: float) -> None:
        """A packed step to every rank, through shared memory where it fits and the rank is on this host. For one thread
        at a time. Raises Unavailable, after which the group is lost."""
        if len(body) > SLOT_BYTES or self.local == 1:
            self.send(Kind.STEP, body)
            return
        self.check()
        deadline = time.monotonic() + timeout_s
        # At once, unless steps are sent faster than they are collected.
        while (number := self._slots.put(body)) is None:
            self._lost.wait(_SLOT_POLL_S)
            self.check()
            if time.monotonic() > deadline:
                raise self.fail(f"ranks take no step within {timeout_s:g} s")
        slot = (Kind.SLOT, number.to_bytes(8, "little"))
        self._send_each([slot if member.setup is None else (Kind.STEP, body) for member in self._ranks])

    def _send_each(self, frames: Sequence[tuple[Kind, bytes]]) -> None:
        self.check()
        with self._sending:
            for member, (kind, body) in zip(self._ranks, frames, strict=True):
                try:
                    send_frame(member.sock, kind, body)
                except OSError as error:
                    raise self.broken(f"rank {member.rank} takes no message: {error.strerror or error}") from error

    def note(self, kind: Kind, note: Mapping[str, Any]) -> None:
        """`send` with a JSON object."""
        self.send(kind, json.dumps(note).encode())

    def setup(self, note: Mapping[str, Any]) -> None:
        """SETUP to every rank, with its number in it, and how many there are on its host; on several hosts also where
        collectives go: the address of the leader (`host`) and of the rank's own host (`address`)."""
        note = {**note, "local": self.local, "host": self.address, "address": self.address}
        if self.several_hosts:
            note["several_hosts"] = True
        self._send_each(
            [
                (Kind.SETUP, json.dumps({**note, **(each.setup or {}), "rank": each.rank}).encode())
                for each in self._ranks
            ]
        )

    def gather(self, kind: Kind, timeout_s: float) -> list[Frame]:
        """The next frame of every rank, by rank. Raises Unavailable, after which the group is lost."""
        deadline = time.monotonic() + timeout_s
        frames = []
        for member in self._ranks:
            try:
                frame = member.frames.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise self.fail(f"rank {member.rank} does not answer ({kind.name}) within {timeout_s:g} s") from None
            if frame is None:
                self.check()
            if frame is None or frame.kind is not kind:
                got = "nothing" if frame is None else frame.kind.name
                raise self.fail(f"rank {member.rank} answers {got} where {kind.name} was due")
            frames.append(frame)
        return frames

    def close(self) -> None:
        """Tell the ranks to end, wait a little, kill what is left. Idempotent; blocks up to STOP_S."""
        with self._lock:
            self._closing = True
            if self._reason is None:
                self._reason = "the engine is stopping"
        if self._hosts is not None:
            self._hosts.tell(Kind.STOP)
        for member in self._ranks:
            with contextlib.suppress(OSError):
                send_frame(member.sock, Kind.STOP)
        deadline = time.monotonic() + STOP_S
        for member in self._ranks:
            member.process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()
        for member in self._ranks:
            if member.thread is not None and member.thread is not threading.current_thread():
                member.thread.join(_REAP_S)
            member.sock.close()
        if self._hosts is not None:
            self._hosts.close()
        self._slots.close()
        self._region.close()

    def kill(self) -> None:
        """SIGKILL to every rank that still runs, and reap them."""
        self._kill()
        self._reap()

    def _kill(self) -> None:
        for member in self._ranks:
            member.process.kill()

    def _reap(self) -> None:
        deadline = time.monotonic() + _REAP_S
        for member in self._ranks:
            member.process.wait(max(0.0, deadline - time.monotonic()))

    def _read(self, member: _Rank) -> None:
        """One rank's frames, until it is gone. Its socket's end is its life: the kernel closes it with the process."""
        why = ""
        try:
            while (frame := recv_frame(member.sock)) is not None:
                if frame.kind is Kind.FAILED:
                    why = str(frame.note().get("reason", ""))
                    continue
                member.frames.put(frame, timeout=_REAP_S)
        except (KvmeshError, OSError, queue.Full) as error:
            why = why or str(error) or type(error).__name__
        member.process.wait(_REAP_S)
        if not self._closing:
            code = member.process.returncode
            ended = f"ended with code {code}" if code is not None else "closed its connection"
            self.fail(f"rank {member.rank} ({member.process.where}) {ended}{': ' if why else ''}{why}")
        with contextlib.suppress(queue.Full):
            member.frames.put_nowait(None)


def start_ranks(
    spec: str, size: int, threads: int, program: str = PROGRAM, hosts: Callable[[], Hosts] | None = None
) -> RankGroup:
    """Ranks for a model, once it is clear that it can be shared by so many: InvalidArgument where it cannot, and as
    `open_checkpoint`. Before torch is imported here, so that all processes import it at the same time.

    hosts: begins to listen for ranks of other hosts, which the runner then waits for.
    """
    checkpoint = open_checkpoint(resolve(spec))
    try:
        check_parallel(checkpoint.config, size)
    finally:
        checkpoint.close()
    return RankGroup(size, threads, program, hosts() if hosts is not None else None)


def ranks_of(runner: Runner) -> RankGroup | None:
    """The processes that a runner leads, None for a runner of one rank."""
    ranks = getattr(runner, "ranks", None)
    return ranks if isinstance(ranks, RankGroup) else None
