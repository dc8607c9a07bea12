"""Autoscaling: the signals of each role, in the names that the services export, and drains that are respected."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from chart_kit import CHART, Manifest, at, by_name, ci_render, label, of_kind, pods, render
from kvmesh.telemetry.names import all_metrics

SERIES = {metric.name for metric in all_metrics()}


def scaled(kind: str, **values: Any) -> list[Manifest]:
    """Every role with autoscaling of one kind."""
    scaling = {"enabled": True, "kind": kind, **values}
    return render(
        {
            "engineDefaults": {"autoscaling": scaling},
            "engines": {"prefill": {"role": "prefill"}, "decode": {"role": "decode"}, "both": {"role": "unified"}},
        }
    )


def signals(hpa: Manifest) -> dict[str, tuple[str, str]]:
    """Metric → (kind of target, value) of an HPA."""
    found = {}
    for metric in hpa["spec"]["metrics"]:
        source = metric[metric["type"].lower()]
        target = source["target"]
        found[source["metric"]["name"]] = (target["type"], target.get("value") or target.get("averageValue"))
    return found


def test_hpa_asks_for_the_signals_of_the_role() -> None:
    manifests = scaled("hpa")
    load = {"kvmesh_gateway_queue_delay_seconds": ("Value", "2"), "kvmesh_kv_cache_usage_perc": ("AverageValue", "0.8")}
    for name, wanted in (
        ("decode", load),
        ("both", load),
        ("prefill", {"kvmesh_num_tokens_waiting": ("AverageValue", "16384")}),
    ):
        assert signals(by_name(manifests, "HorizontalPodAutoscaler", f"mesh-kvmesh-{name}")) == wanted


def test_keda_asks_prometheus_the_same() -> None:
    manifests = scaled("keda")
    for name, wanted in (
        ("decode", {"queue-delay": ("Value", "2"), "kv-usage": ("Value", "0.8")}),
        ("both", {"queue-delay": ("Value", "2"), "kv-usage": ("Value", "0.8")}),
        ("prefill", {"waiting-tokens": ("AverageValue", "16384")}),
    ):
        triggers = by_name(manifests, "ScaledObject", f"mesh-kvmesh-{name}")["spec"]["triggers"]
        assert {item["name"]: (item["metricType"], item["metadata"]["threshold"]) for item in triggers} == wanted
        for item in triggers:
            assert item["type"] == "prometheus"
            # Without an answer replicas stay: a scrape that failed is no idle mesh.
            assert item["metadata"]["ignoreNullValues"] == "false"
            assert 'namespace="serving"' in item["metadata"]["query"]


@pytest.mark.parametrize("case", ["full", "gpu-rdma"])
def test_queries_ask_for_series_that_are_exported(case: str) -> None:
    queries = [
        trigger["metadata"]["query"]
        for item in of_kind(ci_render(case), "ScaledObject")
        for trigger in item["spec"]["triggers"]
        if trigger["type"] == "prometheus"
    ]
    assert queries
    for query in queries:
        asked = set(re.findall(r"kvmesh:\w+", query))
        assert asked, query
        assert asked <= SERIES, query


def test_the_adapter_s_rules_make_the_names_that_hpas_ask_for() -> None:
    rules = yaml.safe_load((CHART / "files/prometheus-adapter.yaml").read_text())["rules"]
    made = {rule["name"]["as"]: rule for part in rules.values() for rule in part}
    asked = {name for item in of_kind(scaled("hpa"), "HorizontalPodAutoscaler") for name in signals(item)}
    assert asked == made.keys()
    for rule in made.values():
        (series,) = re.findall(r'__name__="([^"]+)"', rule["seriesQuery"])
        assert series in SERIES


@pytest.mark.parametrize("kind", ["hpa", "keda"])
def test_a_query_finds_the_pods_of_its_own_engine_alone(kind: str) -> None:
    """The pods of `decode` are not those of `decode-canary`, though the name of one begins with the other's."""
    manifests = render(
        {
            "engineDefaults": {"autoscaling": {"enabled": True, "kind": "keda"}},
            "engines": {"decode": {"role": "decode"}, "decode-canary": {"role": "decode"}},
        }
    )
    queries = " ".join(
        trigger["metadata"]["query"]
        for trigger in by_name(manifests, "ScaledObject", "mesh-kvmesh-decode")["spec"]["triggers"]
    )
    pattern, gateways = sorted(set(re.findall(r'pod=~"([^"]+)"', queries)))
    assert re.fullmatch(pattern, "mesh-kvmesh-decode-6d4cf56db6-x7k2p")
    assert re.fullmatch(gateways, "mesh-kvmesh-gateway-6d4cf56db6-x7k2p")
    assert not re.fullmatch(gateways, "other-kvmesh-gateway-6d4cf56db6-x7k2p"), "of another mesh of the namespace"
    assert not re.fullmatch(pattern, "mesh-kvmesh-decode-canary-6d4cf56db6-x7k2p")


