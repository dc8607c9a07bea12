"""A small world for the property test: writers and one destination over fake links, pages that know whose they are."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvmesh.kv.layout import KvGroup, KvLayout
from kvmesh.kv.pool import PagePool, PageState
from kvmesh.kv.ring import StepEntry, StepRecord
from kvmesh.transfer.immediate import pack
from kvmesh.transfer.sends import Send, SendDone, SendTable
from kvmesh.transfer.slots import AskDrain, Completed, Drained, Event, Failed, Slot, SlotTable
from kvmesh.transfer.transports.base import Write
from kvmesh.transfer.transports.fake import FakeOutbound, FaultOptions, VirtualClock

LAYERS = 3
PAGE_WORDS = 4
POISON = np.uint64(0xDEAD_DEAD_DEAD_DEAD)
_MASK = (1 << 64) - 1


def layout(num_pages: int) -> KvLayout:
    """Pages of 32 bytes a layer: owner, generation, (layer, block), checksum."""
    group = KvGroup("main", "full", tuple(range(LAYERS)), kv_heads=1, head_dim=4)
    return KvLayout(version=1, dtype="fp32", page_size=1, groups=(group,), num_pages=num_pages)


def stamp(owner: int, generation: int, layer: int, block: int) -> list[int]:
    """What a page of that owner holds."""
    place = layer << 32 | block
    check = owner * 0x9E3779B97F4A7C15 ^ generation * 0xC2B2AE3D27D4EB4F ^ place * 31
    return [owner, generation, place, check & _MASK]


class Memory:
    """region[layer][page] of words, and copies into it."""

    def __init__(self, num_pages: int) -> None:
        self.words = np.full((LAYERS, num_pages, PAGE_WORDS), POISON, dtype=np.uint64)
        self.flat = self.words.reshape(-1).view(np.uint8)


@dataclass
class Want:
    """A destination's request."""

    owner: int
    generation: int
    pages: list[int]
    slot: Slot
    state: str = "waiting"
    sent: bool = False


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
    next_block: int = 0


class Writer:
    """A source: pool, memory, transfers."""

    def __init__(self, world: World, number: int, num_pages: int) -> None:
        self.world = world
        self.number = number
        self.layout = layout(num_pages)
        self.pool = PagePool(num_pages)
        self.memory = Memory(num_pages)
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
        count = len(want.pages)
        self.next_id += 1
        pages = self.pool.allocate(("send", self.next_id), count)
        if pages is None:
            self.say(link, lambda: self.world.writer_failed(link, want.slot))
            return
        for layer in range(LAYERS):
            for block, page in enumerate(pages):
                self.memory.words[layer, page] = stamp(want.owner, want.generation, layer, block)
        self.pool.expose(("send", self.next_id), 0, pages)
        send = Send(
            transfer_id=self.next_id,
            immediate=pack(want.slot.slot, want.slot.generation),
            outbound=link.outbound,
            src_layout=self.layout,
            dst_layout=self.world.layout,
            src_pages={"main": pages},
            dst_pages={"main": want.pages},
            src_region={("main", 0): 0},
            dst_region={("main", 0): 0},
            expected=want.slot.expected,
            context=link,
        )
        ready = self.world.random.randint(0, count) if self.world.random.random() < 0.3 else 0
        self.running[self.next_id] = Running(send, want, pages, ready)
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
        for transfer_id, running in self.running.items():
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
            self.memory.words[:, running.pages] = POISON
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
        self.clock = VirtualClock()
        self.layout = layout(num_pages)
        self.pool = PagePool(num_pages)
        self.memory = Memory(num_pages)
        self.slots = SlotTable(slots, first_generation=(1 << 20) - 3)
        self.truth = self.memory.words.copy()
        self.wants: list[Want] = []
        self.links: dict[int, Link] = {}
        self.next_owner = 0
        self.next_link = 0
        self.seen: Counter[str] = Counter()
        self.writers = [Writer(self, number + 1, num_pages) for number in range(writers)]

    # --- the destination's own moves

    def open(self, count: int, ttl_s: float) -> bool:
        owner = self.next_owner = self.next_owner + 1
        pages = self.pool.allocate(owner, count)
        if pages is None:
            return False
        if len(self.slots) == self.slots.max_slots:
            self.pool.release(owner)
            return False
        self.check_content(pages)
        self.pool.expose(owner, 1, pages, for_write=True)
        expected = count * PAGE_WORDS * 8 * LAYERS
        slot = self.slots.open(expected, now=self.clock(), ttl_s=ttl_s)
        want = Want(owner, pack(slot.slot, slot.generation), pages, slot)
        slot.context = want
        self.wants.append(want)
        return True

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
            error_rate=r.choice([0.0, 0.0, 0.05]),
            duplicate_rate=r.choice([0.0, 0.2]),
            stale_rate=r.choice([0.0, 0.3]),
            completion_delay_s=(0.0, r.choice([0.0, 1.0])),
            arrival_delay_s=(0.0, r.choice([0.0, 1.0])),
            die_after_writes=r.choice([0, 0, 0, 40]),
            hold_after_writes=r.choice([0, 0, 0, 25]),
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
        # What the next owner finds there is known, so that a late write shows.
        self.memory.words[:, want.pages] = POISON
        self.truth[:, want.pages] = POISON

    # --- control, arriving here

    def bind(self, link: Link, want: Want, writer: Writer) -> None:
        ok = True
        try:
            self.slots.bind(want.slot.slot, want.slot.generation, want.slot.expected, link.link_id, now=self.clock())
        except Exception:
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
        for run in range(first, last):
            a, b, n = write.src[run], write.dst[run], write.length[run]
            self.memory.flat[b : b + n] = writer.memory.flat[a : a + n]
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
                for layer in range(LAYERS):
                    for block, page in enumerate(want.pages):
                        found = self.memory.words[layer, page].tolist()
                        assert found == stamp(want.owner, want.generation, layer, block), "lost or foreign bytes"
                self.truth[:, want.pages] = self.memory.words[:, want.pages]
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

    def check_content(self, pages: list[int]) -> None:
        assert (self.memory.words[:, pages] == self.truth[:, pages]).all(), "bytes came into pages that are nobody's"

    def check(self) -> None:
        """At any moment: pools and slots add up, and no page that is not exposed has changed."""
        self.pool.check_integrity()
        self.slots.check_integrity()
        quiet = [p for p in range(self.pool.total) if self.pool.state(p) in (PageState.FREE, PageState.OWNED)]
        self.check_content(quiet)
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
