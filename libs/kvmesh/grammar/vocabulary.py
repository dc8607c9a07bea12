"""A model's tokens as grammars see them, and the limits within which grammars are compiled."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from kvmesh.errors import FailedPrecondition
from kvmesh.grammar.match import Match
from kvmesh.grammar.source import GrammarSource, refuse, sentence

_LIBRARY: Final = "llguidance"
# Fuel is what the library counts work in. Enough for schemas of hundreds of properties, formats and patterns; a text
# that needs more would take longer than anybody waits, or slow the engine's steps down.
_LIMITS: Final[dict[str, Any]] = {
    "initial_lexer_fuel": 50_000,
    "step_lexer_fuel": 50_000,
    # An array of objects with 60 optional strings needs more than 5,000.
    "step_max_items": 20_000,
    "max_items_in_row": 1_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 50_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
# At most one space between tokens: a small model at a high temperature drowns in whitespace that it may go on with
# forever. Before what a schema itself says in `x-guidance`.
_JSON: Final = {"whitespace_pattern": " ?", "coerce_one_of": False, "lenient": False}


def version() -> str:
    """Library and version, such as "llguidance-1.9.1"; "" where it is not installed. Equal ones compile equally."""
    try:
        return f"{_LIBRARY}-{importlib.metadata.version(_LIBRARY)}"
    except importlib.metadata.PackageNotFoundError:
        return ""


class Vocabulary:
    """Tokens of one model. Making one takes a moment (0.3 s for 50,000 tokens): do it in a thread."""

    def __init__(self, tokenizer_json: str, size: int, eos: Iterable[int]) -> None:
        """size: ids of the model; eos: its ends of sequence. FailedPrecondition for a tokenizer that has none or that
        the library does not know."""
        # Here, so that what only passes matches around needs no library.
        import llguidance

        self.size = size
        self.eos = frozenset(eos)
        if not self.eos:
            raise FailedPrecondition("a model without an end-of-sequence token serves no grammars")
        if not version():
            raise FailedPrecondition(f"{_LIBRARY} is not installed: no grammars")
        self._library: Any = llguidance
        try:
            self._tokenizer = llguidance.LLTokenizer(tokenizer_json, n_vocab=size, eos_token=sorted(self.eos))
        except Exception as error:  # the library raises ValueError and, from Rust, others
            raise FailedPrecondition(f"grammars do not know this kind of tokenizer: {str(error)[:200]}") from None
        self._limits = llguidance.LLParserLimits(**_LIMITS)

    def compile(self, source: GrammarSource) -> Match:
        """A match at its beginning, to be copied. Releases the GIL and ends by itself. Raises InvalidArgument."""
        make = self._library.LLMatcher
        try:
            if source.kind in ("json_schema", "json_object"):
                text = make.grammar_from_json_schema(source.text, overrides=_JSON)
            elif source.kind == "regex":
                text = make.grammar_from_regex(source.text)
            else:
                text = make.grammar_from_lark(source.text)
            match = Match(make(self._tokenizer, text, log_level=0, limits=self._limits), self.size, self.eos)
        except BaseException as error:  # a panic of the library's is no Exception
            raise refuse(sentence(str(error))) from None
        if match.error is None:
            # Much is only built when it is first needed: better here than in an engine's step.
            match.fill()
        if match.error is not None:
            raise match.error
        if match.over:
            raise refuse("nothing but an empty output matches it")
        self._step(match)
        return match

    def _step(self, match: Match) -> None:
        """Go one token on: some limits are only met there."""
        tokens = np.flatnonzero(np.unpackbits(match.mask().astype("<u4", copy=False).view(np.uint8), bitorder="little"))
        for order in (tokens, tokens[::-1]):
            token = next((token for token in map(int, order) if not self._tokenizer.is_special_token(token)), None)
            if token is None:
                return
            ahead = match.copy()
            ahead.take(token)
            ahead.fill()
            if ahead.error is not None:
                raise ahead.error
