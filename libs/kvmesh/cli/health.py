"""Waiting until a service says SERVING, by `grpc.health.v1` and with a deadline.

`python -m kvmesh.cli.health ADDRESS [SERVICE]` is one check for container health probes: exit status 0 for SERVING.
Certificates come from `--tls-ca`, `--tls-cert`, `--tls-key`, `--tls-server-name`, or the variables that services take.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh.cli import tls
from kvmesh.cli.tls import PLAINTEXT, Secure
from kvmesh.errors import KvmeshError

SERVING = health_pb2.HealthCheckResponse.SERVING


async def wait_serving(address: str, service: str, timeout_s: float, secure: Secure = PLAINTEXT) -> bool:
    """True once `service` is SERVING at `address`; False when `timeout_s` runs out.

    Uses Watch, so a change is seen at once; a connection that is not there yet is tried again by the channel itself.
    """
    deadline = time.monotonic() + timeout_s
    async with secure.channel(address) as channel:
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


async def check(address: str, service: str, timeout_s: float = 1.0, secure: Secure = PLAINTEXT) -> str:
    """One health check: `SERVING`, `NOT_SERVING`, `UNKNOWN` or the gRPC status' name."""
    async with secure.channel(address) as channel:
        try:
            stub = health_pb2_grpc.HealthStub(channel)
            reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
            return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)


def main() -> int:
    """One check from the command line."""
    env = os.environ.get
    parser = argparse.ArgumentParser(prog="python -m kvmesh.cli.health", description=__doc__)
    parser.add_argument("address", help="host:port")
    parser.add_argument("service", nargs="?", default="", help='health name; "" is liveness')
    parser.add_argument("--timeout-s", type=float, default=1.0, help="seconds to wait for the answer")
    parser.add_argument("--tls-ca", default=env(tls.CA_VARIABLE, ""), help=tls.CA_HELP)
    parser.add_argument("--tls-cert", default=env(tls.CERT_VARIABLE, ""), help=tls.CERT_HELP)
    parser.add_argument("--tls-key", default=env(tls.KEY_VARIABLE, ""), help=tls.KEY_HELP)
    parser.add_argument("--tls-server-name", default=env(tls.NAME_VARIABLE, ""), help=tls.NAME_HELP)
    given = parser.parse_args()
    try:
        secure = Secure.of(given.tls_ca, given.tls_cert, given.tls_key, given.tls_server_name)
        answer = asyncio.run(check(given.address, given.service, given.timeout_s, secure))
    except KvmeshError as error:
        print(error.message, file=sys.stderr)
        return 2
    print(answer)
    return 0 if answer == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main())
