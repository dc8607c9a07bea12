"""Hostile values: whatever the schema lets through stays where it was put, as the text that it was."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from chart_kit import (
    CHART,
    Manifest,
    Refused,
    built_in,
    by_name,
    ci_values,
    containers,
    faults,
    label,
    leaves,
    of_kind,
    pods,
    render,
)  # fmt: skip

EXAMPLES = 200 if os.environ.get("KVMESH_SOAK") else 6
SCHEMA = json.loads((CHART / "values.schema.json").read_text())

# What has ended templates, YAML documents, quotes, shells or types elsewhere.
NASTY = [
    'a"b', "a'b", "a: b", "- a", "a\n  b: c", "{{ .Values.auth }}", "{{", "}}", "$(POD_IP)", "${HOME}", "`id`", "#c",
    "*a", "&a", "!!int 1", "|", ">", "%", "@", "\\", "\t", " a ", "", "null", "true", "no", "1", "1e3", "0x1f", "0o17",
    "0755", ".5", "~", "---", "...", "日本語 🚀", "\u202e", "a\u2028b", "é" * 300, "x" * 4000,
]  # fmt: skip


def env_of(manifests: list[Manifest], component: str, container: str) -> dict[str, Any]:
    """Variables of one container by name."""
    (found,) = (
        item
        for owner, pod in pods(manifests)
        for item in containers(pod)
        if owner["metadata"]["name"] == f"mesh-kvmesh-{component}" and item["name"] == container
    )
    return {item["name"]: item.get("value") for item in found["env"]}


def test_free_text_arrives_as_it_was() -> None:
    """All of it in one rendering: a list of settings, annotations, variables, the key file, the question."""
    texts = {f"t{index}": text for index, text in enumerate(NASTY)}
    manifests = render(
        {
            "commonAnnotations": {f"example.com/{key}": text for key, text in texts.items()},
            "gateway": {
                "settings": texts,
                "podAnnotations": texts,
                "nodeSelector": {"a": "true", "b": "1"},
                "extraEnv": [{"name": f"X_{key}", "value": text} for key, text in texts.items()],
            },
            "engines": {"decode": {"role": "decode", "settings": texts}},
            "auth": {"keysToml": "\n".join(NASTY)},
            "helmTest": {"question": "\n".join(NASTY)[:4000]},
        }
    )
    for component, container, prefix in (
        ("gateway", "gateway", "KVMESH_GATEWAY_"),
        ("decode", "engine", "KVMESH_DECODE_"),
    ):
        found = env_of(manifests, component, container)
        for key, text in texts.items():
            assert found.get(prefix + key.upper(), "") == text
    extra = env_of(manifests, "gateway", "gateway")
    assert {key: extra[f"X_{key}"] for key in texts} == texts
    gateway = by_name(manifests, "Deployment", "mesh-kvmesh-gateway")
    assert texts.items() <= gateway["spec"]["template"]["metadata"]["annotations"].items()
    assert gateway["spec"]["template"]["spec"]["nodeSelector"] == {"a": "true", "b": "1"}
    for manifest in manifests:
        if manifest["kind"] in ("Deployment", "Service", "StatefulSet"):
            for key, text in texts.items():
                assert manifest["metadata"]["annotations"][f"example.com/{key}"] == text, label(manifest)
    (secret,) = (item for item in of_kind(manifests, "Secret") if item["metadata"]["name"].endswith("-keys"))
    assert list(secret["stringData"].values()) == ["\n".join(NASTY)]
    (pod,) = of_kind(manifests, "Pod")
    (asked,) = (item["value"] for item in pod["spec"]["containers"][0]["env"] if item["name"] == "ASK_QUESTION")
    # Kubernetes would put a variable's value in place of $(NAME); $$( stands for it.
    assert asked.replace("$$(", "$(") == "\n".join(NASTY)[:4000]
    assert not [fault for item in manifests if built_in(item) for fault in faults(item, "1.35")]


@pytest.mark.parametrize("word", ["null", "true", "no", "1", "1e3", "0755", "0x1f"])
def test_names_that_look_like_something_else_stay_names(word: str) -> None:
    """A YAML reader takes an unquoted 0755 for 493 and an unquoted no for false."""
    named = {"name": word, "key": word}
    letter = word if word[0].isalpha() else f"a{word}"
    manifests = render(
        {
            "image": {"tag": word, "repository": word, "pullSecrets": [word]},
            "model": {"name": word, "servedName": word, "source": {"type": "pvc", "path": word, "pvc": {
                "claimName": word, "subPath": word}}},
            "gateway": {"priorityClassName": word, "podLabels": {word: word}, "podAnnotations": {word: word}},
            "engines": {letter: {"role": "decode", "revision": word, "runtimeClassName": word}},
            "redis": {"bundled": {"auth": {"passwordSecret": named}, "persistence": {
                "enabled": True, "storageClassName": word}}},
            "auth": {"meshTokenSecret": named, "keysSecret": named},
            "cache": {"secret": named},
            "serviceAccount": {"name": word},
            "tls": {"enabled": True, "secretName": word, "clientCA": {"secretName": word, "key": word}},
            "routes": {"ingress": {"enabled": True, "className": word},
                       "httpRoute": {"enabled": True, "parentRefs": [{"name": word}]}},
            "limits": {"journal": {"type": "pvc", "storageClassName": word}},
            "helmTest": {"apiKeySecret": named, "question": word},
        },
        release="r1",
    )  # fmt: skip
    assert not [fault for item in manifests if built_in(item) for fault in faults(item, "1.35")]
    for path, value in (pair for item in manifests for pair in leaves(item)):
        if path[-1] in (
            "secretName",
            "claimName",
            "storageClassName",
            "priorityClassName",
            "ingressClassName",
            "image",
        ):
            assert isinstance(value, str), (path, value)


def test_numbers_keep_all_their_digits() -> None:
    """Helm's numbers are floats: 268435456 becomes 2.68435456e+08 unless somebody takes care."""
    numbers = {"a": 268435456, "b": 1000000, "c": 1, "d": -5, "e": 0.000001, "f": 123456789012, "g": 0.1, "h": 0}
    found = env_of(render({"gateway": {"settings": numbers}}), "gateway", "gateway")
    for key, number in numbers.items():
        assert float(found[f"KVMESH_GATEWAY_{key.upper()}"]) == number
        if isinstance(number, int):
            assert re.fullmatch(r"-?\d+", found[f"KVMESH_GATEWAY_{key.upper()}"])


