"""A service process for the drain tests: echoes a stream, and says on stdout what happens to it."""

from __future__ import annotations

import sys

from kvmesh.config import ServiceSettings
from kvmesh.rpc import Access, Deadline, ServiceContext, run_service
from rpc_echo import SERVICE, Text, add_echo


class DrainService:
    def __init__(self, context: ServiceContext[ServiceSettings]) -> None:
        self.context = context

    async def started(self) -> None:
        self.context.server.set_ready(True)
        self.context.ready_info["extra"] = SERVICE

    async def drain(self, deadline: Deadline) -> None:
        print("drain", flush=True)

    async def close(self) -> None:
        print("close", flush=True)


async def build(context: ServiceContext[ServiceSettings]) -> DrainService:
    async def mirror(requests, call):
        async for request in requests:
            yield request

    async def fixed(request, call):
        return Text(value="pong")

    if "block-start" in context.settings.instance:
        print("building", flush=True)
        import asyncio

        await asyncio.Event().wait()
    long_lived = {"Bidi"} if "long-lived" in context.settings.instance else set()
    add_echo(context.server, Access.PUBLIC, unary=fixed, bidi=mirror, long_lived=long_lived)
    return DrainService(context)


if __name__ == "__main__":
    sys.exit(run_service(ServiceSettings, build))
