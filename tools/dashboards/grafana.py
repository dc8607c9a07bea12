"""Panels and their layout, as Grafana's dashboard JSON (schema version 39, Grafana 10 and later)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

SCHEMA_VERSION = 39
GRID = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
TOKENS_S = "suffix: tok/s"
# Name of a threshold's colour by how bad it is.
COLOURS = ("green", "orange", "red")


@dataclass(frozen=True)
class Panel:
    """One panel. `queries`: (expression, legend). `levels`: where orange and red begin; `falls`: where they end.
    `runbook`: an anchor of docs/operations.md."""

    title: str
    help: str
    unit: str
    queries: Sequence[tuple[str, str]]
    kind: str = "timeseries"
    width: int = 8
    height: int = 7
    levels: tuple[float, ...] = ()
    falls: bool = False
    stacked: bool = False
    most: float | None = None
    runbook: str = ""


@dataclass(frozen=True)
class Row:
    """A heading above the panels that follow."""

    title: str


@dataclass(frozen=True)
class Board:
    """A dashboard. `instances`: the jobs whose instances the reader may choose; "" where there is no such choice."""

    uid: str
    title: str
    help: str
    panels: Sequence[Panel | Row]
    instances: str = ""
    tenants: bool = False
    tags: Sequence[str] = field(default_factory=tuple)


def series(title: str, unit: str, *queries: tuple[str, str], help: str, **more: Any) -> Panel:
    """Curves over time."""
    return Panel(title, help, unit, queries, **more)


def stat(title: str, unit: str, expression: str, *, help: str, legend: str = "", **more: Any) -> Panel:
    """One number, with its recent course behind it."""
    return Panel(title, help, unit, [(expression, legend)], kind="stat", **{"width": 4, "height": 4, **more})


def render(board: Board) -> dict[str, Any]:
    """The dashboard as Grafana reads it."""
    return {
        "uid": board.uid,
        "title": board.title,
        "description": board.help,
        "tags": ["kvmesh", *board.tags],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": [_alerts()]},
        "links": [
            {
                "title": "kvmesh",
                "type": "dashboards",
                "tags": ["kvmesh"],
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "templating": {"list": list(_variables(board))},
        "panels": list(_laid_out(board.panels)),
    }


def _alerts() -> dict[str, Any]:
    return {
        "name": "Alerts",
        "datasource": SOURCE,
        "enable": True,
        "iconColor": "red",
        "expr": 'ALERTS{alertname=~"Kvmesh.*",alertstate="firing",namespace=~"$namespace"}',
        "titleFormat": "{{alertname}}",
        "textFormat": "{{instance}} {{model_name}}",
        "step": "60s",
    }


def _variables(board: Board) -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "refresh": 1}
    # A mesh outside Kubernetes has no namespace: `.*` is every series, with the label or without.
    yield _choice("namespace", "Namespace", "label_values(kvmesh:ready, namespace)")
    if any("$model" in query for panel in board.panels if isinstance(panel, Panel) for query, _ in panel.queries):
        yield _choice("model", "Model", "label_values(kvmesh:e2e_request_latency_seconds_count, model_name)")
    if board.instances:
        yield _choice("instance", "Instance", f'label_values(kvmesh:ready{{job=~"{board.instances}"}}, instance)')
    if board.tenants:
        yield _choice("tenant", "Tenant", "label_values(kvmesh:tenant_requests_total, tenant)")
    # Where the runbooks can be read; provision another value for another place.
    yield {"name": "docs", "type": "constant", "query": "docs/operations.md", "hide": 2, "skipUrlSync": True}


def _choice(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "refresh": 2,
        "sort": 1,
    }


def _laid_out(panels: Sequence[Panel | Row]) -> Iterator[dict[str, Any]]:
    """Left to right, a new line where one is full; a row begins one too."""
    x = y = line = 0
    for number, panel in enumerate(panels, 1):
        width, height = (GRID, 1) if isinstance(panel, Row) else (panel.width, panel.height)
        if x + width > GRID or isinstance(panel, Row):
            x, y, line = 0, y + line, 0
        place = {"x": x, "y": y, "w": width, "h": height}
        yield {"id": number, "gridPos": place, **(_row(panel) if isinstance(panel, Row) else _panel(panel))}
        x, line = x + width, max(line, height)


def _row(row: Row) -> dict[str, Any]:
    return {"type": "row", "title": row.title, "collapsed": False, "panels": []}


def _panel(panel: Panel) -> dict[str, Any]:
    custom: dict[str, Any] = {}
    options: dict[str, Any] = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"}
    if panel.kind == "timeseries":
        custom = {
            "lineWidth": 1,
            "fillOpacity": 40 if panel.stacked else 8,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "dashed" if panel.levels else "off"},
        }
        options = {
            "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["mean", "max", "lastNotNull"]},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    colours = COLOURS[: len(panel.levels) + 1]
    steps = zip([None, *panel.levels], reversed(colours) if panel.falls else colours, strict=True)
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "custom": custom,
        "thresholds": {"mode": "absolute", "steps": [{"value": at, "color": colour} for at, colour in steps]},
    }
    if panel.most is not None:
        defaults["max"] = panel.most
    made: dict[str, Any] = {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": SOURCE,
                "expr": expression,
                "legendFormat": legend or "__auto",
                "range": True,
            }
            for index, (expression, legend) in enumerate(panel.queries)
        ],
    }
    if panel.runbook:
        url = f"${{docs}}#{panel.runbook}"
        made["links"] = [{"title": "Runbook", "url": url, "targetBlank": True}]
    return made
