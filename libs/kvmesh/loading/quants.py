"""ggml block formats → float32, vectorized in numpy. Torch-free.

Each function takes the stored bytes as uint8 (blocks, bytes per block) and returns float32 (blocks, block elements).
The formats are ggml's: a block holds one or two fp16 scales and packed integers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvmesh.errors import InvalidArgument

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def _half(block: Bytes, at: int) -> Floats:
    """The fp16 at byte `at` of each block, as float32 (blocks, 1)."""
    return np.ascontiguousarray(block[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """(blocks, n) → (blocks, 2n): all low nibbles, then all high ones."""
    return np.concatenate([packed & np.uint8(0x0F), packed >> np.uint8(4)], axis=1)


def _fifth_bits(block: Bytes, at: int) -> Bytes:
    """The 32 high bits of Q5 blocks, as 0 or 16: (blocks, 32)."""
    bits = np.unpackbits(np.ascontiguousarray(block[:, at : at + 4]), axis=1, bitorder="little")
    return bits << np.uint8(4)


def _scaled(q: npt.NDArray[np.generic], scale: Floats, shift: Floats | None = None) -> Floats:
    out = q.astype(np.float32)
    out *= scale
    if shift is not None:
        out += shift
    return out


def _q4_0(block: Bytes) -> Floats:
    return _scaled(_nibbles(block[:, 2:]).view(np.int8) - np.int8(8), _half(block, 0))


def _q4_1(block: Bytes) -> Floats:
    return _scaled(_nibbles(block[:, 4:]), _half(block, 0), _half(block, 2))


def _q5_0(block: Bytes) -> Floats:
    q = _nibbles(block[:, 6:]) | _fifth_bits(block, 2)
    return _scaled(q.view(np.int8) - np.int8(16), _half(block, 0))


def _q5_1(block: Bytes) -> Floats:
    q = _nibbles(block[:, 8:]) | _fifth_bits(block, 4)
    return _scaled(q, _half(block, 0), _half(block, 2))


def _q8_0(block: Bytes) -> Floats:
    return _scaled(block[:, 2:].view(np.int8), _half(block, 0))


def _q4_k(block: Bytes) -> Floats:
    """256 elements in 8 sub-blocks with 6-bit scales and mins, packed in 12 bytes."""
    d, dmin = _half(block, 0), _half(block, 2)
    low, mid, high = block[:, 4:8], block[:, 8:12], block[:, 12:16]
    scale = np.concatenate([low & 0x3F, (high & 0x0F) | ((low >> 2) & 0x30)], axis=1)
    minimum = np.concatenate([mid & 0x3F, (high >> 4) | ((mid >> 2) & 0x30)], axis=1)
    packed = block[:, 16:144].reshape(-1, 4, 1, 32)
    q = np.concatenate([packed & 0x0F, packed >> 4], axis=2).reshape(-1, 8, 32)
    out = _scaled(q, (d * scale)[:, :, None], -(dmin * minimum)[:, :, None])
    return out.reshape(-1, 256)


def _q6_k(block: Bytes) -> Floats:
    """256 elements: low 4 bits (128 bytes), high 2 bits (64), int8 scales of 16 sub-blocks, one fp16."""
    low, high = block[:, :128].reshape(-1, 2, 64), block[:, 128:192].reshape(-1, 2, 32)
    scale = _half(block, 208) * block[:, 192:208].view(np.int8).astype(np.float32)
    nibble = np.concatenate([low & 0x0F, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    pair = np.stack([(high >> s) & 3 for s in (0, 2, 4, 6)], axis=2)
    q = (nibble | (pair << 4)).view(np.int8) - np.int8(32)
    return _scaled(q.reshape(-1, 16, 16), scale[:, :, None]).reshape(-1, 256)


_DEQUANTIZE: dict[str, Callable[[Bytes], Floats]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
# 2^13 blocks at a time keep a chunk's temporaries in cache.
_CHUNK_BLOCKS = 1 << 13


def dequantize(raw: Bytes, type_name: str, block_bytes: int, shape: tuple[int, ...]) -> Floats:
    """Stored bytes of a tensor → float32 of `shape`. InvalidArgument for an unknown type."""
    if type_name == "F32":
        return raw.view("<f4").astype(np.float32).reshape(shape)
    if type_name == "F16":
        return raw.view("<f2").astype(np.float32).reshape(shape)
    if type_name == "BF16":
        return (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32).reshape(shape)
    if type_name not in _DEQUANTIZE:
        raise InvalidArgument(f"GGUF tensor type {type_name} is not supported")
    convert = _DEQUANTIZE[type_name]
    blocks = raw.reshape(-1, block_bytes)
    out = np.empty(shape, dtype=np.float32)
    if not len(blocks):
        return out
    flat = out.reshape(len(blocks), -1)
    # A corrupt scale may be inf or NaN: that is the file's value, not a warning of ours.
    with np.errstate(invalid="ignore", over="ignore"):
        for at in range(0, len(blocks), _CHUNK_BLOCKS):
            flat[at : at + _CHUNK_BLOCKS] = convert(blocks[at : at + _CHUNK_BLOCKS])
    return out
