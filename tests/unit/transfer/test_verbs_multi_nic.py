"""A verbs link over several NICs, over the fake pyverbs: bytes once, NICs that are down or fail, and who is told."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvmesh.errors import InvalidArgument, KvmeshError, Unavailable
from kvmesh.kv.layout import KvGroup, KvLayout
from kvmesh.kv.pidfd import Life, open_pidfd
from kvmesh.kv.region import Region
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.transports.base import Completion, EngineMemory, Expected, Inbound, Write
from kvmesh.transfer.transports.rails import RailsInbound, RailsOutbound
from kvmesh.transfer.transports.verbs import VerbsOptions, VerbsTransport, endpoint, faults, nics
from kvmesh.transfer.transports.verbs.device import Device
from kvmesh.transfer.transports.verbs.inbound import VerbsInbound
from kvmesh.transfer.transports.verbs.registrations import MAX_IDLE, Made, MemoryKey, Registrations
from kvmesh.transfer.transports.verbs.stub import StubNetwork

IMM = 0x0AB_0001F
PAGE = 16 << 10
PAGES = 64


def make_memory(name: str, owner: Life | None = None, region: Region | None = None) -> EngineMemory:
    group = KvGroup("main", "full", (0, 1), kv_heads=4, head_dim=64)
    layout = KvLayout(version=1, dtype="bf16", page_size=16, groups=(group,), num_pages=PAGES)
    assert layout.page_bytes("main") == PAGE
    region = region or Region.create(name, layout.region_bytes("main"))
    infos = [pb.RegionInfo(group="main", nbytes=region.nbytes, key=7)]
    return EngineMemory(name, 1, layout, infos, [region], owner=owner)


class End:
    def __init__(self, network: StubNetwork, name: str, present: tuple[str, ...], **options: Any) -> None:
        defaults: dict[str, Any] = {"polling": "events", "drain_timeout_s": 0.05, "qps": 2, "run_rows": 8}
        self.transport = VerbsTransport(VerbsOptions(**{**defaults, **options}), network.api(devices=present))
        self.memory = make_memory(name)
        self.bytes = self.memory.regions[0].view()

    async def start(self) -> End:
        await self.transport.start()
        self.transport.register(self.memory)
        return self

    async def close(self) -> None:
        self.transport.deregister()
        await self.transport.close()
        del self.bytes
        self.memory.regions[0].close()


class Link:
    def __init__(self, source: End, target: End, link_id: int = 1) -> None:
        self.source, self.target, self.link_id = source, target, link_id
        self.inbound: Inbound
        self.outbound: Any
        self.received: dict[int, int] = {}
        self.by_rail: dict[int, int] = {}
        self.ended: list[str] = []
        self._context = 0

    async def open(
        self,
        change_offer: Callable[[pb.TransportOffer], None] | None = None,
        change_reply: Callable[[pb.PeerHelloReply], None] | None = None,
        change_hello: Callable[[pb.DataHello], None] | None = None,
    ) -> Link:
        offer = self.source.transport.offer()
        if change_offer is not None:
            change_offer(offer)
        expected = Expected(self.link_id, "writer", self._joined, self.take, self.ended.append, offer)
        end = self.target.transport.expect(expected)
        reply = pb.PeerHelloReply(
            link_id=self.link_id, regions=self.target.memory.infos, token=end.token, sidecar_incarnation=77
        )
        reply.verbs.CopyFrom(end.verbs)
        if change_reply is not None:
            change_reply(reply)

        async def ask(hello: pb.DataHello) -> pb.DataHelloReply:
            if change_hello is not None:
                change_hello(hello)
            return await self.target.transport.join(pb.DataHello.FromString(hello.SerializeToString()))

        self.outbound = await self.source.transport.connect_over(ask, reply, "writer", 5.0)
        return self

    async def _joined(self, inbound: Inbound, pidfd: int | None) -> None:
        self.inbound = inbound

    @property
    def inbounds(self) -> list[VerbsInbound]:
        found = self.inbound.inbounds if isinstance(self.inbound, RailsInbound) else [self.inbound]
        assert all(isinstance(item, VerbsInbound) for item in found)
        return found  # type: ignore[return-value]

    @property
    def outbounds(self) -> list[Any]:
        return self.outbound.outbounds if isinstance(self.outbound, RailsOutbound) else [self.outbound]

    def take(self) -> None:
        for rail, inbound in enumerate(self.inbounds):
            for arrival in inbound.poll():
                self.received[arrival.immediate] = self.received.get(arrival.immediate, 0) + arrival.nbytes
                self.by_rail[rail] = self.by_rail.get(rail, 0) + arrival.nbytes

    def write(self, immediate: int, src: list[int], dst: list[int]) -> Write:
        self._context += 1
        src, dst = [page * PAGE for page in src], [page * PAGE for page in dst]
        return Write(self._context, immediate, 0, 0, src, dst, [PAGE] * len(src), PAGE * len(src))

    def drain(self, rounds: int = 300) -> list[Completion]:
        found: list[Completion] = []
        idle = 0
        for _ in range(rounds):
            found += self.outbound.poll(1 << 30)
            self.take()
            waits = self.outbound.busy or any(rail.outstanding for rail in self.outbounds)
            idle = 0 if waits else idle + 1
            if idle == 3:
                break
        return found

    def pairs(self) -> list[tuple[str, str, bool]]:
        return [(nic.name, nic.peer, nic.used) for nic in self.outbound.nics()]

    async def close(self) -> None:
        self.outbound.fence("over")
        self.outbound.close()
        await self.inbound.fence()


class World:
    def __init__(self) -> None:
        self.network = StubNetwork()
        self.ends: list[End] = []

    async def end(self, name: str, count: int, **options: Any) -> End:
        end = await End(self.network, name, tuple(f"{name}{i}" for i in range(count)), **options).start()
        self.ends.append(end)
        return end

    async def link(self, here: int, there: int, **options: Any) -> Link:
        source, target = await self.end("a", here, **options), await self.end("b", there, **options)
        source.bytes[:] = np.random.default_rng(5).integers(1, 256, len(source.bytes), dtype=np.uint8)
        return Link(source, target)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    made.network.hold = False
    for end in made.ends:
        await end.close()
    assert made.network.violations == []
    assert made.network.open_objects == 0, "queue pairs or registrations are left"


@pytest.mark.parametrize(("here", "there"), [(1, 1), (2, 2), (4, 2), (2, 4), (3, 2), (1, 3)])
async def test_bytes_arrive_once_over_all_nics(world: World, here: int, there: int) -> None:
    link = await (await world.link(here, there)).open()
    count = max(here, there)
    assert link.pairs() == [(f"a{i % here}", f"b{i % there}", True) for i in range(count)]
    assert sorted((nic.name, nic.peer) for nic in link.inbound.nics()) == sorted((b, a) for a, b, _ in link.pairs())
    draw = random.Random(here * 10 + there)
    want = np.zeros_like(link.target.bytes)
    posted: dict[int, int] = {}
    completions = []
    for turn in range(12):
        pages = draw.sample(range(2 * PAGES), draw.randint(8, 40))
        places = draw.sample(range(2 * PAGES), len(pages))
        for src, dst in zip(pages, places, strict=True):
            want[dst * PAGE : (dst + 1) * PAGE] = link.source.bytes[src * PAGE : (src + 1) * PAGE]
        write = link.write(IMM + turn % 3, pages, places)
        posted[write.immediate] = posted.get(write.immediate, 0) + write.nbytes
        link.outbound.post(write)
        completions += link.drain()
    assert [completion.error for completion in completions] == [""] * 12
    assert sum(completion.nbytes for completion in completions) == sum(posted.values())
    assert link.received == posted
    np.testing.assert_array_equal(link.target.bytes, want)
    assert set(link.by_rail) == set(range(count)), "every NIC carries its part"
    assert max(link.by_rail.values()) < 2 * min(link.by_rail.values())
    await link.close()


async def test_a_nic_that_is_down_at_the_start_is_left_out_with_its_reason(world: World) -> None:
    world.network.down.add("a1")
    link = await (await world.link(3, 3)).open()
    assert link.pairs() == [("a0", "b0", True), ("a2", "b1", True), ("a0", "b2", True)]
    found = {nic.name: (nic.used, nic.reason) for nic in link.source.transport.nics()}
    assert found["a1"] == (False, "port 1 of a1 is not active")
    assert found["a0"][0]
    assert found["a2"][0]
    await link.close()
    # It is up when the next engine comes.
    world.network.down.clear()
    link.source.transport.deregister()
    link.source.transport.register(link.source.memory)
    again = await Link(link.source, link.target, 2).open()
    assert ("a1", "b1", True) in again.pairs()
    await again.close()


async def test_none_up_at_the_start(world: World) -> None:
    world.network.down |= {"a0", "a1"}
    end = End(world.network, "a", ("a0", "a1"))
    with pytest.raises(Unavailable, match="port 1 of a0 is not active"):
        await end.transport.start()
    assert end.transport.status == (False, "port 1 of a0 is not active")
    assert end.transport.nics() == []
    await end.transport.close()


@pytest.mark.parametrize("victim", ["a1", "b1"])
async def test_a_nic_that_goes_down_in_flight_fails_its_link_and_the_next_goes_without_it(
    world: World, victim: str
) -> None:
    link = await (await world.link(3, 3)).open()
    world.network.hold = True
    writes = [link.write(IMM + i, list(range(24)), list(range(24))) for i in range(3)]
    for write in writes:
        link.outbound.post(write)
    link.outbound.poll(1 << 30)
    world.network.down.add(victim)
    world.network.hold = False
    world.network.run()
    completions = link.drain()
    assert "status 12" in link.outbound.broken
    assert all(rail.broken for rail in link.outbounds)
    assert sorted(completion.context for completion in completions) == [write.context for write in writes]
    assert any(completion.error for completion in completions)
    assert max(link.received.get(write.immediate, 0) - write.nbytes for write in writes) <= 0
    await link.close()

    again = await Link(link.source, link.target, 2).open()
    assert victim not in {name for pair in again.pairs() if pair[2] for name in pair[:2]}
    assert len([pair for pair in again.pairs() if pair[2]]) >= 2
    again.outbound.post(again.write(IMM, list(range(24)), list(range(24))))
    assert [completion.error for completion in again.drain()] == [""]
    assert again.received == {IMM: 24 * PAGE}
    await again.close()


async def test_a_pair_that_failed_while_its_ports_say_they_are_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = await (await world.link(2, 2)).open()
    world.network.hold = True
    link.outbound.post(link.write(IMM, list(range(24)), list(range(24))))
    link.outbound.poll(1 << 30)
    world.network.kill(world.network._pairs[link.outbounds[1]._lanes[0].pair.number])
    world.network.hold = False
    world.network.run()
    assert [bool(completion.error) for completion in link.drain()] == [True]
    await link.close()

    again = await Link(link.source, link.target, 2).open()
    assert again.pairs() == [("a0", "b0", True), ("a1", "b1", False)]
    (left_out,) = [nic for nic in again.outbound.nics() if not nic.used]
    assert left_out.reason == "it failed lately"
    assert [nic.peer for nic in again.inbound.nics()] == ["a0"], "the pair that is not used is gone there too"
    again.outbound.post(again.write(IMM, list(range(24)), list(range(24))))
    assert [completion.error for completion in again.drain()] == [""]
    await again.close()

    monkeypatch.setattr(faults, "FAULT_S", -1.0)
    later = await Link(link.source, link.target, 3).open()
    assert later.pairs() == [("a0", "b0", True), ("a1", "b1", True)]
    await later.close()


async def test_where_all_pairs_failed_all_are_tried(world: World) -> None:
    link = await world.link(2, 2)
    for name in ("0", "1"):
        link.source.transport._faults.add(pb.PeerHelloReply(sidecar_incarnation=77), f"a{name}", f"b{name}")
    await link.open()
    assert [used for _, _, used in link.pairs()] == [True, True]
    await link.close()


async def test_faults_are_forgotten_with_the_life_of_the_destination_and_bounded(world: World) -> None:
    link = await world.link(2, 2)
    for life in range(faults.MAX_FAULTS + 10):
        link.source.transport._faults.add(pb.PeerHelloReply(sidecar_incarnation=1000 + life), "a1", "b1")
    assert len(link.source.transport._faults) == faults.MAX_FAULTS
    await link.open()
    assert [used for _, _, used in link.pairs()] == [True, True], "another life's faults are not this one's"
    await link.close()


async def test_a_peer_that_knows_of_one_nic_only(world: World) -> None:
    link = await (await world.link(2, 3)).open(change_offer=lambda offer: offer.ClearField("rails"))
    assert link.pairs() == [("a0", "b0", True)]
    link.outbound.post(link.write(IMM, [0, 1], [2, 3]))
    assert [completion.error for completion in link.drain()] == [""]
    await link.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda hello: hello.verbs.rails.pop(), "1 pairs of NICs, 2 are needed"),
        (lambda hello: hello.verbs.rails.add(), "3 pairs of NICs"),
        (lambda hello: (hello.verbs.Clear(), hello.verbs.rails.add()), "no pair of NICs is used"),
        (lambda hello: hello.verbs.rails[0].qp_numbers.append(5), "3 queue pairs"),
        (lambda hello: hello.verbs.rails[0].ClearField("gid"), "gid of 16 bytes"),
        (lambda hello: setattr(hello.verbs.rails[0], "device", "x" * 65), "at most 64 characters"),
    ],
)
async def test_bad_hellos(world: World, change: Callable[[pb.DataHello], Any], reason: str) -> None:
    link = await world.link(2, 2)
    with pytest.raises(Unavailable, match=reason):
        await link.open(change_hello=change)
    assert link.ended
    good = await Link(link.source, link.target, 2).open()
    await good.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda reply: reply.verbs.rails.extend([pb.VerbsEndpoint()] * nics.MAX_RAILS),
        lambda reply: reply.verbs.rails[0].ClearField("regions"),
        lambda reply: reply.verbs.rails[0].ClearField("qp_numbers"),
        lambda reply: setattr(reply.verbs.rails[0], "receives", 1),
        lambda reply: setattr(reply.verbs.rails[0], "device", "x" * 65),
    ],
)
async def test_bad_replies(world: World, change: Callable[[pb.PeerHelloReply], Any]) -> None:
    link = await world.link(2, 2)
    with pytest.raises(InvalidArgument):
        await link.open(change_reply=change)
    link.target.transport.forget(link.link_id)


async def test_a_destination_whose_nic_gives_no_queue_pairs_goes_without_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = await world.link(2, 2)
    make = VerbsTransport._make_inbound

    def refuse(self: VerbsTransport, device: Device, expected: Expected) -> VerbsInbound:
        if device.name == "b1":
            raise Unavailable("b1 gives no queue pair")
        return make(self, device, expected)

    monkeypatch.setattr(VerbsTransport, "_make_inbound", refuse)
    await link.open()
    assert link.pairs() == [("a0", "b0", True), ("a1", "b0", True)]
    await link.close()


@pytest.mark.parametrize("seed", range(6))
async def test_every_write_ends_once_whatever_fails(world: World, seed: int) -> None:
    draw = random.Random(seed)
    link = await world.link(draw.randint(2, 3), draw.randint(1, 3))
    for life in range(1, 5):
        link = await Link(link.source, link.target, life).open()
        world.network.fail_after = draw.randint(0, 150)
        ends: dict[int, Completion] = {}
        writes = []
        for step in range(10):
            count = draw.randint(1, 40)
            write = link.write(IMM + step, draw.sample(range(128), count), draw.sample(range(128), count))
            writes.append(write)
            link.outbound.post(write)
            if draw.random() < 0.2:
                link.outbound.flush(write.immediate)
            for completion in link.drain(draw.randint(0, 3)):
                assert completion.context not in ends
                ends[completion.context] = completion
        for completion in link.drain():
            assert completion.context not in ends
            ends[completion.context] = completion
        assert ends.keys() == {write.context for write in writes}
        for write in writes:
            arrived = link.received.get(write.immediate, 0)
            assert arrived <= write.nbytes
            if not ends[write.context].error:
                assert arrived == ends[write.context].nbytes == write.nbytes
        await link.close()


async def test_a_polling_thread_serves_all_pairs(world: World) -> None:
    link = await (await world.link(2, 2, polling="thread")).open()
    assert link.target.transport.waiting == "a polling thread (by setting)"
    ((name, native),) = link.target.transport.threads()
    assert name == "verbs poller"
    assert native is not None
    assert native in {int(item) for item in os.listdir("/proc/self/task")}
    link.outbound.post(link.write(IMM, list(range(24)), list(range(24))))
    assert [completion.error for completion in link.drain(100_000)] == [""]
    await link.close()


# --- which NICs -----------------------------------------------------------------------------------------------------


def sysfs(root: Path) -> Path:
    """Two nodes; a0 and a1 on node 0, a2 and a3 on node 1; a GPU beside a3; a4 is an EFA device."""
    (root / "class" / "infiniband").mkdir(parents=True)
    (root / "bus" / "pci" / "devices").mkdir(parents=True)
    for node in range(2):
        folder = root / "devices" / "system" / "node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{node * 8}-{node * 8 + 7}\n")
    for index in range(5):
        node = index // 2 % 2
        device = root / "devices" / f"pci000{node}:00" / f"000{node}:00:0{index}.0" / f"000{node}:1{index}:00.0"
        port = device / "infiniband" / f"a{index}" / "ports" / "1"
        port.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
        for name, text in (("state", "4: ACTIVE"), ("rate", "200 Gb/sec (4X HDR)"), ("link_layer", "Ethernet")):
            (port / name).write_text(text + "\n")
        os.symlink("../..", device / "infiniband" / f"a{index}" / "device")
        os.symlink("/drivers/efa" if index == 4 else "/drivers/mlx5_core", device / "driver")
        os.symlink(device / "infiniband" / f"a{index}", root / "class" / "infiniband" / f"a{index}")
    gpu = root / "devices" / "pci0001:00" / "0001:00:03.0" / "0001:20:00.0"
    gpu.mkdir(parents=True)
    for name, text in (("vendor", "0x10de"), ("class", "0x030200"), ("numa_node", "1")):
        (gpu / name).write_text(text + "\n")
    os.symlink(gpu, root / "bus" / "pci" / "devices" / "0001:20:00.0")
    return root


async def used(world: World, **options: Any) -> tuple[list[str], dict[str, str], frozenset[int]]:
    end = await world.end("a", 5, **options)
    found = end.transport.nics()
    names = [nic.name for nic in found if nic.used]
    return names, {nic.name: nic.reason for nic in found if not nic.used}, end.transport.nodes


@pytest.mark.parametrize("node", [0, 1])
async def test_the_nics_of_the_memory_s_node(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: int
) -> None:
    monkeypatch.setattr(nics, "node_of_range", lambda address, nbytes: node)
    names, others, nodes = await used(world, sysfs=sysfs(tmp_path))
    assert names == [f"a{2 * node}", f"a{2 * node + 1}"]
    assert nodes == {node}
    assert "farther away" in others[f"a{2 - 2 * node}"]
    assert others["a4"] == "an EFA device: for transport efa"


async def test_ranks_on_two_nodes_have_each_their_own(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = await world.end("a", 5, sysfs=sysfs(tmp_path))
    end.transport.deregister()
    regions = [end.memory.regions[0], Region.create("other", end.memory.regions[0].nbytes)]
    places = {nics.address_of(region): node for node, region in enumerate(regions)}
    monkeypatch.setattr(nics, "node_of_range", lambda address, nbytes: places[address])
    infos = [pb.RegionInfo(group="main", rank=rank, nbytes=regions[0].nbytes) for rank in range(2)]
    end.transport.register(EngineMemory("two", 1, end.memory.layout, infos, regions))
    assert [nic.name for nic in end.transport.nics() if nic.used] == ["a0", "a1", "a2", "a3"]
    assert end.transport._nics.near == [{"a0", "a1"}, {"a2", "a3"}]
    assert end.transport.nodes == {0, 1}
    assert "NUMA node 0; " in end.transport._nics.why
    end.transport.deregister()
    regions[1].close()


async def test_the_nics_of_a_gpu(world: World, tmp_path: Path) -> None:
    names, others, nodes = await used(world, sysfs=sysfs(tmp_path), near="00000001:20:00.0")
    assert names == ["a3"]
    assert nodes == {1}
    assert "farther away" in others["a0"]


async def test_the_nics_of_the_setting(world: World, tmp_path: Path) -> None:
    names, _, nodes = await used(world, sysfs=sysfs(tmp_path), devices=("a3", "a0"))
    assert names == ["a3", "a0"]
    assert nodes == {0, 1}
    with pytest.raises(KvmeshError, match="no RDMA device 'nope'"):
        await End(world.network, "x", ("a0",), device="nope").transport.start()


@pytest.mark.parametrize("devices", [(), ("a", "a"), ("auto", "a"), ("",)])
def test_settings_that_make_no_sense(devices: tuple[str, ...]) -> None:
    if devices:
        with pytest.raises(InvalidArgument):
            VerbsTransport(VerbsOptions(devices=devices))
    else:
        assert nics.NicOptions.of("", (), "", Path("/sys")).auto


# --- registrations --------------------------------------------------------------------------------------------------


async def test_an_engine_that_connects_anew_registers_nothing_twice(world: World) -> None:
    end = await world.end("a", 2)
    life = Life(open_pidfd())
    end.transport.deregister()
    before = next(world.network.keys)
    memory = make_memory("x", life, end.memory.regions[0])
    end.transport.register(memory)
    assert next(world.network.keys) == before + 3, "one registration for each NIC"
    end.transport.deregister()
    assert world.network.open_objects == 2, "they wait for it"
    # The same memory by another descriptor and another mapping.
    other = Region.adopt(os.dup(memory.regions[0].fd), memory.regions[0].nbytes)
    end.transport.register(make_memory("x", life, other))
    assert next(world.network.keys) == before + 4, "nothing new"
    end.transport.deregister()
    other.close()
    # Another engine: what did not come back goes.
    third = make_memory("y", life)
    end.transport.register(third)
    assert world.network.open_objects == 2
    end.transport.deregister()
    end.transport._wait_for(life.copy(), 0.0)
    assert world.network.open_objects == 0, "nor do they wait for ever"
    third.regions[0].close()


async def test_what_waits_for_another_engine_makes_room_for_the_one_that_comes(world: World) -> None:
    end = await world.end("a", 1)
    (device,) = end.transport._nics.devices
    register, life = device._host_mr, Life(open_pidfd())
    end.transport.deregister()

    def one_at_a_time(*args: Any, **kwargs: Any) -> Any:
        if device.registered:
            raise device.api.error("Cannot allocate memory")
        return register(*args, **kwargs)

    object.__setattr__(device, "_host_mr", one_at_a_time)
    first, second = make_memory("x", life), make_memory("y", life)
    end.transport.register(first)
    end.transport.deregister()
    assert device.registered == 1, "it waits"
    end.transport.register(second)
    assert end.transport.status[0], end.transport.status[1]
    assert device.registered == 1
    end.transport.deregister()
    for memory in (first, second):
        memory.regions[0].close()
    life.close()


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends when it is told to."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate(timeout=60)


async def test_registrations_end_with_their_engine(world: World, child: subprocess.Popen[bytes]) -> None:
    end = await world.end("a", 1)
    end.transport.deregister()
    life = Life(open_pidfd(child.pid))
    memory = make_memory("x", life)
    end.transport.register(memory)
    assert world.network.open_objects == 1
    await asyncio.to_thread(child.communicate, b"\n", 60)
    assert not life.alive
    end.transport.deregister()
    assert world.network.open_objects == 0
    memory.regions[0].close()


async def test_an_engine_that_exits_after_it_left_is_noticed(
    world: World, monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen[bytes]
) -> None:
    monkeypatch.setattr(endpoint, "LINGER_S", 600.0)
    monkeypatch.setattr(endpoint, "LINGER_STEP_S", 0.001)
    end = await world.end("a", 1)
    end.transport.deregister()
    memory = make_memory("x", Life(open_pidfd(child.pid)))
    end.transport.register(memory)
    end.transport.deregister()
    assert world.network.open_objects == 1
    await asyncio.to_thread(child.communicate, b"\n", 60)
    async with asyncio.timeout(60):
        while world.network.open_objects:
            await asyncio.sleep(0.001)
    memory.regions[0].close()


def test_memory_is_named_by_inode_not_by_descriptor_or_address() -> None:
    network = StubNetwork()
    device = Device(network.api(), VerbsOptions())
    first, second = Region.create("first", 8192), Region.create("second", 8192)
    one = device.register_region(first)
    # The same number for other memory.
    os.dup2(second.fd, first.fd)
    two = device.register_region(first)
    assert two.lkey != one.lkey
    assert device.registered == 2
    first.close()
    third = Region.create("third", 8192)
    three = device.register_region(third)
    assert three.address != one.address, "the first one's mapping lives as long as its registration"
    for memory in (one, two, three):
        device.release(memory)
    assert device.registered == network.open_objects == 0
    second.close()
    third.close()
    device.close()
    assert network.violations == []


def test_dmabufs_are_addressed_by_offset() -> None:
    network = StubNetwork()
    api = network.api()
    asked: list[dict[str, Any]] = []
    make = api.DmaBufMR

    def dmabuf_mr(pd: Any, length: int, access: int, dmabuf: int, offset: int) -> Any:
        asked.append({"length": length, "dmabuf": dmabuf, "offset": offset})
        return make(pd, length, access, dmabuf=dmabuf, offset=offset)

    object.__setattr__(api, "DmaBufMR", dmabuf_mr)
    device = Device(api, VerbsOptions())
    # A memfd stands in for what a GPU's driver exports: both are named by their inode.
    buffer = os.memfd_create("gpu")
    whole = device.register_dmabuf(buffer, 1 << 20)
    assert (whole.address, whole.nbytes) == (0, 1 << 20)
    part = device.register_dmabuf(buffer, 4096, offset=1 << 16)
    assert part.address == 1 << 16
    again = os.dup(buffer)
    assert device.register_dmabuf(again, 1 << 20) == whole
    assert asked == [
        {"length": 1 << 20, "dmabuf": buffer, "offset": 0},
        {"length": 4096, "dmabuf": buffer, "offset": 1 << 16},
    ]
    other = os.memfd_create("other")
    # The same number for other memory.
    os.dup2(other, buffer)
    assert device.register_dmabuf(buffer, 1 << 20).lkey != whole.lkey
    assert device.registered == 3
    with pytest.raises(InvalidArgument, match="no dmabuf"):
        device.register_dmabuf(1 << 20, 4096)
    for fd in (other, again, buffer):
        os.close(fd)
    device.close()
    assert network.open_objects == 0

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise api.error("Operation not supported")

    object.__setattr__(api, "DmaBufMR", refuse)
    device = Device(api, VerbsOptions())
    with pytest.raises(Unavailable, match="device memory"):
        device.register_dmabuf(0, 4096)
    device.close()


class _Mr:
    def __init__(self, log: list[int], number: int) -> None:
        self.length, self.lkey, self.rkey = 1, number, number
        self._log, self._number = log, number

    def close(self) -> None:
        self._log.append(self._number)


def test_idle_registrations_are_bounded_and_the_oldest_goes() -> None:
    closed: list[int] = []
    cache = Registrations()
    memories = []
    for number in range(MAX_IDLE + 5):
        key = MemoryKey("memfd", 1, number, 0, 1)
        memories.append(cache.take(key, lambda number=number: Made(_Mr(closed, number), number)))  # type: ignore[misc]
    for memory in memories:
        cache.give_back(memory, linger=True)
    assert closed == [0, 1, 2, 3, 4]
    assert (len(cache), cache.idle) == (MAX_IDLE, MAX_IDLE)
    # One that is used again is not idle.
    cache.take(MemoryKey("memfd", 1, 5, 0, 1), lambda: pytest.fail("it is there"))
    assert cache.end_idle() == MAX_IDLE - 1
    assert len(cache) == 1
    cache.end_all()
    assert sorted(closed) == list(range(MAX_IDLE + 5))
    assert len(cache) == 0


def test_memory_named_by_an_address_never_waits() -> None:
    closed: list[int] = []
    cache = Registrations()
    memory = cache.take(MemoryKey.of_address(4096, 1), lambda: Made(_Mr(closed, 1), 4096))
    cache.give_back(memory, linger=True)
    assert closed == [1]
    with pytest.raises(InvalidArgument):
        cache.give_back(memory)
