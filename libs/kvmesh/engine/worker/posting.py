"""How this worker's KV travels: moved by the sidecar, written by the engine itself (nvlink), or through host memory."""

from __future__ import annotations

import asyncio
import enum
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvmesh.config import WorkerSettings
from kvmesh.engine.cuda.staging import Staging
from kvmesh.engine.nvlink.backend import Backend
from kvmesh.engine.nvlink.host import HostBackend, address_of
from kvmesh.engine.nvlink.poster import NvlinkPoster
from kvmesh.engine.runner import Runner
from kvmesh.engine.worker.gpudirect import SidecarSays, why_not_gpudirect
from kvmesh.engine.worker.memory import KvMemory, StagedMemory, cuda_memory, size_layout, staging_pages
from kvmesh.errors import InvalidArgument, KvmeshError
from kvmesh.kv.layout import KvLayout
from kvmesh.kv.region import Region
from kvmesh.kv.ring import DOORBELL_BYTES, StepRing
from kvmesh.transfer.client import SidecarClient
from kvmesh.transfer.folder import Sockets, is_folder
from kvmesh.transfer.orphans import Writers

if TYPE_CHECKING:
    from kvmesh.engine.cuda.memory import CudaRunnerFace
    from kvmesh.engine.nvlink.cuda_region import CudaRegion

log = logging.getLogger(__name__)

# Of the copies between a GPU and host memory: what fills PCIe, and leaves the rest of the GPU to the model.
STAGING_BLOCKS = 16
# How long an engine on a GPU waits for its sidecar, to learn which transports it has.
SIDECAR_S = 30.0
_ASK_S = 0.2
# In a folder one that stands still is passed over.
_ASK_ONE_S = 5.0


class Route(enum.Enum):
    """What moves the bytes of this engine's pages."""

    SIDECAR = "sidecar"  # or nothing, where there is none
    NVLINK = "nvlink"
    GPUDIRECT = "gpudirect"  # by the sidecar too, from and to the GPU's memory
    STAGING = "staging"


@dataclass(frozen=True, slots=True)
class Movers:
    """At most one of them."""

    poster: NvlinkPoster | None = None
    staging: Staging | None = None

    def on_failed(self, tell: Callable[[str], None]) -> None:
        """Call tell(reason), from any thread, where a stream has failed: the device has, whether a step runs or not."""
        if self.poster is not None:
            self.poster.on_failed = tell
        if self.staging is not None:
            self.staging.on_failed = tell

    def close(self) -> None:
        """End their streams. Nothing is under way, unless the device has failed."""
        for mover in (self.poster, self.staging):
            try:
                if mover is not None:
                    mover.close()
            except Exception as error:
                log.warning("a stream does not end: %s", error)


def check_route(settings: WorkerSettings) -> None:
    """Refuse settings that do not go together, before anybody waits for a model to load. Raises InvalidArgument."""
    nvlink, staging = settings.nvlink, settings.staging
    if settings.on_gpu and nvlink == "host":
        raise InvalidArgument("nvlink=host is for memory of the host: with a GPU it is cuda or auto")
    if not settings.on_gpu and nvlink == "cuda":
        raise InvalidArgument("nvlink=cuda needs device=cuda")
    if nvlink in ("cuda", "host") and staging == "on":
        raise InvalidArgument("nvlink writes to the pages themselves: it does not go with staging=on")
    if settings.sidecar_socket is None or settings.tp == 1:
        return
    if is_folder(settings.sidecar_socket):
        raise InvalidArgument(
            "not implemented: a folder of sidecars for an engine of several ranks: name the socket, or set tp to 1"
        )
    if nvlink in ("cuda", "host"):
        raise InvalidArgument("nvlink: ranks in processes of their own cannot write by themselves yet: tp must be 1")
    if staging == "on" or settings.on_gpu:
        raise InvalidArgument(
            "not implemented: KV to and from several ranks on GPUs: set tp to 1, or leave sidecar_socket out"
        )


async def choose_route(settings: WorkerSettings, layout: KvLayout) -> Route:
    """From the settings and, where they leave it open, from what the sidecar has. As `check_route`."""
    check_route(settings)
    nvlink, staging = settings.nvlink, settings.staging
    if settings.sidecar_socket is None:
        return Route.SIDECAR
    if nvlink in ("cuda", "host"):
        return Route.NVLINK
    if staging == "on":
        return Route.STAGING
    if not settings.on_gpu:
        return Route.SIDECAR
    says = await ask_sidecar(settings, layout) if "auto" in (nvlink, settings.gpudirect) else SidecarSays()
    if nvlink == "auto" and "nvlink" in says.transports:
        return Route.NVLINK
    if settings.gpudirect == "auto":
        why_not = await why_not_gpudirect(settings, layout, says, lambda shown: ask_sidecar(settings, layout, shown))
        if not why_not:
            log.info("KV goes by GPUDirect: %s registered this GPU's memory", ", ".join(says.nics))
            return Route.GPUDIRECT
        log.info("KV does not go by GPUDirect: %s", why_not)
    if staging == "off":
        log.warning("no transport reaches this GPU's memory: KV can neither be sent nor received")
        return Route.SIDECAR
    return Route.STAGING


