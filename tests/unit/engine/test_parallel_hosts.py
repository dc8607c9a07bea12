"""A group on several hosts, without torch: who is let in, what goes where, and how each end is seen on both sides."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fake_rank
from kvmesh.config import WorkerSettings
from kvmesh.engine.parallel import agent as agents
from kvmesh.engine.parallel import hosts as doors
from kvmesh.engine.parallel.agent import AgentPlan, HostAgent
from kvmesh.engine.parallel.handshake import MAGIC, admit, enter
from kvmesh.engine.parallel.hosts import GroupPlan, Hosts
from kvmesh.engine.parallel.network import interface_of, name_interface, own_address
from kvmesh.engine.parallel.ranks import RankGroup
from kvmesh.engine.parallel.slots import SLOT_BYTES
from kvmesh.engine.parallel.wire import Kind, recv_frame, send_note
from kvmesh.errors import DataLoss, DeadlineExceeded, FailedPrecondition, KvmeshError, Unauthenticated, Unavailable
from kvmesh.kv.pidfd import open_pidfd, wait_exit
from kvmesh.rpc.auth import MeshToken

WAIT_S = 60.0
FACTS = {"kvmesh": "1", "model revision": "abc"}
MOVED: dict[str, Any] = {"model revision": "def"}


@pytest.fixture
def token(tmp_path: Path) -> MeshToken:
    return token_of(tmp_path / "token", "a token of the whole mesh")


def token_of(path: Path, text: str) -> MeshToken:
    path.write_text(text + "\n")
    return MeshToken(path)


def plan_of(hosts: int = 2, each: int = 2, join_s: float = WAIT_S, **facts: str) -> GroupPlan:
    return GroupPlan(hosts, each, FACTS | facts, join_s, WAIT_S)


class Side:
    """An agent, and what it told."""

    def __init__(self, port: int, token: MeshToken, host: int = 1, plan: GroupPlan | None = None, **more: Any) -> None:
        self.up, self.ends = threading.Event(), queue.SimpleQueue[str]()
        made = AgentPlan(
            plan or plan_of(), host, f"127.0.0.1:{port}", 1, {"model": f"model of {host}", "logs": {}},
            source=f"127.0.0.{host + 1}", program=fake_rank.__name__, **more,
        )  # fmt: skip
        self.agent = HostAgent(made, token, self.up.set, self.ends.put)

    def join(self) -> Side:
        self.agent.join()
        self.pidfds = [open_pidfd(pid) for pid in self.agent.pids]
        return self

    def end(self) -> str:
        """Why it ended; its ranks are gone, and it ended once."""
        reason = self.ends.get(timeout=WAIT_S)
        self.gone()
        assert self.ends.empty()
        return reason

    def gone(self) -> None:
        while self.pidfds:
            fd = self.pidfds.pop()
            assert wait_exit(fd, WAIT_S), "a rank outlives its group"
            os.close(fd)


class Lead:
    """A leader's group, and why it was lost."""

    def __init__(self, token: MeshToken, plan: GroupPlan | None = None) -> None:
        self.hosts = Hosts(plan or plan_of(), "127.0.0.1:0", token)
        self.port = self.hosts.port
        self.group = RankGroup(self.hosts.plan.size, 1, fake_rank.__name__, self.hosts)
        self.lost = queue.SimpleQueue[str]()
        self.group.on_lost(self.lost.put)

    def gather(self, kind: Kind = Kind.DONE) -> list[bytes]:
        return [frame.body for frame in self.group.gather(kind, WAIT_S)]

    def start(self) -> list[dict[str, Any]]:
        """What each rank was told."""
        self.group.assemble()
        self.group.setup({"model": "leader's model", "size": self.group.size})
        return [json.loads(body) for body in self.gather(Kind.HELLO)]


@contextlib.contextmanager
def leading(token: MeshToken, plan: GroupPlan | None = None) -> Iterator[Lead]:
    lead = Lead(token, plan)
    try:
        yield lead
    finally:
        lead.group.close()


@contextlib.contextmanager
def formed(token: MeshToken, hosts: int = 2, each: int = 2) -> Iterator[tuple[Lead, list[Side]]]:
    plan = plan_of(hosts, each)
    with leading(token, plan) as lead:
        sides = [Side(lead.port, token, host, plan).join() for host in range(1, hosts)]
        try:
            lead.start()
            yield lead, sides
        finally:
            for side in sides:
                side.agent.close()


