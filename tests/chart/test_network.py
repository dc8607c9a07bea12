"""Services, disruption budgets and network policies: each finds its pods, and each port that is used is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from chart_kit import Manifest, at, ci_names, ci_render, containers, label, of_kind, pods, render

CASES = ci_names()
WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"


def labels_of(manifests: list[Manifest]) -> list[tuple[str, dict[str, str], Manifest]]:
    """(owner, labels, pod) of all pods, with those that the LeaderWorkerSet's controller adds."""
    found = []
    for owner, pod in pods(manifests):
        labels = dict(pod["metadata"]["labels"])
        if owner["kind"] == "LeaderWorkerSet":
            leads = pod is at(owner, "spec", "leaderWorkerTemplate", "leaderTemplate")
            labels[WORKER_INDEX] = "0" if leads else "1"
        found.append((label(owner), labels, pod))
    return found


def fits(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """A label selector with matchLabels and matchExpressions."""
    for rule in selector.get("matchExpressions", []):
        there = rule["key"] in labels
        answer = {
            "Exists": there,
            "DoesNotExist": not there,
            "In": labels.get(rule["key"]) in rule.get("values", []),
            "NotIn": labels.get(rule["key"]) not in rule.get("values", []),
        }[rule["operator"]]
        if not answer:
            return False
    return fits(selector.get("matchLabels", {}), labels)


@pytest.mark.parametrize("name", CASES)
def test_selectors_are_those_of_one_workload(name: str) -> None:
    manifests = ci_render(name)
    everyone = labels_of(manifests)
    for workload in of_kind(manifests, "Deployment", "StatefulSet"):
        chosen = workload["spec"]["selector"]["matchLabels"]
        assert {owner for owner, labels, _ in everyone if fits(chosen, labels)} == {label(workload)}
        assert not {"app.kubernetes.io/version", "helm.sh/chart"} & chosen.keys(), label(workload)


@pytest.mark.parametrize("name", CASES)
def test_services_lead_to_ports_of_one_workload(name: str) -> None:
    manifests = ci_render(name)
    everyone = labels_of(manifests)
    for service in of_kind(manifests, "Service"):
        found = [(owner, pod) for owner, labels, pod in everyone if fits(service["spec"]["selector"], labels)]
        assert len({owner for owner, _ in found}) == 1, label(service)
        assert len(found) == 1, f"{label(service)}: workers of a group serve nobody"
        named = {
            port["name"]: port["containerPort"] for item in containers(found[0][1]) for port in item.get("ports", [])
        }
        for port in service["spec"]["ports"]:
            target = port.get("targetPort", port["port"])
            assert target in named if isinstance(target, str) else target in named.values(), f"{label(service)}: {port}"
            if service["spec"].get("clusterIP") == "None":
                # Clients of a headless service come to the pod itself: no port is translated.
                assert named.get(target, target) == port["port"], f"{label(service)}: {port}"
        assert len({port["name"] for port in service["spec"]["ports"]}) == len(service["spec"]["ports"])


@pytest.mark.parametrize("name", CASES)
def test_inner_services_are_headless(name: str) -> None:
    """gRPC connections live long: a cluster IP would pin all calls of a client to one pod."""
    for service in of_kind(ci_render(name), "Service"):
        component = service["metadata"]["labels"]["app.kubernetes.io/component"]
        if component not in ("gateway", "redis"):
            assert service["spec"]["clusterIP"] == "None", label(service)


@pytest.mark.parametrize("name", CASES)
def test_disruption_budgets_are_for_pods_that_are_there(name: str) -> None:
    manifests = ci_render(name)
    everyone = labels_of(manifests)
    budgets = of_kind(manifests, "PodDisruptionBudget")
    for budget in budgets:
        chosen = {owner for owner, labels, _ in everyone if matches(budget["spec"]["selector"], labels)}
        assert len(chosen) == 1, f"{label(budget)}: {chosen}"
    if name not in ("minimal",):
        covered = {
            owner for budget in budgets for owner, labels, _ in everyone if matches(budget["spec"]["selector"], labels)
        }
        serving = {
            owner for owner, labels, _ in everyone if labels.get("kvmesh.io/tier") in ("gateway", "router", "engine")
        }
        assert serving <= covered


def policies(manifests: list[Manifest], labels: dict[str, str], way: str) -> list[Manifest]:
    return [
        item
        for item in of_kind(manifests, "NetworkPolicy")
        if way in item["spec"]["policyTypes"] and matches(item["spec"]["podSelector"], labels)
    ]


def open_to(rules: list[Manifest], key: str, peer: dict[str, str] | None, port: int) -> bool:
    """Whether some rule lets a peer (None = from outside of the release, any pod) through at a TCP port."""
    for rule in rules:
        if rule.get("ports") and not any(
            item.get("protocol", "TCP") == "TCP" and int(item["port"]) <= port <= int(item.get("endPort", item["port"]))
            for item in rule["ports"]
        ):
            continue
        peers = rule.get(key)
        if not peers:
            return True
        for one in peers:
            if "namespaceSelector" in one or "ipBlock" in one:
                if peer is None:
                    return True
            elif peer is not None and matches(one["podSelector"], peer):
                return True
    return False


def allowed(manifests: list[Manifest], source: dict[str, str] | None, target: dict[str, str] | None, port: int) -> bool:
    """Whether a connection is let out of its source and into its target; None = something outside of the release."""
    if source is not None:
        out = policies(manifests, source, "Egress")
        if out and not open_to([rule for item in out for rule in item["spec"].get("egress", [])], "to", target, port):
            return False
    if target is not None:
        into = policies(manifests, target, "Ingress")
        if into and not open_to(
            [rule for item in into for rule in item["spec"].get("ingress", [])], "from", source, port
        ):
            return False
    return True


def components(manifests: list[Manifest]) -> dict[str, dict[str, str]]:
    """Labels of pods by component."""
    return {labels["app.kubernetes.io/component"]: labels for _, labels, _ in labels_of(manifests)}


# Who calls whom, and where: docs/operations.md and design.md §2.
CALLS = [
    ("gateway", "router", 50052),
    ("gateway", "decode", 50054),
    ("gateway", "gateway", 8081),
    ("gateway", "redis", 6379),
    ("router", "redis", 6379),
    ("prefill", "router", 50052),
    ("decode", "router", 50052),
    ("decode", "prefill", 50053),
    ("decode", "prefill", 50055),
    ("prefill", "decode", 50055),
    ("prefill", "decode", 41234),  # KV over tcp: any port
    ("test", "gateway", 8080),
]
NOBODY_CALLS = [
    ("prefill", "gateway", 8081),
    ("decode", "redis", 6379),
    ("router", "decode", 50054),
    ("router", "router", 50052),
    ("redis", "gateway", 8080 + 10),
    ("redis", "router", 50052),
    ("gateway", "prefill", 50053),
    ("gateway", "decode", 50055),
]


@pytest.mark.parametrize("name", ["default", "full"])
def test_policies_let_through_what_is_used(name: str) -> None:
    manifests = ci_render(name)
    there = components(manifests)
    for source, target, port in CALLS:
        assert allowed(manifests, there[source], there[target], port), f"{source} → {target}:{port}"
    for source, target, port in NOBODY_CALLS:
        assert not allowed(manifests, there[source], there[target], port), f"{source} → {target}:{port}"


@pytest.mark.parametrize("name", ["default", "full", "multinode"])
def test_outsiders_reach_the_gateway_and_metrics_alone(name: str) -> None:
    manifests = ci_render(name)
    for component, labels in components(manifests).items():
        if component == "test":
            continue
        public = {8080, 8000} if component == "gateway" else set()
        metrics = {"redis": set(), "gateway": {9090}, "router": {9090}}.get(component, {9090, 9091})
        if name == "full" and component == "gateway":
            public.add(8443)
        for port in (22, 80, 6379, 8000, 8080, 8081, 8443, 9090, 9091, 50052, 50053, 50054, 50055, 50056, 41234):
            assert allowed(manifests, None, labels, port) is (port in public | metrics), f"{component}:{port}"


def test_every_pod_that_serves_is_denied_by_default() -> None:
    manifests = render({})
    for owner, labels, _ in labels_of(manifests):
        if owner.startswith("Pod/"):
            continue
        assert policies(manifests, labels, "Ingress"), owner
        assert policies(manifests, labels, "Egress"), owner


def test_a_collector_a_key_set_and_a_redis_elsewhere_can_be_reached() -> None:
    manifests = render(
        {
            "telemetry": {"otlpEndpoint": "http://collector.observability:4318"},
            "redis": {"bundled": {"enabled": False}, "external": {"url": "rediss://redis.example:6380/0"}},
            "auth": {"jwt": {"jwks": "https://id.example:8443/keys", "issuer": "https://id.example", "audience": "a"}},
        }
    )
    there = components(manifests)
    for source in ("gateway", "router", "prefill", "decode"):
        assert allowed(manifests, there[source], None, 4318), source
        assert allowed(manifests, there[source], None, 53), source
        assert not allowed(manifests, there[source], None, 443), source
        assert allowed(manifests, there[source], None, 6380) is (source in ("gateway", "router")), source
        assert allowed(manifests, there[source], None, 8443) is (source == "gateway"), source


def test_nodes_of_a_redis_cluster_may_have_ports_of_their_own() -> None:
    for cluster in (True, False):
        manifests = render(
            {
                "redis": {
                    "bundled": {"enabled": False},
                    "external": {"url": "redis://redis.example:7000", "cluster": cluster},
                },
                "networkPolicy": {"redisTo": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]},
            }
        )
        there = components(manifests)
        assert allowed(manifests, there["router"], None, 7000)
        assert allowed(manifests, there["router"], None, 7001) is cluster
        assert not allowed(manifests, there["decode"], None, 7001)


def test_who_may_call_gateways_can_be_said() -> None:
    manifests = render({"networkPolicy": {"gatewayFrom": [{"podSelector": {"matchLabels": {"app": "chat"}}}]}})
    there = components(manifests)
    assert allowed(manifests, {"app": "chat"}, there["gateway"], 8080)
    assert not allowed(manifests, {"app": "other"}, there["gateway"], 8080)
    assert allowed(manifests, there["test"], there["gateway"], 8080), "helm test must get in"


def test_the_hosts_of_a_group_reach_one_another() -> None:
    manifests = ci_render("multinode")
    group = [labels for owner, labels, _ in labels_of(manifests) if "big-hosts" in owner]
    assert len(group) == 2
    leader, worker = group
    for port in (50056, 41234, 29500):
        assert allowed(manifests, worker, leader, port)
        assert allowed(manifests, leader, worker, port)
