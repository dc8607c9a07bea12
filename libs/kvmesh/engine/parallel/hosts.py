"""The leader's side of a group on several hosts: lets their agents in while it starts, and notices when one is gone.

Everyone who connects proves first that it knows the mesh token (`handshake`). Then, in frames of `wire`:
- an agent: ENTER (its host, facts that must be equal, how its ranks are set up) → WELCOME (a session's name, its ranks)
  or REFUSED (why, and whether trying again is of use); RANKS (their process ids) once they run. Later: EXITED (a rank),
  LEAVING (it is told to stop), and from the leader UP (the group serves), FAILED (it is lost: why), STOP.
- for each of its ranks, over a connection of its own that the rank then inherits: ATTACH (session, rank) → WELCOME.
Nobody is let in any more once all are there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvmesh.engine.parallel.handshake import HANDSHAKE_S, Prover, admit
from kvmesh.engine.parallel.network import listen, own_address, peer_address, watch_peer
from kvmesh.engine.parallel.process import RemoteProcess, limit_sends
from kvmesh.engine.parallel.wire import Frame, Kind, expect, recv_frame, send_frame, send_note
from kvmesh.errors import DataLoss, DeadlineExceeded, FailedPrecondition, InvalidArgument, KvmeshError, Unavailable

log = logging.getLogger(__name__)

# Of a frame between leader and agent.
CONTROL_BYTES = 64 << 10
CONTROL_SEND_S = 5
# Who has not proved anything yet holds a place for HANDSHAKE_S at most.
_PLACES = 64
_LOOK_S = 0.2
# What an agent may say of the set-up of its ranks.
_SETUP = {"model": str, "threads": int, "logs": dict, "address": str}


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """What all hosts of a group are told alike.

    facts: what must be equal on all of them, by name. timeout_s: what a rank may come late to a collective.
    """

    hosts: int
    ranks_per_host: int
    facts: Mapping[str, str]
    join_s: float
    timeout_s: float

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.hosts * self.ranks_per_host

    def ranks(self, host: int) -> range:
        """Those of a host."""
        return range(host * self.ranks_per_host, (host + 1) * self.ranks_per_host)


@dataclass(slots=True)
class _Host:
    """One that has entered."""

    number: int
    sock: socket.socket
    address: str
    setup: dict[str, Any]
    session: str = field(default_factory=lambda: secrets.token_hex(16))
    socks: dict[int, socket.socket] = field(default_factory=dict)
    pids: list[int] = field(default_factory=list)
    processes: dict[int, RemoteProcess] = field(default_factory=dict)
    sending: threading.Lock = field(default_factory=threading.Lock)
    told_of_end: bool = False

    @property
    def name(self) -> str:
        return f"host {self.number} ({self.address})"

    def close(self) -> None:
        """End its connections: its agent and its ranks see it."""
        for sock in (self.sock, *self.socks.values()):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


@dataclass(frozen=True, slots=True)
class RemoteRank:
    """A rank on another host. setup: what its SETUP has instead of, or beside, the others'."""

    rank: int
    process: RemoteProcess
    sock: socket.socket
    setup: Mapping[str, Any]


