"""Bad values are refused before anything is rendered, with a message that names them; the schema keeps step."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from chart_kit import CHART, ROOT, Refused, render, render_text

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())


def nested(path: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} of "a.b"."""
    for key in reversed(path.split("/")):
        value = {key: value}
    return value


DECODE = "engines/decode"


def decode(**values: Any) -> dict[str, Any]:
    return {"engines": {"decode": {"role": "decode", **values}}}


# Values, and what the message has to say.
BAD: list[tuple[dict[str, Any], str]] = [
    # Typing errors.
    (nested("gatway/replicas", 1), "additional properties 'gatway' not allowed"),
    (nested("gateway/replica", 1), "at '/gateway': additional properties 'replica' not allowed"),
    (decode(replica=1), "at '/engines/decode': additional properties 'replica' not allowed"),
    (nested("redis/bundled/tls/enable", True), "'/redis/bundled/tls': additional properties 'enable' not allowed"),
    (nested("image/tags", "x"), "at '/image': additional properties 'tags' not allowed"),
    # Types.
    (nested("gateway/replicas", "2"), "at '/gateway/replicas': got string, want integer"),
    (nested("gateway/replicas", 1.5), "at '/gateway/replicas': got number, want integer"),
    (nested("gateway/enabled", "yes"), "at '/gateway/enabled': got string, want boolean"),
    (nested("image/tag", 1.4), "at '/image/tag': got number, want string"),
    (nested("gateway/podAnnotations", {"a": 1}), "at '/gateway/podAnnotations/a': got number, want string"),
    (nested("commonLabels", {"a": True}), "at '/commonLabels/a': got boolean, want string"),
    (nested("gateway/nodeSelector", {"a": None, "b": 1}), "at '/gateway/nodeSelector/b': got number, want string"),
    (nested("gateway/tolerations", {"key": "x"}), "at '/gateway/tolerations': got object, want array"),
    (nested("engines", []), "want object"),
    (nested("gateway/extraEnv", [{"value": "x"}]), "at '/gateway/extraEnv/0': missing property 'name'"),
    (nested("gateway/extraEnv", [{"name": "A", "value": 1}]), "'/gateway/extraEnv/0/value': got number, want string"),
    # Ranges.
    (nested("gateway/replicas", -1), "at '/gateway/replicas': minimum: got -1, want 0"),
    (nested("telemetry/sampleRatio", 5), "at '/telemetry/sampleRatio': maximum: got 5, want 1"),
    (nested("limits/totalSeconds", 0), "at '/limits/totalSeconds'"),
    (nested("gateway/service/grpcPort", 70000), "at '/gateway/service/grpcPort': maximum: got 70,000, want 65,535"),
    (decode(tp=65), "at '/engines/decode/tp': maximum"),
    (decode(autoscaling={"minReplicas": 0}), "at '/engines/decode/autoscaling/minReplicas': minimum"),
    (decode(autoscaling={"kvUsage": 80}), "at '/engines/decode/autoscaling/kvUsage': maximum: got 80, want 1"),
    (decode(multiNode={"hosts": 1}), "at '/engines/decode/multiNode/hosts': minimum"),
    # Words.
    (decode(role="decoder"), "at '/engines/decode/role': value must be one of 'prefill', 'decode', 'unified'"),
    ({"engines": {"x": {}}}, "at '/engines/x': missing property 'role'"),
    (decode(device="gpu"), "at '/engines/decode/device': value must be one of 'cpu', 'cuda'"),
    (decode(dtype="int8"), "at '/engines/decode/dtype': value must be one of"),
    (decode(rdma={"transports": ["roce"]}), "at '/engines/decode/rdma/transports/0': value must be one of"),
    (decode(autoscaling={"kind": "vpa"}), "at '/engines/decode/autoscaling/kind': value must be one of 'hpa', 'keda'"),
    (nested("model/source/type", "s3"), "at '/model/source/type': value must be one of"),
    (nested("cache/mode", "on"), "at '/cache/mode': value must be one of"),
    (nested("image/pullPolicy", "always"), "at '/image/pullPolicy': value must be one of"),
    (nested("tls/public/mode", "none"), "at '/tls/public/mode': value must be one of"),
    # Forms, and what would get out of its place in YAML.
    (nested("image/tag", 'x"\n    command: ["sh"]'), "at '/image/tag'"),
    (nested("image/registry", "a b"), "at '/image/registry'"),
    (nested("gateway/priorityClassName", "a\nhostNetwork: true"), "at '/gateway/priorityClassName'"),
    (nested("serviceAccount/name", "a, b"), "at '/serviceAccount/name'"),
    (nested("fullnameOverride", "Mesh_1"), "at '/fullnameOverride'"),
    (nested("nameOverride", "-x"), "at '/nameOverride'"),
    ({"engines": {"Decode": {"role": "decode"}}}, "at '/engines': additional properties 'Decode' not allowed"),
    ({"engines": {"a-name-of-17-lett": {"role": "decode"}}}, "additional properties 'a-name-of-17-lett' not"),
    ({"engines": {"gateway": {"role": "decode"}}}, "at '/engines/gateway': false schema"),
    (nested("gateway/settings", {"Max-Choices": 1}), "at '/gateway/settings': additional properties 'Max-Choices' not"),
    (nested("gateway/settings", {"a": {"b": None}}), None),  # null takes a key away: no setting, no error
    (nested("gateway/podLabels", {"a b": "c"}), "at '/gateway/podLabels': additional properties 'a b' not allowed"),
    (nested("gateway/podLabels", {"a": "b c"}), "at '/gateway/podLabels/a'"),
    (nested("gateway/resources/limits/memory", "1 GB"), "at '/gateway/resources/limits/memory'"),
    (nested("gateway/resources/limit", {}), "additional properties 'limit' not allowed"),
    (nested("gateway/podDisruptionBudget/maxUnavailable", "half"), "at '/gateway/podDisruptionBudget/maxUnavailable'"),
    (nested("gateway/podDisruptionBudget/maxUnavailable", 0), "at '/gateway/podDisruptionBudget/maxUnavailable'"),
    (decode(podDisruptionBudget={"maxUnavailable": "0%"}), "at '/engines/decode/podDisruptionBudget/maxUnavailable'"),
    (nested("gateway/strategy", {"type": "Recreate"}), "at '/gateway/strategy': additional properties 'type' not"),
    (nested("redis/external/url", "http://redis"), "at '/redis/external/url'"),
    (nested("redis/external/url", "redis://:secret@redis:6379"), "at '/redis/external/url'"),
    (nested("telemetry/otlpEndpoint", "collector:4317"), "at '/telemetry/otlpEndpoint'"),
    (nested("auth/jwt/jwks", "http://id.example/keys"), "at '/auth/jwt/jwks'"),
    (nested("model/source/path", "/abs"), "at '/model/source/path'"),
    (nested("model/source/path", "a/../../etc"), "at '/model/source/path': 'not' failed"),
    (nested("tls/certManager/duration", "90 days"), "at '/tls/certManager/duration'"),
    (nested("routes/httpRoute/hostnames", ["Bad_Host"]), "at '/routes/httpRoute/hostnames/0'"),
    (nested("monitoring/serviceMonitor/interval", "often"), "at '/monitoring/serviceMonitor/interval'"),
    # What belongs together.
    (nested("model/source/type", "pvc"), "at '/model/source/pvc/claimName': minLength"),
    (nested("model/source/type", "oci"), "at '/model/source/oci/reference'"),
    (nested("model/source/type", "init"), "at '/model/source/init/image'"),
    (nested("model/source/type", "hostPath"), "at '/model/source/hostPath/path': minLength"),
    (nested("routes/httpRoute/enabled", True), "at '/routes/httpRoute/parentRefs': minItems"),
    (nested("routes/grpcRoute/enabled", True), "at '/routes/grpcRoute/parentRefs': minItems"),
    # What a schema cannot say, the templates do.
    *((nested(path, "latest"), f"{path.replace('/', '.')}: latest names whatever was pushed last")
      for path in ("image/tag", "gateway/image/tag", "router/image/tag", "kvtransfer/image/tag")),
    (decode(image={"tag": "latest"}), "engines.decode.image.tag: latest"),
    (nested("engineDefaults/image/tag", "latest"), "engines.decode.image.tag: latest"),
    (nested("redis/bundled/image", "redis:latest"), "redis.bundled.image: latest"),
    (nested("model/source", {"type": "oci", "oci": {"reference": "a/b:latest"}}), "model.source.oci.reference: latest"),
    (nested("model/source", {"type": "init", "init": {"image": "a:latest"}}), "model.source.init.image: latest"),
    (nested("image/tag", "1.0-latest"), None),
    (nested("redis/external/url", "redis://redis:6379"), "choose one (set redis.bundled.enabled to false)"),
    (nested("tls/enabled", True), "tls.enabled needs certificates"),
    (nested("auth/jwt/jwks", "https://id.example/keys"), "auth.jwt needs issuer and audience"),
    (nested("limits/totalSeconds", 30), "limits.totalSeconds is less than limits.ttftSeconds"),
    ({"tls": {"enabled": True, "secretNames": dict.fromkeys(("gateway", "router", "engine"), "a")},
      "redis": {"bundled": {"tls": {"enabled": True}}}}, "or tls.secretNames.redis"),
    ({"tls": {"enabled": True, "secretNames": dict.fromkeys(("gateway", "engine"), "a")}, "router": {"enabled": False}},
     None),
    (nested("gateway/service/httpPort", 8080), "gateway.service: grpcPort, httpPort and 8443"),
    (nested("gateway/settings", {"drain_timeout_s": 601}), "gateway.settings.drain_timeout_s is above"),
    (decode(settings={"drain_timeout_s": 601}), "engines.decode.settings.drain_timeout_s is above"),
    ({"engines": {"x": {"role": "unified", "tp": 2, "multiNode": {"enabled": True}}, "x-hosts": {"role": "unified"}}},
     "engines.x-hosts: engines.x has hosts"),
    *((decode(autoscaling={"enabled": True, "kind": kind, "queueDelaySeconds": 0, "kvUsage": 0}), "no signal is left")
      for kind in ("hpa", "keda")),
    (nested("gateway/extraEnv", [{"name": "KVMESH_GATEWAY_LISTEN", "value": "x"}]),
     "gateway.extraEnv: KVMESH_GATEWAY_LISTEN is there already"),
    (nested("gateway/extraEnv", [{"name": "A", "value": "x"}, {"name": "A", "value": "y"}]),
     "gateway.extraEnv: A is there already"),
    (decode(gpus=1), "engines.decode.gpus needs device cuda"),
    (decode(device="cuda", tp=2), "tp above 1 on GPUs needs role unified"),
    (decode(tp=2, multiNode={"enabled": True}), "an engine of several hosts must have role unified"),
    (decode(role="unified", tp=3, multiNode={"enabled": True}), "must be a multiple of multiNode.hosts"),
    (decode(kvtransfer={"transports": ["shm"]}), "transport shm needs peers that share"),
    (decode(kvtransfer={"transports": ["verbs"]}), "set rdma.enabled"),
    (decode(autoscaling={"enabled": True, "minReplicas": 5, "maxReplicas": 4}), "minReplicas is above maxReplicas"),
    ({"engines": {"prefill": {"enabled": False, "role": "prefill"}, "decode": {"enabled": False, "role": "decode"}}},
     "no engine is enabled"),
    ({"engines": {"decode": {"enabled": False, "role": "decode"}}}, "no engine of role decode or unified"),
    (nested("gateway/autoscaling", {"enabled": True, "minReplicas": 20}), "minReplicas is above maxReplicas"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "said"), BAD, ids=lambda item: json.dumps(item)[:60])
