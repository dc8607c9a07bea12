"""Real sidecars, engines of several ranks: every byte of every rank, whatever the two shardings and page sizes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from kvmesh.errors import FailedPrecondition, InvalidArgument, KvmeshError, TransferFailed
from kvmesh.kv.layout import KvLayout
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.tail import TailBuffer
from sharded_kit import DRAFT, FULL, LATENT, ShardedEngine, Transfer, all_of, sharded
from transfer_kit import ROOT, SidecarProcess, soon

FAST = ("--heartbeat-s=0.2", "--lease-s=3")
HIDDEN = TailBuffer("hidden", 96, 4)
LOGITS = TailBuffer("logits", 1000, 4)


@pytest.fixture(scope="module", params=["shm", "tcp"])
def processes(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[list[SidecarProcess]]:
    folder = tmp_path_factory.mktemp("sidecars")
    made = [SidecarProcess(name, folder, f"--transports={request.param}", *FAST) for name in ("src", "dst")]
    yield made
    for process in made:
        process.stop()


@contextlib.asynccontextmanager
async def engines(
    processes: list[SidecarProcess],
    source: KvLayout,
    target: KvLayout,
    tails: tuple[TailBuffer, ...] = (),
    target_tails: tuple[TailBuffer, ...] | None = None,
) -> AsyncIterator[tuple[ShardedEngine, ShardedEngine]]:
    await asyncio.gather(*(process.start() for process in processes if not process.alive))
    a = ShardedEngine("p", processes[0], source, tails)
    b = ShardedEngine("d", processes[1], target, tails if target_tails is None else target_tails)
    try:
        await asyncio.gather(a.connect(), b.connect())
        yield a, b
    finally:
        await all_of(a, b)


@pytest.mark.parametrize(
    ("source", "target", "tokens", "first_block", "ready"),
    [
        # Coarser into finer, finer into coarser; the last page is not full.
        (sharded(2, 16), sharded(4, 16), 70, 0, 2),
        (sharded(4, 16), sharded(1, 16), 70, 1, 0),
        # kv_heads < tp on either side: replicas.
        (sharded(4, 16, (FULL, DRAFT)), sharded(2, 16, (FULL, DRAFT)), 50, 0, 1),
        (sharded(1, 16, (DRAFT,)), sharded(4, 16, (DRAFT,)), 33, 0, 0),
        # Latent KV is on every rank.
        (sharded(2, 16, (LATENT,)), sharded(2, 16, (LATENT,)), 90, 2, 1),
        (sharded(4, 16, (LATENT,)), sharded(2, 64, (LATENT,)), 130, 1, 3),
        # Pages of another size, and both.
        (sharded(1, 16), sharded(1, 64), 150, 1, 0),
        (sharded(2, 64), sharded(4, 16), 150, 3, 1),
        (sharded(2, 24, (FULL, DRAFT)), sharded(1, 16, (FULL, DRAFT)), 100, 2, 1),
    ],
    ids=lambda value: f"tp{value.tp}-page{value.page_size}" if isinstance(value, KvLayout) else str(value),
)
async def test_every_byte_of_every_rank(
    processes: list[SidecarProcess], source: KvLayout, target: KvLayout, tokens: int, first_block: int, ready: int
) -> None:
    async with engines(processes, source, target) as (a, b):
        for seed in range(2):
            transfer = Transfer(a, b, tokens=tokens, first_block=first_block, seed=seed)
            transfer.fill()
            await transfer.begin(ready)
            await transfer.end(ready)


async def test_tails_and_a_draft_model(processes: list[SidecarProcess]) -> None:
    """A draft layer is a group like any other; hidden states and logits go to rows of tail buffers, on every rank."""
    groups = (FULL, DRAFT)
    async with engines(processes, sharded(2, 16, groups), sharded(4, 16, groups), (HIDDEN, LOGITS)) as (a, b):
        for seed, rows in enumerate([(0, 3), (3, 0), None]):
            transfer = Transfer(a, b, tokens=40, rows=rows, seed=seed)
            transfer.fill()
            await transfer.begin()
            await transfer.end()
        # Without its tail a slot is not complete, while a whole other transfer fits in between.
        transfer = Transfer(a, b, tokens=40, rows=(1, 1))
        transfer.fill()
        await transfer.begin(transfer.count)
        slot = await soon(b.open({"main": [39], "draft": [39]}, 16))
        descriptor = b.describe(slot, {"main": [39], "draft": [39]}, 0, 16)
        handle = await soon(a.client.start_transfer(descriptor, {"main": [1], "draft": [1]}, ready_pages=1))
        await soon(handle.done)
        await soon(slot.completed)
        assert not transfer.slot.completed.done()
        assert not transfer.handle.done.done()
        a.client.send_tail(transfer.handle)
        await soon(transfer.slot.completed)
        # A tail that is sent twice, or that is none, fails the generation.
        for rows, text in (((1, 1), "its tail was named before"), (None, "it has no tail")):
            transfer = Transfer(a, b, tokens=40, rows=rows)
            await transfer.begin()
            a.client.send_tail(transfer.handle)
            a.client.send_tail(transfer.handle)
            with pytest.raises(TransferFailed, match=text):
                await soon(transfer.handle.done)
            with pytest.raises(TransferFailed, match=text):
                await soon(transfer.slot.completed)
            await soon(transfer.slot.drained)


async def test_bad_input_is_refused_by_name(processes: list[SidecarProcess]) -> None:
    async with engines(
        processes, sharded(2, 16), sharded(4, 64), (HIDDEN, LOGITS), (HIDDEN, TailBuffer("logits", 1002, 4))
    ) as (a, b):
        good = Transfer(a, b, tokens=150, first_block=1)
        good.fill()
        await good.begin()

        async def refused(
            change: Callable[[pb.Descriptor], object],
            text: str,
            error: type[KvmeshError] = InvalidArgument,
            rows: dict[str, int] | None = None,
            **kwargs: object,
        ) -> None:
            bad = Transfer(a, b, tokens=100, seed=9)
            slot = await soon(b.open(bad.dst, 100, rows))
            descriptor = b.describe(slot, bad.dst, 0, 100, rows)
            change(descriptor)
            arguments = {"pages": bad.src, "ready_pages": bad.count} | kwargs
            with pytest.raises(error, match=text):
                await soon(a.client.start_transfer(descriptor, **arguments))  # type: ignore[arg-type]
            await b.client.close_slot(slot, "over")
            await soon(slot.drained)

        def nothing(_: pb.Descriptor) -> None: ...

        six = [1, 2, 3, 4, 5, 6]
        await refused(nothing, "7 of 'main' at the source, 6 are given", pages={"main": six})
        await refused(nothing, "ready_pages 8 of 7 pages", ready_pages=8)
        await refused(nothing, "not implemented: kept pages between pages of 16 and of 64", kept={"main": [0, 1]})
        await refused(lambda d: setattr(d, "num_tokens", 64), "num_tokens and first_block need 1")
        await refused(lambda d: setattr(d.regions[-1], "key", 1), "region keys are not those")
        await refused(lambda d: d.regions.pop(), "regions must be one per group and rank")
        await refused(lambda d: setattr(d.regions[0], "rank", 4), "regions must be one per group and rank")
        await refused(lambda d: setattr(d.layout, "tp", 2), "regions must be one per group and rank")
        await refused(lambda d: setattr(d.layout, "num_pages", 39), "layout is not that of the destination's engine")
        await refused(lambda d: setattr(d.layout, "tp", 3), "tp 3 neither divides")
        row = {"hidden": 1}
        await refused(nothing, r"tails \[\] are given, the descriptor wants \['hidden'\]", rows=row)
        await refused(nothing, "row 4 of 'hidden' is not one of 4", rows=row, tails={"hidden": 4})
        await refused(nothing, "no tail buffer 'soul'", rows=row, tails={"soul": 1})
        await refused(lambda d: setattr(d.tails[0], "row", 9), "row 9 of 'hidden'", rows=row, tails=row)
        logits = {"logits": 1}
        await refused(nothing, "a row has 1000 bytes here, 1002 at the destination", rows=logits, tails=logits)
        # What the destination's own sidecar refuses.
        with pytest.raises(InvalidArgument, match="num_tokens 65 do not need 1 pages"):
            await soon(b.open({"main": [1]}, 65))
        with pytest.raises(InvalidArgument, match="row 7 of 'hidden'"):
            await soon(b.client.open_slot(
                expected_bytes=1, groups={"main": [1]}, request_id="r", ttl_s=1, tails={"hidden": 7}
            ))  # fmt: skip
        # A slot that is told of fewer tokens than the descriptor claims: other bytes, so the bind is refused.
        bad = Transfer(a, b, tokens=100, seed=9)
        slot = await soon(b.open(bad.dst, 99))
        with pytest.raises(TransferFailed, match=r"bind refused.*expects .* bytes, the writer has"):
            await soon(a.client.start_transfer(b.describe(slot, bad.dst, 0, 100), bad.src, ready_pages=7))
        # The slot of the transfer that is half way.
        with pytest.raises((FailedPrecondition, TransferFailed), match=r"in use on this link|one writer"):
            await soon(a.client.start_transfer(good.descriptor, good.src, ready_pages=0))
        await good.end()


async def test_layouts_that_cannot_be_exchanged(processes: list[SidecarProcess]) -> None:
    async with engines(processes, sharded(2, 16, (FULL,)), sharded(2, 16, (DRAFT,))) as (a, b):
        slot = await soon(b.open({"draft": [1]}, 16))
        with pytest.raises(InvalidArgument, match="kv group 'main' is not at the destination"):
            await soon(a.client.start_transfer(b.describe(slot, {"draft": [1]}, 0, 16), {"main": [1]}, ready_pages=1))


@pytest.mark.parametrize("who", ["source", "target"])
async def test_a_rank_that_goes_ends_the_life_and_all_come_back(processes: list[SidecarProcess], who: str) -> None:
    async with engines(processes, sharded(2, 16), sharded(4, 16)) as (a, b):
        transfer = Transfer(a, b, tokens=70)
        transfer.fill()
        await transfer.begin(1)
        engine = a if who == "source" else b
        client, members = engine.client, [rank.member for rank in engine.ranks]
        assert members[-1] is not None
        assert members[-1]._frames is not None
        members[-1]._frames.raw.shutdown(2)
        with pytest.raises(TransferFailed):
            await soon(transfer.slot.completed)
        await soon(transfer.slot.drained)
        with pytest.raises(TransferFailed):
            await soon(transfer.handle.done)
        for member in members:
            assert member is not None
            await soon(asyncio.shield(member.lost))
        await engine.settled()
        assert engine.client is not client
        again = Transfer(a, b, tokens=70, seed=2)
        again.fill()
        await again.begin(1)
        await again.end(1)


RANK = """
import asyncio, os, sys
from kvmesh.kv.region import Region
from kvmesh.transfer.rank import RankMember
from sharded_kit import sharded
from kvmesh.transfer.tail import region_sizes

