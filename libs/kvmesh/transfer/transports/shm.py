"""Shared memory: the writer's sidecar maps the destination's regions and copies, then tells the counts.

The memory travels as memfds over a Unix socket, after a hello with a token and a pidfd of the writer. The same socket
carries the counts, and the writer's last word: unmapped. Until that word (or the same over the control API) or the
writer's exit, the memory may still be written to, whatever has become of the connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hmac
import logging
import os
import secrets
import select
import socket
import struct
from collections import Counter, deque
from collections.abc import Sequence
from operator import add
from pathlib import Path

from kvmesh.errors import FailedPrecondition, InvalidArgument, KvmeshError, Unauthenticated, Unavailable
from kvmesh.kv.fds import MAX_FDS, close_fds
from kvmesh.kv.pidfd import check_pidfd, is_alive, open_pidfd
from kvmesh.kv.region import Region
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.rpc import BackgroundTasks
from kvmesh.transfer.transports.base import (
    Arrival,
    Completion,
    Endpoint,
    EngineMemory,
    Expected,
    GrantedPages,
    Inbound,
    Outbound,
    Transport,
    Write,
)
from kvmesh.transfer.wire import MAX_HELLO_BYTES, PROTOCOL, FrameSocket, exchange, open_unix

log = logging.getLogger(__name__)

# One count, or a word: immediate, kind, bytes.
RECORD = struct.Struct("<IIQ")
KIND_BYTES = 0
KIND_UNMAPPED = 1
HELLO_TIMEOUT_S = 5.0
MAX_PENDING_HELLOS = 64
# Memory beyond this is left to be faulted in by the copies: filling its page tables would hold up the hello.
MAX_PREFAULT_BYTES = 2 << 30
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def host_id() -> str:
    """Names the running kernel: two processes with one boot id can share memory if a socket reaches."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def address_of(region: Region) -> int:
    """Where a region is mapped. Keeps nothing alive: the caller keeps the region open."""
    return int(region.view().__array_interface__["data"][0])


def prefault(regions: Sequence[Region], *, write: bool) -> None:
    """Fill the page tables now rather than one fault a page during the first copies. Best effort, releases the GIL."""
    advice = _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ
    left = MAX_PREFAULT_BYTES
    for region in regions:
        _libc.madvise(address_of(region), min(left, region.nbytes), advice)
        left -= min(left, region.nbytes)


