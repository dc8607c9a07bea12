"""The writer's transfers: which pages may leave, what has been posted, when nothing is in flight. Pure: no clock, no
thread, no socket; the mover (or a test) drives it and an `Outbound` does the moving.

    running ──all bytes written──▶ done
       │ cancel, abort, a failed write, the link breaks
       ▼
    stopping ──nothing outstanding──▶ drained

A page of the source is claimed once, by a step record, by `send_pages` or as ready at the start, and its tokens are
posted once per layer: nothing is ever posted again within a generation. Where the destination's pages have another size
tokens decide: a claim moves those of its pages, into parts of pages over there.
"""

from __future__ import annotations

import enum
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvmesh.errors import InvalidArgument, KvmeshError
from kvmesh.kv.layout import KvLayout
from kvmesh.kv.planner import Column, plan
from kvmesh.kv.ring import StepRecord
from kvmesh.transfer.immediate import unpack
from kvmesh.transfer.tail import tail_feeds
from kvmesh.transfer.transports.base import Completion, Outbound, Write

# A longer run would keep a cancel waiting, and other transfers of the same thread.
MAX_RUN_BYTES = 1 << 20
# A write that has begun runs to its end, also when it is aborted.
MAX_WRITE_BYTES = 8 << 20
MAX_WRITE_RUNS = 8192


class SendState(enum.Enum):
    RUNNING = "running"
    STOPPING = "stopping"
    OVER = "over"


class TailCopy(NamedTuple):
    """A row of a tail buffer at either end. row_bytes is the same at both."""

    src_row: int
    dst_row: int
    row_bytes: int


@dataclass(slots=True, eq=False)
class Send:
    """One transfer: tokens [first_token, end_token) of the sequence, and rows of tail buffers.

    src_pages, dst_pages: per group, page numbers; a list's first page has token first_token, at its start where it is
    the destination's. Where page sizes differ, so do the lists' lengths. end_token None: to the destination lists' end.
    kept: groups of which only these positions in the source's list are sent, compacted, once all pages are claimed.
    src_region, dst_region: (group or tail, rank) to the region's index at either end. expected: bytes of all of it.
    Raises InvalidArgument where lists and tokens do not fit.
    """

    transfer_id: int
    immediate: int
    outbound: Outbound
    src_layout: KvLayout
    dst_layout: KvLayout
    src_pages: Mapping[str, Sequence[int]]
    dst_pages: Mapping[str, Sequence[int]]
    src_region: Mapping[tuple[str, int], int]
    dst_region: Mapping[tuple[str, int], int]
    expected: int
    first_token: int = 0
    end_token: int | None = None
    kept: Mapping[str, Sequence[int]] = field(default_factory=dict)
    tails: Mapping[str, TailCopy] = field(default_factory=dict)
    context: object = None
    state: SendState = SendState.RUNNING
    reason: str = ""
    by_peer: bool = False
    outstanding: int = 0
    written: int = 0
    runs: int = 0
    claimed: bytearray = field(default_factory=bytearray)
    tail_claimed: bool = False

    def __post_init__(self) -> None:
        layouts = (self.src_layout, self.dst_layout)
        self.end_token, count = check_lists(
            *layouts, self.src_pages, self.dst_pages, self.first_token, self.end_token, self.kept
        )
        self.claimed = bytearray(count)

    @property
    def num_pages(self) -> int:
        """Of the source: what claims are made of."""
        return len(self.claimed)

    @property
    def draw(self) -> int:
        """Chooses among source replicas: the same at every writer of a slot's generation, another for the next."""
        return sum(unpack(self.immediate))


