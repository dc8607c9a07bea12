"""A client of Redis behind a breaker.

Redis may be slow, dead or gone at any time and costs only what it holds: every operation has a short limit, and after
a refused connection or two time-outs in a row nothing is asked until a background ping has been answered in time, so
that no further request pays. No method raises for anything Redis does or does not do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import redis.asyncio as redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from kvmesh.store.scripts import Arg, Script
from kvmesh.telemetry import metrics, names

log = logging.getLogger(__name__)

T = TypeVar("T")
Work = Callable[[Any], Awaitable[T]]
"""What to do with the client, a `redis.asyncio.Redis` or `RedisCluster`: their commands are the same."""

TIMEOUTS_TO_OPEN = 2
FAIR_S = 0.02
"""An operation that was given less time than this, and less than the setting, is not held against Redis."""

LATE_S = 0.02
"""A time-out that comes this late says more about our own loop than about Redis."""

PROBE_INTERVAL_S = 0.5
CONNECT_TIMEOUT_S = 2.0
WRITE_TIMEOUT_S = 1.0
"""For what no request waits for."""

MAX_CONNECTIONS = 32
MAX_TAILS = 256
"""Connections of blocking reads; they are others than those of `run`."""

TAIL_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 1.0
MAX_PASSWORD_BYTES = 4096
CLUSTER = "+cluster"
PROBE = "probe"
"""The operation of the background ping, in the metric: what is counted while nothing else is asked."""

# Whichever limit is noticed first: ours, or that of the client, which names it in its own way.
_TIMEOUTS = (TimeoutError, RedisTimeoutError)
_FAILURES = (RedisError, RedisClusterException, OSError, TimeoutError)


class RedisStore:
    """One Redis, or one cluster of them. `watch` is the caller's to run: without it the breaker never closes."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        password_file: Path | None = None,
        ca_file: Path | None = None,
        cluster: bool = False,
    ) -> None:
        """url: `redis://`, `rediss://` (TLS), either with `+cluster` (as with `cluster=True`) for a node of a cluster.

        Raises ValueError for a URL that is none, OSError when a file cannot be read.
        """
        self.timeout_s = timeout_s
        """Seconds that one operation gets."""
        scheme, rest = url.split("://", 1) if "://" in url else (url, "")
        cluster = cluster or scheme.endswith(CLUSTER)
        options: dict[str, Any] = {"password": _password(password_file)}
        if ca_file is not None:
            if not scheme.startswith("rediss"):
                raise ValueError("a CA file goes with rediss://")
            with ca_file.open("rb"):
                options["ssl_ca_certs"] = str(ca_file)
        url = f"{scheme.removesuffix(CLUSTER)}://{rest}" if rest else url
        self._client = _client(url, cluster, MAX_CONNECTIONS, max(timeout_s, WRITE_TIMEOUT_S), options)
        self._tailing = _client(url, cluster, MAX_TAILS, TAIL_TIMEOUT_S, options)
        # Waiting for one of our own connections must not look like a slow Redis.
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS - 1)
        self._tails = asyncio.Semaphore(MAX_TAILS)
        self._abandoned: set[asyncio.Task[Any]] = set()
        self._operations: set[str] = set()
        self._known(PROBE)
        self._timeouts = 0
        self._ok = False
        self._suspect = asyncio.Event()
        self._suspect.set()
        self.checked = asyncio.Event()
        """Set once the first probe has ended, whatever it found."""

        self.up = asyncio.Event()
        """Set while Redis is thought to answer; as of the loop that runs `watch`."""

        self.on_connect: list[Callable[[Any], Awaitable[None]]] = []
        """Called with the client before Redis is used again after an absence; one that raises or takes long keeps it
        away."""

    @property
    def ok(self) -> bool:
        """True while Redis is thought to answer; False costs every request nothing."""
        return self._ok

    async def run(
        self, operation: str, work: Work[T], default: T, *, timeout_s: float | None = None, write: bool = False
    ) -> T:
        """The result of `work`, `default` when Redis is away, refuses, or does not answer in time.

        timeout_s: seconds, never more than the store's own but for `write` (at most WRITE_TIMEOUT_S).
        operation: for the metric.
        """
        limit = max(self.timeout_s, WRITE_TIMEOUT_S) if write else self.timeout_s
        if timeout_s is not None:
            limit = min(limit, timeout_s)
        if not self._ok or limit <= 0:
            return default
        self._known(operation)
        asked = False

        async def asking() -> T:
            nonlocal asked
            async with self._slots:
                asked = True
                return await work(self._client)

        try:
            result = await self._within(limit, asking())
        except _FAILURES as exc:
            # A caller in a hurry says nothing about Redis.
            if asked and not (isinstance(exc, _TIMEOUTS) and limit < min(self.timeout_s, FAIR_S)):
                self._failed(operation, exc)
            return default
        self._timeouts = 0
        return result

    async def _within(self, limit_s: float, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; TimeoutError after `limit_s` seconds of listening, whatever becomes of it.

        A task of its own, since a cancellation that meets the client at its making of a connection is lost there: the
        caller would wait for the socket's own limit.
        """
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(work)
        ends = loop.time() + limit_s
        try:
            done, _ = await asyncio.wait({task}, timeout=limit_s)
            if not done and loop.time() > ends + LATE_S:
                # This loop was busy elsewhere, and the reply may lie here unread.
                done, _ = await asyncio.wait({task}, timeout=limit_s)
        finally:
            if not task.done():
                task.cancel()
                self._abandoned.add(task)
                task.add_done_callback(self._let_go)
        if not done:
            raise TimeoutError
        return task.result()

    def _let_go(self, task: asyncio.Task[Any]) -> None:
        self._abandoned.discard(task)
        if not task.cancelled():
            # Seen by nobody else, and of no interest.
            task.exception()

    async def script(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[Arg],
        *,
        timeout_s: float | None = None,
        write: bool = False,
    ) -> Any:
        """The script's reply, None as `run` has its default. All keys share a slot."""
        return await self.run(
            script.name, lambda client: script(client, keys, args), None, timeout_s=timeout_s, write=write
        )

    async def tail(self, operation: str, work: Work[T], default: T, *, timeout_s: float) -> T:
        """As `run`, for reads that block in Redis (XREAD BLOCK) for less than `timeout_s` and TAIL_TIMEOUT_S seconds.

        They have connections of their own, of which there are MAX_TAILS: share one reader among those who wait. A
        time-out of theirs says nothing about Redis.
        """
        if not self._ok:
            return default
        self._known(operation)

        async def reading() -> T:
            async with self._tails:
                return await work(self._tailing)

        try:
            return await self._within(min(timeout_s, TAIL_TIMEOUT_S), reading())
        except _FAILURES as exc:
            if not isinstance(exc, _TIMEOUTS):
                self._failed(operation, exc)
            return default

    def _known(self, operation: str) -> None:
        if operation not in self._operations:
            self._operations.add(operation)
            metrics.at_zero(names.REDIS_ERRORS, operation)

    def _failed(self, operation: str, exc: BaseException) -> None:
        metrics.counter(names.REDIS_ERRORS).labels(operation).inc()
        if isinstance(exc, ResponseError):
            # It answered: a value of another type, no memory left. The next request may fare better.
            log.debug("redis refused %s: %s", operation, exc)
            return
        if isinstance(exc, _TIMEOUTS):
            self._timeouts += 1
            if self._timeouts < TIMEOUTS_TO_OPEN:
                return
        if self._ok:
            log.warning("redis does not answer (%s); going on without it", type(exc).__name__)
        self._ok = False
        self.up.clear()
        self._suspect.set()

    async def watch(self) -> None:
        """Background loop: probe Redis until it answers, then sleep until an operation fails. Runs until cancelled."""
        while True:
            await self._suspect.wait()
            if await self._probe():
                self._suspect.clear()
                self._timeouts = 0
                self._ok = True
                self.up.set()
                log.info("redis answers")
            self.checked.set()
            if not self._ok:
                await asyncio.sleep(PROBE_INTERVAL_S)

    async def _probe(self) -> bool:
        try:
            # A connection, TLS and all, may take its time once; what is asked over it then may not.
            await self._within(CONNECT_TIMEOUT_S, self._begin())
            await self._within(self.timeout_s, self._ping())
        except Exception as exc:
            # While Redis is away nothing else fails: without these an absence would look like two errors.
            metrics.counter(names.REDIS_ERRORS).labels(PROBE).inc()
            if not isinstance(exc, _FAILURES):
                log.warning("redis is not used: its first operations failed", exc_info=True)
            # Connections of the pool may hang half-open: start anew.
            await _disconnect(self._client)
            await _disconnect(self._tailing)
            return False
        return True

    async def _begin(self) -> None:
        await self._client.ping()
        for hook in self.on_connect:
            await hook(self._client)

    async def _ping(self) -> None:
        await self._client.ping()

    async def close(self) -> None:
        """Close the connections."""
        self._ok = False
        try:
            await self._client.aclose()
        finally:
            await self._tailing.aclose()
            if self._abandoned:
                # Their connections are gone.
                for task in self._abandoned:
                    task.cancel()
                await asyncio.wait(self._abandoned, timeout=CLOSE_TIMEOUT_S)


def _client(url: str, cluster: bool, connections: int, socket_timeout_s: float, options: dict[str, Any]) -> Any:
    # The socket's limit bounds what was abandoned; what an operation may take is `run`'s to say.
    # A retry inside the client would multiply the limit; ours is the breaker.
    common: dict[str, Any] = {
        "socket_timeout": socket_timeout_s,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),
        "max_connections": connections,
        "protocol": 2,
    } | options
    if cluster:
        # One slot that nobody serves must not take the others with it.
        return RedisCluster.from_url(url, require_full_coverage=False, **common)
    return redis.Redis.from_url(url, **common)


async def _disconnect(client: Any) -> None:
    if isinstance(client, RedisCluster):
        await client.aclose()
    else:
        await client.connection_pool.disconnect(inuse_connections=True)


def _password(path: Path | None) -> str | None:
    if path is None:
        return None
    with path.open("rb") as file:
        data = file.read(MAX_PASSWORD_BYTES + 1)
    if len(data) > MAX_PASSWORD_BYTES:
        raise ValueError(f"{path} is larger than {MAX_PASSWORD_BYTES} bytes")
    return data.decode("utf-8").strip() or None
