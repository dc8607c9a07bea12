#!/usr/bin/env -S python3 -IS
"""One health check by `grpc.health.v1`, for container probes: `kvmesh-probe ADDRESS [SERVICE] [--timeout-s N]`.

Exit status 0 for SERVING, 1 for anything else, 2 for a wrong command line. A probe runs all day in every container, and
importing gRPC alone takes a third of a second: so this file needs nothing but the standard library, not even `site`,
and speaks the little HTTP/2 that one call takes (RFC 9113; header fields as literals, RFC 7541 §6.2.2).

TLS is used when a variable that ends in TLS__CERT or TLS__CA says that the service does, with its certificate shown.
The peer is verified unless the address is a loopback one and KVMESH_TLS_SERVER_NAME is not set: nothing secret is sent,
and few certificates name 127.0.0.1.
"""

import os
import socket
import struct
import sys
import time

USAGE = "usage: kvmesh-probe HOST:PORT|unix:PATH [SERVICE] [--timeout-s SECONDS]"
PATH = b"/grpc.health.v1.Health/Check"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
END_STREAM, ACK, END_HEADERS = 1, 1, 4
STREAM = 1
STATUSES = ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")
# A health answer is a few dozen bytes.
MAX_FRAME_BYTES = 1 << 14
MAX_ANSWER_BYTES = 1 << 16


class ProbeError(Exception):
    """Why there is no answer."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One HTTP/2 frame."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def literal(name: bytes, value: bytes) -> bytes:
    """A header field that no table holds; `name` is an index's byte or bytes, or a literal name behind a zero byte."""
    assert len(value) < 127
    return name + bytes([len(value)]) + value


def request(service: str, authority: str, tls: bool, timeout_s: float) -> bytes:
    """What a client sends: preface, settings, and the call."""
    name = service.encode()
    if len(name) > 100:
        raise ProbeError("the service's name is too long")
    fields = b"\x83" + (b"\x87" if tls else b"\x86")
    fields += literal(b"\x04", PATH) + literal(b"\x01", authority.encode()[:100])
    fields += literal(b"\x0f\x10", b"application/grpc") + literal(b"\x00\x02te", b"trailers")
    fields += literal(b"\x00\x0cgrpc-timeout", b"%dm" % max(1, int(timeout_s * 1000)))
    message = b"\x0a" + bytes([len(name)]) + name if name else b""
    body = b"\x00" + struct.pack(">I", len(message)) + message
    return (
        PREFACE
        + frame(SETTINGS, 0, 0)
        + frame(HEADERS, END_HEADERS, STREAM, fields)
        + frame(DATA, END_STREAM, STREAM, body)
    )


class Reader:
    """Bytes of a connection, with one deadline (a reading of `time.monotonic`) for all of them."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline
        self._total = 0

    def exactly(self, count: int) -> bytes:
        out = b""
        while len(out) < count:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise ProbeError("no answer in time")
            self._connection.settimeout(left)
            piece = self._connection.recv(count - len(out))
            if not piece:
                raise ProbeError("the connection was closed")
            out += piece
        self._total += count
        if self._total > MAX_ANSWER_BYTES:
            raise ProbeError("the answer is too long")
        return out

    def frame(self) -> tuple[int, int, int, bytes]:
        """Kind, flags, stream and payload of the next frame."""
        head = self.exactly(9)
        length = int.from_bytes(head[:3], "big")
        if length > MAX_FRAME_BYTES:
            raise ProbeError("this is not HTTP/2" if head[:4] == b"HTTP" else "a frame is too long")
        return head[3], head[4], int.from_bytes(head[5:9], "big") & 0x7FFFFFFF, self.exactly(length)


def answer(connection: socket.socket, deadline: float) -> bytes:
    """The data of the call's stream, until it ends."""
    reader, data = Reader(connection, deadline), b""
    while True:
        kind, flags, stream, payload = reader.frame()
        if kind in (SETTINGS, PING) and not flags & ACK:
            connection.sendall(frame(kind, ACK, 0, payload if kind == PING else b""))
        elif kind == GOAWAY:
            raise ProbeError("the server is going away")
        elif stream == STREAM and kind == RST_STREAM:
            raise ProbeError("the call was reset")
        elif stream == STREAM and kind == DATA:
            padded = flags & 8
            data += payload[1 : len(payload) - payload[0]] if padded and payload else payload
            if flags & END_STREAM:
                return data
        elif stream == STREAM and kind == HEADERS and flags & END_STREAM:
            return data


