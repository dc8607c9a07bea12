"""The variables of every container are what the service itself takes: its settings are built from them, as it would."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chart_kit import Manifest, ci_names, ci_render, containers, label, pods, render
from kvmesh.config import DecodeSettings, GatewaySettings, KvTransferSettings, PrefillSettings, RouterSettings
from kvmesh.config.base import ServiceSettings

# What the adversarial values set on purpose is no setting.
CASES = [name for name in ci_names() if name != "adversarial"]
CLASSES: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "router": RouterSettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "kvtransfer": KvTransferSettings,
}
# What Kubernetes and the controller of a LeaderWorkerSet put in place of references.
KNOWN = {"POD_IP": "10.0.0.7", "POD_NAME": "pod", "LWS_LEADER_ADDRESS": "big-0.big.serving", "LWS_WORKER_INDEX": "1"}


def service_of(container: Manifest) -> str:
    """gateway, router, prefill, decode, kvtransfer, or "" for another's image."""
    image = container["image"].partition("@")[0].rpartition(":")[0].rpartition("/")[2]
    return image if container["name"] in ("gateway", "router", "engine", "kvtransfer") else ""


def variables(container: Manifest) -> dict[str, str]:
    """The environment as the process finds it."""
    found = dict(KNOWN)
    for item in container["env"]:
        if "value" in item:
            found[item["name"]] = re.sub(r"\$\((\w+)\)", lambda match: found[match[1]], item["value"])
        elif "resourceFieldRef" in item["valueFrom"]:
            found[item["name"]] = "4"
        else:
            found.setdefault(item["name"], "given")
    return found


def settings_of(container: Manifest, monkeypatch: pytest.MonkeyPatch) -> ServiceSettings:
    """Raises where the service would end with status 2, also for a variable that it does not know."""
    model = CLASSES[service_of(container)]
    given = variables(container)
    with monkeypatch.context() as patch:
        for name, value in given.items():
            patch.setenv(name, value)
        built = model()
    prefix = str(model.model_config["env_prefix"])
    known: set[str] = set()

    def names(fields: Any, before: str) -> None:
        for name, field in fields.items():
            known.add(before + name.upper())
            if hasattr(field.annotation, "model_fields"):
                names(field.annotation.model_fields, f"{before}{name.upper()}__")

    names(model.model_fields, prefix)
    unknown = {name for name in given if name.startswith("KVMESH_")} - known - {"KVMESH_TLS_SERVER_NAME"}
    assert not unknown, f"{container['name']} knows no {sorted(unknown)}"
    return built


def served(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest, Manifest]]:
    """(name of the owner, pod, container) of our services."""
    for owner, pod in pods(manifests):
        for container in containers(pod):
            if service_of(container):
                yield label(owner), pod, container


@pytest.mark.parametrize("name", CASES)
def test_services_take_their_settings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0
    for where, _, container in served(ci_render(name)):
        try:
            settings_of(container, monkeypatch)
        except ValueError as error:
            pytest.fail(f"{where} {container['name']}: {error}")
        count += 1
    assert count >= 2


@pytest.mark.parametrize("name", CASES)
def test_files_that_settings_name_are_mounted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for where, _, container in served(ci_render(name)):
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        built = settings_of(container, monkeypatch)
        for field, value in (*built, *(built.tls or ())):
            if isinstance(value, Path):
                assert any(value.is_relative_to(mount) for mount in mounts), f"{where}: {field} {value} of {mounts}"


