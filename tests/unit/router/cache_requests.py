"""Every way in which one field of a request can differ, found by walking the protos."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from kvmesh.proto.v1 import inference_pb2, router_pb2
from router_helpers import chat, route_request

Change = Callable[[router_pb2.RouteRequest], None]


def base() -> router_pb2.RouteRequest:
    """A request with every field of its sampling set, so that each can change and be absent."""
    return route_request(
        cache_salt="s",
        user="u",
        session_id="session",
        prompt_digest=bytes(range(16)),
        prompt_tokens=12,
        cache=inference_pb2.CACHE_MODE_SEMANTIC,
        messages=[chat("system", "Be brief."), chat("user", "Hi"), chat("assistant", "Hello"), chat("user", "Who?")],
        sampling=inference_pb2.SamplingParams(
            temperature=0.5,
            top_k=5,
            top_p=0.9,
            min_p=0.1,
            repetition_penalty=1.1,
            frequency_penalty=0.2,
            presence_penalty=0.3,
            logit_bias={1: 0.5, 2: -1.0},
            seed=3,
            max_tokens=9,
            min_tokens=1,
            ignore_eos=False,
            stop_token_ids=[4],
            stop=["x"],
            n=1,
            best_of=1,
        ),
    )


def every_change() -> list[tuple[str, Change]]:
    """(path, change) for each field of `RouteRequest` and of what it holds: another value, absence, one more."""
    return list(_changes(router_pb2.RouteRequest.DESCRIPTOR, base(), "", lambda request: request))


def _changes(
    descriptor: Descriptor, value: Any, path: str, reach: Callable[[router_pb2.RouteRequest], Any]
) -> Iterator[tuple[str, Change]]:
    for field in descriptor.fields:
        name = f"{path}{field.name}"
        there = _is_set(value, field)
        if there:
            yield f"{name} absent", _absent(field, reach)
        if not there or field.message_type is None or field.is_repeated:
            yield f"{name} other", _other(field, reach)
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        if not field.is_repeated:
            yield from _changes(
                field.message_type, getattr(value, field.name), f"{name}.", lambda r, f=field: getattr(reach(r), f.name)
            )
            continue
        for index, item in enumerate(getattr(value, field.name)):
            yield (
                f"{name}[{index}] gone",
                lambda r, f=field, i=index: getattr(reach(r), f.name).__delitem__(i),
            )
            yield from _changes(
                field.message_type,
                item,
                f"{name}[{index}].",
                lambda r, f=field, i=index: getattr(reach(r), f.name)[i],
            )


def _is_set(value: Message, field: FieldDescriptor) -> bool:
    return any(name == field for name, _ in value.ListFields())


def _absent(field: FieldDescriptor, reach: Callable[[router_pb2.RouteRequest], Any]) -> Change:
    return lambda request: reach(request).ClearField(field.name)


def _other(field: FieldDescriptor, reach: Callable[[router_pb2.RouteRequest], Any]) -> Change:
    def change(request: router_pb2.RouteRequest) -> None:
        message = reach(request)
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            value[next(iter(value), 1)] = 0.75
        elif field.message_type is not None and field.is_repeated:
            value.add()
        elif field.message_type is not None:
            # Empty, but there. Where it is there already its fields are changed one by one.
            value.SetInParent()
        elif field.is_repeated:
            value.append(_another(field, value[0] if value else None))
        else:
            setattr(message, field.name, _another(field, value))

    return change


def _another(field: FieldDescriptor, value: Any) -> Any:
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return not value
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        if field.type == FieldDescriptor.TYPE_BYTES:
            return bytes([(value or b"\0")[0] ^ 1]) + (value or b"")[1:]
        return (value or "") + "x"
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return inference_pb2.CACHE_MODE_EXACT
    return (value or 0) + 1