def status(data: bytes) -> str:
    """Name of the status in the call's data; no message at all is an error of the call."""
    if len(data) < 5:
        raise ProbeError("the call failed: there is no such service, or no health")
    if data[0] or int.from_bytes(data[1:5], "big") != len(data) - 5:
        raise ProbeError("the answer is no plain message")
    message = data[5:]
    # proto3 leaves a zero out; field 1 is an enum.
    if not message:
        return STATUSES[0]
    if len(message) >= 2 and message[0] == 0x08 and message[1] < len(STATUSES):
        return STATUSES[message[1]]
    raise ProbeError("the answer is no health status")


def variable(ending: str) -> str:
    """The first non-empty variable of kvmesh with this ending, shared or a service's own."""
    for name, value in sorted(os.environ.items()):
        if value and name.startswith("KVMESH_") and name.endswith(ending):
            return value
    return ""


def connect(address: str, deadline: float) -> tuple[socket.socket, str, bool]:
    """An open connection, its authority, and whether it is TLS."""
    left = max(0.001, deadline - time.monotonic())
    if address.startswith("unix:"):
        plain = socket.socket(socket.AF_UNIX)
        plain.settimeout(left)
        plain.connect(address[5:].removeprefix("//"))
        return plain, "localhost", False
    host, colon, port = address.rpartition(":")
    host = host.strip("[]")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ProbeError(f"{address!r} is not host:port")
    plain = socket.create_connection((host, int(port)), timeout=left)
    cert, key, authorities = variable("TLS__CERT"), variable("TLS__KEY"), variable("TLS__CA")
    if not cert and not authorities:
        return plain, host, False
    import ssl

    name = os.environ.get("KVMESH_TLS_SERVER_NAME", "")
    context = ssl.create_default_context(cafile=authorities or None)
    if not name and (host == "localhost" or host.startswith("127.") or host == "::1"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if cert and key:
        context.load_cert_chain(cert, key)
    context.set_alpn_protocols(["h2"])
    return context.wrap_socket(plain, server_hostname=name or host), name or host, True


def probe(address: str, service: str = "", timeout_s: float = 1.0) -> str:
    """Name of the health status of `service` at `address`; ProbeError or OSError when there is none."""
    deadline = time.monotonic() + timeout_s
    connection, authority, tls = connect(address, deadline)
    with connection:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        connection.sendall(request(service, authority, tls, timeout_s))
        return status(answer(connection, deadline))


def main(arguments: list[str]) -> int:
    """One check from the command line."""
    given, timeout_s, rest = [], 1.0, list(arguments)
    try:
        while rest:
            argument = rest.pop(0)
            if argument in ("-h", "--help"):
                print(USAGE)
                return 0
            if argument.startswith("--timeout-s"):
                timeout_s = float(argument.partition("=")[2] if "=" in argument else rest.pop(0))
            elif argument.startswith("--"):
                raise ValueError
            else:
                given.append(argument)
        if not 1 <= len(given) <= 2 or not 0 < timeout_s <= 60:
            raise ValueError
    except (ValueError, IndexError):
        print(USAGE, file=sys.stderr)
        return 2
    try:
        found = probe(given[0], given[1] if len(given) > 1 else "", timeout_s)
    except (ProbeError, OSError) as error:
        print(f"{given[0]}: {error}", file=sys.stderr)
        return 1
    print(found)
    return 0 if found == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
