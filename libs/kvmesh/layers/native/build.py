"""Compiles `kernels.cpp` with the machine's own C++ compiler, once, into the user's cache.

No compiler, a compiler that fails or `KVMESH_NATIVE=0` is no error: the caller gets the reason and uses torch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

_SOURCE = Path(__file__).with_name("kernels.cpp")
_FLAGS = ["-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno"]
_TIMEOUT_S = 180
_log = logging.getLogger(__name__)


class NativeUnavailable(Exception):
    """Why there are no native kernels on this machine."""


def _cache_dir() -> Path:
    try:
        base = os.environ.get("KVMESH_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:  # a user without a home, as containers have
        raise NativeUnavailable(f"no place for the kernels: {error}") from None
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


def _openmp() -> list[str]:
    """torch's own OpenMP runtime: a second one would bring a second pool of spinning threads."""
    library = Path(torch.__file__).parent / "lib" / "libgomp.so.1"
    if not library.exists():
        raise NativeUnavailable("torch brings no libgomp to share threads with")
    return [str(library)]


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{command[0]}: {error}") from None
    if done.returncode:
        raise NativeUnavailable(f"{command[0]} failed: {done.stderr.strip()[-400:]}")
    return done.stdout


def _compile(*, again: bool = False) -> Path:
    """The library, from the cache unless `again`."""
    compiler, cache = _compiler(), _cache_dir()
    identity = "\0".join(
        [_SOURCE.read_text(encoding="utf-8"), _run([compiler, "--version"]), _cpu(), torch.__version__, *_FLAGS]
    )
    target = cache / f"kernels-{hashlib.sha256(identity.encode()).hexdigest()[:20]}.so"
    if target.exists() and not again:
        return target
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built, library = Path(scratch) / "kernels.o", Path(scratch) / "kernels.so"
        _run([compiler, *_FLAGS, "-c", str(_SOURCE), "-o", str(built)])
        _run([compiler, "-shared", str(built), "-o", str(library), *_openmp()])
        # On disk before it has its name: after a power cut the name must not stand for half a file.
        with library.open("rb") as file:
            os.fsync(file.fileno())
        # Atomic: engines that start together may all compile, none sees half a file.
        library.replace(target)
    _log.info("native kernels compiled", extra={"path": str(target)})
    return target


@functools.cache
def load_library() -> ctypes.CDLL:
    """The kernels; NativeUnavailable says why not."""
    if os.environ.get("KVMESH_NATIVE", "1") == "0":
        raise NativeUnavailable("switched off by KVMESH_NATIVE=0")
    try:
        path = _compile()
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            _log.warning("compiling the kernels again: %s", error)
            library = ctypes.CDLL(str(_compile(again=True)))
    except OSError as error:
        raise NativeUnavailable(f"cannot load the kernels: {error}") from None
    for name in ("kvmesh_attention_in", "kvmesh_attention_out", "kvmesh_linear"):
        getattr(library, name).restype = None
    return library


def status() -> str:
    """`native`, or `torch (reason)`: for logs and benchmarks."""
    try:
        load_library()
    except NativeUnavailable as error:
        return f"torch ({error})"
    return "native"