@pytest.mark.parametrize(("hosts", "each"), [(2, 2), (3, 1)])
def test_ranks_of_all_hosts_are_told_what_they_need_and_end_in_order(token: MeshToken, hosts: int, each: int) -> None:
    plan = plan_of(hosts, each)
    with leading(token, plan) as lead:
        sides = [Side(lead.port, token, host, plan).join() for host in range(hosts - 1, 0, -1)][::-1]
        told = lead.start()
        assert [note["rank"] for note in told] == list(range(1, hosts * each))
        assert [note["pid"] for note in told] == lead.group.pids
        for note in told:
            host = note["rank"] // each
            assert note["local"] == each
            assert note["host"] == "127.0.0.1"
            assert note["address"] == f"127.0.0.{host + 1}"
            assert note["shares"] == (host == 0)
            assert note["model"] == (f"model of {host}" if host else "leader's model")
        # In a slot of shared memory here and as bytes elsewhere; as bytes everywhere; many, ahead of their answers.
        for body in (b"x" * 1000, b"y" * (SLOT_BYTES + 1), b""):
            lead.group.send_step(body, WAIT_S)
            assert lead.gather() == [fake_rank.digest(body)] * (hosts * each - 1)
        for number in range(20):
            lead.group.send_step(str(number).encode(), WAIT_S)
        for number in range(20):
            assert set(lead.gather()) == {fake_rank.digest(str(number).encode())}
        assert not any(side.up.is_set() for side in sides)
        lead.group.up()
        assert all(side.up.wait(WAIT_S) for side in sides)
        lead.group.close()
        assert [side.end() for side in sides] == [""] * (hosts - 1)
        assert lead.lost.empty()


# -- who is not let in


def test_who_is_refused_and_the_right_ones_still_come_in(token: MeshToken, tmp_path: Path) -> None:
    other = token_of(tmp_path / "other", "a token of another mesh")
    with leading(token) as lead:
        port = lead.port
        with pytest.raises(Unauthenticated, match="refused this host's proof"):
            Side(port, other).join()
        with pytest.raises(FailedPrecondition, match="host 1 has kvmesh 2, the leader 1: they must be equal"):
            Side(port, token, plan=plan_of(kvmesh="2")).join()
        with pytest.raises(FailedPrecondition, match="model revision def, the leader abc"):
            Side(port, token, plan=plan_of(**MOVED)).join()
        with pytest.raises(FailedPrecondition, match="there is no host 2 among 2"):
            Side(port, token, 2).join()
        with pytest.raises(DataLoss, match=r"the leader gives this host ranks \[2, 3\], not \[1\]"):
            Side(port, token, plan=plan_of(each=1)).join()
        side = Side(port, token).join()
        with pytest.raises(Unavailable, match=r"within 0.2 s: the leader refuses this host: host 1 .* is here already"):
            Side(port, token, plan=plan_of(join_s=0.2)).join()
        assert len(lead.start()) == 3
        with pytest.raises(Unavailable, match="a leader takes hosts only while it starts"):
            Side(port, token, plan=plan_of(join_s=0.2)).join()
        lead.group.close()
        assert side.end() == ""


def test_strangers_cost_nothing_and_learn_nothing(token: MeshToken) -> None:
    with leading(token) as lead:
        for said in (b"GET / HTTP/1.1\r\n\r\n", MAGIC, MAGIC + bytes(95), MAGIC + bytes(96), os.urandom(4096)):
            with socket.create_connection(("127.0.0.1", lead.port), WAIT_S) as sock:
                answer = b""
                # It may be closed already, with a reset where something was left unread.
                with contextlib.suppress(OSError):
                    sock.sendall(said)
                    sock.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionError):
                    while part := sock.recv(4096):
                        answer += part
            # No proof of the leader's.
            assert len(answer) <= len(MAGIC) + 32
        # Its own proof, sent back: it is another one.
        with socket.create_connection(("127.0.0.1", lead.port), WAIT_S) as sock:
            hello = sock.recv(len(MAGIC) + 32, socket.MSG_WAITALL)
            nonce = hello[len(MAGIC) :]
            sock.sendall(MAGIC + nonce + token.sign(b"tp-leader\0" + nonce + nonce).encode())
            assert sock.recv(1) == b""
        Side(lead.port, token).join()
        lead.start()


