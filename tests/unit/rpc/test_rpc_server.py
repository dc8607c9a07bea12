"""A real server on loopback: errors, limits, deadlines, health, reflection, cancellation."""

from __future__ import annotations

import asyncio
import logging

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from kvmesh import errors
from kvmesh.config import RouterSettings, ServiceSettings
from kvmesh.proto.v1 import router_pb2_grpc
from kvmesh.rpc import Access, RpcServer, cancelling, raising, reflection
from kvmesh.telemetry import metrics, names
from rpc_echo import SERVICE, Echo, Text, add_echo


async def upper(request, context):
    return Text(value=request.value.upper())


async def test_all_four_shapes_work(mesh) -> None:
    async def count(request, context):
        for index in range(3):
            yield Text(value=f"{request.value}{index}")

    async def join(requests, context):
        return Text(value="".join([r.value async for r in requests]))

    async def mirror(requests, context):
        async for request in requests:
            yield request

    async def ask():
        for part in ("a", "b"):
            yield Text(value=part)

    server = await mesh.serve(unary=upper, stream=count, client_stream=join, bidi=mirror)
    echo = mesh.echo(server)
    assert (await echo.unary(Text(value="x"))).value == "X"
    assert [m.value async for m in echo.stream(Text(value="n"))] == ["n0", "n1", "n2"]
    assert (await echo.client_stream(ask())).value == "ab"
    assert [m.value async for m in echo.bidi(ask())] == ["a", "b"]


async def test_a_handler_may_write_to_the_context_itself(mesh) -> None:
    async def write(request, context):
        await context.write(Text(value="one"))
        await context.write(Text(value="two"))

    server = await mesh.serve(stream=write)
    assert [m.value async for m in mesh.echo(server).stream(Text())] == ["one", "two"]


def test_synchronous_handlers_are_refused() -> None:
    async def check() -> None:
        server = RpcServer(ServiceSettings())

        def blocking(request, context):
            return Text()

        def generator(request, context):
            yield Text()

        with pytest.raises(TypeError, match="Unary"):
            add_echo(server, unary=blocking)
        with pytest.raises(TypeError, match="Stream"):
            add_echo(server, stream=generator)
        await server.close()

    asyncio.run(check())


async def test_unexpected_errors_are_generic_outside_and_logged_inside(mesh, caplog) -> None:
    async def boom(request, context):
        raise ValueError("password=hunter2 in /srv/app.py")

    async def wrong_type(request, context):
        return "not a message"

    server = await mesh.serve(unary=boom)
    with caplog.at_level(logging.ERROR), pytest.raises(grpc.aio.AioRpcError) as got:
        await mesh.echo(server).unary(Text())
    assert got.value.code() is grpc.StatusCode.INTERNAL
    assert got.value.details() == "internal error"
    assert "hunter2" not in str(got.value.trailing_metadata())
    assert any(record.exc_info and "hunter2" in str(record.exc_info[1]) for record in caplog.records)

    other = await mesh.serve(unary=wrong_type)
    with pytest.raises(errors.Internal, match=r"^internal error$"), raising():
        await mesh.echo(other).unary(Text())


async def test_aborts_of_a_handler_keep_their_status(mesh) -> None:
    async def abort(request, context):
        await context.abort(grpc.StatusCode.ALREADY_EXISTS, "there")

    server = await mesh.serve(unary=abort)
    before = metrics.value(names.RPC_HANDLED, method=f"{SERVICE}/Unary", code="ALREADY_EXISTS")
    with pytest.raises(grpc.aio.AioRpcError) as got:
        await mesh.echo(server).unary(Text())
    assert (got.value.code(), got.value.details()) == (grpc.StatusCode.ALREADY_EXISTS, "there")
    await asyncio.wait_for(server._state.idle.wait(), 60)
    assert metrics.value(names.RPC_HANDLED, method=f"{SERVICE}/Unary", code="ALREADY_EXISTS") == before + 1


async def test_oversize_messages_are_refused_and_the_server_goes_on(mesh) -> None:
    async def big(request, context):
        return Text(value="y" * 20_000 if request.value == "big" else "ok")

    server = await mesh.serve(unary=big, settings={"max_message_bytes": 8192})
    echo = mesh.echo(server)
    with pytest.raises(errors.TooLarge) as got, raising():
        await echo.unary(Text(value="x" * 20_000))
    assert got.value.retry_after is None
    with pytest.raises(errors.TooLarge), raising():
        await echo.unary(Text(value="big"))
    assert (await echo.unary(Text(value="small"))).value == "ok"


