"""Where each byte of the KV cache lies: formulas, no memory.

One region per engine rank and layer group, indexed region[layer][page]. A page of one layer is, by the group's kind:

    full  (kv_heads of the rank, 2, page_size, head_dim)   K and V of a head side by side, so that any range of heads of
                                                           a page is one contiguous write
    mla   (page_size, kv_lora_rank + rope_dim)             the same on every rank
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmesh.errors import InvalidArgument
from kvmesh.kv.sharding import check_sharding

LAYOUT_VERSION = 1
DTYPE_BYTES: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8_e4m3": 1}
# Types whose range is too small for K and V as they are: stored is K / k_scale, V / v_scale.
SCALED_DTYPES = frozenset({"fp8_e4m3"})

# Bounds on what a peer may claim, checked before anything is sized by it.
MAX_GROUPS = 64
MAX_LAYERS = 4096
MAX_PAGES = 1 << 31
MAX_PAGE_SIZE = 1 << 16
MAX_HEADS = 1 << 16
MAX_HEAD_DIM = 1 << 16
MAX_TP = 1 << 12


@dataclass(frozen=True, slots=True)
class KvGroup:
    """A set of layers that share one page list.

    layers: the model's layer numbers, ascending; the i-th of them is `layer_index` i inside the group's region.
    kv_heads: KV heads of the whole model, not of a rank; `KvLayout.tp` divides or replicates them.
    Kind "mla": head_dim is kv_lora_rank + rope_dim, kv_heads is 1: one head, which each rank holds.
    """

    name: str
    kind: str
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > 64:
            raise InvalidArgument(f"kv group name must have 1..64 characters, got {self.name!r}")
        if self.kind not in _PAGE_SHAPES:
            raise InvalidArgument(f"not implemented: kv group kind {self.kind!r} (known: {', '.join(_PAGE_SHAPES)})")
        if not 1 <= len(self.layers) <= MAX_LAYERS:
            raise InvalidArgument(f"kv group {self.name!r}: 1..{MAX_LAYERS} layers, got {len(self.layers)}")
        if list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise InvalidArgument(f"kv group {self.name!r}: layers must be ascending, distinct and not negative")
        _in_range(f"kv group {self.name!r}: kv_heads", self.kv_heads, 1, MAX_HEADS)
        _in_range(f"kv group {self.name!r}: head_dim", self.head_dim, 1, MAX_HEAD_DIM)
        if self.kind == "mla" and self.kv_heads != 1:
            raise InvalidArgument(f"kv group {self.name!r}: kind mla has one kv head, got {self.kv_heads}")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def planes(self) -> int:
        """Arrays (page_size, head_dim) that a page has for each head: 2 where K and V are apart, else 1."""
        return _PLANES[self.kind]


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The KV memory of one engine: every rank has, for each group, a region of `region_bytes(group)` bytes.

    page_size: tokens a page. tp: ranks; kv_heads must divide by it, or it by kv_heads (heads are then replicated:
    rank r holds head r * kv_heads // tp). A group may be given by name or as the object. Raises InvalidArgument.
    kv_scales: (k_scale, v_scale) of the model, by which stored K and V are multiplied; of SCALED_DTYPES alone.
    """

    version: int
    dtype: str
    page_size: int
    groups: tuple[KvGroup, ...]
    num_pages: int
    tp: int = 1
    kv_scales: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.version != LAYOUT_VERSION:
            raise InvalidArgument(f"kv layout version {self.version} is not known (this is {LAYOUT_VERSION})")
        if self.dtype not in DTYPE_BYTES:
            raise InvalidArgument(f"kv dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        if (self.kv_scales is not None) != (self.dtype in SCALED_DTYPES):
            raise InvalidArgument(f"kv dtype {self.dtype} {'needs' if self.kv_scales is None else 'has no'} kv_scales")
        if self.kv_scales is not None:
            _check_scales(self.kv_scales)
        _in_range("page_size", self.page_size, 1, MAX_PAGE_SIZE)
        _in_range("num_pages", self.num_pages, 1, MAX_PAGES)
        _in_range("tp", self.tp, 1, MAX_TP)
        if not 1 <= len(self.groups) <= MAX_GROUPS:
            raise InvalidArgument(f"a kv layout has 1..{MAX_GROUPS} groups, got {len(self.groups)}")
        names = [group.name for group in self.groups]
        if len(set(names)) != len(names):
            raise InvalidArgument(f"kv group names must be distinct, got {names}")
        layers = [layer for group in self.groups for layer in group.layers]
        if len(set(layers)) != len(layers):
            raise InvalidArgument("a layer is in more than one kv group")
        for group in self.groups:
            check_sharding(f"kv group {group.name!r}", group.kv_heads, self.tp)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def num_layers(self) -> int:
        """Layers over all groups: the doorbell's rings per step."""
        return sum(group.num_layers for group in self.groups)

    def group(self, group: KvGroup | str) -> KvGroup:
        """The group of that name."""
        if isinstance(group, KvGroup):
            return group
        for candidate in self.groups:
            if candidate.name == group:
                return candidate
        raise InvalidArgument(f"no kv group {group!r} in this layout (has {[g.name for g in self.groups]})")

    def locate(self, layer: int) -> tuple[KvGroup, int]:
        """(group, layer_index inside it) of a model layer."""
        for group in self.groups:
            if layer in group.layers:
                return group, group.layers.index(layer)
        raise InvalidArgument(f"layer {layer} is in no kv group")

    def heads_per_rank(self, group: KvGroup | str) -> int:
        """KV heads that one rank holds; 1 where heads are replicated."""
        return max(1, self.group(group).kv_heads // self.tp)

    def page_shape(self, group: KvGroup | str) -> tuple[int, ...]:
        """Elements of one layer of a page on one rank: full (heads_per_rank, 2, page_size, head_dim), mla (page_size,
        head_dim)."""
        group = self.group(group)
        return _PAGE_SHAPES[group.kind](self, group)

    def page_bytes(self, group: KvGroup | str) -> int:
        """Bytes of one layer of a page on one rank."""
        return math.prod(self.page_shape(group)) * self.itemsize

    def layer_stride(self, group: KvGroup | str) -> int:
        """Bytes from a layer to the next in the group's region."""
        return self.num_pages * self.page_bytes(group)

    def page_offset(self, group: KvGroup | str, layer_index: int, page: int) -> int:
        """Byte offset in the group's region; `layer_index` counts inside the group."""
        group = self.group(group)
        _in_range("layer_index", layer_index, 0, group.num_layers - 1)
        _in_range("page", page, 0, self.num_pages - 1)
        return layer_index * self.layer_stride(group) + page * self.page_bytes(group)

    def region_bytes(self, group: KvGroup | str) -> int:
        """Bytes of the group's region on one rank."""
        return self.group(group).num_layers * self.layer_stride(group)

    def region_shape(self, group: KvGroup | str) -> tuple[int, ...]:
        """(layers, num_pages, *page_shape): the shape in which an engine views the region."""
        return (self.group(group).num_layers, self.num_pages, *self.page_shape(group))

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens from a page's start."""
        return -(-num_tokens // self.page_size)

    def fingerprint(self) -> bytes:
        """16 bytes over everything but num_pages and tp: equal where a page of one is a page of the other.

        Engines whose pages differ in size alone can still exchange tokens: `compatible` tells.
        """
        digest = hashlib.blake2b(digest_size=16, person=b"kvmesh-layout")
        fields: list[str] = [
            str(self.version),
            self.dtype,
            str(self.page_size),
            "kv_scales=" + ("none" if self.kv_scales is None else ",".join(map(float.hex, self.kv_scales))),
            str(len(self.groups)),
        ]
        for group in self.groups:
            fields += [group.name, group.kind, ",".join(map(str, group.layers)), str(group.kv_heads)]
            fields += [str(group.head_dim)]
        for text in fields:
            raw = text.encode()
            digest.update(len(raw).to_bytes(4, "little") + raw)
        return digest.digest()

    def kv_fingerprint(self) -> bytes:
        """16 bytes over everything but num_pages, tp and page_size: equal where tokens can be exchanged."""
        return replace(self, page_size=1).fingerprint()

    def to_dict(self) -> dict[str, Any]:
        """Plain types only, so that any codec can carry it."""
        scales = {} if self.kv_scales is None else {"kv_scales": list(self.kv_scales)}
        return {
            "version": self.version,
            "dtype": self.dtype,
            "page_size": self.page_size,
            "num_pages": self.num_pages,
            "tp": self.tp,
            "groups": [
                {
                    "name": group.name,
                    "kind": group.kind,
                    "layers": list(group.layers),
                    "kv_heads": group.kv_heads,
                    "head_dim": group.head_dim,
                }
                for group in self.groups
            ],
            **scales,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> KvLayout:
        """Inverse of `to_dict`; the data may come from a peer, so every field is checked. Raises InvalidArgument."""
        groups = tuple(
            KvGroup(
                name=_text(raw, "name"),
                kind=_text(raw, "kind"),
                layers=tuple(_integer({"layers": layer}, "layers") for layer in _items(raw, "layers", MAX_LAYERS)),
                kv_heads=_integer(raw, "kv_heads"),
                head_dim=_integer(raw, "head_dim"),
            )
            for raw in _items(data, "groups", MAX_GROUPS)
        )
        return cls(
            version=_integer(data, "version"),
            dtype=_text(data, "dtype"),
            page_size=_integer(data, "page_size"),
            groups=groups,
            num_pages=_integer(data, "num_pages"),
            tp=_integer(data, "tp"),
            kv_scales=_scales(data),
        )


def compatible(src: KvLayout, dst: KvLayout) -> str | None:
    """Why KV of `src` cannot be written into `dst`, None where it can.

    version, dtype, kv_scales and the groups (by name: kind, layers, kv_heads, head_dim) must be equal; tp, num_pages
    and page_size are free. Where equality of pages is wanted too, compare fingerprints.
    """
    for name in ("version", "dtype", "kv_scales"):
        if getattr(src, name) != getattr(dst, name):
            return f"{name} is {getattr(src, name)} at the source, {getattr(dst, name)} at the destination"
    sources, targets = ({group.name: group for group in layout.groups} for layout in (src, dst))
    for name in (*sources, *targets):
        if name not in sources or name not in targets:
            return f"kv group {name!r} is not at the {'destination' if name in sources else 'source'}"
        if (reason := group_mismatch(sources[name], targets[name])) is not None:
            return reason
    return None


def group_mismatch(source: KvGroup, target: KvGroup) -> str | None:
    """What differs between two groups of the same name, None for nothing."""
    for name in ("kind", "layers", "kv_heads", "head_dim"):
        here, there = getattr(source, name), getattr(target, name)
        if here != there:
            if name == "layers":
                here, there = f"{len(here)} from {here[0]} on", f"{len(there)} from {there[0]} on"
            return f"kv group {source.name!r}: {name} {here} at the source, {there} at the destination"
    return None


def group_view(buf: Any, layout: KvLayout, group: KvGroup | str) -> npt.NDArray[np.uint8]:
    """A uint8 view (layers, num_pages, page_bytes) of a region's buffer; writable if the buffer is.

    The buffer may be longer than the region. Raises InvalidArgument where it is shorter.
    """
    need = layout.region_bytes(group)
    flat: npt.NDArray[np.uint8] = np.frombuffer(buf, dtype=np.uint8)
    if flat.nbytes < need:
        raise InvalidArgument(f"kv region needs {need} bytes, the buffer has {flat.nbytes}")
    return flat[:need].reshape(layout.group(group).num_layers, layout.num_pages, layout.page_bytes(group))


def _full_page(layout: KvLayout, group: KvGroup) -> tuple[int, ...]:
    return (layout.heads_per_rank(group), 2, layout.page_size, group.head_dim)


def _mla_page(layout: KvLayout, group: KvGroup) -> tuple[int, ...]:
    return (layout.page_size, group.head_dim)


# One entry per kind in both: a further kind adds its page's shape, nothing else changes.
_PAGE_SHAPES: Mapping[str, Callable[[KvLayout, KvGroup], tuple[int, ...]]] = {"full": _full_page, "mla": _mla_page}
_PLANES: Mapping[str, int] = {"full": 2, "mla": 1}


def _in_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidArgument(f"{name} must be in {low}..{high}, got {value}")


def _field(data: object, key: str) -> object:
    if not isinstance(data, Mapping) or key not in data:
        raise InvalidArgument(f"kv layout lacks {key!r}")
    return data[key]


def _integer(data: object, key: str) -> int:
    value = _field(data, key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgument(f"kv layout: {key!r} must be an integer")
    return value


def _text(data: object, key: str) -> str:
    value = _field(data, key)
    if not isinstance(value, str):
        raise InvalidArgument(f"kv layout: {key!r} must be a string")
    return value


def _check_scales(scales: tuple[float, float]) -> None:
    if not (isinstance(scales, tuple) and len(scales) == 2 and all(isinstance(scale, float) for scale in scales)):
        raise InvalidArgument("kv_scales must be two floats")
    if not all(math.isfinite(scale) and scale > 0 for scale in scales):
        raise InvalidArgument(f"kv_scales must be finite and positive, got {scales}")


def _scales(data: Mapping[str, Any]) -> tuple[float, float] | None:
    if data.get("kv_scales") is None:
        return None
    values = _items(data, "kv_scales", 2)
    if len(values) != 2 or any(isinstance(value, bool) or not isinstance(value, (int, float)) for value in values):
        raise InvalidArgument("kv layout: 'kv_scales' must be two numbers")
    try:
        return float(values[0]), float(values[1])  # type: ignore[arg-type]
    except OverflowError:
        raise InvalidArgument("kv layout: 'kv_scales' out of range") from None


def _items(data: object, key: str, limit: int) -> Sequence[object]:
    value = _field(data, key)
    if not isinstance(value, (list, tuple)) or len(value) > limit:
        raise InvalidArgument(f"kv layout: {key!r} must be a list of at most {limit}")
    return value
