"""The scripted runner's KV bytes: each tells for which token, position and layer it was written.

A page slot of layer l, head h, K or V is `head_dim` elements, seen as 64-bit words. Word 0 of (first layer, head 0, K)
holds position << 32 | token + 1 in plain, so that a reader without the tokens can still judge; every other word is a
hash of that and of its own place. Fresh (zero) memory is therefore never valid.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvmesh.errors import InvalidArgument
from kvmesh.kv.layout import KvLayout

Words = npt.NDArray[np.uint64]

_M1, _M2, _M3 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mix(values: Words) -> Words:
    """A 64-bit finalizer (splitmix64's), elementwise; wraps."""
    with np.errstate(over="ignore"):
        values = values + _M1
        values = (values ^ (values >> np.uint64(30))) * _M2
        values = (values ^ (values >> np.uint64(27))) * _M3
        return values ^ (values >> np.uint64(31))


class ScriptedKv:
    """Views of one layer group's region (kind full, tp 1) and what is written into it."""

    def __init__(self, layout: KvLayout, regions: Mapping[str, memoryview]) -> None:
        if len(layout.groups) != 1 or layout.tp != 1:
            raise InvalidArgument("the scripted runner has one layer group and no tensor parallelism")
        group = layout.groups[0]
        layers, pages, heads, two, page_size, head_dim = layout.region_shape(group)
        words = head_dim * layout.itemsize // 8
        if words < 1 or head_dim * layout.itemsize % 8:
            raise InvalidArgument("a head's bytes must be a multiple of 8")
        flat = np.frombuffer(regions[group.name], np.uint64, count=layout.region_bytes(group) // 8)
        self.page_size = page_size
        self.num_layers = layers
        self._kv = flat.reshape(layers, pages, heads, two, page_size, words)
        shape = (layers, heads, two, words)
        self._salt = mix(np.arange(int(np.prod(shape)), dtype=np.uint64)).reshape(shape)

    def write(self, layer: int, table: npt.NDArray[np.int32], start: int, tokens: npt.NDArray[np.int32]) -> None:
        """One layer's KV of tokens at positions start …"""
        positions = np.arange(start, start + len(tokens))
        pages, slots = table[positions // self.page_size], positions % self.page_size
        self._kv[layer, pages, :, :, slots] = self._expected(_keys(positions, tokens), slice(layer, layer + 1))[0]

    def copy(self, src: int, dst: int) -> None:
        """A whole page, all layers."""
        self._kv[:, dst] = self._kv[:, src]

    def wrong_positions(
        self, table: npt.NDArray[np.int32], first: int, end: int, tokens: npt.NDArray[np.int32] | None
    ) -> npt.NDArray[np.int64]:
        """Positions in [first, end) whose bytes are not those of tokens[first:end] (None: of any token there)."""
        if end <= first:
            return np.empty(0, np.int64)
        positions = np.arange(first, end)
        pages, slots = table[positions // self.page_size], positions % self.page_size
        found = self._kv[:, pages, :, :, slots]  # (tokens, layers, heads, 2, words)
        plain = found[:, 0, 0, 0, 0]
        keys = _keys(positions, tokens[first:end]) if tokens is not None else plain
        wrong = (plain != keys) | (plain >> np.uint64(32) != positions.astype(np.uint64))
        wrong |= (plain & np.uint64(0xFFFFFFFF)) == 0
        expected = np.moveaxis(self._expected(keys, slice(None)), 1, 0)
        wrong |= (found != expected).any(axis=(1, 2, 3, 4))
        bad: npt.NDArray[np.int64] = positions[wrong]
        return bad

    def _expected(self, keys: Words, layers: slice) -> Words:
        """(layers, tokens, heads, 2, words)"""
        salt = self._salt[layers]
        words = mix(keys[None, :, None, None, None] ^ salt[:, None])
        if layers.start in (None, 0):
            words[0, :, 0, 0, 0] = keys
        return words


def _keys(positions: npt.NDArray[np.int64], tokens: npt.NDArray[np.int32]) -> Words:
    return positions.astype(np.uint64) << np.uint64(32) | (tokens.astype(np.uint64) + np.uint64(1))
