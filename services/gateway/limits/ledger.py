"""Settlements on their way to Redis: numbered, journalled, told in batches, and told again until Redis confirms.

What was confirmed goes to the usage file, so that the file says what the budgets say.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kvmesh.store.limits import LimitStore, Spend
from kvmesh.telemetry import metrics, names
from services.gateway.limits.journal import Journal
from services.gateway.limits.usage import UsageFile

log = logging.getLogger(__name__)

T = TypeVar("T")

BATCH_S = 0.02
"""Settlements that come this soon after each other are told together."""

AGAIN_S = 0.5
ADOPT_S = 30.0
CLOSE_S = 2.0
MAX_PENDING = 100_000
MAX_NEW = 100_000
"""While a look at Redis or the disk does not come back."""


class Ledger:
    """Of one process. `run` is its task; `add` never waits."""

    def __init__(
        self, name: str, store: LimitStore | None, *, journal: Path | None = None, usage_file: Path | None = None
    ) -> None:
        """name: unique to this process and to this start of it."""
        self._name = name
        self._store = store
        self._folder = journal if store is not None else None
        self._journal: Journal | None = None
        self._usage = UsageFile(usage_file) if usage_file is not None else None
        self._number = 0
        self._new: list[Spend] = []
        self._lost = 0
        self._pending: list[Spend] = []
        self._spilled = False
        self._dirty = False
        self._flushing = asyncio.Lock()
        self._exporting = asyncio.Lock()
        # Settled, but not in the usage file yet: by whose journal, and what.
        self._unwritten: list[tuple[str, Spend]] = []
        self._wake = asyncio.Event()
        self._adopted = float("-inf")
        self.lock = asyncio.Lock()
        """Held while holds are ended: who renews holds at the same time would make them anew."""

    @property
    def unsettled(self) -> int:
        """Settlements that Redis has not confirmed, as far as they are in memory."""
        return len(self._new) + len(self._pending)

    def next_number(self) -> int:
        """Of the next settlement; to be added at once."""
        self._number += 1
        return self._number

    def add(self, spend: Spend) -> None:
        """Settle it as soon as may be."""
        if len(self._new) < MAX_NEW:
            self._new.append(spend)
        else:
            metrics.counter(names.LIMITS_LOST).inc()
            self._lost += 1
        # Also here: no flush ends while the disk hangs.
        metrics.gauge(names.LIMITS_UNSETTLED).set(self.unsettled)
        self._wake.set()

    async def run(self) -> None:
        """Settle for ever."""
        loop = asyncio.get_running_loop()
        while True:
            if loop.time() - self._adopted >= ADOPT_S and self._reachable():
                self._adopted = loop.time()
                await self._adopt()
            behind = bool(self._pending or self._unwritten) or self._spilled
            try:
                async with asyncio.timeout(AGAIN_S if behind else ADOPT_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            else:
                await asyncio.sleep(BATCH_S)
            await self.flush()

    def _reachable(self) -> bool:
        return self._store is not None and self._store.store.ok

    async def flush(self) -> bool:
        """Try to settle everything; False when something is left. The journal has what is left, where there is one."""
        async with self._flushing:
            return await self._flush()

    async def _flush(self) -> bool:
        self._wake.clear()
        new, self._new = self._new, []
        if self._lost:
            log.error("%d settlement(s) are lost: redis or the disk did not answer for too long", self._lost)
            self._lost = 0
        await self._remember(new)
        while self._pending:
            batch = self._pending
            left = await self._settle(self._name, batch)
            self._pending = left
            if left:
                break
            if self._spilled and self._journal is not None:
                self._pending = await self._blocking(list[Spend](), self._journal.read, batch[-1].number, MAX_PENDING)
                self._spilled = len(self._pending) == MAX_PENDING
        metrics.gauge(names.LIMITS_UNSETTLED).set(self.unsettled)
        if self._pending or self._spilled or not await self._export():
            return False
        if self._journal is not None and self._dirty:
            await self._blocking(None, self._journal.clear)
            self._dirty = False
        return True

    async def _remember(self, new: list[Spend]) -> None:
        if new and self._folder is not None:
            self._dirty = True
            await self._blocking(None, self._write, new)
        room = MAX_PENDING - len(self._pending)
        if self._spilled or len(new) > room:
            if self._journal is not None:
                # On disk; read again once memory is free.
                new, self._spilled = ([] if self._spilled else new[:room]), True
            else:
                lost = len(new) - room
                metrics.counter(names.LIMITS_LOST).inc(lost)
                log.error("%d settlement(s) are lost: redis is away, and there is no journal", lost)
                new = new[:room]
        self._pending += new

    def _write(self, spends: Sequence[Spend]) -> None:
        if self._journal is None:
            assert self._folder is not None
            self._journal = Journal.open(self._folder, self._name)
        self._journal.append(spends)

    async def _settle(self, name: str, spends: Sequence[Spend]) -> list[Spend]:
        async with self.lock:
            left = await self._store.settle(name, spends) if self._store is not None else []
        if self._usage is not None and len(left) < len(spends):
            waiting = {spend.number for spend in left}
            done = [spend for spend in spends if spend.number not in waiting]
            self._unwritten += [(name, spend) for spend in done]
            await self._export()
        return left

    async def _export(self) -> bool:
        """Write what was settled; False while the disk does not take it: the journal, where there is one, keeps it."""
        async with self._exporting:
            lost = max(0, len(self._unwritten) - MAX_PENDING)
            if lost:
                log.error("%d line(s) of the usage file are lost: it cannot be written", lost)
                del self._unwritten[:lost]
            while self._unwritten and self._usage is not None:
                name, first = next(itertools.groupby(self._unwritten, key=lambda one: one[0]))
                batch = [spend for _, spend in first]
                if not await self._blocking(False, self._usage.write, name, batch):
                    return False
                del self._unwritten[: len(batch)]
            return True

    async def _adopt(self) -> None:
        """Settle what processes that died have left in the folder."""
        if self._folder is None:
            return
        none = list[Spend]()
        for journal in await self._blocking(list[Journal](), _abandoned, self._folder):
            after = 0
            while spends := await self._blocking(none, journal.read, after, MAX_PENDING):
                if await self._settle(journal.name, spends) or self._unwritten:
                    break
                after = spends[-1].number
            if not spends:
                log.info("settled the journal of %s", journal.name)
            await self._blocking(None, lambda of=journal, empty=not spends: of.close(remove=empty))

    async def _blocking(self, default: T, work: Callable[..., T], *args: Any) -> T:
        """`work` in a thread; a disk that fails costs what it holds, never a request."""
        try:
            return await asyncio.to_thread(work, *args)
        except OSError:
            metrics.counter(names.LIMITS_DISK).inc()
            log.exception("the disk fails the limits' journal or usage file")
            return default

    async def close(self) -> None:
        """A last try; what is left stays in the journal for the next to come."""
        settled = False
        try:
            async with asyncio.timeout(CLOSE_S):
                settled = await self.flush()
        except TimeoutError:
            pass
        if self._unwritten:
            log.warning("%d line(s) of the usage file could not be written", len(self._unwritten))
        if self.unsettled:
            where = "stay in the journal" if self._journal is not None else "are lost"
            if self._journal is None:
                metrics.counter(names.LIMITS_LOST).inc(self.unsettled)
            log.warning("%d settlement(s) %s: redis is away", self.unsettled, where)
        if self._journal is not None:
            self._journal.close(remove=settled)
            self._journal = None


def _abandoned(folder: Path) -> list[Journal]:
    return list(Journal.abandoned(folder))