async def main():
    layout = sharded(2, 16)
    regions = {name: Region.create(name, nbytes) for name, nbytes in region_sizes(layout).items()}
    member = await RankMember.connect(
        sys.argv[1], engine_id="p", incarnation=1, rank=1, layout=layout, regions=regions, timeout_s=120
    )
    # A child that outlives this process and keeps its socket open.
    child = os.fork()
    if child:
        print(child, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_a_rank_that_is_killed_is_noticed_though_its_socket_lives_on(processes: list[SidecarProcess]) -> None:
    await asyncio.gather(*(process.start() for process in processes if not process.alive))
    path = f"{ROOT / 'libs'}:{ROOT}:{ROOT / 'tests/integration'}"
    command = (sys.executable, "-c", RANK, str(processes[0].socket))
    rank = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}
    )
    child = 0
    leader = ShardedEngine("p", processes[0], sharded(2, 16))
    try:
        leader.link.start()
        assert rank.stdout is not None
        child = int(await soon(rank.stdout.readline(), 120))  # type: ignore[call-overload]
        client = await leader.link.wait_connected(60)
        assert client.connected
        rank.kill()
        async with asyncio.timeout(60):
            while client.connected:
                await asyncio.sleep(0.02)
        await leader.link.close()
        # Another engine may come at once.
        other = await ShardedEngine("q", processes[0], sharded(1, 16)).connect()
        await other.close()
    finally:
        for pid in (rank.pid, child):
            with contextlib.suppress(ProcessLookupError):
                if pid:
                    os.kill(pid, signal.SIGKILL)
        await rank.wait()
        assert rank.stdout is not None
        # The pipe's end: nobody of theirs is left.
        await soon(rank.stdout.read())
        await leader.close()


async def test_a_sidecar_that_is_killed_lets_go_of_every_rank(processes: list[SidecarProcess]) -> None:
    async with engines(processes, sharded(2, 16), sharded(4, 16)) as (a, b):
        for process in processes:
            transfer = Transfer(a, b, tokens=70)
            transfer.fill()
            await transfer.begin(1)
            lost = [link.member.lost for link in (a if process is processes[0] else b).ranks if link.member]
            await asyncio.to_thread(process.kill)
            for future in lost:
                await soon(asyncio.shield(future))
            await process.start()
            with pytest.raises(TransferFailed):
                await soon(transfer.slot.completed)
            # A writer of rank memory lets go of it, or is gone.
            await soon(transfer.slot.drained)
            with pytest.raises(TransferFailed):
                await soon(transfer.handle.done)
            await asyncio.gather(a.settled(), b.settled())
            again = Transfer(a, b, tokens=70, seed=2)
            again.fill()
            await again.begin(1)
            await again.end(1)
