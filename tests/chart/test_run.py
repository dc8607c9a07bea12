"""The pods as they are rendered, run by a Docker engine: not a cluster, but the real images with the users, volumes,
variables, probes and hooks of the chart. Only where `KVMESH_CHART_RUN=1` says so: it needs root, the images
(`make images`) and a minute.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from chart_kit import Values, render
from kubelet import NETWORK, Cluster, Pod, docker

pytestmark = [
    pytest.mark.skipif(os.environ.get("KVMESH_CHART_RUN") != "1", reason="asked for by KVMESH_CHART_RUN=1"),
    pytest.mark.timeout(600),
]

BASE: Values = {
    "gateway": {"replicas": 1},
    "router": {"replicas": 1},
    "limits": {"totalSeconds": 60, "ttftSeconds": 30},
}
SECURE: Values = {
    "tls": {
        "enabled": True,
        "secretName": "mesh-tls",
        "secretNames": {"redis": "redis-tls"},
        "public": {"mode": "own", "secretName": "public-tls"},
    },
    "redis": {"bundled": {"tls": {"enabled": True}}},
    "limits": {**BASE["limits"], "budgets": True, "journal": {"type": "pvc"}},
}
ASK = """
import json, ssl, sys, urllib.request
messages = [{"role": "user", "content": "Count with me. " * 20}]
body = json.dumps({"model": "auto", "max_tokens": 8, "messages": messages}).encode()
url = sys.argv[1] + "/v1/chat/completions"
request = urllib.request.Request(url, body, {"content-type": "application/json"})
print(urllib.request.urlopen(request, timeout=60, context=ssl._create_unverified_context()).read().decode())
"""
READ = (
    "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:9091/metrics', timeout=10).read().decode())"
)


def certificate(authority: trustme.CA, name: str) -> dict[str, bytes]:
    issued = authority.issue_cert(name)
    chain = b"".join(part.bytes() for part in issued.cert_chain_pems)
    return {"tls.crt": chain, "tls.key": issued.private_key_pem.bytes(), "ca.crt": authority.cert_pem.bytes()}


@pytest.fixture
def clean() -> Iterator[None]:
    Cluster.clean()
    docker("network", "create", NETWORK)
    yield
    Cluster.clean()


@pytest.mark.parametrize(
    ("version", "values"),
    [("1.35", BASE), ("1.28", BASE), ("1.35", {**BASE, **SECURE})],
    ids=["native", "plain", "tls"],
)
def test_the_pods_serve_and_end_in_order(version: str, values: Values, tmp_path: Path, clean: None) -> None:
    mesh, public = trustme.CA(), trustme.CA()
    secrets = {
        "mesh-tls": certificate(mesh, "mesh-kvmesh.serving.svc"),
        "redis-tls": certificate(mesh, "mesh-kvmesh-redis.serving.svc.cluster.local"),
        "public-tls": certificate(public, "api.example"),
    }
    pods = {
        pod.name.removeprefix("mesh-kvmesh-"): pod
        for pod in Cluster(render(values, version=version), tmp_path, secrets).pods()
    }
    each(pods.values(), Pod.start)
    for pod in pods.values():
        pod.wait_ready()

    scheme = "https" if "tls" in values else "http"
    said = subprocess.run(
        ["docker", "run", "--rm", "--network", NETWORK, "--entrypoint", "python", "kvmesh/gateway:dev", "-c", ASK,
         f"{scheme}://mesh-kvmesh-gateway:8000"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout)["choices"][0]["message"]["content"]
    status, metrics = pods["decode-0"].exec("kvtransfer", "python", "-c", READ)
    assert status == 0, metrics
    moved = [line for line in metrics.splitlines() if line.startswith('kvmesh:transfer_bytes_total{direction="in"')]
    assert sum(float(line.rpartition(" ")[2]) for line in moved) > 0

    each(pods.values(), Pod.stop)
    assert pods["decode-0"].ended == [("engine", 0), ("kvtransfer", 0)]
    assert {status for pod in pods.values() for _, status in pod.ended} == {0}


def each(pods: object, do: object) -> None:
    """Do it to all pods at once; the first failure is raised."""
    failures: list[BaseException] = []

    def one(pod: Pod) -> None:
        try:
            do(pod)  # type: ignore[operator]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=one, args=(pod,)) for pod in pods]  # type: ignore[attr-defined]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