def _note(kind: Kind, note: Any) -> bytes:
    body = json.dumps(note).encode()
    return struct.pack("<IB3x", len(body), kind) + body


NONSENSE = (
    struct.pack("<IB3x", 0xFFFFFFFF, Kind.ENTER),
    struct.pack("<IB3x", (64 << 10) + 1, Kind.ENTER) + b"{",
    struct.pack("<IB3x", 48 << 20, Kind.STEP),
    struct.pack("<IB3x", 4, 250) + b"abcd",
    _note(Kind.ENTER, [{}]),
    _note(Kind.ENTER, {}),
    _note(Kind.ATTACH, {}),
    _note(Kind.ATTACH, {"session": "0" * 32, "rank": 2}),
    _note(Kind.ATTACH, {"session": "\u00e9", "rank": [2]}),
    struct.pack("<IB3x", 60_000, Kind.ENTER) + b"[" * 60_000,
    _note(Kind.WELCOME, {}),
    _note(Kind.ENTER, {"facts": FACTS, "setup": {}}),
    _note(Kind.ENTER, {"host": 1, "facts": FACTS, "setup": {"model": 1}}),
    _note(Kind.ENTER, {"host": 1, "facts": 3, "setup": {}}),
)


def test_a_member_that_talks_nonsense_is_refused_before_anything_is_taken(token: MeshToken) -> None:
    with leading(token) as lead:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for frame in NONSENSE:
            with socket.create_connection(("127.0.0.1", lead.port), WAIT_S) as sock:
                enter(sock, token, WAIT_S)
                sock.settimeout(WAIT_S)
                sock.sendall(frame)
                answer = recv_frame(sock)
                assert answer is not None
                assert answer.kind is Kind.REFUSED
                assert answer.note()["reason"]
        # KiB.
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10
        Side(lead.port, token).join()
        lead.start()


@pytest.mark.parametrize(
    ("kind", "note"),
    [
        (Kind.RANKS, {"pids": [1, "2"]}),
        (Kind.RANKS, {"pids": [1]}),
        (Kind.EXITED, {"rank": [], "code": 1}),
        (Kind.EXITED, {"rank": 2}),
        (Kind.STEP, {}),
    ],
)
def test_an_agent_that_talks_nonsense_later_is_dropped(
    token: MeshToken, caplog: pytest.LogCaptureFixture, kind: Kind, note: dict[str, Any]
) -> None:
    setup = {"model": "m", "threads": 1, "logs": {}, "address": "127.0.0.1"}
    hosts = Hosts(plan_of(), "127.0.0.1:0", token)
    try:
        with socket.create_connection(("127.0.0.1", hosts.port), WAIT_S) as sock:
            enter(sock, token, WAIT_S)
            sock.settimeout(WAIT_S)
            send_note(sock, Kind.ENTER, {"host": 1, "facts": FACTS, "setup": setup})
            welcome = recv_frame(sock)
            assert welcome is not None
            assert welcome.kind is Kind.WELCOME
            send_note(sock, kind, note)
            assert recv_frame(sock) is None
        assert "has left before all were there" in caplog.text
    finally:
        hosts.close()


def test_what_answers_is_no_leader(token: MeshToken, tmp_path: Path) -> None:
    """Something else listens there, or a leader of another mesh: said at once, and nothing is started."""

    def one(answer: Any) -> int:
        listener = socket.create_server(("127.0.0.1", 0))

        def serve() -> None:
            with listener, listener.accept()[0] as sock, contextlib.suppress(KvmeshError, OSError):
                answer(sock)

        threading.Thread(target=serve, daemon=True).start()
        port: int = listener.getsockname()[1]
        return port

    with pytest.raises(DataLoss, match="no part of a kvmesh engine"):
        Side(one(lambda sock: sock.sendall(b"220 mail.example ready\r\n")), token).join()

    def impostor(sock: socket.socket) -> None:
        sock.sendall(MAGIC + bytes(32))
        sock.recv(len(MAGIC) + 96, socket.MSG_WAITALL)
        sock.sendall(b"0" * 64)

    with pytest.raises(Unauthenticated, match="does not know the mesh token"):
        Side(one(impostor), token).join()
    other = token_of(tmp_path / "other", "a token of another mesh")
    with pytest.raises(Unauthenticated, match="refused this host's proof"):
        Side(one(lambda sock: admit(sock, other)), token).join()


