"""The operators' face of the router: caches, explanations, verdicts on classes."""

from __future__ import annotations

from kvmesh.errors import InvalidArgument
from kvmesh.proto.v1 import router_admin_pb2, router_admin_pb2_grpc
from kvmesh.rpc.auth import ServicerContext
from services.router.cache.answers import AnswerCache
from services.router.explain import to_proto
from services.router.routing import Routing


class RouterAdminServicer(router_admin_pb2_grpc.RouterAdminServicer):
    """See router_admin.proto. `texts`: whether explanations show remembered questions."""

    def __init__(self, router_id: str, cache: AnswerCache, routing: Routing, *, texts: bool) -> None:
        self._router_id = router_id
        self._cache = cache
        self._routing = routing
        self._texts = texts

    async def CacheStats(
        self, request: router_admin_pb2.CacheStatsRequest, context: ServicerContext
    ) -> router_admin_pb2.CacheStatsResponse:
        """See router_admin.proto."""
        shadows = self._routing.shadows
        rate, low, high = shadows.estimate()
        return router_admin_pb2.CacheStatsResponse(
            router_id=self._router_id,
            status=self._cache.status(),
            lookups=self._cache.lookups,
            refusals=self._cache.refusals,
            shadows=shadows.judged,
            shadows_wrong=shadows.wrong,
            shadows_untold=shadows.untold,
            false_hit_rate=rate,
            false_hit_low=low,
            false_hit_high=high,
            tenants=await self._cache.tenant_stats(),
        )

    async def CachePurge(
        self, request: router_admin_pb2.CachePurgeRequest, context: ServicerContext
    ) -> router_admin_pb2.CachePurgeResponse:
        """See router_admin.proto."""
        purged = await self._cache.purge(
            purge_id=request.purge_id,
            tenant=request.tenant,
            model=request.model,
            revision=request.revision,
            everything=request.all,
        )
        return router_admin_pb2.CachePurgeResponse(purged=purged, epoch=self._cache.epoch)

    async def Explain(
        self, request: router_admin_pb2.ExplainRequest, context: ServicerContext
    ) -> router_admin_pb2.ExplainResponse:
        """See router_admin.proto."""
        trace = self._routing.traces.get(_id(request.request_id))
        return to_proto(trace, self._router_id, texts=self._texts)

    async def Feedback(
        self, request: router_admin_pb2.FeedbackRequest, context: ServicerContext
    ) -> router_admin_pb2.FeedbackResponse:
        """See router_admin.proto."""
        trace = self._routing.traces.get(_id(request.request_id))
        self._routing.feedback.verdict(trace.tenant, trace.request_id, request.good)
        return router_admin_pb2.FeedbackResponse()


def _id(request_id: str) -> str:
    if not request_id:
        raise InvalidArgument("request_id is required", details={"field": "request_id"})
    return request_id
