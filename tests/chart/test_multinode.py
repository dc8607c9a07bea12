"""An engine on several hosts: a LeaderWorkerSet whose pods are told who they are by what its controller puts in."""

from __future__ import annotations

import re
from typing import Any

from chart_kit import Manifest, at, by_name, ci_render, containers, label, of_kind, pods, render
from kvmesh.config import DecodeSettings
from test_settings import settings_of


def group(manifests: list[Manifest], engine: str) -> Manifest:
    (found,) = (
        item
        for item in of_kind(manifests, "LeaderWorkerSet")
        if item["metadata"]["labels"]["app.kubernetes.io/component"] == engine
    )
    return found


def templates(item: Manifest) -> tuple[Manifest, Manifest]:
    both = item["spec"]["leaderWorkerTemplate"]
    return both["leaderTemplate"], both["workerTemplate"]


def test_the_group_starts_and_ends_as_one() -> None:
    item = group(ci_render("multinode"), "big")
    spec = item["spec"]
    # The leader is ready only when its workers are: to wait for it would be to wait for ever.
    assert spec["startupPolicy"] == "LeaderCreated"
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert spec["leaderWorkerTemplate"]["size"] == 2
    assert "replicas" not in spec, "an autoscaler decides"
    assert group(ci_render("multinode"), "cpu-pair")["spec"]["replicas"] == 1
    annotations = item["metadata"]["annotations"]
    assert annotations["leaderworkerset.sigs.k8s.io/exclusive-topology"] == "topology.kubernetes.io/zone"
    leader, worker = templates(item)
    assert leader["spec"]["terminationGracePeriodSeconds"] == worker["spec"]["terminationGracePeriodSeconds"]


def test_hosts_are_told_who_they_are(monkeypatch: Any) -> None:
    for engine, tp in (("big", 16), ("cpu-pair", 2)):
        for rank, pod in enumerate(templates(group(ci_render("multinode"), engine))):
            (container,) = (item for item in containers(pod) if item["name"] == "engine")
            monkeypatch.setitem(settings_of.__globals__["KNOWN"], "LWS_WORKER_INDEX", str(rank))
            built = settings_of(container, monkeypatch)
            assert isinstance(built, DecodeSettings)
            assert (built.role, built.tp, built.tp_hosts, built.tp_host_rank) == ("unified", tp, 2, rank)
            assert built.tp_leader == "big-0.big.serving:50056"
            assert built.tp_listen == "0.0.0.0:50056"
            assert built.mesh_token_file is not None
            assert built.sidecar_socket is None


def test_references_are_those_that_the_controller_puts_in() -> None:
    for item in of_kind(ci_render("multinode"), "LeaderWorkerSet"):
        for pod in templates(item):
            for container in containers(pod):
                text = " ".join(entry.get("value", "") for entry in container["env"])
                own = {entry["name"] for entry in container["env"]}
                given = {"LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"}
                assert set(re.findall(r"\$\((\w+)\)", text)) <= own | given
                assert not own & given, "a variable of the controller's is overridden"


def test_a_group_has_no_sidecar_and_its_gpus_are_divided() -> None:
    manifests = ci_render("multinode")
    for owner, pod in pods(manifests):
        if owner["kind"] == "LeaderWorkerSet":
            assert [item["name"] for item in containers(pod)] == ["engine"], label(owner)
    for pod in templates(group(manifests, "big")):
        (container,) = containers(pod)
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
        assert container["resources"]["requests"]["nvidia.com/gpu"] == 8


def test_both_pods_are_probed() -> None:
    for pod in templates(group(ci_render("multinode"), "big")):
        (container,) = containers(pod)
        assert container["readinessProbe"]["grpc"] == {"port": 50054, "service": "kvmesh.v1.Engine"}
        assert container["livenessProbe"]["grpc"].get("service", "") == ""
        start = container["startupProbe"]
        # Hosts wait 600 s for one another, and then load.
        assert start["failureThreshold"] * start["periodSeconds"] >= 1200


def test_leaders_alone_are_found_under_the_engine_s_name() -> None:
    manifests = ci_render("multinode")
    service = by_name(manifests, "Service", "mesh-kvmesh-big")
    assert service["spec"]["selector"]["leaderworkerset.sigs.k8s.io/worker-index"] == "0"
    names = {item["metadata"]["name"] for item in of_kind(manifests, "Service")}
    # The controller makes a service of the group's name, in which pods that are not ready are found.
    for item in of_kind(manifests, "LeaderWorkerSet"):
        assert item["metadata"]["name"] not in names
    ordinary = by_name(render({}), "Service", "mesh-kvmesh-decode")
    assert "leaderworkerset.sigs.k8s.io/worker-index" not in ordinary["spec"]["selector"]


def test_an_engine_is_one_kind_of_workload() -> None:
    manifests = ci_render("multinode")
    deployed = {
        at(item, "metadata", "labels", "app.kubernetes.io/component") for item in of_kind(manifests, "Deployment")
    }
    assert deployed == {"gateway", "router"}


def test_hosts_of_a_group_are_not_spread_over_zones() -> None:
    """Its ranks speak at each layer."""
    for owner, pod in pods(ci_render("multinode")):
        keys = [item["topologyKey"] for item in pod["spec"].get("topologySpreadConstraints", [])]
        if owner["kind"] == "LeaderWorkerSet":
            assert keys == ["kubernetes.io/hostname"]
        elif owner["kind"] == "Deployment":
            assert "topology.kubernetes.io/zone" in keys
