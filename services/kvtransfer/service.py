"""The kvtransfer process: a `Sidecar` behind the KvTransfer API.

Ready while an engine is registered. Needs neither torch nor CUDA.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from kvmesh.config import KvTransferSettings
from kvmesh.errors import FailedPrecondition
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.proto.v1 import kvtransfer_pb2_grpc
from kvmesh.rpc import Access, Deadline, ServiceContext, open_inner_channel
from kvmesh.transfer.folder import is_folder, own_socket
from kvmesh.transfer.sidecar import Sidecar, SidecarOptions
from kvmesh.transfer.transports.efa import EfaOptions
from kvmesh.transfer.transports.verbs import VerbsOptions


class KvTransferServicer(kvtransfer_pb2_grpc.KvTransferServicer):
    """The gRPC face of a sidecar."""

    def __init__(self, sidecar: Sidecar) -> None:
        self._sidecar = sidecar

    async def Peer(self, request_iterator: AsyncIterator[pb.PeerRequest], context: Any) -> None:  # type: ignore[override]
        """See the proto."""
        await self._sidecar.incoming.serve(request_iterator, context.write)

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        """See the proto."""
        return self._sidecar.status()


class KvTransferService:
    """Life of the process around the sidecar."""

    def __init__(self, context: ServiceContext[KvTransferSettings], sidecar: Sidecar) -> None:
        self._context = context
        self._sidecar = sidecar

    async def started(self) -> None:
        """The control address is known: let an engine in."""
        self._sidecar.control_address = self._context.server.address
        await self._sidecar.listen()
        self._context.ready_info["engine_socket"] = str(self._sidecar.options.engine_socket)
        self._context.ready_info["transports"] = list(self._sidecar.transports)

    async def drain(self, deadline: Deadline) -> None:
        """Let an engine that leaves too leave first, or transfers end; then tell peers and engine."""
        await self._sidecar.drain(deadline)
        await self._sidecar.close()

    async def close(self) -> None:
        """Whatever is left."""
        await self._sidecar.close()


def _advertised_host(settings: KvTransferSettings) -> str:
    """Who reaches the control API by a name reaches the data port by the same."""
    if not settings.advertise or "://" in settings.advertise or settings.advertise.startswith("unix:"):
        return ""
    return settings.advertise.rpartition(":")[0].strip("[]")


def _devices(settings: KvTransferSettings, alone: str) -> tuple[str, ...]:
    """RDMA devices of a transport that may have a setting for one alone."""
    return () if alone else tuple(settings.rdma_devices)


async def build(context: ServiceContext[KvTransferSettings]) -> KvTransferService:
    """Make the sidecar and register its API. Raises KvmeshError where it cannot run here."""
    settings = context.settings
    if settings.engine_socket is None:
        raise FailedPrecondition("--engine-socket is required: the Unix socket, or folder, where the engine registers")
    options = SidecarOptions(
        sidecar_id=settings.instance_name,
        engine_socket=own_socket(settings.engine_socket),
        in_folder=is_folder(settings.engine_socket),
        engine_group=settings.engine_group,
        open_channel=lambda address: open_inner_channel(address, settings, context.auth.token),
        transports=tuple(settings.transports),
        heartbeat_s=settings.heartbeat_s,
        lease_s=settings.lease_s,
        rank_join_s=settings.rank_join_s,
        max_slots=settings.max_slots,
        tcp_host=settings.tcp_listen_host,
        tcp_advertise=_advertised_host(settings),
        tcp_streams=settings.tcp_streams,
        tcp_checksums=settings.tcp_checksums,
        copy_threads=settings.copy_threads,
        doorbell=settings.doorbell,
        fake_faults=settings.fake_faults,
        pin_threads=settings.pin_threads,
        verbs=VerbsOptions(
            device=settings.verbs_device,
            devices=_devices(settings, settings.verbs_device),
            near=settings.rdma_near_gpu,
            gid_index=settings.verbs_gid_index,
            qps=settings.verbs_qps,
            polling=settings.verbs_polling,
        ),
        efa=EfaOptions(
            device=settings.efa_device,
            devices=_devices(settings, settings.efa_device),
            near=settings.rdma_near_gpu,
            polling=settings.efa_polling,
        ),
    )
    sidecar = Sidecar(options, on_engine=context.server.set_ready)
    await sidecar.start()
    context.server.add(
        kvtransfer_pb2_grpc.add_KvTransferServicer_to_server,
        KvTransferServicer(sidecar),
        access=Access.INNER,
        # Links are refused by the sidecar itself, once it has no engine to serve any more.
        while_draining=("GetStatus", "Peer"),
        long_lived=("Peer",),
    )
    return KvTransferService(context, sidecar)
