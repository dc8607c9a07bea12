"""The pace at which requests that lost their worker are placed again.

One dead worker may have held a thousand streams: they come back a few at a time and not all in the same moment, so that
routers and workers see a slope instead of a step. Waiting for a free seat is the fair queue's matter, not this one's.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

MAX_DOUBLINGS = 6


class Heals:
    """`concurrency` placements at a time, each delayed by a random share of `jitter_s`, more after failures.

    `wait_s`: how long a request with output waits for a worker when there is none.
    """

    def __init__(
        self,
        *,
        concurrency: int = 16,
        jitter_s: float = 0.02,
        wait_s: float = 5.0,
        rng: random.Random | None = None,
    ) -> None:
        self.wait_s = wait_s
        self._jitter_s = jitter_s
        self._seats = asyncio.Semaphore(concurrency)
        self._rng = rng or random.Random()
        self._change = asyncio.Event()

    @asynccontextmanager
    async def turn(self, failures: int = 0) -> AsyncIterator[None]:
        """Hold one of the seats; `failures` of this request so far double the delay each."""
        await asyncio.sleep(self._rng.uniform(0.0, self._jitter_s * 2.0 ** min(failures, MAX_DOUBLINGS)))
        async with self._seats:
            yield

    def changed(self) -> None:
        """Something that decides which workers can serve has changed."""
        change, self._change = self._change, asyncio.Event()
        change.set()

    async def wait_changed(self, timeout_s: float) -> bool:
        """True when something has changed within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._change.wait()
        except TimeoutError:
            return False
        return True
