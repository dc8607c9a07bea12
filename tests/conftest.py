"""For every suite: a property holds or not, however slow the machine is, and the same examples run everywhere.

Hypothesis fails examples over 200 ms and strategies that are slow to draw: neither says anything about the code.
Examples are the same in every run, so that a red run can be repeated; `make soak` draws new ones.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "kvmesh",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=not os.environ.get("KVMESH_SOAK"),
    print_blob=True,
)
settings.load_profile("kvmesh")


def pytest_collection_finish() -> None:
    """The tests, torch, transformers live as long as the process. The collector need not walk them again each time:
    that took half a second, in hundreds of tests."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, object, object]:
    """Nothing is collected while pytest parses the source of what failed: a task that is collected then logs its
    traceback, which is parsed as well, and Python 3.11's parser fails where it was interrupted by itself."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests measured, given by `record_property("measured", …)`, at the end of a run."""
    lines = [
        str(value)
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        if report.when == "call"
        for name, value in report.user_properties
        if name == "measured"
    ]
    if lines:
        terminalreporter.section(f"measured ({'full sizes' if os.environ.get('KVMESH_SOAK') else 'sizes of CI'})")
        for line in lines:
            terminalreporter.line(line)


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """A service that a test starts sets up the root logger of this process: no later test may notice."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    for handler in list(root.handlers):
        if handler not in handlers:
            root.removeHandler(handler)
