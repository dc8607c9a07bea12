"""Threads that help the mover: a turn's work is cut, done side by side, and joined before the turn goes on.

So nothing of the mover's state is ever seen by two threads at a time. What they run releases the GIL.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
MAX_THREADS = 8


def default_threads() -> int:
    """One where cores are few, a quarter of them up to four where not: the engine beside computes."""
    return max(1, min(4, len(os.sched_getaffinity(0)) // 4))


class Helpers:
    """`threads` in all, the caller's among them: with one there are no others. One caller at a time."""

    def __init__(self, threads: int = 0) -> None:
        self.threads = min(MAX_THREADS, threads or default_threads())
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._running = 0

    def run(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Do all, and return what they return, in order; the first exception is raised once all have ended."""
        if self.threads == 1 or len(jobs) < 2:
            return [job() for job in jobs]
        while self._running < min(self.threads, len(jobs)) - 1:
            self._running += 1
            threading.Thread(target=self._work, name=f"kvmesh-helper-{self._running}", daemon=True).start()
        futures: list[Future[T]] = [Future() for _ in jobs]
        for job, future in zip(jobs[1:], futures[1:], strict=True):
            self._jobs.put(lambda job=job, future=future: _into(job, future))  # type: ignore[misc]
        _into(jobs[0], futures[0])
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the threads. Idempotent; `run` may be called again."""
        for _ in range(self._running):
            self._jobs.put(None)
        self._running = 0

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _into(job: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(job())
    except BaseException as error:
        future.set_exception(error)
