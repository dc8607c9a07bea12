"""What leader and ranks say to one another: frames on a socket pair, or over TCP where a rank is on another host; plain
structs and JSON, every size bounded.

A frame is u32 length of the body, u8 kind, 3 bytes of zero, then the body. Leader to rank: SETUP, BIND, JOIN, STEP,
SLOT (a step that lies in shared memory: its u64 number, see `slots`), STOP; rank to leader: HELLO (torch is there),
READY (weights are loaded), BOUND, DONE (a step; not where steps are launched ahead), FAILED (and it ends). What the
leader and another host's agent say is in `hosts`.

The body of STEP, little-endian: u64 step, u32 slices, u32 copies, u32 flags (1: layer by layer), u32 zero; int64
(slices, 6): sequence id, start, tokens, pages, tokens that are sampled from the last position's logits, 0 without
prompt logprobs and else 1 + their rows; then int32: copies as (source, destination), the tokens of all slices (-1:
PENDING), their pages. A rank takes the same path through a step as the leader: whatever that hangs on is here.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import socket
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvmesh.engine.runner import SampleInput, SamplingParams, Slice, StepBatch
from kvmesh.errors import DataLoss, TooLarge, Unavailable

MAX_FRAME_BYTES = 64 << 20
# Of everything but a step.
MAX_NOTE_BYTES = 1 << 20
_HEADER = struct.Struct("<IB3x")
_STEP = struct.Struct("<QIIII")
_LAYERED = 1
_COLUMNS = 6
# A rank only needs to know how many tokens a row gets: the leader samples them.
_SAMPLED = (SampleInput(SamplingParams(), 0, 0, (), ()),)
_MAX_SAMPLES = 1 << 16
# A frozen dataclass sets its fields through `object.__setattr__`, at twice the price; a step has hundreds of slices.
_FIELDS = tuple(getattr(Slice, field.name).__set__ for field in dataclasses.fields(Slice))


class Kind(enum.IntEnum):
    """Kinds of frames."""

    SETUP = 1
    HELLO = 2
    READY = 3
    BIND = 4
    BOUND = 5
    JOIN = 6
    STEP = 7
    DONE = 8
    FAILED = 9
    STOP = 10
    SLOT = 11
    ENTER = 12
    ATTACH = 13
    WELCOME = 14
    REFUSED = 15
    RANKS = 16
    EXITED = 17
    LEAVING = 18
    UP = 19


class Frame(NamedTuple):
    """One message."""

    kind: Kind
    body: bytes

    def note(self) -> dict[str, Any]:
        """The body as a JSON object. Raises DataLoss."""
        try:
            value = json.loads(self.body)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise DataLoss(f"{self.kind.name} is no JSON object")
        return value


def send_frame(sock: socket.socket, kind: Kind, body: bytes = b"") -> None:
    """Send one frame. Raises TooLarge, OSError."""
    if len(body) > MAX_FRAME_BYTES:
        raise TooLarge(f"{kind.name} of {len(body)} bytes, at most {MAX_FRAME_BYTES} are allowed")
    sock.sendall(_HEADER.pack(len(body), kind) + body, socket.MSG_NOSIGNAL)


def send_note(sock: socket.socket, kind: Kind, note: Mapping[str, Any]) -> None:
    """`send_frame` with a JSON object."""
    send_frame(sock, kind, json.dumps(note).encode())


def recv_frame(sock: socket.socket, largest: int = MAX_FRAME_BYTES) -> Frame | None:
    """The next frame, None at the end of the stream. largest: bytes of a body, of whatever kind. Raises DataLoss,
    TooLarge, OSError."""
    header = _exactly(sock, _HEADER.size)
    if header is None:
        return None
    length, number = _HEADER.unpack(header)
    try:
        kind = Kind(number)
    except ValueError:
        raise DataLoss(f"a frame of unknown kind {number}") from None
    limit = min(largest, MAX_FRAME_BYTES if kind is Kind.STEP else MAX_NOTE_BYTES)
    if length > limit:
        raise TooLarge(f"{kind.name} of {length} bytes, at most {limit} are allowed")
    body = _exactly(sock, length) if length else b""
    if body is None:
        raise DataLoss("the stream ended inside a frame")
    return Frame(kind, body)


def _exactly(sock: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        data = sock.recv(min(count - len(parts), 1 << 20))
        if not data:
            if parts:
                raise DataLoss("the stream ended inside a frame")
            return None
        parts += data
    return bytes(parts)


def expect(frame: Frame | None, kind: Kind) -> Frame:
    """The frame, if it is of that kind. Raises Unavailable at the end of the stream, DataLoss for another."""
    if frame is None:
        raise Unavailable("the other side is gone")
    if frame.kind is not kind:
        raise DataLoss(f"{frame.kind.name} came where {kind.name} was due")
    return frame


def pack_step(batch: StepBatch, page_size: int, layered: bool = False) -> bytes:
    """The body of STEP. layered: the leader is told of each layer. Raises TooLarge."""
    slices = batch.slices
    meta: list[int] = []
    columns: list[npt.NDArray[np.int32]] = []
    tables: list[npt.NDArray[np.int32]] = []
    for s in slices:
        count = len(s.token_ids)
        # What was reserved ahead is of no use to a rank.
        table = s.block_table[: -(-(s.start + count) // page_size)]
        scored = 0 if s.prompt_logprobs is None else count + (s.next_token is not None)
        meta += (s.seq_id, s.start, count, len(table), len(s.samples), scored)
        columns.append(s.token_ids)
        tables.append(table)
    if batch.copies:
        columns.insert(0, np.array(batch.copies, dtype=np.int32).reshape(-1))
    columns += tables
    body = b"".join(
        [
            _STEP.pack(batch.step, len(slices), len(batch.copies), _LAYERED if layered else 0, 0),
            np.array(meta, dtype="<i8").tobytes(),
            np.concatenate(columns, dtype="<i4", casting="same_kind").tobytes() if columns else b"",
        ]
    )
    if len(body) > MAX_FRAME_BYTES:
        raise TooLarge(f"a step of {len(body)} bytes, at most {MAX_FRAME_BYTES} are allowed: set token_budget lower")
    return body


def unpack_step(body: bytes) -> StepBatch:
    """Inverse of `pack_step`, but for what only the sampler needs. Raises DataLoss."""
    if len(body) < _STEP.size:
        raise DataLoss("a step is cut")
    step, count, num_copies, *_ = _STEP.unpack_from(body)
    at = _STEP.size
    if len(body) < at + count * _COLUMNS * 8 + num_copies * 8:
        raise DataLoss("a step is cut")
    meta = np.frombuffer(body, dtype="<i8", count=count * _COLUMNS, offset=at).reshape(count, _COLUMNS)
    rest = np.frombuffer(body, dtype="<i4", offset=at + meta.nbytes) if len(body) % 4 == 0 else None
    if rest is None or (meta < 0).any() or (meta[:, 2:4] > len(rest)).any() or (meta[:, 4] > _MAX_SAMPLES).any():
        raise DataLoss("a step is malformed")
    if 2 * num_copies + int(meta[:, 2:4].sum()) != len(rest):
        raise DataLoss("a step's columns do not add up")
    copies = [(source, target) for source, target in rest[: 2 * num_copies].reshape(-1, 2).tolist()]
    token_at = 2 * num_copies
    page_at = token_at + int(meta[:, 2].sum())
    slices = []
    set_seq_id, set_tokens, set_start, set_table, set_samples, set_scored, set_next = _FIELDS
    for seq_id, start, tokens, pages, sampled, scored in meta.tolist():
        token_end, page_end = token_at + tokens, page_at + pages
        s = object.__new__(Slice)
        set_seq_id(s, seq_id)
        set_tokens(s, rest[token_at:token_end])
        set_start(s, start)
        set_table(s, rest[page_at:page_end])
        set_samples(s, _SAMPLED if sampled == 1 else _SAMPLED * sampled)
        set_scored(s, 0 if scored else None)
        set_next(s, 0 if scored == tokens + 1 else None)
        slices.append(s)
        token_at, page_at = token_end, page_end
    return StepBatch(step, slices, copies)


def is_layered(body: bytes) -> bool:
    """Whether the leader is told of each layer of a step that was unpacked."""
    return bool(_STEP.unpack_from(body)[3] & _LAYERED)