class Hosts:
    """Listens from its making on. `wait` is for one thread; the listeners are called from threads of this object.

    on_lost(reason, told): a host is gone after `wait`; told: one of its ranks was said to have ended, whose own end
    tells more. on_leaving(reason): a host is told to stop and asks for the end.
    """

    def __init__(self, plan: GroupPlan, address: str, prover: Prover, own: str = "") -> None:
        """address: "host:port" to listen on. own: this host's address for collectives, "" = by which the others came.
        Raises FailedPrecondition."""
        self.plan = plan
        self.own = own
        self.on_lost: Callable[[str, bool], None] = lambda reason, told: None
        self.on_leaving: Callable[[str], None] = lambda reason: None
        self._prover = prover
        self._hosts: dict[int, _Host] = {}
        self._changed = threading.Condition()
        self._complete = self._closing = False
        self._places = threading.BoundedSemaphore(_PLACES)
        self._listener = listen(address)
        self.port: int = self._listener.getsockname()[1]
        self._listener.settimeout(_LOOK_S)
        threading.Thread(target=self._accept, name="hosts-door", daemon=True).start()

    # -- the door

    def wait(self, lost: threading.Event) -> list[RemoteRank]:
        """All ranks of the other hosts, once all are there, by rank. Raises Unavailable: not in time, or `lost`."""
        deadline = time.monotonic() + self.plan.join_s
        log.info("waiting for %d other host(s) on port %d", self.plan.hosts - 1, self.port)
        with self._changed:
            while missing := self._missing():
                left = deadline - time.monotonic()
                if lost.is_set() or self._closing:
                    raise Unavailable("a rank is lost while others are waited for")
                if left <= 0:
                    names = ", ".join(map(str, missing))
                    raise Unavailable(
                        f"host(s) {names} of {self.plan.hosts} did not come within {self.plan.join_s:g} s"
                    )
                self._changed.wait(min(left, _LOOK_S))
            addresses = {own_address(host.sock) for host in self._hosts.values()}
            if not self.own and len(addresses) > 1:
                raise Unavailable(
                    f"the other hosts reach this one by different addresses ({', '.join(sorted(addresses))}): set "
                    "tp_address"
                )
            self.own = self.own or addresses.pop()
            self._complete = True
            ranks = [self._member(host, rank) for host in self._hosts.values() for rank in self.plan.ranks(host.number)]
        self._listener.close()
        return sorted(ranks, key=lambda each: each.rank)

    def _missing(self) -> list[int]:
        there = {number for number, host in self._hosts.items() if host.pids and len(host.socks) == len(host.pids)}
        return [number for number in range(1, self.plan.hosts) if number not in there]

    def _member(self, host: _Host, rank: int) -> RemoteRank:
        sock = host.socks[rank]
        sock.settimeout(None)
        limit_sends(sock)
        process = RemoteProcess(sock, host.pids[rank - self.plan.ranks(host.number).start], host.name)
        host.processes[rank] = process
        return RemoteRank(rank, process, sock, host.setup)

    def _accept(self) -> None:
        while not (self._complete or self._closing):
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if self._complete or self._closing:
                    return
                # Out of descriptors, for example: that does not last for ever.
                log.warning("no connection can be taken: %s", error)
                time.sleep(_LOOK_S)
                continue
            if self._places.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(sock,), name="hosts-peer", daemon=True).start()
            else:
                sock.close()

    def _serve(self, sock: socket.socket) -> None:
        """One connection: to its refusal, for a rank to its handing over, for an agent to its end."""
        host = None
        try:
            address = peer_address(sock)
            try:
                host = self._greet(sock, address)
            except (KvmeshError, OSError) as error:
                why = error.message if isinstance(error, KvmeshError) else error.strerror or str(error)
                log.warning("a connection from %s is refused: %s", address, why)
                sock.close()
        except OSError:
            # Gone already.
            sock.close()
        finally:
            self._places.release()
        if host is not None:
            self._follow(host)

    def _greet(self, sock: socket.socket, address: str) -> _Host | None:
        """The host whose agent it is; None for a rank's connection."""
        admit(sock, self._prover)
        watch_peer(sock)
        sock.settimeout(HANDSHAKE_S)
        try:
            first = recv_frame(sock, CONTROL_BYTES)
            if first is None:
                raise Unavailable("it says nothing")
            if first.kind is Kind.ATTACH:
                self._attach(sock, first.note())
                return None
            return self._enter(sock, expect(first, Kind.ENTER).note(), address)
        except TimeoutError:
            raise DeadlineExceeded("it says too little in time") from None
        except KvmeshError as error:
            # What is wrong with its settings stays so; a place that is taken may become free.
            final = isinstance(error, FailedPrecondition | InvalidArgument | DataLoss)
            with contextlib.suppress(OSError):
                send_note(sock, Kind.REFUSED, {"reason": error.message, "final": final})
            raise

    def _enter(self, sock: socket.socket, note: Mapping[str, Any], address: str) -> _Host:
        number, facts, setup = note.get("host"), note.get("facts"), note.get("setup")
        if not isinstance(number, int) or not isinstance(facts, dict) or not isinstance(setup, dict):
            raise DataLoss("ENTER is malformed")
        for name, ours in self.plan.facts.items():
            if (theirs := facts.get(name)) != ours:
                raise FailedPrecondition(f"host {number} has {name} {theirs}, the leader {ours}: they must be equal")
        if not 1 <= number < self.plan.hosts:
            raise FailedPrecondition(f"there is no host {number} among {self.plan.hosts}: set tp_host_rank")
        if any(not isinstance(setup.get(key), kind) for key, kind in _SETUP.items()):
            raise DataLoss("ENTER is malformed")
        host = _Host(number, sock, address, {key: setup[key] for key in _SETUP})
        with self._changed:
            if self._complete or self._closing:
                raise Unavailable("the group is complete already")
            if number in self._hosts:
                raise Unavailable(f"{self._hosts[number].name} is here already")
            self._hosts[number] = host
        try:
            with host.sending:
                send_note(sock, Kind.WELCOME, {"session": host.session, "ranks": list(self.plan.ranks(number))})
        except OSError:
            self._forget(host)
            raise
        log.info("%s has entered", host.name)
        return host

    def _attach(self, sock: socket.socket, note: Mapping[str, Any]) -> None:
        session, rank = str(note.get("session", "")).encode(), note.get("rank")
        watch_peer(sock, self.plan.timeout_s)
        with self._changed:
            host = next((h for h in self._hosts.values() if secrets.compare_digest(h.session.encode(), session)), None)
            if host is None or self._complete:
                raise Unavailable("it is a rank of no host that is here")
            if not isinstance(rank, int) or rank not in self.plan.ranks(host.number) or rank in host.socks:
                raise DataLoss(f"{host.name} does not have such a rank, or has it already")
            # Before it counts: the leader's first message must come behind it.
            send_frame(sock, Kind.WELCOME)
            host.socks[rank] = sock
            self._changed.notify_all()

    # -- afterwards

    def _follow(self, host: _Host) -> None:
        """What an agent says, until it is gone."""
        why = "closed its connection"
        host.sock.settimeout(None)
        limit_sends(host.sock, CONTROL_SEND_S)
        try:
            while (frame := recv_frame(host.sock, CONTROL_BYTES)) is not None:
                self._heard(host, frame)
        except (KvmeshError, OSError) as error:
            why = error.message if isinstance(error, KvmeshError) else error.strerror or str(error)
        with self._changed:
            complete = self._complete
            if not complete:
                self._hosts.pop(host.number, None)
        for process in host.processes.values():
            process.settle(None)
        if not complete:
            log.warning("%s has left before all were there: %s", host.name, why)
            host.close()
        elif not self._closing:
            self.on_lost(f"{host.name} is gone: its agent {why}", host.told_of_end)

    def _heard(self, host: _Host, frame: Frame) -> None:
        if frame.kind is Kind.RANKS:
            pids = frame.note().get("pids")
            if not isinstance(pids, list) or not all(isinstance(pid, int) for pid in pids):
                raise DataLoss("RANKS is malformed")
            if len(pids) != self.plan.ranks_per_host or host.pids:
                raise DataLoss("RANKS is malformed")
            with self._changed:
                host.pids = list(pids)
                self._changed.notify_all()
        elif frame.kind is Kind.EXITED:
            rank, code = frame.note().get("rank"), frame.note().get("code")
            if not isinstance(rank, int) or not isinstance(code, int):
                raise DataLoss("EXITED is malformed")
            host.told_of_end = True
            if (process := host.processes.get(rank)) is not None:
                process.settle(code)
        elif frame.kind is Kind.LEAVING:
            log.warning("%s is told to stop", host.name)
            if self._complete:
                self.on_leaving(f"{host.name} is told to stop")
        else:
            raise DataLoss(f"it sent {frame.kind.name}")

    def _forget(self, host: _Host) -> None:
        with self._changed:
            self._hosts.pop(host.number, None)

    def tell(self, kind: Kind, note: Mapping[str, Any] | None = None) -> None:
        """The same frame to every agent. One that does not take it is about to be lost."""
        body = json.dumps(note).encode() if note is not None else b""
        with self._changed:
            hosts = list(self._hosts.values())
        for host in hosts:
            with contextlib.suppress(OSError), host.sending:
                send_frame(host.sock, kind, body)

    def close(self) -> None:
        """End every connection, and listen no more. Idempotent."""
        self._closing = True
        with self._changed:
            hosts = list(self._hosts.values())
            self._changed.notify_all()
        self._listener.close()
        for host in hosts:
            host.close()
