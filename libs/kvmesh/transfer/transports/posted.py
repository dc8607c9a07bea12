"""The sidecar's view of an engine that writes by itself: what was handed to it and what it has not given back yet."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from typing import Protocol

from kvmesh.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, Unavailable
from kvmesh.proto.v1 import kvtransfer_pb2 as pb

log = logging.getLogger(__name__)


class Tell(Protocol):
    """Send to the engine; the descriptors stay the caller's."""

    def __call__(self, message: pb.SidecarMessage, fds: Sequence[int] = ()) -> None: ...


class EnginePoster:
    """One life of an engine that posts. Lives on the loop.

    pidfd: of the process that writes; taken over. on_released is called for memory that was let go of when no link
    waited for it any more: that of a predecessor sidecar, or too late for its link.
    """

    def __init__(self, tell: Tell, pidfd: int, transports: Sequence[str]) -> None:
        self._tell = tell
        self.pidfd = pidfd
        self.transports = frozenset(transports)
        self.on_released: Callable[[pb.PeerReleased], None] = lambda released: None
        self._mapping: dict[int, asyncio.Future[str]] = {}
        # By link: memory that the engine has, or may have; resolved with True when it has let go of it.
        self._held: dict[int, asyncio.Future[bool]] = {}
        self._ends: dict[int, Callable[[int, str], None]] = {}
        self._awaited: set[int] = set()
        self._lost = False

    def pidfd_copy(self) -> int:
        """Of the process that writes, the caller's to close. Raises Unavailable where it is gone: its number may be
        another descriptor by then."""
        if self._lost:
            raise Unavailable("the engine is gone")
        return os.dup(self.pidfd)

    async def map(self, memory: pb.PeerMemory, fds: Sequence[int], timeout_s: float) -> None:
        """Hand a peer's memory over. Raises FailedPrecondition (the engine cannot map it), DeadlineExceeded,
        Unavailable; `holds` tells whether the engine may have it all the same. Raises InvalidArgument for a link's name
        that is held: peers choose them, and none may put its memory in another's place."""
        if self._lost:
            raise Unavailable("the engine is gone")
        if memory.link_id in self._held or memory.link_id in self._awaited:
            raise InvalidArgument(f"link {memory.link_id:x} is another's")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[str] = loop.create_future()
        self._mapping[memory.link_id] = answer
        self._held[memory.link_id] = loop.create_future()
        self._tell(pb.SidecarMessage(peer_memory=memory), fds)
        try:
            async with asyncio.timeout(timeout_s):
                reason = await answer
        except TimeoutError:
            self.release(memory.link_id, "too late")
            raise DeadlineExceeded(f"the engine did not map the memory within {timeout_s:g} s") from None
        except BaseException:
            self.release(memory.link_id, "not wanted any more")
            raise
        finally:
            self._mapping.pop(memory.link_id, None)
        if reason:
            raise FailedPrecondition(f"the engine cannot map it: {reason}")
        self._awaited.add(memory.link_id)

    def post(
        self, transfer_id: int, link_id: int, request: pb.StartTransfer, on_end: Callable[[int, str], None]
    ) -> None:
        """Let it write a transfer. on_end(bytes, reason): once, on the loop; not after `lost`."""
        self._ends[transfer_id] = on_end
        post = pb.PostTransfer(transfer_id=transfer_id, link_id=link_id, request=request)
        self._tell(pb.SidecarMessage(post_transfer=post))

    def stop(self, transfer_id: int, reason: str) -> None:
        """End a transfer early; `on_end` follows."""
        if transfer_id in self._ends:
            self._tell(pb.SidecarMessage(stop_transfer=pb.StopTransfer(transfer_id=transfer_id, reason=reason)))

    def release(self, link_id: int, reason: str) -> None:
        """Have it let go of a peer's memory. Idempotent."""
        if link_id in self._held and not self._lost:
            self._tell(pb.SidecarMessage(release_peer=pb.ReleasePeer(link_id=link_id, reason=reason[:500])))

    def give_up(self, link_id: int, reason: str) -> None:
        """As `release`, of memory that no link waits for."""
        self._awaited.discard(link_id)
        self.release(link_id, reason)

    def holds(self, link_id: int) -> bool:
        """True while the engine has that memory or may have it; for ever where it was lost before it said otherwise."""
        return link_id in self._held

    async def released(self, link_id: int, timeout_s: float) -> None:
        """Wait until it has let go, or is lost, or the time is over: `holds` tells. Later ends go to `on_released`."""
        held = self._held.get(link_id)
        try:
            if held is not None:
                await asyncio.wait([held], timeout=timeout_s)
        finally:
            self._awaited.discard(link_id)

    def on_message(self, message: pb.EngineMessage) -> None:
        """PeerMapped, PostEnded or PeerReleased."""
        kind = message.WhichOneof("body")
        if kind == "peer_mapped":
            mapped = message.peer_mapped
            if not mapped.ok:
                self._let_go(mapped.link_id)
            answer = self._mapping.get(mapped.link_id)
            if answer is not None and not answer.done():
                answer.set_result("" if mapped.ok else mapped.reason[:500] or "it does not say why")
        elif kind == "post_ended":
            on_end = self._ends.pop(message.post_ended.transfer_id, None)
            if on_end is not None:
                on_end(message.post_ended.bytes, message.post_ended.reason[:500])
        elif kind == "peer_released":
            released = message.peer_released
            if not self._let_go(released.link_id):
                self.on_released(released)
        else:
            raise InvalidArgument(f"{kind} is no poster's message")

    def _let_go(self, link_id: int) -> bool:
        """True where a link waits for it."""
        held = self._held.pop(link_id, None)
        if held is not None and not held.done():
            held.set_result(True)
        return link_id in self._awaited

    def lost(self) -> None:
        """The engine's connection is over: nothing more will be heard."""
        if self._lost:
            return
        self._lost = True
        for answer in self._mapping.values():
            if not answer.done():
                answer.set_exception(Unavailable("the engine is gone"))
        for held in self._held.values():
            if not held.done():
                held.set_result(False)
        self._ends.clear()
        os.close(self.pidfd)
