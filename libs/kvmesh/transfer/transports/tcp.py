"""TCP: the writer streams runs from its mapped region, the destination's sidecar receives them straight into its own.

After a framed hello with a token, the writer sends writes: a head (immediate, region, runs, bytes, number), a table of
runs (offset, length), the bytes. The destination checks every run against the pages that were granted to that immediate
before one byte of it is taken, and acknowledges each write by number once it has landed: only then is it complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence

import numpy as np

from kvmesh.config import split_host_port
from kvmesh.errors import (
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    KvmeshError,
    Unauthenticated,
    Unavailable,
)
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
from kvmesh.transfer.wire import MAX_HELLO_BYTES, PROTOCOL, FrameSocket, exchange

log = logging.getLogger(__name__)

# immediate, region index, runs, reserved, bytes, number of the write.
HEAD = struct.Struct("<IIIIQQ")
# number of the write, bytes landed (REFUSED: dropped).
ACK = struct.Struct("<QQ")
REFUSED = (1 << 64) - 1
MAX_RUNS = 1 << 16
MAX_WRITE_BYTES = 1 << 40
# Buffers of one system call; the kernel's limit is 1024.
MAX_IOV = 512
HELLO_TIMEOUT_S = 5.0
MAX_PENDING_HELLOS = 64
JOIN_TIMEOUT_S = 10.0
_SCRATCH_BYTES = 256 << 10
_SOCKET_BUFFER = 4 << 20


class TcpOutbound(Outbound):
    """Sends from this engine's regions; completes on acknowledgement."""

    def __init__(self, sock: socket.socket, source: Sequence[Region]) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._src = [region.buf for region in source]
        self._queue: deque[Write] = deque()
        self._current: deque[memoryview] = deque()
        self._begun: dict[int, Write] = {}
        self._number = 0
        self._acks = bytearray()
        self._completions: list[Completion] = []
        self._broken = ""
        self._blocked = False
        self._closed = False

    def post(self, write: Write) -> None:
        if self._broken:
            self._completions.append(Completion(write.context, 0, self._broken))
        else:
            self._queue.append(write)

    def poll(self, budget: int) -> list[Completion]:
        if not self._broken:
            try:
                self._receive()
                self._send(budget)
            except OSError as error:
                self.fence(f"the data connection broke: {error.strerror}")
        completions, self._completions = self._completions, []
        return completions

    def flush(self, immediate: int) -> None:
        kept: deque[Write] = deque()
        for write in self._queue:
            if write.immediate == immediate:
                self._completions.append(Completion(write.context, 0, "flushed"))
            else:
                kept.append(write)
        self._queue = kept

    def fence(self, reason: str) -> None:
        if not self._broken:
            self._broken = reason
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
        for write in [*self._begun.values(), *self._queue]:
            self._completions.append(Completion(write.context, 0, self._broken))
        self._begun.clear()
        self._queue.clear()
        self._release(self._current)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.fence("closed")
            self._release(self._src)
            self._sock.close()

    @property
    def busy(self) -> bool:
        return bool(self._completions) or (not self._blocked and bool(self._queue or self._current))

    @property
    def broken(self) -> str:
        return self._broken

    def wait_fds(self) -> list[tuple[int, int]]:
        if self._broken:
            return []
        return [(self._sock.fileno(), select.POLLIN | (select.POLLOUT if self._queue or self._current else 0))]

    def _release(self, views: deque[memoryview] | list[memoryview]) -> None:
        """Views of the region would keep it mapped."""
        for view in views:
            view.release()
        views.clear()

    def _begin(self) -> None:
        write = self._queue.popleft()
        if len(write.length) > MAX_RUNS:
            # Split by the mover's plan long before; a table of this length would be refused.
            self.fence(f"a write of {len(write.length)} runs")
            return
        self._number += 1
        self._begun[self._number] = write
        head = HEAD.pack(write.immediate, write.dst_region, len(write.length), 0, write.nbytes, self._number)
        table = np.stack([np.asarray(write.dst, dtype="<u8"), np.asarray(write.length, dtype="<u8")], axis=1).tobytes()
        self._current.append(memoryview(head + table))
        source = self._src[write.src_region]
        for offset, length in zip(write.src, write.length, strict=True):
            self._current.append(source[offset : offset + length])

    def _send(self, budget: int) -> None:
        self._blocked = False
        while budget > 0 and not self._broken:
            if not self._current:
                if not self._queue:
                    return
                self._begin()
                continue
            batch = [self._current[i] for i in range(min(len(self._current), MAX_IOV))]
            try:
                sent = self._sock.sendmsg(batch, [], socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                self._blocked = True
                return
            budget -= sent
            while sent:
                first = self._current[0]
                if sent >= first.nbytes:
                    sent -= first.nbytes
                    self._current.popleft().release()
                else:
                    self._current[0] = first[sent:]
                    first.release()
                    sent = 0

    def _receive(self) -> None:
        try:
            data = self._sock.recv(64 << 10)
        except (BlockingIOError, InterruptedError):
            return
        if not data:
            self.fence("the destination closed the data connection")
            return
        self._acks += data
        whole = len(self._acks) // ACK.size * ACK.size
        for number, nbytes in ACK.iter_unpack(self._acks[:whole]):
            write = self._begun.pop(number, None)
            if write is None:
                self.fence("the destination acknowledged what was not sent")
                return
            refused = "" if nbytes == write.nbytes else "the destination dropped it: its generation is over there"
            self._completions.append(Completion(write.context, 0 if refused else nbytes, refused))
        del self._acks[:whole]


class TcpInbound(Inbound):
    """A reader thread that lands what has been granted."""

    def __init__(self, sock: socket.socket, memory: EngineMemory, expected: Expected) -> None:
        self._sock = sock
        self._memory = memory
        self._expected = expected
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._grants: dict[int, GrantedPages] = {}
        self._arrivals: list[Arrival] = []
        self._fenced = False
        self._views = [region.buf for region in memory.regions]
        self._page_bytes = [memory.layout.page_bytes(info.group) for info in memory.infos]
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._thread = threading.Thread(target=self._run, name=f"kvmesh-tcp-{expected.link_id:x}", daemon=True)

    def begin(self) -> None:
        """Start to receive."""
        # Blocking without a timeout: the link's lease bounds the silence, and `fence` wakes the thread by shutdown.
        self._sock.settimeout(None)
        self._thread.start()

    def grant(self, immediate: int, pages: GrantedPages) -> None:
        with self._lock:
            self._grants[immediate] = pages

    def revoke(self, immediate: int) -> None:
        with self._lock:
            self._grants.pop(immediate, None)

    def poll(self) -> list[Arrival]:
        with self._lock:
            arrivals, self._arrivals = self._arrivals, []
        return arrivals

    async def fence(self) -> None:
        self._fenced = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        while self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, JOIN_TIMEOUT_S)
        self.abandon()

    def abandon(self) -> None:
        """The reader is not running: let go of everything."""
        for view in self._views:
            view.release()
        self._sock.close()

    def unmapped(self) -> None:
        """Nothing of ours is ever mapped there."""

    def _run(self) -> None:
        reason = "the writer closed the data connection"
        try:
            while self._one_write():
                pass
        except OSError as error:
            reason = f"the data connection broke: {error.strerror}"
        except KvmeshError as error:
            reason = error.message
            if not self._fenced:
                log.warning("tcp: %s is cut off: %s", self._expected.peer, reason)
        finally:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            for view in self._views:
                view.release()
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._expected.on_end, reason)

    def _one_write(self) -> bool:
        """False at the end of the stream between two writes."""
        head = self._exactly(HEAD.size, optional=True)
        if not head:
            return False
        immediate, region, runs, _, nbytes, number = HEAD.unpack(head)
        if not 1 <= runs <= MAX_RUNS or not 1 <= nbytes <= MAX_WRITE_BYTES or region >= len(self._views):
            raise InvalidArgument(f"a write of {nbytes} bytes in {runs} runs to region {region}")
        table = np.frombuffer(self._exactly(runs * 16), dtype="<u8").reshape(runs, 2)
        offset, length = table[:, 0], table[:, 1]
        if int(length.max()) > MAX_WRITE_BYTES or int(length.astype(np.float64).sum()) != nbytes:
            raise InvalidArgument("the runs of a write do not add up")
        with self._lock:
            grant = self._grants.get(immediate)
        if grant is None:
            self._drop(nbytes)
            landed = REFUSED
        else:
            self._check(grant, region, offset, length)
            self._land(region, offset.tolist(), length.tolist())
            landed = nbytes
        with self._lock:
            self._arrivals.append(Arrival(immediate, nbytes))
        self._loop.call_soon_threadsafe(self._expected.on_ready)
        self._sock.sendall(ACK.pack(number, landed), socket.MSG_NOSIGNAL)
        return True

    def _check(self, grant: GrantedPages, region: int, offset: np.ndarray, length: np.ndarray) -> None:
        """Every byte of every run is in a granted page of one layer. Raises InvalidArgument."""
        size = np.uint64(self._page_bytes[region])
        num_pages = np.uint64(self._memory.layout.num_pages)
        total = np.uint64(self._memory.layout.region_bytes(self._memory.infos[region].group))
        if int(length.min()) < 1 or bool((offset >= total).any()) or bool((length > total - offset).any()):
            raise InvalidArgument("a write reaches outside of its region")
        first, last = offset // size, (offset + length - np.uint64(1)) // size
        if bool((first // num_pages != last // num_pages).any()):
            raise InvalidArgument("a run of a write reaches over a layer's end")
        allowed = grant.pages.get(region, np.zeros(0, dtype=np.int64))
        counts = (last - first + np.uint64(1)).astype(np.int64)
        # A run of n pages is granted when its first and last are, n - 1 places apart in the ascending list.
        start = np.searchsorted(allowed, (first % num_pages).astype(np.int64))
        end = start + counts - 1
        if len(allowed) == 0 or bool((end >= len(allowed)).any()):
            raise InvalidArgument("a write names a page that was not granted to it")
        wrong = (allowed[start] != (first % num_pages).astype(np.int64)) | (
            allowed[end] != (last % num_pages).astype(np.int64)
        )
        if bool(wrong.any()):
            raise InvalidArgument("a write names a page that was not granted to it")

    def _land(self, region: int, offset: list[int], length: list[int]) -> None:
        view = self._views[region]
        at = 0
        while at < len(length):
            batch = [view[o : o + n] for o, n in zip(offset[at : at + MAX_IOV], length[at : at + MAX_IOV], strict=True)]
            at += len(batch)
            try:
                self._fill(batch)
            finally:
                for piece in batch:
                    piece.release()

    def _fill(self, batch: list[memoryview]) -> None:
        done = 0
        while done < len(batch):
            received = self._sock.recvmsg_into(batch[done:])[0]
            if received == 0:
                raise DataLoss("the data connection ended inside a write")
            while received:
                first = batch[done]
                if received >= first.nbytes:
                    received -= first.nbytes
                    done += 1
                else:
                    batch[done] = first[received:]
                    first.release()
                    received = 0

    def _drop(self, nbytes: int) -> None:
        while nbytes:
            received = self._sock.recv_into(self._scratch, min(nbytes, _SCRATCH_BYTES))
            if received == 0:
                raise DataLoss("the data connection ended inside a write")
            nbytes -= received

    def _exactly(self, count: int, *, optional: bool = False) -> bytes:
        data = bytearray(count)
        view = memoryview(data)
        got = 0
        while got < count:
            received = self._sock.recv_into(view[got:])
            if received == 0:
                if optional and got == 0:
                    return b""
                raise DataLoss("the data connection ended inside a write's head")
            got += received
        return bytes(data)


class TcpTransport(Transport):
    """Listens on one TCP port for writers anywhere."""

    name = "tcp"

    def __init__(self, host: str, advertise: str = "") -> None:
        self._host = host
        self._advertise = advertise
        self._server: socket.socket | None = None
        self._address = ""
        self._usable = (False, "not started")
        self._memory: EngineMemory | None = None
        self._doors: dict[int, tuple[bytes, Expected]] = {}
        self._tasks = BackgroundTasks()
        self._pending = 0

    async def start(self) -> None:
        try:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            self._server = socket.create_server((self._host, 0), family=family, backlog=64)
        except OSError as error:
            self._usable = (False, f"cannot listen on {self._host}: {error.strerror}")
            raise Unavailable(self._usable[1]) from None
        self._server.setblocking(False)
        port = self._server.getsockname()[1]
        host = self._advertise or (socket.gethostname() if self._host in ("0.0.0.0", "::") else self._host)
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        asyncio.get_running_loop().add_reader(self._server.fileno(), self._accept)
        self._usable = (True, f"listening on {self._address}")

    @property
    def status(self) -> tuple[bool, str]:
        return self._usable

    def offer(self) -> pb.TransportOffer:
        return pb.TransportOffer(name=self.name)

    def judge(self, offer: pb.TransportOffer) -> tuple[bool, str]:
        return True, "reaches any host"

    def register(self, memory: EngineMemory) -> None:
        self._memory = memory

    def deregister(self) -> None:
        self._memory = None
        self._doors.clear()

    def expect(self, link: Expected) -> Endpoint:
        token = secrets.token_bytes(32)
        self._doors[link.link_id] = (token, link)
        return Endpoint(self._address, token)

    def forget(self, link_id: int) -> None:
        self._doors.pop(link_id, None)

    async def connect(self, reply: pb.PeerHelloReply, sidecar_id: str, timeout_s: float) -> Outbound:
        if self._memory is None:
            raise FailedPrecondition("no engine is registered")
        host, port = split_host_port(reply.endpoint)
        sock = await _open_tcp(host.strip("[]"), port, timeout_s)
        hello = pb.DataHello(protocol=PROTOCOL, token=reply.token, link_id=reply.link_id, sidecar_id=sidecar_id)
        body, _ = await exchange(sock, hello, [], max_fds=0, timeout_s=timeout_s)
        answer = pb.DataHelloReply.FromString(body)
        if not answer.ok:
            sock.close()
            raise Unavailable(f"refused by the destination: {answer.reason}")
        return TcpOutbound(sock, self._memory.regions)

    async def close(self) -> None:
        if self._server is not None:
            asyncio.get_running_loop().remove_reader(self._server.fileno())
            self._server.close()
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
        self._tasks.spawn(self._admit(sock), name="tcp-admit", essential=False)

    async def _admit(self, sock: socket.socket) -> None:
        hello: asyncio.Future[pb.DataHello] = asyncio.get_running_loop().create_future()

        def on_frame(body: bytes) -> None:
            if hello.done():
                raise InvalidArgument("more than a hello before its answer")
            hello.set_result(pb.DataHello.FromString(body))

        def on_closed(error: KvmeshError | None) -> None:
            if not hello.done():
                hello.set_exception(error or Unavailable("closed before its hello"))

        frames = FrameSocket(sock, on_frame=on_frame, on_closed=on_closed, max_frame=MAX_HELLO_BYTES)
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                await self._welcome(frames, await hello)
        except (KvmeshError, TimeoutError) as error:
            text = error.message if isinstance(error, KvmeshError) else f"no hello within {HELLO_TIMEOUT_S:g} s"
            log.warning("tcp: a writer was refused: %s", text)
            frames.send(pb.DataHelloReply(ok=False, reason=text))
        finally:
            self._pending -= 1
            frames.close()

    async def _welcome(self, frames: FrameSocket, hello: pb.DataHello) -> None:
        if hello.protocol != PROTOCOL:
            raise FailedPrecondition(f"data protocol {hello.protocol} is not spoken here (this is {PROTOCOL})")
        token, expected = self._doors.get(hello.link_id, (b"", None))
        if expected is None or not hmac.compare_digest(token, hello.token):
            raise Unauthenticated("no such link, or a wrong token")
        if self._memory is None:
            raise FailedPrecondition("no engine is registered")
        del self._doors[hello.link_id]
        inbound = TcpInbound(frames.raw, self._memory, expected)
        try:
            await expected.on_joined(inbound, None)
            frames.send(pb.DataHelloReply(ok=True, regions=self._memory.infos))
            await frames.flush(HELLO_TIMEOUT_S)
            _tune(frames.detach())
        except BaseException as error:
            inbound.abandon()
            expected.on_end(f"the hello failed: {error}")
            raise
        inbound.begin()


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER)


async def _open_tcp(host: str, port: int, timeout_s: float) -> socket.socket:
    """A connected, tuned, non-blocking socket. Raises Unavailable."""
    loop = asyncio.get_running_loop()
    reason = "no address"
    try:
        async with asyncio.timeout(timeout_s):
            for family, kind, proto, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                sock = socket.socket(family, kind | socket.SOCK_CLOEXEC, proto)
                try:
                    sock.setblocking(False)
                    _tune(sock)
                    await loop.sock_connect(sock, address)
                except OSError as error:
                    sock.close()
                    reason = error.strerror or str(error)
                except BaseException:
                    sock.close()
                    raise
                else:
                    return sock
    except TimeoutError:
        reason = f"no connection within {timeout_s:g} s"
    except OSError as error:
        reason = error.strerror or str(error)
    raise Unavailable(f"cannot connect to {host}:{port}: {reason}")
