"""Server reflection, as `grpc.reflection.v1` and `v1alpha`.

grpcio-reflection only brings v1alpha. The two are the same messages under two package names, so v1 is the same
servicer under the other name, with its descriptor made from the v1alpha one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection as reflection_impl
from grpc_reflection.v1alpha import reflection_pb2

from kvmesh.errors import DeadlineExceeded, Overloaded

MAX_STREAMS = 256
LIFE_S = 300.0

V1 = "grpc.reflection.v1.ServerReflection"
V1ALPHA = "grpc.reflection.v1alpha.ServerReflection"
_V1_FILE = "grpc/reflection/v1/reflection.proto"


def _register_v1(pool: descriptor_pool.DescriptorPool) -> None:
    """Make the v1 service resolvable, so that a client can describe what the list shows."""
    try:
        pool.FindServiceByName(V1)
    except KeyError:
        renamed = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(renamed)
        renamed.name = _V1_FILE
        renamed.package = "grpc.reflection.v1"
        for message in renamed.message_type:
            for field in message.field:
                if field.type_name:
                    field.type_name = field.type_name.replace(".grpc.reflection.v1alpha.", ".grpc.reflection.v1.")
        for service in renamed.service:
            for method in service.method:
                method.input_type = method.input_type.replace(".v1alpha.", ".v1.")
                method.output_type = method.output_type.replace(".v1alpha.", ".v1.")
        pool.AddSerializedFile(renamed.SerializeToString())


class _Bounded:
    """Reflection is open to everybody and its streams bring no deadline: bounded in number and in life."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._open = 0

    async def ServerReflectionInfo(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        if self._open >= MAX_STREAMS:
            raise Overloaded("too many reflection streams", retry_after=1.0)
        self._open += 1
        try:
            async with (
                asyncio.timeout(LIFE_S),
                contextlib.aclosing(self._inner.ServerReflectionInfo(requests, context)) as answers,
            ):
                async for answer in answers:
                    yield answer
        except TimeoutError:
            raise DeadlineExceeded(f"a reflection stream lives {LIFE_S:g} s at most") from None
        finally:
            self._open -= 1


def reflection_handlers(services: Iterable[str]) -> dict[str, dict[str, grpc.RpcMethodHandler[Any, Any]]]:
    """Handlers by service name for both versions, listing `services` and themselves."""
    _register_v1(descriptor_pool.Default())
    aio: Any = reflection_impl.aio  # type: ignore[attr-defined,unused-ignore]
    servicer = aio.ReflectionServicer([*services, V1, V1ALPHA])
    handler = grpc.stream_stream_rpc_method_handler(
        _Bounded(servicer).ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return {V1: {"ServerReflectionInfo": handler}, V1ALPHA: {"ServerReflectionInfo": handler}}
