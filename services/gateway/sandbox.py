"""The sandbox of chat templates: they may compute, but neither reach out nor go on for ever.

What a rendering costs is bounded in two ways. Loops, macros and blocks look at a budget of processor time, once a
round; and what operators, filters and calls make must not be larger than many times the prompt. A single operation is
not interrupted: a template made to do harm can still find one that takes long (see docs/operations.md).
"""

from __future__ import annotations

import functools
import json
import re
import string
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.visitor
from jinja2 import nodes

# Rounds between two looks at the clock.
ROUNDS: Final = 16
# Of a number that says how long something gets: widths, counts, precisions.
MAX_WIDTH: Final = 10_000
# Of a whole number, in bits: products of them grow by doubling.
MAX_BITS: Final = 4096
# Of `text % values`, behind the key: flags, width, precision. Then comes the kind, which may be another %.
_CONVERSION: Final = re.compile(r"[-#0 +]*(\*|[0-9]*)(?:\.(\*|[0-9]*))?[hlL]?")
# Of `text.format(…)`: a number of five digits, or one that is computed, which may be any.
_WIDE_SPEC: Final = re.compile(r"\d{5,}|\{")
_SIZED: Final = (str, bytes, list, tuple, dict, set, frozenset)
# Filters, and methods of texts and numbers.
_WIDENING: Final = frozenset(
    {"batch", "center", "expandtabs", "indent", "ljust", "rjust", "round", "slice", "to_bytes", "tojson"}
    | {"wordwrap", "zfill"}
)


class RaisedByTemplate(jinja2.TemplateError):
    """What `raise_exception` in a template raises: a message for the caller about the messages."""


class TooMuchWork(jinja2.exceptions.SecurityError):
    """The template goes on for too long, or makes something too large."""


class TooSlow(TooMuchWork):
    """It goes on for too long: it may do so every time."""


class _Budget(threading.local):
    """Of the rendering that the thread is at; without one, as while a template is compiled, nothing is counted."""

    until = float("inf")
    most = 1 << 20
    rounds = 0

    def round(self) -> None:
        """One more of a loop."""
        self.rounds += 1
        if self.rounds % ROUNDS == 0 and time.thread_time() > self.until:
            raise TooSlow("it takes too long")

    def check(self, size: int) -> None:
        """Of something that was made, or is about to be."""
        if size > self.most:
            raise TooMuchWork("it makes something too large")


_budget = _Budget()


@contextmanager
def bounded(cpu_s: float, most: int) -> Iterator[None]:
    """What is rendered inside, by this thread, gets so much processor time and makes nothing longer than `most`."""
    before = _budget.until, _budget.most
    _budget.until, _budget.most = time.thread_time() + cpu_s, most
    try:
        yield
    finally:
        _budget.until, _budget.most = before


def _grown(value: Any) -> Any:
    if isinstance(value, _SIZED):
        _budget.check(len(value))
    return value


def _narrow(*numbers: Any) -> None:
    for number in numbers:
        if isinstance(number, int | float) and abs(number) > MAX_WIDTH:
            raise TooMuchWork("a width is too large")


def _narrow_percent(text: str) -> None:
    """Of `text % values`: refuses wide conversions, and such as take their width from the values."""
    at = text.find("%") + 1
    while at:
        if text.startswith("(", at):
            # Keys hold brackets in pairs.
            depth = 1
            while depth and (at := at + 1) < len(text):
                depth += {"(": 1, ")": -1}.get(text[at], 0)
            at += 1
        found = _CONVERSION.match(text, at)
        if found is None:
            return
        if any(size == "*" or len(size) > 4 for size in found.groups("")):
            raise TooMuchWork("a width is too large")
        at = text.find("%", found.end() + 1) + 1


def _narrow_format(text: str) -> None:
    """Of `text.format(…)`: the same."""
    if any(_WIDE_SPEC.search(spec or "") for _, _, spec, _ in string.Formatter().parse(text)):
        raise TooMuchWork("a width is too large")


def _filter(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose result is looked at, and its numbers before that."""
    first = 2 if hasattr(work, "jinja_pass_arg") else 1

    @functools.wraps(work)
    def looked_at(*args: Any, **kwargs: Any) -> Any:
        if name in _WIDENING:
            _narrow(*args[first:], *kwargs.values())
        elif name == "format":
            _narrow_percent(str(args[first - 1]))
        return _grown(work(*args, **kwargs))

    return looked_at


class _Rounds(jinja2.visitor.NodeTransformer):
    """Has every loop, macro and block look at the budget, and `~` at the size of what it makes."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """Where it filters, a round without a body counts too."""
        self.generic_visit(node)
        if node.test is not None:
            node.test = nodes.And(_round(), node.test)
        return _counted(node)

    def _body(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return _counted(node)

    visit_Macro = visit_CallBlock = visit_Block = _body

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        """`{% set x %}…{% endset %}`."""
        self.generic_visit(node)
        node.filter = nodes.Filter(node.filter, "_grown", [], [], None, None)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """`a ~ b`."""
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("joined"), node.nodes, [], None, None)


def _round() -> nodes.Expr:
    return nodes.EnvironmentAttribute("next_round")


def _counted(node: Any) -> nodes.Node:
    node.body.insert(0, nodes.ExprStmt(_round()))
    found: nodes.Node = node
    return found


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """See above."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        self.filters["tojson"] = _tojson
        self.filters = {name: _filter(name, work) for name, work in self.filters.items()}
        self.filters["_grown"] = _grown

    @property
    def next_round(self) -> bool:
        """True, and one round more."""
        _budget.round()
        return True

    @jinja2.pass_eval_context
    def joined(self, state: jinja2.nodes.EvalContext, *values: Any) -> str:
        """As jinja does `~`."""
        _budget.check(sum(len(value) if isinstance(value, str) else 0 for value in values))
        join = jinja2.runtime.markup_join if state.autoescape else jinja2.runtime.str_join
        return join(values)

    def _generate(self, source: nodes.Template, name: Any, filename: Any, defer_init: bool = False) -> str:
        _Rounds().visit(source)
        for node in source.find_all(nodes.Node):
            node.set_lineno(node.lineno or 1)
        source.set_environment(self)
        return super()._generate(source, name, filename, defer_init=defer_init)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Refuses operators with which a short expression makes something huge, and numbers or texts that are."""
        if operator == "+":
            if isinstance(left, _SIZED) and isinstance(right, _SIZED):
                _budget.check(len(left) + len(right))
        elif operator == "%":
            if isinstance(left, str | bytes):
                _narrow_percent(left if isinstance(left, str) else left.decode("latin-1"))
        elif operator == "**" or not all(isinstance(side, int | float) for side in (left, right)):
            raise jinja2.exceptions.SecurityError(f"operator {operator} is not allowed here")
        elif isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_BITS:
            raise TooMuchWork("a number is too large")
        return _grown(super().call_binop(context, operator, left, right))

    def call(self, context: jinja2.runtime.Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A function, a macro or a method; none makes anything wide."""
        if getattr(obj, "__name__", "") in _WIDENING:
            _narrow(*args, *kwargs.values())
        return _grown(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`text.format`, without large widths."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _narrow_format(value.__self__)
        return wrapped


def _raise_exception(message: object) -> NoReturn:
    raise RaisedByTemplate(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which models were never trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}`: some templates mark with it what a model learns from. Rendered as is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """See jinja2.ext.Extension."""
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def compiled(source: str) -> jinja2.Template:
    """A chat template as the ecosystem compiles them. Raises jinja2.TemplateError."""
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, Generation])
    return environment.from_string(source)
