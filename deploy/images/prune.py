#!/usr/bin/env python3
"""Takes out of an environment what no service reads, and compiles the rest: `prune.py PREFIX`.

Tests, headers, static libraries, type stubs, sources and symbols of extensions. What a library compiles at run time
with (Triton's and FlashInfer's headers) stays. Byte code is there because the images' root is read-only: without it
every start would compile every module again. Of torch, three thousand modules, it is what an import loads.
"""

from __future__ import annotations

import compileall
import os
import py_compile
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

SOURCES = {".pyi", ".pyx", ".pxd", ".pxi", ".c", ".cc", ".cpp", ".h", ".hpp", ".cuh", ".cu", ".a", ".lib"}
TESTS = {"tests", "_pyinstaller"}
# What torch's wheel has for building against it, and tests; of `bin` one file is looked for at every import.
TORCH = ("include", "share", "test")
TORCH_BIN = "torch_shm_manager"
LARGE = ("torch", "sympy", "networkx", "mpmath")
COMPILES_AT_RUN_TIME = {"triton", "flashinfer", "flashinfer_python", "tvm_ffi", "nvidia", "cutlass", "kvmesh"}


def prune(site: Path) -> int:
    """Removes files and folders below a site-packages folder; returns the bytes freed."""
    freed = 0
    for name in TORCH:
        freed += _remove(site / "torch" / name)
    for path in (site / "torch" / "bin").glob("*"):
        freed += 0 if path.name == TORCH_BIN else _remove(path)
    for package in sorted(site.iterdir()):
        if not package.is_dir() or package.name in COMPILES_AT_RUN_TIME or package.name.startswith("nvidia_"):
            continue
        for folder, children, files in os.walk(package):
            for child in [child for child in children if child in TESTS]:
                children.remove(child)
                freed += _remove(Path(folder, child))
            for file in files:
                if Path(file).suffix in SOURCES:
                    freed += _remove(Path(folder, file))
    return freed


def strip(site: Path) -> int:
    """Removes symbols that nothing links to from shared objects, if `strip` is there; returns the bytes freed."""
    tool = shutil.which("strip")
    found = [path for path in site.rglob("*.so*") if path.is_file() and not path.is_symlink()]
    # CUDA's and torch's own are stripped as they come, and large.
    found = [path for path in found if not {"torch", "nvidia", "kvmesh"} & set(path.relative_to(site).parts)]
    if tool is None or not found:
        return 0
    freed = 0
    for path in found:
        short = path.with_name(path.name + ".stripped")
        done = subprocess.run(
            [tool, "--strip-unneeded", "-o", short, path], capture_output=True, check=False, timeout=60
        )
        if done.returncode == 0 and _loadable(short.read_bytes()):
            freed += path.stat().st_size - short.stat().st_size
            short.replace(path)
        short.unlink(missing_ok=True)
    return freed


def _loadable(data: bytes) -> bool:
    """Whether each segment's place in the file fits its address: `strip` breaks libraries that patchelf rewrote."""
    if data[:6] != b"\x7fELF\x02\x01":
        return False
    at, size, count = *struct.unpack_from("<Q", data, 32), *struct.unpack_from("<HH", data, 54)
    for header in range(at, at + size * count, size):
        kind, _, offset, address = struct.unpack_from("<IIQQ", data, header)
        (align,) = struct.unpack_from("<Q", data, header + 48)
        if kind == 1 and align > 1 and (offset - address) % align:
            return False
    return True


def _remove(path: Path) -> int:
    if path.is_dir():
        size = sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())
        shutil.rmtree(path)
        return size
    if not path.exists():
        return 0
    size = path.lstat().st_size
    path.unlink()
    return size


def compile_code(prefix: Path) -> None:
    """Byte code of everything; of the large packages what `import torch` loads."""
    # By content, unchecked: nothing can change under a read-only root, and a layer does not depend on the clock.
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    large = re.compile(rf"/site-packages/({'|'.join(LARGE)})/")
    compileall.compile_dir(prefix, quiet=2, workers=0, rx=large, invalidation_mode=mode)
    for site in prefix.glob("lib/python3*/site-packages"):
        if (site / "torch").exists():
            program = (
                "import sys, torch; print(*(m.__file__ for m in sys.modules.values() if getattr(m, '__file__', 0)))"
            )
            loaded = subprocess.run(
                [prefix / "bin/python3", "-c", program], stdout=subprocess.PIPE, text=True, check=True
            )
            for file in loaded.stdout.split():
                if large.search(file) and file.endswith(".py"):
                    py_compile.compile(file, invalidation_mode=mode)


def main() -> int:
    prefix = Path(sys.argv[1])
    freed = sum(prune(site) + strip(site) for site in prefix.glob("lib/python3*/site-packages"))
    compile_code(prefix)
    print(f"{prefix}: {freed / 1e6:.1f} MB removed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
