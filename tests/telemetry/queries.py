"""Every query that an operator or an autoscaler has, as Prometheus takes it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

import yaml

from prometheus_kit import ROOT, RULES

DASHBOARDS = ROOT / "deploy" / "grafana" / "dashboards"
SCALING = ROOT / "deploy" / "helm" / "kvmesh" / "templates" / "scaling"
# Of `$__rate_interval`: what happened once in a test is still in it.
WINDOW = "2m"


@dataclass(frozen=True)
class Query:
    """An expression, and where it stands."""

    where: str
    expression: str


def filled(expression: str) -> str:
    """Variables of a dashboard as they are when it opens."""
    expression = expression.replace("$__rate_interval", WINDOW)
    expression = re.sub(r"\$(namespace|model|instance|tenant)\b", ".*", expression)
    assert "$" not in expression, expression
    return expression


def panels() -> Iterator[Query]:
    """Every query of every panel."""
    for path in sorted(DASHBOARDS.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                yield Query(f"{path.stem} / {panel['title']} / {target['refId']}", filled(target["expr"]))


def variables() -> Iterator[Query]:
    """What the values of every variable are taken from; a mesh outside Kubernetes has no namespace."""
    for path in sorted(DASHBOARDS.glob("*.json")):
        for variable in json.loads(path.read_text())["templating"]["list"]:
            if variable["type"] == "query" and variable["name"] != "namespace":
                series, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]
                yield Query(f"{path.stem} / ${variable['name']}", f"count by ({label}) ({series})")


def alerts() -> Iterator[Query]:
    """Every expression of an alert."""
    for path in sorted(RULES.glob("*.yml")):
        for group in yaml.safe_load(path.read_text())["groups"]:
            for rule in group["rules"]:
                if "alert" in rule:
                    yield Query(rule["alert"], rule["expr"])


def recorded() -> Iterator[Query]:
    """Every recorded series."""
    for group in yaml.safe_load((RULES / "recording.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield Query(rule["record"], rule["record"])


def selectors() -> Iterator[Query]:
    """What alerts look at: an alert over series that nobody makes would never fire, and one over a counter that appears
    with its first event would not see that one. What must NOT be, as in `reason_code!="first"`, is left out."""
    for alert in alerts():
        expression = re.sub(r',?\w+!="[^"]*"', "", alert.expression)
        for selector in sorted(set(re.findall(r"(?:kvmesh:[a-z0-9_:]+|\bup\b)(?:\{[^}]*\})?", expression))):
            yield Query(f"{alert.where}: {selector}", f"count({selector})")


def autoscaling() -> Iterator[Query]:
    """What the chart's autoscalers ask for, of the whole mesh."""
    for path in sorted(SCALING.glob("*.yaml")):
        for expression in re.findall(r'printf "([^"]*kvmesh:[^"]*)"', path.read_text()):
            yield Query(f"{path.name}: {expression}", expression.replace("%s", 'job=~"kvmesh-.*"'))
    adapter = SCALING.parents[1] / "files" / "prometheus-adapter.yaml"
    for rule in (rule for rules in yaml.safe_load(adapter.read_text())["rules"].values() for rule in rules):
        # What the adapter writes for its placeholders; here is neither namespace nor pod.
        series = re.findall(r'__name__="([^"]+)"', rule["seriesQuery"])[0]
        expression = rule["metricsQuery"].replace("<<.Series>>", series).replace("<<.GroupBy>>", "job")
        yield Query(f"{adapter.name}: {series}", expression.replace("<<.LabelMatchers>>", 'job=~"kvmesh-.*"'))