class ShmOutbound(Outbound):
    """Copies from this engine's regions into the peer's mapped ones."""

    def __init__(self, sock: socket.socket, source: Sequence[Region], target: Sequence[Region]) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._target = list(target)
        self._src = [(address_of(region), region.nbytes) for region in source]
        self._dst = [(address_of(region), region.nbytes) for region in target]
        self._queue: deque[Write] = deque()
        self._next_run = 0
        # By immediate: writes in the queue, and what has landed without being told yet.
        self._queued: Counter[int] = Counter()
        self._landed: dict[int, tuple[int, list[Completion]]] = {}
        self._untold: deque[tuple[bytes, list[Completion]]] = deque()
        self._completions: list[Completion] = []
        self._broken = ""
        self._closed = False

    def post(self, write: Write) -> None:
        if self._broken:
            self._completions.append(Completion(write.context, 0, self._broken))
        else:
            self._queue.append(write)
            self._queued[write.immediate] += 1

    def poll(self, budget: int) -> list[Completion]:
        self._look()
        while self._queue and budget > 0 and not self._broken:
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
        completions, self._completions = self._completions, []
        return completions

    def copy(self, write: Write, first: int, budget: int) -> tuple[int, int]:
        """Copy runs from `first` on, about `budget` bytes and at least one: (next run, bytes moved)."""
        count = len(write.length)
        last = min(count, first + max(1, budget * count // write.nbytes))
        src, dst, length = write.src, write.dst, write.length
        if first or last < count:
            src, dst, length = src[first:last], dst[first:last], length[first:last]
        self._check(write, src, dst, length)
        move, src_base, dst_base = ctypes.memmove, self._src[write.src_region][0], self._dst[write.dst_region][0]
        # memmove releases the GIL; this loop is what the rate hangs on, so nothing else is in it.
        for a, b, n in zip(src, dst, length, strict=True):
            move(dst_base + b, src_base + a, n)
        return last, sum(length)

    def _check(self, write: Write, src: Sequence[int], dst: Sequence[int], length: Sequence[int]) -> None:
        """The last line of defence: a wrong plan must never write outside of the region it names."""
        src_end, dst_end = max(map(add, src, length)), max(map(add, dst, length))
        if (
            min(src) < 0
            or min(dst) < 0
            or min(length) < 1
            or src_end > self._src[write.src_region][1]
            or dst_end > self._dst[write.dst_region][1]
        ):
            raise InvalidArgument(f"a write up to {src_end} and {dst_end} is outside of its regions")

    def tell(self, immediate: int, nbytes: int) -> None:
        """Tell the receiver a count outside of `poll` (the fake transport's way)."""
        self._untold.append((RECORD.pack(immediate, KIND_BYTES, nbytes), []))
        self._send()

    def flush(self, immediate: int) -> None:
        kept: deque[Write] = deque()
        for position, write in enumerate(self._queue):
            if write.immediate == immediate and not (position == 0 and self._next_run):
                self._completions.append(Completion(write.context, 0, "flushed"))
                self._queued[immediate] -= 1
            else:
                kept.append(write)
        self._queue = kept
        if not self._queued[immediate] and immediate not in self._landed:
            del self._queued[immediate]

    def fence(self, reason: str) -> None:
        if not self._broken:
            self._broken = reason
        for write in self._queue:
            self._completions.append(Completion(write.context, 0, self._broken))
        self._queue.clear()
        self._queued.clear()
        self._next_run = 0
        for _, done in [*self._landed.values(), *self._untold]:
            # Landed, but the receiver will not know: to the transfer that is a failure.
            self._completions.extend(Completion(item.context, 0, self._broken) for item in done)
        self._landed.clear()
        self._untold.clear()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.fence("closed")
        for region in self._target:
            region.close()
        # Without waiting: where this does not get through, the control API tells it.
        with contextlib.suppress(OSError):
            self._sock.send(RECORD.pack(0, KIND_UNMAPPED, 0), socket.MSG_NOSIGNAL)
        self._sock.close()

    @property
    def busy(self) -> bool:
        return bool(self._queue) or bool(self._landed) or bool(self._completions)

    @property
    def broken(self) -> str:
        return self._broken

    def wait_fds(self) -> list[tuple[int, int]]:
        if self._broken:
            return []
        return [(self._sock.fileno(), select.POLLIN | (select.POLLOUT if self._untold else 0))]

    def _look(self) -> None:
        """The destination never sends: readable means that it is gone."""
        if self._broken:
            return
        try:
            data = self._sock.recv(1)
            self.fence("the destination's sidecar sent what nobody asked for" if data else "the destination is gone")
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self.fence(f"the destination is gone: {error.strerror}")

    def _send(self) -> None:
        """Tell what has been copied. A write is complete when the receiver's socket has taken its count."""
        while self._untold and not self._broken:
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
            self._completions.extend(done)


class ShmInbound(Inbound):
    """The destination's end: reads counts, and knows when the writer can no longer write."""

    def __init__(self, sock: socket.socket, pidfd: int, expected: Expected) -> None:
        self._sock = sock
        self._pidfd = pidfd
        self._expected = expected
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._arrivals: list[Arrival] = []
        self._gone = asyncio.Event()
        self._open = True

    def begin(self) -> None:
        """Read counts from now on."""
        self._loop.add_reader(self._sock.fileno(), self._readable)
        self._loop.add_reader(self._pidfd, self._exited)

    def begin_without_socket(self, reason: str) -> None:
        """The data connection failed before it began: wait for the writer's end alone."""
        self._open = False
        self._loop.add_reader(self._pidfd, self._exited)
        self._expected.on_end(reason)

    def grant(self, immediate: int, pages: GrantedPages) -> None:
        """The writer stores by itself: there is nothing to check here."""

    def revoke(self, immediate: int) -> None:
        """See `grant`."""

    def poll(self) -> list[Arrival]:
        arrivals, self._arrivals = self._arrivals, []
        return arrivals

    async def fence(self) -> None:
        # The writer sees the end of the stream, stops, unmaps and says so; reading goes on until then.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
        await self._gone.wait()
        self._close_socket("fenced")

    def unmapped(self) -> None:
        self._set_gone()

    def abandon(self) -> None:
        """The memory never left."""
        self._open = False
        self._set_gone()

    def _exited(self) -> None:
        self._readable()
        self._set_gone()
        self._close_socket("the writer's process is gone")

    def _set_gone(self) -> None:
        """No write can land any more."""
        if not self._gone.is_set():
            self._gone.set()
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)

    def _readable(self) -> None:
        if not self._open:
            return
        try:
            data = self._sock.recv(64 << 10)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._close_socket(f"data connection lost: {error.strerror}")
            return
        if not data:
            self._close_socket("the writer closed the data connection")
            return
        self._buffer += data
        whole = len(self._buffer) // RECORD.size * RECORD.size
        for immediate, kind, nbytes in RECORD.iter_unpack(self._buffer[:whole]):
            if kind == KIND_UNMAPPED:
                self._set_gone()
            elif kind == KIND_BYTES:
                self._arrivals.append(Arrival(immediate, nbytes))
            else:
                self._close_socket(f"a record of unknown kind {kind}")
                return
        del self._buffer[:whole]
        if self._arrivals:
            self._expected.on_ready()

    def _close_socket(self, reason: str) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()
            self._expected.on_end(reason)


class ShmTransport(Transport):
    """Listens on one Unix socket for writers on this host."""

    name = "shm"

    def __init__(self, socket_path: Path) -> None:
        self._path = socket_path
        self._server: socket.socket | None = None
        self._usable = (False, "not started")
        self._memory: EngineMemory | None = None
        self._doors: dict[int, tuple[bytes, Expected]] = {}
        self._tasks = BackgroundTasks()
        self._pending = 0
        self._host_id = ""

    async def start(self) -> None:
        try:
            self._host_id = host_id()
            self._server = listen_unix(self._path)
        except (OSError, KvmeshError) as error:
            self._usable = (False, f"no Unix socket at {self._path}: {error}")
            raise Unavailable(self._usable[1]) from None
        asyncio.get_running_loop().add_reader(self._server.fileno(), self._accept)
        self._usable = (True, f"memfd over {self._path}")

    @property
    def status(self) -> tuple[bool, str]:
        return self._usable

    def offer(self) -> pb.TransportOffer:
        return pb.TransportOffer(name=self.name, host_id=self._host_id)

    def judge(self, offer: pb.TransportOffer) -> tuple[bool, str]:
        if not offer.host_id or offer.host_id != self._host_id:
            return False, "another host"
        return True, "same host (boot id)"

    def register(self, memory: EngineMemory) -> None:
        if len(memory.regions) > MAX_FDS:
            raise InvalidArgument(f"shm passes at most {MAX_FDS} regions, the engine has {len(memory.regions)}")
        self._memory = memory

    def deregister(self) -> None:
        self._memory = None
        self._doors.clear()

    def expect(self, link: Expected) -> Endpoint:
        token = secrets.token_bytes(32)
        self._doors[link.link_id] = (token, link)
        return Endpoint(str(self._path), token)

    def forget(self, link_id: int) -> None:
        self._doors.pop(link_id, None)

    async def connect(self, reply: pb.PeerHelloReply, sidecar_id: str, timeout_s: float) -> Outbound:
        if self._memory is None:
            raise FailedPrecondition("no engine is registered")
        sock = await open_unix(reply.endpoint, timeout_s)
        hello = pb.DataHello(protocol=PROTOCOL, token=reply.token, link_id=reply.link_id, sidecar_id=sidecar_id)
        pidfd = open_pidfd()
        try:
            body, fds = await exchange(sock, hello, [pidfd], max_fds=len(reply.regions), timeout_s=timeout_s)
        finally:
            os.close(pidfd)
        regions: list[Region] = []
        try:
            answer = pb.DataHelloReply.FromString(body)
            if not answer.ok:
                raise Unavailable(f"refused by the destination: {answer.reason}")
            if len(fds) != len(reply.regions) or [r.key for r in answer.regions] != [r.key for r in reply.regions]:
                raise InvalidArgument("the destination sent other regions than it announced")
            for info in reply.regions:
                regions.append(Region.adopt(fds.pop(0), info.nbytes, f"peer-{info.group}"))
            await asyncio.to_thread(prefault, regions, write=True)
            return self.outbound(sock, self._memory.regions, regions)
        except BaseException:
            close_fds(fds)
            for region in regions:
                region.close()
            sock.close()
            raise

    def outbound(self, sock: socket.socket, source: Sequence[Region], target: Sequence[Region]) -> Outbound:
        """The link's writing end (the fake transport has another)."""
        return ShmOutbound(sock, source, target)

    async def close(self) -> None:
        if self._server is not None:
            asyncio.get_running_loop().remove_reader(self._server.fileno())
            self._server.close()
            self._path.unlink(missing_ok=True)
            self._server = None
        self._usable = (False, "closed")
        await self._tasks.close()

    def _accept(self) -> None:
        assert self._server is not None
        try:
            sock, _ = self._server.accept()
        except OSError:
            return
        sock.setblocking(False)
        if self._pending >= MAX_PENDING_HELLOS:
            sock.close()
            return
        self._pending += 1
        self._tasks.spawn(self._admit(sock), name="shm-admit", essential=False)

    async def _admit(self, sock: socket.socket) -> None:
        """Serve one hello. Whatever is wrong with it costs this connection alone."""
        hello: asyncio.Future[tuple[pb.DataHello, list[int]]] = asyncio.get_running_loop().create_future()

        def on_frame(body: bytes) -> None:
            message = pb.DataHello.FromString(body)
            if hello.done():
                raise InvalidArgument("more than a hello before its answer")
            hello.set_result((message, frames.take_fds(1)))

        def on_closed(error: KvmeshError | None) -> None:
            if not hello.done():
                hello.set_exception(error or Unavailable("closed before its hello"))

        frames = FrameSocket(sock, on_frame=on_frame, on_closed=on_closed, max_frame=MAX_HELLO_BYTES, max_fds=1)
        fds: list[int] = []
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                message, fds = await hello
                await self._welcome(frames, message, fds)
        except (KvmeshError, TimeoutError) as error:
            text = error.message if isinstance(error, KvmeshError) else f"no hello within {HELLO_TIMEOUT_S:g} s"
            log.warning("shm: a writer was refused: %s", text)
            frames.send(pb.DataHelloReply(ok=False, reason=text))
        finally:
            self._pending -= 1
            close_fds(fds)
            frames.close()

    async def _welcome(self, frames: FrameSocket, hello: pb.DataHello, fds: list[int]) -> None:
        if hello.protocol != PROTOCOL:
            raise FailedPrecondition(f"data protocol {hello.protocol} is not spoken here (this is {PROTOCOL})")
        token, expected = self._doors.get(hello.link_id, (b"", None))
        if expected is None or not hmac.compare_digest(token, hello.token):
            raise Unauthenticated("no such link, or a wrong token")
        if self._memory is None:
            raise FailedPrecondition("no engine is registered")
        check_pidfd(fds[0])
        if not is_alive(fds[0]):
            raise InvalidArgument("the writer's process is gone already")
        del self._doors[hello.link_id]
        memory = self._memory
        inbound = ShmInbound(frames.raw, fds[0], expected)
        pidfd = fds.pop()
        try:
            await expected.on_joined(inbound, os.dup(pidfd))
        except BaseException:
            inbound.abandon()
            raise
        try:
            frames.send(pb.DataHelloReply(ok=True, regions=memory.infos), [region.fd for region in memory.regions])
            await frames.flush(HELLO_TIMEOUT_S)
            frames.detach()
        except BaseException as error:
            # The memory may have left: only the writer's word or its exit ends this.
            inbound.begin_without_socket(f"the hello failed: {error}")
            raise
        inbound.begin()


def listen_unix(path: Path) -> socket.socket:
    """A listening non-blocking Unix socket that only this user may open; a dead predecessor's is replaced.

    Raises FailedPrecondition where somebody listens there, OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(os.fspath(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            else:
                raise FailedPrecondition(f"somebody listens on {path} already")
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        server.setblocking(False)
        server.bind(os.fspath(path))
        os.chmod(path, 0o600)
        server.listen(64)
    except BaseException:
        server.close()
        raise
    return server
