"""Whether this worker writes into its peers by itself (transport nvlink), and with what."""

from __future__ import annotations

from kvmesh.config import WorkerSettings
from kvmesh.engine.nvlink.host import HostBackend
from kvmesh.engine.nvlink.poster import NvlinkPoster
from kvmesh.engine.worker.memory import KvMemory
from kvmesh.errors import InvalidArgument


def make_poster(settings: WorkerSettings, memory: KvMemory) -> NvlinkPoster | None:
    """None where the sidecar is to move everything. Raises InvalidArgument for settings that do not go together.

    Memory of a GPU is `kvmesh.engine.nvlink.cuda`'s; no worker has any yet.
    """
    if settings.nvlink == "off" or settings.sidecar_socket is None:
        return None
    if memory.layout.tp > 1:
        raise InvalidArgument("nvlink: ranks in processes of their own cannot write by themselves yet: tp must be 1")
    return NvlinkPoster(memory.layout, HostBackend({(name, 0): region for name, region in memory.regions.items()}))
