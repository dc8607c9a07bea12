"""Monitors find every metrics port under the job that rules know; rules and dashboards are those of deploy/."""

from __future__ import annotations

import json

import yaml

from chart_kit import CHART, ROOT, Manifest, at, ci_render, containers, of_kind, pods, render

RULES = ROOT / "deploy/prometheus/rules"
DASHBOARDS = ROOT / "deploy/grafana/dashboards"


def sources() -> list[Manifest]:
    """Groups of all rule files."""
    return [group for file in sorted(RULES.glob("*.yml")) for group in yaml.safe_load(file.read_text())["groups"]]


def test_links_are_the_one_source() -> None:
    for link, target in (("rules", RULES), ("dashboards", DASHBOARDS)):
        path = CHART / "files" / link
        assert path.is_symlink()
        assert path.resolve() == target


def test_every_metrics_port_is_scraped_under_its_job() -> None:
    manifests = ci_render("full")
    services = of_kind(manifests, "Service")
    scraped: set[tuple[str, int, str]] = set()
    for monitor in of_kind(manifests, "ServiceMonitor"):
        assert monitor["metadata"]["labels"]["release"] == "prometheus"
        chosen = monitor["spec"]["selector"]["matchLabels"]
        found = [item for item in services if chosen.items() <= item["metadata"]["labels"].items()]
        for endpoint in monitor["spec"]["endpoints"]:
            (service,) = (
                item for item in found if endpoint["port"] in {port["name"] for port in item["spec"]["ports"]}
            )
            (port,) = (port["port"] for port in service["spec"]["ports"] if port["name"] == endpoint["port"])
            (job,) = (item["replacement"] for item in endpoint["relabelings"] if item.get("targetLabel") == "job")
            assert endpoint["path"] == "/metrics"
            assert endpoint["honorLabels"] is True
            scraped.add((chosen["app.kubernetes.io/component"], port, job))
    wanted = set()
    for _, pod in pods(manifests):
        component = pod["metadata"]["labels"]["app.kubernetes.io/component"]
        for container in containers(pod):
            for port in container.get("ports", []):
                if port["name"].startswith("metrics"):
                    image = container["image"].rpartition(":")[0].rpartition("/")[2]
                    wanted.add((component, port["containerPort"], f"kvmesh-{image}"))
    assert scraped == wanted
    jobs = {
        job["job_name"]
        for job in yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    }
    assert {job for _, _, job in scraped} <= jobs


def test_rules_are_copied_whole() -> None:
    (rule,) = of_kind(render({"monitoring": {"prometheusRule": {"enabled": True}}}), "PrometheusRule")
    groups = {group["name"]: group for group in rule["spec"]["groups"]}
    assert len(groups) == len(rule["spec"]["groups"])
    assert groups.keys() == {group["name"] for group in sources()}
    count = 0
    for group in sources():
        rendered = groups[group["name"]]["rules"]
        assert len(rendered) == len(group["rules"])
        for source, copy in zip(group["rules"], rendered, strict=True):
            assert {key: value for key, value in copy.items() if value} == source
            count += 1
    assert count > 20


def test_alerts_can_be_labelled_left_out_and_lead_to_a_runbook() -> None:
    options = {
        "enabled": True,
        "alertLabels": {"team": "inference", "severity": "none"},
        "disabled": ["KvmeshTtftHigh"],
        "runbookBase": "https://git.example/",
    }
    (rule,) = of_kind(render({"monitoring": {"prometheusRule": options}}), "PrometheusRule")
    alerts = {item["alert"]: item for group in rule["spec"]["groups"] for item in group["rules"] if "alert" in item}
    there = {item["alert"]: item for group in sources() for item in group["rules"] if "alert" in item}
    assert there.keys() - alerts.keys() == {"KvmeshTtftHigh"}
    for name, alert in alerts.items():
        assert alert["labels"]["team"] == "inference"
        assert alert["labels"]["severity"] == there[name]["labels"]["severity"], "an alert's own labels stay"
        assert alert["annotations"]["runbook_url"] == f"https://git.example/{there[name]['annotations']['runbook_url']}"
    assert [item for group in rule["spec"]["groups"] for item in group["rules"] if "record" in item]


def test_dashboards_are_copied_whole() -> None:
    files = sorted(DASHBOARDS.glob("*.json"))
    manifests = render({"monitoring": {"dashboards": {"enabled": True}}})
    maps = [item for item in of_kind(manifests, "ConfigMap") if "grafana_dashboard" in item["metadata"]["labels"]]
    assert len(maps) == len(files)
    copied = {name: text for item in maps for name, text in item["data"].items()}
    assert copied.keys() == {file.name for file in files}
    for file in files:
        assert copied[file.name] == file.read_text()
        assert json.loads(copied[file.name])["title"]
        # A config map holds 1 MiB.
        assert file.stat().st_size < 500_000
    for item in maps:
        assert item["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_nothing_is_monitored_unless_asked_for() -> None:
    manifests = render({})
    assert not of_kind(manifests, "ServiceMonitor", "PrometheusRule")
    assert not [item for item in of_kind(manifests, "ConfigMap") if at(item, "metadata", "labels", "grafana_dashboard")]


def test_a_label_of_a_monitor_wins_over_one_of_all_objects() -> None:
    manifests = render(
        {
            "commonLabels": {"release": "all"},
            "monitoring": {"serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}},
        }
    )
    assert {item["metadata"]["labels"]["release"] for item in of_kind(manifests, "ServiceMonitor")} == {"prometheus"}
    assert {item["metadata"]["labels"]["release"] for item in of_kind(manifests, "Service")} == {"all"}
