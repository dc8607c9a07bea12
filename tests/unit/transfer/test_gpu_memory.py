"""Regions of GPU memory that come with a dma-buf: the hello, who serves them, and that no descriptor is left behind.

A memfd stands in for what a GPU's driver exports: it has an inode and a size, and the fakes of NICs can map it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import mmap
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from efa_world import EfaEnd, EfaLink
from kvmesh.config import WorkerSettings
from kvmesh.engine.nvlink import cuda_region
from kvmesh.engine.worker import gpudirect
from kvmesh.engine.worker.posting import Route, choose_route
from kvmesh.errors import InvalidArgument
from kvmesh.kv.pidfd import open_pidfd
from kvmesh.kv.region import DmaBuf, Region
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.descriptor import layout_to_proto
from kvmesh.transfer.sidecar import Sidecar
from kvmesh.transfer.sidecar import sidecar as sidecar_module
from kvmesh.transfer.transports.base import EngineMemory
from kvmesh.transfer.transports.efa import EfaOptions, EfaTransport
from kvmesh.transfer.transports.efa.stub import EfaStubNetwork
from kvmesh.transfer.transports.shm import ShmTransport
from kvmesh.transfer.transports.verbs import VerbsOptions, VerbsTransport
from kvmesh.transfer.transports.verbs.stub import StubNetwork
from kvmesh.transfer.wire import PROTOCOL, exchange, open_unix
from rank_world import WAIT_S, Ranks, descriptors, make_layout, running_sidecar
from verbs_world import PAGE, End, Link

Network = StubNetwork | EfaStubNetwork
OFFSET = 8192


def memfd(nbytes: int) -> int:
    fd = os.memfd_create("gpu")
    os.ftruncate(fd, nbytes)
    return fd


class GpuRegion:
    """What a CudaRegion is to a sidecar's client."""

    memory = "cuda"
    device = "GPU-0"

    def __init__(self, nbytes: int, *, dmabuf: bool = True) -> None:
        self.nbytes = nbytes
        self.fd = memfd(nbytes)
        self.dmabuf = DmaBuf(memfd(OFFSET + nbytes), OFFSET, "0000:18:00.0") if dmabuf else None

    def close(self) -> None:
        os.close(self.fd)
        if self.dmabuf is not None:
            os.close(self.dmabuf.fd)


def on_gpu(engine: Ranks, *, dmabuf: bool = True) -> Ranks:
    """All of its regions are a GPU's from now on."""
    for rank, regions in enumerate(engine.regions):
        for region in regions.values():
            region.close()
        engine.regions[rank] = {  # type: ignore[assignment]
            name: GpuRegion(region.nbytes, dmabuf=dmabuf) for name, region in regions.items()
        }
    return engine


@pytest.fixture(params=["verbs", "efa"])
def network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    made: Network = StubNetwork() if request.param == "verbs" else EfaStubNetwork()

    def make(name: str, options: Any) -> Any:
        if name == "shm":
            return ShmTransport(options.engine_socket.with_suffix(".shm"), 1)
        if isinstance(made, StubNetwork):
            return VerbsTransport(VerbsOptions(polling="events"), made.api())
        return EfaTransport(EfaOptions(polling="events"), made.api())

    monkeypatch.setattr(sidecar_module, "make_transport", make)
    gc.collect()
    yield made
    assert made.violations == []
    assert made.open_objects == 0


def name_of(network: Network) -> str:
    return "verbs" if isinstance(network, StubNetwork) else "efa"


@contextlib.asynccontextmanager
async def sidecar_of(network: Network, folder: Path) -> AsyncIterator[Sidecar]:
    async with running_sidecar(folder, transports=(name_of(network), "shm")) as sidecar:
        yield sidecar


@contextlib.asynccontextmanager
async def engine_of(sidecar: Sidecar, tp: int = 1, **options: bool) -> AsyncIterator[Ranks]:
    engine = on_gpu(Ranks(sidecar.options.engine_socket, make_layout(tp)), **options)
    try:
        yield engine
    finally:
        await engine.close()