def test_a_query_finds_pods_whose_names_kubernetes_has_cut() -> None:
    """What is before the five letters at the end is cut to 58 characters."""
    for length in (1, 23, 31, 32, 33, 34, 40, 53):
        entry = {"role": "decode", "autoscaling": {"enabled": True, "kind": "keda"}}
        names = ("decode", "decode-canary")
        manifests = render({"engines": dict.fromkeys(names, entry)}, release="r" * length)
        owner = {
            item["metadata"]["labels"]["app.kubernetes.io/component"]: item["metadata"]["name"]
            for item in of_kind(manifests, "Deployment")
        }
        pod = {name: f"{owner[name]}-6d4cf56db6-"[:58] + "x7k2p" for name in names}
        item = by_name(manifests, "ScaledObject", owner["decode"])
        (usage,) = (t["metadata"]["query"] for t in item["spec"]["triggers"] if t["name"] == "kv-usage")
        (pattern,) = re.findall(r'pod=~"([^"]+)"', usage)
        assert re.fullmatch(pattern, pod["decode"])
        assert not re.fullmatch(pattern, pod["decode-canary"])


@pytest.mark.parametrize("kind", ["hpa", "keda"])
def test_the_target_is_there_and_has_no_replicas_of_its_own(kind: str) -> None:
    """A chart that sets replicas beside an autoscaler would undo its work at every upgrade."""
    manifests = [*scaled(kind), *ci_render("full"), *ci_render("multinode")]
    objects = of_kind(manifests, "HorizontalPodAutoscaler", "ScaledObject")
    assert len(objects) > 4
    for item in objects:
        target = item["spec"]["scaleTargetRef"]
        found = [other for other in of_kind(manifests, target["kind"]) if other["metadata"]["name"] == target["name"]]
        assert found, f"{label(item)} → {target}"
        assert all(other["apiVersion"] == target["apiVersion"] for other in found)
    for workload in of_kind(scaled(kind), "Deployment"):
        engine = workload["metadata"]["labels"]["app.kubernetes.io/component"] not in ("gateway", "router")
        assert ("replicas" in workload["spec"]) is not engine, label(workload)


def test_engine_and_sidecar_scale_as_one() -> None:
    for owner, pod in pods(scaled("hpa")):
        if pod["metadata"]["labels"].get("kvmesh.io/role") in ("prefill", "decode"):
            names = [item["name"] for item in (*pod["spec"].get("initContainers", []), *pod["spec"]["containers"])]
            assert sorted(names) == ["engine", "kvtransfer"], label(owner)


def behavior(item: Manifest) -> Manifest:
    found = at(item, "spec", "behavior") or at(item, "spec", "advanced", "horizontalPodAutoscalerConfig", "behavior")
    assert found is not None
    return found


@pytest.mark.parametrize("kind", ["hpa", "keda"])
def test_one_pod_drains_before_the_next_leaves(kind: str) -> None:
    manifests = scaled(kind)
    grace = {pod["spec"]["terminationGracePeriodSeconds"] for owner, pod in pods(manifests) if owner["kind"] != "Pod"}
    for item in of_kind(manifests, "HorizontalPodAutoscaler", "ScaledObject"):
        down = behavior(item)["scaleDown"]
        assert down["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 630}], label(item)
        assert down["stabilizationWindowSeconds"] == 600
        up = behavior(item)["scaleUp"]
        assert up["stabilizationWindowSeconds"] == 0
        assert up["policies"][0]["periodSeconds"] == 60
    assert 630 in grace


def test_a_drain_longer_than_kubernetes_counts_is_cut_to_half_an_hour() -> None:
    manifests = render(
        {
            "limits": {"totalSeconds": 7200},
            "engines": {"decode": {"role": "decode", "autoscaling": {"enabled": True}}},
        }
    )
    (item,) = of_kind(manifests, "HorizontalPodAutoscaler")
    assert behavior(item)["scaleDown"]["policies"][0]["periodSeconds"] == 1800


def test_signals_can_be_left_out_and_added() -> None:
    extra = {
        "type": "Resource",
        "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80}},
    }
    manifests = render(
        {
            "engines": {
                "decode": {
                    "role": "decode",
                    "autoscaling": {"enabled": True, "kvUsage": 0, "queueDelaySeconds": 1.5, "metrics": [extra]},
                }
            },
            "gateway": {"autoscaling": {"enabled": True}},
        }
    )
    engine = by_name(manifests, "HorizontalPodAutoscaler", "mesh-kvmesh-decode")["spec"]["metrics"]
    assert [item["type"] for item in engine] == ["External", "Resource"]
    assert engine[0]["external"]["target"]["value"] == "1.5"
    gateway = by_name(manifests, "HorizontalPodAutoscaler", "mesh-kvmesh-gateway")["spec"]
    assert gateway["scaleTargetRef"]["kind"] == "Deployment"
    assert gateway["metrics"][0]["resource"]["target"]["averageUtilization"] == 70


def test_nothing_scales_unless_asked_to() -> None:
    assert not of_kind(render({}), "HorizontalPodAutoscaler", "ScaledObject")


def test_a_gateway_with_a_journal_of_its_own_is_scaled_as_a_stateful_set() -> None:
    manifests = render({"gateway": {"autoscaling": {"enabled": True}}, "limits": {"journal": {"type": "pvc"}}})
    (item,) = of_kind(manifests, "HorizontalPodAutoscaler")
    assert item["spec"]["scaleTargetRef"]["kind"] == "StatefulSet"
    assert of_kind(manifests, "StatefulSet")
