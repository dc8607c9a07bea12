"""One end of a verbs link per process, without a sidecar around it: the writer in the test, destinations as children.

A destination (`python rdma_kit.py NAME PAGES QPS RECEIVES`) answers one JSON line per command line on its stdin.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvmesh.kv.layout import KvGroup, KvLayout
from kvmesh.kv.region import Region
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.transports.base import Completion, EngineMemory, Expected, Inbound, Write
from kvmesh.transfer.transports.verbs import VerbsOptions, VerbsTransport
from kvmesh.transfer.transports.verbs.outbound import VerbsOutbound

ROOT = Path(__file__).resolve().parents[2]
# Everything in the VM is 20 to 30 times slower.
WAIT_S = 300.0
PAGE = 64 << 10
LAYERS = 2


def make_memory(name: str, num_pages: int) -> EngineMemory:
    """One region of LAYERS layers of pages of 64 KiB."""
    group = KvGroup("main", "full", tuple(range(LAYERS)), kv_heads=2, head_dim=512)
    layout = KvLayout(version=1, dtype="bf16", page_size=16, groups=(group,), num_pages=num_pages)
    assert layout.page_bytes("main") == PAGE
    region = Region.create(name, layout.region_bytes("main"))
    info = pb.RegionInfo(group="main", rank=0, nbytes=region.nbytes, key=7)
    return EngineMemory(name, 1, layout, [info], [region])


def fill(memory: EngineMemory, seed: int) -> None:
    memory.regions[0].view()[:] = np.random.default_rng(seed).integers(0, 256, memory.regions[0].nbytes, dtype=np.uint8)


class _Served:
    """A destination's state: links by number."""

    def __init__(self, memory: EngineMemory, transport: VerbsTransport) -> None:
        self.memory = memory
        self.transport = transport
        self.inbounds: dict[int, Inbound] = {}
        self.ended: dict[int, str] = {}
        self.received: dict[int, int] = {}
        self.arrivals = 0
        self.changed = asyncio.Event()

    async def joined(self, link: int, inbound: Inbound, pidfd: int | None) -> None:
        assert pidfd is None
        self.inbounds[link] = inbound

    def ready(self, link: int) -> None:
        inbound = self.inbounds.get(link)
        for arrival in inbound.poll() if inbound is not None else ():
            self.received[arrival.immediate] = self.received.get(arrival.immediate, 0) + arrival.nbytes
            self.arrivals += 1
        self.changed.set()

    def end(self, link: int, reason: str) -> None:
        self.ended[link] = reason
        self.changed.set()

    async def until(self, condition: Any) -> bool:
        try:
            async with asyncio.timeout(WAIT_S):
                while not condition():
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            return False
        return True

    async def serve(self, request: dict[str, Any]) -> dict[str, Any]:
        do, link = request["do"], request.get("link", 0)
        if do == "expect":
            endpoint = self.transport.expect(
                Expected(
                    link,
                    "writer",
                    on_joined=lambda inbound, pidfd: self.joined(link, inbound, pidfd),
                    on_ready=lambda: self.ready(link),
                    on_end=lambda reason: self.end(link, reason),
                    offer=pb.TransportOffer(name="verbs", rails=request["rails"]),
                )
            )
            reply = pb.PeerHelloReply(link_id=link, regions=self.memory.infos, token=endpoint.token)
            reply.verbs.CopyFrom(endpoint.verbs)
            return {"reply": base64.b64encode(reply.SerializeToString()).decode()}
        if do == "join":
            answer = await self.transport.join(pb.DataHello.FromString(base64.b64decode(request["hello"])))
            return {"reply": base64.b64encode(answer.SerializeToString()).decode()}
        if do == "arrived":
            imm = request["immediate"]
            ok = await self.until(lambda: self.received.get(imm, 0) >= request["bytes"])
            return {"ok": ok, "bytes": self.received.get(imm, 0), "arrivals": self.arrivals}
        if do == "totals":
            ok = await self.until(lambda: sum(self.received.values()) >= request["bytes"])
            text = json.dumps(sorted(self.received.items()))
            self.received.clear()
            return {"ok": ok, "digest": hashlib.sha256(text.encode()).hexdigest(), "arrivals": self.arrivals}
        if do == "ended":
            await self.until(lambda: link in self.ended)
            return {"reason": self.ended.get(link, "")}
        if do == "fence":
            await self.inbounds.pop(link).fence()
            self.received.clear()
            return {}
        if do == "fill":
            self.memory.regions[0].view()[:] = request["byte"]
            return {}
        if do == "digest":
            return {"digest": hashlib.sha256(self.memory.regions[0].buf).hexdigest()}
        raise AssertionError(do)


