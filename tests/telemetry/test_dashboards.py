"""Dashboards as Grafana would read them; Grafana itself is not needed for that."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from kvmesh.telemetry import names
from prometheus_kit import RULES
from queries import DASHBOARDS
from test_rules import sections
from tools.dashboards.__main__ import dashboards

FILES = sorted(DASHBOARDS.glob("*.json"))
SUFFIXES = re.compile(r"_(bucket|count|sum)$")
# Nothing is measured that nobody looks at, but for these.
NOT_SHOWN = {
    "kvmesh:build_info": "names versions; for a question at hand",
    "kvmesh:rpc_in_flight": "calls by method; gateway_requests_active and engine gauges tell the same",
    "kvmesh:gateway_slow_readers_total": "TPOT's runbook asks for it",
    "kvmesh:router_class_feedback_total": "classes are off by default",
    "kvmesh:router_class_calibration_gap": "classes are off by default",
}


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def board(request: pytest.FixtureRequest) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(request.param.read_text())
    return made


def test_files_are_what_the_generator_writes() -> None:
    assert {path.name: path.read_text() for path in FILES} == dashboards()


def test_the_schema(board: dict[str, Any]) -> None:
    assert board["schemaVersion"] == 39
    assert re.fullmatch(r"[a-z0-9-]{1,40}", board["uid"])
    assert board["title"]
    assert "id" not in board, "a dashboard that is provisioned has no number"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in board["panels"]:
        assert panel["type"] in ("row", "timeseries", "stat")
        if panel["type"] == "row":
            continue
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["unit"]
        steps = defaults["thresholds"]["steps"]
        assert steps[0]["value"] is None
        assert [step["value"] for step in steps[1:]] == sorted(step["value"] for step in steps[1:])
        references = [target["refId"] for target in panel["targets"]]
        assert references
        assert len(set(references)) == len(references)


# Grafana writes these itself and its types lack them: the text of a query for a variable, and the options that an
# annotation has when it asks Prometheus.
UNTYPED = ("definition", "titleFormat", "textFormat", "step")


def test_grafanas_own_types_know_every_field(board: dict[str, Any]) -> None:
    register_default_plugins()
    known = json.loads(json.dumps(Dashboard.from_json(board), cls=JSONEncoder))
    assert list(lost(board, known, board["uid"])) == []


def lost(written: Any, known: Any, where: str) -> Iterator[str]:
    """Places of what does not come back from Grafana's types as it was written."""
    if isinstance(written, dict) and isinstance(known, dict):
        for key, value in written.items():
            if key not in UNTYPED:
                yield from lost(value, known[key], f"{where}/{key}") if key in known else [f"{where}/{key}"]
    elif isinstance(written, list) and isinstance(known, list) and len(written) == len(known):
        for index, (one, other) in enumerate(zip(written, known, strict=True)):
            yield from lost(one, other, f"{where}/{index}")
    elif written != known:
        yield where


def test_panels_fill_the_grid_without_overlap(board: dict[str, Any]) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies over {taken[x, y]}"
                taken[x, y] = panel["title"]


def test_variables_are_there_before_they_are_used(board: dict[str, Any]) -> None:
    known = {variable["name"] for variable in board["templating"]["list"]}
    assert {"datasource", "namespace"} <= known
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(board["panels"])))
    assert used <= known, used - known
    # What can be chosen and changes nothing is a trap.
    assert known <= used, known - used


def test_runbooks_are_there(board: dict[str, Any]) -> None:
    anchors = sections()
    for panel in board["panels"]:
        for link in panel.get("links", ()):
            page, _, anchor = link["url"].partition("#")
            assert page == "${docs}"
            assert anchor in anchors, f"{panel['title']}: docs/operations.md#{anchor}"


def test_uids_are_unique() -> None:
    found = [json.loads(path.read_text())["uid"] for path in FILES]
    assert len(set(found)) == len(found)


def test_what_is_measured_is_looked_at() -> None:
    texts = "".join(path.read_text() for path in [*FILES, *RULES.glob("*.yml")])
    asked = {SUFFIXES.sub("", name) for name in re.findall(r"kvmesh:[a-z0-9_]+", texts)}
    asked |= set(re.findall(r"kvmesh:[a-z0-9_]+", texts))
    made = {metric.name for metric in names.all_metrics()}
    assert made - asked == set(NOT_SHOWN)


def test_the_collector_refers_to_parts_that_it_has() -> None:
    folder = Path(DASHBOARDS).parents[1] / "otel"
    merged: dict[str, Any] = yaml.safe_load((folder / "collector.yaml").read_text())
    for text in ("", (folder / "tail-sampling.yaml").read_text()):
        for section, parts in (yaml.safe_load(text) or {}).items():
            if section == "service":
                merged["service"]["pipelines"].update(parts["pipelines"])
            else:
                merged.setdefault(section, {}).update(parts)
        for pipeline in merged["service"]["pipelines"].values():
            for section in ("receivers", "processors", "exporters"):
                assert set(pipeline[section]) <= set(merged[section])
            assert pipeline["processors"][0] == "memory_limiter"
        assert set(merged["service"]["extensions"]) <= set(merged["extensions"])
