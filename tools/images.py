#!/usr/bin/env python3
"""Builds the images and holds what each adds over its base against its limit: `make images`.

    tools/images.py [--only gateway,router] [--variant cpu|cuda] [--tag T] [--registry R] [--platform P] [--push]
    tools/images.py --sizes         build nothing, print the sizes
    tools/images.py --sbom FOLDER   build nothing, write a CycloneDX document per image

With the Docker engine that `docker` reaches. Where torch's index cannot be reached from here, its wheel is fetched by
this machine's own pip settings and given to the build through deploy/images/wheels.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ROOT / "deploy" / "images" / "wheels"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# MB (10^6 bytes) that an image may add over its base.
LIMITS = {"gateway": 150, "router": 330, "kvtransfer": 120, "prefill": 1200, "decode": 1200}
ENGINES = ("prefill", "decode")
_SBOM = ROOT / "deploy" / "images" / "sbom.py"


def docker(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["docker", *arguments], check=True, text=True, **options)  # type: ignore[call-overload,no-any-return]


def name(service: str, options: argparse.Namespace) -> str:
    """REGISTRY/kvmesh/SERVICE:TAG; images of the CUDA variant have the tag's suffix -cuda."""
    prefix = f"{options.registry.rstrip('/')}/" if options.registry else ""
    suffix = "-cuda" if options.variant == "cuda" and service in ENGINES else ""
    return f"{prefix}kvmesh/{service}:{options.tag}{suffix}"


def _dockerfile_arg(service: str, argument: str) -> str:
    text = (ROOT / "services" / service / "Dockerfile").read_text(encoding="utf-8")
    found = re.search(rf"^ARG {argument}=(\S+)$", text, re.MULTILINE)
    if not found:
        raise SystemExit(f"services/{service}/Dockerfile has no ARG {argument}")
    return found[1]


def torch_wheel(index: str) -> None:
    """Fills deploy/images/wheels where torch's index cannot be reached. Exits with the reason when that fails too."""
    lock = (ROOT / "deploy" / "images" / "locks" / "torch-cpu.txt").read_text(encoding="utf-8")
    version = re.findall(r"^torch==([0-9.]+)", lock, re.MULTILINE)[0]
    if any(WHEELS.glob(f"torch-{version}+cpu-*.whl")):
        return
    try:
        urllib.request.urlopen(urllib.request.Request(f"{index.rstrip('/')}/torch/", method="HEAD"), timeout=10).close()
        return
    except (OSError, ValueError) as error:
        print(f"{index} cannot be reached ({error}): looking for torch {version}+cpu where pip looks", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--python-version", "3.11", "--only-binary", ":all:", "--dest", str(WHEELS), f"torch=={version}+cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=900)
    # Not PyPI's build: on x86_64 it is CUDA's and does not even import without its libraries. The lock names this one.
    if done.returncode or not any(WHEELS.glob(f"torch-{version}+cpu-*.whl")):
        raise SystemExit(f"torch {version}+cpu is nowhere to be had, set TORCH_INDEX: {done.stderr.strip()[-500:]}")


def build(service: str, options: argparse.Namespace) -> float:
    """Builds one image; seconds."""
    revision = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    arguments = {"VERSION": options.version or options.tag, "REVISION": revision or "unknown", "SOURCE": options.source}
    if service in ENGINES:
        arguments["VARIANT"] = options.variant
        arguments["TORCH_INDEX"] = options.torch_index
    for argument in options.build_arg:
        key, _, value = argument.partition("=")
        arguments[key] = value
    command = ["build", "-f", f"services/{service}/Dockerfile", "-t", name(service, options)]
    for key, value in arguments.items():
        command += ["--build-arg", f"{key}={value}"]
    if options.platform:
        command += ["--platform", options.platform]
    if options.network:
        command += ["--network", options.network]
    if options.push:
        command += ["--push"]
    began = time.monotonic()
    environment = {**os.environ, "DOCKER_BUILDKIT": "1", "BUILDKIT_PROGRESS": "plain"}
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if options.jobs > 1 else {}
    docker(*command, ".", cwd=ROOT, env=environment, **quiet)
    return time.monotonic() - began