def reasons(sidecar: Sidecar) -> dict[str, tuple[bool, str]]:
    return {item.name: (item.usable, item.reason) for item in sidecar.status().transports}


async def vacant(sidecar: Sidecar) -> None:
    async with asyncio.timeout(WAIT_S):
        await sidecar.vacant.wait()


@pytest.mark.parametrize("tp", [1, 3])
async def test_nics_serve_what_comes_with_a_dmabuf(network: Network, tmp_path: Path, tp: int) -> None:
    name = name_of(network)
    before = descriptors()
    async with sidecar_of(network, tmp_path) as sidecar:
        async with engine_of(sidecar, tp) as engine:
            await engine.connect()
            assert engine.client is not None
            assert engine.client.takes_dmabufs
            assert engine.client.transports == [name]
            # Peers are told of the memory's kind and of nothing else.
            told = engine.client.region_infos
            assert {(i.memory, i.dmabuf, i.dmabuf_offset, i.pci_address) for i in told} == {("cuda", False, 0, "")}
            assert sidecar.session is not None
            regions = sidecar.session.memory.regions
            assert len(regions) == 2 * tp
            assert all(region.dmabuf is not None and region.dmabuf.offset == OFFSET for region in regions)
            assert reasons(sidecar)["shm"] == (False, "does not reach cuda memory")
            (nic,) = next(item for item in sidecar.status().transports if item.name == name).nics
            assert "GPU 0000:18:00.0" in nic.reason
        await vacant(sidecar)
        assert all(region.closed and region.dmabuf is None for region in regions)
        del regions
    gc.collect()
    assert descriptors() <= before


async def test_without_one_it_is_as_before(network: Network, tmp_path: Path) -> None:
    async with sidecar_of(network, tmp_path) as sidecar, engine_of(sidecar, dmabuf=False) as engine:
        client = await engine.lead()
        assert client.transports == []
        usable, why = reasons(sidecar)[name_of(network)]
        assert not usable
        assert why == "does not reach cuda memory: no dma-buf came with latent, main"


async def test_a_nic_that_refuses_says_why_and_the_engine_is_let_in(network: Network, tmp_path: Path) -> None:
    network.dmabufs = False
    async with sidecar_of(network, tmp_path) as sidecar:
        async with engine_of(sidecar) as engine:
            client = await engine.lead()
            assert client.transports == []
            usable, why = reasons(sidecar)[name_of(network)]
            assert not usable
            assert "cannot register device memory" in why
        await vacant(sidecar)
        # The next one's memory is judged anew.
        host = Ranks(sidecar.options.engine_socket, make_layout(1))
        client = await host.lead()
        assert client.transports == [name_of(network), "shm"]
        await host.close()


async def test_an_engine_that_connects_anew_registers_nothing_anew(network: Network, tmp_path: Path) -> None:
    async with sidecar_of(network, tmp_path) as sidecar, engine_of(sidecar) as engine:
        await engine.lead()
        keys = set(network.regions)
        await engine.leave()
        await vacant(sidecar)
        client = await engine.lead()
        assert client.transports == [name_of(network)]
        assert set(network.regions) == keys


def all_on_the_host(x: SimpleNamespace) -> None:
    for info in x.infos:
        info.memory = "host"


