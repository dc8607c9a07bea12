#!/usr/bin/env python3
"""Compiles kvmesh's C++ for the instruction sets of machines that an image may run on: `native_ahead.py FOLDER`.

Needs a C++ compiler and `kvmesh` on the path; the kernels of the CPU engine need torch, whose version they belong to.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from kvmesh.native import compile_ahead
from kvmesh.transfer.native import moves
from kvmesh.transfer.transports.verbs.native import rings


def main() -> int:
    folder = Path(sys.argv[1])
    made = compile_ahead(moves._SOURCE, moves._FLAGS, folder)
    made += compile_ahead(rings._SOURCE, rings._FLAGS, folder)
    if importlib.util.find_spec("torch") is not None:
        import torch

        from kvmesh.layers.native import build

        made += compile_ahead(build._SOURCE, build._FLAGS, folder, link=build._openmp(), extra=torch.__version__)
    for path in made:
        print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
