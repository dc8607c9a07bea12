"""Whether a grammar compiles: asked before any worker is, off the event loop and within limits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from kvmesh.errors import FailedPrecondition, InvalidArgument, KvmeshError, Overloaded
from kvmesh.grammar.masks import threads
from kvmesh.grammar.source import GrammarSource, refuse
from kvmesh.grammar.vocabulary import Vocabulary
from kvmesh.proto.v1 import inference_pb2 as pb
from services.gateway.tokenizers import ModelTokenizer

log = logging.getLogger(__name__)

# At a time. What is compiled ends by itself, in a second at the worst: so many together must not take the machine.
THREADS = 2
MAX_WAITING = 256
# Until a thread is free: behind whatever others sent.
QUEUE_S = 10.0
RETRY_S = 1.0
BUSY = 25.0
MAX_VERDICTS = 4096

# None: it compiles.
_Verdict = InvalidArgument | None


class GrammarCheck(Protocol):
    """Compiles grammars, off the event loop and within limits."""

    async def check(self, grammar: pb.Grammar, tokenizer: ModelTokenizer) -> None:
        """Raises InvalidArgument (it does not compile, or not within the limits)."""


class NoGrammars:
    """Where the library is not installed."""

    async def check(self, grammar: pb.Grammar, tokenizer: ModelTokenizer) -> None:
        """See GrammarCheck."""
        raise FailedPrecondition("this gateway serves no grammars")


class Grammars:
    """Compiles each grammar once for each tokenizer and remembers the verdict; `timeout_s` is what one gets of a
    processor."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._pool = threads(THREADS, "grammar-check")
        self._vocabularies: dict[str, asyncio.Future[Vocabulary]] = {}
        self._verdicts: OrderedDict[tuple[str, bytes], _Verdict] = OrderedDict()
        self._running: dict[tuple[str, bytes], _Compiling] = {}

    async def check(self, grammar: pb.Grammar, tokenizer: ModelTokenizer) -> None:
        """See GrammarCheck. FailedPrecondition for a tokenizer that the library does not know, Overloaded."""
        source = GrammarSource.of(grammar)
        key = (tokenizer.fingerprint, source.digest)
        if key not in self._verdicts:
            await self._compile(key, source, await self._vocabulary(tokenizer))
        self._verdicts.move_to_end(key)
        if (verdict := self._verdicts[key]) is not None:
            # Anew: a raised error is the request's own.
            raise InvalidArgument(verdict.message, details=dict(verdict.details))

    async def _compile(self, key: tuple[str, bytes], source: GrammarSource, vocabulary: Vocabulary) -> None:
        running = self._running.get(key)
        if running is None:
            if len(self._running) >= MAX_WAITING:
                raise Overloaded("too many grammars are being checked", retry_after=RETRY_S)
            running = self._running[key] = _Compiling(lambda: vocabulary.compile(source))
            future = asyncio.get_running_loop().run_in_executor(self._pool, running.run)
            future.add_done_callback(lambda done: self._judge(key, done))
        try:
            async with asyncio.timeout(QUEUE_S):
                await running.begun.wait()
        except TimeoutError:
            raise Overloaded("too many grammars are being checked", retry_after=RETRY_S) from None
        if not await running.ended(self._timeout_s):
            raise self._slow()

    def _slow(self) -> InvalidArgument:
        return refuse(f"took longer than {1e3 * self._timeout_s:g} ms to compile")

    def _judge(self, key: tuple[str, bytes], done: asyncio.Future[None]) -> None:
        running = self._running.pop(key)
        error = None if done.cancelled() else done.exception()
        if isinstance(error, InvalidArgument) or error is None:
            # Too slow for who asked first is too slow for all.
            self._verdicts[key] = self._slow() if error is None and running.cpu_s > self._timeout_s else error
        else:
            log.error("compiling a grammar failed", exc_info=error)
            self._verdicts[key] = refuse("it cannot be compiled")
        while len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        running.begun.set()
        running.over.set()

    async def _vocabulary(self, tokenizer: ModelTokenizer) -> Vocabulary:
        key = tokenizer.fingerprint
        making = self._vocabularies.get(key)
        if making is None or (making.done() and (making.cancelled() or making.exception() is not None)):
            bundle = tokenizer.bundle

            def make() -> Vocabulary:
                return Vocabulary(bundle.tokenizer.to_str(), bundle.vocab_size, bundle.eos_token_ids)

            making = self._vocabularies[key] = asyncio.get_running_loop().run_in_executor(self._pool, make)
        try:
            return await asyncio.shield(making)
        except KvmeshError:
            raise
        except Exception as error:
            raise FailedPrecondition(f"this gateway serves no grammars: {error}") from error

    def close(self) -> None:
        """Compile nothing more; what runs ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class _Compiling:
    """One grammar's turn in a thread. `begun` and `over` are the loop's. `cpu_s`: what it took, once it is over."""

    def __init__(self, compile_: Callable[[], object]) -> None:
        self.begun, self.over = asyncio.Event(), asyncio.Event()
        self._compile = compile_
        self._loop = asyncio.get_running_loop()
        self._clock: int | None = None
        self._began_s = 0.0
        self.cpu_s = 0.0

    def run(self) -> None:
        """In the thread."""
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
            self._began_s = time.clock_gettime(self._clock)
        self._loop.call_soon_threadsafe(self.begun.set)
        try:
            self._compile()
        finally:
            self.cpu_s = self._spent()

    async def ended(self, limit_s: float) -> bool:
        """Whether it has ended within its time: that of its thread on a processor, which does not hang on who else has
        work to do; BUSY times as much by the clock."""
        give_up = time.monotonic() + BUSY * limit_s
        while not self.over.is_set():
            left_s = min(limit_s - self._spent(), give_up - time.monotonic())
            if left_s <= 0:
                return False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(left_s, 0.001)):
                    await self.over.wait()
        return True

    def _spent(self) -> float:
        if self._clock is None:
            return 0.0
        try:
            return time.clock_gettime(self._clock) - self._began_s
        except OSError:  # the thread is gone
            return 0.0
