"""memfd regions: shared by fork and by descriptor, sealed, and nothing hostile is mapped."""

import fcntl
import mmap
import os

import numpy as np
import pytest

from kvmesh.errors import InvalidArgument
from kvmesh.kv.region import Region


def open_fds():
    return set(os.listdir("/proc/self/fd"))


def memfd(size, seals):
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def test_views_alias_the_memory():
    with Region.create("kv", 4096) as region:
        words = region.view(np.uint64, offset=8, count=4)
        words[1] = 0x0102030405060708
        assert region.buf[16:24].tobytes() == bytes([8, 7, 6, 5, 4, 3, 2, 1])
        assert region.view().shape == (4096,)
        assert not region.view()[24:].any()


def test_size_can_never_change():
    with Region.create("kv", 8192) as region:
        for size in (0, 4096, 16384):
            with pytest.raises(PermissionError):
                os.ftruncate(region.fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(region.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert not os.get_inheritable(region.fd)


def test_a_fork_shares_it():
    with Region.create("kv", 4096) as region:
        numbers = region.view(np.uint32)
        pid = os.fork()
        if pid == 0:
            numbers[5] = 77
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert numbers[5] == 77


def test_adopt_maps_the_same_memory():
    with Region.create("kv", 10_000) as region:
        other = Region.adopt(os.dup(region.fd), 10_000, "twin")
        region.view()[9_999] = 5
        assert other.view()[9_999] == 5
        other.close()
        assert region.view()[9_999] == 5


def test_adopt_refuses_and_closes_what_it_cannot_trust(tmp_path):
    shrink, full = fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

    def plain_file():
        path = tmp_path / "file"
        path.write_bytes(bytes(4096))
        return os.open(path, os.O_RDWR)

    cases = [
        (lambda: memfd(4096, 0), 4096, "not sealed"),
        (lambda: memfd(4096, fcntl.F_SEAL_GROW), 4096, "not sealed"),
        (lambda: memfd(4095, full), 4096, "has 4095"),
        (lambda: memfd(8192, shrink), 4096, "has 8192"),
        (lambda: memfd(4096, full | fcntl.F_SEAL_WRITE), 4096, "cannot be mapped"),
        (lambda: os.eventfd(0), 4096, "no memory file"),
        (plain_file, 4096, "no memory file"),
        (lambda: os.open("/dev/zero", os.O_RDWR), 4096, "no memory file"),
        (lambda: memfd(4096, full), 0, "bytes"),
        (lambda: memfd(4096, full), 1 << 60, "bytes"),
        (lambda: 99_999, 4096, "no memory file"),
    ]
    for make, nbytes, words in cases:
        before = open_fds()
        with pytest.raises(InvalidArgument, match=words):
            Region.adopt(make(), nbytes, "peer")
        assert open_fds() == before


def test_close_is_idempotent_and_waits_for_views():
    before = open_fds()
    region = Region.create("kv", 4096)
    view = region.view()
    region.close()
    region.close()
    view[0] = 1  # still mapped: a view never becomes a crash
    assert region.closed
    for use in (lambda: region.fd, lambda: region.buf, lambda: region.view()):
        with pytest.raises(InvalidArgument, match="closed"):
            use()
    del view
    assert open_fds() == before


def test_memory_goes_when_the_last_view_goes():
    def mapped():
        with open("/proc/self/maps") as maps:
            return sum("memfd:kvmesh-gone" in line for line in maps)

    region = Region.create("kvmesh-gone", mmap.PAGESIZE)
    view = region.view()
    assert mapped() == 1
    region.close()
    assert mapped() == 1
    del view
    assert mapped() == 0


@pytest.mark.parametrize("nbytes", [0, -1, 1 << 60])
def test_sizes_that_cannot_be(nbytes):
    before = open_fds()
    with pytest.raises(InvalidArgument):
        Region.create("kv", nbytes)
    assert open_fds() == before
