"""What holds for every pod of every rendering: it may do nothing that it does not need, and ends in good order."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import pytest

from chart_kit import (
    Manifest,
    at,
    by_name,
    ci_names,
    ci_render,
    containers,
    label,
    leaves,
    of_kind,
    pods,
    render,
    services_of,
)

CASES = ci_names()
# Pods that carry requests: what they have in hand is finished before they go.
SERVING = ("gateway", "router", "engine")


def tier(pod: Manifest) -> str:
    return str(pod["metadata"]["labels"].get("kvmesh.io/tier", ""))


@pytest.mark.parametrize("name", CASES)
def test_nobody_is_root_or_may_become_it(name: str) -> None:
    for owner, pod in pods(ci_render(name)):
        spec, where = pod["spec"], label(owner)
        assert spec["automountServiceAccountToken"] is False, where
        assert spec["serviceAccountName"], where
        assert not {"hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"} & spec.keys(), where
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True, where
        assert security["runAsUser"] > 0, where
        assert security["runAsGroup"] > 0, where
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, where
        for container in containers(pod):
            inside = f"{where} {container['name']}"
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False, inside
            assert own["readOnlyRootFilesystem"] is True, inside
            assert own["capabilities"]["drop"] == ["ALL"], inside
            assert not own.get("privileged"), inside
            assert "seccompProfile" not in own, inside


@pytest.mark.parametrize("name", CASES)
def test_ipc_lock_is_the_only_capability_and_only_where_a_nic_is(name: str) -> None:
    for owner, pod in pods(ci_render(name)):
        for container in containers(pod):
            inside = f"{label(owner)} {container['name']}"
            added = container["securityContext"]["capabilities"].get("add", [])
            nics = [key for key in at(container, "resources", "limits") or {} if "rdma" in key or "efa" in key]
            if nics:
                assert container["name"] == "kvtransfer", inside
                assert added == ["IPC_LOCK"], inside
            else:
                assert not added, inside
                assert container["securityContext"].get("runAsUser", 1) > 0, inside
                assert container["securityContext"].get("runAsNonRoot", True) is True, inside


def test_root_is_asked_for_by_name_alone() -> None:
    """A capability that is added counts for root alone; the chart takes that user only where a value says so."""
    users = {
        label(owner): container["securityContext"].get("runAsUser")
        for owner, pod in pods(ci_render("gpu-rdma"))
        for container in containers(pod)
        if container["name"] == "kvtransfer"
    }
    assert {name.rpartition("-")[2]: user for name, user in users.items()} == {
        "prefill": 10001, "decode": 10001, "canary": 10001, "efa": 0,
    }  # fmt: skip


def test_a_sidecar_of_another_user_lets_its_engine_in() -> None:
    """Its socket is its user's alone unless it is told the engine's group."""
    for owner, pod in pods(ci_render("gpu-rdma")):
        for container in containers(pod):
            if container["name"] == "kvtransfer":
                told = {item["name"]: item.get("value") for item in container["env"]}
                other = container["securityContext"]["runAsUser"] != pod["spec"]["securityContext"]["runAsUser"]
                group = str(pod["spec"]["securityContext"]["runAsGroup"])
                assert told.get("KVMESH_KVTRANSFER_ENGINE_GROUP") == (group if other else None), label(owner)


@pytest.mark.parametrize("name", CASES)
def test_containers_have_resources_probes_and_images_of_one_version(name: str) -> None:
    for owner, pod in pods(ci_render(name)):
        for container in containers(pod):
            inside = f"{label(owner)} {container['name']}"
            image = container["image"]
            _, _, tag = image.rpartition("/")[2].partition(":")
            assert "@sha256:" in image or (tag and tag != "latest"), f"{inside}: {image}"
            assert container["imagePullPolicy"] in ("Always", "IfNotPresent", "Never"), inside
            requests = at(container, "resources", "requests")
            assert requests is None or {"cpu", "memory"} <= requests.keys(), inside
            if container["name"] not in ("model",):
                assert requests is not None, inside
                assert at(container, "resources", "limits", "memory"), inside
        if owner["kind"] == "Pod":
            continue
        for container in services_of(pod):
            inside = f"{label(owner)} {container['name']}"
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                assert probe in container, f"{inside}: {probe}"
                assert {"grpc", "exec"} & container[probe].keys(), f"{inside}: {probe}"
                assert container[probe]["timeoutSeconds"] >= 3, f"{inside}: {probe}"
            assert container["livenessProbe"].get("grpc", {}).get("service", "") == "", (
                f"{inside}: liveness is the empty name"
            )


READINESS = {
    "gateway": "kvmesh.v1.Inference",
    "router": "kvmesh.v1.Router",
    "engine": "kvmesh.v1.Engine",
    "kvtransfer": "kvmesh.v1.KvTransfer",
}


@pytest.mark.parametrize("name", CASES)
def test_readiness_asks_for_the_service_at_the_port_that_is_served(name: str) -> None:
    seen = set()
    for owner, pod in pods(ci_render(name)):
        for container in services_of(pod):
            wanted = READINESS.get(container["name"])
            if wanted is None:
                continue
            probe = container["readinessProbe"]
            ports = {port["containerPort"] for port in container["ports"]}
            if "grpc" in probe:
                assert probe["grpc"]["service"] == wanted, label(owner)
                assert probe["grpc"]["port"] in ports, label(owner)
            else:
                program, address, service, *_ = probe["exec"]["command"]
                assert program == "kvmesh-probe", label(owner)
                assert service == wanted, label(owner)
                assert int(address.rpartition(":")[2]) in ports, label(owner)
            seen.add("grpc" in probe)
    assert len(seen) == 1
    # The kubelet speaks no TLS to gRPC.
    assert seen == {name != "full"}


@pytest.mark.parametrize("name", CASES)
def test_pods_end_in_good_order(name: str) -> None:
    """Grace period = total limit + 30 s; the service drains within what preStop leaves of it."""
    total = {"full": 900}.get(name, 600)
    for owner, pod in pods(ci_render(name)):
        if tier(pod) not in SERVING:
            continue
        grace = pod["spec"]["terminationGracePeriodSeconds"]
        assert grace == total + 30, label(owner)
        for container in pod["spec"]["containers"]:
            stop = at(container, "lifecycle", "preStop") or {}
            waits = at(stop, "sleep", "seconds") or int((at(stop, "exec", "command") or ["0", "0"])[-1])
            drains = [float(item["value"]) for item in container["env"] if item["name"].endswith("_DRAIN_TIMEOUT_S")]
            assert len(drains) == 1, label(owner)
            assert waits + drains[0] < grace, label(owner)


def test_an_older_kubernetes_sleeps_by_a_command() -> None:
    for version, way in (("1.29", "exec"), ("1.30", "sleep"), ("1.35", "sleep")):
        (stop,) = {
            tuple(container["lifecycle"]["preStop"])
            for _, pod in pods(render({}, version=version))
            for container in pod["spec"]["containers"]
            if container["name"] == "gateway"
        }
        assert stop == (way,)


@pytest.mark.parametrize("name", CASES)
def test_volumes_and_mounts_match(name: str) -> None:
    for owner, pod in pods(ci_render(name)):
        volumes = [volume["name"] for volume in pod["spec"].get("volumes", [])]
        claims = [claim["metadata"]["name"] for claim in at(owner, "spec", "volumeClaimTemplates") or []]
        assert len(volumes) == len(set(volumes)), label(owner)
        mounted = set()
        for container in containers(pod):
            mounts = container.get("volumeMounts", [])
            paths = [mount["mountPath"] for mount in mounts]
            assert len(paths) == len(set(paths)), label(owner)
            assert "/tmp" in paths, f"{label(owner)} {container['name']}: the root file system is read-only"
            mounted |= {mount["name"] for mount in mounts}
        assert mounted == {*volumes, *claims}, label(owner)


@pytest.mark.parametrize("name", CASES)
def test_the_environment_is_well_formed(name: str) -> None:
    for owner, pod in pods(ci_render(name)):
        for container in containers(pod):
            names = [item["name"] for item in container.get("env", [])]
            assert len(names) == len(set(names)), f"{label(owner)}: {sorted(names)}"
            for item in container.get("env", []):
                assert isinstance(item.get("value", ""), str), item
                assert ("value" in item) != ("valueFrom" in item), item


@pytest.mark.parametrize("name", CASES)
def test_engine_and_sidecar_share_a_socket_and_nothing_else(name: str) -> None:
    for owner, pod in pods(ci_render(name)):
        mounts = {
            item["name"]: {mount["name"] for mount in item["volumeMounts"]}
            for item in containers(pod)
            if item["name"] in ("engine", "kvtransfer")
        }
        if len(mounts) < 2:
            continue
        shared = (mounts["engine"] & mounts["kvtransfer"]) - {"tmp", "mesh", "tls"}
        assert shared == {"kvtransfer"}, label(owner)
        (volume,) = (item for item in pod["spec"]["volumes"] if item["name"] == "kvtransfer")
        assert volume["emptyDir"]["medium"] == "Memory", label(owner)
        sidecar = next(item for item in containers(pod) if item["name"] == "kvtransfer")
        assert not [key for key in at(sidecar, "resources", "limits") or {} if "gpu" in key], label(owner)
        assert "/dev/shm" not in [mount["mountPath"] for mount in sidecar["volumeMounts"]], label(owner)


def test_the_sidecar_outlives_its_engine() -> None:
    """A native sidecar begins before the engine and gets SIGTERM after it; an ordinary one waits in preStop."""
    for native, version in ((True, "1.29"), (False, "1.28")):
        for _, pod in pods(render({}, version=version)):
            if tier(pod) != "engine":
                continue
            (sidecar,) = (item for item in containers(pod) if item["name"] == "kvtransfer")
            assert (sidecar.get("restartPolicy") == "Always") is native
            assert (sidecar in pod["spec"].get("initContainers", [])) is native
            assert ("lifecycle" in sidecar) is not native


SECRET_WORDS = re.compile(r"(password|secret|token|api_?key|private)", re.I)
HARMLESS = re.compile(r"^(/etc/kvmesh/|\d|$|auto|true|false)")


@pytest.mark.parametrize("name", CASES)
def test_secrets_are_mounted_and_never_written_out(name: str) -> None:
    manifests = ci_render(name)
    for _, pod in pods(manifests):
        for container in containers(pod):
            for item in container.get("env", []):
                if SECRET_WORDS.search(item["name"]) and "value" in item and item["name"].startswith("KVMESH_"):
                    assert HARMLESS.match(item["value"]) or "TOKENS" in item["name"], item["name"]
    made: list[str] = []
    for manifest in of_kind(manifests, "Secret"):
        made += [base64.b64decode(value).decode() for value in (manifest.get("data") or {}).values()]
        made += list((manifest.get("stringData") or {}).values())
    rest = json.dumps([item for item in manifests if item["kind"] != "Secret"], ensure_ascii=False)
    for value in made:
        assert len(value) > 5
        assert json.dumps(value, ensure_ascii=False)[1:-1] not in rest


def test_secrets_that_are_made_are_long_and_kept() -> None:
    manifests = render({})
    secrets = of_kind(manifests, "Secret")
    assert len(secrets) == 2
    for manifest in secrets:
        assert manifest["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
        for value in manifest["data"].values():
            assert len(base64.b64decode(value)) >= 32
    values = {value for manifest in secrets for value in manifest["data"].values()}
    assert len(values) == 2, "the same secret for two purposes"


def test_each_switch_takes_its_pods_away() -> None:
    def names(values: dict[str, Any]) -> set[str]:
        return {label(owner).removeprefix("Deployment/mesh-kvmesh-") for owner, _ in pods(render(values))}

    everything = names({})
    assert {"gateway", "router", "prefill", "decode"} <= everything
    assert everything - names({"router": {"enabled": False}}) == {"router"}
    assert "gateway" not in names({"gateway": {"enabled": False}})
    assert everything - names({"engines": {"prefill": {"enabled": False, "role": "prefill"}}}) == {"prefill"}
    assert "StatefulSet/mesh-kvmesh-redis" in everything
    assert "StatefulSet/mesh-kvmesh-redis" not in names({"redis": {"bundled": {"enabled": False}}})


def test_a_new_version_of_the_chart_alone_rolls_no_pod() -> None:
    for owner, pod in pods(render({})):
        if owner["kind"] == "Pod":
            continue
        assert not [value for _, value in leaves(pod) if value == "kvmesh-0.1.0"], label(owner)


@pytest.mark.parametrize("auth", [True, False])
def test_probes_of_redis_offer_a_password_only_where_there_is_one(auth: bool) -> None:
    """redis-cli offers an empty one too, which a Redis without refuses: a failed AUTH a probe."""
    redis = by_name(render({"redis": {"bundled": {"auth": {"enabled": auth}}}}), "StatefulSet", "mesh-kvmesh-redis")
    (container,) = redis["spec"]["template"]["spec"]["containers"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert ("REDISCLI_AUTH" in container[probe]["exec"]["command"][-1]) is auth


def test_no_variable_is_there_twice() -> None:
    """An API server refuses it where charts are applied by the server, as helm 4 does."""
    own = [{"name": "HOME", "value": "/elsewhere"}, {"name": "TRITON_CACHE_DIR", "value": "/elsewhere"}]
    manifests = render({"engines": {"decode": {"role": "decode", "device": "cuda", "extraEnv": own}}})
    everybody = [*manifests, *(item for name in CASES for item in ci_render(name))]
    for owner, pod in pods(everybody):
        for container in containers(pod):
            names = [item["name"] for item in container.get("env", [])]
            assert len(names) == len(set(names)), label(owner)
    engine = by_name(manifests, "Deployment", "mesh-kvmesh-decode")["spec"]["template"]["spec"]["containers"][0]
    assert {item["name"]: item.get("value") for item in engine["env"]}["HOME"] == "/elsewhere"