def build_all(options: argparse.Namespace) -> None:
    """All of them, `jobs` at a time. At once they share stages; those of a build that has ended Docker 20.10 was seen
    to build again, as long as another build ran."""
    # The engines' and the sidecar's are the long ones.
    order = sorted(options.services, key=lambda name: name not in (*ENGINES, "kvtransfer"))
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        waiting = {pool.submit(build, service, options): service for service in order}
        for done in concurrent.futures.as_completed(waiting):
            try:
                print(f"{name(waiting[done], options)}: built in {done.result():.0f} s", flush=True)
            except subprocess.CalledProcessError:
                for other in waiting:
                    other.cancel()
                raise


def _size(image: str) -> int:
    return int(docker("image", "inspect", "--format", "{{.Size}}", image, capture_output=True).stdout)


def base(service: str, options: argparse.Namespace) -> str:
    """The image's base, which is here afterwards: a builder that pulled it may have kept it to itself."""
    given = [value for key, _, value in (item.partition("=") for item in options.build_arg) if key == "PYTHON_IMAGE"]
    name = given[-1] if given else _dockerfile_arg(service, "PYTHON_IMAGE")
    if subprocess.run(["docker", "image", "inspect", name], capture_output=True, check=False).returncode:
        docker("pull", "--quiet", *(["--platform", options.platform] if options.platform else []), name)
    return name


def sizes(services: list[str], options: argparse.Namespace) -> bool:
    """Prints "added / total / limit" per image; whether all are within."""
    within = True
    print(f"{'image':40} {'added':>9} {'total':>9} {'limit':>9}")
    for service in services:
        total = _size(name(service, options))
        added = total - _size(base(service, options))
        limit = None if options.variant == "cuda" and service in ENGINES else LIMITS[service]
        over = limit is not None and added > limit * 10**6
        within = within and not over
        print(
            f"{name(service, options):40} {added / 1e6:6.1f} MB {total / 1e6:6.1f} MB "
            f"{f'{limit:6} MB' if limit else '     none'}{'  OVER' if over else ''}"
        )
    return within


def sbom(service: str, options: argparse.Namespace) -> Path:
    """Writes what is installed in the image, as CycloneDX 1.6; nothing is added to the image."""
    image = name(service, options)
    command = ["run", "--rm", "-i", "--network", "none", "--entrypoint", "python3", image, "-", image]
    out = docker(*command, input=_SBOM.read_text(encoding="utf-8"), capture_output=True).stdout
    document = json.loads(out)
    target = Path(options.sbom) / f"{service}.cdx.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{target}: {len(document['components'])} components")
    return target


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The images of kvmesh.")
    parser.add_argument("--only", default=",".join(LIMITS), help="services, with commas between them")
    parser.add_argument("--variant", choices=("cpu", "cuda"), default="cpu", help="of the engines")
    parser.add_argument("--tag", default="dev")
    parser.add_argument("--registry", default="")
    parser.add_argument("--platform", default="", help="such as linux/arm64")
    parser.add_argument("--network", default="", help="of the builds: host, where the engine has no other")
    parser.add_argument("--push", action="store_true", help="to the registry, with buildx")
    parser.add_argument("--version", default="", help="of the label; the tag unless given")
    parser.add_argument("--source", default="", help="of the label: where the source lives")
    parser.add_argument("--torch-index", default=os.environ.get("TORCH_INDEX") or TORCH_INDEX)
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument(
        "--jobs", type=int, default=len(LIMITS), help="builds at a time; 1 shows their output as it comes"
    )
    parser.add_argument("--sizes", action="store_true")
    parser.add_argument("--sbom", type=Path, metavar="FOLDER")
    options = parser.parse_args(arguments)
    options.services = options.only.split(",")
    options.torch_index = options.torch_index or TORCH_INDEX  # the Makefile's may be empty: PyPI's torch
    for service in options.services:
        if service not in LIMITS:
            parser.error(f"no service {service!r}; there are {', '.join(LIMITS)}")
    return options


def main() -> int:
    options = parse()
    if options.sbom:
        for service in options.services:
            sbom(service, options)
        return 0
    if not options.sizes:
        if options.variant == "cpu" and set(options.services) & set(ENGINES):
            torch_wheel(options.torch_index)
        build_all(options)
        if options.push:
            return 0  # an image for another platform need not be here
    return 0 if sizes(options.services, options) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        sys.exit(
            f"docker {error.cmd[1]}: exit status {error.returncode}\n{(error.stderr or error.stdout or '')[-4000:]}"
        )
    except FileNotFoundError as error:
        sys.exit(f"{error.filename} is not installed")
