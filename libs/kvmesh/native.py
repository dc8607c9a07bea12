"""Compiles a C++ source of ours with the machine's own compiler, once, into the user's cache.

Images have no compiler: theirs was at work before, for a few instruction sets (`compile_ahead`), and
KVMESH_NATIVE_AHEAD names the folder. No compiler, a compiler that fails or `KVMESH_NATIVE=0` is no error: the caller
gets the reason and does without.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_TIMEOUT_S = 180
_THIS_MACHINE = "-march=native"
# Instruction sets to compile ahead for, the best first, with what /proc/cpuinfo must name.
_X86_64_V3 = frozenset(["avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"])
_AHEAD: dict[str, tuple[tuple[str, frozenset[str]], ...]] = {
    "x86_64": (
        ("x86-64-v4", _X86_64_V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])),
        ("x86-64-v3", _X86_64_V3),
    ),
    "aarch64": (
        ("armv8.2-a+fp16+dotprod", frozenset(["asimd", "atomics", "asimdhp", "asimddp"])),
        ("armv8-a", frozenset({"asimd"})),
    ),
}
_log = logging.getLogger(__name__)


class NativeUnavailable(Exception):
    """Why there is no native code on this machine."""


def _cache_dir() -> Path:
    try:
        base = os.environ.get("KVMESH_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:  # a user without a home, as containers have
        raise NativeUnavailable(f"no place for native code: {error}") from None
    path = Path(base) / "kvmesh" / "native"
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    # A library that others may write must not be loaded.
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise NativeUnavailable(f"{path} belongs to or is writable by others")
    return path


def _compiler() -> str:
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise NativeUnavailable("no C++ compiler")


def _cpu() -> str:
    """What -march=native depends on: a cache shared by machines must not hand one the other's code."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{command[0]}: {error}") from None
    if done.returncode:
        raise NativeUnavailable(f"{command[0]} failed: {done.stderr.strip()[-400:]}")
    return done.stdout


def compiled(
    source: Path, flags: Sequence[str], *, link: Sequence[str] = (), extra: str = "", again: bool = False
) -> Path:
    """The library made of `source`, from the cache unless `again`.

    link: what to link to it, without the flags. extra: what else it depends on. Raises NativeUnavailable.
    """
    compiler, cache = _compiler(), _cache_dir()
    identity = "\0".join(
        [source.read_text(encoding="utf-8"), _run([compiler, "--version"]), _cpu(), extra, *flags, *link]
    )
    target = cache / f"{source.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:20]}.so"
    if target.exists() and not again:
        return target
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built, library = Path(scratch) / "built.o", Path(scratch) / "built.so"
        _run([compiler, *flags, "-c", str(source), "-o", str(built)])
        _run([compiler, "-shared", str(built), "-o", str(library), *link])
        # On disk before it has its name: after a power cut the name must not stand for half a file.
        with library.open("rb") as file:
            os.fsync(file.fileno())
        # Atomic: processes that start together may all compile, none sees half a file.
        library.replace(target)
    _log.info("native code compiled", extra={"path": str(target)})
    return target


def _ahead_name(source: Path, flags: Sequence[str], level: str, extra: str) -> str:
    identity = "\0".join([source.read_text(encoding="utf-8"), extra, *flags])
    return f"{source.stem}-{level}-{hashlib.sha256(identity.encode()).hexdigest()[:20]}.so"


def _levels(flags: Sequence[str]) -> tuple[tuple[str, frozenset[str]], ...]:
    """Instruction sets worth a library each: one for all where the flags do not ask for this machine's."""
    return _AHEAD.get(platform.machine(), ()) if _THIS_MACHINE in flags else (("any", frozenset()),)


def compile_ahead(
    source: Path, flags: Sequence[str], folder: Path, *, link: Sequence[str] = (), extra: str = ""
) -> list[Path]:
    """Compiles `source` for other machines, as an image's build does. NativeUnavailable when that fails."""
    compiler = _compiler()
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for level, _ in _levels(flags):
        target = folder / _ahead_name(source, flags, level, extra)
        with tempfile.TemporaryDirectory() as scratch:
            built = str(Path(scratch) / "built.o")
            there = [f"-march={level}" if flag == _THIS_MACHINE else flag for flag in flags]
            _run([compiler, *there, "-c", str(source), "-o", built])
            _run([compiler, "-shared", "-s", built, "-o", str(target), *link])
        made.append(target)
    return made


def _ahead(source: Path, flags: Sequence[str], extra: str) -> Path | None:
    """The best library that was compiled ahead and runs on this machine."""
    folder = os.environ.get("KVMESH_NATIVE_AHEAD")
    if not folder:
        return None
    has = set(_cpu().partition(":")[2].split())
    for level, needs in _levels(flags):
        path = Path(folder) / _ahead_name(source, flags, level, extra)
        if needs <= has and path.exists():
            return path
    return None


def load(source: Path, flags: Sequence[str], *, link: Sequence[str] = (), extra: str = "") -> ctypes.CDLL:
    """Compile where needed (see `compiled`) and load. Blocks for seconds at first. NativeUnavailable says why not."""
    if os.environ.get("KVMESH_NATIVE", "1") == "0":
        raise NativeUnavailable("switched off by KVMESH_NATIVE=0")
    try:
        if (ahead := _ahead(source, flags, extra)) is not None:
            return ctypes.CDLL(str(ahead))
        path = compiled(source, flags, link=link, extra=extra)
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            _log.warning("compiling %s again: %s", source.name, error)
            return ctypes.CDLL(str(compiled(source, flags, link=link, extra=extra, again=True)))
    except OSError as error:
        raise NativeUnavailable(f"cannot load {source.name}: {error}") from None