async def ask_sidecar(
    settings: WorkerSettings, layout: KvLayout, shown: Mapping[str, Region] | None = None
) -> SidecarSays:
    """What our sidecar can do; nothing, where none comes. It only tells an engine: so one with a page a group registers
    for a moment: these regions, or host memory."""
    assert settings.sidecar_socket is not None
    one = replace(layout, num_pages=1)
    own = {g.name: Region.create("kvmesh-probe", one.region_bytes(g)) for g in one.groups} if shown is None else {}
    doorbell = Region.create("kvmesh-probe-doorbell", DOORBELL_BYTES)
    ring = Region.create("kvmesh-probe-ring", StepRing.bytes_for(1, 1))
    until = time.monotonic() + SIDECAR_S
    sidecars = Sockets(settings.sidecar_socket)
    longest = _ASK_ONE_S if is_folder(settings.sidecar_socket) else SIDECAR_S
    writers = Writers()

    async def register(path: Path) -> SidecarClient:
        return await SidecarClient.connect(
            path,
            engine_id=f"{settings.instance_name}-probe",
            incarnation=secrets.randbits(63) or 1,
            layout=one,
            regions=shown or own,
            doorbell=doorbell,
            ring=ring,
            timeout_s=min(longest, max(_ASK_S, until - time.monotonic())),
            on_lost=lambda: None,
            writers=writers,
        )

    try:
        while True:
            try:
                client = await sidecars.claim(register)
            except (KvmeshError, OSError) as error:
                if time.monotonic() > until:
                    log.warning("no sidecar in %g s (%s): KV goes through host memory", SIDECAR_S, error)
                    return SidecarSays()
                await asyncio.sleep(_ASK_S)
                continue
            says = SidecarSays(tuple(client.transports), client.takes_dmabufs)
            await client.close()
            return says
    finally:
        writers.close()
        for region in (*own.values(), doorbell, ring):
            region.close()


def make_memory(runner: Runner, settings: WorkerSettings, route: Route) -> KvMemory:
    """KV memory where the runner computes, with staging where that is the route. Blocks: it may be large."""
    if settings.on_gpu:
        return cuda_memory(runner, settings, staging=route is Route.STAGING, dmabuf=route is Route.GPUDIRECT)
    layout = size_layout(runner, settings)
    pages = staging_pages(layout, runner, settings) if route is Route.STAGING else 0
    return KvMemory.create(layout, settings.max_batch, staging_pages=pages)


def make_movers(settings: WorkerSettings, memory: KvMemory, route: Route, runner: Runner) -> Movers:
    """What the route needs in this process, ready for steps: its kernels are compiled here."""
    if route is Route.NVLINK:
        return Movers(poster=NvlinkPoster(memory.layout, _nvlink_backend(settings, memory, runner)))
    if route is Route.STAGING and memory.staged is not None:
        return Movers(staging=_staging(settings, memory, memory.staged, runner))
    return Movers()


def _nvlink_backend(settings: WorkerSettings, memory: KvMemory, runner: Runner) -> Backend:
    if not settings.on_gpu:
        regions = cast("dict[str, Region]", memory.regions)
        return HostBackend({(name, 0): region for name, region in regions.items()})
    return _cuda_backend(settings, memory, runner)


def _cuda_backend(settings: WorkerSettings, memory: KvMemory, runner: Runner, blocks: int = 0) -> Backend:
    from kvmesh.engine.cuda.workspaces import told_what_to_lower
    from kvmesh.engine.nvlink.cuda import BLOCKS, CudaBackend

    regions = cast("dict[str, CudaRegion]", memory.regions)
    with told_what_to_lower("what moves KV"):
        backend = CudaBackend(
            {(name, 0): region for name, region in regions.items()},
            settings.gpu,
            compute=cast("CudaRunnerFace", runner).stream,
            blocks=blocks or BLOCKS,
        )
        backend.warm()
    return backend


def _staging(settings: WorkerSettings, memory: KvMemory, staged: StagedMemory, runner: Runner) -> Staging:
    out: Backend
    into: Backend
    if settings.on_gpu:
        from kvmesh.engine.cuda.memory import PinnedRegions

        pinned = PinnedRegions(staged.regions, settings.gpu)
        memory.unpin.append(pinned.close)
        device = {name: region.address for name, region in cast("dict[str, CudaRegion]", memory.regions).items()}
        host = pinned.addresses
        bell: int = cast("Any", memory.doorbell).device_pointer
        out, into = (_cuda_backend(settings, memory, runner, STAGING_BLOCKS) for _ in range(2))
    else:
        own = cast("dict[str, Region]", memory.regions)
        device = {name: address_of(region) for name, region in own.items()}
        host = {name: address_of(region) for name, region in staged.regions.items()}
        bell = memory.doorbell.address
        out, into = HostBackend({}), HostBackend({})
    return Staging(memory.layout, staged.layout, device=device, host=host, bell=bell, out=out, into=into)
