"""What Kubernetes does not let an upgrade change stays the same, whatever other values do."""

from __future__ import annotations

from typing import Any

import pytest

from chart_kit import Manifest, at, by_name, ci_render, label, of_kind, render

# Paths that an API server refuses to change (or that would make another object of it).
FIXED: dict[str, tuple[tuple[str, ...], ...]] = {
    "Deployment": (("spec", "selector"),),
    "StatefulSet": tuple(
        ("spec", name) for name in ("selector", "serviceName", "podManagementPolicy", "volumeClaimTemplates")
    ),
    "Service": (("spec", "clusterIP"),),
    "LeaderWorkerSet": (("spec", "leaderWorkerTemplate", "size"), ("spec", "networkConfig")),
}  # fmt: skip

REDIS = "mesh-kvmesh-redis"

CHANGES: list[dict[str, Any]] = [
    {"image": {"tag": "9.9.9", "registry": "elsewhere.example"}},
    {"commonLabels": {"team": "other"}, "commonAnnotations": {"a": "b"}},
    {"gateway": {"replicas": 9, "processes": 8, "podLabels": {"x": "y"}, "settings": {"max_choices": 4}}},
    {"engineDefaults": {"replicas": 7, "podLabels": {"a": "b"}, "tolerations": [{"operator": "Exists"}]}},
    {"limits": {"totalSeconds": 1200}, "telemetry": {"sampleRatio": 1, "logs": {"level": "debug"}}},
    {"redis": {"bundled": {"maxmemory": "2gb", "resources": {"limits": {"memory": "3Gi"}}}}},
    {"networkPolicy": {"enabled": False}, "topologySpread": {"enabled": False}},
    {"cache": {"mode": "off"}, "model": {"servedName": "other"}},
    {"redis": {"bundled": {"persistence": {"size": "99Gi"}}}},
]


def fixed(manifests: list[Manifest]) -> dict[str, list[Any]]:
    return {
        label(item): [at(item, *path) for path in FIXED[item["kind"]]]
        for item in of_kind(manifests, *FIXED)
    }  # fmt: skip


@pytest.mark.parametrize("case", ["default", "full", "multinode"])
def test_fixed_fields_stay(case: str) -> None:
    before = fixed(ci_render(case))
    for change in CHANGES:
        assert fixed(ci_render(case, change)) == before, change


def test_budgets_may_come_later() -> None:
    """Redis gets its claim in an upgrade that leaves the fixed fields of its StatefulSet alone."""
    before, after = (by_name(render({"limits": {"budgets": on}}), "StatefulSet", REDIS) for on in (False, True))
    assert fixed([before]) == fixed([after])
    assert not of_kind(render({}), "PersistentVolumeClaim")
    (claim,) = of_kind(render({"limits": {"budgets": True}}), "PersistentVolumeClaim")
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    volumes = after["spec"]["template"]["spec"]["volumes"]
    assert {"name": "data", "persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}} in volumes


def test_releases_whose_long_names_begin_alike_share_nothing() -> None:
    first, second = ({label(item) for item in render({}, release=f"{'a-team' * 8}-{end}")} for end in ("one", "two"))
    assert not first & second


@pytest.mark.parametrize("case", ["default", "full"])
def test_claims_carry_no_label_of_a_version(case: str) -> None:
    for item in of_kind(ci_render(case), "StatefulSet"):
        for claim in item["spec"].get("volumeClaimTemplates", []):
            assert not {"helm.sh/chart", "app.kubernetes.io/version"} & claim["metadata"].get("labels", {}).keys()


def test_names_follow_the_release_alone() -> None:
    def names(values: dict[str, Any]) -> list[str]:
        return sorted(label(item) for item in render(values))

    before = names({})
    for change in CHANGES:
        if "networkPolicy" not in change:
            assert names(change) == before, change


@pytest.mark.parametrize(
    "release",
    ["m", "kvmesh", "a-kvmesh-b", "x" * 53, "a" + "-b" * 26, "kvmesh-" + "y" * 46, "1", "0x10", "1e3", "true", "null"],
)
def test_names_are_short_enough_however_long_the_release_s_is(release: str) -> None:
    long = {
        "engines": {
            "a-name-of-16-let": {"role": "decode"},
            "a-name-of-16-leu": {"role": "unified", "multiNode": {"enabled": True}, "tp": 2},
        },
        "limits": {"journal": {"type": "pvc"}},
        "monitoring": {"dashboards": {"enabled": True}},
    }
    manifests = render(long, release=release)
    seen = [(item["kind"], item["metadata"]["name"]) for item in manifests]
    assert len(seen) == len(set(seen))
    for kind, name in seen:
        # A label holds a stateful set's name and a digest behind it; groups add a number, and pods another.
        most = {"StatefulSet": 52, "LeaderWorkerSet": 49, "ConfigMap": 253, "Secret": 253}.get(kind, 63)
        assert len(name) <= most, f"{kind}/{name}"
        assert isinstance(name, str)
        assert not name.endswith("-")
    for item in manifests:
        for key, value in item["metadata"]["labels"].items():
            assert isinstance(value, str), (key, value)
            assert len(value) <= 63
