"""Every variable that the chart renders is a setting of the service that gets it, and the service takes its value.

A typo in a template would go unnoticed otherwise: services read the variables that they know, and no others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from chart_kit import Manifest, Refused, Values, ci_names, ci_render, containers, label, pods, render
from kvmesh.config import (
    DecodeSettings,
    GatewaySettings,
    KvTransferSettings,
    PrefillSettings,
    RouterSettings,
    ServiceSettings,
    build_settings,
)

CLASSES: dict[str, type[ServiceSettings]] = {
    cls.service: cls for cls in (GatewaySettings, RouterSettings, PrefillSettings, DecodeSettings, KvTransferSettings)
}
# What Kubernetes fills in: addresses, names, numbers.
FIELDS = {
    "status.podIP": "10.1.2.3",
    "metadata.name": "pod-0",
    "metadata.namespace": "serving",
    "limits.cpu": "4",
    "secret": "x",
}
# What a LeaderWorkerSet's controller puts in front of a container's own variables.
GIVEN = {"LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "wide-0.wide.serving", "LWS_GROUP_SIZE": "2"}

CASES: dict[str, Values] = {
    "no router": {"router": {"enabled": False}, "redis": {"bundled": {"enabled": False}}},
    "tls by secrets, public certificate apart": {
        "tls": {"enabled": True, "secretName": "all", "public": {"mode": "own", "secretName": "public"}},
        "redis": {"bundled": {"tls": {"enabled": True}}},
    },
    "tls behind a proxy": {"tls": {"enabled": True, "secretName": "all", "public": {"mode": "off"}, "mutual": False}},
    "clients' certificates": {"tls": {"enabled": True, "secretName": "all", "clientCA": {"secretName": "clients"}}},
    "key set in a config map": {
        "auth": {"jwt": {"jwksConfigMap": {"name": "jwks"}, "issuer": "https://id", "audience": "mesh"}}
    },
    "redis cluster": {
        "redis": {
            "bundled": {"enabled": False},
            "external": {
                "url": "rediss://redis.example:6380/0",
                "cluster": True,
                "passwordSecret": {"name": "p"},
                "caSecret": {"name": "ca"},
            },
        }
    },
    "budgets": {"limits": {"budgets": True, "journal": {"type": "pvc", "usageFile": True}, "budgetAway": "closed"}},
    "requests of hours": {"limits": {"totalSeconds": 86400}},
    "ipv6": {"ipv6": True},
    "further settings": {
        "gateway": {
            "processes": 3,
            "settings": {
                "max_prompt_bytes": 268435456,
                "max_choices": 8,
                "limits": {"hold_s": 20},
                "jwt": {"leeway_s": 5},
                "early_refusal": False,
                "drain_timeout_s": 100,
            },
        },
        "router": {"settings": {"cache_tenant_bytes": 1099511627776, "semantic_rules": ["acme/auto=0.9", "*/x=1"]}},
        "kvtransfer": {"settings": {"max_slots": 4096, "tcp_checksums": True}},
        "engineDefaults": {"settings": {"num_pages": 100000000, "gpu_memory_utilization": 0.85}},
    },
}


def known(model: type[BaseModel], prefix: str) -> Iterator[str]:
    """Names of the variables that fill a settings class."""
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from known(inner, f"{prefix}{name.upper()}__")
        else:
            yield f"{prefix}{name.upper()}"


def expanded(container: Manifest) -> dict[str, str]:
    """The environment of a container, as the kubelet would fill it in."""
    found = dict(GIVEN)
    for entry in container.get("env", []):
        if source := entry.get("valueFrom"):
            (reference,) = source.values()
            value = FIELDS[reference.get("fieldPath") or reference.get("resource") or "secret"]
        else:
            value = re.sub(r"\$\(([A-Z_]+)\)", lambda match: found.get(match[1], match[0]), entry["value"])
        found[entry["name"]] = value
    return found


def loaded(container: Manifest, monkeypatch: pytest.MonkeyPatch) -> ServiceSettings | None:
    """The settings of a container of ours, None for another's. AssertionError and ConfigError say what is wrong."""
    env = {name: value for name, value in expanded(container).items() if name.startswith("KVMESH_")}
    services = {name.split("_")[1].lower() for name in env} & CLASSES.keys()
    if not services:
        return None
    assert len(services) == 1, f"{container['name']} gets variables of {sorted(services)}"
    (service,) = services
    cls = CLASSES[service]
    names = set(known(cls, f"KVMESH_{service.upper()}_")) | set(known(ServiceSettings, "KVMESH_"))
    assert not env.keys() - names, f"{container['name']}: no settings of {service}: {sorted(env.keys() - names)}"
    for name in [name for name in os.environ if name.startswith("KVMESH_")]:
        monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return build_settings(cls, [])


