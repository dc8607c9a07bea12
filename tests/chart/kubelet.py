"""What a kubelet does with the pods of a rendering, done by a Docker engine: their network, volumes, users, variables,
the order of start and end, probes. No scheduling, no policies, no controllers.
"""

from __future__ import annotations

import base64
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chart_kit import Manifest, services_of

NETWORK = "kvmesh-chart"
PREFIX = "kvmesh-chart-"
# Nobody's pause image is at hand.
PAUSE = "python:3.11-slim"


def docker(*arguments: str, check: bool = True) -> str:
    """Standard output. AssertionError with what docker said."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=120)
    assert not check or done.returncode == 0, f"docker {' '.join(arguments)}: {done.stderr or done.stdout}"
    return done.stdout.strip()


def size(text: str) -> str:
    """A quantity of Kubernetes as docker has it."""
    return text.replace("Mi", "m").replace("Gi", "g")


class Cluster:
    """The objects of a rendering. `secrets`: those that others would have made, by name."""

    def __init__(self, manifests: list[Manifest], folder: Path, secrets: dict[str, dict[str, bytes]]) -> None:
        self.manifests = manifests
        self.folder = folder
        self.named = {(item["kind"], item["metadata"]["name"]): item for item in manifests}
        self.secrets = secrets

    def secret(self, name: str) -> dict[str, bytes]:
        """What a secret holds."""
        found = self.named.get(("Secret", name))
        if found is None:
            return self.secrets[name]
        plain = {key: value.encode() for key, value in found.get("stringData", {}).items()}
        return plain | {key: base64.b64decode(value) for key, value in found.get("data", {}).items()}

    def names_of(self, labels: dict[str, str]) -> Iterator[str]:
        """Names under which pods with these labels are found."""
        for item in self.manifests:
            selector = item["spec"].get("selector") if item["kind"] == "Service" else None
            if selector and selector.items() <= labels.items():
                name, namespace = item["metadata"]["name"], item["metadata"]["namespace"]
                yield from (name, f"{name}.{namespace}.svc.cluster.local")

    def pods(self) -> Iterator[Pod]:
        """One of each workload. The claims of a stateful set are empty volumes."""
        for item in self.manifests:
            if item["kind"] in ("Deployment", "StatefulSet"):
                claims = [claim["metadata"]["name"] for claim in item["spec"].get("volumeClaimTemplates", [])]
                yield Pod(self, f"{item['metadata']['name']}-0", item["spec"]["template"], claims)

    @staticmethod
    def clean() -> None:
        """Remove all containers, volumes and the network."""
        for kind, command in (("ps", ["ps", "-aq"]), ("volume", ["volume", "ls", "-q"])):
            if found := docker(*command, "--filter", f"name={PREFIX}").split():
                docker(*(["rm", "-f"] if kind == "ps" else ["volume", "rm"]), *found)
        docker("network", "rm", NETWORK, check=False)


class Pod:
    """Containers that share a network and volumes. `ended`: names in the order of their end, with exit statuses."""

    def __init__(self, cluster: Cluster, name: str, template: Manifest, claims: list[str]) -> None:
        self.name = name
        self.spec = template["spec"]
        self.ended: list[tuple[str, int]] = []
        self._cluster = cluster
        aliases = [
            part for alias in cluster.names_of(template["metadata"]["labels"]) for part in ("--network-alias", alias)
        ]
        pause = ["--name", self._container("pause"), "--hostname", name, "--network", NETWORK, *aliases]
        docker("run", "-d", *pause, "--entrypoint", "sleep", PAUSE, "infinity")
        where = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        self.ip = docker("inspect", "-f", where, self._container("pause"))
        self._group = self.spec["securityContext"]["fsGroup"]
        volumes = [*self.spec["volumes"], *({"name": claim, "emptyDir": {}} for claim in claims)]
        self._mounts = {volume["name"]: self._volume(volume) for volume in volumes}

    def _container(self, name: str) -> str:
        return f"{PREFIX}{self.name}-{name}"

    def _volume(self, volume: Manifest) -> str:
        name = self._container(volume["name"])
        empty = {} if "persistentVolumeClaim" in volume else volume.get("emptyDir")
        if empty is not None:
            limit = size(empty.get("sizeLimit", "256Mi"))
            options = f"o=uid=0,gid={self._group},mode=2777,size={limit}"
            docker("volume", "create", "-o", "type=tmpfs", "-o", "device=tmpfs", "-o", options, name)
            return name
        if source := volume.get("secret"):
            held, mode = self._cluster.secret(source["secretName"]), source["defaultMode"]
        else:
            source = volume["configMap"]
            held, mode = (
                {k: v.encode() for k, v in self._cluster.named["ConfigMap", source["name"]]["data"].items()},
                0o644,
            )
        files = {item["path"]: held[item["key"]] for item in source["items"]} if "items" in source else held
        return str(self._files(self._cluster.folder / name, files, mode))

    def _files(self, folder: Path, files: dict[str, bytes], mode: int) -> Path:
        """As the kubelet lays them out: the names are links, so that all change at once."""
        real = folder / "..version"
        real.mkdir(parents=True)
        (folder / "..data").symlink_to("..version")
        for name, content in files.items():
            path = real / name
            path.write_bytes(content)
            os.chown(path, 0, self._group)
            path.chmod(mode)
            (folder / name).symlink_to(f"..data/{name}")
        for path in (folder, real):
            os.chown(path, 0, self._group)
            path.chmod(0o2755)
        return folder

    def start(self) -> None:
        """First containers one after the other, each once it has started; then the others at once."""
        for container in self.spec.get("initContainers", []):
            self._run(container)
            self.wait(container, "startupProbe")
        for container in self.spec["containers"]:
            self._run(container)
        for container in self.spec["containers"]:
            self.wait(container, "startupProbe")

    def _run(self, container: Manifest) -> None:
        security = {**self.spec["securityContext"], **container["securityContext"]}
        flags = [
            "--network",
            f"container:{self._container('pause')}",
            "--security-opt",
            "no-new-privileges",
            "--read-only",
        ]
        flags += [
            "--user",
            f"{security['runAsUser']}:{security['runAsGroup']}",
            "--group-add",
            str(security["fsGroup"]),
        ]
        flags += [part for name in security["capabilities"]["drop"] for part in ("--cap-drop", name)]
        fields = {"metadata.name": self.name, "status.podIP": self.ip, "limits.cpu": "1"}
        known: dict[str, str] = {}
        for entry in container.get("env", []):
            if source := entry.get("valueFrom"):
                (reference,) = source.values()
                value = fields[reference.get("fieldPath") or reference["resource"]]
            else:
                value = re.sub(r"\$\((\w+)\)", lambda match: known.get(match[1], match[0]), entry["value"])
            known[entry["name"]] = value
            flags += ["-e", f"{entry['name']}={value}"]
        for mount in container.get("volumeMounts", []):
            end = ":ro" if mount.get("readOnly") else ""
            flags += ["-v", f"{self._mounts[mount['name']]}:{mount['mountPath']}{end}"]
        if limit := container["resources"].get("limits", {}).get("memory"):
            flags += ["--memory", size(limit)]
        command = container.get("command", [])
        entry_point = ["--entrypoint", command[0]] if command else []
        docker(
            "run",
            "-d",
            "--name",
            self._container(container["name"]),
            *flags,
            *entry_point,
            container["image"],
            *command[1:],
        )

    def exec(self, name: str, *command: str) -> tuple[int, str]:
        """(exit status, output) of a command in a container."""
        done = subprocess.run(
            ["docker", "exec", self._container(name), *command], capture_output=True, text=True, timeout=120
        )
        return done.returncode, done.stdout + done.stderr

    def wait(self, container: Manifest, probe: str, limit_s: float = 180.0) -> None:
        """Until a probe says yes. AssertionError with the container's last words."""
        asked: Any = container[probe]
        if "exec" in asked:
            command = asked["exec"]["command"]
        else:
            command = [
                "kvmesh-probe",
                f"127.0.0.1:{asked['grpc']['port']}",
                *filter(None, [asked["grpc"].get("service")]),
            ]
        until = time.monotonic() + limit_s
        name = self._container(container["name"])
        while self.exec(container["name"], *command)[0]:
            running = docker("inspect", "-f", "{{.State.Running}}", name) == "true"
            if not running or time.monotonic() > until:
                said = subprocess.run(
                    ["docker", "logs", "--tail", "40", name], capture_output=True, text=True, timeout=60
                )
                raise AssertionError(f"{name}: {probe} fails\n{said.stdout}{said.stderr}")
            time.sleep(0.5)

    def wait_ready(self) -> None:
        """Until all of it is ready."""
        for container in services_of({"spec": self.spec}):
            self.wait(container, "readinessProbe")
            self.wait(container, "livenessProbe", limit_s=10.0)

    def stop(self) -> None:
        """preStop and SIGTERM: the containers at once, then the sidecars, the last one first."""
        threads = [threading.Thread(target=self._stop, args=(container,)) for container in self.spec["containers"]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for container in reversed(self.spec.get("initContainers", [])):
            self._stop(container)

    def _stop(self, container: Manifest) -> None:
        hook = container.get("lifecycle", {}).get("preStop", {})
        if seconds := hook.get("sleep", {}).get("seconds"):
            time.sleep(seconds)
        elif command := hook.get("exec", {}).get("command"):
            self.exec(container["name"], *command)
        name = self._container(container["name"])
        docker("kill", "--signal", "TERM", name)
        self.ended.append((container["name"], int(docker("wait", name))))
