"""Texts that clients want embedded, beside the look-ups of the semantic cache: small runs, in turn, never ahead.

The embedder's thread takes one run at a time from here, after the cache's own texts. A run is short, so that a look-up
never waits for more than one; callers take turns run by run, so that 256 long texts do not hold up one short one.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmesh.errors import KvmeshError, Overloaded
from services.router.near.embedder import MAX_TOKENS
from services.router.near.search import Vector

log = logging.getLogger(__name__)

RUN_TOKENS = MAX_TOKENS
"""Tokens of one run, as far as they can be guessed: one text of a whole window, or several short ones."""

MAX_TEXTS = 4096
"""Texts that wait, all callers together."""

Embedded = tuple[Vector, int]
"""A vector of unit length, and the tokens that it was made of."""


@dataclass(slots=True, eq=False)
class _Order:
    """The texts of one caller."""

    texts: Sequence[str]
    loop: asyncio.AbstractEventLoop
    made: list[Embedded] = field(default_factory=list)
    gone: bool = False
    future: asyncio.Future[list[Embedded]] = field(init=False)

    def __post_init__(self) -> None:
        self.future = self.loop.create_future()


class Bulk:
    """Orders of texts. `change` is the condition on which the embedder's thread waits."""

    def __init__(self, change: threading.Condition) -> None:
        self._change = change
        self._orders: deque[_Order] = deque()
        self._waiting = 0

    def __len__(self) -> int:
        return len(self._orders)

    async def embed(self, texts: Sequence[str], timeout_s: float) -> list[Embedded]:
        """One entry per text, in order. Raises Overloaded, TimeoutError after `timeout_s` seconds, and what the
        embedder raised."""
        order = _Order(texts, asyncio.get_running_loop())
        with self._change:
            if self._waiting + len(texts) > MAX_TEXTS:
                raise Overloaded(f"{self._waiting} texts wait to be embedded already", retry_after=1.0)
            self._waiting += len(texts)
            self._orders.append(order)
            self._change.notify()
        try:
            async with asyncio.timeout(timeout_s):
                return await order.future
        finally:
            order.gone = True

    # --- on the embedder's thread -------------------------------------------------------------------------------

    def take(self) -> tuple[_Order, Sequence[str]] | None:
        """The next run: whose turn it is and which of its texts. With `change` held."""
        while self._orders:
            order = self._orders.popleft()
            if order.gone:
                self._drop(order)
                continue
            left = order.texts[len(order.made) :]
            count, tokens = 0, 0
            for text in left:
                tokens += min(MAX_TOKENS, 2 + len(text) // 3)
                if count and tokens > RUN_TOKENS:
                    break
                count += 1
            return order, left[:count]
        return None

    def done(self, order: _Order, made: Sequence[Embedded]) -> None:
        """A run has ended well."""
        with self._change:
            order.made.extend(made)
            self._waiting -= len(made)
            if len(order.made) < len(order.texts):
                self._orders.append(order)
                return
        _settle(order, None)

    def failed(self, order: _Order, error: KvmeshError) -> None:
        """A run has failed: so has its order."""
        with self._change:
            self._drop(order)
        _settle(order, error)

    def close(self, error: KvmeshError) -> None:
        """Whatever waits is not embedded any more."""
        with self._change:
            orders = list(self._orders)
            self._orders.clear()
            for order in orders:
                self._drop(order)
        for order in orders:
            _settle(order, error)

    def _drop(self, order: _Order) -> None:
        self._waiting -= len(order.texts) - len(order.made)


def _settle(order: _Order, error: KvmeshError | None) -> None:
    def settle() -> None:
        if order.future.done():
            return
        if error is None:
            order.future.set_result(order.made)
        else:
            order.future.set_exception(error)

    try:
        order.loop.call_soon_threadsafe(settle)
    except RuntimeError:
        log.debug("the event loop is gone")
