"""Server reflection, as `grpc.reflection.v1` and `v1alpha`.

grpcio-reflection only brings v1alpha. The two are the same messages under two package names, so v1 is the same
servicer under the other name, with its descriptor made from the v1alpha one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection as reflection_impl
from grpc_reflection.v1alpha import reflection_pb2

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


def reflection_handlers(services: Iterable[str]) -> dict[str, dict[str, grpc.RpcMethodHandler[Any, Any]]]:
    """Handlers by service name for both versions, listing `services` and themselves."""
    _register_v1(descriptor_pool.Default())
    aio: Any = reflection_impl.aio  # type: ignore[attr-defined,unused-ignore]
    servicer = aio.ReflectionServicer([*services, V1, V1ALPHA])
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return {V1: {"ServerReflectionInfo": handler}, V1ALPHA: {"ServerReflectionInfo": handler}}
