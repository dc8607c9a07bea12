"""The placings of one generation: a task for each of its shares that looks for a worker."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator

from services.gateway.decision import Decision, NoWorker, Placed
from services.gateway.heals import MAX_DOUBLINGS, Heals
from services.gateway.job import Job, Progress, Share
from services.gateway.placement import MakeInbox, Placer

# Before a worker that has just failed a request is asked again; doubled with each failure.
AGAIN_S = 0.1


class Placings:
    """Shares that are being placed. `wake` is set when one is done."""

    def __init__(self, job: Job, progress: Progress, placer: Placer, heals: Heals, wake: asyncio.Event) -> None:
        self._job = job
        self._progress = progress
        self._placer = placer
        self._heals = heals
        self._wake = wake
        self._tasks: dict[asyncio.Task[Placed], Share] = {}

    def begin(self, share: Share, make_inbox: MakeInbox, decision: Decision | None = None) -> None:
        """Look for a worker. `make_inbox`: for the buffer of an attempt. `decision`: one that was just made."""
        task = asyncio.create_task(self._place(share, make_inbox, decision), name="place")
        task.add_done_callback(lambda _: self._wake.set())
        self._tasks[task] = share

    def done(self) -> Iterator[tuple[Share, Callable[[], Placed]]]:
        """Those that are done, each once, with what tells the result or raises the error."""
        for task in [task for task in self._tasks if task.done()]:
            yield self._tasks.pop(task), task.result

    def cancel(self) -> None:
        """Let none of them find a worker any more."""
        for task in self._tasks:
            task.cancel()

    def close(self) -> None:
        """Forget all of them; what one finds nevertheless is aborted there. Idempotent."""
        for task in self._tasks:
            _abandon(task)
        self._tasks.clear()

    async def _place(self, share: Share, make_inbox: MakeInbox, decision: Decision | None) -> Placed:
        if not share.again:
            return await self._placer.place(self._job, self._progress, share, make_inbox, decision=decision)
        loop = asyncio.get_running_loop()
        pace = functools.partial(self._heals.turn, share.failures + share.turned_away)
        until = loop.time() + self._heals.wait_s
        while True:
            try:
                return await self._placer.place(self._job, self._progress, share, make_inbox, pace=pace)
            except NoWorker:
                # A stream that has output waits for a worker to come; one without is better sent again.
                if not share.heal:
                    raise
                while not self._placer.serves(self._job, self._progress, share):
                    if self._placer.serves(self._job, Progress(), share):
                        # There is nobody but who failed it already: a moment later it may be ready again.
                        await asyncio.sleep(AGAIN_S * 2.0 ** min(share.failures, MAX_DOUBLINGS))
                        self._progress.excluded.clear()
                    elif not await self._heals.wait_changed(until - loop.time()):
                        raise


def _abandon(task: asyncio.Task[Placed]) -> None:
    """End a placing whose result nobody takes; an attempt that a worker has just accepted is aborted there.

    The task may be done already: the generation can be cancelled in the very step in which its result arrives.
    """
    task.cancel()

    def late(done: asyncio.Task[Placed]) -> None:
        if not done.cancelled() and done.exception() is None:
            placed = done.result()
            placed.link.release(placed.key, abort=True)

    task.add_done_callback(late)
