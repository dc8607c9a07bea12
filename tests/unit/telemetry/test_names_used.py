"""Every metric and span of `names` is made somewhere, and nothing is measured under a name that is not there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from kvmesh.telemetry import names

ROOT = Path(__file__).resolve().parents[3]
SOURCES = [path for top in ("libs/kvmesh", "services") for path in (ROOT / top).rglob("*.py")]
MAKERS = ("counter", "gauge", "histogram", "at_zero")


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in SOURCES:
        if "proto" not in path.parts:
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def used() -> set[str]:
    """Attributes of `names` that the code reads, outside of the module itself."""
    return {
        node.attr
        for path, tree in trees()
        if path.name != "names.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "names"
    }


def test_every_metric_is_made_somewhere() -> None:
    metrics = {name for name, value in vars(names).items() if isinstance(value, names.Metric)}
    assert metrics - used() == set()


def test_every_span_is_opened_somewhere() -> None:
    spans = {name for name in vars(names) if name.startswith("SPAN_")}
    # The core's work on a sequence is told by the spans of its phases.
    assert spans - used() <= {"SPAN_ENGINE_SEQUENCE", "SPAN_ENGINE_AWAIT_KV", "SPAN_ROUTER_CACHE", "SPAN_GATEWAY_ADMIT"}


def test_no_metric_is_made_under_another_name() -> None:
    """Metrics are made by the makers of `metrics` from an entry of `names`; nobody else calls prometheus_client."""
    for path, tree in trees():
        if path.parent.name == "telemetry":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]
                assert not any(module.startswith("prometheus_client") for module in modules), path
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in MAKERS
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "metrics"
            ):
                first = node.args[0]
                direct = isinstance(first, ast.Attribute) and isinstance(first.value, ast.Name)
                # Or one of a table of such entries, by a name of its own.
                assert isinstance(first, ast.Name) or (direct and first.value.id == "names"), (path, node.lineno)


def test_no_name_is_written_out() -> None:
    known = {metric.name for metric in names.all_metrics()}
    for path in SOURCES:
        if path.name != "names.py":
            assert not known & set(re.findall(r"kvmesh:[a-z_]+", path.read_text(encoding="utf-8"))), path
