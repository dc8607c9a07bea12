"""Server and channel bootstrap: TLS, mesh authentication, deadlines, health, reflection, drain, ONE status map."""

from kvmesh.rpc.auth import LOCAL_TENANT, MeshAuth, MeshToken, tenant_from, tenant_metadata
from kvmesh.rpc.channel import MeshChannel, cancelling, open_channel, open_inner_channel, raising
from kvmesh.rpc.credentials import Credentials, Policy, Principal, hash_key, new_key
from kvmesh.rpc.guard import Access
from kvmesh.rpc.limits import Deadline, RequestLimits
from kvmesh.rpc.server import RpcServer
from kvmesh.rpc.service import Service, ServiceContext, run_service, serve, write_ready_file
from kvmesh.rpc.status import FrameError, from_frame, from_rpc_error, http_status, to_frame, to_status_details
from kvmesh.rpc.tasks import BackgroundTasks, cancel_and_wait

__all__ = [
    "LOCAL_TENANT",
    "Access",
    "BackgroundTasks",
    "Credentials",
    "Deadline",
    "FrameError",
    "MeshAuth",
    "MeshChannel",
    "MeshToken",
    "Policy",
    "Principal",
    "RequestLimits",
    "RpcServer",
    "Service",
    "ServiceContext",
    "cancel_and_wait",
    "cancelling",
    "from_frame",
    "from_rpc_error",
    "hash_key",
    "http_status",
    "new_key",
    "open_channel",
    "open_inner_channel",
    "raising",
    "run_service",
    "serve",
    "tenant_from",
    "tenant_metadata",
    "to_frame",
    "to_status_details",
    "write_ready_file",
]
