"""A rank's own connection to its engine's sidecar: it passes the rank's memory, and its end is the engine's end there.

The leader (`SidecarClient`) does the talking: slots, transfers, and whose process may still write into the memory. A
rank only brings what is its own and learns when the sidecar is gone.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from google.protobuf.message import DecodeError

from kvmesh.errors import DataLoss, DeadlineExceeded, InvalidArgument, KvmeshError, Unavailable
from kvmesh.kv.layout import KvLayout
from kvmesh.kv.pidfd import open_pidfd
from kvmesh.kv.region import Region
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.rpc import cancel_and_wait
from kvmesh.transfer.descriptor import layout_to_proto
from kvmesh.transfer.hello import refusal, region_fds, region_infos
from kvmesh.transfer.link import BACKOFF_S
from kvmesh.transfer.tail import TailBuffer, check_tails, region_sizes
from kvmesh.transfer.wire import MAX_HELLO_BYTES, PROTOCOL, FrameSocket, open_unix

log = logging.getLogger(__name__)


class RankMember:
    """One rank at one life of its sidecar. Lives on one asyncio loop.

    lost: resolves with the reason once the connection is over (the sidecar, the leader or another rank is gone); not by
    `close`. It never raises.
    """

    def __init__(self, engine_id: str, incarnation: int, rank: int) -> None:
        """Use `connect`."""
        self.engine_id = engine_id
        self.incarnation = incarnation
        self.rank = rank
        self.sidecar_id = ""
        self.sidecar_incarnation = 0
        self.region_keys: list[int] = []
        loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[str] = loop.create_future()
        self._answer: asyncio.Future[pb.SidecarMessage] = loop.create_future()
        self._frames: FrameSocket | None = None

    @classmethod
    async def connect(
        cls,
        path: str | Path,
        *,
        engine_id: str,
        incarnation: int,
        rank: int,
        layout: KvLayout,
        regions: Mapping[str, Region],
        timeout_s: float,
        doorbell: Region | None = None,
        tails: Sequence[TailBuffer] = (),
    ) -> RankMember:
        """Join the engine's session; returns when its leader and all of its ranks are in, in whatever order they come.

        regions: one per layer group and tail buffer, this rank's. doorbell: only where this rank rings for itself.
        Raises Unavailable (nobody there), DeadlineExceeded, or what the sidecar refuses.
        """
        check_tails(layout, tails)
        names = list(region_sizes(layout, tails))
        if set(names) != set(regions):
            raise InvalidArgument(f"regions are given for {sorted(regions)}, the layout has {names}")
        hello = pb.RankHello(
            engine_id=engine_id,
            incarnation=incarnation,
            rank=rank,
            layout=layout_to_proto(layout, tails),
            regions=region_infos(regions, names, rank),
            protocol=PROTOCOL,
            doorbell_bytes=doorbell.nbytes if doorbell is not None else 0,
        )
        fds = [*([doorbell.fd] if doorbell is not None else []), *region_fds(regions, names)]
        member = cls(engine_id, incarnation, rank)
        try:
            async with asyncio.timeout(timeout_s):
                await member._join(path, hello, fds, timeout_s)
        except TimeoutError:
            await member.close()
            raise DeadlineExceeded(f"the sidecar did not take rank {rank} in within {timeout_s:g} s") from None
        except BaseException:
            await member.close()
            raise
        return member

    async def _join(self, path: str | Path, hello: pb.RankHello, fds: Sequence[int], timeout_s: float) -> None:
        sock = await open_unix(path, timeout_s)
        self._frames = FrameSocket(sock, on_frame=self._on_frame, on_closed=self._on_closed, max_frame=MAX_HELLO_BYTES)
        pidfd = open_pidfd()
        try:
            self._frames.send(pb.EngineMessage(call_id=1, rank_hello=hello), [pidfd, *fds])
        finally:
            os.close(pidfd)
        answer = await self._answer
        if answer.WhichOneof("body") == "refused":
            raise refusal(answer.refused)
        welcome = answer.rank_hello
        if answer.WhichOneof("body") != "rank_hello" or len(welcome.region_keys) != len(hello.regions):
            raise DataLoss("the sidecar answered the rank's hello with something else")
        self.sidecar_id = welcome.sidecar_id
        self.sidecar_incarnation = welcome.incarnation
        self.region_keys = list(welcome.region_keys)

    @property
    def connected(self) -> bool:
        """False once the connection is over."""
        return self._frames is not None and not self._frames.closed

    async def close(self) -> None:
        """Leave: the engine's life at the sidecar ends. Idempotent."""
        if self._frames is not None:
            self._frames.close()

    def _on_frame(self, body: bytes) -> None:
        try:
            message = pb.SidecarMessage.FromString(body)
        except DecodeError:
            raise DataLoss("the sidecar sent something that is no message") from None
        if self._answer.done():
            raise DataLoss("the sidecar said more than its welcome to a rank")
        self._answer.set_result(message)

    def _on_closed(self, error: KvmeshError | None) -> None:
        reason = error.message if error is not None else "end of file"
        if not self._answer.done():
            self._answer.set_exception(Unavailable(f"the sidecar is lost: {reason}"))
            # Whoever waited may have left.
            self._answer.exception()
        if self._frames is not None:
            self._frames.close()
        if not self.lost.done():
            self.lost.set_result(reason)


