"""What a private engine needs besides itself, made without an image registry: compose 2 and buildx as client plugins,
and the base images that the Dockerfiles and the compose file name, made from Debian's packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

PYTHON, DEBIAN, REDIS = "python:3.11-slim", "debian:bookworm-slim", "redis:7-alpine"
_MIRROR = "http://deb.debian.org/debian"
# Debian 12's own are compose 1 and no buildx.
_PLUGIN_SUITE = "trixie"
_PLUGIN_PACKAGES = ("docker-compose", "docker-buildx")
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_REDIS_FILE = f"""FROM {DEBIAN}
RUN apt-get update -q && apt-get install -y -q --no-install-recommends redis-server && rm -rf /var/lib/apt/lists/* \\
    && mkdir -p /data && chown redis:redis /data
COPY entrypoint /usr/local/bin/docker-entrypoint.sh
WORKDIR /data
VOLUME /data
EXPOSE 6379
ENTRYPOINT ["docker-entrypoint.sh"]
CMD ["redis-server"]
"""
# As the official image: not root, and reachable from other containers without a configuration file.
_REDIS_ENTRYPOINT = """#!/bin/sh
set -e
[ "${1#-}" = "$1" ] || set -- redis-server "$@"
[ "$1" != redis-server ] || set -- "$@" --protected-mode no
if [ "$1" = redis-server ] && [ "$(id -u)" = 0 ]; then exec setpriv --reuid redis --regid redis --clear-groups "$@"; fi
exec "$@"
"""


def _run(*command: str, cwd: Path | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")


def plugins(target: Path, scratch: Path) -> None:
    """Puts docker-compose and docker-buildx into `target`, a `cli-plugins` folder, if they are not there."""
    if all((target / name).exists() for name in _PLUGIN_PACKAGES):
        return
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        apt = Path(folder)
        for name in ("lists/partial", "cache/archives/partial", "etc"):
            (apt / name).mkdir(parents=True)
        signed = f"[signed-by={_KEYRING}] " if Path(_KEYRING).exists() else ""
        (apt / "etc/sources.list").write_text(f"deb {signed}{_MIRROR} {_PLUGIN_SUITE} main\n")
        options = [
            item
            for key, value in {
                "Dir::Etc::sourcelist": apt / "etc/sources.list",
                "Dir::Etc::sourceparts": "-",
                "Dir::State::lists": apt / "lists",
                "Dir::Cache": apt / "cache",
                "Acquire::Languages": "none",
                "APT::Sandbox::User": "root",
            }.items()
            for item in ("-o", f"{key}={value}")
        ]
        _run("apt-get", *options, "update", "-q")
        _run("apt-get", *options, "download", "-q", *_PLUGIN_PACKAGES, cwd=apt)
        target.mkdir(parents=True, exist_ok=True)
        for package in apt.glob("*.deb"):
            _run("dpkg", "-x", str(package), str(apt / "root"))
        for name in _PLUGIN_PACKAGES:
            shutil.copy2(apt / "root/usr/libexec/docker/cli-plugins" / name, target / name)


def images(docker: Callable[..., subprocess.CompletedProcess[str]], scratch: Path) -> None:
    """Makes the base images that the engine does not have."""
    have = docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}").stdout.split()
    if PYTHON not in have or DEBIAN not in have:
        _python(docker, scratch)
    if REDIS not in have:
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            (Path(folder) / "Dockerfile").write_text(_REDIS_FILE)
            entrypoint = Path(folder) / "entrypoint"
            entrypoint.write_text(_REDIS_ENTRYPOINT)
            entrypoint.chmod(0o755)
            docker("build", "-q", "-t", REDIS, folder)


def _python(docker: Callable[..., subprocess.CompletedProcess[str]], scratch: Path) -> None:
    """Debian 12 with its Python 3.11 where the official image has its own: `python` and `pip` on the path."""
    hook = r"""set -e
ln -sf /usr/bin/python3 "$1/usr/local/bin/python3"; ln -sf /usr/bin/python3 "$1/usr/local/bin/python"
ln -sf /usr/bin/pip3 "$1/usr/local/bin/pip"
rm -f "$1"/usr/lib/python3.*/EXTERNALLY-MANAGED
rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/*.bin "$1"/var/log/apt "$1"/var/log/dpkg.log
"""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        root = Path(folder) / "root.tar"
        script = Path(folder) / "hook"
        script.write_text("#!/bin/sh\n" + hook)
        script.chmod(0o755)
        command = ["mmdebstrap", "--variant=minbase", "--quiet"]
        for path in ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*"):
            command.append(f"--dpkgopt=path-exclude={path}")
        # Authorities that this host trusts beyond Debian's: a proxy's, for one.
        extra = sorted(Path("/usr/local/share/ca-certificates").glob("*.crt"))
        for certificate in extra:
            command.append(f"--customize-hook=copy-in {certificate} /usr/local/share/ca-certificates")
        if extra:
            command.append('--customize-hook=chroot "$1" update-ca-certificates')
        command += [
            f"--customize-hook={script}",
            "--include=ca-certificates,python3,python3-venv,python3-pip",
            "bookworm",
            str(root),
            _MIRROR,
        ]
        environment = {**os.environ, "TMPDIR": folder}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            raise RuntimeError(f"mmdebstrap: exit status {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
        bundle = "/etc/ssl/certs/ca-certificates.crt"
        changes = ['CMD ["python3"]', "ENV LANG=C.UTF-8"]
        if extra:
            changes += [f"ENV {name}={bundle}" for name in ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE")]
        docker("import", *(item for change in changes for item in ("-c", change)), str(root), PYTHON)
        docker("tag", PYTHON, DEBIAN)
