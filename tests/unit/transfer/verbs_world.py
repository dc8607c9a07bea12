"""Both ends of a verbs link in one process, over the fake pyverbs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvmesh.kv.layout import KvGroup, KvLayout
from kvmesh.kv.region import Region
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.transports.base import Completion, EngineMemory, Expected, Inbound, Write
from kvmesh.transfer.transports.verbs import VerbsOptions, VerbsTransport
from kvmesh.transfer.transports.verbs.inbound import VerbsInbound
from kvmesh.transfer.transports.verbs.outbound import VerbsOutbound
from kvmesh.transfer.transports.verbs.stub import StubNetwork

PAGE = 256
LAYERS = 2


def memory(name: str, num_pages: int = 32) -> EngineMemory:
    group = KvGroup("main", "full", tuple(range(LAYERS)), kv_heads=1, head_dim=16)
    layout = KvLayout(version=1, dtype="bf16", page_size=4, groups=(group,), num_pages=num_pages)
    assert layout.page_bytes("main") == PAGE
    region = Region.create(name, layout.region_bytes("main"))
    return EngineMemory(name, 1, layout, [pb.RegionInfo(group="main", nbytes=region.nbytes, key=7)], [region])


class End:
    """A transport with an engine's memory."""

    def __init__(self, network: StubNetwork, name: str, num_pages: int = 32, **options: Any) -> None:
        defaults: dict[str, Any] = {"polling": "events", "drain_timeout_s": 0.05}
        self.transport = VerbsTransport(VerbsOptions(**{**defaults, **options}), network.api())
        self.memory = memory(name, num_pages)
        self.bytes = self.memory.regions[0].view()

    async def start(self) -> End:
        await self.transport.start()
        self.transport.register(self.memory)
        return self

    async def close(self) -> None:
        self.transport.deregister()
        await self.transport.close()
        del self.bytes
        self.memory.regions[0].close()


class PairOfEnds:
    """What a link of any kind of RDMA has in tests. drain and so on want a network that does not hold."""

    def __init__(self, source: Any, target: Any, link_id: int = 1) -> None:
        self.source, self.target, self.link_id = source, target, link_id
        self.inbound: Any = None
        self.outbound: Any
        self.received: dict[int, int] = {}
        self.arrivals = 0
        self.ended: list[str] = []
        self._context = 0

    def take(self) -> None:
        assert self.inbound is not None
        for arrival in self.inbound.poll():
            self.received[arrival.immediate] = self.received.get(arrival.immediate, 0) + arrival.nbytes
            self.arrivals += 1

    def write(self, immediate: int, src: Sequence[int], dst: Sequence[int], length: int = PAGE) -> Write:
        self._context += 1
        return Write(self._context, immediate, 0, 0, list(src), list(dst), [length] * len(src), length * len(src))

    def drain(self, rounds: int = 200) -> list[Completion]:
        """Let both ends run until the writer is idle; the network must not hold."""
        found: list[Completion] = []
        idle = 0
        for _ in range(rounds):
            found += self.outbound.poll(1 << 30)
            self.take()
            # Credits come back a round later.
            idle = 0 if self.outbound.busy or self.outbound.outstanding else idle + 1
            if idle == 3:
                break
        return found

    async def close(self) -> None:
        self.outbound.fence("over")
        self.outbound.close()
        if self.inbound is not None:
            await self.inbound.fence()


class Link(PairOfEnds):
    """A link between two ends."""

    source: End
    target: End
    inbound: VerbsInbound | None
    outbound: VerbsOutbound

    async def open(
        self,
        change: Callable[[pb.PeerHelloReply], None] | None = None,
        change_hello: Callable[[pb.DataHello], None] | None = None,
    ) -> Link:
        offer = self.source.transport.offer()
        expected = Expected(self.link_id, "writer", self._joined, self.take, self.ended.append, offer)
        endpoint = self.target.transport.expect(expected)
        reply = pb.PeerHelloReply(link_id=self.link_id, regions=self.target.memory.infos, token=endpoint.token)
        reply.verbs.CopyFrom(endpoint.verbs)
        if change is not None:
            change(reply)

        async def ask(hello: pb.DataHello) -> pb.DataHelloReply:
            if change_hello is not None:
                change_hello(hello)
            return await self.target.transport.join(pb.DataHello.FromString(hello.SerializeToString()))

        outbound = await self.source.transport.connect_over(ask, reply, "writer", 5.0)
        assert isinstance(outbound, VerbsOutbound)
        self.outbound = outbound
        return self

    async def _joined(self, inbound: Inbound, pidfd: int | None) -> None:
        assert isinstance(inbound, VerbsInbound)
        self.inbound = inbound


def randomize(end: End, seed: int) -> None:
    end.bytes[:] = np.random.default_rng(seed).integers(1, 256, len(end.bytes), dtype=np.uint8)
