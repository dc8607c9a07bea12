"""Owners for background tasks: nothing runs that nobody waits for, and a task that dies is noticed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from types import TracebackType
from typing import Any

from kvmesh.telemetry import metrics, names

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0


async def cancel_and_wait(*tasks: asyncio.Future[Any] | None, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
    """Cancel the tasks and wait until they have ended; their outcome is dropped.

    Raises TimeoutError when one is still running after `timeout_s`: it swallowed its cancellation.
    """
    pending = [task for task in tasks if task is not None and not task.done()]
    for task in pending:
        task.cancel()
    if not pending:
        return
    _, stuck = await asyncio.wait(pending, timeout=timeout_s)
    if stuck:
        raise TimeoutError(f"{len(stuck)} cancelled task(s) did not end: {sorted(map(str, stuck))[0][:200]}")


class BackgroundTasks:
    """Owns background tasks: all are cancelled in `close`, and one that dies unexpectedly is logged and surfaces.

    `async with BackgroundTasks() as tasks: tasks.spawn(loop(), name="heartbeats")`. The first failure is what
    `wait_failed` returns; a service ends on it instead of living on without its loop.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failed = asyncio.Event()
        self._closing = False
        self.failure: BaseException | None = None

    def spawn(self, coro: Coroutine[Any, Any, Any], *, name: str, essential: bool = True) -> asyncio.Task[Any]:
        """Start a task. An `essential` one counts as failed when it raises; any other is only logged."""
        if self._closing:
            coro.close()
            raise RuntimeError("the owner of background tasks is closed")
        task = asyncio.create_task(coro, name=name)
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._ended(done, essential))
        return task

    def _ended(self, task: asyncio.Task[Any], essential: bool) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            return
        log.error("background task %s failed", task.get_name(), exc_info=error)
        metrics.counter(names.TASK_FAILURES).labels(task.get_name().partition(":")[0]).inc()
        if essential and self.failure is None:
            self.failure = error
            self._failed.set()

    def __len__(self) -> int:
        return len(self._tasks)

    async def wait_failed(self) -> BaseException:
        """Wait until an essential task fails; returns its exception."""
        await self._failed.wait()
        assert self.failure is not None
        return self.failure

    async def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Cancel all tasks and wait for their end. Idempotent; the task that calls is left alone."""
        self._closing = True
        current = asyncio.current_task()
        await cancel_and_wait(*[task for task in self._tasks if task is not current], timeout_s=timeout_s)

    async def __aenter__(self) -> BackgroundTasks:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
