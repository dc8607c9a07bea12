"""Unpack the ELF kernel from a bzImage: unpack_kernel.py VMLINUZ VMLINUX."""

import bz2
import lzma
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path


def zstd(data: bytes) -> bytes:
    """By the command: Python of 3.11 has none."""
    return subprocess.run(["zstd", "-dc"], input=data, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout


PACKERS: tuple[tuple[bytes, Callable[[bytes], bytes]], ...] = (
    (b"\xfd7zXZ\x00", lambda data: lzma.LZMADecompressor().decompress(data)),
    (b"\x1f\x8b\x08", lambda data: zlib.decompressobj(31).decompress(data)),
    (b"\x28\xb5\x2f\xfd", zstd),
    (b"BZh", lambda data: bz2.BZ2Decompressor().decompress(data)),
)


def unpack(image: bytes) -> bytes:
    """The ELF file inside. Raises SystemExit where there is none."""
    for magic, unpacked in PACKERS:
        at = image.find(magic)
        while at >= 0:
            try:
                data = unpacked(image[at:])
            except (lzma.LZMAError, zlib.error, OSError):
                data = b""
            if data.startswith(b"\x7fELF"):
                return data
            at = image.find(magic, at + 1)
    raise SystemExit("no ELF kernel in the image")


if __name__ == "__main__":
    Path(sys.argv[2]).write_bytes(unpack(Path(sys.argv[1]).read_bytes()))
