"""The nvlink protocol with real sidecars, engines on host memory: every message, abort and death as on a GPU."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvmesh.errors import FailedPrecondition, TransferFailed
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.link import SidecarLink
from nvlink_kit import PostingEngine
from transfer_kit import ROOT, Engine, SidecarProcess, make_layout, soon

SRC, DST = [5, 6, 7, 20, 3, 9], [40, 41, 2, 30, 31, 32]
FLAGS = ("--transports=nvlink,shm,tcp", "--heartbeat-s=0.2", "--lease-s=10", "--max-slots=4")
lives = itertools.count(1)


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SidecarProcess]]:
    """Three sidecars for all tests here: those that a test killed are started again by the next."""
    folder = tmp_path_factory.mktemp("sidecars")
    made = [SidecarProcess(name, folder, *FLAGS) for name in ("src", "dst", "third")]
    yield made
    for process in made:
        process.stop()


class Scene(NamedTuple):
    """third: a sidecar without an engine."""

    source: PostingEngine
    target: Engine
    third: SidecarProcess


@pytest.fixture
async def scene(processes: list[SidecarProcess]) -> AsyncIterator[Scene]:
    await asyncio.gather(*(process.start() for process in processes if not process.alive))
    source = await PostingEngine("p", processes[0], make_layout(), next(lives)).connect()
    target = await Engine("d", processes[1], make_layout(num_pages=50), next(lives)).connect()
    source.fill(1)
    yield Scene(source, target, processes[2])
    await source.close()
    await target.close()


async def begin(source: PostingEngine, target: Engine, ready: int = 0) -> tuple[Any, Any]:
    slot = await target.open(DST)
    descriptor = target.describe(slot, DST)
    transfer: Any = await soon(source.client.start_transfer(descriptor, {"main": SRC}, ready_pages=ready))
    assert transfer.transport == "nvlink"
    return slot, transfer


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not await condition() if asyncio.iscoroutinefunction(condition) else not condition():
            await asyncio.sleep(0.01)


async def test_pages_go_layer_by_layer_byte_exact(scene: Scene) -> None:
    source, target = scene.source, scene.target
    before = target.pages.copy()
    slot, transfer = await begin(source, target, ready=2)
    step = source.begin([transfer], 2, 3)
    assert step is not None
    for layer in range(3):
        step.layer(layer)
    # Layers 0..2 of the step have landed, layer 3 has not: the counter says so and the slot is open.
    await until(lambda: np.array_equal(target.pages[2, DST[2:5]], source.pages[2, SRC[2:5]]))
    np.testing.assert_array_equal(target.pages[3, DST[2:5]], before[3, DST[2:5]])
    assert not slot.completed.done()
    step.layer(3)
    source.client.send_pages(transfer, 5, 1)
    result: Any = await soon(slot.completed)
    assert (result.bytes, result.transport) == (target.expected(DST), "nvlink")
    assert await soon(transfer.done) == target.expected(DST)
    np.testing.assert_array_equal(target.pages[:, DST], source.pages[:, SRC])
    others = [page for page in range(target.layout.num_pages) if page not in DST]
    np.testing.assert_array_equal(target.pages[:, others], before[:, others])
    status = await target.sidecar.status()
    (link,) = status.links
    assert (link.transport, link.reason) == ("nvlink", "same host (boot id), host memory at both ends")
    assert link.bytes == target.expected(DST)
    assert status.counters.stale_writes == 0


async def test_many_slots_and_two_in_one_step(scene: Scene) -> None:
    source, target = scene.source, scene.target
    for round_ in range(8):
        source.fill(round_)
        pairs = []
        for src, dst in (([1, 2, 3], [11, 12, 13]), ([4, 5, 6], [20, 22, 24])):
            slot = await target.open(dst)
            handle: Any = await soon(
                source.client.start_transfer(target.describe(slot, dst), {"main": src}, ready_pages=0)
            )
            pairs.append((slot, handle, src, dst))
        step = source.begin([handle for _, handle, _, _ in pairs], 0, 3)
        assert step is not None
        for layer in range(source.layout.num_layers):
            step.layer(layer)
        for slot, handle, src, dst in pairs:
            await soon(slot.completed)
            await soon(handle.done)
            np.testing.assert_array_equal(target.pages[:, dst], source.pages[:, src])


async def test_engines_that_do_not_post_take_another_transport(scene: Scene) -> None:
    target = scene.target
    plain = await Engine("q", scene.third, make_layout(), next(lives)).connect()
    plain.fill(3)
    slot = await target.open(DST)
    descriptor = target.describe(slot, DST)
    transfer: Any = await soon(plain.client.start_transfer(descriptor, {"main": SRC}, ready_pages=6))
    await soon(slot.completed)
    assert transfer.transport == "shm"
    (link,) = [x for x in (await scene.third.status()).links if x.direction == "out"]
    assert "nvlink: the writer's engine does not write by itself" in link.reason
    await plain.close()


async def test_memory_of_a_gpu_is_passed_on_and_not_mapped(scene: Scene) -> None:
    """Sidecars need no GPU to serve an engine that has one: here its descriptors are of something else."""
    gpu = Engine("g", scene.third, make_layout(num_pages=50), next(lives))
    for region in gpu.regions.values():
        region.memory, region.device = "cuda", "some-uuid"
    await gpu.connect()
    assert {(x.memory, x.device) for x in gpu.client.region_infos} == {("cuda", "some-uuid")}
    assert gpu.client.transports == ["nvlink"]
    status = {x.name: (x.usable, x.reason) for x in (await scene.third.status()).transports}
    assert status["nvlink"][0]
    assert status["shm"] == status["tcp"] == (False, "does not reach cuda memory")
    assert "/memfd:g-main" not in Path(f"/proc/{scene.third.pid}/maps").read_text()  # noqa: ASYNC240
    slot = await gpu.open(DST)
    with pytest.raises(FailedPrecondition, match="nvlink: host memory there, cuda here; shm: does not reach cuda"):
        await soon(scene.source.client.start_transfer(gpu.describe(slot, DST), {"main": SRC}, ready_pages=6))
    await gpu.close()
    # The next engine has memory that all of them reach.
    plain = await Engine("q", scene.third, make_layout(), next(lives)).connect()
    assert plain.client.transports == ["nvlink", "shm", "tcp"]
    await plain.close()


async def test_the_destination_aborts_in_the_middle(scene: Scene) -> None:
    source, target = scene.source, scene.target
    slot, transfer = await begin(source, target)
    step = source.begin([transfer], 0, 6)
    assert step is not None
    step.layer(0)
    # The stream is held up: a launch is in flight and stays so.
    await until(lambda: np.array_equal(target.pages[0, DST], source.pages[0, SRC]))
    source.backend.gate.clear()
    step.layer(1)
    await target.client.close_slot(slot, "not wanted")
    await until(lambda: transfer_stopped(source, transfer))
    assert not slot.drained.done()
    assert not transfer.done.done()
    step.layer(2)
    source.backend.gate.set()
    await soon(slot.drained)
    with pytest.raises(TransferFailed, match="not wanted"):
        await soon(transfer.done)
    # What was in flight landed before Drained; what came after the abort never left.
    np.testing.assert_array_equal(target.pages[1, DST], source.pages[1, SRC])
    assert not target.pages[2, DST].any()
    # The same slot numbers serve again.
    slot, transfer = await begin(source, target, ready=6)
    await soon(slot.completed)
    await soon(transfer.done)
    assert (await target.sidecar.status()).counters.stale_writes == 0


def transfer_stopped(source: PostingEngine, transfer: Any) -> bool:
    found = source.poster._transfers.get(transfer.transfer_id)
    return found is None or found.stopped is not None


async def test_the_source_cancels(scene: Scene) -> None:
    source, target = scene.source, scene.target
    slot, transfer = await begin(source, target, ready=1)
    await source.client.cancel_transfer(transfer, "no time")
    with pytest.raises(TransferFailed, match=r"no time|given up"):
        await soon(transfer.done)
    with pytest.raises(TransferFailed):
        await soon(slot.completed)
    await soon(slot.drained)


async def test_a_page_named_twice_fails_its_generation_alone(scene: Scene) -> None:
    source, target = scene.source, scene.target
    slot, transfer = await begin(source, target, ready=2)
    assert source.begin([transfer], 1, 2) is None
    with pytest.raises(TransferFailed, match="named before"):
        await soon(transfer.done)
    with pytest.raises(TransferFailed, match="named before"):
        await soon(slot.completed)
    await soon(slot.drained)
    slot, transfer = await begin(source, target, ready=6)
    await soon(slot.completed)


async def test_counters_are_zero_before_the_writer_knows(scene: Scene) -> None:
    """A slot number comes again while its word still holds what the last generation counted."""
    source, target = scene.source, scene.target
    numbers = []
    for _ in range(9):
        slot, transfer = await begin(source, target)
        found = source.poster._transfers[transfer.transfer_id]
        word = ctypes.c_uint64.from_address(found.counter(0))
        assert word.value == 0
        source.step(transfer, 0, 6)
        await soon(slot.completed)
        assert word.value == found.generation << 44 | target.expected(DST)
        await soon(transfer.done)
        numbers.append(slot.slot)
    assert len(set(numbers)) == 4


async def test_a_stale_generation_is_counted_and_never_believed(scene: Scene) -> None:
    source, target = scene.source, scene.target
    slot, transfer = await begin(source, target, ready=1)
    found = source.poster._transfers[transfer.transfer_id]
    cell = ctypes.c_uint64.from_address(found.counter(0))
    # Claimed is not landed: the stream's own store of the counter must be behind us, or it undoes ours.
    await until(lambda: found.total > 0 and cell.value == found.generation << 44 | found.total)
    good = cell.value
    cell.value = ((slot.generation - 1) % (1 << 20)) << 44 | target.expected(DST)

    async def counted() -> bool:
        return bool((await target.sidecar.status()).counters.stale_writes)

    await until(counted)
    assert not slot.completed.done()
    cell.value = good
    source.step(transfer, 1, 5)
    result: Any = await soon(slot.completed)
    assert result.bytes == target.expected(DST)


async def test_the_destinations_engine_goes(scene: Scene) -> None:
    source, target = scene.source, scene.target
    _, transfer = await begin(source, target, ready=1)
    assert len(source.poster._peers) == 1
    await target.client.close()
    with pytest.raises(TransferFailed):
        await soon(transfer.done)
    await until(lambda: not source.poster._peers)
    # The next life is let in, so the fence was heard.
    again = await Engine("d", target.sidecar, target.layout, next(lives)).connect()
    slot, transfer = await begin(source, again, ready=6)
    await soon(slot.completed)
    await soon(transfer.done)
    await again.close()


async def test_the_destinations_sidecar_is_killed(scene: Scene) -> None:
    source, target = scene.source, scene.target
    slot, transfer = await begin(source, target)
    step = source.begin([transfer], 0, 6)
    assert step is not None
    source.backend.gate.clear()
    step.layer(0)
    target.sidecar.kill()
    with pytest.raises(TransferFailed):
        await soon(slot.completed)
    await until(lambda: transfer_stopped(source, transfer))
    # Our own kernel may still write: neither end's pages are free.
    assert not slot.drained.done()
    assert not transfer.done.done()
    await target.sidecar.start()
    source.backend.gate.set()
    with pytest.raises(TransferFailed):
        await soon(transfer.done)
    again = await Engine("d", target.sidecar, target.layout, next(lives)).connect()
    # (Its own client is lost; the writers of the dead sidecar are this process, which has not exited.)
    slot, transfer = await begin(source, again, ready=6)
    await soon(slot.completed)
    await again.close()


async def test_pages_of_a_killed_sidecar_come_back_when_its_successor_hears_that_nothing_is_mapped(
    scene: Scene,
) -> None:
    """The destination's engine lives on, and so does the source's, whose launch is in flight meanwhile."""
    source = scene.source
    target = Engine("e", scene.third, make_layout(num_pages=50), next(lives))
    link = SidecarLink(
        scene.third.socket,
        engine_id=target.name,
        incarnation=target.incarnation,
        layout=target.layout,
        regions=target.regions,
        doorbell=target.doorbell_region,
        ring=target.ring_region,
    )
    link.start()
    target.client = await link.wait_connected(60)
    slot, transfer = await begin(source, target)
    step = source.begin([transfer], 0, 6)
    assert step is not None
    source.backend.gate.clear()
    step.layer(0)
    scene.third.kill()
    with pytest.raises(TransferFailed):
        await soon(slot.completed)
    await until(lambda: transfer_stopped(source, transfer))
    await scene.third.start()
    await until(lambda: link.client is not None and link.client is not target.client)
    target.client = await link.wait_connected(60)
    # The successor has taken the engine in; whoever was let in by its predecessor still writes.
    assert not slot.drained.done()
    assert not transfer.done.done()
    source.backend.gate.set()
    await soon(slot.drained)
    with pytest.raises(TransferFailed):
        await soon(transfer.done)
    slot, transfer = await begin(source, target, ready=6)
    await soon(slot.completed)
    await soon(transfer.done)
    np.testing.assert_array_equal(target.pages[:, DST], source.pages[:, SRC])
    await link.close()
    await target.close()


async def test_the_sources_sidecar_is_killed(scene: Scene) -> None:
    source, target = scene.source, scene.target
    slot, transfer = await begin(source, target)
    step = source.begin([transfer], 0, 6)
    assert step is not None
    source.backend.gate.clear()
    step.layer(0)
    source.sidecar.kill()
    await soon(source.lost.wait())
    with pytest.raises(TransferFailed):
        await soon(slot.completed)
    assert not slot.drained.done()
    assert not transfer.done.done()
    source.backend.gate.set()
    with pytest.raises(TransferFailed):
        await soon(transfer.done)
    # Unmapped, but nobody has told the destination: the successor does.
    await until(lambda: not source.poster._peers)
    assert not slot.drained.done()
    await source.sidecar.start()
    source.lost.clear()
    await source.connect()
    await soon(slot.drained)
    slot, transfer = await begin(source, target, ready=6)
    await soon(slot.completed)


class Child:
    """A posting engine in a process of its own, to be killed."""

    def __init__(self, sidecar: SidecarProcess) -> None:
        self.sidecar = sidecar

    async def start(self) -> Child:
        env = os.environ | {"PYTHONPATH": f"{ROOT / 'libs'}:{ROOT}:{ROOT / 'tests/integration'}"}
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(ROOT / "tests/integration/nvlink_child.py"),
            str(self.sidecar.socket),
            str(next(lives)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=env,
        )
        await self.hear()
        return self

    async def hear(self) -> Any:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), 60)
        return json.loads(line)

    async def ask(self, **what: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what).encode() + b"\n")
        await self.process.stdin.drain()
        return await self.hear()


async def test_the_source_is_killed_with_a_launch_in_flight(scene: Scene) -> None:
    target = scene.target
    child = await Child(scene.third).start()
    try:
        slot = await target.open(DST)
        descriptor = target.describe(slot, DST).SerializeToString().hex()
        started = await child.ask(do="start", descriptor=descriptor, pages=SRC, ready=0)
        assert started["transport"] == "nvlink"
        await child.ask(do="layers", first=0, count=6, layers=2, hold=True)
        # The sidecar loses its engine, the engine still writes: stopped, it is no fence.
        child.process.send_signal(signal.SIGSTOP)
        await target.client.close_slot(slot, "too long")
        assert not slot.drained.done()
        child.process.send_signal(signal.SIGKILL)
        await soon(slot.drained)
        status = await target.sidecar.status()
        assert status.counters.slots_failed == 1
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.process.kill()
        await child.process.wait()


async def test_the_destination_is_killed(scene: Scene) -> None:
    """Its sidecar and the source notice; the source lets go of memory whose owner is gone."""
    source, target = scene.source, scene.target
    child = await Child(scene.third).start()
    try:
        opened = await child.ask(do="open", pages=DST)
        descriptor = pb.Descriptor.FromString(bytes.fromhex(opened["descriptor"]))
        transfer: Any = await soon(source.client.start_transfer(descriptor, {"main": SRC}, ready_pages=2))
        child.process.kill()
        with pytest.raises(TransferFailed):
            await soon(transfer.done)
        await until(lambda: not source.poster._peers)
        slot, transfer = await begin(source, target, ready=6)
        await soon(slot.completed)
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.process.kill()
        await child.process.wait()


async def test_the_stream_is_the_only_thread_that_writes(scene: Scene) -> None:
    """`layer` never copies by itself: the engine's thread would wait for it."""
    threads: set[str] = set()
    source, target = scene.source, scene.target
    source.backend._on_launch = lambda group, layer: threads.add(threading.current_thread().name)
    slot, transfer = await begin(source, target, ready=3)
    source.step(transfer, 3, 3)
    await soon(slot.completed)
    assert threads == {"kvmesh-host-stream"}