class RankLink:
    """Keeps a rank joined with whichever sidecar listens on its engine's socket, as `SidecarLink` does for the leader.

    join_timeout_s: what one attempt may take, with the time that the others need to come.
    on_connected(member) and on_lost(reason) are called on the loop.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        engine_id: str,
        incarnation: int,
        rank: int,
        layout: KvLayout,
        regions: Mapping[str, Region],
        doorbell: Region | None = None,
        tails: Sequence[TailBuffer] = (),
        join_timeout_s: float = 35.0,
        on_connected: Callable[[RankMember], None] | None = None,
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        self.member: RankMember | None = None
        self.error = ""
        self._path = path
        self._engine_id = engine_id
        self._incarnation = incarnation
        self._rank = rank
        self._layout = layout
        self._regions = regions
        self._doorbell = doorbell
        self._tails = tuple(tails)
        self._timeout_s = join_timeout_s
        self._on_connected = on_connected
        self._on_lost = on_lost
        self._connected = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def start(self) -> None:
        """Begin joining in the background. Idempotent."""
        if self._task is None and not self._closed:
            self._task = asyncio.create_task(self._run(), name="rank-link")

    async def wait_connected(self, timeout_s: float) -> RankMember:
        """The member, once there is one. Raises Unavailable after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.member is None:
                    await self._connected.wait()
                return self.member
        except TimeoutError:
            why = f": {self.error}" if self.error else ""
            raise Unavailable(
                f"rank {self._rank} is in no sidecar on {self._path} after {timeout_s:g} s{why}"
            ) from None

    async def close(self) -> None:
        """Stop and leave. Idempotent."""
        self._closed = True
        await cancel_and_wait(self._task)
        member, self.member = self.member, None
        self._connected.clear()
        if member is not None:
            await member.close()

    async def _run(self) -> None:
        delay = BACKOFF_S[0]
        while True:
            try:
                member = await RankMember.connect(
                    self._path,
                    engine_id=self._engine_id,
                    incarnation=self._incarnation,
                    rank=self._rank,
                    layout=self._layout,
                    regions=self._regions,
                    timeout_s=self._timeout_s,
                    doorbell=self._doorbell,
                    tails=self._tails,
                )
            except (KvmeshError, OSError) as error:
                # OSError: no descriptor is left, or the sidecar died in the middle of it. Neither lasts for ever.
                reason = error.message if isinstance(error, KvmeshError) else str(error)
                if reason != self.error:
                    log.warning("rank %d is in no sidecar yet: %s", self._rank, reason)
                self.error = reason
                await asyncio.sleep(delay)
                delay = min(delay * 2, BACKOFF_S[1])
                continue
            delay = BACKOFF_S[0]
            self.error = ""
            self.member = member
            self._connected.set()
            if self._on_connected is not None:
                self._on_connected(member)
            log.info("rank %d has joined sidecar %s", self._rank, member.sidecar_id)
            await asyncio.wait({member.lost})
            self.member = None
            self._connected.clear()
            log.warning("rank %d has lost its sidecar: %s", self._rank, member.lost.result())
            if self._on_lost is not None:
                self._on_lost(member.lost.result())
