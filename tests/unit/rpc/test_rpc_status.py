"""The error table: every class has a row, survives the wire, and nothing else gets through."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from kvmesh import errors
from kvmesh.errors import KvmeshError
from kvmesh.rpc import raising, status
from rpc_echo import Text


def subclasses(root: type[KvmeshError]) -> list[type[KvmeshError]]:
    return [found for sub in root.__subclasses__() for found in [sub, *subclasses(sub)]]


ALL = [cls for cls in subclasses(KvmeshError) if cls.__module__ == errors.__name__]


def unpack(proto: status_pb2.Status, kind: type) -> list:
    found = []
    for packed in proto.details:
        message = kind()
        if packed.Unpack(message):
            found.append(message)
    return found


def test_there_are_errors_to_check() -> None:
    assert len(ALL) >= 14


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_every_class_has_its_own_row_and_reason(cls: type[KvmeshError]) -> None:
    assert cls in status.TABLE
    assert [other for other in ALL if other.reason == cls.reason] == [cls]


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
async def test_round_trip_over_a_real_server(cls: type[KvmeshError], mesh) -> None:
    async def fail(request, context):
        raise cls("what happened: ü ✓", retry_after=2.5, details={"model": "m", "field": "prompt"})

    async def fail_late(request, context):
        yield Text(value="first")
        raise cls("later", details={"k": "v"})

    server = await mesh.serve(unary=fail, stream=fail_late)
    echo = mesh.echo(server)
    with pytest.raises(grpc.aio.AioRpcError) as raw:
        await echo.unary(Text())
    assert raw.value.code() is status.TABLE[cls].code
    with pytest.raises(KvmeshError) as got:
        with raising():
            await echo.unary(Text())
    assert type(got.value) is cls
    assert got.value.message == "what happened: ü ✓"
    assert got.value.details == {"model": "m", "field": "prompt"}
    assert got.value.retry_after == (2.5 if cls is errors.Overloaded else None)

    received = []

    async def read() -> None:
        async for message in echo.stream(Text(), timeout=60):
            received.append(message.value)

    with pytest.raises(cls) as late, raising():
        await read()
    assert received == ["first"]
    assert late.value.details == {"k": "v"}


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_details_are_the_documented_ones(cls: type[KvmeshError]) -> None:
    proto = status.to_status_details(cls("m", retry_after=3, details={"field": "n"}))
    (info,) = unpack(proto, error_details_pb2.ErrorInfo)
    assert (info.reason, info.domain, dict(info.metadata)) == (cls.reason, "kvmesh.dev", {"field": "n"})
    retry = unpack(proto, error_details_pb2.RetryInfo)
    assert bool(retry) == (cls is errors.Overloaded)
    violations = unpack(proto, error_details_pb2.BadRequest)
    assert bool(violations) == (cls is errors.InvalidArgument)
    if violations:
        assert violations[0].field_violations[0].field == "n"


def test_overload_always_says_when_to_come_back() -> None:
    for given_s, expected in ((None, 1.0), (-5.0, 0.0), (1e9, 3600.0)):
        exc = errors.Overloaded("full", retry_after=given_s)
        assert status.from_status_details(status.to_status_details(exc)).retry_after == expected


def test_http_statuses_that_clients_know() -> None:
    expected = {
        errors.Overloaded: 429,
        errors.BudgetExceeded: 429,
        errors.Unavailable: 503,
        errors.WorkerLost: 503,
        errors.DeadlineExceeded: 504,
        errors.Cancelled: 499,
        errors.InvalidArgument: 400,
        errors.Unauthenticated: 401,
        errors.PermissionDenied: 403,
    }
    assert {cls: status.http_status(cls("x")) for cls in expected} == expected


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_frame_round_trip(cls: type[KvmeshError]) -> None:
    frame = status.to_frame(cls("text"))
    back = status.from_frame(*frame)
    assert type(back) is cls
    assert back.message == "text"
    assert frame.retryable == status.is_retryable(back) == status.TABLE[cls].retryable


def test_a_foreign_exception_shows_nothing_of_itself() -> None:
    frame = status.to_frame(KeyError("/etc/secret"))
    assert frame.reason == "INTERNAL"
    assert "secret" not in frame.message


def test_unknown_reasons_fall_back_on_code_and_flag() -> None:
    assert type(status.from_frame(14, "NEWER_THAN_US", "m", True)) is errors.Unavailable
    assert type(status.from_frame(8, "NEWER_THAN_US", "m", True)) is errors.Overloaded
    assert type(status.from_frame(8, "NEWER_THAN_US", "m", False)) is errors.TooLarge
    assert type(status.from_frame(13, "NEWER_THAN_US", "m", True)) is errors.Unavailable
    assert type(status.from_frame(3, "WORKER_LOST", "m", False)) is errors.InvalidArgument
    assert type(status.from_frame(-7, "", "m", False)) is errors.Internal


def test_a_subclass_elsewhere_takes_its_parents_row() -> None:
    class Narrow(errors.WorkerLost):
        pass

    assert status.grpc_code(Narrow("x")) is grpc.StatusCode.UNAVAILABLE


@given(
    message=st.text(max_size=5000),
    details=st.dictionaries(st.text(max_size=400), st.text(max_size=4000), max_size=40),
    cls=st.sampled_from(ALL),
)
def test_any_text_fits_into_trailing_metadata(message: str, details: dict[str, str], cls: type[KvmeshError]) -> None:
    exc = cls(message, details=details)
    proto = status.to_status_details(exc)
    wire = len(proto.SerializeToString()) * 4 / 3 + 3 * len(proto.message.encode())
    assert wire < 7000
    back = status.from_status_details(status_pb2.Status.FromString(proto.SerializeToString()))
    assert type(back) is cls
    assert back.message == status.sentence(message)


def test_a_message_is_one_bounded_line_whatever_it_quotes() -> None:
    """The same outside and inside of frames: names of a request may be control characters, or very long."""
    error = errors.NotFound("no model 'a\r\nb\0\x1b[31m\ud800\u2028' " + "é🎉" * 1000)
    for told in (status.to_status_details(error).message, status.to_frame(error).message):
        assert told.startswith("no model 'a  b??[31m? ' é🎉é"), told
        assert len(told.encode()) <= status.MAX_MESSAGE_BYTES
        assert told.isprintable()
    assert status.sentence("né 東 🎉: [0, 1]") == "né 東 🎉: [0, 1]"


@given(st.binary(max_size=200), st.sampled_from([c for c in grpc.StatusCode if c is not grpc.StatusCode.OK]))
def test_any_bytes_as_details_still_give_an_error(raw: bytes, code: grpc.StatusCode) -> None:
    exc = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata((status.DETAILS_KEY, raw)), "text", "")
    back = status.from_rpc_error(exc)
    assert isinstance(back, KvmeshError)


def test_lone_surrogates_do_not_break_the_mapping() -> None:
    assert status.to_status_details(errors.NotFound("bad \ud800 text")).message == "bad ? text"