HOSTILE: dict[str, tuple[Callable[[SimpleNamespace], object], str]] = {
    "none came": (lambda x: x.fds.pop(), "8 descriptors belong to this message, 7 came along"),
    "host memory": (all_on_the_host, "with a dma-buf or a GPU that cannot be"),
    "offset": (lambda x: setattr(x.infos[1], "dmabuf_offset", OFFSET + 1), "are not in a dma-buf of"),
    "far": (lambda x: setattr(x.infos[1], "dmabuf_offset", (1 << 64) - 1), "are not in a dma-buf of"),
    "a pipe": (lambda x: x.fds.__setitem__(-1, x.pipe), "the descriptor is no dma-buf"),
    "small": (lambda x: x.fds.__setitem__(-1, x.small), "are not in a dma-buf of 4096"),
    "an address": (lambda x: setattr(x.infos[0], "pci_address", "0" * 33), "a GPU that cannot be"),
    "many": (lambda x: x.infos.extend([x.infos[0]] * 63), "more than 64 regions"),
}


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("network", ["verbs"], indirect=True)
async def test_what_cannot_be_is_refused_and_leaves_nothing(network: Network, tmp_path: Path, case: str) -> None:
    spoil, says = HOSTILE[case]
    async with sidecar_of(network, tmp_path) as sidecar, engine_of(sidecar) as engine:
        regions: list[Any] = list(engine.regions[0].values())
        eventfd, (reader, writer) = os.eventfd(0), os.pipe()
        x = SimpleNamespace(
            fds=[open_pidfd(), engine.doorbell.fd, engine.ring.fd, eventfd]
            + [region.fd for region in regions]
            + [region.dmabuf.fd for region in regions],
            infos=[
                pb.RegionInfo(
                    group=name, nbytes=region.nbytes, memory="cuda", dmabuf=True, dmabuf_offset=region.dmabuf.offset
                )
                for name, region in zip(engine.regions[0], regions, strict=True)
            ],
            pipe=reader,
            small=memfd(4096),
        )
        pidfd = x.fds[0]
        spoil(x)
        hello = pb.EngineHello(
            engine_id="e",
            incarnation=5,
            layout=layout_to_proto(engine.layout),
            regions=x.infos,
            doorbell_bytes=engine.doorbell.nbytes,
            ring_bytes=engine.ring.nbytes,
            protocol=PROTOCOL,
        )
        gc.collect()
        before = descriptors()
        sock = await open_unix(engine.path, 5)
        message = pb.EngineMessage(call_id=1, hello=hello)
        body, _ = await exchange(sock, message, x.fds, max_fds=0, timeout_s=WAIT_S)
        sock.close()
        assert says in pb.SidecarMessage.FromString(body).refused.message
        async with asyncio.timeout(WAIT_S):
            while descriptors() > before:
                gc.collect()
                await asyncio.sleep(0.01)
        assert sidecar.session is None
        for fd in (pidfd, eventfd, reader, writer, x.small):
            os.close(fd)
        # It harms nobody else.
        assert (await engine.lead()).transports == ["verbs"]


@pytest.mark.parametrize("network", ["verbs"], indirect=True)
async def test_a_rank_without_one_keeps_the_engine_from_its_nics(network: Network, tmp_path: Path) -> None:
    """All ranks' memory or none of it: a transfer goes by one transport."""
    async with sidecar_of(network, tmp_path) as sidecar, engine_of(sidecar, 2) as engine:
        bare: Any = engine.regions[1]["main"]
        os.close(bare.dmabuf.fd)
        bare.dmabuf = None
        await engine.connect()
        assert engine.client is not None
        assert engine.client.transports == []
        assert "no dma-buf came with main" in reasons(sidecar)["verbs"][1]


# -- regions


def test_held_memory_takes_one_dmabuf_and_closes_it() -> None:
    gc.collect()
    before = descriptors()
    region = Region.hold(memfd(4096), 4096)
    region.attach(DmaBuf(memfd(8192), 4096))
    with pytest.raises(InvalidArgument, match="takes no dma-buf"):
        region.attach(DmaBuf(memfd(8192)))
    assert region.dmabuf is not None
    assert not os.get_inheritable(region.dmabuf.fd)
    region.close()
    region.close()
    with pytest.raises(InvalidArgument, match="takes no dma-buf"):
        region.attach(DmaBuf(memfd(8192)))
    with Region.create("host", 4096) as host, pytest.raises(InvalidArgument, match="takes no dma-buf"):
        host.attach(DmaBuf(memfd(4096)))
    gc.collect()
    assert descriptors() == before


# -- an engine that asks