def check(manifests: list[Manifest], monkeypatch: pytest.MonkeyPatch) -> dict[str, ServiceSettings]:
    """Load every container's settings; the last of each service is returned."""
    found = {}
    for owner, pod in pods(manifests):
        if owner["kind"] == "Pod":
            # A helm test: a client.
            continue
        for container in containers(pod):
            with monkeypatch.context() as patch:
                settings = loaded(container, patch)
            if settings is not None:
                found[settings.service] = settings
                ports = {port["containerPort"] for port in container.get("ports", [])}
                for address in (settings.listen, settings.metrics_listen):
                    assert int(address.rpartition(":")[2]) in ports, f"{label(owner)}: {address} is no port of it"
    return found


# Hostile text is no setting, and `test_adversarial` is about what becomes of it.
@pytest.mark.parametrize("name", [name for name in ci_names() if name != "adversarial"])
def test_services_take_what_the_cases_of_ci_render(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(ci_render(name), monkeypatch).keys() >= {"gateway", "decode"}


@pytest.mark.parametrize("values", CASES.values(), ids=CASES.keys())
def test_services_take_what_is_rendered(values: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    check(render(values), monkeypatch)


def test_values_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    found = check(render({**CASES["further settings"], "limits": {"totalSeconds": 120}}), monkeypatch)
    gateway, router, decode, kvtransfer = (found[name] for name in ("gateway", "router", "decode", "kvtransfer"))
    assert isinstance(gateway, GatewaySettings)
    assert isinstance(router, RouterSettings)
    assert isinstance(decode, DecodeSettings)
    assert isinstance(kvtransfer, KvTransferSettings)
    assert (gateway.max_prompt_bytes, gateway.total_limit_s, gateway.early_refusal) == (268435456, 120, False)
    assert (gateway.limits.hold_s, gateway.limits.replicas, gateway.drain_timeout_s) == (20, 6, 100)
    assert gateway.peer_listen == "10.1.2.3:8081"
    assert router.cache_tenant_bytes == 1 << 40
    assert [rule.tau for rule in router.semantic_rule_table] == [0.9, 1]
    assert (decode.advertise, decode.threads, decode.num_pages) == ("10.1.2.3:50054", 4, 100_000_000)
    assert decode.drain_timeout_s == 120
    assert decode.sidecar_socket == kvtransfer.engine_socket
    assert kvtransfer.transports == ["tcp"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gateway": {"settings": {"listen": "0.0.0.0:1"}}}, "gateway.settings: listen is set by the chart"),
        ({"gateway": {"settings": {"limits": {"journal": "/x"}}}}, "limits__journal is set by the chart"),
        ({"engines": {"decode": {"settings": {"model": "x"}}}}, "engines.decode.settings: model is set by the chart"),
    ],
)
def test_settings_that_follow_from_values_are_not_set_twice(values: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=re.escape(message)):
        render(values)


@pytest.mark.parametrize("setting", [{"max_promt_bytes": 1}, {"limits": {"holds_s": 1}}])
def test_a_typo_is_found(setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="no settings of gateway"):
        check(render({"gateway": {"settings": setting}}), monkeypatch)
