"""Descriptors between processes: they arrive, they are bounded, and none is ever left open."""

import array
import os
import select
import socket
import subprocess
import sys

import numpy as np
import pytest

from kvmesh.errors import DeadlineExceeded, InvalidArgument, NotFound, TooLarge
from kvmesh.kv.fds import close_fds, recv_with_fds, send_with_fds
from kvmesh.kv.pidfd import check_pidfd, is_alive, open_pidfd, wait_exit
from kvmesh.kv.region import Region
from kvmesh.kv.ring import Doorbell

KINDS = [socket.SOCK_SEQPACKET, socket.SOCK_STREAM]


def open_fds():
    return set(os.listdir("/proc/self/fd"))


@pytest.fixture(params=KINDS, ids=["seqpacket", "stream"])
def pair(request):
    left, right = socket.socketpair(socket.AF_UNIX, request.param)
    left.settimeout(60)
    right.settimeout(60)
    yield left, right
    left.close()
    right.close()


def pipes(count):
    """`count` descriptors to pass."""
    return [os.eventfd(0) for _ in range(count)]


def test_data_and_descriptors_arrive_close_on_exec(pair):
    left, right = pair
    r, w = os.pipe()
    send_with_fds(left, b"hello", [w, r])
    data, fds = recv_with_fds(right, 100, 2)
    assert data == b"hello"
    assert len(fds) == 2
    assert not any(os.get_inheritable(fd) for fd in fds)
    os.write(fds[0], b"through")
    assert os.read(r, 100) == b"through"
    close_fds([r, w, *fds])


def test_without_descriptors_and_at_the_end(pair):
    left, right = pair
    send_with_fds(left, b"x", [])
    assert recv_with_fds(right, 10, 0) == (b"x", [])
    left.close()
    assert recv_with_fds(right, 10, 4) == (b"", [])


@pytest.mark.parametrize(("sent", "taken"), [(1, 0), (2, 1), (3, 2), (4, 3), (7, 2), (253, 252), (253, 0)])
def test_more_than_asked_for_are_refused_and_closed(pair, sent, taken):
    left, right = pair
    fds = pipes(sent)
    before = open_fds()
    send_with_fds(left, b"x", fds)
    with pytest.raises(TooLarge, match="descriptors"):
        recv_with_fds(right, 10, taken)
    assert open_fds() == before
    close_fds(fds)


@pytest.mark.parametrize("count", [1, 2, 3, 16, 253])
def test_exactly_as_many_as_asked_for_are_taken(pair, count):
    left, right = pair
    fds = pipes(count)
    before = open_fds()
    send_with_fds(left, b"x", fds)
    _, got = recv_with_fds(right, 10, count)
    assert len(got) == count
    close_fds(got)
    assert open_fds() == before
    close_fds(fds)


def test_a_packet_that_is_too_long_is_refused_with_its_descriptors():
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        left.settimeout(60)
        right.settimeout(60)
        fds = pipes(2)
        before = open_fds()
        send_with_fds(left, bytes(101), fds)
        with pytest.raises(TooLarge, match="100 bytes"):
            recv_with_fds(right, 100, 2)
        assert open_fds() == before
        close_fds(fds)


def test_a_stream_sends_the_whole_of_a_long_message():
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with left, right:
        left.settimeout(60)
        right.settimeout(60)
        left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        payload = os.urandom(1 << 20)
        (fd,) = pipes(1)
        pid = os.fork()
        if pid == 0:
            send_with_fds(left, payload, [fd])
            os._exit(0)
        data, got = recv_with_fds(right, 1 << 16, 1)
        assert len(got) == 1
        while len(data) < len(payload):
            part, none = recv_with_fds(right, 1 << 16, 1)
            assert part
            assert not none
            data += part
        assert data == payload
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        close_fds([fd, *got])


