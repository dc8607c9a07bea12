"""What every RDMA transport has in a sidecar: the device, the engine's registrations, and links in and out.

The destination makes its queue pairs when it answers a writer's hello; the writer makes its own, and sends what the
destination must know of them in a data hello over the same control stream; then it is let in.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from kvmesh.errors import FailedPrecondition, InvalidArgument, KvmeshError, Unauthenticated, Unavailable
from kvmesh.kv.pidfd import Life
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.transports.base import (
    HOST_MEMORY,
    Ask,
    Endpoint,
    EngineMemory,
    Expected,
    Inbound,
    Outbound,
    Transport,
    memory_kind,
)
from kvmesh.transfer.transports.rails import RailsInbound, RailsOutbound, pairing
from kvmesh.transfer.transports.verbs.device import RdmaDevice
from kvmesh.transfer.transports.verbs.faults import PairFaults
from kvmesh.transfer.transports.verbs.nics import MAX_RAILS, NicOptions, Nics, Rail
from kvmesh.transfer.transports.verbs.options import LARGE_MACHINE_CPUS
from kvmesh.transfer.transports.verbs.poller import InboundPoller
from kvmesh.transfer.transports.verbs.receiver import RdmaInbound
from kvmesh.transfer.transports.verbs.sides import hello_of, reply_of, sides_of
from kvmesh.transfer.transports.verbs.writer import RdmaOutbound
from kvmesh.transfer.wire import PROTOCOL

log = logging.getLogger(__name__)
DeviceT = TypeVar("DeviceT", bound=RdmaDevice)
InboundT = TypeVar("InboundT", bound=RdmaInbound)
# How long the registrations of an engine that lives wait for it to connect anew.
LINGER_S = 10.0
LINGER_STEP_S = 0.25


class _Door(Generic[InboundT]):
    """A link that waits for its writer: one inbound for each pair of NICs."""

    def __init__(self, token: bytes, expected: Expected, inbounds: list[InboundT]) -> None:
        self.token = token
        self.expected = expected
        self.inbounds = inbounds


class RdmaTransport(Transport, Generic[DeviceT, InboundT]):
    """spins: whether a thread polls for all links in. polling: the setting that says so. `name` is also the field of
    its endpoints in the messages of peers."""

    def __init__(self, nics: NicOptions, *, spins: bool, polling: str, port: int = 1) -> None:
        self._spins = spins
        self._polling = polling
        self._usable = (False, "not started")
        self._nics: Nics[DeviceT] = Nics(nics, self._open, self._unfit, port)
        self._started = False
        self._memory: EngineMemory | None = None
        self._doors: dict[int, _Door[InboundT]] = {}
        self._inbounds: set[InboundT] = set()
        self._poller: InboundPoller | None = None
        self._linger: tuple[asyncio.TimerHandle, Life] | None = None
        self._faults = PairFaults()

    # --- what a transport adds -----------------------------------------------------------------------------------

    @abstractmethod
    def _names(self) -> Sequence[str]:
        """This machine's devices. Raises KvmeshError where there are none, or no library."""

    @abstractmethod
    def _open(self, name: str) -> DeviceT:
        """Raises KvmeshError with the reason why not."""

    def _unfit(self, driver: str) -> str:
        """Why a device of that kernel driver is not for this transport, "" where it is."""
        return ""

    @abstractmethod
    def _make_inbound(self, device: DeviceT, link: Expected) -> InboundT:
        """A destination's end that waits for its writer. Raises KvmeshError."""

    @abstractmethod
    def _endpoint(self, rail: Rail[DeviceT], inbound: InboundT, token: bytes) -> Endpoint:
        """What that writer is told."""

    @abstractmethod
    def _accept(self, inbound: InboundT, hello: pb.DataHello) -> Callable[[], None]:
        """Check what a writer says; returns what lets it in. Both raise KvmeshError."""

    @abstractmethod
    def _make_outbound(self, rail: Rail[DeviceT], reply: pb.PeerHelloReply, hello: pb.DataHello) -> RdmaOutbound:
        """A writer's end, from what the destination has told; adds its own side to `hello`. Raises KvmeshError, and
        leaves nothing behind then."""

    @abstractmethod
    def _is_used(self, side: Any) -> bool:
        """Whether a writer uses the pair that this endpoint is of."""

    # --- the interface -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        try:
            self._nics.open(self._names)
        except KvmeshError as error:
            self._usable = (False, error.message)
            raise
        self._started = True
        self._usable = (True, self._description())
        if self._spins:
            self._poller = InboundPoller()
            self._poller.start()

    @property
    def status(self) -> tuple[bool, str]:
        if self._usable[0] and self._nics.rails and not self._nics.up():
            return False, "; ".join(rail.device.problem() for rail in self._nics.rails)
        return self._usable

    def offer(self) -> pb.TransportOffer:
        self._open_device()
        return pb.TransportOffer(name=self.name, rails=len(self._nics.up()))

    def fits(self, memory: EngineMemory) -> tuple[bool, str]:
        kind = memory_kind(memory)
        if kind == HOST_MEMORY:
            return True, "host memory"
        without = [region.name for region in memory.regions if region.dmabuf is None]
        if without:
            return False, f"does not reach {kind} memory: no dma-buf came with {', '.join(sorted(set(without)))}"
        return True, f"{kind} memory by dma-buf"

    def register(self, memory: EngineMemory) -> None:
        """The engine is not refused where its memory cannot be pinned: it goes by another transport then."""
        self._open_device()
        self._memory = memory
        self._no_timer()
        try:
            self._nics.serve(memory.regions)
        except KvmeshError as error:
            log.warning("%s: %s", self.name, error.message)
            self._usable = (False, error.message)
            return
        self._usable = (True, self._description())
        log.info("%s: %s", self.name, self._nics.why)

    def deregister(self) -> None:
        # A writer whose link could not be fenced in time loses its queue pairs now, before the memory goes.
        for inbound in list(self._inbounds):
            self._drop(inbound)
        self._doors.clear()
        memory, self._memory = self._memory, None
        self._no_timer()
        if memory is not None and memory.owner is not None and memory.owner.alive:
            # It may come back with the same memory.
            self._nics.release(linger=True)
            self._wait_for(memory.owner.copy(), LINGER_S)
        else:
            self._nics.release()

    def expect(self, link: Expected) -> Endpoint:
        self._check_registered()
        offered = min(link.offer.rails, MAX_RAILS) if link.offer is not None else 0
        token = secrets.token_bytes(32)
        rails = self._nics.up()
        while rails:
            # A writer that offers none knows of no pairs but the first.
            places = [there for _, there in pairing(offered, len(rails))] if offered else [0]
            inbounds: list[InboundT] = []
            ends: list[Endpoint] = []
            try:
                for place in places:
                    inbounds.append(self._make_inbound(rails[place].device, link))
                    ends.append(self._endpoint(rails[place], inbounds[-1], token))
            except KvmeshError as error:
                for inbound in inbounds:
                    inbound.destroy()
                if len(rails) == 1:
                    raise
                name = rails[place].device.name
                log.warning("%s: a link goes without %s: %s", self.name, name, error.message)
                del rails[place]
                continue
            except BaseException:
                for inbound in inbounds:
                    inbound.destroy()
                raise
            self._inbounds = {item for item in self._inbounds if not item.destroyed} | set(inbounds)
            self._doors[link.link_id] = _Door(token, link, inbounds)
            for place, inbound, end in zip(places, inbounds, ends, strict=True):
                inbound.pair_of_nics = rails[place].status("", self._nics.why)
                getattr(end, self.name).device = rails[place].device.name
            first = getattr(ends[0], self.name)
            first.rails.extend(getattr(end, self.name) for end in ends[1:])
            return ends[0]
        raise Unavailable("; ".join(rail.device.problem() for rail in self._nics.rails))

    def forget(self, link_id: int) -> None:
        door = self._doors.pop(link_id, None)
        if door is not None:
            for inbound in door.inbounds:
                self._drop(inbound)

    async def join(self, hello: pb.DataHello) -> pb.DataHelloReply:
        """A writer's data hello, over the control stream of its link."""
        try:
            door = self._welcome(hello)
        except KvmeshError as error:
            log.warning("%s: a writer was refused: %s", self.name, error.message)
            return pb.DataHelloReply(ok=False, reason=error.message[:500])
        try:
            used, let_in = self._take_in(door, hello)
            whole: Inbound = used[0] if len(door.inbounds) == 1 else RailsInbound(used)
            await door.expected.on_joined(whole, None)
            for let in let_in:
                let()
        except KvmeshError as error:
            log.warning("%s: a writer was refused: %s", self.name, error.message)
            for inbound in door.inbounds:
                self._drop(inbound)
            door.expected.on_end(f"the hello failed: {error.message}")
            return pb.DataHelloReply(ok=False, reason=error.message[:500])
        except BaseException:
            for inbound in door.inbounds:
                self._drop(inbound)
            raise
        for inbound in used:
            if self._poller is not None:
                self._poller.add(inbound)
            else:
                inbound.begin()
        return pb.DataHelloReply(ok=True)

    async def connect(self, reply: pb.PeerHelloReply, sidecar_id: str, timeout_s: float) -> Outbound:
        raise FailedPrecondition(f"{self.name} is connected over the control stream")

    async def connect_over(self, ask: Ask, reply: pb.PeerHelloReply, sidecar_id: str, timeout_s: float) -> Outbound:
        self._check_registered()
        hello = pb.DataHello(protocol=PROTOCOL, token=reply.token, link_id=reply.link_id, sidecar_id=sidecar_id)
        outbound = self._make_outbounds(reply, hello)
        try:
            answer = await ask(hello)
            if not answer.ok:
                raise Unavailable(f"refused by the destination: {answer.reason[:500]}")
            return outbound
        except BaseException:
            outbound.close()
            raise

    def nics(self) -> list[pb.NicStatus]:
        return self._nics.status() if self._started else []

    @property
    def nodes(self) -> frozenset[int]:
        return self._nics.nodes

    @property
    def waiting(self) -> str:
        if not self._started:
            return ""
        how = "a polling thread" if self._spins else "completion channels"
        if self._polling != "auto":
            return f"{how} (by setting)"
        return f"{how} ({'' if self._spins else 'fewer than '}{LARGE_MACHINE_CPUS} CPUs{' or more' * self._spins})"

    def threads(self) -> list[tuple[str, int | None]]:
        return [(f"{self.name} poller", self._poller.native_id)] if self._poller is not None else []

    async def close(self) -> None:
        self._usable = (False, "closed")
        self._started = False
        self._no_timer()
        if self._poller is not None:
            self._poller.stop()
            self._poller = None
        for inbound in list(self._inbounds):
            self._drop(inbound)
        self._doors.clear()
        self._nics.close()

    # --- a writer's pairs ----------------------------------------------------------------------------------------

    def _make_outbounds(self, reply: pb.PeerHelloReply, hello: pb.DataHello) -> Outbound:
        sides = sides_of(reply, self.name)
        if len(sides) > MAX_RAILS:
            raise InvalidArgument(f"{len(sides)} pairs of NICs, at most {MAX_RAILS} are possible")
        rails = self._nics.up()
        if not rails:
            raise Unavailable("; ".join(rail.device.problem() for rail in self._nics.rails))
        pairs = [(rails[place % len(rails)], side) for place, side in enumerate(sides)]
        sound = [self._faults.sound(reply, rail.device.name, side.device) for rail, side in pairs]
        made: dict[int, RdmaOutbound] = {}
        mine: list[Any] = []
        left_out: list[pb.NicStatus] = []
        refusal: KvmeshError | None = None
        try:
            for place, (rail, side) in enumerate(pairs):
                part = pb.DataHello()
                reason = "" if sound[place] or not any(sound) else "it failed lately"
                if not reason:
                    try:
                        made[place] = self._make_outbound(rail, reply_of(reply, self.name, side), part)
                        made[place].pair_of_nics = rail.status(side.device, self._nics.why)
                    except KvmeshError as error:
                        if len(pairs) == 1 or isinstance(error, InvalidArgument):
                            raise
                        refusal, reason = error, error.message
                if reason:
                    log.warning(
                        "%s: a link goes without %s to %s: %s", self.name, rail.device.name, side.device, reason
                    )
                    left_out.append(rail.status(side.device, reason, used=False))
                mine.append(getattr(part, self.name))
            if not made:
                raise refusal or Unavailable("no pair of NICs can be used")
            whole: Outbound
            if len(pairs) == 1:
                whole = made[0]
            else:
                chosen = [pairs[place] for place in made]
                whole = RailsOutbound(
                    list(made.values()),
                    [rail.weight for rail, _ in chosen],
                    on_fault=lambda place, reason: self._fault(
                        reply, chosen[place][0].device.name, chosen[place][1].device, reason
                    ),
                    left_out=left_out,
                    near=[
                        [place for place, (rail, _) in enumerate(chosen) if rail.device.name in names]
                        for names in self._nics.near
                    ],
                )
        except BaseException:
            for outbound in made.values():
                outbound.close()
            raise
        first = getattr(hello, self.name)
        first.CopyFrom(mine[0])
        first.rails.extend(mine[1:])
        return whole

    def _fault(self, reply: pb.PeerHelloReply, here: str, there: str, reason: str) -> None:
        """On the mover's thread."""
        log.warning("%s: %s to %s failed: %s", self.name, here, there, reason)
        self._faults.add(reply, here, there)

    # --- within --------------------------------------------------------------------------------------------------

    def _take_in(self, door: _Door[InboundT], hello: pb.DataHello) -> tuple[list[InboundT], list[Callable[[], None]]]:
        """The pairs that the writer uses, and what lets it in; the others are destroyed."""
        sides = sides_of(hello, self.name)
        if len(sides) != len(door.inbounds):
            raise InvalidArgument(f"{len(sides)} pairs of NICs, {len(door.inbounds)} are needed")
        used: list[InboundT] = []
        let_in: list[Callable[[], None]] = []
        for inbound, side in zip(door.inbounds, sides, strict=True):
            if len(sides) > 1 and not self._is_used(side):
                self._drop(inbound)
                continue
            let_in.append(self._accept(inbound, hello_of(hello, self.name, side)))
            if inbound.pair_of_nics is not None:
                inbound.pair_of_nics.peer = side.device
            used.append(inbound)
        if not used:
            raise InvalidArgument("no pair of NICs is used")
        return used, let_in

    def _description(self) -> str:
        devices = [rail.device for rail in self._nics.rails] or self._nics.devices
        waits = "a polling thread" if self._spins else "completion channels"
        ports = [f"{device.name} port {device.port.number} gid {device.port.gid_index}" for device in devices]
        return ", ".join([*ports, waits])

    def _open_device(self) -> DeviceT:
        if not self._started:
            raise Unavailable(f"{self.name} cannot be used: {self._usable[1]}")
        rails = self._nics.rails
        return rails[0].device if rails else self._nics.devices[0]

    def _check_registered(self) -> None:
        self._open_device()
        if self._memory is None or not self._nics.rails:
            raise FailedPrecondition(f"no engine's memory is registered for {self.name}")

    def _wait_for(self, owner: Life, left_s: float) -> None:
        """End idle registrations once their owner has exited, or has not come back in time. Takes `owner` over."""
        self._linger = None
        if left_s <= 0 or not owner.alive:
            owner.close()
            self._nics.end_idle()
        else:
            step = min(left_s, LINGER_STEP_S)
            timer = asyncio.get_running_loop().call_later(step, self._wait_for, owner, left_s - step)
            self._linger = timer, owner

    def _no_timer(self) -> None:
        if self._linger is not None:
            timer, owner = self._linger
            timer.cancel()
            owner.close()
            self._linger = None

    def _drop(self, inbound: InboundT) -> None:
        inbound.destroy()
        self._inbounds.discard(inbound)

    def _welcome(self, hello: pb.DataHello) -> _Door[InboundT]:
        if hello.protocol != PROTOCOL:
            raise FailedPrecondition(f"data protocol {hello.protocol} is not spoken here (this is {PROTOCOL})")
        door = self._doors.get(hello.link_id)
        if door is None or not hmac.compare_digest(door.token, hello.token):
            raise Unauthenticated("no such link, or a wrong token")
        del self._doors[hello.link_id]
        return door