def test_a_peer_that_says_nothing_is_left_in_time(token: MeshToken, monkeypatch: pytest.MonkeyPatch) -> None:
    for side in (admit, enter):
        ours, theirs = socket.socketpair()
        with ours, theirs, pytest.raises(DeadlineExceeded):
            side(ours, token, 0.05)
    # A door that is full of them takes nobody, until they are gone.
    monkeypatch.setattr(doors, "_PLACES", 2)
    with leading(token) as lead:
        with contextlib.ExitStack() as stack:
            for greeting in (len(MAGIC) + 32, len(MAGIC) + 32, 0):
                sock = stack.enter_context(socket.create_connection(("127.0.0.1", lead.port), WAIT_S))
                assert len(sock.recv(len(MAGIC) + 32, socket.MSG_WAITALL)) == greeting
        Side(lead.port, token).join()
        assert len(lead.start()) == 3


def test_nobody_waits_for_ever(token: MeshToken) -> None:
    with leading(token, plan_of(3, 1, join_s=0.3)) as lead:
        with pytest.raises(Unavailable, match=r"host\(s\) 1, 2 of 3 did not come within 0.3 s"):
            lead.group.assemble()
        assert "did not come" in lead.lost.get(timeout=WAIT_S)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(Unavailable, match="host 1 was not taken in by a leader within"):
        Side(port, token, plan=plan_of(join_s=0.2)).join()
    # Told to stop while it waits.
    side = Side(port, token)
    threading.Timer(0.1, side.agent.close).start()
    with pytest.raises(Unavailable, match="told to stop"):
        side.join()


def test_a_rank_of_the_leader_that_dies_while_others_are_waited_for_ends_the_start(token: MeshToken) -> None:
    with leading(token) as lead:
        os.kill(lead.group.pids[0], signal.SIGKILL)
        with pytest.raises(Unavailable, match=r"rank 1 \(pid \d+\) ended with code -9"):
            lead.group.assemble()


def test_a_host_may_come_again_until_all_are_there(token: MeshToken) -> None:
    plan = plan_of(3, 1)
    with leading(token, plan) as lead:
        first = Side(lead.port, token, 1, plan).join()
        first.agent.close()
        first.end()
        again = Side(lead.port, token, 1, plan).join()
        second = Side(lead.port, token, 2, plan).join()
        assert [note["pid"] for note in lead.start()] == [*again.agent.pids, *second.agent.pids]


# -- ends


def test_a_rank_that_is_killed_elsewhere_ends_the_group_by_name(token: MeshToken) -> None:
    with formed(token) as (lead, [side]):
        pid = side.agent.pids[1]
        os.kill(pid, signal.SIGKILL)
        reason = lead.lost.get(timeout=WAIT_S)
        assert reason == f"rank 3 (pid {pid} on host 1 (127.0.0.2)) ended with code -9"
        assert side.end() == reason
        with pytest.raises(Unavailable, match="rank 3"):
            lead.group.send_step(b"", WAIT_S)
        assert lead.lost.empty()


def test_what_a_rank_elsewhere_says_last_is_the_reason(token: MeshToken) -> None:
    with formed(token, each=1) as (lead, [side]):
        lead.group.send(Kind.BIND)
        reason = lead.lost.get(timeout=WAIT_S)
        assert reason.endswith("ended with code 1: it was told to fail")
        assert side.end() in (reason, f"rank 1 (pid {lead.group.pids[0]}) ended with code 1")


def test_a_rank_of_the_leader_that_is_killed_ends_the_others(token: MeshToken) -> None:
    with formed(token) as (lead, [side]):
        os.kill(lead.group.pids[0], signal.SIGKILL)
        reason = lead.lost.get(timeout=WAIT_S)
        assert "rank 1 (pid" in reason
        assert side.end() == reason