def test_every_wait_has_a_deadline(pair):
    left, right = pair
    right.settimeout(0.01)
    with pytest.raises(DeadlineExceeded):
        recv_with_fds(right, 10, 1)
    right.settimeout(0)
    with pytest.raises(BlockingIOError):
        recv_with_fds(right, 10, 1)
    for sock in (left, right):
        sock.settimeout(None)
    with pytest.raises(InvalidArgument, match="timeout"):
        recv_with_fds(right, 10, 1)
    with pytest.raises(InvalidArgument, match="timeout"):
        send_with_fds(left, b"x", [])


def test_refuses_bad_arguments(pair):
    left, right = pair
    with pytest.raises(InvalidArgument, match="one byte"):
        send_with_fds(left, b"", [0])
    with pytest.raises(InvalidArgument, match="253"):
        send_with_fds(left, b"x", [0] * 254)
    with pytest.raises(InvalidArgument, match="maxfds"):
        recv_with_fds(right, 10, 254)
    with pytest.raises(InvalidArgument, match="maxbytes"):
        recv_with_fds(right, 0, 1)
    with socket.socket(socket.AF_INET) as inet, pytest.raises(InvalidArgument, match="Unix"):
        recv_with_fds(inet, 10, 1)


def test_two_ancillary_parts_are_counted_together(pair):
    left, right = pair
    fds = pipes(2)
    before = open_fds()
    one = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds[:1]).tobytes())
    two = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds[1:]).tobytes())
    left.sendmsg([b"x"], [one, two])
    with pytest.raises(TooLarge):
        recv_with_fds(right, 10, 1)
    assert open_fds() == before
    close_fds(fds)


CHILD = """
import socket, sys
import numpy as np
from kvmesh.kv.fds import recv_with_fds, send_with_fds
from kvmesh.kv.pidfd import open_pidfd
from kvmesh.kv.region import Region
from kvmesh.kv.ring import Doorbell
sock = socket.socket(fileno=int(sys.argv[1]))
sock.settimeout(30)
data, (fd,) = recv_with_fds(sock, 100, 1)
region = Region.adopt(fd, int(data))
region.view(np.uint32, 64)[:] = np.arange((region.nbytes - 64) // 4)
Doorbell(region.buf).ring()
send_with_fds(sock, b"done", [open_pidfd()])
assert recv_with_fds(sock, 1, 0) == (b"", [])
"""


def test_across_a_real_process_region_doorbell_and_pidfd():
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left.settimeout(30)
    with Region.create("kv", 1 << 16) as region, left:
        with right:
            child = subprocess.Popen(
                [sys.executable, "-c", CHILD, str(right.fileno())],
                pass_fds=(right.fileno(),),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        send_with_fds(left, str(region.nbytes).encode(), [region.fd])
        data, (pidfd,) = recv_with_fds(left, 100, 1)
        assert data == b"done"
        assert Doorbell(region.buf).value == 1
        numbers = region.view(np.uint32, 64)
        assert (numbers == np.arange(len(numbers))).all()
        check_pidfd(pidfd)
        assert is_alive(pidfd)
        left.close()
        assert wait_exit(pidfd, 30)
        # Known to be gone before anybody has reaped it.
        assert not is_alive(pidfd)
        assert child.wait(60) == 0
        os.close(pidfd)


def test_pidfd_of_a_killed_process():
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(w)
        select.select([r], [], [], 30)
        os._exit(0)
    pidfd = open_pidfd(pid)
    assert is_alive(pidfd)
    assert not wait_exit(pidfd, 0.01)
    os.kill(pid, 9)
    assert wait_exit(pidfd, 10)
    os.waitpid(pid, 0)
    assert not is_alive(pidfd)
    with pytest.raises(NotFound):
        open_pidfd(pid)
    close_fds([pidfd, r, w])


def test_what_is_no_pidfd_is_refused():
    own = open_pidfd()
    check_pidfd(own)
    assert not os.get_inheritable(own)
    (event,) = pipes(1)
    for fd in (event, 99_999):
        with pytest.raises(InvalidArgument, match="no pidfd"):
            check_pidfd(fd)
    with pytest.raises(InvalidArgument, match="not open"):
        is_alive(99_999)
    close_fds([own, event])
