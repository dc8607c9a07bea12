#!/usr/bin/env python3
"""A GGUF without its tensors: `tokenizer_only.py FOLDER` rewrites each .gguf file of a model package in place.

The gateway needs a model's tokenizer and chat template, which are metadata at the head of the file, and never a weight.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

# metadata value types: bytes of a scalar; strings and arrays are walked
_WIDTH = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9


def _skip(data: bytes, at: int, kind: int) -> int:
    """Where the value that begins at `at` ends."""
    if kind == _STRING:
        return at + 8 + int.from_bytes(data[at : at + 8], "little")
    if kind != _ARRAY:
        return at + _WIDTH[kind]
    inner, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if inner in _WIDTH:
        return at + count * _WIDTH[inner]
    for _ in range(count):
        at = _skip(data, at, inner)
    return at


def head(data: bytes) -> bytes:
    """The file's version and metadata, with no tensor."""
    magic, version, _, entries = struct.unpack_from("<4sIQQ", data)
    if magic != b"GGUF" or version not in (2, 3):
        raise SystemExit(f"not a GGUF file of version 2 or 3: {magic!r} {version}")
    at = 24
    for _ in range(entries):
        at = _skip(data, at, _STRING)
        at = _skip(data, at + 4, struct.unpack_from("<I", data, at)[0])
    return struct.pack("<4sIQQ", magic, version, 0, entries) + data[24:at]


def main() -> int:
    for path in sorted(Path(sys.argv[1]).rglob("*.gguf")):
        short = head(path.read_bytes())
        path.unlink()
        path.with_name(f"{path.stem}.tokenizer.gguf").write_bytes(short)
        print(f"{path.name}: {len(short) / 1e6:.1f} MB of metadata kept")
    return 0


if __name__ == "__main__":
    sys.exit(main())