async def test_messages_that_do_not_parse_are_the_callers_fault(mesh) -> None:
    async def swallow(requests, context):
        return Text(value="".join([r.value async for r in requests]))

    server = await mesh.serve(unary=upper, client_stream=swallow)
    channel = mesh.channel(server)
    bad_utf8 = b"\x0a\x02\xff\xfe"
    for payload in (bad_utf8, b"\xff\xff\xff"):
        with pytest.raises(errors.InvalidArgument, match="does not parse"), raising():
            await channel.unary_unary(f"/{SERVICE}/Unary")(payload)

    async def stream():
        yield b"\x0a\x01a"
        yield bad_utf8

    with pytest.raises(errors.InvalidArgument), raising():
        await channel.stream_unary(f"/{SERVICE}/ClientStream")(stream())
    assert (await Echo(channel).unary(Text(value="a"))).value == "A"


async def test_inner_unary_calls_need_a_deadline(mesh) -> None:
    async def remaining(request, context):
        return Text(value=str(context.time_remaining()))

    async def stream(request, context):
        yield Text(value=str(context.time_remaining()))

    server = await mesh.serve(unary=remaining, stream=stream)
    async with grpc.aio.insecure_channel(server.address) as bare:
        call = bare.unary_unary(f"/{SERVICE}/Unary", Text.SerializeToString, Text.FromString)
        with pytest.raises(errors.InvalidArgument, match="deadline"), raising():
            await call(Text())
        assert 200 < float((await call(Text(), timeout=300)).value) < 302  # gRPC rounds up
    echo = mesh.echo(server, default_timeout_s=700)
    assert 600 < float((await echo.unary(Text())).value) < 702
    assert [m.value async for m in echo.stream(Text())] == ["None"]


async def test_methods_can_be_exempt_from_the_deadline(mesh) -> None:
    server = await mesh.serve(unary=upper, no_deadline={"Unary"})
    async with grpc.aio.insecure_channel(server.address) as bare:
        call = bare.unary_unary(f"/{SERVICE}/Unary", Text.SerializeToString, Text.FromString)
        assert (await call(Text(value="q"))).value == "Q"


async def test_a_policy_for_a_method_that_is_not_there_is_an_error() -> None:
    server = RpcServer(ServiceSettings())
    with pytest.raises(ValueError, match="Typo"):
        add_echo(server, unary=upper, no_deadline={"Typo"})
    await server.close()


async def test_public_unary_calls_get_the_default_deadline(mesh) -> None:
    ended = asyncio.Event()

    async def hang(request, context):
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    server = await mesh.serve(Access.PUBLIC, unary=hang, settings={"default_deadline_s": 0.1})
    async with grpc.aio.insecure_channel(server.address) as bare:
        with pytest.raises(errors.DeadlineExceeded, match="default deadline"), raising():
            await bare.unary_unary(f"/{SERVICE}/Unary", Text.SerializeToString, Text.FromString)(Text())
    await asyncio.wait_for(ended.wait(), 60)


async def test_an_expired_deadline_cancels_the_handler(mesh) -> None:
    ended = asyncio.Event()

    async def hang(request, context):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.set()
            raise

    server = await mesh.serve(unary=hang)
    with pytest.raises(errors.DeadlineExceeded), raising():
        await mesh.echo(server).unary(Text(), timeout=1.5)
    await asyncio.wait_for(ended.wait(), 60)


@pytest.mark.parametrize("where", ["waiting", "yielded"])
async def test_a_client_that_leaves_cancels_the_generator_at_once(mesh, where: str) -> None:
    """Also when the generator is suspended at a `yield`, where a plain grpc.aio server leaves it to the collector."""
    closed = asyncio.Event()
    during: list[int] = []

    async def endless(request, context):
        try:
            while True:
                yield Text(value="x" * (100_000 if where == "yielded" else 1))
                if where == "waiting":
                    await asyncio.Event().wait()
        finally:
            # Cleanup belongs to the call: it runs while the call still counts, not whenever a collector gets to it.
            during.append(server.in_flight)
            closed.set()

    server = await mesh.serve(stream=endless)
    with cancelling(mesh.echo(server).stream(Text())) as call:
        await call.read()
        assert server.in_flight == 1
    await asyncio.wait_for(closed.wait(), 60)
    await asyncio.wait_for(server._state.idle.wait(), 60)
    assert during == [1]


async def test_cancelled_streams_leave_no_tasks(mesh) -> None:
    async def endless(request, context):
        yield Text(value="x")
        await asyncio.Event().wait()

    server = await mesh.serve(stream=endless)
    echo = mesh.echo(server)

    async def rounds(number: int) -> int:
        for _ in range(number):
            with cancelling(echo.stream(Text(), timeout=10)) as call:
                await call.read()
        await asyncio.wait_for(server._state.idle.wait(), 60)
        return len(asyncio.all_tasks())

    first = await rounds(20)
    assert await rounds(300) <= first + 2


