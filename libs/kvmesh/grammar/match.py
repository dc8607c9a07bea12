"""How far an output has come in its grammar, and which tokens may follow."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvmesh.errors import Internal, KvmeshError
from kvmesh.grammar.source import refuse, sentence

Words = npt.NDArray[np.uint32]

# CPU seconds that the masks of one output and taking its tokens may need: some to begin with, and some for each token.
# A step of the engine waits for both, everybody's.
_CPU_BASE_S: Final = 0.5
_CPU_TOKEN_S: Final = 0.005


class Match:
    """One output's state. `fill` may run in another thread; everything else is its owner's, one thread at a time.

    error: why this output cannot go on; it stays. ends: stop tokens that may follow wherever the match is whole, as
    the end of sequence may (unless `ignore_eos`: then only where nothing else may). Inside the grammar a stop token is
    a token like any other. worn: a limit was met. What the library has built for a grammar is shared by all copies, and
    its limits with it: who begins anew compiles anew.
    """

    __slots__ = (
        "_count", "_cpu_s", "_matcher", "_origin", "_pending", "_stopped", "_words", "ends", "eos", "error",
        "ignore_eos", "worn",
    )  # fmt: skip

    def __init__(
        self, matcher: Any, size: int, eos: frozenset[int], ends: frozenset[int] = frozenset(),
        ignore_eos: bool = False, origin: Match | None = None,
    ) -> None:  # fmt: skip
        self.worn = False
        self._origin = origin
        self.eos = eos
        self.ends = ends
        self.ignore_eos = ignore_eos
        self.error: KvmeshError | None = None
        self._matcher = matcher
        self._words: Words = np.zeros(-(-size // 32), np.uint32)
        self._pending: Future[None] | None = None
        self._stopped = False
        self._cpu_s = 0.0
        self._count = 0
        self._look()

    def copy(self) -> Match:
        """The same state, to go another way. Cheap: what was compiled is shared."""
        return self._with(self.ends, self.ignore_eos)

    def begin(self, output: Sequence[int], ends: frozenset[int], ignore_eos: bool) -> Match:
        """A copy that has taken `output` already. Raises InvalidArgument where that does not fit."""
        match = self._with(ends - self.eos, ignore_eos)
        try:
            fits = match._matcher.try_consume_tokens(list(output[:-1])) == len(output[:-1])
        except BaseException:  # a panic of the library's is no Exception
            fits = False
        match._look()
        if not fits:
            raise match.error or refuse("the output so far does not match it")
        if output:
            match.take(output[-1])
        if match.error is not None:
            raise refuse("the output so far does not match it")
        return match

    def _with(self, ends: frozenset[int], ignore_eos: bool) -> Match:
        self._settle()
        size = 32 * len(self._words)
        match = Match(self._matcher.deep_copy(), size, self.eos, ends, ignore_eos, self._origin or self)
        match._stopped = self._stopped
        return match

    @property
    def over(self) -> bool:
        """The match is whole and nothing can follow."""
        return self._stopped or bool(self._matcher.is_stopped())

    def take(self, token: int) -> None:
        """The output goes on with `token`, which the mask allowed."""
        self._settle()
        if self.error is not None:
            return
        whole = token in self.ends and self._matcher.is_accepting()
        began = time.thread_time()
        try:
            taken = not self._stopped and self._matcher.try_consume_tokens([token]) == 1
        except BaseException as error:  # a panic of the library's is no Exception
            self.error = Internal(f"the grammar failed at token {token}: {str(error)[:200]}")
            return
        self._cpu_s += time.thread_time() - began
        if taken:
            self._count += 1
            self._look()
        elif whole:
            self._stopped = True
        else:
            self._look()
            self.error = self.error or Internal(f"token {token} was drawn, and the grammar does not allow it")

    # -- masks

    def fill(self) -> None:
        """Compute the mask of what may follow. Releases the GIL; does not raise."""
        try:
            self._fill()
        except BaseException as error:  # a panic of the library's is no Exception
            self.error = Internal(f"the grammar's mask failed: {str(error)[:200]}")
        if self.error is not None:
            # Some token must be drawn; whoever takes it sees the error first.
            self._only(self.eos)

    def _fill(self) -> None:
        words, matcher = self._words, self._matcher
        if self.error is not None or self.over:
            self._only(self.eos)
            return
        began = time.thread_time()
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._cpu_s += time.thread_time() - began
        if self._cpu_s > _CPU_BASE_S + _CPU_TOKEN_S * self._count:
            self._fail(refuse("takes too long to follow; make it simpler"))
        self._look()
        if self.error is not None:
            return
        if matcher.is_accepting():
            for token in self.ends:
                words[token >> 5] |= np.uint32(1 << (token & 31))
            if self.ignore_eos:
                self._without(self.eos)
        elif any(words[token >> 5] >> (token & 31) & 1 for token in self.eos):
            # A grammar that names the end, or any token, inside: the library shows it and does not take it.
            kept = without(words, self.eos)
            if kept is words:
                self._fail(refuse("only the end of the output can follow where more must"))
            words[:] = kept

    def filling(self, done: Future[None]) -> None:
        """`fill` runs elsewhere: `mask` waits for `done`."""
        self._pending = done

    def mask(self) -> Words:
        """Bit t % 32 of word t // 32 is set where token t may follow; never empty. To be read until the next `take`."""
        self._settle()
        return self._words

    def _settle(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _only(self, tokens: frozenset[int]) -> None:
        self._words[:] = 0
        for token in tokens:
            self._words[token >> 5] |= np.uint32(1 << (token & 31))

    def _without(self, tokens: frozenset[int]) -> None:
        kept = without(self._words, tokens)
        if kept is not self._words:
            self._words[:] = kept

    def _look(self) -> None:
        if self.error is None and self._matcher.is_error():
            self._fail(refuse(sentence(self._matcher.get_error())))

    def _fail(self, error: KvmeshError) -> None:
        self.error = error
        (self._origin or self).worn = True


def without(words: Words, tokens: frozenset[int]) -> Words:
    """The mask without some tokens, where anything is left then; else the mask itself."""
    if not tokens:
        return words
    kept = words.copy()
    for token in tokens:
        if token >> 5 < len(kept):
            kept[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)
    return kept if kept.any() else words
