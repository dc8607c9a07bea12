"""What a transfer posts between unequal shardings and page sizes: every byte once, by one replica, in any chunks."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.errors import InvalidArgument
from kvmesh.kv.layout import KvGroup, KvLayout
from kvmesh.kv.ring import StepEntry, StepRecord
from kvmesh.transfer import sends as sends_module
from kvmesh.transfer.descriptor import slot_bytes
from kvmesh.transfer.immediate import pack
from kvmesh.transfer.sends import Send, SendDone, SendDrained, SendTable, TailCopy
from kvmesh.transfer.tail import TailBuffer, tail_bytes
from test_sends import Recorder, finish
from transfer_world import Memory

LATENT = (KvGroup("latent", "mla", (0, 1), kv_heads=1, head_dim=8),)
TAIL = TailBuffer("hidden", 64, 8)


def shaped(tp: int, page_size: int, groups: tuple[KvGroup, ...], num_pages: int = 40) -> KvLayout:
    return KvLayout(version=1, dtype="fp32", page_size=page_size, groups=groups, num_pages=num_pages, tp=tp)


class Ends:
    """Both ends' memory, and one transfer's writes carried out on it."""

    def __init__(self, source: KvLayout, target: KvLayout) -> None:
        self.source, self.target = Memory(source), Memory(target, backwards=True)
        self.table = SendTable(source)
        self.out = Recorder()
        self.hits = [np.zeros(len(flat), dtype=np.int64) for flat in self.target.flat]
        self.read: Counter[int] = Counter()
        self.done = False

    def send(self, slot: int = 1, generation: int = 1, *, end: int, first: int = 0, **extra: object) -> Send:
        here, there = self.source.layout, self.target.layout
        pages = -(-end // here.page_size) - first // here.page_size
        count = -(-end // there.page_size) - first // there.page_size
        self.src = {group.name: random.Random(7).sample(range(here.num_pages), pages) for group in here.groups}
        self.dst = {group.name: random.Random(8).sample(range(there.num_pages), count) for group in here.groups}
        fields: dict[str, object] = {
            "transfer_id": pack(slot, generation) + 1,
            "immediate": pack(slot, generation),
            "outbound": self.out,
            "src_layout": here,
            "dst_layout": there,
            "src_pages": self.src,
            "dst_pages": self.dst,
            "src_region": self.source.index,
            "dst_region": self.target.index,
            "expected": slot_bytes(there, self.dst, here, end - first),
            "first_token": first,
            "end_token": end,
        }
        return Send(**(fields | extra))  # type: ignore[arg-type]

    def carry_out(self) -> None:
        for write in self.out.writes:
            assert sum(write.length) == write.nbytes
            self.read[write.src_region] += write.nbytes
            for a, b, n in zip(write.src, write.dst, write.length, strict=True):
                assert 0 <= a <= a + n <= len(self.source.flat[write.src_region])
                assert 0 <= b <= b + n <= len(self.target.flat[write.dst_region])
                self.target.flat[write.dst_region][b : b + n] = self.source.flat[write.src_region][a : a + n]
                self.hits[write.dst_region][b : b + n] += 1
        finish(self.table, self.out)
        self.done |= any(isinstance(event, SendDone) for event in self.table.events())


@st.composite
def geometries(draw: st.DrawFn) -> tuple[KvLayout, KvLayout, int, int]:
    heads = draw(st.sampled_from([1, 2, 3, 4, 8]))
    tps = [tp for tp in range(1, 9) if heads % tp == 0 or tp % heads == 0]
    groups = draw(
        st.sampled_from(
            [
                (KvGroup("main", "full", (0, 1), heads, 8),),
                LATENT,
                (KvGroup("main", "full", (0, 2), heads, 8), KvGroup("latent", "mla", (1,), 1, 8)),
            ]
        )
    )
    sizes = st.integers(1, 6)
    here, there = draw(sizes), draw(st.one_of(sizes, st.just(0)))
    target = shaped(draw(st.sampled_from(tps)), there or here, groups)
    first = draw(st.integers(0, 3)) * target.page_size
    return shaped(draw(st.sampled_from(tps)), here, groups), target, first, first + draw(st.integers(1, 25))


@settings(max_examples=120, deadline=None)
@given(geometries(), st.integers(0, 1 << 30), st.integers(0, 4095), st.integers(0, 1000))
def test_every_wanted_byte_once(
    shape: tuple[KvLayout, KvLayout, int, int], seed: int, slot: int, generation: int
) -> None:
    source, target, first, end = shape
    rng = random.Random(seed)
    ends = Ends(source, target)
    send = ends.send(slot, generation, first=first, end=end)
    ends.source.put(ends.src, 3, 4, first // source.page_size)
    ready = rng.randint(0, send.num_pages)
    ends.table.start(send, ready)
    doorbell = 0
    at = ready
    while at < send.num_pages:
        count = rng.randint(1, send.num_pages - at)
        if rng.random() < 0.3:
            ends.table.pages_ready(send.transfer_id, at, count)
        else:
            ends.table.record(StepRecord(doorbell + 1, source.num_layers, (StepEntry(send.transfer_id, at, count),)))
            doorbell += source.num_layers
            ends.table.advance(doorbell)
        at += count
        if rng.random() < 0.5:
            ends.carry_out()
    ends.carry_out()
    assert ends.done
    assert not len(ends.table)
    size = target.page_size
    tokens = list(range(first, -(-end // size) * size))
    wanted = np.asarray(tokens).reshape(-1, size) < (end if source.page_size != size else len(tokens) + first)
    for group in target.groups:
        hits = {rank: ends.hits[ends.target.index[group.name, rank]] for rank in range(target.tp)}
        made = ends.target.made(group.name, 3, 4, tokens)
        for rank in range(target.tp):
            shape_of = ends.target.words[group.name][rank].shape
            line = hits[rank].reshape(*shape_of[:-1], -1)
            inside = np.zeros(line.shape[:-1], dtype=bool)
            for block, page in enumerate(ends.dst[group.name]):
                inside[:, page] = wanted[block]
            assert (line == inside[..., None]).all(), "a byte was written twice, not at all, or beyond"
            found = ends.target.words[group.name][rank][:, ends.dst[group.name]]
            assert (np.moveaxis(found, (1, 4), (0, 1))[wanted] == np.moveaxis(made[rank], (1, 4), (0, 1))[wanted]).all()


def test_replicas_are_drawn_by_slot_and_generation() -> None:
    """One replica feeds a destination rank, the same at every writer, and all replicas have their turn."""
    ends = Ends(shaped(4, 2, LATENT), shaped(1, 2, LATENT))
    used = []
    for slot in range(8):
        ends.read.clear()
        send = ends.send(slot, 9, end=6)
        ends.table.start(send, 2)
        ends.table.pages_ready(send.transfer_id, 2, 1)
        ends.carry_out()
        (region,) = ends.read
        used.append(region)
        # Another table, with transfer ids of its own.
        other = Ends(shaped(4, 2, LATENT), shaped(1, 2, LATENT))
        other.table.start(other.send(slot, 9, end=6, transfer_id=1000 - slot), 3)
        other.carry_out()
        assert set(other.read) == {region}
    assert sorted(Counter(used).values()) == [2, 2, 2, 2]


def test_a_claim_moves_the_tokens_of_its_pages() -> None:
    """Source pages of 2 tokens into pages of 4, from token 4 to 11: page 2 of the source is cut, a chunk at a time."""
    ends = Ends(shaped(1, 2, LATENT), shaped(1, 4, LATENT))
    send = ends.send(first=4, end=11)
    assert send.num_pages == 4
    line = LATENT[0].head_dim * 4
    ends.table.start(send, 1)
    (write,) = ends.out.writes
    assert write.length == [2 * line, 2 * line]
    assert write.dst[0] == ends.dst["latent"][0] * 4 * line
    ends.out.writes.clear()
    ends.table.pages_ready(send.transfer_id, 1, 1)
    (write,) = ends.out.writes
    assert write.dst[0] == (ends.dst["latent"][0] * 4 + 2) * line
    ends.out.writes.clear()
    ends.table.pages_ready(send.transfer_id, 3, 1)
    (write,) = ends.out.writes
    assert write.length == [line, line], "one token of the last page is wanted"


def test_a_start_inside_a_source_page() -> None:
    ends = Ends(shaped(1, 8, LATENT), shaped(1, 2, LATENT))
    send = ends.send(first=6, end=9)
    assert send.num_pages == 2
    line = LATENT[0].head_dim * 4
    ends.table.start(send, 2)
    (write,) = ends.out.writes
    assert write.src[:2] == [(ends.src["latent"][0] * 8 + 6) * line, ends.src["latent"][1] * 8 * line]
    assert write.nbytes == 2 * 3 * line


GROUPS = (KvGroup("main", "full", (0,), 1, 8), KvGroup("window", "full", (1,), 1, 8))


def kept_send(ends: Ends) -> Send:
    send = ends.send(end=8)
    dst = ends.dst | {"window": ends.dst["window"][:2]}
    expected = slot_bytes(ends.target.layout, dst)
    return ends.send(end=8, dst_pages=dst, kept={"window": [1, 3]}, expected=expected, src_pages=send.src_pages)


def test_kept_pages_leave_with_the_last_claim() -> None:
    ends = Ends(shaped(1, 2, GROUPS), shaped(1, 2, GROUPS))
    send = kept_send(ends)
    ends.source.put(ends.src, 3, 4, 0)
    ends.table.start(send, 1)
    ends.table.record(StepRecord(1, 2, (StepEntry(send.transfer_id, 1, 2),)))
    ends.table.record(StepRecord(3, 2, (StepEntry(send.transfer_id, 3, 1),)))
    ends.table.advance(2)
    window = ends.target.index["window", 0]
    assert window not in {write.dst_region for write in ends.out.writes}
    ends.table.advance(4)
    (write,) = [write for write in ends.out.writes if write.dst_region == window]
    assert write.nbytes == 2 * ends.target.layout.page_bytes("window")
    ends.carry_out()
    assert ends.done
    made = ends.target.made("window", 3, 4, [2, 3, 6, 7])
    assert (ends.target.words["window"][:, :, ends.dst["window"][:2]] == made).all()


def test_kept_pages_wait_for_steps_that_are_announced() -> None:
    ends = Ends(shaped(1, 2, GROUPS), shaped(1, 2, GROUPS))
    send = kept_send(ends)
    ends.table.start(send, 0)
    ends.table.record(StepRecord(1, 2, (StepEntry(send.transfer_id, 0, 3),)))
    ends.table.pages_ready(send.transfer_id, 3, 1)
    (event,) = ends.table.events()
    assert isinstance(event, SendDrained)
    assert "before its steps were done" in send.reason


@pytest.mark.parametrize(("src_tp", "dst_tp"), [(1, 1), (2, 4), (4, 2), (4, 1)])
def test_a_tail_goes_once_to_every_rank(src_tp: int, dst_tp: int) -> None:
    ends = Ends(shaped(src_tp, 2, LATENT), shaped(dst_tp, 2, LATENT))
    rows = {TAIL.name: TailCopy(5, 2, TAIL.row_bytes)}
    plain = ends.send(end=4)
    nbytes = plain.expected + tail_bytes(ends.target.layout, [TAIL], rows)
    send = ends.send(end=4, tails=rows, expected=nbytes)
    ends.source.tail[:, 5] = 77
    ends.table.start(send, 2)
    ends.carry_out()
    assert not ends.done, "its tail is awaited"
    ends.table.tail_ready(send.transfer_id)
    ends.carry_out()
    assert ends.done
    assert (ends.target.tail[:, 2] == 77).all()
    for rank in range(dst_tp):
        hits = ends.hits[ends.target.index[TAIL.name, rank]].reshape(TAIL.rows, -1)
        assert (hits == (np.arange(TAIL.rows) == 2)[:, None]).all()
    ends.table.tail_ready(send.transfer_id)
    assert ends.table.stale_entries == 1


def test_a_long_row_is_cut_into_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sends_module, "MAX_RUN_BYTES", 24)
    monkeypatch.setattr(sends_module, "MAX_WRITE_BYTES", 48)
    ends = Ends(shaped(1, 2, LATENT), shaped(1, 2, LATENT))
    send = ends.send(end=4, tails={TAIL.name: TailCopy(5, 2, TAIL.row_bytes)})
    ends.table.start(send, 0)
    ends.table.tail_ready(send.transfer_id)
    assert [write.length for write in ends.out.writes] == [[24, 24], [16]]
    assert [write.src for write in ends.out.writes] == [[320, 344], [368]]
    assert [write.dst for write in ends.out.writes] == [[128, 152], [176]]


@pytest.mark.parametrize(("tail", "text"), [(True, "named before"), (False, "has no tail")])
def test_a_tail_that_cannot_be_fails_the_generation(tail: bool, text: str) -> None:
    ends = Ends(shaped(1, 2, LATENT), shaped(1, 2, LATENT))
    send = ends.send(end=4, tails={TAIL.name: TailCopy(0, 0, TAIL.row_bytes)} if tail else {})
    ends.table.start(send, 0)
    ends.table.tail_ready(send.transfer_id)
    ends.table.tail_ready(send.transfer_id)
    assert text in send.reason
    ends.carry_out()
    assert not len(ends.table)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"first_token": 3}, "does not begin a page"),
        ({"end_token": 0}, "are none"),
        ({"end_token": 9}, "as many pages as needed: 5 of 'main' at the source, 4 are given"),
        ({"dst_pages": {"main": [1, 2, 3], "window": [1, 2, 3, 4]}}, "4 of 'main' at the destination, 3 are given"),
        ({"dst_pages": {"main": [1, 2, 3, 4]}}, "page lists of the same groups"),
        ({"kept": {"window": [1, 2]}}, "2 of 'window' at the destination, 4 are given"),
        ({"kept": {"window": [2, 1, 0, 3]}}, "ascending positions"),
        ({"kept": {"window": [0, 1, 2, 4]}}, "ascending positions in a list of 4"),
        ({"kept": {"window": []}}, "0 of 'window' at the destination"),
        ({"kept": {"other": [1]}}, "kept pages of 'other', which is not sent"),
    ],
)
def test_lists_that_do_not_fit(changes: dict[str, object], text: str) -> None:
    ends = Ends(shaped(1, 2, GROUPS), shaped(1, 2, GROUPS))
    with pytest.raises(InvalidArgument, match=text):
        ends.send(end=8, **changes)  # type: ignore[arg-type]


def test_a_plan_that_does_not_fit_the_destination_fails_before_a_byte() -> None:
    ends = Ends(shaped(1, 2, GROUPS), shaped(1, 2, GROUPS, num_pages=4))
    send = ends.send(end=8, dst_pages={"main": [0, 1, 2, 9], "window": [0, 1, 2, 3]})
    ends.table.start(send, 4)
    assert not ends.out.writes
    assert "destination page 9 is not in a pool of 4" in send.reason
