"""What the tests of the chart share: render with the real helm, and judge what comes out."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from referencing import Registry, Resource

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/kvmesh"
CI = CHART / "ci"
TOOLS = Path(os.environ.get("KVMESH_CHART_TOOLS") or ROOT / ".venv/chart-tools").resolve()
HELM, KUBECTL, SCHEMAS = TOOLS / "helm", TOOLS / "kubectl", TOOLS / "schemas"
VERSIONS = tuple(sorted(path.name.removeprefix("v") for path in SCHEMAS.glob("v*")))

Manifest = dict[str, Any]
Values = dict[str, Any]

# APIs that a cluster has only with an operator: helm is told that they are there.
CUSTOM_APIS = (
    "monitoring.coreos.com/v1",
    "keda.sh/v1alpha1",
    "gateway.networking.k8s.io/v1",
    "leaderworkerset.x-k8s.io/v1",
    "cert-manager.io/v1",
)
# Kinds with pods, and where the pod's template is.
POD_TEMPLATES = {
    "Deployment": (("spec", "template"),),
    "StatefulSet": (("spec", "template"),),
    "DaemonSet": (("spec", "template"),),
    "Job": (("spec", "template"),),
    "Pod": ((),),
    "LeaderWorkerSet": (
        ("spec", "leaderWorkerTemplate", "leaderTemplate"),
        ("spec", "leaderWorkerTemplate", "workerTemplate"),
    ),
}


class _Loader(yaml.CSafeLoader if hasattr(yaml, "CSafeLoader") else yaml.SafeLoader):  # type: ignore[misc]
    """YAML as a cluster reads it: a key twice in one map is an error, and not the last one's value."""


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key) for key, _ in node.value]
    for key in keys:
        assert keys.count(key) == 1, f"line {node.start_mark.line}: the key {key!r} is there twice"
    return {key: loader.construct_object(value, deep=True) for key, (_, value) in zip(keys, node.value, strict=True)}


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


class Refused(Exception):
    """helm ended with an error; the text is what it said."""


def helm(*arguments: str | Path, text: str = "", timeout_s: float = 300.0) -> str:
    """Run helm without a cluster and without anybody's configuration; returns stdout. Raises Refused."""
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(
            [str(HELM), *map(str, arguments)],
            input=text,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={"HOME": home, "PATH": os.environ["PATH"], "KUBECONFIG": os.devnull},
        )
    if done.returncode:
        raise Refused(done.stderr or done.stdout)
    return done.stdout


_PAIR = re.compile(r"(?<!\\)((?:\\\\)*)\\u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})")


def dump(values: Values) -> str:
    """Values as a file. JSON is YAML, but for characters that JSON writes as a pair of surrogates."""

    def whole(match: re.Match[str]) -> str:
        code = 0x10000 + ((int(match[2], 16) - 0xD800) << 10) + int(match[3], 16) - 0xDC00
        return f"{match[1]}\\U{code:08x}"

    return _PAIR.sub(whole, json.dumps(values))


@functools.lru_cache(maxsize=256)
def _render(values: str, version: str, release: str, namespace: str, files: tuple[Path, ...], apis: bool) -> str:
    command: list[str | Path] = ["template", release, CHART, "--namespace", namespace, "--kube-version", version]
    if apis:
        command += [part for api in CUSTOM_APIS for part in ("--api-versions", api)]
    for file in files:
        command += ["--values", file]
    return helm(*command, "--values", "-", text=values)


def render_text(
    values: Values | None = None,
    *,
    version: str = "1.35",
    release: str = "mesh",
    namespace: str = "serving",
    files: tuple[Path, ...] = (),
    apis: bool = True,
) -> str:
    """What `helm template` prints. Raises Refused."""
    return _render(dump(values or {}), version, release, namespace, files, apis)


def render(values: Values | None = None, **how: Any) -> list[Manifest]:
    """The manifests that `helm template` makes of values. Raises Refused."""
    return [item for item in yaml.load_all(render_text(values, **how), Loader=_Loader) if item]