_LEADER = """
import sys
from pathlib import Path
from test_parallel_hosts import Lead, MeshToken
lead = Lead(MeshToken(Path(sys.argv[1])))
print(lead.port, *lead.group.pids, flush=True)
lead.start()
print("started", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def program(text: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(
        [sys.executable, "-c", text, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    with child:
        try:
            yield child
        finally:
            child.kill()


def test_a_leader_that_is_killed_ends_the_ranks(token: MeshToken, tmp_path: Path) -> None:
    with program(_LEADER, str(tmp_path / "token")) as child:
        assert child.stdout is not None
        port, pid = map(int, child.stdout.readline().split())
        pidfd = open_pidfd(pid)
        side = Side(port, token).join()
        assert child.stdout.readline() == b"started\n"
        child.kill()
        assert side.end().startswith("the leader is gone")
        assert wait_exit(pidfd, WAIT_S)
        os.close(pidfd)


_AGENT = """
import sys
from pathlib import Path
from test_parallel_hosts import MeshToken, Side
side = Side(int(sys.argv[1]), MeshToken(Path(sys.argv[2]))).join()
print(*side.agent.pids, flush=True)
sys.stdin.read()
"""


def test_an_agent_that_is_killed_ends_the_group_with_its_ranks(token: MeshToken, tmp_path: Path) -> None:
    with leading(token) as lead:
        with program(_AGENT, str(lead.port), str(tmp_path / "token")) as child:
            assert child.stdout is not None
            pidfds = [open_pidfd(int(pid)) for pid in child.stdout.readline().split()]
            lead.start()
            child.kill()
            assert "host 1 (127.0.0.2) is gone: its agent" in lead.lost.get(timeout=WAIT_S)
            for fd in pidfds:
                assert wait_exit(fd, WAIT_S), "a rank outlives its agent and its group"
                os.close(fd)


def test_a_host_that_is_told_to_stop_asks_the_leader(token: MeshToken) -> None:
    with formed(token, each=1) as (lead, [side]):
        asked = queue.SimpleQueue[str]()
        lead.group.on_leaving(asked.put)
        side.agent.leave()
        assert asked.get(timeout=WAIT_S) == "host 1 (127.0.0.2) is told to stop"
        # It still works for the leader.
        lead.group.send_step(b"one more", WAIT_S)
        assert lead.gather() == [fake_rank.digest(b"one more")]
        lead.group.close()
        assert side.end() == ""
        assert lead.lost.empty()


def test_ranks_that_do_not_end_are_killed(token: MeshToken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "STOP_S", 0.2)
    with formed(token, each=1) as (lead, [side]):
        os.kill(side.agent.pids[0], signal.SIGSTOP)
        lead.group.close()
        assert side.end() == ""


# -- interfaces and settings


def test_the_interface_of_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interface_of("127.0.0.1") == interface_of("127.0.0.2") == "lo"
    assert interface_of("192.0.2.77") == ""
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    name_interface("192.0.2.77")
    assert "NCCL_SOCKET_IFNAME" not in os.environ
    name_interface("127.0.0.1")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"
    name_interface("192.0.2.77")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    name_interface("127.0.0.1")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert own_address(listener) == "127.0.0.1"


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"tp": 3}, "tp must be a multiple of tp_hosts"),
        ({"tp_host_rank": 2}, "tp_host_rank must be below tp_hosts"),
        ({"tp_leader": ""}, "needs tp_leader"),
        ({"tp_host_rank": 1, "tp_leader": "leader:0"}, "tp_leader needs a port"),
        ({"mesh_token_file": None}, "needs mesh_token_file"),
        ({"role": "prefill"}, "moving KV of ranks on several hosts"),
        ({"sidecar_socket": "/run/x.sock"}, "moving KV of ranks on several hosts"),
        ({"runner": "scripted"}, "scripted runner has one rank"),
    ],
)
def test_settings_that_do_not_go_together(wrong: dict[str, Any], why: str) -> None:
    good: dict[str, Any] = {"tp": 4, "tp_hosts": 2, "tp_leader": "leader:50056", "mesh_token_file": "/run/token"}
    assert WorkerSettings(**good).ranks_per_host == 2
    assert WorkerSettings(**good, role="decode").ranks_per_host == 2
    with pytest.raises(ValueError, match=why):
        WorkerSettings(**(good | wrong))
