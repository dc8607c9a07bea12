"""A small world for the property test: writers and one destination over fake links, pages that know whose they are."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from kvmesh.errors import KvmeshError
from kvmesh.kv.layout import KvGroup, KvLayout
from kvmesh.kv.pool import PagePool, PageState
from kvmesh.kv.ring import StepEntry, StepRecord
from kvmesh.transfer.descriptor import slot_bytes
from kvmesh.transfer.immediate import pack
from kvmesh.transfer.sends import Send, SendDone, SendTable, TailCopy
from kvmesh.transfer.slots import AskDrain, Completed, Drained, Event, Failed, Slot, SlotTable
from kvmesh.transfer.tail import TailBuffer
from kvmesh.transfer.transports.base import Write
from kvmesh.transfer.transports.fake import FakeOutbound, FaultOptions, VirtualClock

LAYERS = 3
STAMP_WORDS = 4
STAMP_BYTES = 8 * STAMP_WORDS
TAIL = TailBuffer("hidden", 2 * STAMP_BYTES, 8)
POISON = np.uint64(0xDEAD_DEAD_DEAD_DEAD)

Words = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Shape:
    """Both ends' sharding. groups: (name, kind, layers, kv heads); kept: of the last group some pages are kept only."""

    src_tp: int = 1
    dst_tp: int = 1
    src_page: int = 1
    dst_page: int = 1
    groups: tuple[tuple[str, str, tuple[int, ...], int], ...] = (("main", "full", (0, 1, 2), 1),)
    kept: bool = False

    @classmethod
    def draw(cls, r: random.Random) -> Shape:
        heads = r.choice([1, 2, 4])
        tps = [tp for tp in (1, 2, 4) if heads % tp == 0 or tp % heads == 0]
        groups = r.choice(
            [
                (("main", "full", (0, 1, 2), heads),),
                (("latent", "mla", (0, 1, 2), 1),),
                (("main", "full", (0, 2), heads), ("draft", "full", (1,), heads)),
                (("main", "full", (1, 2), heads), ("latent", "mla", (0,), 1)),
            ]
        )
        src_page, dst_page = r.choice([(1, 1), (2, 2), (1, 2), (4, 1), (1, 4), (2, 3), (4, 4)])
        kept = len(groups) > 1 and src_page == dst_page and r.random() < 0.5
        return cls(r.choice(tps), r.choice(tps), src_page, dst_page, groups, kept)

    def layout(self, page_size: int, tp: int, num_pages: int) -> KvLayout:
        """A line of one token, head and plane is a stamp."""
        groups = tuple(
            KvGroup(name, kind, layers, kv_heads=heads, head_dim=STAMP_BYTES // 4)
            for name, kind, layers, heads in self.groups
        )
        return KvLayout(version=1, dtype="fp32", page_size=page_size, groups=groups, num_pages=num_pages, tp=tp)

    @property
    def pairs(self) -> int:
        """Writes that one makes on the simplest sharding, about."""
        return max(self.src_tp, self.dst_tp) * len(self.groups)


def stamps(layout: KvLayout, group: KvGroup, owner: int, generation: int, tokens: Sequence[int]) -> Words:
    """What the lines of an owner's tokens hold on every rank: (ranks, layers, heads, planes, tokens, STAMP_WORDS)."""
    held = layout.heads_per_rank(group)
    first = np.arange(layout.tp) * group.kv_heads // layout.tp
    head = first[:, None] + np.arange(held)
    place = np.zeros((layout.tp, group.num_layers, held, group.planes, len(tokens)), dtype=np.uint64)
    place += head.astype(np.uint64)[:, None, :, None, None] << np.uint64(48)
    place += np.asarray(group.layers, dtype=np.uint64)[None, :, None, None, None] << np.uint64(40)
    place += np.arange(group.planes, dtype=np.uint64)[None, None, None, :, None] << np.uint64(32)
    place += np.asarray(tokens, dtype=np.uint64)
    return sign(owner, generation, place)


def sign(owner: int, generation: int, place: Words) -> Words:
    """Owner, generation, place, checksum in a last axis."""
    o, g = np.full_like(place, owner), np.full_like(place, generation)
    check = o * np.uint64(0x9E3779B97F4A7C15) ^ g * np.uint64(0xC2B2AE3D27D4EB4F) ^ place * np.uint64(31)
    return np.stack([o, g, place, check], axis=-1)


class Memory:
    """All ranks' regions: words of (ranks, layers, pages, heads, planes, page_size, STAMP_WORDS) for each group."""

    def __init__(self, layout: KvLayout, *, backwards: bool = False) -> None:
        self.layout = layout
        self.words = {
            group.name: np.full(
                (
                    layout.tp,
                    group.num_layers,
                    layout.num_pages,
                    layout.heads_per_rank(group),
                    group.planes,
                    layout.page_size,
                    STAMP_WORDS,
                ),
                POISON,
                dtype=np.uint64,
            )
            for group in layout.groups
        }
        self.tail: Words = np.full((layout.tp, TAIL.rows, 2, STAMP_WORDS), POISON, dtype=np.uint64)
        parts = {(name, rank): words[rank] for name, words in self.words.items() for rank in range(layout.tp)}
        parts |= {(TAIL.name, rank): self.tail[rank] for rank in range(layout.tp)}
        # The two ends' regions come in different orders.
        order = sorted(parts, reverse=backwards)
        self.index = {place: number for number, place in enumerate(order)}
        self.flat = [parts[place].reshape(-1).view(np.uint8) for place in order]

    def put(self, pages: Mapping[str, Sequence[int]], owner: int, generation: int, first_block: int) -> None:
        """An owner's KV in all its pages; pages[group][0] is block first_block."""
        for name, numbers in pages.items():
            self.words[name][:, :, numbers] = self.made(
                name, owner, generation, range_of(self.layout, first_block, numbers)
            )

    def made(self, name: str, owner: int, generation: int, tokens: Sequence[int]) -> Words:
        """Stamps of whole pages of tokens: (ranks, layers, pages, heads, planes, page_size, STAMP_WORDS)."""
        group = self.layout.group(name)
        flat = stamps(self.layout, group, owner, generation, tokens)
        cut = flat.reshape(*flat.shape[:4], -1, self.layout.page_size, STAMP_WORDS)
        return np.moveaxis(cut, 4, 2)

    def wipe(self, pages: Sequence[int], row: int | None) -> None:
        """What the next owner finds there is known, so that a late write shows."""
        for words in self.words.values():
            words[:, :, pages] = POISON
        if row is not None:
            self.tail[:, row] = POISON


def range_of(layout: KvLayout, first_block: int, pages: Sequence[int]) -> list[int]:
    """Tokens that a page list has room for."""
    return list(range(first_block * layout.page_size, (first_block + len(pages)) * layout.page_size))


def tail_of(owner: int, generation: int) -> Words:
    """What an owner's tail row holds."""
    return sign(owner, generation, np.asarray([1 << 60, 2 << 60], dtype=np.uint64))


@dataclass
class Want:
    """A destination's request."""

    owner: int
    generation: int
    pages: list[int]
    first_block: int
    end_token: int
    groups: dict[str, list[int]]
    row: int | None
    slot: Slot
    state: str = "waiting"
    sent: bool = False
    kept: list[int] = field(default_factory=list)


@dataclass
class Link:
    """One writer's link to the destination, with both control directions."""

    link_id: int
    outbound: FakeOutbound
    to_destination: deque[Callable[[], None]] = field(default_factory=deque)
    to_writer: deque[Callable[[], None]] = field(default_factory=deque)
    arrivals: list[tuple[int, int]] = field(default_factory=list)
    lost_there: bool = False
    broken_here: bool = False


@dataclass
class Running:
    """A transfer at the writer."""

    send: Send
    want: Want
    pages: list[int]
    row: int | None
    next_block: int = 0
    tail_sent: bool = False


class Writer:
    """A source: pool, memory, transfers."""

    def __init__(self, world: World, number: int, num_pages: int) -> None:
        self.world = world
        self.number = number
        shape = world.shape
        self.layout = shape.layout(shape.src_page, shape.src_tp, num_pages * shape.dst_page // shape.src_page + 4)
        self.pool = PagePool(self.layout.num_pages)
        self.rows = list(range(TAIL.rows))
        self.memory = Memory(self.layout)
        self.table = SendTable(self.layout)
        self.running: dict[int, Running] = {}
        self.link: Link | None = None
        self.doorbell = 0
        self.announced = 0
        self.next_id = number << 32

    # --- control, arriving here

    def bind_reply(self, link: Link, want: Want, ok: bool) -> None:
        if link.broken_here or not ok:
            return
        r = self.world.random
        here, there = self.layout.page_size, self.world.layout.page_size
        first_block = want.first_block * there // here
        count = -(-want.end_token // here) - first_block
        self.next_id += 1
        pages = self.pool.allocate(("send", self.next_id), count) if self.rows else None
        if pages is None:
            self.say(link, lambda: self.world.writer_failed(link, want.slot))
            return
        row = None if want.row is None else self.rows.pop()
        groups = self.world.spread(pages)
        self.memory.put(groups, want.owner, want.generation, first_block)
        if row is not None:
            self.memory.tail[:, row] = tail_of(want.owner, want.generation)
        self.pool.expose(("send", self.next_id), 0, pages)
        last = [*groups][-1]
        want.kept = sorted(r.sample(range(count), len(want.groups[last]))) if self.world.shape.kept else []
        send = Send(
            transfer_id=self.next_id,
            immediate=pack(want.slot.slot, want.slot.generation),
            outbound=link.outbound,
            src_layout=self.layout,
            dst_layout=self.world.layout,
            src_pages=groups,
            dst_pages=want.groups,
            src_region=self.memory.index,
            dst_region=self.world.memory.index,
            expected=want.slot.expected,
            first_token=want.first_block * there,
            end_token=want.end_token,
            kept={last: want.kept} if want.kept else {},
            tails={} if row is None or want.row is None else {TAIL.name: TailCopy(row, want.row, TAIL.row_bytes)},
            context=link,
        )
        ready = r.randint(0, count) if r.random() < 0.3 else 0
        self.running[self.next_id] = Running(send, want, pages, row, ready)
        self.table.start(send, ready)

    def abort(self, link: Link, slot: Slot) -> None:
        for running in self.running.values():
            if running.send.immediate == slot.immediate and running.send.context is link:
                self.world.seen["aborted while writing"] += running.send.outstanding > 0
                self.table.stop(running.send.transfer_id, "abort", by_peer=True)
                return
        self.say(link, lambda: self.world.drained(link, slot))

    def say(self, link: Link, message: Callable[[], None]) -> None:
        link.to_destination.append(message)

    # --- work

    def publish(self, chunk: int) -> None:
        """A step that fills pages of some running transfers."""
        entries = []
        shape = self.world.shape
        chunk *= max(1, shape.dst_page // shape.src_page)
        for transfer_id, running in list(self.running.items()):
            if self.world.random.random() < 0.3:
                self.push_tail(transfer_id, running)
            left = len(running.pages) - running.next_block
            if left and self.world.random.random() < 0.7:
                count = min(left, chunk)
                entries.append(StepEntry(transfer_id, running.next_block, count))
                running.next_block += count
        if entries:
            first = max(self.announced, self.doorbell) + 1
            self.table.record(StepRecord(first, LAYERS, tuple(entries)))
            self.announced = first + LAYERS - 1

    def ring(self, layers: int) -> None:
        self.doorbell = min(self.announced, self.doorbell + layers)
        self.table.advance(self.doorbell)

    def push(self) -> None:
        """Pages without a doorbell."""
        for transfer_id, running in list(self.running.items()):
            left = len(running.pages) - running.next_block
            if left:
                self.table.pages_ready(transfer_id, running.next_block, left)
                running.next_block += left
            self.push_tail(transfer_id, running)

    def push_tail(self, transfer_id: int, running: Running) -> None:
        if running.row is not None and not running.tail_sent:
            running.tail_sent = True
            self.table.tail_ready(transfer_id)

    def poll(self) -> None:
        if self.link is not None:
            for completion in self.link.outbound.poll(1 << 20):
                self.table.complete(completion)
            if self.link.outbound.broken:
                self.table.stop_link(self.link.outbound, self.link.outbound.broken)
                for completion in self.link.outbound.poll(0):
                    self.table.complete(completion)
        self.events()

    def events(self) -> None:
        for event in self.table.events():
            running = self.running.pop(event.send.transfer_id)
            owner = ("send", event.send.transfer_id)
            slot = running.want.slot
            link = event.send.context
            assert isinstance(link, Link)
            # The source's pages are its own again, and are overwritten at once: a late read would show.
            self.pool.settle(owner, 0)
            self.pool.release(owner)
            self.memory.wipe(running.pages, running.row)
            if running.row is not None:
                self.rows.append(running.row)
            if not isinstance(event, SendDone) and not event.send.outbound.broken:
                if event.send.by_peer:
                    self.say(link, lambda s=slot, k=link: self.world.drained(k, s))
                else:
                    self.say(link, lambda s=slot, k=link: self.world.writer_failed(k, s))

    def break_link(self) -> None:
        """The writer notices that its link is gone: stop, drain, let go of the memory, say so."""
        link, self.link = self.link, None
        assert link is not None
        self.table.stop_link(link.outbound, "link lost")
        link.outbound.fence("link lost")
        for completion in link.outbound.poll(0):
            self.table.complete(completion)
        self.events()
        link.outbound.close()
        link.broken_here = True
        self.world.unmapped(link)


class World:
    """One destination, several writers, one clock."""

    def __init__(self, seed: int, writers: int = 2, num_pages: int = 20, slots: int = 6) -> None:
        self.random = random.Random(seed)
        # Every third world has the simplest sharding.
        self.shape = Shape.draw(self.random) if seed % 3 else Shape()
        self.clock = VirtualClock()
        self.layout = self.shape.layout(self.shape.dst_page, self.shape.dst_tp, num_pages)
        self.pool = PagePool(num_pages)
        self.rows = list(range(TAIL.rows))
        self.memory = Memory(self.layout, backwards=True)
        self.slots = SlotTable(slots, first_generation=(1 << 20) - 3)
        self.truth = {name: words.copy() for name, words in self.memory.words.items()}
        self.tail_truth = self.memory.tail.copy()
        self.wants: list[Want] = []
        self.links: dict[int, Link] = {}
        self.next_owner = 0
        self.next_link = 0
        self.seen: Counter[str] = Counter()
        self.checks = 0
        self.writers = [Writer(self, number + 1, num_pages) for number in range(writers)]

    # --- the destination's own moves

    def spread(self, pages: list[int]) -> dict[str, list[int]]:
        """The groups' page lists: the same pages, in another order for the second."""
        return {name: pages if not number else pages[::-1] for number, (name, *_) in enumerate(self.shape.groups)}

    def open(self, count: int, ttl_s: float) -> bool:
        owner = self.next_owner = self.next_owner + 1
        pages = self.pool.allocate(owner, count)
        if pages is None:
            return False
        if len(self.slots) == self.slots.max_slots:
            self.pool.release(owner)
            return False
        row = self.rows.pop() if self.rows and self.random.random() < 0.4 else None
        self.check_content(pages)
        self.pool.expose(owner, 1, pages, for_write=True)
        first_block = self.random.choice([0, 0, 1, 3])
        size = self.layout.page_size
        end_token = (first_block + count) * size - self.random.randrange(size)
        groups = self.spread(pages)
        if self.shape.kept:
            last = [*groups][-1]
            groups[last] = groups[last][: self.random.randint(1, count)]
        expected = slot_bytes(self.layout, groups) + self.tail_bytes(row)
        slot = self.slots.open(expected, now=self.clock(), ttl_s=ttl_s)
        want = Want(owner, pack(slot.slot, slot.generation), pages, first_block, end_token, groups, row, slot)
        slot.context = want
        self.wants.append(want)
        return True

    def tail_bytes(self, row: int | None) -> int:
        return 0 if row is None else TAIL.row_bytes * self.layout.tp

    def hand_over(self, want: Want, writer: Writer) -> None:
        """The descriptor reaches a writer, which binds."""
        want.sent = True
        if writer.link is None:
            writer.link = self.connect()
        link = writer.link
        writer.say(link, lambda: self.bind(link, want, writer))

    def connect(self) -> Link:
        self.next_link += 1
        r = self.random
        options = FaultOptions(
            seed=r.randrange(1 << 30),
            delay_s=(0.0, r.choice([0.0, 0.5, 3.0])),
            pieces=r.choice([1, 3]),
            error_rate=r.choice([0.0, 0.0, 0.05 / self.shape.pairs]),
            duplicate_rate=r.choice([0.0, 0.2]),
            stale_rate=r.choice([0.0, 0.3]),
            completion_delay_s=(0.0, r.choice([0.0, 1.0])),
            arrival_delay_s=(0.0, r.choice([0.0, 1.0])),
            die_after_writes=r.choice([0, 0, 0, 40 * self.shape.pairs]),
            hold_after_writes=r.choice([0, 0, 0, 25 * self.shape.pairs]),
        )
        link_id = self.next_link
        outbound = FakeOutbound(options, partial(self.land, link_id), partial(self.tell, link_id), clock=self.clock)
        link = Link(link_id, outbound)
        self.links[link_id] = link
        return link

    def close(self, want: Want) -> None:
        self.apply(self.slots.close(want.slot.slot, want.slot.generation, "cancelled"))

    def lose(self, link: Link) -> None:
        """The lease runs out here, whatever the writer believes."""
        if not link.lost_there:
            link.lost_there = True
            self.seen["lost while writing"] += link.outbound.in_flight > 0
            link.to_destination.clear()
            link.to_writer.clear()
            self.apply(self.slots.peer_lost(link.link_id, "lease"))

    def unmapped(self, link: Link) -> None:
        """The writer's last word."""
        self.lose(link)
        self.apply(self.slots.fenced(link.link_id))
        del self.links[link.link_id]

    def release(self, want: Want) -> None:
        """A sequence ends: its pages are checked a last time and given back."""
        assert want.state == "complete"
        self.check_content(want.pages)
        self.wants.remove(want)
        self.free(want)

    def free(self, want: Want) -> None:
        self.pool.release(want.owner)
        self.memory.wipe(want.pages, want.row)
        self.believe(want)
        if want.row is not None:
            self.rows.append(want.row)

    def believe(self, want: Want) -> None:
        """From now on nothing of it may change."""
        for name, words in self.memory.words.items():
            self.truth[name][:, :, want.pages] = words[:, :, want.pages]
        if want.row is not None:
            self.tail_truth[:, want.row] = self.memory.tail[:, want.row]

    # --- control, arriving here

    def bind(self, link: Link, want: Want, writer: Writer) -> None:
        ok = True
        try:
            tokens = want.end_token - want.first_block * self.layout.page_size
            nbytes = slot_bytes(self.layout, want.groups, writer.layout, tokens) + self.tail_bytes(want.row)
            slot, generation = want.slot.slot, want.slot.generation
            self.slots.bind(slot, generation, nbytes, link.link_id, now=self.clock(), expected=nbytes)
        except KvmeshError:
            ok = False
        link.to_writer.append(lambda: writer.bind_reply(link, want, ok))

    def drained(self, link: Link, slot: Slot) -> None:
        self.apply(self.slots.drained(link.link_id, slot.slot, slot.generation))

    def writer_failed(self, link: Link, slot: Slot) -> None:
        self.apply(self.slots.writer_failed(link.link_id, slot.slot, slot.generation, "failed there"))

    # --- data

    def land(self, link_id: int, write: Write, first: int, last: int) -> int:
        assert link_id in self.links, "a write lands through a link that has been fenced"
        writer = next(w for w in self.writers if w.link is not None and w.link.link_id == link_id)
        moved = 0
        source, target = writer.memory.flat[write.src_region], self.memory.flat[write.dst_region]
        for run in range(first, last):
            a, b, n = write.src[run], write.dst[run], write.length[run]
            target[b : b + n] = source[a : a + n]
            moved += n
        return moved

    def tell(self, link_id: int, immediate: int, nbytes: int) -> None:
        if link_id in self.links:
            self.links[link_id].arrivals.append((immediate, nbytes))

    def arrive(self, link: Link) -> None:
        arrivals, link.arrivals = link.arrivals, []
        for immediate, nbytes in arrivals:
            self.apply(self.slots.arrived(link.link_id, immediate, nbytes, now=self.clock()))

    def apply(self, events: list[Event]) -> None:
        for event in events:
            slot = event.slot
            want = slot.context
            assert isinstance(want, Want)
            if isinstance(event, AskDrain):
                link = self.links.get(slot.peer)
                writer = next((w for w in self.writers if w.link is link and link is not None), None)
                if link is not None and writer is not None and not link.lost_there:
                    link.to_writer.append(lambda w=writer, k=link, s=slot: w.abort(k, s))
            elif isinstance(event, Completed):
                assert want.state == "waiting"
                want.state = "complete"
                self.seen["completed"] += 1
                self.pool.settle(want.owner, 1)
                self.check_complete(want)
                self.believe(want)
            elif isinstance(event, Failed):
                assert want.state == "waiting"
                want.state = "draining"
                self.seen["failed"] += 1
                self.pool.drain(want.owner, 1)
            elif isinstance(event, Drained):
                assert want.state == "draining"
                self.wants.remove(want)
                self.pool.settle(want.owner, 1)
                self.free(want)

    # --- checks

    def check_complete(self, want: Want) -> None:
        """Every byte of every rank, of what was wanted and of nothing else."""
        size = self.layout.page_size
        for number, (name, numbers) in enumerate(want.groups.items()):
            kept = want.kept if number and self.shape.kept else None
            blocks = [want.first_block + b for b in (kept if kept is not None else range(len(numbers)))]
            tokens = [block * size + at for block in blocks for at in range(size)]
            made = self.memory.made(name, want.owner, want.generation, tokens).copy()
            if self.shape.src_page != size:
                # Exactly the tokens: pages of equal size go whole.
                beyond = np.asarray(tokens).reshape(-1, size) >= want.end_token
                np.moveaxis(made, (2, 5), (0, 1))[beyond] = POISON
            assert (self.memory.words[name][:, :, numbers] == made).all(), f"lost or foreign bytes in {name}"
            rest = [page for page in want.pages if page not in numbers]
            assert (self.memory.words[name][:, :, rest] == POISON).all(), f"{name} was written beyond its list"
        if want.row is not None:
            made = tail_of(want.owner, want.generation)
            assert (self.memory.tail[:, want.row] == made).all(), "lost or foreign bytes in the tail"
            self.seen["with a tail"] += 1
        self.seen["unequal tp"] += self.shape.src_tp != self.shape.dst_tp
        self.seen["unequal pages"] += self.shape.src_page != size
        self.seen["kept"] += self.shape.kept

    def check_content(self, pages: list[int]) -> None:
        for name, words in self.memory.words.items():
            same = (words[:, :, pages] == self.truth[name][:, :, pages]).all()
            assert same, f"bytes came into pages of {name} that are nobody's"

    def check_rows(self) -> None:
        exposed = {want.row for want in self.wants if want.state != "complete"}
        quiet = [row for row in range(TAIL.rows) if row not in exposed]
        assert (self.memory.tail[:, quiet] == self.tail_truth[:, quiet]).all(), "bytes came into a row that is nobody's"

    def check(self) -> None:
        """At any moment: pools and slots add up, and no page that is not exposed has changed."""
        self.pool.check_integrity()
        self.slots.check_integrity()
        quiet = [p for p in range(self.pool.total) if self.pool.state(p) in (PageState.FREE, PageState.OWNED)]
        self.check_content(quiet)
        self.check_rows()
        self.checks += 1
        if self.checks % 8 == 0:
            for writer in self.writers:
                writer.pool.check_integrity()

    def settle(self) -> None:
        """Let everything come to its end, with the faults that are under way."""
        for _ in range(400):
            for writer in self.writers:
                writer.push()
                writer.ring(1 << 20)
                writer.poll()
                link = writer.link
                if link is not None:
                    while link.to_destination or link.to_writer:
                        while link.to_destination:
                            link.to_destination.popleft()()
                        while link.to_writer:
                            link.to_writer.popleft()()
                    writer.poll()
                    if link.link_id in self.links:
                        self.arrive(link)
                    if link.outbound.broken or link.lost_there:
                        writer.break_link()
            self.clock.advance(1.0)
            self.apply(self.slots.expire(self.clock()))
            self.check()
            if all(want.state == "complete" for want in self.wants) and not any(w.running for w in self.writers):
                break
        for want in list(self.wants):
            self.release(want)
        for writer in self.writers:
            if writer.link is not None:
                writer.break_link()
        self.check()
        assert not len(self.slots)
        assert self.pool.free_count == self.pool.total, "destination pages are lost"
        for writer in self.writers:
            assert not len(writer.table)
            assert not writer.running
            assert writer.pool.free_count == writer.pool.total, "source pages are lost"