async def test_random_ends_leave_no_foreign_byte(scene: Scene) -> None:
    """Transfers that end anywhere, several at a time: what completed is whole, and pages that came back stay as their
    owner left them."""
    source, target = scene.source, scene.target
    rng = np.random.default_rng(11)
    ours = np.zeros(target.layout.num_pages, dtype=np.uint8)
    free = set(range(target.layout.num_pages))
    ends: dict[str, int] = {"whole": 0, "closed": 0, "cancelled": 0}

    async def one(number: int) -> None:
        count = int(rng.integers(1, 9))
        while len(free) < count:
            await asyncio.sleep(0.005)
        dst = [int(page) for page in rng.permutation(sorted(free))[:count]]
        free.difference_update(dst)
        src = [int(page) for page in rng.permutation(source.layout.num_pages)[:count]]
        how = str(rng.choice(["whole", "closed", "cancelled"]))
        ready = int(rng.integers(0, count + 1))
        slot = await soon(target.open(dst, request_id=str(number)))
        transfer: Any = await soon(
            source.client.start_transfer(target.describe(slot, dst), {"main": src}, ready_pages=ready)
        )
        first, last = ready, count if how == "whole" else int(rng.integers(ready, count + 1))
        while first < last:
            pages = int(rng.integers(1, last - first + 1))
            # A step of its own for each transfer: none is under way in another's await.
            source.step(transfer, first, pages)
            first += pages
            await asyncio.sleep(0)
        if how == "closed":
            await target.client.close_slot(slot, "not wanted")
        elif how == "cancelled":
            await source.client.cancel_transfer(transfer, "no time")
        await asyncio.wait([slot.drained], timeout=60)
        assert slot.drained.done()
        if slot.completed.exception() is None:
            np.testing.assert_array_equal(target.pages[:, dst], source.pages[:, src])
        else:
            assert how != "whole"
        with contextlib.suppress(TransferFailed):
            await soon(transfer.done)
        ends[how] += 1
        # The pages are their owner's again.
        ours[dst] = number % 251 + 1
        target.pages[:, dst] = (number % 251 + 1) & 0xFF
        free.update(dst)

    for start in range(0, 90, 3):
        await asyncio.gather(*(one(start + i) for i in range(3)))
        idle = sorted(free)
        assert len(idle) == target.layout.num_pages
        for page in idle:
            if ours[page]:
                assert (target.pages[:, page] == ours[page]).all()
    assert min(ends.values()) > 5
    assert (await target.sidecar.status()).slots_open == 0
    assert not source.poster._transfers
