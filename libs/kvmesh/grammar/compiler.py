"""Compiling off the event loop: once for each grammar, however many ask, and the last ones are kept."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from kvmesh.errors import InvalidArgument, Overloaded
from kvmesh.grammar.masks import threads
from kvmesh.grammar.match import Match
from kvmesh.grammar.source import GrammarSource
from kvmesh.grammar.vocabulary import Vocabulary

# What is compiled and kept may grow with use, to some ten MB each for the worst.
MAX_KEPT = 64
# Of the texts of all that are kept; each begins with some 40 bytes for a byte of its text.
MAX_KEPT_BYTES = 1 << 20
MAX_COMPILING = 256
_BUSY_RETRY_S = 1.0


class GrammarCompiler:
    """For one vocabulary and one event loop."""

    def __init__(
        self, vocabulary: Vocabulary, workers: int = 1, kept: int = MAX_KEPT, kept_bytes: int = MAX_KEPT_BYTES
    ) -> None:
        """kept, kept_bytes: grammars that are kept, and their texts together; the one asked for last always is."""
        self.vocabulary = vocabulary
        self.compiled = 0
        self._pool = threads(workers, "grammar-compile")
        self._kept: OrderedDict[bytes, Match] = OrderedDict()
        self._max_kept = kept
        self._max_bytes = kept_bytes
        self._sizes: dict[bytes, int] = {}
        self._compiling: dict[bytes, asyncio.Future[Match]] = {}

    async def begin(
        self, source: GrammarSource, output: Sequence[int] = (), ends: frozenset[int] = frozenset(),
        ignore_eos: bool = False,
    ) -> Match:  # fmt: skip
        """A match that has taken `output`; see `Match.begin`. Raises InvalidArgument where the grammar does not compile
        or the output does not fit, Overloaded."""
        match = await self.compile(source)
        if not output:
            return match.begin(output, ends, ignore_eos)
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._pool, match.begin, output, ends, ignore_eos)
        except InvalidArgument:
            if not match.worn:
                raise
        match = await self.compile(source)
        return await loop.run_in_executor(self._pool, match.begin, output, ends, ignore_eos)

    async def compile(self, source: GrammarSource) -> Match:
        """The grammar's match at its beginning: to be copied, never to be used."""
        match = self._kept.get(source.digest)
        # What others have used up is built anew.
        if match is not None and not match.worn:
            self._kept.move_to_end(source.digest)
            return match
        running = self._compiling.get(source.digest)
        if running is None:
            if len(self._compiling) >= MAX_COMPILING:
                raise Overloaded("too many grammars are being compiled", retry_after=_BUSY_RETRY_S)
            loop = asyncio.get_running_loop()
            running = loop.run_in_executor(self._pool, self.vocabulary.compile, source)
            self.compiled += 1
            self._compiling[source.digest] = running
            running.add_done_callback(lambda done: self._keep(source, done))
        # One caller that leaves must not end it for the others.
        return await asyncio.shield(running)

    def _keep(self, source: GrammarSource, done: asyncio.Future[Match]) -> None:
        self._compiling.pop(source.digest, None)
        if done.cancelled() or done.exception() is not None:
            return
        self._kept[source.digest] = done.result()
        self._kept.move_to_end(source.digest)
        self._sizes[source.digest] = len(source.text.encode())
        while len(self._kept) > self._max_kept or (len(self._kept) > 1 and sum(self._sizes.values()) > self._max_bytes):
            oldest, _ = self._kept.popitem(last=False)
            del self._sizes[oldest]

    def close(self) -> None:
        """Compile nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)
