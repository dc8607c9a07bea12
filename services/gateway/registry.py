"""The requests that run here: their ids, and what each tenant holds."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from ulid import ULID

from kvmesh.errors import AlreadyExists, KvmeshError, Overloaded
from kvmesh.rpc.credentials import Principal
from kvmesh.telemetry import metrics, names


class Running(Protocol):
    """A running request that can be ended from outside."""

    def stop(self, error: KvmeshError) -> None:
        """End it with `error`; the first call counts."""


def _instance() -> str:
    return "".join(secrets.choice(INSTANCE_LETTERS) for _ in range(INSTANCE_LENGTH))


INSTANCE_LENGTH = 10
INSTANCE_LETTERS = "0123456789abcdefghjkmnpqrstvwxyz"
INSTANCE = _instance()
"""Name of this process among all gateways, drawn anew at each start: what its request ids begin with."""

_ID = re.compile(rf"([{INSTANCE_LETTERS}]{{{INSTANCE_LENGTH}}})-[0-9A-HJKMNP-TV-Z]{{26}}")


def new_id(instance: str = INSTANCE) -> str:
    """A fresh request id, unique over the mesh: whose it is, and a ULID, so that those of one process sort by time."""
    return f"{instance}-{ULID()}"


def owner(request_id: str) -> str:
    """The instance that made an id; "" for one that a client chose (which may look like one of ours, too)."""
    found = _ID.fullmatch(request_id)
    return found.group(1) if found else ""


class Registry:
    """Running requests by (tenant, request id). `hold` is the only way in, and its end the only way out."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._running: dict[tuple[str, str], Running] = {}
        self._held: Counter[str] = Counter()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._running)

    def held(self, tenant: str) -> int:
        """Requests that a tenant holds now."""
        return self._held[tenant]

    @contextmanager
    def hold(self, principal: Principal, request_id: str, request: Running) -> Iterator[None]:
        """Count and name a request while it runs.

        Overloaded over the gateway's number of requests at a time (a tenant's own is the limiter's to say);
        AlreadyExists for an id in use.
        """
        tenant = principal.tenant
        if len(self._running) >= self._max_requests:
            raise Overloaded(f"this gateway holds {self._max_requests} requests already", retry_after=1.0)
        key = (tenant, request_id)
        if key in self._running:
            raise AlreadyExists(f"request {request_id!r} is running", details={"field": "request_id"})
        self._running[key] = request
        self._held[tenant] += 1
        self._count()
        try:
            yield
        finally:
            del self._running[key]
            self._held[tenant] -= 1
            if not self._held[tenant]:
                del self._held[tenant]
            self._count()

    def stop(self, tenant: str, request_id: str, error: KvmeshError) -> bool:
        """End a request of this tenant; False when it has none of that id."""
        request = self._running.get((tenant, request_id))
        if request is None:
            return False
        request.stop(error)
        return True

    async def wait_idle(self, timeout_s: float) -> bool:
        """True once nothing runs; False when something still does after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def stop_all(self, error: Callable[[], KvmeshError]) -> None:
        """End every request, each with an error of its own."""
        for request in list(self._running.values()):
            request.stop(error())

    def _count(self) -> None:
        if self._running:
            self._idle.clear()
        else:
            self._idle.set()
        metrics.gauge(names.GATEWAY_ACTIVE).set(len(self._running))
