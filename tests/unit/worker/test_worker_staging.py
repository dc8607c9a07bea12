"""KV through host memory, with regions of the host as the device: whole workers, and who holds which staging page."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.engine.cuda.staging import Lease, Staging
from kvmesh.engine.nvlink.host import HostBackend, address_of
from kvmesh.engine.runner import SamplingParams
from kvmesh.engine.scripted import scripted_output
from kvmesh.engine.worker.steps import RequestStep
from kvmesh.errors import DeadlineExceeded, TooLarge
from kvmesh.kv.layout import KvGroup, KvLayout, group_view
from kvmesh.kv.region import Region
from kvmesh.kv.ring import DOORBELL_BYTES, Doorbell, StepEntry, StepRecord
from worker_fakes import Fabric
from worker_harness import WAIT_S, Gateway, Running, prompt, running, until

GROUPS = (KvGroup("even", "full", (0, 2), 2, 8), KvGroup("odd", "full", (1,), 1, 8))
LAYERS = 3
PAGES, STAGED = 24, 10


class World:
    """A device and its staging, both on the host. `held` streams stand still until `let`."""

    def __init__(self, staged: int = STAGED) -> None:
        self.layout = KvLayout(1, "bf16", 4, GROUPS, PAGES)
        self.host = replace(self.layout, num_pages=staged)
        self.device_regions = {g.name: Region.create("d", self.layout.region_bytes(g)) for g in GROUPS}
        self.host_regions = {g.name: Region.create("h", self.host.region_bytes(g)) for g in GROUPS}
        self.bell_region = Region.create("bell", DOORBELL_BYTES)
        self.doorbell = Doorbell(self.bell_region.buf)
        self.launched: list[tuple[int, int]] = []
        self.out = HostBackend({}, lambda group, layer: self.launched.append((group, layer)))
        self.into = HostBackend({})
        self.staging = Staging(
            self.layout,
            self.host,
            device={name: address_of(region) for name, region in self.device_regions.items()},
            host={name: address_of(region) for name, region in self.host_regions.items()},
            bell=self.doorbell.address,
            out=self.out,
            into=self.into,
        )

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.out.gate.set()
        self.into.gate.set()
        self.staging.close()
        self.doorbell.close()
        for region in (*self.device_regions.values(), *self.host_regions.values(), self.bell_region):
            region.close()

    def on_device(self, group: str) -> Any:
        return group_view(self.device_regions[group].buf, self.layout, group)

    def on_host(self, group: str) -> Any:
        return group_view(self.host_regions[group].buf, self.host, group)

    def scramble(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for region in (*self.device_regions.values(), *self.host_regions.values()):
            region.view()[:] = rng.integers(0, 256, region.nbytes, dtype=np.uint8)

    def idle(self) -> None:
        self.staging.pool.check_integrity()
        assert self.staging.pool.counts()._asdict() == {
            "free": self.staging.pool.total, "owned": 0, "exposed": 0, "draining": 0
        }  # fmt: skip


async def rung(world: World, value: int) -> None:
    await until(lambda: world.doorbell.value >= value, lambda: f"{world.doorbell.value} of {value}")


async def test_a_step_copies_its_pages_layer_by_layer_and_rings_behind_each() -> None:
    with World() as world:
        world.scramble(1)
        lease = await world.staging.take([7, 3, 20], 30)
        other = await world.staging.take([5], 30)
        for item, number in ((lease, 40), (other, 41)):
            world.staging.expose(item, for_write=False)
            world.staging.start(item, number)
        # A step without pages came before: it has rung nothing.
        first = world.staging.bell.value + LAYERS + 1
        record = StepRecord(first, LAYERS, (StepEntry(40, 1, 2), StepEntry(41, 0, 1), StepEntry(99, 0, 4)))
        before = {g.name: world.on_host(g.name).copy() for g in GROUPS}
        step = world.staging.step(record)
        assert world.staging.bell.value == first + LAYERS - 1
        for layer, (group, index) in enumerate((("even", 0), ("odd", 0), ("even", 1))):
            step.layer(layer)
            await rung(world, first + layer)
            assert world.doorbell.value == first + layer
            for page, staged in ((3, lease.pages[1]), (20, lease.pages[2]), (5, other.pages[0])):
                assert (world.on_host(group)[index, staged] == world.on_device(group)[index, page]).all()
        # Page 7 is no part of the step.
        for group in ("even", "odd"):
            assert (world.on_host(group)[:, lease.pages[0]] == before[group][:, lease.pages[0]]).all()
        for item in (lease, other):
            await world.staging.give_back(item)
        world.idle()


async def test_the_bell_counts_on_whatever_becomes_of_a_step() -> None:
    with World() as world:
        lease = await world.staging.take([1, 2], 30)
        world.staging.start(lease, 5)
        broken = world.staging.step(StepRecord(1, LAYERS, (StepEntry(5, 0, 2),)))
        broken.layer(0)
        # The rest of it never comes. Its transfer ends; the next record begins behind it all the same.
        await world.staging.give_back(lease)
        assert world.staging.bell.value == LAYERS
        step = world.staging.step(StepRecord(LAYERS + 1, LAYERS, (StepEntry(5, 0, 2),)))
        for layer in range(LAYERS):
            step.layer(layer)
        await rung(world, 2 * LAYERS)
        world.idle()


async def test_a_transfer_that_ends_in_the_middle_of_a_step_is_copied_no_more() -> None:
    with World() as world:
        world.scramble(2)
        gone, kept = await world.staging.take([1], 30), await world.staging.take([2], 30)
        world.staging.start(gone, 1)
        world.staging.start(kept, 2)
        step = world.staging.step(StepRecord(1, LAYERS, (StepEntry(1, 0, 1), StepEntry(2, 0, 1))))
        step.layer(0)
        await world.staging.give_back(gone)
        before = world.on_host("even")[1, gone.pages[0]].copy()
        step.layer(1)
        step.layer(2)
        await rung(world, LAYERS)
        assert (world.on_host("even")[1, gone.pages[0]] == before).all()
        assert (world.on_host("even")[1, kept.pages[0]] == world.on_device("even")[1, 2]).all()
        await world.staging.give_back(kept)
        world.idle()


async def test_pages_stay_away_while_a_copy_uses_them() -> None:
    with World() as world:
        world.out.gate.clear()
        lease = await world.staging.take(list(range(STAGED)), 30)
        filling = asyncio.ensure_future(world.staging.fill(lease, 4))
        await until(lambda: lease.out, "never queued")
        filling.cancel()
        back = asyncio.ensure_future(world.staging.give_back(lease))
        again = asyncio.ensure_future(world.staging.give_back(lease))
        with pytest.raises(DeadlineExceeded):
            await world.staging.take([0], 0.05)
        world.out.gate.set()
        await back
        await again
        world.idle()


async def test_first_come_first_served() -> None:
    with World() as world:
        held = await world.staging.take(list(range(8)), 30)
        large = asyncio.ensure_future(world.staging.take(list(range(9)), 60))
        small = asyncio.ensure_future(world.staging.take([1, 2], 60))
        await asyncio.sleep(0)
        assert not small.done()  # it fits, but the large one was here before
        cancelled = asyncio.ensure_future(world.staging.take([3], 60))
        await asyncio.sleep(0)
        cancelled.cancel()
        await world.staging.give_back(held)
        first = await large
        assert not small.done()
        await world.staging.give_back(first)
        await world.staging.give_back(await small)
        with pytest.raises(TooLarge, match="staging_pages"):
            await world.staging.take(list(range(STAGED + 1)), 60)
        # Whoever gives up in front lets the next one through.
        held = await world.staging.take(list(range(8)), 30)
        with pytest.raises(DeadlineExceeded):
            await world.staging.take(list(range(9)), 0.01)
        await world.staging.give_back(await world.staging.take([1, 2], 30))
        await world.staging.give_back(held)
        world.idle()


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["take", "cancel", "fill", "step", "land", "expose", "drain", "back", "hold", "let"]),
        st.integers(0, 7),
        st.integers(1, STAGED),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(ACTIONS)
def test_every_page_comes_back_exactly_once(actions: list[tuple[str, int, int]]) -> None:
    async def run() -> None:
        with World() as world:
            await _play(world, actions)

    asyncio.run(run())


async def _play(world: World, actions: list[tuple[str, int, int]]) -> None:
    staging = world.staging
    leases: list[Lease] = []
    taking: list[asyncio.Task[None]] = []
    copying: list[asyncio.Task[None]] = []
    backs: list[asyncio.Task[None]] = []
    exposed: set[int] = set()
    numbers = iter(range(1, 1000))

    async def take(count: int) -> None:
        leases.append(await staging.take(list(range(count)), 60))

    def pick(which: int) -> Lease | None:
        return leases[which % len(leases)] if leases else None

    for what, which, count in actions:
        lease = pick(which)
        if what == "take":
            taking.append(asyncio.ensure_future(take(count)))
        elif what == "cancel" and taking:
            taking[which % len(taking)].cancel()
        elif what == "hold":
            (world.out if which % 2 else world.into).gate.clear()
        elif what == "let":
            (world.out if which % 2 else world.into).gate.set()
        elif lease is not None and not lease.closed:
            count = min(count, len(lease.pages))
            if what == "fill":
                copying.append(asyncio.ensure_future(staging.fill(lease, count)))
            elif what == "land":
                copying.append(asyncio.ensure_future(staging.land(lease)))
            elif what == "step":
                number = next(numbers)
                staging.start(lease, number)
                step = staging.step(StepRecord(staging.bell.value + 1, LAYERS, (StepEntry(number, 0, count),)))
                for layer in range(which % (LAYERS + 1)):
                    step.layer(layer)
            elif what == "expose" and lease.serial not in exposed:
                exposed.add(lease.serial)
                staging.expose(lease, for_write=bool(which % 2))
            elif what == "drain":
                staging.draining(lease)
            elif what == "back":
                backs.append(asyncio.ensure_future(staging.give_back(lease)))
        elif what == "back" and lease is not None:
            backs.append(asyncio.ensure_future(staging.give_back(lease)))
        await asyncio.sleep(0)
        staging.pool.check_integrity()
        held = [page for item in leases if not item.returned for page in item.pages]
        assert len(held) == len(set(held))
    world.out.gate.set()
    world.into.gate.set()
    for task in taking:
        task.cancel()
    await asyncio.gather(*taking, return_exceptions=True)
    for task in copying:
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await asyncio.gather(*backs, *[staging.give_back(lease) for lease in leases])
    world.idle()


# -- whole workers over a fake fabric


@contextlib.asynccontextmanager
async def pair(fabric: Fabric, *, decode_cache: bool = True, source_pages: int = 40, **values: Any) -> Any:
    common = {"staging": "on", "staging_pages": 40, "max_batch": 8}
    source = common | {"staging_pages": source_pages}
    async with (
        running(fabric=fabric, role="prefill", instance="p", chunk_size=40, **(source | values)) as prefill,
        running(fabric=fabric, role="decode", instance="d", prefix_cache=decode_cache, **(common | values)) as decode,
    ):
        yield prefill, decode


def staged(worker: Running) -> Staging:
    found = worker.worker.ctx.staging  # type: ignore[union-attr]
    assert found is not None
    return found


async def all_is_back(*workers: Running) -> None:
    for worker in workers:
        staging = staged(worker)
        await until(lambda s=staging: s.pool.free_count == s.pool.total, lambda s=staging: str(s.pool.counts()))
        staging.pool.check_integrity()
        await worker.pages_are_back()


async def test_output_equals_unified_through_staging() -> None:
    """The scripted runner checks every byte of every page it reads, and counts what is foreign."""
    async with pair(Fabric()) as (prefill, decode), Gateway(decode) as gateway:
        long = prompt(500, 3)
        prompts = [prompt(18, 1), prompt(161, 2), long, long[:320] + prompt(90, 4), prompt(600, 5), prompt(602, 6)]
        answers = [await gateway.submit(gateway.request(p, prefill=[prefill.target()])) for p in prompts]
        for tokens, answer in zip(prompts, answers, strict=True):
            await answer.wait()
            want = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
            assert answer.tokens[0] == scripted_output(tokens, want)[0]
            assert answer.finished.transfer_bytes > 0
            assert answer.finished.prefill_retries == 0
        assert decode.worker._runner.foreign == prefill.worker._runner.foreign == 0  # type: ignore[union-attr]
        await all_is_back(prefill, decode)


async def test_what_prefill_has_cached_is_copied_before_it_is_called_ready() -> None:
    async with pair(Fabric(), decode_cache=False) as (prefill, decode), Gateway(decode) as gateway:
        long = prompt(500, 3)
        for tokens in (long, prompt(600, 8), [*long[:320], *prompt(90, 9)], long):
            answer = await gateway.ask(tokens, prefill=[prefill.target()])
            want = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
            assert answer.tokens[0] == scripted_output(tokens, want)[0]
            assert answer.finished.prefill_retries == 0
        assert answer.finished.cached_tokens >= 480
        await all_is_back(prefill, decode)


async def test_a_prompt_that_staging_does_not_hold_is_prefilled_here() -> None:
    async with pair(Fabric(), staging_pages=4) as (prefill, decode), Gateway(decode) as gateway:
        answer = await gateway.ask(prompt(200), prefill=[prefill.target()])
        assert answer.finished.transfer_bytes == 0
        assert not prefill.sidecar.transfers
        short = await gateway.ask(prompt(50, 2), prefill=[prefill.target()])
        assert short.finished.transfer_bytes > 0
        await all_is_back(prefill, decode)


async def test_a_source_without_room_refuses_and_one_with_little_serves_in_turn() -> None:
    async with pair(Fabric(), source_pages=20) as (prefill, decode), Gateway(decode) as gateway:
        answer = await gateway.ask(prompt(400), prefill=[prefill.target()])
        assert (answer.finished.transfer_bytes, answer.finished.prefill_retries) == (0, 1)
        answers = [
            await gateway.submit(gateway.request(prompt(150, n), prefill=[prefill.target()])) for n in range(1, 9)
        ]
        for answer in answers:
            assert (await answer.wait()).finished.transfer_bytes > 0
        await all_is_back(prefill, decode)


STEPS = [
    RequestStep.ADMITTED, RequestStep.OPENING_SLOT, RequestStep.SLOT_OPEN, RequestStep.EXPOSED,
    RequestStep.CALLING_PREFILL, RequestStep.KV_COMPLETE, RequestStep.JOINED, RequestStep.RUN_RECEIVED,
    RequestStep.RUN_SUBMITTED, RequestStep.RUN_ADMITTED, RequestStep.TRANSFER_STARTED, RequestStep.COMPUTING,
    RequestStep.COMPUTED,
]  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
async def test_cancelled_at_any_step_every_page_comes_back(step: RequestStep) -> None:
    reached: list[RequestStep] = []
    gateways: list[Gateway] = []

    async def at(now: RequestStep, key: Any) -> None:
        if now is step and not reached:
            reached.append(now)
            await gateways[0].abort()

    async with pair(Fabric(), at_step=at) as (prefill, decode), Gateway(decode) as gateway:
        gateways.append(gateway)
        answer = await gateway.submit(gateway.request(prompt(300), prefill=[prefill.target()]))
        await answer.wait()
        await until(lambda: reached, "the step is never reached")
        await all_is_back(prefill, decode)


Fault = Callable[[Running, Running], None]


def _no_start(prefill: Running, decode: Running) -> None:
    prefill.sidecar.refuse_start = "not today"


def _no_slot(prefill: Running, decode: Running) -> None:
    decode.sidecar.refuse_open = "not today"


@pytest.mark.parametrize("fault", [_no_start, _no_slot])
async def test_a_placement_that_fails_gives_its_pages_back(fault: Fault) -> None:
    async with pair(Fabric()) as (prefill, decode), Gateway(decode) as gateway:
        fault(prefill, decode)
        answer = await gateway.ask(prompt(300), prefill=[prefill.target()])
        assert answer.finished.transfer_bytes == 0
        await all_is_back(prefill, decode)


async def test_pages_that_drain_stay_until_they_have() -> None:
    async with pair(Fabric()) as (prefill, decode), Gateway(decode) as gateway:
        prefill.sidecar.hold_writes = True
        decode.sidecar.hold_drains = True
        request = gateway.request(prompt(300), prefill=[prefill.target()])
        answer = await gateway.submit(request)
        await until(lambda: prefill.sidecar.transfers, "no transfer")
        await gateway.abort(request.request_id)
        await answer.wait()
        await until(lambda: staged(decode).pool.counts().draining == 19, lambda: str(staged(decode).pool.counts()))
        decode.sidecar.let_drain()
        prefill.sidecar.let_write()
        await all_is_back(prefill, decode)


async def test_a_lost_sidecar_gives_every_page_back() -> None:
    async with pair(Fabric()) as (prefill, decode), Gateway(decode) as gateway:
        prefill.sidecar.hold_writes = True
        answer = await gateway.submit(gateway.request(prompt(300), prefill=[prefill.target()]))
        await until(lambda: prefill.sidecar.transfers, "no transfer")
        link: Any = prefill.worker.ctx.link  # type: ignore[union-attr]
        await link.lose()
        async with asyncio.timeout(WAIT_S):
            await answer.ended.wait()
        assert answer.finished.transfer_bytes == 0
        await all_is_back(prefill, decode)


async def test_the_engines_pages_stay_while_what_landed_is_copied_to_them() -> None:
    async with pair(Fabric()) as (prefill, decode), Gateway(decode) as gateway:
        staging = staged(decode)
        into: Any = staging._into
        into.gate.clear()
        request = gateway.request(prompt(300), prefill=[prefill.target()])
        answer = await gateway.submit(request)
        await until(lambda: into._launched, "nothing lands")
        await gateway.abort(request.request_id)
        await answer.wait()
        await decode.core_has_looked()
        await until(lambda: staging.pool.counts().draining == 19, lambda: str(staging.pool.counts()))
        assert decode.core.pool.counts().draining == 19
        into.gate.set()
        await all_is_back(prefill, decode)