def test_bad_values_are_refused(values: dict[str, Any], said: str | None) -> None:
    if said is None:
        render(values)
        return
    with pytest.raises(Refused) as refusal:
        render_text(values)
    message = str(refusal.value)
    assert said in message, message
    assert "nil pointer" not in message


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
    return schema


def pairs(values: Any, schema: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """(path, default, schema) of every map that the schema knows by its keys."""
    schema = resolved(schema)
    if isinstance(values, dict) and "properties" in schema and "patternProperties" not in schema:
        yield path, values, schema
        for key in values.keys() & schema["properties"].keys():
            yield from pairs(values[key], schema["properties"][key], (*path, key))


def test_the_schema_is_what_its_program_makes() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/chart_schema.py"), "--check"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def test_every_value_is_in_the_schema_and_back() -> None:
    """A map whose default is empty may have keys; any other has them all, and its schema no more."""
    count = 0
    for path, values, schema in pairs(DEFAULTS, SCHEMA):
        where = "/".join(path)
        known = schema["properties"].keys() - {"global"}
        assert schema.get("additionalProperties") is False, where
        assert values.keys() <= known, f"{where}: not in the schema: {values.keys() - known}"
        if values and path[-1:] not in (("resources",),):
            assert known <= values.keys(), f"{where}: not in values.yaml: {known - values.keys()}"
        count += len(values)
    assert count > 200


def test_an_entry_of_engines_takes_what_engine_defaults_has() -> None:
    (entry,) = (entry["properties"].keys() for entry in SCHEMA["properties"]["engines"]["patternProperties"].values())
    assert entry - {"role"} == DEFAULTS["engineDefaults"].keys()


def test_a_value_that_was_taken_away_is_refused_or_not_needed() -> None:
    """`null` takes a key away. Where templates cannot do without, the schema says so, and no template fails."""
    optional: list[tuple[str, ...]] = []
    for path, values, schema in pairs(DEFAULTS, SCHEMA):
        optional += [(*path, key) for key in values if key not in schema.get("required", [])]
    assert len(optional) > 60
    gone: dict[str, Any] = {}
    for path in optional:
        at = gone
        for key in path[:-1]:
            at = at.setdefault(key, {}) if at is not None else at
        if at is not None:
            at[path[-1]] = None
    gone["engines"] = {"decode": {"role": "decode"}, "prefill": {"role": "prefill"}}
    assert render(gone)
    for path in (("limits", "totalSeconds"), ("gateway", "replicas"), ("redis",), ("tls", "public", "mode")):
        with pytest.raises(Refused, match=f"missing property '{path[-1]}'"):
            render(nested("/".join(path), None))


def test_the_readme_lists_every_value() -> None:
    readme = CHART / "README.md"
    program = ROOT / "tools/chart_readme.py"
    if program.is_file():
        done = subprocess.run([sys.executable, str(program), "--check"], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    text = readme.read_text()
    for key in DEFAULTS:
        assert key in text, key
