"""Entries of the stream `keys.EVENTS`, which every replica of the semantic cache follows.

Fields of a stream entry (bytes to bytes); an `add` without its `kind` is also what the hash `keys.entry` holds:

    kind=add    id (16 bytes) partition (32) tag exact (hex) text (UTF-8) prompt (16 or none) vector (float32, little
                endian) embedder tenant (tag, hex) model (tag, hex) family (tag, hex) epoch expires_ms (since 1970)
    kind=purge  what = `id` | `tenant` | `model` | `family`; value = hex id or tag; at_ms (since 1970)
    kind=epoch  epoch = the new one: everything older is void
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

MAX_TEXT_BYTES = 64 * 1024
MAX_DIM = 4096
MAX_EMBEDDER_BYTES = 128
MAX_NUMBER_DIGITS = 16

Fields = dict[bytes, bytes]
What = Literal["id", "tenant", "model", "family"]
_HEX = re.compile(rb"[0-9a-f]+")
_LENGTHS = {"tag": 32, "exact": 64, "tenant": 32, "model": 32, "family": 16}
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

    def to_fields(self) -> Fields:
        """As the hash holds it; an event has `kind` besides (`encode`)."""
        return {
            b"id": self.entry_id,
            b"partition": self.partition,
            b"tag": self.tag.encode(),
            b"exact": self.exact.encode(),
            b"text": self.text.encode(),
            b"prompt": self.prompt,
            b"vector": self.vector,
            b"embedder": self.embedder.encode(),
            b"tenant": self.tenant.encode(),
            b"model": self.model.encode(),
            b"family": self.family.encode(),
            b"epoch": b"%d" % self.epoch,
            b"expires_ms": b"%d" % self.expires_ms,
        }

    @classmethod
    def from_fields(cls, fields: Mapping[bytes, bytes]) -> Added:
        """Raises ValueError or KeyError for what is not an entry; the vector's numbers are the reader's to check."""
        entry_id, partition = fields[b"id"], fields[b"partition"]
        prompt, vector = fields[b"prompt"], fields[b"vector"]
        if len(entry_id) != 16 or len(partition) != 32 or len(prompt) not in (0, 16):
            raise ValueError("an id, a partition or a prompt digest of another length")
        if not vector or len(vector) % 4 or len(vector) > 4 * MAX_DIM:
            raise ValueError("a vector of another length")
        if len(fields[b"text"]) > MAX_TEXT_BYTES or len(fields[b"embedder"]) > MAX_EMBEDDER_BYTES:
            raise ValueError("a text that is too long")
        tags = {name: _hex(fields[name.encode()], length) for name, length in _LENGTHS.items()}
        return cls(
            entry_id=entry_id,
            partition=partition,
            text=fields[b"text"].decode(),
            prompt=prompt,
            vector=vector,
            embedder=fields[b"embedder"].decode(),
            epoch=_number(fields[b"epoch"]),
            expires_ms=_number(fields[b"expires_ms"]),
            **tags,
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
        return {b"kind": b"add", **event.to_fields()}
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
            return Added.from_fields(fields)
        if kind == b"purge":
            what = fields[b"what"].decode()
            return Purged(cast(What, what), _hex(fields[b"value"], _VALUE_LENGTHS[what]), _number(fields[b"at_ms"]))
        return Epoch(_number(fields[b"epoch"])) if kind == b"epoch" else None
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