async def test_health_is_live_at_once_and_ready_when_told(mesh) -> None:
    server = await mesh.serve(unary=upper)
    stub = health_pb2_grpc.HealthStub(mesh.channel(server))
    check = health_pb2.HealthCheckRequest
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    assert (await stub.Check(check())).status == serving
    assert (await stub.Check(check(service=SERVICE))).status == not_serving
    with pytest.raises(errors.NotFound), raising():
        await stub.Check(check(service="nobody"))

    with cancelling(stub.Watch(check(service=SERVICE), timeout=10)) as watch:
        assert (await watch.read()).status == not_serving
        server.set_ready(True)
        assert (await watch.read()).status == serving
        assert metrics.value(names.READY, service="") == 1
        server.set_ready(False)
        assert (await watch.read()).status == not_serving
    with cancelling(stub.Watch(check(service="nobody"), timeout=10)) as watch:
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    listed = (await stub.List(health_pb2.HealthListRequest())).statuses
    assert set(listed) == {"", SERVICE}


async def test_probes_need_neither_deadline_nor_token(mesh, write_token) -> None:
    server = await mesh.serve(unary=upper, settings={"mesh_token_file": write_token("t" * 32)})
    async with grpc.aio.insecure_channel(server.address) as bare:
        answer = await health_pb2_grpc.HealthStub(bare).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_and_describes(mesh, version: str) -> None:
    server = RpcServer(RouterSettings())
    mesh.servers.append(server)

    class Servicer(router_pb2_grpc.RouterServicer):
        async def Route(self, request, context): ...
        async def Report(self, request, context): ...
        async def ReportShadow(self, request, context): ...

        async def Watch(self, request, context):
            yield

        async def Attach(self, requests, context):
            yield

    server.add(router_pb2_grpc.add_RouterServicer_to_server, Servicer(), access=Access.INNER)
    await server.start()
    name = f"grpc.reflection.{version}.ServerReflection"
    call = mesh.channel(server).stream_stream(
        f"/{name}/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )

    async def ask(**kwargs):
        async def requests():
            yield reflection_pb2.ServerReflectionRequest(**kwargs)

        answers = [answer async for answer in call(requests(), timeout=60)]
        assert len(answers) == 1
        return answers.pop()

    listed = {s.name for s in (await ask(list_services="")).list_services_response.service}
    assert {"kvmesh.v1.Router", "grpc.health.v1.Health", name} <= listed
    for symbol in ("kvmesh.v1.Router", name):
        files = (await ask(file_containing_symbol=symbol)).file_descriptor_response.file_descriptor_proto
        parsed = [descriptor_pb2.FileDescriptorProto.FromString(raw) for raw in files]
        assert any(f"{f.package}.{s.name}" == symbol for f in parsed for s in f.service)


async def test_a_taken_port_is_a_clear_error(mesh) -> None:
    first = await mesh.serve(unary=upper)
    second = RpcServer(ServiceSettings(listen=first.address))
    add_echo(second, unary=upper)
    with pytest.raises(errors.FailedPrecondition, match=f"cannot listen on {first.address}"):
        await second.start()
    await asyncio.wait_for(second.close(), 60)
    assert (await mesh.echo(first).unary(Text(value="a"))).value == "A"


async def test_unix_sockets(mesh, tmp_path) -> None:
    server = await mesh.serve(unary=upper, settings={"listen": f"unix:{tmp_path}/s"})
    assert server.address == f"unix:{tmp_path}/s"
    assert (await mesh.echo(server).unary(Text(value="a"))).value == "A"


async def test_unknown_methods_are_unimplemented(mesh) -> None:
    server = await mesh.serve(unary=upper)
    with pytest.raises(grpc.aio.AioRpcError) as got:
        await mesh.channel(server).unary_unary("/test.v1.Echo/Nope")(b"")
    assert got.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_the_advertised_address_is_reachable_by_others(mesh) -> None:
    server = await mesh.serve(unary=upper, settings={"advertise": "gateway.example:7000"})
    assert server.address == "gateway.example:7000"


def reflect(channel):
    """A reflection stream that has answered once and stays open."""
    return channel.stream_stream(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )(timeout=60)


async def test_reflection_streams_are_bounded_in_number(mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody may open one, without a deadline: they must not pile up."""
    monkeypatch.setattr(reflection, "MAX_STREAMS", 1)
    channel = mesh.channel(await mesh.serve())
    listing = reflection_pb2.ServerReflectionRequest(list_services="")
    first = reflect(channel)
    await first.write(listing)
    assert (await first.read()).HasField("list_services_response")
    second = reflect(channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await second.read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await first.done_writing()
    assert await first.read() is grpc.aio.EOF
    third = reflect(channel)
    await third.write(listing)
    assert (await third.read()).HasField("list_services_response")
    third.cancel()


async def test_an_idle_reflection_stream_ends(mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reflection, "LIFE_S", 0.1)
    call = reflect(mesh.channel(await mesh.serve()))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "lives" in (caught.value.details() or "")
