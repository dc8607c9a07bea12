"""A tiny service for tests: StringValue in and out, behaviours given as functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.wrappers_pb2 import StringValue

from kvmesh.rpc import Access, MeshChannel, RpcServer

SERVICE = "test.v1.Echo"
Text = StringValue


def add_echo(
    server: RpcServer,
    access: Access = Access.INNER,
    *,
    unary: Callable[..., Any] | None = None,
    stream: Callable[..., Any] | None = None,
    client_stream: Callable[..., Any] | None = None,
    bidi: Callable[..., Any] | None = None,
    name: str = SERVICE,
    **policy: Any,
) -> None:
    """Register the behaviours given as methods Unary, Stream, ClientStream and Bidi."""
    coders = {"request_deserializer": Text.FromString, "response_serializer": Text.SerializeToString}
    made = {
        "Unary": unary and grpc.unary_unary_rpc_method_handler(unary, **coders),
        "Stream": stream and grpc.unary_stream_rpc_method_handler(stream, **coders),
        "ClientStream": client_stream and grpc.stream_unary_rpc_method_handler(client_stream, **coders),
        "Bidi": bidi and grpc.stream_stream_rpc_method_handler(bidi, **coders),
    }
    handlers = {key: value for key, value in made.items() if value}
    server.add(lambda _, target: target.add_registered_method_handlers(name, handlers), None, access=access, **policy)


class Echo:
    """Client side of the same methods."""

    def __init__(self, channel: MeshChannel, name: str = SERVICE) -> None:
        coders = {"request_serializer": Text.SerializeToString, "response_deserializer": Text.FromString}
        self.unary = channel.unary_unary(f"/{name}/Unary", **coders)
        self.stream = channel.unary_stream(f"/{name}/Stream", **coders)
        self.client_stream = channel.stream_unary(f"/{name}/ClientStream", **coders)
        self.bidi = channel.stream_stream(f"/{name}/Bidi", **coders)
        self.raw = channel.unary_unary(f"/{name}/Unary")
