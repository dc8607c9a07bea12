"""helm itself: lint, render, package, a dry run of the installation, and no two objects of one name."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

import pytest

from chart_kit import CHART, CI, KUBECTL, ROOT, Refused, built_in, ci_names, ci_render, helm, label, render, render_text

REQUIRED = {"default", "gpu-rdma", "multinode", "minimal", "adversarial", "full"}


def test_the_files_of_ci_are_there() -> None:
    assert set(ci_names()) >= REQUIRED


@pytest.mark.parametrize("name", ci_names())
def test_lint_is_clean(name: str) -> None:
    said = helm("lint", "--strict", CHART, "--values", CI / f"{name}-values.yaml")
    assert "0 chart(s) failed" in said
    assert "[ERROR]" not in said
    assert "[WARNING]" not in said


@pytest.mark.parametrize("name", ci_names())
def test_dry_run_of_the_installation(name: str) -> None:
    said = helm("install", "mesh", CHART, "--dry-run=client", "--values", CI / f"{name}-values.yaml")
    assert "STATUS: pending-install" in said
    assert "NOTES:" in said
    assert "<no value>" not in said
    assert "%!" not in said, "a format string of Go went wrong"


def test_the_package_is_whole(tmp_path: Path) -> None:
    """Rules and dashboards are links into deploy/, and files in the package."""
    helm("package", CHART, "--destination", tmp_path)
    (package,) = tmp_path.glob("*.tgz")
    with tarfile.open(package) as files:
        packed = {member.name.removeprefix("kvmesh/"): member for member in files.getmembers()}
        assert all(member.isfile() for member in packed.values())
        for source, folder in (
            ("deploy/prometheus/rules", "files/rules"),
            ("deploy/grafana/dashboards", "files/dashboards"),
        ):
            for file in (ROOT / source).iterdir():
                content = files.extractfile(packed[f"{folder}/{file.name}"])
                assert content is not None
                assert content.read() == file.read_bytes(), file
    assert {"Chart.yaml", "values.yaml", "values.schema.json", "README.md", "templates/NOTES.txt"} <= packed.keys()
    assert not [name for name in packed if name.startswith("ci/")]
    # Kubernetes keeps a release in a secret of at most 1 MiB, of which the chart is the most.
    assert package.stat().st_size < 400_000
    rendered = helm("template", "mesh", package, "--namespace", "serving", "--kube-version", "1.35")
    assert rendered.count("kind: Deployment") >= 3


@pytest.mark.parametrize("name", ci_names())
def test_names_are_unique_and_the_namespace_is_the_release_s(name: str) -> None:
    manifests = ci_render(name)
    seen = [
        (item["apiVersion"], item["kind"], item["metadata"].get("namespace"), item["metadata"]["name"])
        for item in manifests
    ]
    assert len(seen) == len(set(seen)), sorted(seen)
    for manifest in manifests:
        assert manifest["metadata"].get("namespace", "serving") == "serving", label(manifest)


@pytest.mark.parametrize("name", ci_names())
def test_every_object_says_whose_it_is(name: str) -> None:
    for manifest in ci_render(name):
        labels = manifest["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"], label(manifest)
        assert labels["app.kubernetes.io/instance"] == "mesh", label(manifest)
        assert labels["app.kubernetes.io/managed-by"] == "Helm", label(manifest)
        assert labels["helm.sh/chart"].startswith("kvmesh-"), label(manifest)


def test_rendering_is_the_same_each_time() -> None:
    """But for secrets that are made once: GitOps tools compare renderings."""
    given = {
        "auth": {"meshTokenSecret": {"name": "mesh"}},
        "redis": {"bundled": {"auth": {"passwordSecret": {"name": "redis"}}}},
    }
    first = render_text(given)
    render_text.__globals__["_render"].cache_clear()
    assert render_text(given) == first


def test_kubectl_reads_the_workloads() -> None:
    """kubectl decodes what is rendered into Kubernetes' own types, which is another judge than the schemas."""
    text = "\n---\n".join(
        __import__("json").dumps(item)
        for item in ci_render("full")
        if built_in(item) and item["kind"] in ("Deployment", "StatefulSet")
    )
    done = subprocess.run(
        [str(KUBECTL), "set", "env", "--local", "--list", "-f", "-"],
        input=text,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "KVMESH_GATEWAY_LISTEN=" in done.stdout


def test_an_older_kubernetes_is_refused() -> None:
    with pytest.raises(Refused, match="chart requires kubeVersion"):
        render({}, version="1.20")
