"""grpc.health.v1: "" is liveness (SERVING while the process lives), a service's full name is its readiness."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVICE_NAME = "grpc.health.v1.Health"
LIVENESS = ""
MAX_WATCHES = 1024

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc,unused-ignore]
    """Health of a server. All methods run on the server's event loop; nothing here blocks."""

    def __init__(self) -> None:
        self._status: dict[str, int] = {LIVENESS: SERVING}
        self._changed = asyncio.Event()
        self._watches = 0
        self._closed = False

    def add(self, services: Iterable[str]) -> None:
        """Know these services; each starts NOT_SERVING."""
        for service in services:
            self._status.setdefault(service, NOT_SERVING)

    def set(self, service: str, ready: bool) -> None:
        """Readiness of one service; watchers are told."""
        status = SERVING if ready else NOT_SERVING
        if self._status.get(service) != status:
            self._status[service] = status
            self._wake()

    def is_serving(self, service: str) -> bool:
        """True when the service's status is SERVING."""
        return bool(self._status.get(service) == SERVING)

    def close(self) -> None:
        """End all watches (they would hold a drain up)."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        # One event for each change: a waiter that is late finds the newest status, never an old event.
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: Any, context: Any) -> Any:
        """Status of a service; NOT_FOUND when it is not one of this server's."""
        status = self._status.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return health_pb2.HealthCheckResponse(status=status)

    async def List(self, request: Any, context: Any) -> Any:
        """Status of all services."""
        statuses = {
            name: health_pb2.HealthCheckResponse(status=status)  # type: ignore[arg-type,unused-ignore]
            for name, status in self._status.items()
        }
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Status now and after each change, SERVICE_UNKNOWN included; ends when the server drains."""
        if self._watches >= MAX_WATCHES:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many health watches")
        self._watches += 1
        try:
            last: int | None = None
            while True:
                changed = self._changed
                status = self._status.get(request.service, SERVICE_UNKNOWN)
                if status != last:
                    last = status
                    yield health_pb2.HealthCheckResponse(status=status)
                    continue
                if self._closed:
                    return
                await changed.wait()
        finally:
            self._watches -= 1