async def _main(name: str, pages: str, qps: str, receives: str) -> None:
    memory = make_memory(name, int(pages))
    transport = VerbsTransport(VerbsOptions(qps=int(qps), receives=int(receives), polling="events"))
    await transport.start()
    transport.register(memory)
    served = _Served(memory, transport)
    print(json.dumps({"status": transport.status[1]}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        try:
            answer = await served.serve(json.loads(line))
        except Exception as error:
            answer = {"error": repr(error)}
        print(json.dumps(answer), flush=True)
    for inbound in served.inbounds.values():
        await inbound.fence()
    transport.deregister()
    await transport.close()


class Destination:
    """The child process."""

    def __init__(self, name: str, pages: int, qps: int = 2, receives: int = 8) -> None:
        self._arguments = (name, str(pages), str(qps), str(receives))
        self.process: asyncio.subprocess.Process

    async def start(self) -> Destination:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, __file__, *self._arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        await self._answer()
        return self

    async def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), WAIT_S * 1.5)
        assert line, "the destination has died"
        answer = json.loads(line)
        assert "error" not in answer, answer
        return dict(answer)

    async def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
        return await self._answer()

    async def expect(self, link: int, rails: int = 1) -> pb.PeerHelloReply:
        answer = await self.ask("expect", link=link, rails=rails)
        return pb.PeerHelloReply.FromString(base64.b64decode(answer["reply"]))

    async def join(self, hello: pb.DataHello) -> pb.DataHelloReply:
        text = base64.b64encode(hello.SerializeToString()).decode()
        return pb.DataHelloReply.FromString(base64.b64decode((await self.ask("join", hello=text))["reply"]))

    async def close(self) -> None:
        if self.process.returncode is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            await asyncio.wait_for(self.process.wait(), WAIT_S)


class Writer:
    """The test's own end."""

    def __init__(self, pages: int, **options: Any) -> None:
        self.memory = make_memory("writer", pages)
        fill(self.memory, 1)
        self.transport = VerbsTransport(VerbsOptions(polling="events", **options))
        self.context = 0

    async def start(self) -> Writer:
        await self.transport.start()
        self.transport.register(self.memory)
        return self

    async def connect(self, to: Destination, link: int, change: Any = None) -> VerbsOutbound:
        """change(reply): what a faulty peer would have said."""
        reply = await to.expect(link)
        if change is not None:
            change(reply)
        outbound = await self.transport.connect_over(to.join, reply, "writer", WAIT_S)
        assert isinstance(outbound, VerbsOutbound)
        return outbound

    def write(self, immediate: int, src: Sequence[int], dst: Sequence[int], length: int = PAGE) -> Write:
        """Pages (both columns are bytes)."""
        self.context += 1
        return Write(self.context, immediate, 0, 0, list(src), list(dst), [length] * len(src), length * len(src))

    async def close(self) -> None:
        self.transport.deregister()
        await self.transport.close()
        self.memory.regions[0].close()


def drive(outbound: VerbsOutbound, count: int, budget: int = 64 << 20, limit_s: float = WAIT_S) -> list[Completion]:
    """Poll as the mover does until so many writes have completed; sleeps on the completion channel."""
    import select

    found: list[Completion] = []
    until = time.monotonic() + limit_s
    while len(found) < count:
        found += outbound.poll(budget)
        assert time.monotonic() < until, f"{len(found)} of {count} completions"
        if len(found) < count and not outbound.busy:
            poll = select.poll()
            for fd, mask in outbound.wait_fds():
                poll.register(fd, mask)
            poll.poll(1000)
    return found


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