class HostDriver:
    """What a CudaRegion asks of CUDA, over memfds."""

    def __init__(self) -> None:
        self.mapped: dict[int, int] = {}

    def device_uuid(self, device: int) -> str:
        return "GPU-0"

    def set_device(self, device: int) -> None:
        pass

    def granularity(self, device: int) -> int:
        return 1 << 16

    def create(self, device: int, nbytes: int) -> int:
        return memfd(nbytes)

    def export_fd(self, handle: int) -> int:
        return os.dup(handle)

    def map(self, handle: int, nbytes: int, device: int) -> int:
        address = (1 + len(self.mapped)) << 32
        self.mapped[address] = nbytes
        return address

    def unmap(self, address: int, nbytes: int) -> None:
        assert self.mapped.pop(address) == nbytes

    def release(self, handle: int) -> None:
        os.close(handle)

    def has_dmabufs(self, device: int) -> bool:
        return True

    def pci_address(self, device: int) -> str:
        return "0000:18:00.0"

    def export_dmabuf(self, address: int, nbytes: int) -> int:
        assert self.mapped[address] == nbytes
        return memfd(nbytes)

    def nic_writes_ordered(self, device: int) -> bool:
        return True


@pytest.mark.parametrize("takes", [True, False])
async def test_an_engine_shows_a_page_and_goes_by_what_the_nics_say(
    monkeypatch: pytest.MonkeyPatch, network: Network, tmp_path: Path, takes: bool
) -> None:
    driver = HostDriver()
    for module in (cuda_region, gpudirect):
        monkeypatch.setattr(module, "load", lambda: driver)
    network.dmabufs = takes
    before = descriptors()
    async with sidecar_of(network, tmp_path) as sidecar:
        settings = WorkerSettings(
            device="cuda", role="decode", gpudirect="auto", sidecar_socket=sidecar.options.engine_socket
        )
        route = await choose_route(settings, make_layout(1))
        assert route is (Route.GPUDIRECT if takes else Route.STAGING)
        assert driver.mapped == {}
        await vacant(sidecar)
    gc.collect()
    assert descriptors() <= before


# -- links


def moved_to_gpu(memory: EngineMemory) -> mmap.mmap:
    """The memory as a sidecar has it of a GPU; returns what is in it."""
    (host,) = memory.regions
    dmabuf = memfd(OFFSET + host.nbytes)
    region = Region.hold(memfd(host.nbytes), host.nbytes, "main")
    region.attach(DmaBuf(dmabuf, OFFSET))
    memory.regions = [region]
    memory.infos[0].memory = "cuda"
    host.close()
    return mmap.mmap(dmabuf, OFFSET + region.nbytes)


@pytest.mark.parametrize("kind", ["verbs", "efa"])
@pytest.mark.parametrize(("source_gpu", "target_gpu"), [(True, True), (True, False), (False, True)])
async def test_bytes_go_from_and_to_it(kind: str, source_gpu: bool, target_gpu: bool) -> None:
    network: Any = StubNetwork() if kind == "verbs" else EfaStubNetwork()
    ends: list[Any] = [(End if kind == "verbs" else EfaEnd)(network, name) for name in ("source", "target")]
    bytes_of: list[Any] = []
    for end, gpu in zip(ends, (source_gpu, target_gpu), strict=True):
        if gpu:
            end.bytes = None
            bytes_of.append(memoryview(moved_to_gpu(end.memory))[OFFSET:])
        else:
            bytes_of.append(memoryview(end.bytes))
        await end.start()
        assert end.transport.fits(end.memory)[0]
        assert end.transport.ready[0]
    data = os.urandom(4 * PAGE)
    bytes_of[0][: 4 * PAGE] = data
    link = await (Link if kind == "verbs" else EfaLink)(*ends).open()
    done = []
    link.outbound.post(link.write(7, [0, PAGE, 3 * PAGE], [5 * PAGE, 2 * PAGE, 0]))
    for _ in range(20):
        done += link.drain()
    assert [item.error for item in done] == [""]
    assert link.received == {7: 3 * PAGE}
    for src, dst in ((0, 5), (1, 2), (3, 0)):
        assert bytes_of[1][dst * PAGE : (dst + 1) * PAGE] == data[src * PAGE : (src + 1) * PAGE]
    await link.close()
    del bytes_of[:]
    for end in ends:
        await end.close()
    assert network.violations == []
    assert network.open_objects == 0