@pytest.mark.parametrize("name", CASES)
def test_ports_that_settings_name_are_the_container_s(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for where, pod, container in served(ci_render(name)):
        built = settings_of(container, monkeypatch)
        ports = {port["containerPort"] for port in container["ports"]}
        assert built.listen.startswith("0.0.0.0:"), where
        assert int(built.listen.rpartition(":")[2]) in ports, where
        assert int(built.metrics_listen.rpartition(":")[2]) in ports, where
        assert built.advertise == built.listen.replace("0.0.0.0", "10.0.0.7") or not built.advertise, where
        taken = [port["containerPort"] for item in containers(pod) for port in item.get("ports", [])]
        assert len(taken) == len(set(taken)), f"{where}: containers of a pod share its ports"


@pytest.mark.parametrize("name", CASES)
def test_the_mesh_is_closed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every service has the mesh token, and with TLS inner ones demand a certificate."""
    for where, _, container in served(ci_render(name)):
        built = settings_of(container, monkeypatch)
        assert built.mesh_token_file is not None, where
        if name == "full":
            assert built.tls.serves_tls, where
            assert built.tls.ca is not None, where
            assert built.tls.require_client_cert is (container["name"] != "gateway"), where


def settings(values: dict[str, Any], component: str, container: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    for owner, pod in pods(render(values)):
        if owner["metadata"]["name"] == f"mesh-kvmesh-{component}":
            (found,) = (item for item in containers(pod) if item["name"] == container)
            return settings_of(found, monkeypatch)
    raise AssertionError(component)


def test_values_arrive_as_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "gateway": {
            "processes": 3,
            "replicas": 2,
            "http": {"corsOrigins": ["https://a.example", "https://b.example"], "playground": True},
            "settings": {"max_message_bytes": 268435456, "grammar_timeout_ms": 250, "early_refusal": False},
        },
        "router": {
            "settings": {"aliases": ["auto", "x=y"], "semantic_threshold": 0.85, "cache_tenant_bytes": 1073741824}
        },
        "limits": {"ttftSeconds": 12.5, "totalSeconds": 750, "budgetAway": "closed"},
        "cache": {"mode": "exact", "ttlSeconds": 90},
        "telemetry": {"otlpEndpoint": "http://collector:4317", "sampleRatio": 0.25, "logs": {"level": "debug"}},
        "engines": {
            "decode": {
                "role": "decode",
                "tp": 2,
                "dtype": "fp32",
                "settings": {"num_pages": 12345678, "prefix_cache": False},
            }
        },
        "kvtransfer": {"settings": {"heartbeat_s": 0.5, "tcp_streams": 4}},
    }
    gateway = settings(values, "gateway", "gateway", monkeypatch)
    assert gateway.processes == 3
    assert gateway.limits.replicas == 6
    assert gateway.limits.budget_away == "closed"
    assert gateway.max_message_bytes == 268435456
    assert gateway.grammar_timeout_ms == 250
    assert gateway.early_refusal is False
    assert gateway.playground is True
    assert gateway.cors_origins == ["https://a.example", "https://b.example"]
    assert (gateway.ttft_limit_s, gateway.total_limit_s) == (12.5, 750)
    assert (gateway.otlp_endpoint, gateway.trace_sample_ratio) == ("http://collector:4317", 0.25)
    assert (gateway.log_level, gateway.log_format) == ("debug", "json")
    assert gateway.redis_url == "redis://mesh-kvmesh-redis.serving.svc.cluster.local:6379/0"
    assert gateway.routers == ["dns:///mesh-kvmesh-router.serving.svc.cluster.local:50052"]
    assert gateway.workers == ["dns:///mesh-kvmesh-decode.serving.svc.cluster.local:50054"]
    router = settings(values, "router", "router", monkeypatch)
    assert router.aliases == ["auto", "x=y"]
    assert router.semantic_threshold == 0.85
    assert router.cache_tenant_bytes == 1 << 30
    assert (router.cache, router.cache_ttl_s) == ("exact", 90)
    assert router.redis_url == gateway.redis_url
    decode = settings(values, "decode", "engine", monkeypatch)
    assert (decode.tp, decode.dtype, decode.num_pages, decode.prefix_cache) == (2, "fp32", 12345678, False)
    assert decode.threads == 4
    assert decode.drain_timeout_s == 750
    sidecar = settings(values, "decode", "kvtransfer", monkeypatch)
    assert (sidecar.heartbeat_s, sidecar.tcp_streams) == (0.5, 4)
    assert sidecar.transports == ["tcp"]
    assert sidecar.engine_socket == decode.sidecar_socket


def test_what_the_chart_sets_cannot_be_set_twice() -> None:
    from chart_kit import Refused

    for values, said in (
        ({"gateway": {"settings": {"listen": "0.0.0.0:1"}}}, "gateway.settings: listen"),
        ({"engines": {"decode": {"role": "decode", "settings": {"tp": 2}}}}, "engines.decode.settings: tp"),
        ({"router": {"settings": {"mesh_token_file": "/x"}}}, "router.settings: mesh_token_file"),
    ):
        with pytest.raises(Refused, match=said):
            render(values)


def test_rdma_changes_the_transports(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"engines": {"decode": {"role": "decode", "device": "cuda", "rdma": {"enabled": True}}}}
    assert settings(values, "decode", "kvtransfer", monkeypatch).transports == ["verbs", "tcp"]
    assert settings(values, "prefill", "kvtransfer", monkeypatch).transports == ["tcp"]
    assert settings(values, "decode", "engine", monkeypatch).device == "cuda"