def test_large_and_empty_maps() -> None:
    many = {f"setting_{index}": index for index in range(2000)}
    assert len(env_of(render({"gateway": {"settings": many}}), "gateway", "gateway")) > 2000
    empty = {"settings": {}, "extraEnv": [], "nodeSelector": {}, "tolerations": [], "affinity": {}, "podLabels": {}}
    manifests = render({"gateway": empty, "router": empty, "commonLabels": {}, "engineDefaults": empty, "global": {}})
    assert not [fault for item in manifests if built_in(item) for fault in faults(item, "1.35")]
    crowd = {f"e{index}": {"role": "decode"} for index in range(40)}
    assert len(of_kind(render({"engines": crowd}), "Deployment")) == 44


def test_labels_of_the_chart_cannot_be_taken_over() -> None:
    """A label twice in one map is a document that no cluster takes, and another's selector is worse."""
    taken = {"app.kubernetes.io/name": "other"}
    for where, values in (
        ("/commonLabels", {"commonLabels": taken}),
        ("/gateway/podLabels", {"gateway": {"podLabels": taken}}),
        ("/engines/x/podLabels", {"engines": {"x": {"role": "decode", "podLabels": taken}}}),
    ):
        with pytest.raises(Refused, match=f"at '{where}/app.kubernetes.io~1name': false schema"):
            render(values)
    with pytest.raises(Refused, match="at '/router/podAnnotations/checksum~1redis-password': false schema"):
        render({"router": {"podAnnotations": {"checksum/redis-password": "x"}}})


