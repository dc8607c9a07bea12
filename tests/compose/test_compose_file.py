"""docker-compose.yml without a mesh: its form in every profile, and what no container of kvmesh may have."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROFILES = ("cpu", "gpu", "rdma", "cpu,observability", "gpu,observability")


def _has_compose() -> bool:
    if shutil.which("docker") is None:
        return False
    done = subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=60, check=False)
    return done.returncode == 0


# make test-compose has an engine with compose: there nothing is skipped.
needs_compose = pytest.mark.skipif(
    not os.environ.get("KVMESH_DOCKER") and not _has_compose(), reason="needs docker compose"
)


def config(profiles: str, **settings: str) -> dict[str, Any]:
    """What compose makes of the file."""
    env = {**os.environ, "COMPOSE_PROFILES": profiles, **settings}
    command = ["docker", "compose", "config", "--format", "json"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    made: dict[str, Any] = json.loads(done.stdout)
    return made


def test_it_is_what_the_compose_specification_allows(tmp_path: Path) -> None:
    # With each default in its place, as compose does before it looks.
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    (tmp_path / "docker-compose.yml").write_text(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "check_jsonschema",
        "--builtin-schema",
        "vendor.compose-spec",
        str(tmp_path / "docker-compose.yml"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_compose
@pytest.mark.parametrize("profiles", PROFILES)
def test_every_profile_is_whole(profiles: str) -> None:
    services = config(profiles)["services"]
    engines = {"cpu": {"prefill", "decode"}, "gpu": {"prefill-gpu", "decode-gpu"}}
    engines["rdma"] = engines["gpu"]
    kind = profiles.partition(",")[0]
    assert {name for name in services if name.startswith(("prefill", "decode"))} == engines[kind]
    sidecars = {name for name in services if name.startswith("kvtransfer")}
    assert sidecars == {f"kvtransfer-{role}{'-rdma' if kind == 'rdma' else ''}" for role in ("prefill", "decode")}
    assert {"redis", "router", "gateway", "init"} <= set(services)
    watching = {"otel-collector", "jaeger", "prometheus", "grafana"}
    assert (watching <= set(services)) == ("observability" in profiles)
    for name, service in services.items():
        # Nothing but a file of this repository is mounted from the host, and each of them is there.
        for volume in service.get("volumes", ()):
            if volume["type"] == "bind":
                assert Path(volume["source"]).exists(), f"{name}: {volume['source']}"
                assert volume["read_only"], f"{name}: {volume['source']}"


@needs_compose
@pytest.mark.parametrize("profiles", PROFILES)
def test_containers_may_do_no_more_than_they_must(profiles: str) -> None:
    for name, service in config(profiles)["services"].items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not service.get("privileged"), name
        assert service.get("pid") is None, name
        assert service.get("ipc") is None, name
        may = {"init": ["CHOWN"]} | {f"kvtransfer-{role}-rdma": ["IPC_LOCK"] for role in ("prefill", "decode")}
        assert service.get("cap_add", []) == may.get(name, []), name
        assert service["user"] == {"init": "0:0", "prometheus": "65534:65534", "grafana": "472:0"}.get(
            name, "10001:10001"
        )
        assert service.get("network_mode") == (
            "none" if name == "init" else "host" if name.endswith("-rdma") else None
        ), name
        for port in service.get("ports", ()):
            assert port["host_ip"] == "127.0.0.1", name
        image = service["image"]
        assert ":" in image, name
        assert not image.endswith(":latest"), name
        # Whoever takes our name on a public registry must not be asked for our images.
        ours = image.startswith("kvmesh/")
        assert ours == name.startswith(("router", "gateway", "prefill", "decode", "kvtransfer")), name
        assert service.get("pull_policy") == ("never" if ours else None), name
        if service.get("network_mode") == "host":
            listens = {value for key, value in service["environment"].items() if key.endswith("LISTEN")}
            assert {address.partition(":")[0] for address in listens} == {"127.0.0.1"}, name
        if "gpu" not in name and "rdma" not in name:
            limits = service["deploy"]["resources"]["limits"]
            assert {"cpus", "memory", "pids"} <= set(limits), name
        if "healthcheck" not in service:
            # Their images have nothing to ask with, or they end by themselves.
            assert name in ("init", "otel-collector", "jaeger"), name


@needs_compose
def test_replicas_ports_and_images_come_from_settings() -> None:
    settings = {
        "KVMESH_DECODE_REPLICAS": "3",
        "KVMESH_GATEWAY_REPLICAS": "2",
        "KVMESH_HTTP_PORT": "9000-9003",
        "KVMESH_REGISTRY": "registry.example/",
        "KVMESH_TAG": "1.2",
        "KVMESH_PULL_POLICY": "missing",
    }
    services = config("cpu", **settings)["services"]
    assert services["decode"]["deploy"]["replicas"] == 3
    assert services["kvtransfer-decode"]["deploy"]["replicas"] == 3
    assert services["prefill"]["deploy"]["replicas"] == 1
    assert services["gateway"]["deploy"]["replicas"] == 2
    assert services["gateway"]["environment"]["KVMESH_GATEWAY_LIMITS__REPLICAS"] == "2"
    assert services["gateway"]["ports"][0]["published"] == "9000-9003"
    assert services["decode"]["image"] == "registry.example/kvmesh/decode:1.2"
    assert services["decode"]["pull_policy"] == "missing"
    # Both ends of a pair name the same volume, and no one else has it.
    for role in ("prefill", "decode"):
        with_it = {
            name
            for name, service in services.items()
            for volume in service.get("volumes", ())
            if volume["source"] == f"sockets-{role}"
        }
        assert with_it == {role, "kvtransfer-prefill", "kvtransfer-decode"}
