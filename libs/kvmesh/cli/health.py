"""Waiting until a service says SERVING, by `grpc.health.v1` and with a deadline.

`python -m kvmesh.cli.health ADDRESS [SERVICE]` is one check for container health probes: exit status 0 for SERVING.
"""

from __future__ import annotations

import asyncio
import sys
import time

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING


async def wait_serving(address: str, service: str, timeout_s: float) -> bool:
    """True once `service` is SERVING at `address`; False when `timeout_s` runs out.

    Uses Watch, so a change is seen at once; a connection that is not there yet is tried again by the channel itself.
    """
    deadline = time.monotonic() + timeout_s
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while (remaining := deadline - time.monotonic()) > 0:
            call = stub.Watch(health_pb2.HealthCheckRequest(service=service), timeout=remaining, wait_for_ready=True)
            try:
                async for response in call:
                    if response.status == SERVING:
                        return True
            except grpc.aio.AioRpcError:
                await asyncio.sleep(min(0.1, max(0.0, deadline - time.monotonic())))
            finally:
                call.cancel()
    return False


async def check(address: str, service: str, timeout_s: float = 1.0) -> str:
    """One health check: `SERVING`, `NOT_SERVING`, `UNKNOWN` or the gRPC status' name."""
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            stub = health_pb2_grpc.HealthStub(channel)
            reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
            return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)


def main() -> int:
    """One check from the command line."""
    if len(sys.argv) not in (2, 3):
        print(__doc__, file=sys.stderr)
        return 2
    answer = asyncio.run(check(sys.argv[1], sys.argv[2] if len(sys.argv) == 3 else ""))
    print(answer)
    return 0 if answer == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main())