def test_the_adversarial_values_are_hostile() -> None:
    text = json.dumps(ci_values("adversarial"), ensure_ascii=False)
    for part in ("{{", "\\n", "日本語", "$(", "0755", "1e3"):
        assert part in text


# --- whatever the schema allows --------------------------------------------------------------------------------------
SWITCHES = st.booleans()
TEXT = st.one_of(st.sampled_from(NASTY), st.text(st.characters(blacklist_categories=("Cs",)), max_size=30))
SCALARS = st.one_of(TEXT, st.booleans(), st.integers(-(2**53), 2**53), st.floats(-1e6, 1e6, allow_nan=False))
SETTINGS = st.dictionaries(
    st.from_regex(r"\Aa_[a-z0-9_]{0,8}\Z"), st.one_of(SCALARS, st.lists(SCALARS, max_size=3)), max_size=4
)
PLACING = st.fixed_dictionaries(
    {},
    optional={
        "settings": SETTINGS,
        "replicas": st.integers(0, 50),
        "podAnnotations": st.dictionaries(st.from_regex(r"\A[a-z]{1,8}\Z"), TEXT, max_size=3),
        "nodeSelector": st.dictionaries(st.from_regex(r"\A[a-z]{1,8}\Z"), TEXT, max_size=3),
        "extraEnv": st.lists(
            st.builds(lambda index, value: {"name": f"E{index}", "value": value}, st.integers(0, 10**9), TEXT),
            max_size=3,
            unique_by=lambda item: item["name"],
        ),
    },
)
ENGINES = st.dictionaries(
    st.from_regex(r"\Ax[a-z0-9]{0,14}\Z"),
    st.tuples(PLACING, st.sampled_from(["prefill", "decode", "unified"]), st.sampled_from(["cpu", "cuda"])).map(
        lambda parts: {**parts[0], "role": parts[1], "device": parts[2]}
    ),
    max_size=3,
)
VALUES = st.fixed_dictionaries(
    {},
    optional={
        "gateway": PLACING,
        "router": PLACING,
        "engines": ENGINES,
        "ipv6": SWITCHES,
        "commonAnnotations": st.dictionaries(st.from_regex(r"\A[a-z]{1,8}\Z"), TEXT, max_size=3),
        "cache": st.fixed_dictionaries({}, optional={"mode": st.sampled_from(["off", "exact", "semantic"])}),
        "limits": st.fixed_dictionaries({"ttftSeconds": st.floats(0.1, 60), "totalSeconds": st.floats(60, 86_400)}),
        "networkPolicy": st.fixed_dictionaries({"enabled": SWITCHES}),
        "topologySpread": st.fixed_dictionaries({"zones": st.sampled_from(["", "ScheduleAnyway", "DoNotSchedule"])}),
        "auth": st.fixed_dictionaries({"keysToml": TEXT}),
        "monitoring": st.fixed_dictionaries({"serviceMonitor": st.fixed_dictionaries({"enabled": SWITCHES})}),
        "routes": st.fixed_dictionaries({"ingress": st.fixed_dictionaries({"enabled": SWITCHES})}),
    },
)


@settings(max_examples=EXAMPLES, phases=(Phase.generate,))
@given(values=VALUES)
def test_whatever_the_schema_allows_is_valid(values: dict[str, Any]) -> None:
    manifests = render(values)
    assert not [fault for item in manifests if built_in(item) for fault in faults(item, "1.35")]
    names = [(item["kind"], item["metadata"]["name"]) for item in manifests]
    assert len(names) == len(set(names))
    for name, part in (("gateway", values.get("gateway")), ("router", values.get("router"))):
        if part:
            found = env_of(manifests, name, name)
            for item in part.get("extraEnv", []):
                assert found[item["name"]] == item["value"]
