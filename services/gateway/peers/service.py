"""kvmesh.v1.GatewayPeer, on a socket of its own: the public one may be shared by processes, or be draining."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import ClassVar

from kvmesh.config import TlsSettings
from kvmesh.config.base import ServiceSettings
from kvmesh.errors import InvalidArgument, PermissionDenied
from kvmesh.proto.v1 import gateway_peer_pb2, gateway_peer_pb2_grpc
from kvmesh.rpc.auth import LOCAL_TENANT, MeshAuth, ServicerContext, tenant_from
from kvmesh.rpc.guard import Access
from kvmesh.rpc.server import RpcServer
from services.gateway import validate

SERVICE_NAME = "kvmesh.v1.GatewayPeer"
_INSTANCE_PART = re.compile(r"[^A-Za-z0-9._-]")

AbortLocal = Callable[[str, str], bool]
"""(tenant, request id) → whether it ran here."""


class PeerSettings(ServiceSettings):
    """Of the server that other gateways call."""

    service: ClassVar[str] = "gateway-peer"


class GatewayPeerServicer(gateway_peer_pb2_grpc.GatewayPeerServicer):
    """What other gateways ask of this process."""

    def __init__(self, abort: AbortLocal) -> None:
        self._abort = abort

    async def AbortLocal(
        self, request: gateway_peer_pb2.AbortLocalRequest, context: ServicerContext
    ) -> gateway_peer_pb2.AbortLocalResponse:
        """See gateway_peer.proto. The tenant must be the one that the hop speaks for."""
        tenant = request.tenant or LOCAL_TENANT
        if tenant != tenant_from(context):
            raise PermissionDenied("a gateway asks for the tenant whose call it serves")
        if not request.request_id:
            raise InvalidArgument("request_id is required", details={"field": "request_id"})
        validate.check_request_id(request.request_id)
        return gateway_peer_pb2.AbortLocalResponse(found=self._abort(tenant, request.request_id))


async def serve_peers(listen: str, settings: ServiceSettings, auth: MeshAuth, abort: AbortLocal) -> RpcServer:
    """Listen for other gateways; the caller closes it. On a Unix socket without TLS."""
    local = listen.startswith("unix:")
    own = PeerSettings(
        listen=listen,
        instance=_INSTANCE_PART.sub("-", settings.instance_name)[:128],
        drain_timeout_s=0.0,
        default_deadline_s=settings.default_deadline_s,
        keepalive_s=settings.keepalive_s,
        tls=TlsSettings() if local else settings.tls.inner,
    )
    server = RpcServer(own, auth=auth)
    server.add(
        gateway_peer_pb2_grpc.add_GatewayPeerServicer_to_server,
        GatewayPeerServicer(abort),
        access=Access.INNER,
        while_draining=["AbortLocal"],
    )
    await server.start()
    server.set_ready(True)
    return server
