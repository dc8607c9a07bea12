"""Rules as promtool reads them, every alert's cases, and runbooks that are really there."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvmesh.telemetry import names
from prometheus_kit import DEPLOY, ROOT, RULES

CASES: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "alert_cases.yml").read_text())
FILES = sorted(RULES.glob("*.yml"))
ALERTS = {
    rule["alert"]: rule
    for path in FILES
    for group in yaml.safe_load(path.read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
}
SUFFIXES = re.compile(r"_(bucket|count|sum)$")


def promtool(*words: Any) -> str:
    """What promtool says; fails when it fails."""
    binary = shutil.which("promtool")
    assert binary, "no promtool: `make test-telemetry` installs it"
    done = subprocess.run([binary, *map(str, words)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def sections() -> dict[str, str]:
    """Text below every heading of docs/operations.md, by the anchor that a page of it has."""
    found: dict[str, str] = {}
    anchor = ""
    for line in (ROOT / "docs" / "operations.md").read_text().splitlines():
        if match := re.match(r"#+ (.*)", line):
            anchor = re.sub(r"[^\w\- ]", "", match[1].lower()).replace(" ", "-")
            found[anchor] = ""
        elif anchor:
            found[anchor] += line + "\n"
    return found


def test_promtool_takes_the_configuration_and_every_rule() -> None:
    promtool("check", "config", DEPLOY / "prometheus.yml")
    promtool("check", "rules", *FILES)


def test_rules_ask_for_metrics_that_exist() -> None:
    known = {metric.name: metric for metric in names.all_metrics()}
    recorded = set(re.findall(r"record: (\S+)", "".join(path.read_text() for path in FILES)))
    for path in FILES:
        text = re.sub(r"#.*", "", path.read_text())
        for name, labels in re.findall(r"(kvmesh:[a-z0-9_:]+)(?:\{([^}]*)\})?", text):
            if name in recorded:
                continue
            metric = known.get(name) or known[SUFFIXES.sub("", name)]
            asked = set(re.findall(r"(\w+)\s*[=!]", labels))
            assert asked <= {*metric.labels, "job", "instance"}, f"{path.name}: {name} has no label {asked}"


@pytest.mark.parametrize("name", sorted(ALERTS))
def test_an_alert_says_what_is_wrong_and_where_to_read_on(name: str) -> None:
    rule = ALERTS[name]
    assert rule["labels"]["severity"] in ("warning", "critical")
    annotations = rule["annotations"]
    assert annotations["summary"]
    assert annotations["description"].endswith(".")
    page, _, anchor = annotations["runbook_url"].partition("#")
    assert page == "docs/operations.md"
    assert name in sections().get(anchor, ""), f"docs/operations.md#{anchor} does not speak of {name}"
    # A template that names a label which the alert does not have shows nothing there.
    told = set(re.findall(r"\$labels\.(\w+)", " ".join(annotations.values())))
    assert told <= set(CASES[name]["labels"]), f"{name} has no label {told}"


def test_every_alert_has_cases_in_which_it_fires_and_does_not() -> None:
    assert sorted(CASES) == sorted(ALERTS)
    for name, cases in CASES.items():
        assert {"fires", "quiet"} <= set(cases), name


def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    # A file an alert, with the recording rules only where it asks for them: promtool evaluates every rule of a file at
    # every minute of every case. Without annotations, which it would compare word for word.
    recorded = yaml.safe_load((RULES / "recording.yml").read_text())["groups"]
    written = []
    for name, cases in CASES.items():
        rule = {key: value for key, value in ALERTS[name].items() if key != "annotations"}
        groups = [{"name": name, "rules": [rule]}]
        asked = set(re.findall(r"kvmesh:\w+:\w+", rule["expr"]))
        if asked:
            needed = [each for group in recorded for each in group["rules"] if each["record"] in asked]
            assert {each["record"] for each in needed} == asked
            groups.insert(0, {"name": "recording", "rules": needed})
        (tmp_path / f"{name}.yml").write_text(yaml.safe_dump({"groups": groups}))
        tests = [unit(name, kind, case, cases["labels"]) for kind, case in cases.items() if kind != "labels"]
        written.append(tmp_path / f"{name}.cases")
        told = {"rule_files": [f"{name}.yml"], "evaluation_interval": "1m", "tests": tests}
        written[-1].write_text(yaml.safe_dump(told, sort_keys=False))
    promtool("test", "rules", *written)


def unit(name: str, kind: str, case: dict[str, Any], labels: dict[str, str]) -> dict[str, Any]:
    """One case as promtool wants it."""
    rule = ALERTS[name]
    alert = {"exp_labels": {**rule["labels"], **labels}}
    return {
        "name": f"{name}: {kind}",
        "interval": "1m",
        "input_series": [{"series": series, "values": values} for series, values in case["series"].items()],
        "alert_rule_test": [
            {"eval_time": case["at"], "alertname": name, "exp_alerts": [alert] if kind.startswith("fires") else []}
        ],
    }
