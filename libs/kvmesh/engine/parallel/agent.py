"""Another host's side of a group: enters at the leader, runs this host's ranks, ends with the group.

A rank talks to the leader over a connection of its own, which this process opened and proved itself on, and which the
rank inherits: so it is the same program as on the leader's host, and knows no secret. See `hosts` for what is said.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvmesh.engine.parallel.handshake import HANDSHAKE_S, Prover, enter
from kvmesh.engine.parallel.hosts import CONTROL_BYTES, CONTROL_SEND_S, GroupPlan
from kvmesh.engine.parallel.network import dial, own_address, watch_peer
from kvmesh.engine.parallel.process import NO_STEPS, PROGRAM, LocalProcess, limit_sends
from kvmesh.engine.parallel.wire import Frame, Kind, recv_frame, send_note
from kvmesh.errors import DataLoss, FailedPrecondition, KvmeshError, Unauthenticated, Unavailable

log = logging.getLogger(__name__)

BACKOFF_S = (0.1, 2.0)
# What the ranks get to end by themselves.
STOP_S = 5.0
# For the leader to say why, when a rank has ended here.
_REASON_S = 2.0
_REAP_S = 2.0


@dataclass(frozen=True, slots=True)
class AgentPlan:
    """What this host brings. host: its number, from 1 on. setup: model and logs of its ranks. source: its address,
    "" = by the route to the leader."""

    group: GroupPlan
    host: int
    leader: str
    threads: int
    setup: Mapping[str, Any]
    source: str = ""
    program: str = PROGRAM


@dataclass(slots=True)
class _Entry:
    """One attempt that went well, or parts of one."""

    control: socket.socket | None = None
    ranks: dict[int, LocalProcess] = field(default_factory=dict)

    def drop(self) -> None:
        for process in self.ranks.values():
            process.kill()
        for process in self.ranks.values():
            process.wait(_REAP_S)
        if self.control is not None:
            # A thread that reads it holds the connection open beyond `close`.
            with contextlib.suppress(OSError):
                self.control.shutdown(socket.SHUT_RDWR)
            self.control.close()


class HostAgent:
    """`join` blocks; then `on_up` and `on_end` are called from threads of this object. on_end(reason) is called once:
    "" when the leader ended the group in good order, else why it is lost; no rank runs any more then."""

    def __init__(
        self, plan: AgentPlan, prover: Prover, on_up: Callable[[], None], on_end: Callable[[str], None]
    ) -> None:
        self.plan = plan
        self._prover = prover
        self._on_up, self._on_end = on_up, on_end
        self._entry = _Entry()
        self._sending = threading.Lock()
        self._lock = threading.Lock()
        self._ending = False
        self._stop = threading.Event()
        self._ended = threading.Event()

    @property
    def pids(self) -> list[int]:
        """Process ids of this host's ranks."""
        return [process.pid for process in self._entry.ranks.values()]

    # -- in

    def join(self) -> None:
        """Enter, and start the ranks. Tries again while the leader is not there, until `join_s`.

        Raises Unavailable when that is over or `close` was called; FailedPrecondition and Unauthenticated at once,
        where trying again is of no use.
        """
        plan = self.plan
        deadline = time.monotonic() + plan.group.join_s
        delay, said = BACKOFF_S[0], ""
        while not self._stop.is_set():
            entry = _Entry()
            try:
                self._enter(entry)
            except (Unavailable, OSError) as error:
                entry.drop()
                why = error.message if isinstance(error, KvmeshError) else error.strerror or str(error)
                if why != said:
                    log.info("host %d waits for its leader: %s", plan.host, why)
                said = why
                if time.monotonic() + delay > deadline:
                    raise Unavailable(
                        f"host {plan.host} was not taken in by a leader within {plan.group.join_s:g} s: {why} "
                        "(a leader takes hosts only while it starts)"
                    ) from None
                self._stop.wait(delay)
                delay = min(delay * 2, BACKOFF_S[1])
            except BaseException:
                entry.drop()
                raise
            else:
                self._watch(entry)
                return
        raise Unavailable("told to stop")

    def _connect(self) -> socket.socket:
        sock = dial(self.plan.leader, self.plan.source)
        try:
            enter(sock, self._prover)
        except (Unauthenticated, DataLoss) as error:
            sock.close()
            raise type(error)(f"{self.plan.leader}: {error.message}") from None
        except KvmeshError as error:
            sock.close()
            raise Unavailable(f"{self.plan.leader}: {error.message}") from None
        except BaseException:
            sock.close()
            raise
        sock.settimeout(HANDSHAKE_S)
        return sock

    def _enter(self, entry: _Entry) -> None:
        plan = self.plan
        entry.control = control = self._connect()
        watch_peer(control)
        address = plan.source or own_address(control)
        send_note(control, Kind.ENTER, {
            "host": plan.host,
            "facts": dict(plan.group.facts),
            "setup": {**plan.setup, "threads": plan.threads, "address": address},
        })  # fmt: skip
        welcome = _answer(control).note()
        ranks = list(plan.group.ranks(plan.host))
        if welcome.get("ranks") != ranks:
            raise DataLoss(f"the leader gives this host ranks {welcome.get('ranks')}, not {ranks}")
        for rank in ranks:
            with contextlib.closing(self._connect()) as sock:
                watch_peer(sock, plan.group.timeout_s)
                send_note(sock, Kind.ATTACH, {"session": welcome.get("session"), "rank": rank})
                _answer(sock)
                # It is a plain blocking one for the rank.
                sock.settimeout(None)
                entry.ranks[rank] = LocalProcess(sock, NO_STEPS, plan.threads, plan.program)
        send_note(control, Kind.RANKS, {"pids": [process.pid for process in entry.ranks.values()]})
        control.settimeout(None)
        limit_sends(control, CONTROL_SEND_S)

    # -- meanwhile

    def _watch(self, entry: _Entry) -> None:
        self._entry = entry
        for rank, process in entry.ranks.items():
            log.info("rank %d of %d is process %d", rank, self.plan.group.size, process.pid)
            threading.Thread(target=self._await, args=(rank, process), name=f"rank-{rank}", daemon=True).start()
        threading.Thread(target=self._listen, args=(entry,), name="leader", daemon=True).start()
        if self._stop.is_set():
            self._end("told to stop")

    def _listen(self, entry: _Entry) -> None:
        control = entry.control
        assert control is not None
        why = "the leader is gone"
        try:
            while (frame := recv_frame(control, CONTROL_BYTES)) is not None:
                if frame.kind is Kind.UP:
                    self._on_up()
                elif frame.kind is Kind.STOP:
                    self._end("")
                    return
                elif frame.kind is Kind.FAILED:
                    why = str(frame.note().get("reason", ""))[:4096]
                    break
                else:
                    raise DataLoss(f"the leader sent {frame.kind.name}")
        except (KvmeshError, OSError) as error:
            reason = error.message if isinstance(error, KvmeshError) else error.strerror or str(error)
            why = f"{why}: {reason}"
        self._end(why)

    def _await(self, rank: int, process: LocalProcess) -> None:
        process.wait(None)
        code = process.returncode
        with contextlib.suppress(OSError):
            self._tell(Kind.EXITED, {"rank": rank, "code": code})
        if code:
            # The leader kills the others and says so; it may know more of the reason.
            self._ended.wait(_REASON_S)
            self._end(f"rank {rank} (pid {process.pid}) ended with code {code}")

    def _tell(self, kind: Kind, note: Mapping[str, Any]) -> None:
        control = self._entry.control
        if control is not None:
            with self._sending:
                send_note(control, kind, note)

    def leave(self) -> None:
        """This host is told to stop: ask the leader to finish what it has begun and to end the group."""
        with contextlib.suppress(OSError):
            self._tell(Kind.LEAVING, {})

    # -- out

    def _end(self, reason: str) -> None:
        """Once: the ranks are gone when this calls `on_end`."""
        with self._lock:
            if self._ending:
                return
            self._ending = True
        entry = self._entry
        # In good order they were told to end.
        deadline = time.monotonic() + (0.0 if reason else STOP_S)
        for process in entry.ranks.values():
            process.wait(max(0.0, deadline - time.monotonic()))
        entry.drop()
        self._ended.set()
        self._on_end(reason)

    def close(self) -> None:
        """End the ranks, whatever they do, and leave. Idempotent; blocks for a few seconds at most."""
        self._stop.set()
        if self._entry.control is not None:
            self._end("told to stop")
            self._ended.wait(STOP_S + _REAP_S)


def _answer(sock: socket.socket) -> Frame:
    """The leader's WELCOME. Raises FailedPrecondition where it refuses for good, else Unavailable; DataLoss."""
    try:
        frame = recv_frame(sock, CONTROL_BYTES)
    except TimeoutError:
        raise Unavailable("the leader does not answer") from None
    if frame is None:
        raise Unavailable("the leader closed the connection")
    if frame.kind is Kind.REFUSED:
        note = frame.note()
        kind = FailedPrecondition if note.get("final") else Unavailable
        raise kind(f"the leader refuses this host: {str(note.get('reason', ''))[:1024]}")
    if frame.kind is not Kind.WELCOME:
        raise DataLoss(f"the leader sent {frame.kind.name} where WELCOME was due")
    return frame
