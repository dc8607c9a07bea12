"""The kernels of `kernels.cpp`, compiled for this machine (see `kvmesh.native`) and linked to torch's OpenMP runtime.

No compiler, a compiler that fails or `KVMESH_NATIVE=0` is no error: the caller gets the reason and uses torch.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from kvmesh import native
from kvmesh.native import NativeUnavailable

__all__ = ["NativeUnavailable", "load_library", "status"]

_SOURCE = Path(__file__).with_name("kernels.cpp")
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno")


def _openmp() -> list[str]:
    """torch's own OpenMP runtime: a second one would bring a second pool of spinning threads."""
    library = Path(torch.__file__).parent / "lib" / "libgomp.so.1"
    if not library.exists():
        raise NativeUnavailable("torch brings no libgomp to share threads with")
    return [str(library)]


def _compile() -> Path:
    """The library, from the cache where it is there."""
    return native.compiled(_SOURCE, _FLAGS, link=_openmp(), extra=torch.__version__)


@functools.cache
def load_library() -> ctypes.CDLL:
    """The kernels; NativeUnavailable says why not."""
    library = native.load(_SOURCE, _FLAGS, link=_openmp(), extra=torch.__version__)
    for name in ("attention_in", "attention_out", "attention_share", "mlp_share", "linear"):
        getattr(library, f"kvmesh_{name}").restype = None
    return library


def status() -> str:
    """`native`, or `torch (reason)`: for logs and benchmarks."""
    try:
        load_library()
    except NativeUnavailable as error:
        return f"torch ({error})"
    return "native"
