"""Names for prefixes: seeds and chained block hashes, the same in engine, router and gateway.

hash[0] = H(seed, tokens[0:B]), hash[i] = H(hash[i-1], tokens[iB:(i+1)B]), H = 128-bit BLAKE2b. A hash therefore names a
whole prefix under one seed. Each kind of input has its own personalization and every variable field its length, so no
two different inputs are the same bytes. Changing anything here changes the golden vectors and needs a new version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvmesh.errors import InvalidArgument

HASH_BYTES = 16

Tokens = Sequence[int] | npt.NDArray[np.integer]

# Routers know prefixes by every 8th block: an eighth of the memory and of the events for a coarser match.
CHAIN_STRIDE = 8

_BASE = b"kvmesh-base-1"
_REQUEST = b"kvmesh-request-1"
_BLOCK = b"kvmesh-block-1"
_PROMPT = b"kvmesh-prompt-1"


def base_seed(model: str, revision: str, kv_dtype: str, policies: Mapping[str, str] | None = None) -> bytes:
    """16 bytes for everything of a worker that changes what KV a token has: workers publish it.

    policies: name → value of whatever else alters the cache (rope scaling, quantized KV, …); order does not matter.
    """
    fields = [model, revision, kv_dtype]
    for name, value in sorted((policies or {}).items()):
        fields += [name, value]
    return _digest(_BASE, [field.encode() for field in fields])


def request_seed(base_seed: bytes, adapter: str = "", salt: str = "") -> bytes:
    """16 bytes for one request: the worker's base seed, the adapter's name and the cache salt (tenant isolation).

    Empty means none. Raises InvalidArgument if the base seed is not 16 bytes.
    """
    _check_seed(base_seed)
    return _digest(_REQUEST, [base_seed, adapter.encode(), salt.encode()])


def token_bytes(tokens: Tokens) -> bytes:
    """The tokens as little-endian u32. Raises InvalidArgument for one that does not fit."""
    raw = np.asarray(tokens)
    if raw.size == 0:
        return b""
    if raw.ndim != 1 or raw.dtype.kind not in "iu" or int(raw.min()) < 0 or int(raw.max()) > 0xFFFFFFFF:
        raise InvalidArgument("token ids must be a flat list of integers in 0..2**32-1")
    return raw.astype("<u4", copy=False).tobytes()


def hash_block(parent: bytes, block: bytes) -> bytes:
    """One link of the chain: `parent` is the seed or the hash before, `block` the block's `token_bytes`."""
    return hashlib.blake2b(parent + block, digest_size=HASH_BYTES, person=_BLOCK).digest()


def block_hashes(seed: bytes, tokens: Tokens, block_size: int) -> list[bytes]:
    """The chained hashes of the whole blocks of `tokens`; the rest that fills no block has none.

    seed: from `request_seed`. About 1 µs a block. Raises InvalidArgument.
    """
    _check_seed(seed)
    if block_size < 1:
        raise InvalidArgument(f"block_size must be at least 1, got {block_size}")
    raw = token_bytes(tokens)
    step = 4 * block_size
    hashes: list[bytes] = []
    for at in range(0, len(raw) - step + 1, step):
        seed = hash_block(seed, raw[at : at + step])
        hashes.append(seed)
    return hashes


def chain_hashes(seed: bytes, tokens: Tokens, block_size: int) -> bytes:
    """The hashes of blocks 8, 16, … (counted from 1), 16 bytes each, packed: what a router is told of a prompt.

    seed: from `request_seed`. Raises InvalidArgument.
    """
    return b"".join(block_hashes(seed, tokens, block_size)[CHAIN_STRIDE - 1 :: CHAIN_STRIDE])


def prompt_digest(tokens: Tokens) -> bytes:
    """16 bytes for a whole prompt, token by token, whoever serves it. Raises InvalidArgument."""
    return hashlib.blake2b(token_bytes(tokens), digest_size=HASH_BYTES, person=_PROMPT).digest()


def _digest(person: bytes, fields: Sequence[bytes]) -> bytes:
    digest = hashlib.blake2b(digest_size=HASH_BYTES, person=person)
    for field in fields:
        digest.update(len(field).to_bytes(8, "little") + field)
    return digest.digest()


def _check_seed(seed: bytes) -> None:
    if len(seed) != HASH_BYTES:
        raise InvalidArgument(f"a seed has {HASH_BYTES} bytes, got {len(seed)}")
