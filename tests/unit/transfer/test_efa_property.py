"""Random lives of efa links: writes, aborts, failures, deaths and fences, with everything on the wire in random order.

Each page of the destination belongs to one generation at a time and is given back as the protocol says: when the writer
is drained, or when its link is fenced. From then on nothing may write to it.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest

from efa_world import EfaEnd, EfaLink
from kvmesh.transfer.transports.efa.stub import BAD_QPN, REM_ACCESS, UNRESPONSIVE, EfaStubNetwork
from verbs_world import LAYERS, PAGE, randomize

STEPS = 20_000 if os.environ.get("KVMESH_SOAK") else 2_500
PAGES = 32 * LAYERS
POISON = 0xEE


@dataclass
class Generation:
    """One transfer: its pages are its own until it is over."""

    immediate: int
    link: EfaLink
    src: list[int]
    dst: list[int]
    left: dict[int, int] = field(default_factory=dict)
    failed: bool = False
    aborted: bool = False


class Life:
    """Two writers, one destination."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.network = EfaStubNetwork(seed=seed, flushes=bool(seed % 2))
        self.free = set(range(PAGES))
        self.running: dict[int, Generation] = {}
        self.links: list[EfaLink] = []
        self.serial = 0
        self.seen: Counter[str] = Counter()
        self.known = np.full(PAGES * PAGE, POISON, dtype=np.uint8)

    async def start(self) -> None:
        r = self.random
        self.target = await EfaEnd(self.network, "dst", receives=r.choice([2, 5, 16])).start()
        self.target.bytes[:] = POISON
        self.sources = []
        for name in ("a", "b"):
            depth = r.choice([1, 4, 64])
            machine = {"max_rdma": 4096}
            self.sources.append(
                await EfaEnd(self.network, name, machine=machine, send_depth=depth, batch=r.choice([1, 3, 64])).start()
            )
            randomize(self.sources[-1], len(self.sources))
        for source in self.sources:
            await self.connect(source)
        self.network.hold = True

    async def connect(self, source: EfaEnd) -> None:
        self.serial += 1
        self.links.append(await EfaLink(source, self.target, self.serial).open())
        self.seen["links"] += 1

    def begin(self) -> None:
        r = self.random
        count = r.randint(1, 9)
        if len(self.free) < count:
            return
        self.serial += 1
        link = r.choice(self.links)
        dst = r.sample(sorted(self.free), count)
        self.free -= set(dst)
        made = self.running[self.serial] = Generation(self.serial, link, r.choices(range(PAGES), k=count), dst)
        at = 0
        while at < count:
            size = r.randint(1, count - at)
            src = [page * PAGE for page in made.src[at : at + size]]
            write = link.write(made.immediate, src, [page * PAGE for page in made.dst[at : at + size]])
            made.left[write.context] = write.nbytes
            link.outbound.post(write)
            at += size

    def poll(self, link: EfaLink) -> None:
        for done in link.outbound.poll(self.random.choice([1, PAGE, 1 << 30])):
            (owner,) = [g for g in self.running.values() if g.link is link and done.context in g.left]
            nbytes = owner.left.pop(done.context)
            assert done.nbytes == (0 if done.error else nbytes)
            owner.failed |= bool(done.error)
            if owner.failed and not link.outbound.broken:
                link.outbound.flush(owner.immediate)
            # A broken link's generations end with the destination's fence, and not before.
            if not owner.left and not link.outbound.broken:
                self.end(owner)

    def end(self, generation: Generation) -> None:
        """The writer is drained."""
        link = generation.link
        if not generation.failed:
            for a, b in zip(generation.src, generation.dst, strict=True):
                want = link.source.bytes[a * PAGE : (a + 1) * PAGE]
                np.testing.assert_array_equal(self.target.bytes[b * PAGE : (b + 1) * PAGE], want)
            self.seen["done"] += 1
        self.give_back(generation)

    def give_back(self, generation: Generation) -> None:
        del self.running[generation.immediate]
        self.seen["failed"] += generation.failed
        self.seen["aborted"] += generation.aborted
        for page in generation.dst:
            self.target.bytes[page * PAGE : (page + 1) * PAGE] = POISON
        self.free |= set(generation.dst)

    def check(self) -> None:
        pages = self.target.bytes.reshape(PAGES, PAGE)
        assert (pages[sorted(self.free)] == POISON).all(), "a write came to a page that is nobody's"
        for link in self.links:
            for immediate, nbytes in link.received.items():
                generation = self.running.get(immediate)
                if generation is not None:
                    assert nbytes <= len(generation.dst) * PAGE

    async def rebuild(self, link: EfaLink, *, first: str) -> None:
        """The link ends: the destination fences, the writer lets go, in either order; then a new one."""
        assert link.inbound is not None
        if first == "writer":
            link.outbound.fence("given up")
        await link.inbound.fence()
        # From here on its pages are the destination's, whatever the writer is still posting.
        for generation in [g for g in self.running.values() if g.link is link]:
            generation.failed = True
            self.give_back(generation)
        self.network.run(self.random.randint(0, 20))
        link.outbound.fence("given up")
        link.outbound.poll(0)
        link.outbound.close()
        self.links.remove(link)
        await self.connect(link.source)

    async def step(self) -> None:
        r = self.random
        link = r.choice(self.links)
        action = r.choices(
            ("begin", "poll", "run", "take", "abort", "fail", "die"), (3.0, 6.0, 6.0, 4.0, 0.4, 0.15, 0.15)
        )[0]
        if action == "begin":
            self.begin()
        elif action == "poll":
            self.poll(link)
        elif action == "run":
            self.network.run(r.randint(1, 8))
        elif action == "take":
            link.take()
        elif action == "abort" and self.running:
            generation = r.choice(list(self.running.values()))
            generation.aborted = True
            generation.link.outbound.flush(generation.immediate)
        elif action == "fail":
            self.network.fail_after = r.randint(0, 5)
            self.network.fail_status = r.choice([UNRESPONSIVE, BAD_QPN, REM_ACCESS])
        elif action == "die":
            await self.rebuild(link, first=r.choice(["writer", "destination"]))
            self.seen["died"] += 1
        for broken in [x for x in self.links if x.outbound.broken or not x.inbound.usable]:
            self.seen["broke"] += 1
            await self.rebuild(broken, first="writer")
        self.check()

    async def finish(self) -> None:
        self.network.fail_after = None
        for _ in range(5_000):
            for link in list(self.links):
                self.poll(link)
                link.take()
            self.network.run(50)
            if not self.running:
                break
        assert not self.running, "a generation never ends"
        self.network.run()
        self.check()
        assert len(self.free) == PAGES
        for link in self.links:
            await link.close()
        for end in (*self.sources, self.target):
            await end.close()
        assert self.network.violations == []
        assert self.network.open_objects == 0


@pytest.mark.parametrize("seed", range(6))
async def test_no_page_gets_a_byte_that_is_not_its_own(seed: int) -> None:
    life = Life(seed)
    await life.start()
    for _ in range(STEPS):
        await life.step()
    await life.finish()
    # A life in which nothing succeeds or fails would prove nothing.
    for name, least in {"done": 20, "failed": 10, "aborted": 5, "died": 5, "broke": 5}.items():
        assert life.seen[name] >= least, life.seen
