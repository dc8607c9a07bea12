"""A bounds-checked safetensors reader over mmap. Torch-free; bf16 comes as uint16, since numpy has none."""

from __future__ import annotations

import contextlib
import json
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kvmesh.errors import DataLoss, InvalidArgument, NotFound
from kvmesh.loading.checkpoint import RawTensor

MAX_HEADER_BYTES = 100 << 20
MAX_DIMS = 8

_DTYPES: dict[str, tuple[Literal["fp32", "fp16", "bf16"], str]] = {
    "F32": ("fp32", "<f4"),
    "F16": ("fp16", "<f2"),
    "BF16": ("bf16", "<u2"),
}


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsFile:
    """One file: 8 bytes of header length, a JSON header, the data. NotFound, or DataLoss when truncated or corrupt."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                size = file.seek(0, 2)
                if size < 8:
                    raise DataLoss(f"{path}: the safetensors header needs 8 bytes, the file has {size} (truncated)")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise NotFound(f"{path}: no such model file") from None
        except OSError as error:
            raise NotFound(f"{path}: cannot be read: {error.strerror}") from None
        try:
            self.entries = self._parse(size)
        except BaseException:
            self._map.close()
            raise

    def _parse(self, size: int) -> dict[str, _Entry]:
        length = int.from_bytes(self._map[:8], "little")
        if length > MAX_HEADER_BYTES or 8 + length > size:
            raise DataLoss(
                f"{self.path}: the header says {length} bytes, the file has {size - 8} after it (truncated or corrupt)"
            )
        try:
            header = json.loads(self._map[8 : 8 + length])
        except (ValueError, RecursionError) as error:
            raise DataLoss(f"{self.path}: the header is not JSON (corrupt): {error}") from None
        if not isinstance(header, dict):
            raise DataLoss(f"{self.path}: the header is no JSON object (corrupt)")
        base = 8 + length
        return {name: self._entry(name, value, base, size) for name, value in header.items() if name != "__metadata__"}

    def _entry(self, name: str, value: Any, base: int, size: int) -> _Entry:
        try:
            dtype, shape = value["dtype"], tuple(value["shape"])
            begin, end = value["data_offsets"]
            numbers = (*shape, begin, end)
        except (TypeError, KeyError, ValueError):
            raise DataLoss(f"{self.path}: the header entry of {name} is malformed (corrupt)") from None
        # type, not isinstance: true and false are ints in Python. No extent is longer than the file, also where another
        # one is 0; numpy could not even say such a shape.
        possible = all(type(n) is int and 0 <= n <= size for n in numbers)
        if not possible or begin > end or len(shape) > MAX_DIMS:
            raise DataLoss(f"{self.path}: the header entry of {name} has impossible sizes (corrupt)")
        if base + end > size:
            raise DataLoss(
                f"{self.path}: tensor {name} ends at byte {base + end}, the file has {size}"
                f" (truncated: {base + end - size} bytes missing)"
            )
        return _Entry(str(dtype), shape, base + begin, end - begin)

    def read(self, name: str) -> RawTensor:
        """One tensor as a read-only view of the map."""
        entry = self.entries.get(name)
        if entry is None:
            raise DataLoss(f"{self.path}: tensor {name} is missing")
        if entry.dtype not in _DTYPES:
            raise InvalidArgument(f"{self.path}: tensor {name} is {entry.dtype}; supported: {', '.join(_DTYPES)}")
        kind, code = _DTYPES[entry.dtype]
        count = 1
        for extent in entry.shape:
            count *= extent
        if count * np.dtype(code).itemsize != entry.nbytes:
            raise DataLoss(f"{self.path}: tensor {name} {entry.shape} does not fill its {entry.nbytes} bytes (corrupt)")
        data = np.frombuffer(self._map, dtype=code, count=count, offset=entry.offset).reshape(entry.shape)
        return RawTensor(data, kind, entry.nbytes)

    def close(self) -> None:
        """Unmap; a view still alive keeps the map alive."""
        with contextlib.suppress(BufferError):
            self._map.close()
