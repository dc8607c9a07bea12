"""Both ends of an efa link in one process, over the fake of its pyverbs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.transports.base import Expected, Inbound
from kvmesh.transfer.transports.efa import EfaOptions, EfaTransport
from kvmesh.transfer.transports.efa.inbound import EfaInbound
from kvmesh.transfer.transports.efa.outbound import EfaOutbound
from kvmesh.transfer.transports.efa.stub import EfaStubNetwork
from verbs_world import PairOfEnds, memory


class EfaEnd:
    """A transport with an engine's memory, on a machine of its own."""

    def __init__(
        self, network: EfaStubNetwork, name: str, num_pages: int = 32, *, machine: Any = None, **options: Any
    ) -> None:
        self.transport = EfaTransport(EfaOptions(**{"polling": "events", **options}), network.api(**(machine or {})))
        self.memory = memory(name, num_pages)
        self.bytes = self.memory.regions[0].view()

    async def start(self) -> EfaEnd:
        await self.transport.start()
        self.transport.register(self.memory)
        return self

    async def close(self) -> None:
        self.transport.deregister()
        await self.transport.close()
        del self.bytes
        self.memory.regions[0].close()


class EfaLink(PairOfEnds):
    """A link between two of them."""

    source: EfaEnd
    target: EfaEnd
    inbound: EfaInbound | None
    outbound: EfaOutbound

    async def open(
        self,
        change: Callable[[pb.PeerHelloReply], None] | None = None,
        change_hello: Callable[[pb.DataHello], None] | None = None,
    ) -> EfaLink:
        expected = Expected(self.link_id, "writer", self._joined, self.take, self.ended.append)
        endpoint = self.target.transport.expect(expected)
        reply = pb.PeerHelloReply(link_id=self.link_id, regions=self.target.memory.infos, token=endpoint.token)
        assert endpoint.efa is not None
        reply.efa.CopyFrom(endpoint.efa)
        if change is not None:
            change(reply)

        async def ask(hello: pb.DataHello) -> pb.DataHelloReply:
            if change_hello is not None:
                change_hello(hello)
            return await self.target.transport.join(pb.DataHello.FromString(hello.SerializeToString()))

        outbound = await self.source.transport.connect_over(ask, reply, "writer", 5.0)
        assert isinstance(outbound, EfaOutbound)
        self.outbound = outbound
        return self

    async def _joined(self, inbound: Inbound, pidfd: int | None) -> None:
        assert isinstance(inbound, EfaInbound)
        self.inbound = inbound