def check_lists(
    src_layout: KvLayout,
    dst_layout: KvLayout,
    src_pages: Mapping[str, Sequence[int]],
    dst_pages: Mapping[str, Sequence[int]],
    first_token: int,
    end_token: int | None,
    kept: Mapping[str, Sequence[int]],
) -> tuple[int, int]:
    """(end token, pages of the source): whether the lists of both ends have the pages that the tokens need.

    Raises InvalidArgument.
    """
    here, there = src_layout.page_size, dst_layout.page_size
    if src_pages.keys() != dst_pages.keys() or not dst_pages:
        raise InvalidArgument(f"a transfer needs page lists of the same groups, not {[*src_pages]} for {[*dst_pages]}")
    if first_token % there:
        raise InvalidArgument(f"token {first_token} does not begin a page of the destination's ({there} tokens)")
    if end_token is None:
        end_token = first_token + there * max(len(pages) for pages in dst_pages.values())
    if end_token <= first_token:
        raise InvalidArgument(f"tokens [{first_token}, {end_token}) are none")
    count = -(-end_token // here) - first_token // here
    if kept and here != there:
        raise InvalidArgument(f"not implemented: kept pages between pages of {here} and of {there} tokens")
    for name, pages in src_pages.items():
        if len(pages) != count:
            raise InvalidArgument(f"as many pages as needed: {count} of {name!r} at the source, {len(pages)} are given")
        wanted = len(kept[name]) if name in kept else -(-end_token // there) - first_token // there
        if len(dst_pages[name]) != wanted or not wanted:
            raise InvalidArgument(
                f"as many pages as needed: {wanted} of {name!r} at the destination, {len(dst_pages[name])} are given"
            )
    for name, positions in kept.items():
        if name not in src_pages:
            raise InvalidArgument(f"kept pages of {name!r}, which is not sent")
        ascending = all(a < b for a, b in itertools.pairwise(positions))
        if not ascending or positions[0] < 0 or positions[-1] >= count:
            raise InvalidArgument(f"kept pages of {name!r} must be ascending positions in a list of {count}")
    return end_token, count


class SendDone(NamedTuple):
    """Every byte is written and every write has completed."""

    send: Send


class SendDrained(NamedTuple):
    """Stopped (send.reason, by_peer where the destination asked); nothing is in flight any more."""

    send: Send


SendEvent = SendDone | SendDrained


@dataclass(slots=True, eq=False)
class _Rows:
    """Runs of a claim for layer_index 0 of one group and rank pair."""

    src_region: int
    dst_region: int
    src: Column
    dst: Column
    length: Column
    nbytes: int
    src_stride: int
    dst_stride: int
    layers: int


@dataclass(slots=True, eq=False)
class _Claim:
    send: Send
    rows: dict[str, list[_Rows]]


@dataclass(slots=True, eq=False)
class _Record:
    first_value: int
    claims: list[_Claim]
    num_layers: int
    next_layer: int = 0


class SendTable:
    """All transfers of one engine's life. `events()` tells what has ended."""

    def __init__(self, layout: KvLayout) -> None:
        self._layout = layout
        # Step layer l is the l-th layer of the model that has KV.
        self._places = [layout.locate(layer) for layer in sorted(x for group in layout.groups for x in group.layers)]
        self._sends: dict[int, Send] = {}
        self._writes: dict[int, Send] = {}
        self._contexts = itertools.count(1)
        self._records: deque[_Record] = deque()
        self._events: list[SendEvent] = []
        # Completions of writes that are not outstanding: duplicates.
        self.stray_completions = 0
        # Entries of step records whose transfer is over.
        self.stale_entries = 0

    def __len__(self) -> int:
        return len(self._sends)

    def __iter__(self) -> Iterator[Send]:
        return iter(list(self._sends.values()))

    def get(self, transfer_id: int) -> Send | None:
        """The transfer while it is not over."""
        return self._sends.get(transfer_id)

    def events(self) -> list[SendEvent]:
        """What has ended since the last call."""
        events, self._events = self._events, []
        return events

    @property
    def awaiting_doorbell(self) -> int | None:
        """The doorbell value that releases the next layer, None while no record is outstanding."""
        return self._records[0].first_value + self._records[0].next_layer if self._records else None

    @property
    def awaiting_pages(self) -> bool:
        """True while a running transfer has pages that nothing has claimed yet."""
        return any(send.state is SendState.RUNNING and not all(send.claimed) for send in self._sends.values())

    def start(self, send: Send, ready_pages: int) -> None:
        """Take a transfer up; its first `ready_pages` pages leave at once. Raises InvalidArgument."""
        if send.transfer_id in self._sends:
            raise InvalidArgument(f"transfer {send.transfer_id} runs already")
        if not 0 <= ready_pages <= send.num_pages:
            raise InvalidArgument(f"ready_pages {ready_pages} of {send.num_pages} pages")
        self._sends[send.transfer_id] = send
        if send.outbound.hands_over:
            send.claimed[:] = b"\1" * send.num_pages
            self._post_whole(send)
            return
        self.pages_ready(send.transfer_id, 0, ready_pages)

    def pages_ready(self, transfer_id: int, first: int, count: int) -> None:
        """Pages [first, first + count) are complete in all layers: post them."""
        send = self._sends.get(transfer_id)
        if send is None or send.state is not SendState.RUNNING:
            self.stale_entries += 1
            return
        if count == 0 or send.outbound.hands_over:
            return
        claim = self._claim(send, first, count)
        if claim is None:
            return
        if not send.kept.keys().isdisjoint(claim.rows) and self._announced(send):
            # What is kept has pages that are not computed yet.
            self.stop(transfer_id, "kept pages: the last claim came before its steps were done")
            return
        for rows_of_group in claim.rows.values():
            for rows in rows_of_group:
                layers = np.arange(rows.layers, dtype=np.int64)
                src = (layers[:, None] * rows.src_stride + rows.src).ravel()
                dst = (layers[:, None] * rows.dst_stride + rows.dst).ravel()
                self._post(send, rows, src, dst, np.tile(rows.length, rows.layers), rows.nbytes * rows.layers)

    def tail_ready(self, transfer_id: int) -> None:
        """The rows of its tail buffers are written: post them, once."""
        send = self._sends.get(transfer_id)
        if send is None or send.state is not SendState.RUNNING:
            self.stale_entries += 1
            return
        if send.outbound.hands_over:
            return
        if send.tail_claimed or not send.tails:
            self.stop(transfer_id, "its tail was named before" if send.tails else "it has no tail")
            return
        send.tail_claimed = True
        for name, copy in send.tails.items():
            for src_rank, dst_rank in tail_feeds(send.src_layout.tp, send.dst_layout.tp, send.draw):
                starts = np.arange(0, copy.row_bytes, MAX_RUN_BYTES, dtype=np.int64)
                rows = _Rows(
                    src_region=send.src_region[name, src_rank],
                    dst_region=send.dst_region[name, dst_rank],
                    src=copy.src_row * copy.row_bytes + starts,
                    dst=copy.dst_row * copy.row_bytes + starts,
                    length=np.diff(starts, append=copy.row_bytes),
                    nbytes=copy.row_bytes,
                    src_stride=0,
                    dst_stride=0,
                    layers=1,
                )
                self._post(send, rows, rows.src, rows.dst, rows.length, rows.nbytes)

    def record(self, record: StepRecord) -> None:
        """A step record of the engine; its layers leave as the doorbell reaches them (`advance`)."""
        claims: list[_Claim] = []
        for entry in record.entries:
            send = self._sends.get(entry.transfer_id)
            if send is None or send.state is not SendState.RUNNING:
                self.stale_entries += 1
                continue
            if send.outbound.hands_over:
                # The engine's own business.
                continue
            if record.num_layers != len(self._places):
                self.stop(entry.transfer_id, f"a step of {record.num_layers} layers, the model has {len(self._places)}")
                continue
            claim = self._claim(send, entry.first_page, entry.num_pages)
            if claim is not None:
                claims.append(claim)
        if claims:
            self._records.append(_Record(record.first_value, claims, record.num_layers))

    def advance(self, doorbell: int) -> bool:
        """Post every layer that the doorbell has reached; True where something was posted."""
        posted = False
        while self._records:
            record = self._records[0]
            if not any(claim.send.state is SendState.RUNNING for claim in record.claims):
                # Nobody waits for its layers: a step that failed may never ring them.
                self._records.popleft()
                continue
            reached = min(record.num_layers, doorbell - record.first_value + 1)
            for layer in range(record.next_layer, reached):
                group, index = self._places[layer]
                for claim in record.claims:
                    for rows in claim.rows.get(group.name, ()):
                        if claim.send.state is SendState.RUNNING:
                            src, dst = rows.src + index * rows.src_stride, rows.dst + index * rows.dst_stride
                            self._post(claim.send, rows, src, dst, rows.length, rows.nbytes)
                            posted = True
            record.next_layer = max(record.next_layer, reached)
            if record.next_layer < record.num_layers:
                break
            self._records.popleft()
        return posted

    def complete(self, completion: Completion) -> None:
        """A write has ended at its outbound."""
        send = self._writes.pop(completion.context, None)
        if send is None:
            self.stray_completions += 1
            return
        send.outstanding -= 1
        if completion.error:
            self._stop(send, completion.error, by_peer=False)
        else:
            send.written += completion.nbytes
        self._settle(send)

    def stop(self, transfer_id: int, reason: str, *, by_peer: bool = False) -> bool:
        """Stop a transfer; SendDrained follows. False where it is not there (over, or never was)."""
        send = self._sends.get(transfer_id)
        if send is None:
            return False
        self._stop(send, reason, by_peer=by_peer)
        self._settle(send)
        return True

    def stop_link(self, outbound: Outbound, reason: str) -> None:
        """Stop every transfer of a link."""
        self._stop_where(lambda send: send.outbound is outbound, reason)

    def stop_all(self, reason: str) -> None:
        """Stop every transfer."""
        self._stop_where(lambda send: True, reason)

    def _stop_where(self, chosen: Callable[[Send], bool], reason: str) -> None:
        for send in self:
            if chosen(send):
                self.stop(send.transfer_id, reason)

    def _claim(self, send: Send, first: int, count: int) -> _Claim | None:
        """Take pages for sending, once. A claim that cannot be is a fault of the engine's: the generation fails."""
        if first + count > send.num_pages or count < 1:
            self.stop(send.transfer_id, f"pages [{first}, +{count}) of a list of {send.num_pages}")
            return None
        if any(send.claimed[first : first + count]):
            self.stop(send.transfer_id, f"a page of [{first}, +{count}) was named before")
            return None
        send.claimed[first : first + count] = b"\1" * count
        try:
            rows = {name: self._rows(send, name, first, count) for name in send.src_pages if name not in send.kept}
            if send.kept and all(send.claimed):
                rows |= {name: self._rows(send, name, 0, send.num_pages) for name in send.kept}
        except KvmeshError as error:
            self.stop(send.transfer_id, error.message)
            return None
        return _Claim(send, rows)

    def _announced(self, send: Send) -> bool:
        """Whether layers of some of its pages are awaited still."""
        return any(claim.send is send for record in self._records for claim in record.claims)

    def _rows(self, send: Send, name: str, first: int, count: int) -> list[_Rows]:
        here, there = send.src_layout.page_size, send.dst_layout.page_size
        assert send.end_token is not None
        kept = send.kept.get(name)
        # Tokens of the claim, and the pages at the destination that they fall into.
        start = (send.first_token // here + first) * here
        begin, end = max(start, send.first_token), min(start + count * here, send.end_token)
        if kept is not None:
            end = begin + len(kept) * here
        at = (begin - send.first_token) // there
        rows = plan(
            send.src_layout,
            send.dst_layout,
            send.src_pages[name][first : first + count],
            send.dst_pages[name][at : -(-(end - send.first_token) // there)],
            group=name,
            first_token=begin,
            num_tokens=end - begin,
            src_start=start,
            dst_start=send.first_token + at * there,
            kept_pages=kept,
            replica_draw=send.draw,
            max_message=MAX_RUN_BYTES,
        )
        result = []
        for src_rank, dst_rank, chosen in rows.pairs():
            length = rows.length[chosen]
            result.append(
                _Rows(
                    src_region=send.src_region[name, src_rank],
                    dst_region=send.dst_region[name, dst_rank],
                    src=rows.src_offset[chosen],
                    dst=rows.dst_offset[chosen],
                    length=length,
                    nbytes=int(length.sum()),
                    src_stride=send.src_layout.layer_stride(name),
                    dst_stride=send.dst_layout.layer_stride(name),
                    layers=send.src_layout.group(name).num_layers,
                )
            )
        return result

    def _post(self, send: Send, rows: _Rows, src: Column, dst: Column, length: Column, nbytes: int) -> None:
        send.runs += len(length)
        if len(length) > MAX_WRITE_RUNS or nbytes > MAX_WRITE_BYTES:
            # Cut before the run that passes a multiple of the limit: a part may be longer by less than one run.
            by_bytes = np.diff((np.cumsum(length) - 1) // MAX_WRITE_BYTES)
            by_runs = np.diff(np.arange(len(length)) // MAX_WRITE_RUNS)
            cuts = np.flatnonzero(by_bytes | by_runs) + 1
            for part in np.split(np.arange(len(length)), cuts):
                self._post_one(send, rows, src[part], dst[part], length[part], int(length[part].sum()))
        else:
            self._post_one(send, rows, src, dst, length, nbytes)

    def _post_whole(self, send: Send) -> None:
        """One write for all of it: somebody else has the rows."""
        context = next(self._contexts)
        self._writes[context] = send
        send.outstanding += 1
        send.outbound.post(Write(context, send.immediate, 0, 0, [], [], [], send.expected))

    def _post_one(self, send: Send, rows: _Rows, src: Column, dst: Column, length: Column, nbytes: int) -> None:
        context = next(self._contexts)
        self._writes[context] = send
        send.outstanding += 1
        send.outbound.post(
            Write(
                context,
                send.immediate,
                rows.src_region,
                rows.dst_region,
                src.tolist(),
                dst.tolist(),
                length.tolist(),
                nbytes,
            )
        )

    def _stop(self, send: Send, reason: str, *, by_peer: bool) -> None:
        if send.state is SendState.RUNNING:
            send.state = SendState.STOPPING
            send.reason = reason
            send.outbound.flush(send.immediate)
        # An abort that crosses our own stop still wants its answer.
        send.by_peer = send.by_peer or by_peer

    def _settle(self, send: Send) -> None:
        if send.outstanding or send.state is SendState.OVER:
            return
        if send.state is SendState.STOPPING:
            self._events.append(SendDrained(send))
        elif send.written == send.expected:
            self._events.append(SendDone(send))
        else:
            return
        send.state = SendState.OVER
        del self._sends[send.transfer_id]