def ci_values(name: str) -> Values:
    """The values of ci/NAME-values.yaml."""
    return yaml.safe_load((CI / f"{name}-values.yaml").read_text()) or {}


def ci_names() -> list[str]:
    """Names of the value files in ci/."""
    return sorted(path.name.removesuffix("-values.yaml") for path in CI.glob("*-values.yaml"))


def ci_render(name: str, values: Values | None = None, **how: Any) -> list[Manifest]:
    """Manifests of ci/NAME-values.yaml, with `values` over them."""
    return render(values, files=(CI / f"{name}-values.yaml",), **how)


def label(manifest: Manifest) -> str:
    """Kind and name, for messages."""
    return f"{manifest['kind']}/{manifest['metadata'].get('name', '?')}"


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    """Those of some kinds."""
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def by_name(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """The one of this kind and name."""
    found = [item for item in of_kind(manifests, kind) if item["metadata"]["name"] == name]
    assert len(found) == 1, f"{kind}/{name}: {len(found)} of {[label(item) for item in manifests]}"
    return found[0]


def at(tree: Any, *path: str) -> Any:
    """What lies at a path of keys; None where there is nothing."""
    for key in path:
        if not isinstance(tree, dict) or key not in tree:
            return None
        tree = tree[key]
    return tree


def pods(manifests: list[Manifest]) -> Iterator[tuple[Manifest, Manifest]]:
    """(owner, pod template with metadata and spec) of every workload."""
    for manifest in manifests:
        for path in POD_TEMPLATES.get(manifest["kind"], ()):
            template = at(manifest, *path)
            if template is not None:
                yield manifest, template


def containers(pod: Manifest) -> list[Manifest]:
    """All containers of a pod template, those of the start included."""
    spec = pod["spec"]
    return [*spec.get("initContainers", []), *spec["containers"]]


def services_of(pod: Manifest) -> list[Manifest]:
    """The containers that live as long as their pod: a sidecar is one that restarts among the first ones."""
    spec = pod["spec"]
    return [*(item for item in spec.get("initContainers", []) if item.get("restartPolicy") == "Always"),
            *spec["containers"]]  # fmt: skip


def leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, value) of all that is neither map nor list."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, (*path, str(key)))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from leaves(value, (*path, str(index)))
    else:
        yield path, tree


@functools.lru_cache(maxsize=8)
def _definitions(version: str) -> Registry[Any]:
    path = SCHEMAS / f"v{version}/_definitions.json"
    resource: Resource[Any] = Resource.from_contents(json.loads(path.read_text()))
    return resource @ Registry()


@functools.lru_cache(maxsize=256)
def _validator(version: str, kind: str, api: str) -> jsonschema.Draft202012Validator | None:
    group, slash, rest = api.partition("/")
    path = SCHEMAS / f"v{version}/{kind.lower()}-{group.partition('.')[0] + '-' + rest if slash else group}.json"
    if not path.is_file():
        return None
    schema = json.loads(path.read_text())
    registry: Registry[Any] = Resource.from_contents(schema) @ _definitions(version)
    return jsonschema.Draft202012Validator(schema, registry=registry)


def built_in(manifest: Manifest) -> bool:
    """Whether Kubernetes itself has this API."""
    group, slash, _ = manifest["apiVersion"].partition("/")
    return not slash or group in ("apps", "batch", "policy", "autoscaling") or (group.endswith(".k8s.io") and group in (
        "networking.k8s.io", "rbac.authorization.k8s.io", "scheduling.k8s.io", "storage.k8s.io"))  # fmt: skip


def faults(manifest: Manifest, version: str) -> list[str]:
    """What Kubernetes of this version would not take, unknown fields included."""
    validator = _validator(version, manifest["kind"], manifest["apiVersion"])
    if validator is None:
        return [f"{label(manifest)}: {manifest['apiVersion']} is not in Kubernetes {version}"]
    return [
        f"{label(manifest)} at {'.'.join(map(str, error.absolute_path))}: {error.message[:300]}"
        for error in validator.iter_errors(manifest)
    ]
