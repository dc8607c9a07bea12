"""Entries of the stream `keys.EVENTS`, which every replica of the semantic cache follows.

Fields of a stream entry (bytes to bytes):

    kind=add    entry = a packed `Added`, which is also the string at `keys.entry`
    kind=purge  what = `id` | `tenant` | `model` | `family`; value = hex id or tag; at_ms (since 1970)
    kind=epoch  epoch = the new one: everything older is void

A packed `Added`, integers big endian:

    magic "kE\\x01", epoch (u64), expires (u64 ms since 1970), id (16), partition (32), tag (16), exact (32), tenant tag
    (16), model tag (16), family (8), bytes of embedder (u8), prompt (u8), vector (u16) and text (u32), then those four:
    UTF-8, 0 or 16 bytes, float32 little endian, UTF-8

One field, not thirteen: a replica that starts reads 10^5 of them.
"""

from __future__ import annotations

import itertools
import re
import struct
from dataclasses import dataclass
from typing import Literal, cast

MAX_TEXT_BYTES = 64 * 1024
MAX_DIM = 4096
MAX_EMBEDDER_BYTES = 128
MAX_NUMBER_DIGITS = 16
MAX_EPOCH = 1 << 50
"""Numbers of Redis' scripts are doubles: one more than this still is another number."""

Fields = dict[bytes, bytes]
What = Literal["id", "tenant", "model", "family"]
MAX_PACKED_BYTES = 4 * MAX_DIM + MAX_TEXT_BYTES + 1024
"""No packed entry is larger, so no more than this needs to be read."""

_HEX = re.compile(rb"[0-9a-f]+")
_HEAD = struct.Struct(">3sQQ16s32s16s32s16s16s8sBBHI")
MAGIC = b"kE\x01"
_VALUE_LENGTHS = {"id": 32, "tenant": 32, "model": 32, "family": 16}


@dataclass(frozen=True, slots=True)
class Added:
    """A semantic entry. entry_id: 16 bytes. vector: float32 little endian, as bytes. Tags are hex. The answer is under
    `keys.answer(tag, exact)`, and holds the same entry id for as long as it is this one."""

    entry_id: bytes
    partition: bytes
    tag: str
    exact: str
    text: str
    prompt: bytes
    vector: bytes
    embedder: str
    tenant: str
    model: str
    family: str
    epoch: int
    expires_ms: int

    def pack(self) -> bytes:
        """See the head of this file. Raises ValueError or struct.error for what cannot be one."""
        tails = (self.embedder.encode(), self.prompt, self.vector, self.text.encode())
        tags = [bytes.fromhex(tag) for tag in (self.tag, self.exact, self.tenant, self.model, self.family)]
        head = _HEAD.pack(
            MAGIC, self.epoch, self.expires_ms, self.entry_id, self.partition, *tags, *(len(tail) for tail in tails)
        )
        return b"".join((head, *tails))

    @classmethod
    def unpack(cls, data: object) -> Added:
        """Raises ValueError for what is not an entry; the vector's numbers are the reader's to check."""
        if not isinstance(data, bytes) or len(data) < _HEAD.size:
            raise ValueError("too short for an entry")
        magic, epoch, expires_ms, entry_id, partition, *rest = _HEAD.unpack_from(data)
        lengths = rest[5:]
        if magic != MAGIC or len(data) != _HEAD.size + sum(lengths):
            raise ValueError("not an entry, or not a whole one")
        embedder_bytes, prompt_bytes, vector_bytes, text_bytes = lengths
        if embedder_bytes > MAX_EMBEDDER_BYTES or prompt_bytes not in (0, 16) or text_bytes > MAX_TEXT_BYTES:
            raise ValueError("a field of another length")
        if not vector_bytes or vector_bytes % 4 or vector_bytes > 4 * MAX_DIM:
            raise ValueError("a vector of another length")
        ends = list(itertools.accumulate(lengths, initial=_HEAD.size))
        embedder, prompt, vector, text = (data[start:end] for start, end in itertools.pairwise(ends))
        tag, exact, tenant, model, family = (value.hex() for value in rest[:5])
        return cls(
            entry_id=entry_id,
            partition=partition,
            tag=tag,
            exact=exact,
            text=text.decode(),
            prompt=prompt,
            vector=vector,
            embedder=embedder.decode(),
            tenant=tenant,
            model=model,
            family=family,
            epoch=epoch,
            expires_ms=expires_ms,
        )


@dataclass(frozen=True, slots=True)
class Purged:
    """Entries that are void: by id, tenant, model or family (model and revision)."""

    what: What
    value: str
    at_ms: int

    def hits(self, entry: Added) -> bool:
        """Whether `entry` is among them."""
        own = entry.entry_id.hex() if self.what == "id" else cast(str, getattr(entry, self.what))
        return own == self.value


@dataclass(frozen=True, slots=True)
class Epoch:
    """A new epoch."""

    epoch: int


Event = Added | Purged | Epoch


def encode(event: Event) -> Fields:
    """Fields for XADD."""
    if isinstance(event, Added):
        return {b"kind": b"add", b"entry": event.pack()}
    if isinstance(event, Purged):
        fields = {b"kind": b"purge", b"what": event.what.encode(), b"value": event.value.encode()}
        return fields | {b"at_ms": b"%d" % event.at_ms}
    return {b"kind": b"epoch", b"epoch": b"%d" % event.epoch}


def decode(fields: object) -> Event | None:
    """An event from Redis, None when it is none that this version knows: it is skipped."""
    if not isinstance(fields, dict):
        return None
    try:
        kind = fields[b"kind"]
        if kind == b"add":
            return Added.unpack(fields[b"entry"])
        if kind == b"purge":
            what = fields[b"what"].decode()
            return Purged(cast(What, what), _hex(fields[b"value"], _VALUE_LENGTHS[what]), _number(fields[b"at_ms"]))
        if kind == b"epoch":
            epoch = _number(fields[b"epoch"])
            return Epoch(epoch) if epoch <= MAX_EPOCH else None
        return None
    except (KeyError, ValueError, TypeError, AttributeError):
        return None


def _hex(value: bytes, length: int) -> str:
    if len(value) != length or not _HEX.fullmatch(value):
        raise ValueError("not a tag")
    return value.decode()


def _number(value: bytes) -> int:
    if not 0 < len(value) <= MAX_NUMBER_DIGITS or not value.isdigit():
        raise ValueError("not a number")
    return int(value)
